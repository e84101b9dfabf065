"""Text that every machine has: the source of Python's own standard library. Nothing is downloaded."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HOLD_OUT_EVERY = 20  # files
MAX_BYTES = 16 * 2**20  # twice what a CPython ships: a guard against an unusual installation, not a sample
MIN_BYTES = 2**20  # below this a run would read everything several times, and the comparison would measure memorisation

# Not text that a programmer wrote for readers: tests repeat themselves, code pages and help topics are tables, and
# site-packages differs from machine to machine.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")  # written by the build of this interpreter, so different everywhere


@dataclass(frozen=True)
class Corpus:
    """Two runs of bytes, uint8 [n] each, that share no file."""

    train: Tensor
    held_out: Tensor


def load_corpus(root: Path | None = None, *, max_bytes: int = MAX_BYTES, min_bytes: int = MIN_BYTES) -> Corpus:
    """Read the standard library: every 20th file is held out, the others are for training.

    Whole files are held out, not pieces of them: a model that has seen the top of a file knows much about the rest.
    Files are read in the order of their sorted paths, so two machines with the same Python read the same corpus.

    Args:
        root: folder with the `*.py` files; None means this interpreter's standard library.
        max_bytes: reading stops before the file that would exceed this, train and held out together.
        min_bytes: less than this is an error.

    Raises:
        ValueError: there is too little text, for instance where the standard library is zipped or stripped.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    train: list[bytes] = []
    held_out: list[bytes] = []
    size_bytes = 0
    for index, path in enumerate(_source_files(root)):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        if size_bytes + len(text) > max_bytes:
            break
        size_bytes += len(text)
        is_held_out = index % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
        (held_out if is_held_out else train).append(text)
    if size_bytes < min_bytes or not held_out:
        raise ValueError(
            f"the demo's corpus needs at least {min_bytes:,} bytes of Python source in {HOLD_OUT_EVERY} files or more; "
            f"found {size_bytes:,} bytes in {len(train) + len(held_out)} files under {root}. "
            f"Use a Python whose standard library is installed as source files"
        )
    return Corpus(train=_as_tensor(train), held_out=_as_tensor(held_out))


def _source_files(root: Path) -> Iterator[Path]:
    """The `*.py` files under `root` that are worth reading, in an order that depends only on their names."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        # Pruned in place, so that the thousands of files in site-packages are never visited.
        subfolders[:] = [name for name in subfolders if not _is_skipped(name)]
        found += [Path(folder, name) for name in files if name.endswith(".py") and not _is_skipped(name)]
    yield from sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_skipped(name: str) -> bool:
    return name in SKIPPED_FOLDERS or name.startswith(SKIPPED_PREFIXES)


def _as_tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


@dataclass(frozen=True)
class BatchStream:
    """The batches of one shard. Batch t is a pure function of (seed, shard, t).

    So there is no position to save: a restarted worker, or one that joins late, requests batch t and gets the same one.
    Shard 0 is also the same whether it trains alone or next to others, which pairs the rows of the demo's table.

    Shards are independent random streams over the *whole* text rather than disjoint regions of it. With regions the
    lone worker would see half of the text and two workers all of it, and the table would credit the method with the
    effect of the data; and the region of a worker that dies would go unread. The text is many times longer than what a
    run reads, so shards hardly ever draw the same bytes.
    """

    text: Tensor  # uint8 [n]
    shard: int = 0
    seed: int = 0
    batch_size: int = 8
    context: int = 128

    def __post_init__(self) -> None:
        _check_long_enough(self.text, self.context)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Batch `step` of this shard: inputs and targets, int64 [B, T]; targets are the inputs one byte later."""
        random = np.random.default_rng((self.seed, self.shard, step))
        starts = random.integers(len(self.text) - self.context, size=self.batch_size)
        return _windows(self.text, torch.from_numpy(starts), self.context)


def evaluation_batches(
    held_out: Tensor, count: int = 16, *, batch_size: int = 32, context: int = 128
) -> list[tuple[Tensor, Tensor]]:
    """The same `count` batches for everybody: windows at equal distances, from the first held-out byte to the last.

    Returns:
        (inputs, targets) pairs, int64 [B, T] each.
    """
    _check_long_enough(held_out, context)
    last_start = len(held_out) - context - 1
    # Integer arithmetic, so that no platform rounds differently.
    starts = torch.arange(count * batch_size) * last_start // max(1, count * batch_size - 1)
    return [_windows(held_out, part, context) for part in starts.view(count, batch_size)]


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cut [B] windows of context + 1 bytes and return them without their last, and without their first, byte."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()  # [B, T + 1]
    return windows[:, :-1], windows[:, 1:]


def _check_long_enough(text: Tensor, context: int) -> None:
    if len(text) <= context:
        raise ValueError(
            f"a text must be longer than one context ({context} bytes), got {len(text)} bytes; "
            f"use more text or a smaller context"
        )
