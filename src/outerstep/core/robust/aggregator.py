"""`RobustAggregator`: the rules and screens of this package behind one method, for tensors in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, overload

import torch
from torch import Tensor

from ...errors import ConfigError
from ...screens import LEAST_FOR_COSINES, History, check_history, remember
from .buckets import Bucketing
from .centres import CenteredClipping, GeometricMedian
from .combining import Candidate, Screening, ScreenVerdict, combine
from .coordinates import Median, TrimmedMean
from .rule import Mean, Rule
from .selection import Krum, MultiKrum
from .streams import Tensors, TensorSpan

MIN_PEERS = 3
_ALONE = ""  # the name of a tensor that came without one

RULES: dict[str, Callable[[], Rule]] = {
    "mean": Mean,
    "trimmed_mean": TrimmedMean,
    "median": Median,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "geometric_median": GeometricMedian,
    "centered_clipping": CenteredClipping,
}


class AggregatorState(TypedDict):
    """By fragment, as text."""

    history: dict[str, list[list[float]]]
    previous: dict[str, dict[str, Tensor]]


class RobustAggregator:
    """Combines pseudo-gradients so that a minority of bad ones cannot spoil the result.

        aggregator = RobustAggregator()
        agreed = aggregator.aggregate(pseudo_gradients, worker_ids=ids, steps=steps, fragment=0)

    Before the rule it always refuses contributions with NaN or Inf, and those more than twice as long as usual
    (`screens.py`). Optionally, with five or more, it refuses those that point away from the mean of the others.
    `verdict` says which were refused in the last call, and why.

    A trim of 0.2 with 3 peers, a common setting, trims nothing: ⌊0.2·n⌋ is 0 below n = 5. Such a setting is refused
    here. By default, `trim_fraction` is a fifth and at least one, so that three peers are robust too.

    A pseudo-gradient may be one tensor, or a mapping from names to tensors. Pass mappings: screens and rules then judge
    whole contributions. Tensor by tensor, a contribution could be accepted in one and refused in the next.
    """

    def __init__(
        self,
        aggregation: str | Rule = "trimmed_mean",
        *,
        trim_fraction: float | None = None,
        min_peers: int | None = None,
        cosine_screen: bool = False,
        bucket_size: int = 1,
    ) -> None:
        """
        Args:
            aggregation: a name in `RULES`, or a rule with its own settings, like `CenteredClipping(radius=2.0)`.
            trim_fraction: of "trimmed_mean", at each end.
            min_peers: fewer contributions, including one's own, are refused. Default: 3, or what rule and screen need.
            cosine_screen: refuse contributions that point away from the mean of the others.
            bucket_size: 2 averages random pairs before the rule.
        """
        self.rule = make_rule(aggregation, trim_fraction=trim_fraction, bucket_size=bucket_size)
        self.cosine_screen = cosine_screen
        needed = max(self.rule.fewest, LEAST_FOR_COSINES if cosine_screen else 1)
        self.min_peers = max(MIN_PEERS, needed) if min_peers is None else min_peers
        if self.min_peers < 1:
            raise ConfigError(f"min_peers must be at least 1, got {self.min_peers}")
        Screening(cosine=cosine_screen).check(self.min_peers)
        self.rule.check(self.min_peers, [1.0] * self.min_peers)
        self.verdict: ScreenVerdict | None = None
        self._history: dict[str, History] = {}
        self._previous: dict[str, dict[str, Tensor]] = {}

    @overload
    def aggregate(
        self,
        pseudo_gradients: Sequence[Tensor],
        weights: Sequence[float] | None = ...,
        *,
        worker_ids: Sequence[str] | None = ...,
        steps: Sequence[int] | None = ...,
        fragment: int | str | None = ...,
        seed: str = ...,
    ) -> Tensor: ...

    @overload
    def aggregate(
        self,
        pseudo_gradients: Sequence[Mapping[str, Tensor]],
        weights: Sequence[float] | None = ...,
        *,
        worker_ids: Sequence[str] | None = ...,
        steps: Sequence[int] | None = ...,
        fragment: int | str | None = ...,
        seed: str = ...,
    ) -> dict[str, Tensor]: ...

    def aggregate(
        self,
        pseudo_gradients: Sequence[Tensor] | Sequence[Mapping[str, Tensor]],
        weights: Sequence[float] | None = None,
        *,
        worker_ids: Sequence[str] | None = None,
        steps: Sequence[int] | None = None,
        fragment: int | str | None = None,
        seed: str = "",
    ) -> Tensor | dict[str, Tensor]:
        """One pseudo-gradient out of several, fp32, on their device, in their shape.

        Args:
            weights: of each, > 0; by default equal.
            worker_ids: fix the order of the sums. Peers that all aggregate must pass them, or they end with different
                bits; by default the order of the list counts.
            steps: local steps in each; by default equally many.
            fragment: whose norms, and whose previous aggregate, to compare with and to remember. By default nothing is
                remembered, and the norm screen compares only within this round.
            seed: of the buckets; the same for all peers, different in each round.
        """
        named = [_named(each) for each in pseudo_gradients]
        count = len(named)
        if count < self.min_peers:
            raise ConfigError(
                f"{self.rule.name} was set up for at least {self.min_peers} contributions (min_peers), got {count}; "
                "wait for more, or lower min_peers"
            )
        ids = [f"{i:06d}" for i in range(count)] if worker_ids is None else list(worker_ids)
        each_weight = [1.0] * count if weights is None else list(weights)
        each_steps = [1] * count if steps is None else list(steps)
        _check_lengths(count, worker_ids=ids, weights=each_weight, steps=each_steps)
        _check_same_tensors(named, ids)
        candidates = [
            Candidate[TensorSpan](worker_id, Tensors(tensors), weight, taken)
            for worker_id, tensors, weight, taken in zip(ids, named, each_weight, each_steps, strict=True)
        ]
        like = dict(sorted(named[0].items()))  # every peer adds the tensors in this order
        made = self._combined(candidates, like, None if fragment is None else str(fragment), seed)
        return made[_ALONE] if isinstance(pseudo_gradients[0], Tensor) else made

    def _combined(
        self, candidates: Sequence[Candidate[TensorSpan]], like: Mapping[str, Tensor], fragment: str | None, seed: str
    ) -> dict[str, Tensor]:
        device = next((tensor.device for tensor in like.values()), torch.device("cpu"))
        made = {name: torch.empty(tensor.shape, dtype=torch.float32, device=device) for name, tensor in like.items()}
        history = self._history.get(fragment, ()) if fragment is not None else ()
        previous = self._previous.get(fragment) if fragment is not None else None
        self.verdict = combine(
            candidates,
            {name: tensor.numel() for name, tensor in like.items()},
            Tensors(made),
            self.rule,
            seed=seed,
            screening=Screening(history, self.cosine_screen),
            centre=None if previous is None else Tensors(previous),
            device=device,
        )
        if fragment is not None:
            self._history[fragment] = remember(history, self.verdict.rates)
            if self.rule.needs_centre:
                self._previous[fragment] = {name: tensor.clone() for name, tensor in made.items()}
        return made

    def state_dict(self) -> AggregatorState:
        """What the next round is compared with. A joining peer must get it from another, or it would refuse different
        contributions. The tensors are the live ones."""
        return {
            "history": {key: [list(accepted) for accepted in rounds] for key, rounds in self._history.items()},
            "previous": {key: dict(tensors) for key, tensors in self._previous.items()},
        }

    def load_state_dict(self, state: AggregatorState) -> None:
        """Replace everything with copies from `state`."""
        history = {key: tuple(tuple(each) for each in rounds) for key, rounds in state["history"].items()}
        check_history(history)
        self._history = history
        self._previous = {
            key: {name: tensor.clone() for name, tensor in tensors.items()}
            for key, tensors in state["previous"].items()
        }


def make_rule(
    aggregation: str | Rule,
    *,
    trim_fraction: float | None = None,
    attackers: int | None = None,
    clip_radius: float | None = None,
    iterations: int | None = None,
    bucket_size: int = 1,
) -> Rule:
    """A rule by its name and settings, with its own defaults where nothing is said."""
    if trim_fraction is not None and aggregation != "trimmed_mean":
        name = aggregation if isinstance(aggregation, str) else aggregation.name
        raise ConfigError(f"trim_fraction is for trimmed_mean, got {trim_fraction} with {name}; leave it out")
    rule: Rule
    match aggregation:
        case "trimmed_mean":
            rule = TrimmedMean(trim_fraction)
        case "krum":
            rule = Krum(attackers or 1)
        case "multi_krum":
            rule = MultiKrum(attackers or 1)
        case "geometric_median":
            rule = GeometricMedian() if iterations is None else GeometricMedian(iterations)
        case "centered_clipping":
            rule = CenteredClipping(clip_radius) if iterations is None else CenteredClipping(clip_radius, iterations)
        case str():
            if aggregation not in RULES:
                raise ConfigError(
                    f"aggregation must be one of {', '.join(RULES)}, got {aggregation!r}; outerstep.register_rule adds "
                    "one of your own"
                )
            rule = RULES[aggregation]()
        case _:
            rule = aggregation
    return Bucketing(rule, bucket_size) if bucket_size != 1 else rule


def _named(pseudo_gradient: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {_ALONE: pseudo_gradient} if isinstance(pseudo_gradient, Tensor) else pseudo_gradient


def _check_lengths(count: int, **lists: Sequence[object]) -> None:
    for name, values in lists.items():
        if len(values) != count:
            raise ConfigError(f"{name} must have one entry per pseudo-gradient ({count}), got {len(values)}")


def _check_same_tensors(named: Sequence[Mapping[str, Tensor]], ids: Sequence[str]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in named[0].items()}
    for tensors, worker_id in zip(named[1:], ids[1:], strict=True):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != expected:
            odd = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
            raise ConfigError(
                f"all pseudo-gradients must have the same tensors: {odd[0] or 'the tensor'!r} is "
                f"{expected.get(odd[0], 'missing')} in {ids[0]!r}, {shapes.get(odd[0], 'missing')} in {worker_id!r}; "
                "check them on arrival, and leave out the wrong ones"
            )
