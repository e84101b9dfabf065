"""The tables of docs/reference/capacity.md, from the functions that `outerstep plan` asks.

python -m outerstep.coordination.planning.tables docs/reference/capacity.md     # renews them
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from .capacity import Sizing, server_needs, worker_needs

SIZES: Final = {"25M": 25e6, "150M": 150e6, "1B": 1e9, "7B": 7e9, "70B": 70e9}
WORKERS: Final = (2, 8, 64)
CODECS: Final = ("bf16", "int8", "int4")
FRAGMENTS: Final = 4
ROUND_S: Final = 600.0  # H = 500 and 1.2 s a step, say


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000.0
    return f"{size_bytes:.3g} TB"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def memory() -> str:
    """By size and codec; the number of workers hardly matters."""
    rows = []
    for name, parameters in SIZES.items():
        for codec in CODECS:
            whole, cut = (server_needs(Sizing(parameters, 8, codec, codec, p)).memory for p in (1, FRAGMENTS))
            per_parameter = (whole.total_bytes - whole.process_bytes) / parameters
            rows.append((name, codec, _size(whole.total_bytes), _size(cut.total_bytes), f"{per_parameter:.1f}"))
    return _table(
        ("parameters", "codec", "one fragment", f"{FRAGMENTS} fragments", "less the process, bytes per parameter"), rows
    )


def disk() -> str:
    rows = []
    for name, parameters in SIZES.items():
        for workers in WORKERS:
            for codec in ("bf16", "int4"):
                needs = server_needs(Sizing(parameters, workers, codec, codec))
                disk = needs.disk
                rows.append(
                    (
                        name,
                        str(workers),
                        codec,
                        _size(needs.journal_bytes),
                        _size(disk.states_bytes),
                        _size(disk.journal_bytes),
                        _size(disk.spool_bytes),
                    )
                )
    titles = ("parameters", "workers", "codec", "journal, a round", "states, at most", "journal, at most", "spool")
    return _table(titles, rows)


def bandwidth() -> str:
    rows = []
    for name, parameters in SIZES.items():
        for workers in WORKERS:
            cells = [name, str(workers)]
            for codec in CODECS:
                traffic = server_needs(Sizing(parameters, workers, codec, codec)).traffic
                mbit = 8e-6 * traffic.bytes_per_s(ROUND_S)
                cells.append(
                    f"{_size(traffic.in_bytes)}, {mbit:,.3g} Mbit/s"
                    if mbit < 1000
                    else f"{_size(traffic.in_bytes)}, {mbit / 1000:.3g} Gbit/s"
                )
            rows.append(cells)
    return _table(("parameters", "workers", *CODECS), rows)


def workers() -> str:
    rows = []
    for name, parameters in SIZES.items():
        for codec in ("bf16", "int4"):
            whole, cut = (worker_needs(Sizing(parameters, 8, codec, codec, p)) for p in (1, FRAGMENTS))
            rows.append(
                (
                    name,
                    codec,
                    _size(whole.memory.training_bytes),
                    _size(whole.memory.added_bytes),
                    _size(cut.memory.added_bytes),
                    _size(whole.disk_bytes),
                )
            )
    titles = (
        "parameters",
        "codec",
        "training itself",
        "added, one fragment",
        f"added, {FRAGMENTS} fragments",
        "added to a checkpoint",
    )
    return _table(titles, rows)


TABLES: Final = {"memory": memory, "disk": disk, "bandwidth": bandwidth, "workers": workers}


def renew(page: str) -> str:
    """A page with its tables as the code has them, each between its two marks."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        assert pattern.search(page), f"the page has no {begin} … {end}"
        text = f"{begin}\n{table()}\n{end}"
        page = pattern.sub(lambda _, text=text: text, page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    for file in sys.argv[1:]:
        Path(file).write_text(renew(Path(file).read_text()))
