"""What a peer holds of a run: the state of every fragment, how contributions are read, and what the norm screen knows.

In a run with a server, only the server holds this. Here each peer has a copy of its own. It moves the copy by the same
decided rounds with the same arithmetic, and gives it to peers that join (snapshot.py).

Every peer makes the same aggregate of a round's contributions, bit for bit:

    weights    1, or what a contribution says of itself, within a factor of the round's median
    screens    finite, norm against the last rounds; cosine by choice
    rule       the mean, or a robust one                                        core/robust/

Contributions are read in the order of their peers' ids, in blocks. The order of arrival changes nothing.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...coordination.weights import peer_weights
from ...core.gossip import NoLoCo, PairOuter
from ...core.outer import BlockOuter, OwnRule
from ...core.own_outer import outer_everywhere
from ...core.robust import Candidate, RobustAggregator, Screening, Tensors, TensorSpan, combine
from ...core.state import FragmentSnapshot, FragmentState, fp32_views
from ...core.watch import sum_of_squares, watched
from ...errors import BadFrame, ConfigError, Refused
from ...events import ContributionLeftOut, EventSink, TooFewTrained
from ...screens import History, remember
from ...statements import Offered
from ...threads import process_team
from ...types import Participant, Watched
from ...wire.frames import check_frame
from ..forms import Form, forms_of
from ..terms import check_loaded
from ..update import MeanStep, anchor_hash, cuts
from .node import DecidedRound
from .snapshot import ABSURD, most_bytes, on_host, read_snapshot, write_snapshot
from .terms import GossipTerms

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


class Contents:
    """Reads the contributions to one fragment, and checks whether they can be used. A server checks each contribution
    before it accepts it; without a server every peer checks for itself, and does not vote for NaN, absurd values or
    bytes that mean nothing."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self.codecs = {name: rule.codec for name, rule in form.rules.items()}
        self.begins = {entry.name: form.up.data_begin + entry.begin for entry in form.up.entries}
        self.sizes: Mapping[str, int] = {entry.name: math.prod(entry.shape) for entry in form.up.entries}

    def check(self, data: memoryview) -> str:
        """Why a contribution cannot be used, naming the tensor; "" if it can."""
        try:
            check_frame(data, self._form.up)
        except Refused as refusal:
            return refusal.message
        reader = self.reader(data)
        for name, numel in self.sizes.items():
            for start, stop in cuts(numel, CPU):
                wrong = self._wrong_with(reader, TensorSpan(name, start, stop))
                if wrong:
                    return f"tensor {name!r} {wrong}"
        return ""

    def _wrong_with(self, reader: Reading, block: TensorSpan) -> str:
        encoded, codec = reader.encoded(block), self.codecs[block.name]
        wrong = codec.check(encoded, block.count)
        if wrong:
            return f"cannot be decoded: {wrong}"
        values = torch.empty(block.count)
        codec.decode(encoded, values)
        norm = math.sqrt(square) if math.isfinite(square := sum_of_squares(values)) else math.inf
        if norm <= ABSURD:
            return ""
        if values.isfinite().all():
            return f"holds values of about {float(values.abs().max()):.0e}, which is absurd"
        return "holds NaN or Inf"

    def reader(self, data: memoryview) -> Reading:
        return Reading(self, torch.frombuffer(data, dtype=torch.uint8))


class Reading:
    """The values of one contribution: a `core.robust.Reader`."""

    def __init__(self, contents: Contents, data: Tensor) -> None:
        self._contents, self._data = contents, data

    def encoded(self, block: TensorSpan) -> Tensor:
        """The bytes of a block. Blocks begin at multiples of 4096 values, as the blocks of every codec do."""
        codec, first = self._contents.codecs[block.name], self._contents.begins[block.name]
        return self._data[first + codec.encoded_bytes(block.start) : first + codec.encoded_bytes(block.stop)]

    def read(self, block: TensorSpan, out: Tensor) -> None:
        self._contents.codecs[block.name].decode(self.encoded(block), out)

    def tensors(self) -> dict[str, Tensor]:
        """The whole contribution by name, flat fp32."""
        found = {name: torch.empty(numel) for name, numel in self._contents.sizes.items()}
        for name, values in found.items():
            self.read(TensorSpan(name, 0, values.numel()), values)
        return found


@dataclass(frozen=True)
class Combined:
    """The result of a round. `step`: the outer step along the aggregate, still to be taken; None: the rule needs more
    contributions, and nothing moves. `participants`: each with its weight; 0 = left out."""

    step: MeanStep | None
    participants: tuple[Participant, ...]
    watched: Watched | None = None


@dataclass(frozen=True)
class _Loaded:
    """A saved state, before the run is known."""

    versions: tuple[int, ...]
    anchors: dict[str, Tensor]
    momentum: dict[str, Tensor]
    histories: tuple[History, ...]
    centres: tuple[dict[str, Tensor], ...]


class PeerState:
    """A peer's copy of the run. Versions and hashes are the confirmed ones."""

    def __init__(self, tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor], events: EventSink) -> None:
        """`tensors`: the model's, by name; `anchors`: where the last agreed ones are, once there are any."""
        self._events = events
        self._tensors, self._anchors = tensors, anchors
        self._terms: GossipTerms | None = None
        self._outer: BlockOuter | PairOuter = PairOuter(None)
        self._aggregator = RobustAggregator()
        self.forms: list[Form] = []
        self.contents: list[Contents] = []
        self._states: list[FragmentState] = []
        self._histories: list[History] = []
        self._moving: list[bool] = []  # per fragment: anchor and momentum do not match at this moment
        self._lock = threading.Lock()  # anchors move only while `_moving`, which changes only under it
        self.loaded: _Loaded | None = None

    def prepare(self, terms: GossipTerms, own_outer: OwnRule | None = None) -> None:
        """Take the run's terms. `own_outer`: the outer step that they name, if it is a user's own."""
        self._terms, self._aggregator, loaded = terms, terms.aggregator, self.loaded
        if terms.pattern == "all":
            self._outer = outer_everywhere(replace(terms.outer, own=own_outer), self._tensors)
        else:
            noloco = NoLoCo(terms.outer_momentum, terms.outer_lr) if terms.pattern == "pairs" else None
            self._outer = PairOuter(noloco)
        self.forms = forms_of(terms.plan, terms.manifest)
        self.contents = [Contents(form) for form in self.forms]
        roles = {spec.name: spec.role for spec in terms.manifest.parameters}
        theta: Mapping[str, Tensor] = ChainMap(self._anchors, self._tensors)  # type: ignore[arg-type]  # only read
        self._states = [
            FragmentState({entry.name: roles[entry.name] for entry in form.full.entries}, theta, self._outer, index=f)
            for f, form in enumerate(self.forms)
        ]
        self._histories, self._moving = [() for _ in self.forms], [True for _ in self.forms]
        if loaded is not None:
            check_loaded(terms.plan, loaded.versions, loaded.anchors.keys())
            self._outer.momentum.load(loaded.momentum)

    @property
    def run(self) -> GossipTerms:
        assert self._terms is not None, "not joined"
        return self._terms

    def __getitem__(self, fragment: int) -> FragmentState:
        return self._states[fragment]

    @property
    def are_complete(self) -> bool:
        """Does this peer hold an anchor of every fragment?"""
        return all(state.anchor_hash for state in self._states)

    def anchor(self, fragment: int) -> dict[str, Tensor]:
        """The anchor of a fragment, in host memory."""
        return on_host({name: self._anchors[name] for name in self._states[fragment].roles})

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def found(self, fragment: int) -> FragmentSnapshot:
        """The snapshot that a run begins with: this peer's weights, or its loaded state."""
        state, values = self._states[fragment], self._tensors
        if self.loaded is not None:
            values, state.version = self.loaded.anchors, self.loaded.versions[fragment]
            self._histories[fragment] = self.loaded.histories[fragment]
            if self.loaded.centres[fragment]:
                state.remember(self.loaded.centres[fragment])
        on_this = on_host({name: values[name] for name in state.roles})
        whole = {name: value.contiguous().clone() for name, value in on_this.items()}
        return FragmentSnapshot(state.version, anchor_hash(whole.values()), whole, {}, {})

    def is_as_loaded(self, fragment: int, found: FragmentSnapshot) -> bool:
        """Is the run still where the loaded state left it?"""
        assert self.loaded is not None
        loaded = anchor_hash(self.loaded.anchors[name] for name in self._states[fragment].roles)
        return (found.version, found.anchor_hash) == (self.loaded.versions[fragment], loaded)

    def most_bytes(self, fragment: int) -> int:
        return most_bytes(self.forms[fragment])

    def wrong_with(self, fragment: int, version: int, data: memoryview) -> str:
        """Why this is not a snapshot of that version; "" if it is."""
        try:
            snapshot, _ = read_snapshot(self.forms[fragment], data, self._states[fragment].parameters)
        except BadFrame as error:
            return error.message
        return "" if snapshot.version == version else f"it is one of version {snapshot.version}"

    def read(self, fragment: int, data: memoryview) -> FragmentSnapshot:
        """Take another peer's momentum and the rest of its state. The anchor itself moves when it is adopted."""
        state = self._states[fragment]
        snapshot, history = read_snapshot(self.forms[fragment], data, state.parameters)
        self.begin_to_move(fragment)
        state.read(snapshot)
        self._histories[fragment] = history
        return snapshot

    def write(self, fragment: int) -> tuple[int, memoryview] | None:
        """A consistent snapshot of this peer's state; from any thread. None: the state is moving."""
        with self._lock:
            if self._moving[fragment]:
                return None
            snapshot = self._states[fragment].write(momentum=self.run.keeps_momentum)
            return snapshot.version, write_snapshot(self.forms[fragment], snapshot, self._histories[fragment])

    # --- moving -------------------------------------------------------------------------------------------------------

    def begin_to_move(self, fragment: int) -> FragmentState:
        with self._lock:
            self._moving[fragment] = True
        return self._states[fragment]

    def rest(self, fragment: int, version: int, digest: str) -> None:
        """The move is over: anchor and momentum are those of this version."""
        with self._lock:
            self._states[fragment].arrive(version, digest)
            self._moving[fragment] = False

    def combine(self, fragment: int, decided: DecidedRound, run_id: str, own_id: str) -> Combined:
        """Combine the contributions of one more round. Those without training have weight 0."""
        state, version, aggregator = self._states[fragment], decided.block.version, self._aggregator
        contributions = decided.contributions
        weights = peer_weights([offered for _, offered, _ in contributions], self.run.plan.weight_by)
        candidates = [
            Candidate[TensorSpan](peer_id, self.contents[fragment].reader(data), weight, offered.steps)
            for (peer_id, offered, data), weight in zip(contributions, weights, strict=True)
            if weight > 0.0
        ]
        if not _is_enough(aggregator, candidates):
            log.warning("fragment %d version %d: too few have trained for it; nothing moves", fragment, version)
            needed, rule_name = aggregator.min_peers, aggregator.rule.name
            self._events(TooFewTrained(fragment, version, len(candidates), needed, rule_name))
            return Combined(None, _participants(contributions, {}))
        layout, rule = self.forms[fragment].update, aggregator.rule
        frame = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        made = fp32_views(frame.numpy().data, layout.places, layout.data_begin)
        verdict = combine(
            candidates,
            self.contents[fragment].sizes,
            Tensors(made),
            rule,
            seed=f"{run_id}/{fragment}/{version}",
            screening=Screening(self._histories[fragment], aggregator.cosine_screen),
            centre=Tensors(state.centre) if state.centre else None,
            share=process_team().share,
        )
        for peer_id, why in verdict.refused.items():
            log.warning("fragment %d version %d: %s was left out: %s", fragment, version, peer_id, why)
            self._events(ContributionLeftOut(peer_id, fragment, version, {"why": why}))
        by_id = {c.worker_id: c for c in candidates}
        counted = {peer_id: by_id[peer_id].weight for peer_id in verdict.accepted}
        norms = [rate * math.sqrt(by_id[p].steps) for p, rate in zip(verdict.accepted, verdict.rates, strict=True)]
        made_norm = math.sqrt(sum(sum_of_squares(values.view(-1)) for values in made.values() if values.numel()))
        seen = watched(
            dict(zip(verdict.accepted, norms, strict=True)).get(own_id),
            norms,
            list(counted.values()),
            made_norm if verdict.mean_norm is None else verdict.mean_norm,
            made_norm,
        )
        self._histories[fragment] = remember(self._histories[fragment], verdict.rates)
        if rule.needs_centre:
            state.remember(made)
        step = MeanStep(frame, self.forms[fragment], state)
        return Combined(step, _participants(contributions, counted), seen)

    # --- what must not be forgotten -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "versions": [state.version for state in self._states],
            "anchors": dict(self._anchors),
            "momentum": self._outer.momentum.flat,
        }

    def rounds_dict(self) -> dict[str, Any]:
        """What screens and rule remember of earlier rounds. Pairs have neither."""
        return {
            "histories": [[list(rates) for rates in history] for history in self._histories],
            "centres": [dict(state.centre) for state in self._states],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        nothing: list[dict[str, Tensor]] = [{}] * len(state["versions"])
        self.loaded = _Loaded(
            versions=tuple(state["versions"]),
            anchors={name: value.clone() for name, value in state["anchors"].items()},
            momentum={name: value.clone() for name, value in state["momentum"].items()},
            histories=tuple(tuple(map(tuple, rounds)) for rounds in state.get("histories", nothing)),
            centres=tuple({n: v.clone() for n, v in one.items()} for one in state.get("centres", nothing)),
        )


def _is_enough(aggregator: RobustAggregator, candidates: Sequence[Candidate[TensorSpan]]) -> bool:
    if not candidates:
        return False
    try:
        aggregator.rule.check(len(candidates), [candidate.weight for candidate in candidates])
        Screening(cosine=aggregator.cosine_screen).check(len(candidates))
    except ConfigError:
        return False
    return True


def _participants(
    contributions: Sequence[tuple[str, Offered, memoryview]], counted: Mapping[str, float]
) -> tuple[Participant, ...]:
    return tuple(
        Participant(worker_id=peer_id, sequence=offered.sequence, weight=counted.get(peer_id, 0.0))
        for peer_id, offered, _ in contributions
    )
