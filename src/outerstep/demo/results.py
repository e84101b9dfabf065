"""The demo's table and picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    label: str
    learning_rate: float
    loss: float  # nats per byte on held-out files, at the end
    curve: list[tuple[int, float]]
    bytes_sent: int  # per worker
    bytes_received: int
    rounds: int
    seconds: float


def print_table(rows: list[Row], parameters: int, workers: int, steps: int, console: Console) -> None:
    alone, _, together, parallel = rows
    # What each worker of a ring all-reduce sends in fp32: 2(k−1)/k · 4 bytes · parameters, at every step.
    per_step = 2 * (workers - 1) / workers * 4 * parameters * steps
    table = Table(title=f"after {steps} steps; held-out files, nats per byte (lower is better)")
    for heading in ("run", "learning rate", "loss", "bits per byte", "sent by each worker"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for row in rows:
        sent = _megabytes(per_step) + " (computed)" if row is parallel else _megabytes(row.bytes_sent)
        style = "bold" if row is together else ""
        table.add_row(
            row.label, f"{row.learning_rate:g}", f"{row.loss:.3f}", f"{row.loss / math.log(2):.3f}", sent, style=style
        )
    console.print(table)
    if workers > 1:
        console.print(
            f"Each worker sent {_megabytes(together.bytes_sent)} and received {_megabytes(together.bytes_received)} in "
            f"{together.rounds} rounds; exchanging gradients at every step it would have sent {_megabytes(per_step)}: "
            f"{per_step / max(together.bytes_sent, 1):.0f} times as much.",
            highlight=False,
        )
    gain = alone.loss - together.loss
    verdict = (
        f"The outer model is {gain:.3f} nats per byte better than one worker alone."
        if gain > 0
        else f"The outer model is not better than one worker alone ({-gain:.3f} nats per byte worse). "
        "With few steps the outer step has no time to pay off."
    )
    console.print(verdict, highlight=False)


def plot(rows: list[Row], file: Path) -> Path | None:
    """Held-out loss over steps as PNG; None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    styles = [("#8a8f98", "--"), ("#c78a3b", "--"), ("#1f6feb", "-"), ("#2da44e", ":")]
    for row, (color, line) in zip(rows, styles, strict=True):
        steps, losses = zip(*row.curve, strict=True)
        label = f"{row.label}: {row.loss:.3f}"
        width = 2.6 if line == "-" else 1.6
        axes.plot(steps, losses, line, color=color, linewidth=width, label=label)
    axes.set_xlabel("steps of each worker")
    axes.set_ylabel("held-out loss, nats per byte")
    lowest = min(row.loss for row in rows)
    axes.set_ylim(lowest - 0.1, min(max(row.curve[0][1] for row in rows), lowest + 1.6))
    axes.grid(alpha=0.25)
    axes.legend(title="loss at the end", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file


def _megabytes(count: float) -> str:
    if count == 0:
        return "–"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
