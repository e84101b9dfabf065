"""The rounds of a trainer that has peers and no server: everybody aggregates, and everybody steps its own copy.

    Δ  = θ − l                                      core/pseudogradient.py
    g  = aggregator(everybody's Δ)                  core/robust
    θ ← the outer step from θ along g               core/state.py: the same bits on every machine
    l ← θ                                           (+ what was done since Δ was taken)

Peers that began with the same weights and aggregate the same contributions in the same order hold the same bits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.outer import OuterRule
from ..core.own_outer import outer_everywhere
from ..core.pseudogradient import adopt, carry
from ..core.robust import RobustAggregator
from ..core.state import FragmentState
from ..core.watch import norm_of, watched
from ..errors import ConfigError, ModelError, NotFinite, WorkerError
from ..observe.quantities import counted
from ..types import Watched
from .outside import OutsideWatch
from .peer_exchange import Gossip, Peer, collect
from .reload import forget_non_finite
from .replica import Replica
from .signals import deferred
from .watching import Watching, gradient_norm

log = logging.getLogger(__name__)


class AmongPeers:
    """`steps` optimizer steps were taken so far; `agreed_at` of them are in the anchor."""

    should_stop = False  # nobody is there to ask for it

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        inner_steps: int,
        outer: OuterRule,
        buffers: Literal["average", "local"],
    ) -> None:
        if isinstance(inner_steps, bool) or not isinstance(inner_steps, int) or inner_steps < 1:
            raise ConfigError(f"inner_steps must be a whole number ≥ 1, got {inner_steps!r}")
        self.inner_steps, self.outer = inner_steps, outer
        self.replica = _lone_replica(model, buffers)
        roles = {spec.name: spec.role for spec in self.replica.manifest.parameters}
        self._outer = outer_everywhere(outer, self.replica.tensors)
        self._state = FragmentState(roles, self.replica.anchors, self._outer)
        self._optimizer = optimizer
        self._watch = OutsideWatch(self.replica, optimizer)
        self._watching = Watching()
        self._steps = self._agreed_at = 0
        self._due = inner_steps  # at which step_count
        self._syncing = self._lost_sent = False
        self._sync_count = self._failed = self._outside_changes = 0

    # --- training -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """There is nobody to join. But before each step: are the weights still ours?"""
        self._watch.look()
        if self._watch.changed:
            self._start_over()

    def _start_over(self) -> None:
        """Somebody else has moved the weights: what they are now was not learned here, and is not sent."""
        log.warning(
            "the weights were changed outside train_step() (was a checkpoint loaded after the trainer was made?). They "
            "are not this trainer's learning and are not sent: it continues from the weights last agreed on, and %d "
            "local steps are dropped. Load before the trainer is made, or with load_state_dict after it; make edits of "
            "your own inside `with trainer.own_change():`",
            self.step_count,
        )
        self.replica.adopt_anchor()
        forget_non_finite(self._optimizer)
        self._agreed_at, self._due = self._steps, self.inner_steps
        self._lost_sent = True
        self._outside_changes += 1
        self._watch.changed = False
        self._watch.record(anew=True, closely=True)

    @contextmanager
    def own_change(self) -> Iterator[None]:
        self._watch.look()
        try:
            yield
        finally:
            self._watch.record(anew=True)

    def stop(self) -> None:
        """Nor to leave: the steps of the last cycle stay in the model."""
        log.info(
            "finished after %s with the peers; the model in this process holds the agreed weights and %s of its own "
            "since: outerstep.save_model(model, …) keeps it",
            counted(self._sync_count, "agreement"),
            counted(self.step_count, "step"),
        )

    def abandon(self, reason: str) -> None:
        """As above."""

    def report(self, loss: float) -> None:
        self._watching.reported(loss if math.isfinite(loss) else None, self._steps)

    def stepped(self) -> None:
        self._steps += 1
        self._watch.record()
        if self.is_due:
            self._watching.inner_grad_norm = gradient_norm(self._optimizer)

    @property
    def step_count(self) -> int:
        return self._steps - self._agreed_at

    @property
    def is_due(self) -> bool:
        return self.step_count >= self._due

    @property
    def metrics(self) -> dict[str, Any]:
        return {
            "local_step": self._steps,
            "sync_count": self._sync_count,
            "failed_syncs": self._failed,
            "outside_changes": self._outside_changes,
            **self._watching.metrics,
        }

    # --- agreeing -------------------------------------------------------------------------------------------------

    async def sync(self, aggregator: RobustAggregator, peers: Gossip | Sequence[Peer]) -> bool:
        """False: nothing has moved, and the steps are in the next pseudo-gradient."""
        if self._syncing:
            raise WorkerError("one sync at a time: await the last sync_with_peers first")
        self._syncing = True
        try:
            self.start()
            self._lost_sent = False
            sent, sent_at = self.replica.deltas(self.replica.anchors), self._steps
            offered = await collect(sent, peers)
            if len(offered) < aggregator.min_peers:
                return self._put_off(f"{len(offered)} contributions, where min_peers is {aggregator.min_peers}")
            try:
                agreed, seen = await asyncio.to_thread(self._aggregate, aggregator, offered, sent)
            except NotFinite as error:
                return self._put_off(str(error))
            if seen.pseudo_grad_norm is None:  # our own weights are not finite, nor what the optimizer made of them
                sent_at = self._steps
                forget_non_finite(self._optimizer)
            if self._lost_sent:  # it counts, but is in the local weights no more: there is nothing to take off them
                sent = {name: torch.zeros_like(delta) for name, delta in sent.items()}
            with deferred():  # half adopted, steps would count twice
                self._adopt(agreed, sent, sent_at)
        finally:
            self._syncing = False
        self._watching.adopted(0, seen, self._steps)
        return True

    def _put_off(self, why: str) -> bool:
        self._failed += 1
        self._due = self.step_count + self.inner_steps
        log.warning("not agreed: %s; %d steps are kept for the next sync", why, self.step_count)
        return False

    def _aggregate(
        self, aggregator: RobustAggregator, offered: Sequence[Mapping[str, Tensor]], sent: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Watched]:
        """In a thread of its own, so that whoever serves peers in this one goes on. What is watched is of those that
        were accepted, whatever rule made one of them."""
        agreed = aggregator.aggregate(offered, fragment=0, seed=str(self._sync_count))
        verdict = aggregator.verdict
        assert verdict is not None
        for number, why in verdict.refused.items():
            log.warning("pseudo-gradient %d of %d is refused: %s", int(number) + 1, len(offered), why)
        own, made = norm_of(sent.values()), norm_of(agreed.values())
        mean_norm = made if verdict.mean_norm is None else verdict.mean_norm
        own_norm = own if math.isfinite(own) else None
        return agreed, watched(own_norm, verdict.rates, [1.0] * len(verdict.accepted), mean_norm, made)

    @torch.no_grad()
    def _adopt(self, agreed: Mapping[str, Tensor], sent: Mapping[str, Tensor], sent_at: int) -> None:
        step, since = self._state.step(), self._steps - sent_at
        for name, anchor in self.replica.anchors.items():
            local, carries = self.replica.tensors[name], since and self._state.roles[name] == "parameter"
            before = anchor.clone() if carries else anchor
            step.block(name, anchor.view(-1), agreed[name].reshape(-1))
            if carries:  # (a statistic forgets by itself)
                carry(local, before, anchor, sent[name])
            else:
                adopt(local, anchor)
        self._agreed_at, self._due = sent_at, self.inner_steps
        self._sync_count += 1
        self._watch.record(anew=True, closely=True)

    # --- over a restart -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "agreed_at": self._agreed_at,
            "due": self._due,
            "sync_count": self._sync_count,
            "initial_weights": dict(self.replica.anchors),
            "momentum": self._outer.momentum.flat,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        held = {name: tuple(tensor.shape) for name, tensor in state["initial_weights"].items()}
        ours = {name: tuple(tensor.shape) for name, tensor in self.replica.anchors.items()}
        odd = next((name for name in sorted({*held, *ours}) if held.get(name) != ours.get(name)), None)
        if odd is not None:
            raise ModelError(
                f"the state is of another model: {odd!r} is {held.get(odd, 'missing')} in it, "
                f"{ours.get(odd, 'missing')} here; load it into the model it was saved with"
            )
        self.replica.load_anchors(state["initial_weights"])
        self._outer.momentum.load(state["momentum"])
        self._steps, self._agreed_at, self._due = state["steps"], state["agreed_at"], state["due"]
        self._sync_count, self._watching = state["sync_count"], Watching(self._steps)
        self._watch = OutsideWatch(self.replica, self._optimizer)  # over the weights that go with that state


def _lone_replica(model: nn.Module, buffers: Literal["average", "local"]) -> Replica:
    """With the anchor at the model's own weights."""
    replica = Replica(model, buffers)
    if replica.shards.sections > 1 or replica.is_data_parallel:
        raise ModelError(
            "this model is spread over several processes (FSDP, DistributedDataParallel), which are one worker "
            "together: give it a server (server_addr), or each process the whole model without the wrapper"
        )
    replica.load_anchors({name: tensor.detach() for name, tensor in replica.tensors.items()})
    return replica
