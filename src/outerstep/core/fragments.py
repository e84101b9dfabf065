"""Fragments: named groups of parameters, balanced by bytes, that are exchanged one at a time.

Which is sent when: outerstep/schedule.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..schedule import due_fragment
from ..types import ParameterSpec
from .manifest import describe
from .pseudogradient import pseudo_gradient

Strategy = Literal["contiguous", "strided", "counted"]
BYTES_PER_VALUE = 4  # balance is about the fp32 anchor; every codec shrinks all fragments alike


class FragmentManager:
    """Which parameter is in which fragment, and which fragment is due when.

    contiguous: neighbours stay together, cut into P runs of about equal bytes;
    strided:    layer i goes to fragment i mod P, parameters outside any layer to the lightest;
    counted:    equally many parameters each, in the model's order, the first n mod P one more: as clients of the older
                protocol (docs/reference/compat.md) cut their models, regardless of bytes.
    `embeddings_apart`: the embedding tables get the first fragment to themselves. `named`: the first fragments, as
    somebody else has cut them; the rest is counted out, and if only buffers are left, they are one more.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[ParameterSpec],
        num_fragments: int,
        *,
        strategy: Strategy = "contiguous",
        embeddings_apart: bool = False,
        named: Sequence[Sequence[str]] = (),
    ) -> None:
        specs = model if isinstance(model, Sequence) else describe(model)[1].parameters
        most = len([s for s in specs if s.role == "parameter"]) if strategy == "counted" else len(specs)
        if not 1 <= num_fragments <= most:
            raise ConfigError(
                f"num_fragments must be between 1 and the number of trainable parameters ({most}), got {num_fragments}"
            )
        if named:
            self.fragments = _beyond(specs, num_fragments, named)
        else:
            self.fragments = _split(specs, num_fragments, strategy, embeddings_apart)
        self.num_fragments = len(self.fragments)
        self.param_to_fragment = {name: i for i, names in enumerate(self.fragments) for name in names}

    def get_fragment_schedule(self, local_step: int, sync_every: int) -> int | None:
        """The fragment to send after `local_step` (counted from 1, over any number of cycles), or None."""
        return due_fragment(local_step, sync_every, self.num_fragments)

    def compute_fragment_pseudogradients(
        self, fragment_id: int, global_params: Mapping[str, Tensor], model: nn.Module, bf16_comm: bool = True
    ) -> dict[str, Tensor]:
        """Δ = anchor − local of one fragment, by name and in host memory: `global_params` is the anchor. `bf16_comm`:
        rounded to bf16, as it travels; else fp32."""
        if not 0 <= fragment_id < self.num_fragments:
            raise ConfigError(f"fragment_id must be between 0 and {self.num_fragments - 1}, got {fragment_id}")
        held, names = describe(model)[0], self.fragments[fragment_id]
        odd = next((name for name in names if name not in held or name not in global_params), None)
        if odd is not None:
            raise ConfigError(
                f"fragment {fragment_id} holds {odd!r}, which is not in both model and global_params: give it those "
                "that this manager was made for"
            )
        dtype = torch.bfloat16 if bf16_comm else torch.float32
        return {name: pseudo_gradient(global_params[name].float().cpu(), held[name]).to(dtype) for name in names}


def check_cycle(sync_every: int, num_fragments: int) -> None:
    """Each fragment needs its own step."""
    if sync_every < num_fragments:
        raise ConfigError(
            f"sync_every ({sync_every}) must be at least num_fragments ({num_fragments}): "
            "each fragment is sent after its own step; raise sync_every, or use fewer fragments"
        )


def _split(specs: Sequence[ParameterSpec], count: int, strategy: Strategy, embeddings_apart: bool) -> list[list[str]]:
    if embeddings_apart and count > 1:
        tables = [s for s in specs if s.embedding]
        rest = [s for s in specs if not s.embedding]
        if tables and len(rest) >= count - 1:
            return [[s.name for s in tables], *_split(rest, count - 1, strategy, embeddings_apart=False)]
    if strategy == "counted":
        return _counted(specs, count)
    units = _units(specs)
    if len(units) < count:
        units = [[s] for s in specs]  # fewer layers than fragments: cut inside layers
    groups = _strided(units, count) if strategy == "strided" else _contiguous(units, count)
    order = {s.name: i for i, s in enumerate(specs)}
    return [sorted((s.name for unit in group for s in unit), key=order.__getitem__) for group in groups]


def _units(specs: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """The tensors of each layer, buffers included; a parameter outside any layer is its own unit."""
    units: list[list[ParameterSpec]] = []
    of_block: dict[str, list[ParameterSpec]] = {}
    for spec in specs:
        if spec.block in of_block:
            of_block[spec.block].append(spec)
            continue
        units.append([spec])
        if spec.block:
            of_block[spec.block] = units[-1]
    return units


def _bytes(unit: list[ParameterSpec]) -> int:
    return sum(BYTES_PER_VALUE * spec.numel for spec in unit)


def _contiguous(units: list[list[ParameterSpec]], count: int) -> list[list[list[ParameterSpec]]]:
    """Cut k comes where the bytes so far are nearest to k/P of all, leaving at least one unit on each side."""
    sums = [0]
    for unit in units:
        sums.append(sums[-1] + _bytes(unit))
    cuts = [0]
    for k in range(1, count):
        candidates = range(cuts[-1] + 1, len(units) - (count - k) + 1)
        target = sums[-1] * k / count
        cuts.append(min(candidates, key=lambda i: abs(sums[i] - target)))
    cuts.append(len(units))
    return [units[a:b] for a, b in pairwise(cuts)]


def _beyond(specs: Sequence[ParameterSpec], count: int, named: Sequence[Sequence[str]]) -> list[list[str]]:
    taken = {name for names in named for name in names}
    rest = [spec for spec in specs if spec.name not in taken]
    parameters = sum(spec.role == "parameter" for spec in rest)
    if bool(parameters) != (count > len(named)) or parameters < count - len(named):
        raise ConfigError(f"{parameters} parameters are left for {count - len(named)} more fragments")
    more = _counted(rest, count - len(named)) if parameters else [[spec.name for spec in rest]] if rest else []
    return [*map(list, named), *more]


def _counted(specs: Sequence[ParameterSpec], count: int) -> list[list[str]]:
    """Buffers are not counted: those clients do not send them. Each goes with the first parameter of its module."""
    counted = [s for s in specs if s.role == "parameter"] if any(s.role != "parameter" for s in specs) else specs
    each, longer = divmod(len(counted), count)
    cuts = [p * each + min(p, longer) for p in range(count + 1)]
    fragments = [[s.name for s in counted[a:b]] for a, b in pairwise(cuts)]
    home = {_module(name): fragment for fragment in reversed(fragments) for name in reversed(fragment)}
    for spec in specs:
        if spec.role != "parameter":
            home.get(_module(spec.name), fragments[-1]).append(spec.name)
    return fragments


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _strided(units: list[list[ParameterSpec]], count: int) -> list[list[list[ParameterSpec]]]:
    """Layers in turn, then the rest, largest first into the lightest."""
    groups: list[list[list[ParameterSpec]]] = [[] for _ in range(count)]
    layers = [unit for unit in units if unit[0].block]
    loose = [unit for unit in units if not unit[0].block]
    for i, unit in enumerate(layers):
        groups[i % count].append(unit)
    for unit in sorted(loose, key=_bytes, reverse=True):
        min(groups, key=lambda group: (bool(group), sum(map(_bytes, group)))).append(unit)  # no group stays empty
    return groups
