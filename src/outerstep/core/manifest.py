"""Describes a model: the exchanged tensors by name, tied ones once, each with its layer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..types import LONGEST_NAME, Manifest, ParameterSpec

MAX_BLOCK_NAME = 256


BufferPolicy = Literal["average", "local", "server"]


def describe(model: nn.Module, buffers: BufferPolicy = "local") -> tuple[dict[str, Tensor], Manifest]:
    """The exchanged tensors, in the model's order, and the manifest that describes them.

    They are the trainable parameters and, unless `buffers` is "local", the persistent floating-point buffers: "average"
    replaces them by the workers' mean at every round (the running statistics of a BatchNorm), "server" by the server's.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    params: dict[str, Tensor] = {}
    kept: dict[int, str] = {}
    aliases: dict[str, str] = {}
    frozen: list[str] = []
    blocks = _blocks(model)
    for name, param in model.named_parameters(remove_duplicate=False):
        if not param.requires_grad:
            frozen.append(name)
        elif id(param) in kept:
            aliases[name] = kept[id(param)]
        else:
            kept[id(param)] = name
            params[name] = param
    exchanged = {} if buffers == "local" else _persistent_buffers(model)
    role: Literal["average", "server"] = "server" if buffers == "server" else "average"
    specs = [_spec(name, param, blocks, embedding=id(param) in tables) for name, param in params.items()]
    specs += [_spec(name, tensor, blocks, role=role) for name, tensor in exchanged.items()]
    local = tuple(name for name, _ in model.named_buffers() if name not in exchanged)
    for name in (*params, *exchanged, *aliases, *frozen, *local):
        check_name(name)
    for name, tensor in (*params.items(), *exchanged.items()):
        check_dense(name, tensor)
        _check_places(name, tensor)
    manifest = Manifest(parameters=tuple(specs), aliases=aliases, buffers=local, frozen=tuple(frozen))
    return {**params, **exchanged}, manifest


def check_name(name: str) -> None:
    if len(name) > LONGEST_NAME:
        raise ModelError(
            f"the name of a tensor must have at most {LONGEST_NAME} characters, got {len(name)}: {name[:80]!r}…; "
            "rename its module"
        )


def check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ModelError(
            f"{name!r} must be dense, got {tensor.layout}; replace it by its to_dense(), or keep it out of training"
        )


def _check_places(name: str, tensor: Tensor) -> None:
    """What is agreed is written into the tensor, value by value: an expanded one has one place for several."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            raise ModelError(
                f"{name!r} must have a place in memory for each value, got shape {list(tensor.shape)} with strides "
                f"{list(tensor.stride())} (is it expanded?); replace it by its clone()"
            )
        reach += stride * (size - 1)


def _spec(
    name: str,
    tensor: Tensor,
    blocks: Collection[str],
    *,
    embedding: bool = False,
    role: Literal["parameter", "average", "server"] = "parameter",
) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        block=next((b for b in _parents(name) if b in blocks), block_of(name)),
        embedding=embedding,
        role=role,
    )


def _parents(name: str) -> list[str]:
    """ "h.3.attn.weight" → "h", "h.3", "h.3.attn": the outermost first."""
    pieces = name.split(".")
    return [".".join(pieces[:i])[:MAX_BLOCK_NAME] for i in range(1, len(pieces))]


def _blocks(model: nn.Module) -> set[str]:
    """The modules that are layers: those a Hugging Face model says not to split, and the items of a ModuleList (unless
    they contain such layers: a stage is not a layer)."""
    kinds = {kind for module in model.modules() for kind in getattr(module, "_no_split_modules", None) or ()}
    whole = {name for name, module in model.named_modules() if type(module).__name__ in kinds}
    inside = {parent for name in whole for parent in _parents(name)}
    items = {
        f"{name}.{i}" if name else str(i)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for i in range(len(module))
    }
    return whole | (items - inside)


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers that a state dict holds."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                found[f"{path}.{name}" if path else name] = buffer
    return found


def block_of(name: str) -> str:
    """The layer a parameter belongs to: its name up to the first number ("h.3.attn.weight" → "h.3"), else ""."""
    pieces = name.split(".")
    for i, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: i + 1])[:MAX_BLOCK_NAME]
    return ""
