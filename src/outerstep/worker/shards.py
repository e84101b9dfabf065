"""Models whose parameters are spread over the processes of a job: what of each one is here.

A parameter is whole on every rank (DDP, or plain), or a DTensor that FSDP2 (`fully_shard`) has split by rows. The
exchange works on the local rows; the manifest speaks of whole tensors. (Imported only inside a job of several
processes: torch's DTensor takes a second or two to load.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..errors import ModelError
from ..topology.group.sharded import Shards
from ..wire.frames import rows_of


class Locals(Mapping[str, Tensor]):
    """What of each tensor is in this process. Looked up each time: FSDP2 may move a shard to other memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def find_shards(model: nn.Module, tensors: Mapping[str, Tensor]) -> Shards:
    """Which rows of which tensors this process holds; refuses every way of splitting that is not by rows."""
    _refuse_fsdp1(model)
    held = {name: _rows_here(name, t) for name, t in tensors.items() if isinstance(t, DTensor)}
    sharded = {name: place for name, place in held.items() if place is not None}
    if len(set(sharded.values())) > 1:
        odd = {place: name for name, place in sharded.items()}
        raise ModelError(
            "all parameters must be sharded over the same ranks; got "
            + " and ".join(f"{name!r} as shard {r} of {n}" for (n, r), name in sorted(odd.items())[:2])
        )
    sections, section = next(iter(sharded.values()), (1, 0))
    return Shards(sections, section, frozenset(sharded))


def _rows_here(name: str, tensor: DTensor) -> tuple[int, int] | None:
    """(n, r): we hold shard r of n. None: all of it."""
    mesh, found = tensor.device_mesh, None
    coordinate = mesh.get_coordinate()
    for dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard and placement.dim == 0 and found is None and coordinate is not None:
            found = (mesh.size(dim), coordinate[dim])
        elif not isinstance(placement, Replicate):
            raise ModelError(
                f"parameter {name!r} is placed as {tuple(tensor.placements)} on a mesh of {tuple(mesh.shape)}: only "
                "Shard(0) over one mesh dimension and Replicate are exchanged (fully_shard's default)"
            )
    if found is not None:
        expected = rows_of(tuple(tensor.shape), *found).shape
        with torch.no_grad():
            here = tuple(tensor.to_local().shape)
        if here != expected:
            raise ModelError(f"parameter {name!r}: shard {found[1]} of {found[0]} is {here}, by rows it is {expected}")
    return found


def _refuse_fsdp1(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ModelError(
                f"module {name!r} is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters have no names "
                "to exchange: use fully_shard (FSDP2)"
            )


def reshard(model: nn.Module) -> None:
    """Let go of gathered copies of the parameters: once the shards were written to, those are out of date. (FSDP2
    keeps the outermost ones after a forward pass without a backward, as in evaluation.)"""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
