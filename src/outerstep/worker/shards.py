"""Models whose parameters are spread over the processes of a job: what of each one is here.

A parameter is whole (DDP, plain, a stage of a pipeline), or a DTensor: split by rows as FSDP2 (`fully_shard`) does, or
in any other way that leaves each process one box of it. The exchange works on what is local; the manifest speaks of
whole tensors. (Imported only inside a job of several
processes: torch's DTensor takes a second or two to load.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..errors import ModelError
from ..tiling import Place, ShardOf, box_at, place_of
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
    """What of each tensor this process holds; refuses what is no box of it."""
    _refuse_fsdp1(model)
    places = {name: place_held(name, tensor) for name, tensor in tensors.items()}
    cut = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    rows = {name: _rows_here(tensor) for name, tensor in cut.items()}
    sharded = {name: place for name, place in rows.items() if place is not None}
    if NOT_BY_ROWS in sharded.values() or len(set(sharded.values())) > 1:
        sections = max(_shards_of(tensor) for tensor in cut.values())
        return Shards(sections, 0, frozenset(sharded), by_rows=False, places=places)
    sections, section = next(iter(sharded.values()), (1, 0))
    return Shards(sections, section, frozenset(sharded), places=places)


def is_data_parallel(model: nn.Module, shards: Shards) -> bool:
    """As far as can be seen: does each process of the job train samples of its own, as DDP and FSDP2 do? (Rows without
    FSDP2 are those of a tensor-parallel job, whose processes train the same samples.)"""
    is_whole = shards.by_rows and shards.sections == 1
    return is_whole or (shards.by_rows and any(isinstance(module, FSDPModule) for module in model.modules()))


NOT_BY_ROWS = (0, 0)


def _rows_here(tensor: DTensor) -> tuple[int, int] | None:
    """(n, r): we hold shard r of n, by rows. None: all of it."""
    mesh, found = tensor.device_mesh, None
    coordinate = mesh.get_coordinate()
    for dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard and placement.dim == 0 and found is None and coordinate is not None:
            found = (mesh.size(dim), coordinate[dim])
        elif not isinstance(placement, Replicate):
            return NOT_BY_ROWS
    if found is not None:
        with torch.no_grad():
            here = tuple(tensor.to_local().shape)
        if here != rows_of(tuple(tensor.shape), *found).shape:
            return NOT_BY_ROWS
    return found


def _shards_of(tensor: DTensor) -> int:
    """Into how many pieces it is cut."""
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(n for n, placement in sizes if not isinstance(placement, Replicate))


def place_held(name: str, tensor: Tensor) -> Place:
    """(begin, size) of what is here."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return (0,) * len(shape), shape
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    where = f"parameter {name!r} is placed as {tuple(tensor.placements)} on a mesh of {tuple(mesh.shape)}"
    if coordinate is None:
        raise ModelError(f"{where}, and this process is not in it: give each process the model that it trains")
    spans = place_of(shape, tuple(mesh.shape), coordinate, [_read(where, each) for each in tensor.placements])
    box = box_at(spans)
    if box is None:
        raise ModelError(
            f"{where}: this process holds {spans}, which is not one box. Shard each dimension in one piece per process"
        )
    with torch.no_grad():
        here = tuple(tensor.to_local().shape)
    if here != box[1] and not 0 == math.prod(here) == math.prod(box[1]):
        raise ModelError(
            f"{where}: {here} of it is here, and by its placements {box[1]}. Choose sizes that the mesh divides"
        )
    return box


def _read(where: str, placement: Placement) -> ShardOf | None:
    match placement:
        case Replicate():
            return None
        case _StridedShard():
            return ShardOf(placement.dim, int(placement.split_factor))
        case Shard():
            return ShardOf(placement.dim)
    raise ModelError(
        f"{where}: only Shard and Replicate are exchanged. Redistribute it (a Partial: to Replicate) before the "
        "worker is made"
    )


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
