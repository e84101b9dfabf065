"""Settings with which torchft's DiLoCo trains, commits, and is wrong: refused here, with the reason.

Each was seen on torchft 0.2.0; tests/integration/test_torchft_silent_failures.py shows each in the bare library beside
the refusal, so that a version that fixes it is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..core.fragments import check_cycle
from ..core.manifest import describe
from ..core.outer import OptimizerFactory
from ..errors import ConfigError, ModelError
from ..installing import install_line

TESTED_VERSION = "0.2.0"
BUCKETIZATION_ENV = "TORCHFT_USE_BUCKETIZATION"
MIB = 1 << 20

Buffers = Literal["refuse", "local"]


def check_version() -> None:
    """We override its private methods, so another version is another library."""
    found = version("torchft")
    if found != TESTED_VERSION:
        raise ConfigError(
            f"torchft must be {TESTED_VERSION}, got {found}: {install_line('torchft')} installs the tested one"
        )


def check_schedule(sync_every: int, num_fragments: int, delay: int, alpha: float) -> None:
    check_cycle(sync_every, num_fragments)
    if sync_every % num_fragments:
        raise ConfigError(
            f"sync_every must be a multiple of num_fragments with torchft, got {sync_every} and {num_fragments}"
        )
    if not 0 <= delay < sync_every // num_fragments:
        raise ConfigError(
            f"fragment_delay must be from 0 to below sync_every / num_fragments ({sync_every // num_fragments}), "
            f"so that one fragment is adopted before the next is sent; got {delay}"
        )
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"fragment_alpha must be between 0 and 1, got {alpha:g}")


def check_model(model: nn.Module, inner_optimizer: torch.optim.Optimizer) -> None:
    for name, param in describe(model)[0].items():
        if param.dtype != torch.float32:
            raise ModelError(
                f"trainable parameters must be float32, got {param.dtype} for {name!r}: torchft takes the outer step "
                "in the parameter's own dtype, where small updates round away. Keep the parameters in float32 and "
                "compute in bfloat16 (torch.autocast, or FSDP2's MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
            )
        if param.dim() == 0:
            raise ModelError(f"{name!r} has no dimension, which torchft cannot keep a copy of: give it the shape (1,)")
    _check_optimizer_is_bare(inner_optimizer)
    ours = {id(param) for param in model.parameters()}
    strangers = [p for group in inner_optimizer.param_groups for p in group["params"] if id(p) not in ours]
    if strangers:
        raise ModelError(
            f"the inner optimizer trains {len(strangers)} parameters that are not in the model, so they would never be "
            "synchronized. Pass the whole model, and create the optimizer after wrapping or sharding it"
        )


def _check_optimizer_is_bare(optimizer: torch.optim.Optimizer) -> None:
    """Hooks on a wrapper may never be called, and an optimizer cannot load its state dict."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) or not {"state", "param_groups"} <= optimizer.state_dict().keys():
        raise ModelError(
            f"inner_optimizer must be the torch optimizer itself, got a {type(optimizer).__name__} around it: pass "
            "the inner one (accelerate: optimizer.optimizer, torchtitan: optimizers.optimizers[0])"
        )


def check_group(manager: Any, model: nn.Module) -> None:
    """A replica of several ranks: rank i heals from group i mod n, not all from one.

    For shards that works, since each is a separate model to torchft. Copies that several ranks hold would heal from
    different groups and stay different: across groups only ranks of the same number are compared.
    """
    if manager._group_world_size == 1:
        return
    if manager._init_sync:
        raise ConfigError(
            f"init_sync must be False with {manager._group_world_size} ranks per replica: rank i would take its shard "
            "of the first weights from group i: the model would be a patchwork. Start all groups from the same weights"
        )
    for name, param in describe(model)[0].items():
        if not isinstance(param, DTensor) or not all(isinstance(place, Shard) for place in param.placements):
            raise ModelError(
                "with several ranks per replica every parameter must be sharded over all of them (FSDP2), "
                f"{name!r} is not: copies of it would heal from different groups and drift apart. For DDP and HSDP "
                "use outerstep's own worker, which treats the ranks as one group"
            )


def check_buffers(model: nn.Module, buffers: Buffers) -> None:
    if buffers not in ("refuse", "local"):
        raise ConfigError(f"buffers must be 'refuse' or 'local' with torchft's DiLoCo, got {buffers!r}")
    found = [spec.name for spec in describe(model, "average")[1].parameters if spec.role == "average"]
    if found and buffers == "refuse":
        raise ModelError(
            f"torchft never synchronizes buffers, and the model has {len(found)} ({found[0]!r}, …): each replica would "
            "end with its own. Pass buffers='local' if that is intended, use a normalization without running "
            "statistics, or train with outerstep's own worker, which averages them (buffers='average')"
        )


def check_quantization(should_quantize: bool, model: nn.Module) -> None:
    from torchft import manager  # imported here: whether it found triton is a variable of that module

    if not should_quantize:
        return
    if not manager.IS_TRITON_AVAILABLE:
        raise ConfigError(
            "should_quantize=True needs triton, which is not installed: torchft would silently send float32"
        )
    others = {param.device.type for param in model.parameters()} - {"cuda"}
    if others:
        raise ConfigError(
            f"should_quantize=True needs the whole model on CUDA, got {sorted(others)}: no step would ever be committed"
        )


def bucket_cap(use_bucketization: bool, cap_mb: int | None, sizes_bytes: Iterable[int]) -> tuple[bool, int | None]:
    """Whether torchft will use buckets, and the cap for it: each fragment must fit into one bucket.

    Of several buckets torchft copies back only the last one's result, and a tensor that does not fit into the rest of a
    bucket may be in none: they keep the replica's own values, and the step is committed. The cap is in MiB.
    """
    use_bucketization = use_bucketization or os.getenv(BUCKETIZATION_ENV, "False") == "True"
    if not use_bucketization:
        return False, None
    needed_mb = -(-max(sizes_bytes) // MIB)
    if cap_mb is not None and cap_mb < needed_mb:
        raise ConfigError(
            f"bucket_cap_mb must hold a whole fragment, {needed_mb} MiB here, got {cap_mb}: torchft leaves tensors "
            "that need a second bucket unreduced. Leave it out, or use more fragments"
        )
    return True, max(cap_mb or 0, needed_mb)


def check_outer_optimizer(make: OptimizerFactory, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """A fragment's own optimizer, of exactly its parameters."""
    if isinstance(make, torch.optim.Optimizer) or not callable(make):
        raise ConfigError(
            "outer_optimizer must be a function from a fragment's parameters to an optimizer of them, got a "
            f"{type(make).__name__}: one optimizer for several fragments would step the others by their inner gradients"
        )
    optimizer = make(params)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if sorted(held) != sorted(id(p) for p in params):
        raise ConfigError(
            f"outer_optimizer must return an optimizer of the {len(params)} parameters it is given, got one of "
            f"{len(held)} others: it would step other fragments by their inner gradients, and the replicas drift apart"
        )
    return optimizer
