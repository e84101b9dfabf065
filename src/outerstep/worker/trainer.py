"""DiLoCoTrainer: a training loop of four calls, for people without a trainer.

trainer = DiLoCoTrainer(model, optimizer, inner_steps=500)
for batch in data:
    loss = trainer.train_step(batch)
    if trainer.should_sync():
        await trainer.sync_with_peers(aggregator, peers)

Underneath are the parts that `DiLoCoWorker` is made of (among_peers.py), or a whole one. docs/reference/trainer.md says
which defaults it has, and why those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..config import ServerlessConfig, with_named_class
from ..core.own_outer import OuterOptimizer
from ..core.robust import RobustAggregator
from ..defaults import SYNC_EVERY
from ..errors import ConfigError, WorkerError
from ..topology.update import values_hash
from .among_peers import AmongPeers
from .connect import outer_rule
from .peer_exchange import Gossip, Peer
from .replica import Replica
from .worker import DiLoCoWorker

LossFunction = Callable[[nn.Module, Any], Tensor]


class DiLoCoTrainer:
    """Trains by itself for `inner_steps`, then agrees with its peers and goes on from what was agreed.

    Among peers all begin with the same weights: build or load the model before its trainer. Those that aggregate the
    same contributions hold the same bits afterwards (`anchor_hash`).

    With `server_addr`, or a `topology` by name, a `DiLoCoWorker` exchanges inside `train_step`: `should_sync` is
    never true then, and further keywords are the worker's settings. Use it in a `with` block, or `close` it.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        inner_steps: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        *,
        nesterov: bool | None = None,
        outer_optimizer: type[OuterOptimizer] | str | None = None,
        outer_options: str | None = None,
        loss_fn: LossFunction | None = None,
        buffers: Literal["average", "local"] = "average",
        server_addr: str | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            inner_steps: H, optimizer steps between two agreements. 500; with a server, as its plan says.
            outer_lr, outer_momentum, nesterov: η 0.7, μ 0.9, True; with a server they are the server's to say.
            outer_optimizer: an `OuterOptimizer` of your own, the class or module:Class, made with `outer_options`
                ("lr=0.1 momentum=0.5").
            loss_fn: `loss_fn(model, batch)`; left out, `model(**batch).loss`.
            buffers: the model's (BatchNorm's statistics) are aggregated too, or stay each trainer's own.
        """
        self.model, self.inner_optimizer, self._loss_fn = model, inner_optimizer, loss_fn
        self._rounds: _TrainerRounds
        if server_addr is not None or "topology" in settings:
            settings |= {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "nesterov": nesterov}
            settings |= {"outer_optimizer": outer_optimizer, "outer_options": outer_options}
            worker = DiLoCoWorker(model, inner_optimizer, server_addr, inner_steps, buffers=buffers, **settings)
            self._rounds = _ByWorker(worker)
            return
        if settings:
            raise ConfigError(f"{next(iter(settings))} is a worker's setting, and needs server_addr; leave it out")
        told = with_named_class({"outer_optimizer": outer_optimizer, "outer_options": outer_options})
        outer = outer_rule(
            ServerlessConfig(outer_lr=outer_lr, outer_momentum=outer_momentum, nesterov=nesterov, **told), "among peers"
        )
        steps = SYNC_EVERY if inner_steps is None else inner_steps
        self._rounds = AmongPeers(model, inner_optimizer, inner_steps=steps, outer=outer, buffers=buffers)

    # --- the four calls -------------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> float:
        """Forward, backward, one step of the inner optimizer. Returns the loss."""
        self._rounds.start()
        if not self.model.training:
            self.model.train()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        self._rounds.report(value)
        self.inner_optimizer.step()
        self._rounds.stepped()
        self.inner_optimizer.zero_grad()
        return value

    def should_sync(self) -> bool:
        """Is it time? After a sync that came to nothing, `inner_steps` later: so peers that failed together try again
        together."""
        return self._rounds.is_due

    def compute_pseudo_gradient(self) -> dict[str, Tensor]:
        """Δ = θ − l by name, fp32: *initial minus current*, where plain SGD would put a gradient."""
        return self._rounds.replica.deltas(self._rounds.replica.anchors)

    async def sync_with_peers(self, aggregator: RobustAggregator, peers: Gossip | Sequence[Peer]) -> bool:
        """Exchange Δ, aggregate what came, take the outer step from the anchor, continue from there.

        `peers`: one object with `async gossip_round(Δ)` that returns everybody's, one's own included and in the same
        order for everybody (GradientGossip); or a list of objects with `async exchange_gradients(Δ)`. Who fails is left
        out, and logged. Steps that are taken while this is awaited are kept: they belong to the next cycle.

        False: fewer than `aggregator.min_peers` contributions came together. Then nothing has moved, and the steps so
        far go into the next sync."""
        return await self._rounds.sync(aggregator, peers)

    def _loss(self, batch: Any) -> Tensor:
        if self._loss_fn is not None:
            return self._loss_fn(self.model, batch)
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"without a loss_fn a batch must be a mapping, for model(**batch).loss; got {type(batch).__name__}: "
                "pass DiLoCoTrainer(…, loss_fn=lambda model, batch: …)"
            )
        outputs = self.model(**batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"without a loss_fn the model must return a loss, got {type(outputs).__name__} without one: put labels "
                "into the batch if it computes a loss from them, or pass DiLoCoTrainer(…, loss_fn=…)"
            )
        return loss

    def own_change(self) -> AbstractContextManager[None]:
        """`with trainer.own_change(): clip(model)` changes weights between steps on purpose: that is learning, too."""
        return self._rounds.own_change()

    # --- what it holds --------------------------------------------------------------------------------------------

    @property
    def inner_steps(self) -> int:
        return self._rounds.inner_steps

    @property
    def step_count(self) -> int:
        """Optimizer steps since the last agreement."""
        return self._rounds.step_count

    @property
    def initial_weights(self) -> dict[str, Tensor]:
        """The anchor θ by name, fp32: where this cycle began, and where the outer step begins. Not to be changed."""
        return self._rounds.replica.anchors

    @property
    def anchor_hash(self) -> str:
        """The same for all who agree."""
        return values_hash(self.initial_weights[name] for name in sorted(self.initial_weights))

    @property
    def sync_metrics(self) -> dict[str, Any]:
        """What to watch: docs/concepts/what-to-watch.md."""
        return self._rounds.metrics

    @property
    def should_stop(self) -> bool:
        """The run wants this worker to end: it has contributed and left. (With a server.)"""
        return self._rounds.should_stop

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs beside model, inner optimizer and aggregator. The tensors are the live ones."""
        return self._rounds.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first step, into a trainer whose model was loaded from the same checkpoint."""
        self._rounds.load_state_dict(state)

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """With a server: contribute the remaining steps, and leave. Among peers there is nothing to do."""
        self._rounds.stop()

    def __enter__(self) -> DiLoCoTrainer:
        self._rounds.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._rounds.stop()
        else:
            self._rounds.abandon(f"{type(error).__name__}: {error}".removesuffix(": "))


class _TrainerRounds(Protocol):
    """How a trainer comes to agreements."""

    @property
    def replica(self) -> Replica: ...
    @property
    def inner_steps(self) -> int: ...
    @property
    def step_count(self) -> int: ...
    @property
    def is_due(self) -> bool: ...
    @property
    def should_stop(self) -> bool: ...
    @property
    def metrics(self) -> dict[str, Any]: ...

    def start(self) -> None:
        """If it has not begun yet."""

    def report(self, loss: float) -> None:
        """Of the step that is about to be taken."""

    def stepped(self) -> None:
        """It was taken; its gradients are still there."""

    async def sync(self, aggregator: RobustAggregator, peers: Gossip | Sequence[Peer]) -> bool: ...
    def own_change(self) -> AbstractContextManager[None]: ...
    def stop(self) -> None: ...
    def abandon(self, reason: str) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _ByWorker:
    """A worker that is hooked into the optimizer does it all."""

    is_due = False

    def __init__(self, worker: DiLoCoWorker) -> None:
        self._worker = worker
        self.replica = worker._replica
        self.load_state_dict = worker.load_state_dict
        self.state_dict = worker.state_dict
        self.stop, self.abandon, self.own_change = worker.stop, worker.abandon, worker.own_change

    @property
    def inner_steps(self) -> int:
        return self._worker.sync_every

    @property
    def step_count(self) -> int:
        return self._worker._sync.machine.state.cycle.step if self._worker._sync is not None else 0

    @property
    def should_stop(self) -> bool:
        return self._worker.should_stop

    @property
    def metrics(self) -> dict[str, Any]:
        return {**self._worker.sync_metrics}

    def start(self) -> None:
        if self._worker._sync is None:
            self._worker.start()

    def report(self, loss: float) -> None:
        self._worker.last_loss = loss

    def stepped(self) -> None:
        """The hook knows."""

    async def sync(self, aggregator: RobustAggregator, peers: Gossip | Sequence[Peer]) -> bool:
        raise WorkerError("with server_addr the exchange takes place inside train_step; there are no peers to ask")
