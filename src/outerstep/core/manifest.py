"""What a model is: its trainable parameters by name, tied ones once, each with the layer it belongs to."""

from __future__ import annotations

from torch import nn

from ..types import Manifest, ParameterSpec

MAX_BLOCK_NAME = 256


def describe(model: nn.Module) -> tuple[dict[str, nn.Parameter], Manifest]:
    """The parameters that are exchanged, in the model's order, and the manifest that says so."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    params: dict[str, nn.Parameter] = {}
    kept: dict[int, str] = {}
    aliases: dict[str, str] = {}
    frozen: list[str] = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if not param.requires_grad:
            frozen.append(name)
        elif id(param) in kept:
            aliases[name] = kept[id(param)]
        else:
            kept[id(param)] = name
            params[name] = param
    specs = tuple(
        ParameterSpec(
            name=name,
            shape=tuple(param.shape),
            dtype=str(param.dtype).removeprefix("torch."),
            block=block_of(name),
            embedding=id(param) in tables,
        )
        for name, param in params.items()
    )
    buffers = tuple(name for name, _ in model.named_buffers())
    return params, Manifest(parameters=specs, aliases=aliases, buffers=buffers, frozen=tuple(frozen))


def block_of(name: str) -> str:
    """The layer a parameter belongs to: its name up to the first number ("h.3.attn.weight" → "h.3"), else ""."""
    pieces = name.split(".")
    for i, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: i + 1])[:MAX_BLOCK_NAME]
    return ""
