"""Models of the right shapes: what is exchanged matters here, nobody computes with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    context: int
    width: int
    blocks: int


SHAPES = {
    "103M": Shape(vocabulary=50257, context=1024, width=768, blocks=9),  # 103.2M values in 112 tensors
    "8M": Shape(vocabulary=4096, context=256, width=256, blocks=9),  # 8.2M values, 112 tensors too
}

PLAIN = {"100M": 100_000_000, "25M": 25_000_000, "10M": 10_000_000}


class Layer(nn.Module):
    """A weight and perhaps a bias, as memory without values."""

    def __init__(self, *shape: int, bias: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        if bias:
            self.bias = nn.Parameter(torch.empty(bias))


def make(size: str) -> nn.Module:
    """The model of that name. Its values come from the server, or from `fill`."""
    return gpt(SHAPES[size]) if size in SHAPES else plain(PLAIN[size])


def plain(numel: int) -> nn.Module:
    """Ten equal matrices."""
    return nn.ModuleList(Layer(numel // 10_000, 1_000) for _ in range(10))


def gpt(shape: Shape) -> nn.Module:
    """The weights of a GPT with tied embeddings."""
    width = shape.width
    return nn.ModuleDict(
        {
            "tokens": Layer(shape.vocabulary, width),
            "positions": Layer(shape.context, width),
            "blocks": nn.ModuleList(_block(width) for _ in range(shape.blocks)),
            "norm": Layer(width, bias=width),
        }
    )


def _block(width: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "norm_1": Layer(width, bias=width),
            "attention": Layer(3 * width, width, bias=3 * width),
            "projection": Layer(width, width, bias=width),
            "norm_2": Layer(width, bias=width),
            "up": Layer(4 * width, width, bias=4 * width),
            "down": Layer(width, 4 * width, bias=width),
        }
    )


@torch.no_grad()
def fill(model: nn.Module) -> nn.Module:
    """Values like those of a trained model, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02, generator=generator)
    return model


def count(size: str) -> tuple[int, int]:
    """How many values, in how many tensors."""
    parameters = list(make(size).parameters())
    return sum(parameter.numel() for parameter in parameters), len(parameters)


class Nudge(torch.optim.Optimizer):
    """Moves every weight a little at odd steps and does nothing at even ones. With an exchange every second step,
    what is measured at the even one is the exchange alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._steps += 1
        if self._steps % 2:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.999).add_(1e-4)
