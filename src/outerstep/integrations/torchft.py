"""`torchft.local_sgd.DiLoCo`, with its silent failures refused or fixed.

    manager = torchft.Manager(…, use_async_quorum=False)
    with make_diloco(manager, model, inner_optimizer, sync_every=500):
        for batch in data:
            …
            inner_optimizer.step()

The engine is torchft's own, unchanged: its quorum, its all-reduce, its commit vote, its hooks on the inner optimizer.
One step of it, for a fragment's global copy θ (torchft's `original_parameters`) and n replicas with local weights l_i:

    Δ_i = θ − l_i                         the pseudo-gradient: the same sign as core/pseudogradient.py
    g   = mean_i Δ_i                      Manager.allreduce
    buf ← μ·buf + g;  θ ← θ − η·(g + μ·buf)
    l   ← (1−α)·θ + α·l                   α = `fragment_alpha`, 0: adopt θ

Added here: fragments that hold every trainable parameter exactly once, an outer optimizer for each, a complete and
copied state for a healing replica (torchft_state.py), refusal of settings that would fail silently (torchft_checks.py),
and a comparison of θ across the replicas after every sync. docs/integrations/torchft.md says what is left to you.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.utils._pytree import tree_map

from ..core.fragments import FragmentManager
from ..core.outer import OptimizerFactory
from ..core.own_outer import OuterOptimizer
from ..core.state import bytes_of
from ..defaults import OUTER_LR, OUTER_MOMENTUM
from ..digest import data_hash
from ..errors import AnchorsDiffer
from ..installing import install_line
from .torchft_checks import (
    Buffers,
    bucket_cap,
    check_buffers,
    check_group,
    check_model,
    check_outer_optimizer,
    check_quantization,
    check_schedule,
    check_version,
)
from .torchft_state import HealingState, local_part

try:
    from torchft.local_sgd import DiLoCo
except ImportError as missing:
    raise ImportError(f"this needs torchft, which is optional: {install_line('torchft')}") from missing

log = logging.getLogger(__name__)

STATE_KEY = "outerstep"
_CEILING = 1 << 61  # a checksum and its complement to this are both positive int64


def make_diloco(
    manager: Any,
    model: nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    *,
    sync_every: int,
    num_fragments: int = 1,
    fragment_delay: int = 0,
    fragment_alpha: float = 0.0,
    outer_lr: float = OUTER_LR,
    outer_momentum: float = OUTER_MOMENTUM,
    outer_optimizer: OptimizerFactory | None = None,
    buffers: Buffers = "refuse",
    use_bucketization: bool = False,
    bucket_cap_mb: int | None = None,
    should_quantize: bool = False,
    backup_device: torch.device | None = None,
    pin_memory: bool = True,
) -> CheckedDiLoCo:
    """A `torchft.local_sgd.DiLoCo` over the whole model, ready for `with`.

    manager: a `torchft.Manager` with use_async_quorum=False. Its `state_dict` (the data position, say) heals too; model
        and optimizers need not be in it.
    sync_every: H, a multiple of `num_fragments`; every H / `num_fragments` steps one fragment is exchanged.
    outer_optimizer: a function from a fragment's parameters to its optimizer; None: Nesterov momentum with `outer_lr`
        and `outer_momentum`, with the same bits on every machine.
    buffers: "local" if each replica may keep its own buffers (BatchNorm's statistics), which torchft never exchanges.
    The rest goes to torchft unchanged, once it is known to work.

    Raises ConfigError or ModelError for settings that would train and be wrong.
    """
    check_version()
    check_schedule(sync_every, num_fragments, fragment_delay, fragment_alpha)
    check_model(model, inner_optimizer)
    check_group(manager, model)
    check_buffers(model, buffers)
    check_quantization(should_quantize, model)
    fragments = _fragments(model, num_fragments)
    sizes = [sum(local_part(p).nbytes for p in fragment.parameters()) for fragment in fragments]
    use_bucketization, cap_mb = bucket_cap(use_bucketization, bucket_cap_mb, sizes)
    make = outer_optimizer or (lambda params: OuterOptimizer(params, outer_lr, outer_momentum))
    outer_optimizers = [check_outer_optimizer(make, list(fragment.parameters())) for fragment in fragments]
    return CheckedDiLoCo(
        model,
        manager=manager,
        model_fragments=fragments,
        inner_optimizer=inner_optimizer,
        outer_optimizer=outer_optimizers,
        sync_every=sync_every,
        backup_device=backup_device,
        pin_memory=pin_memory,
        use_bucketization=use_bucketization,
        bucket_cap_mb=cap_mb,
        should_quantize=should_quantize,
        fragment_sync_delay=fragment_delay,
        fragment_update_alpha=fragment_alpha,
    )


class CheckedDiLoCo(DiLoCo):  # type: ignore[misc]  # torchft has no types
    """torchft's DiLoCo; a healing replica gets everything, and θ is compared after every sync. See `make_diloco`."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self._model = model
        self._synced = 0
        super().__init__(**settings)

    def _register_state_dict_fn(self) -> None:
        """Replaces torchft's, which leaves out model and inner optimizer and hands out live momentum."""
        manager, outer = self._manager, [fragment._outer_optimizer for fragment in self._fragments]
        for key, save in list(manager._user_state_dicts.items()):
            manager._user_state_dicts[key] = _copying(save)
        anchors = [fragment.original_parameters for fragment in self._fragments]
        state = HealingState(self._model, self._local_optimizer, anchors, outer)
        manager.register_state_dict_fn(STATE_KEY, state.load, state.save)

    def _current_fragment(self) -> int:
        """Called when a fragment is prepared and again when it is synchronized; the last result is the one compared."""
        self._synced = super()._current_fragment()
        return self._synced

    @property
    def just_synced(self) -> bool:
        """Whether the inner optimizer's last step ended with a sync, committed or not."""
        return bool(self._local_step == 0)

    def take_global_weights(self) -> None:
        """l ← θ in all fragments: the same weights on every replica, to evaluate or to save. Steps since a fragment's
        last sync are lost; call it after the last sync of a run, before saving (with one fragment and α = 0, l = θ)."""
        self._restore_parameters()

    def _step_post_hook(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        super()._step_post_hook(optimizer, args, kwargs)
        if self.just_synced:  # torchft resets its step count then
            self._compare(self._synced)

    def _compare(self, fragment: int) -> None:
        """Runs on every replica of the quorum, also one that did not commit: otherwise its peers would wait for it.

        max over replicas of (c, C−c, s, C−s), c: checksum of θ, s: outer steps. All equal ⇔ max(c) + max(C−c) = C.
        A spare replica sends zeros, which never are the maximum.
        """
        anchor, step = self._fragments[fragment].original_parameters, self._manager.current_step()
        checksum = _checksum(anchor)
        device = next(p.device for p in self._model.parameters() if p.requires_grad)
        told = torch.tensor([checksum, _CEILING - checksum, step, _CEILING - step], device=device)
        self._manager.allreduce(told, reduce_op=ReduceOp.MAX).wait()
        if self._manager.errored():
            log.warning("step %d: a peer was lost before the replicas were compared; the next sync compares them", step)
            return
        checksum_max, checksum_rest, step_max, step_rest = told.tolist()
        if step_max + step_rest != _CEILING:
            log.info("step %d: a replica is behind and will heal at its next sync; not compared", step)
        elif checksum_max + checksum_rest != _CEILING:
            raise AnchorsDiffer(
                f"after outer step {step} the replicas' global copies of fragment {fragment} differ "
                f"(checksum here: {checksum:x}). It is unknown which is right: stop all replicas and start them from "
                "one checkpoint. Usual causes: unequal weights at the start with init_sync=False, unequal outer "
                "settings, or an outer_optimizer whose rounding depends on the machine"
            )


class _FragmentModule(nn.Module):
    """The part of a module that torchft uses of a fragment: its parameters by name. They stay in the model."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._by_name = dict(params)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._by_name.items()


def _fragments(model: nn.Module, count: int) -> list[_FragmentModule]:
    """Every trainable parameter in exactly one, tied ones once; balanced by bytes."""
    params = dict(model.named_parameters())
    return [
        _FragmentModule({name: params[name] for name in names}) for names in FragmentManager(model, count).fragments
    ]


def _copying(save: Callable[[], Any]) -> Callable[[], Any]:
    """A state function that returns copies: the peer reads them while training continues here."""
    return lambda: tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, save())


def _checksum(anchor: Mapping[str, Tensor]) -> int:
    """60 bits over names, shapes and values."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # torchft copies into pinned memory without waiting
    pieces: list[bytes | memoryview] = []
    for name, tensor in anchor.items():
        pieces += [f"{name} {tuple(tensor.shape)} ".encode(), bytes_of(tensor)]
    return int(data_hash(pieces)[:15], 16)
