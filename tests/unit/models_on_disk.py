"""Models to save, whether they are the same afterwards, and folders as others write them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outerstep.model_folder import (
    INDEX,
)


class Tied(nn.Module):
    """Tied weights, a buffer, a scalar and a bf16 parameter."""

    def __init__(self, seed: int, vocabulary: int = 7) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.small = nn.Parameter(torch.zeros(3, 2).to(torch.bfloat16))
        self.head = nn.Linear(4, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
                else:
                    tensor.fill_(seed)


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def linear(rows: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, rows))


def shard(folder: Path, *parts: dict[str, Tensor]) -> None:
    """The Hugging Face layout: several files and an index of which tensor is where."""
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, {"metadata": {"total_size": 1}, "weight_map": weight_map})


def write_index(folder: Path, index: object) -> None:
    (folder / INDEX).write_text(json.dumps(index))


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)
