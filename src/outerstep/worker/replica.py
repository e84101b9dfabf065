"""The local copy of the model, and the anchor it started from. If the model is sharded (FSDP2), both hold only the
rows of this process."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.manifest import BufferPolicy, describe
from ..core.pseudogradient import adopt, carry, mix, pseudo_gradient, rebase
from ..errors import ModelError
from ..topology.device import Shuttle, warm_up
from ..topology.group.sharded import Shards
from ..topology.protocol import Deltas
from ..topology.update import AnchorUpdate, cuts, values_hash
from ..types import Plan


@dataclass(frozen=True)
class AnchorBlock:
    """A range of values of one tensor, in `local`, in `anchor` (θ) and in `theta` (θ′)."""

    name: str
    start: int
    stop: int
    local: Tensor
    anchor: Tensor
    theta: Tensor

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The same range of another set of tensors, on the same device."""
        values = tensors[self.name].reshape(-1)[self.start : self.stop].view(self.theta.shape)
        return values.to(self.theta.device, non_blocking=True)


Move = Callable[[AnchorBlock], None]
NOTHING = torch.empty(0)


@dataclass(eq=False)
class Differences:
    """Anchor − local, computed block by block on demand. The weights must not change meanwhile. `_shuttle` is made for
    the first anchor that is on another device than the weights."""

    _anchors: Mapping[str, Tensor]
    _locals: Mapping[str, Tensor]
    _name: str = ""  # the tensor that `_anchor` and `_local` belong to
    _anchor: Tensor = NOTHING
    _local: Tensor = NOTHING
    _scratch: Tensor = NOTHING
    _shuttle: Shuttle | None = None

    def block(self, name: str, start: int, stop: int) -> Tensor:
        if name != self._name:  # flat views; of a tensor in another order of its dimensions (channels_last), a copy
            self._name = name
            self._anchor, self._local = self._anchors[name].view(-1), self._locals[name].detach().reshape(-1)
        local, anchor = self._local[start:stop], self._anchor[start:stop]
        if anchor.device != local.device:
            self._shuttle = self._shuttle or Shuttle()
            anchor = self._shuttle.bring(anchor, local.device)
        if self._scratch.numel() < stop - start or self._scratch.device != local.device:
            self._scratch = torch.empty(stop - start, device=local.device)
        delta = pseudo_gradient(anchor, local, self._scratch[: stop - start])
        if self._shuttle is not None:
            self._shuttle.dismiss(local.device)
        return delta

    def device(self, name: str) -> torch.device:
        return self._locals[name].device

    def home(self, name: str) -> torch.device:
        return self._anchors[name].device


class Replica:
    """The tensors that are exchanged by name (tied ones once), and their fp32 anchors: on the same device, or in host
    memory and streamed through the device block by block."""

    def __init__(
        self, model: nn.Module, buffers: BufferPolicy = "local", *, anchor: Literal["device", "host"] = "device"
    ) -> None:
        self.is_data_parallel = any(
            isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()
        )
        model = unwrapped(model)
        self.shards = Shards(1, 0, frozenset())
        self._reshard: Callable[[], None] = lambda: None
        if dist.is_available() and dist.is_initialized():
            from .shards import Locals, find_shards, is_data_parallel, reshard

            self._reshard = partial(reshard, model)
            self._reshard()  # so that the model holds the same parameters as the optimizer
            tensors, self.manifest = describe(model, buffers)
            self.shards = find_shards(model, tensors)
            self.is_data_parallel = is_data_parallel(model, self.shards)
            self.tensors: Mapping[str, Tensor] = Locals(tensors)
        else:
            tensors, self.manifest = describe(model, buffers)
            self.tensors, self.is_data_parallel = tensors, True
        self._ids = {name: id(tensor) for name, tensor in tensors.items()}
        on_meta = next((name for name, p in self.tensors.items() if p.is_meta), None)
        if on_meta is not None:
            raise ModelError(
                f"parameter {on_meta!r} is on the meta device: give the model real memory first (to_empty)"
            )
        if not self.tensors:
            raise ModelError("the model has no trainable parameters (requires_grad=True): there is nothing to exchange")
        odd = next((name for name, p in self.tensors.items() if not p.is_floating_point()), None)
        if odd is not None:
            raise ModelError(f"parameter {odd!r} has dtype {self.tensors[odd].dtype}: only floating point is exchanged")
        self.anchors: dict[str, Tensor] = {}
        self._on_host = anchor == "host"
        self._shuttle = Shuttle()
        self._statistics = {spec.name for spec in self.manifest.parameters if spec.role != "parameter"}

    def prepare(self, plan: Plan) -> None:
        """Compile what this plan needs on the model's devices."""
        warm_up((plan.codec, plan.down_codec), {tensor.device for tensor in self.tensors.values()})

    def by_id(self, facts: Mapping[str, int]) -> dict[int, int]:
        """`told` of each tensor, keyed by the `id` of the object in the model."""
        return {held: facts[name] for name, held in self._ids.items() if name in facts}

    def parameters_among(self, ids: Container[int]) -> list[str]:
        """The exchanged parameters that are one of those objects (`id`), by name."""
        return [name for name, held in self._ids.items() if held in ids and name not in self._statistics]

    def deltas(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What was learned since the anchor, as a copy on the anchor's device."""
        return {name: self._delta(name) for name in names if name in self.tensors}

    def moved_statistics_alone(self, names: Iterable[str]) -> bool:
        """Has nothing changed but running statistics (BatchNorm)? A model without statistics is not asked: there the
        norm of Δ says as much. The smallest parameters are looked at first, to find one that trains at once."""
        if not self._statistics or self.shards.sections > 1 or not self.shards.by_rows:
            return False
        learned = sorted(
            set(names) & self.tensors.keys() - self._statistics, key=lambda name: self.tensors[name].numel()
        )
        return not any(bool(self._delta(name).any()) for name in learned)

    def _delta(self, name: str) -> Tensor:
        anchor, local = self.anchors[name], self.tensors[name]
        if anchor.device == local.device:
            return pseudo_gradient(anchor, local)
        delta = torch.empty(anchor.shape, device=anchor.device, pin_memory=anchor.is_pinned())
        blocks = Differences(self.anchors, self.tensors)
        for start, stop in cuts(anchor.numel(), local.device):
            delta.view(-1)[start:stop].copy_(blocks.block(name, start, stop), non_blocking=True)
        if local.is_cuda:
            torch.cuda.current_stream(local.device).synchronize()
        return delta

    def to_send(
        self, names: Iterable[str], *, keep: bool
    ) -> tuple[Deltas | dict[str, Tensor], dict[str, Tensor] | None]:
        """What a contribution is encoded from; and a copy of it, if it is to be kept."""
        kept = self.deltas(names) if keep else None
        return (Differences(self.anchors, self.tensors) if kept is None or self._on_host else kept), kept

    # Each of these applies an anchor's update: it moves the local weights, and then the anchor, θ ← θ′. It returns
    # whether the anchor is the agreed one now.

    def adopt(self, update: AnchorUpdate) -> bool:
        """All our steps are in the agreement: local = anchor = θ′."""
        return self._apply(update, _adopt, _adopt, in_place=True)

    def rebase(self, update: AnchorUpdate) -> bool:
        """The round closed without us: local += θ′ − θ, which keeps our unsent steps."""
        return self._apply(update, lambda block: rebase(block.local, block.anchor, block.theta), _adopt)

    def carry(self, update: AnchorUpdate, sent: Mapping[str, Tensor]) -> bool:
        """Our contribution is in the agreement; the steps taken since then are kept."""
        return self._apply(update, lambda block: carry(block.local, block.anchor, block.theta, block.of(sent)), _adopt)

    def mix(self, update: AnchorUpdate, alpha: float) -> bool:
        """Our contribution is in the agreement; a share α of the steps taken since then is kept."""

        def moved(block: AnchorBlock) -> None:
            mix(block.local, block.theta, alpha)

        return self._apply(update, moved, moved, in_place=True)

    def prove(self, update: AnchorUpdate) -> bool:
        """Check that our anchor is the agreed one. Nothing moves."""
        for name in update.names:
            anchor = self._anchor(name)
            for start, stop in cuts(anchor.numel(), anchor.device):
                update.apply(name, start, stop, anchor[start:stop])
        return update.is_proven

    def _apply(self, update: AnchorUpdate, move: Move, move_statistic: Move, *, in_place: bool = False) -> bool:
        """Pass over the memory once, in blocks. `in_place`: the local weights move without looking at θ. (Running
        statistics are always taken as agreed: they forget by themselves, and l + (θ′ − θ) of a variance may be
        negative.)"""
        is_apart = False  # is an anchor on another device than the weights?
        try:
            for name in update.names:
                for block in self._blocks(name, update, in_place=in_place):
                    (move_statistic if name in self._statistics else move)(block)
                    anchor, theta = self._anchor(name)[block.start : block.stop], block.theta.view(-1)
                    if anchor.device != theta.device:
                        is_apart = True
                        self._shuttle.take_back(theta, anchor)
                    elif anchor.data_ptr() != theta.data_ptr():
                        anchor.copy_(theta)
        finally:
            if is_apart:
                self._shuttle.wait()
        self._reshard()  # drop gathered copies of the earlier weights
        return update.is_proven

    def _blocks(self, name: str, update: AnchorUpdate, *, in_place: bool) -> Iterator[AnchorBlock]:
        local, anchor = self.tensors[name].detach(), self._anchor(name)
        if local.is_contiguous():
            flat = local.view(-1)
            for start, stop in cuts(local.numel(), local.device):
                held = anchor[start:stop]
                if held.device != local.device:
                    held = self._shuttle.bring(held, local.device)
                theta = update.apply(name, start, stop, held, in_place=in_place)
                yield AnchorBlock(name, start, stop, flat[start:stop], held, theta)
        elif local.numel():  # in another order of its dimensions (channels_last): the whole tensor is one block
            held = anchor if anchor.device == local.device else self._shuttle.bring(anchor, local.device)
            theta = update.apply(name, 0, local.numel(), held, in_place=in_place)
            yield AnchorBlock(name, 0, local.numel(), local, held.view(local.shape), theta.view(local.shape))

    def _anchor(self, name: str) -> Tensor:
        """The anchor of this tensor, flat; made if there is none yet."""
        if name not in self.anchors:
            local = self.tensors[name]
            device = torch.device("cpu") if self._on_host else local.device
            self.anchors[name] = torch.empty(local.shape, device=device, pin_memory=self._on_host and local.is_cuda)
        return self.anchors[name].view(-1)

    def load_anchors(self, saved: Mapping[str, Tensor]) -> None:
        """Copy saved anchors, which are fp32."""
        for name in self.tensors:
            self._anchor(name).copy_(saved[name].reshape(-1))

    def local_hash(self) -> str:
        """The hash of the local weights."""
        return values_hash(local.detach() for local in self.tensors.values())

    def adopt_anchor(self) -> None:
        """local = anchor, for the whole model."""
        for name, local in self.tensors.items():
            adopt(local, self.anchors[name])
        self._reshard()

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside the block the model holds the anchor; afterwards it holds its own weights again."""
        own = {name: p.detach().clone() for name, p in self.tensors.items()}
        try:
            self.adopt_anchor()
            yield
        finally:
            self.restore(own)

    def restore(self, own: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            adopt(tensor, own[name])
        self._reshard()


def _adopt(block: AnchorBlock) -> None:
    adopt(block.local, block.theta)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module: torch.compile, DDP and DataParallel wrap it and would prefix every name."""
    while True:
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner
