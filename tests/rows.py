"""Rows of docs/operating/faults.md and the tests that prove them, side by side.

    python tests/rows.py            # exits with 1 if a row has no test

A test says which rows it proves with `@pytest.mark.row("F08", …)`, on itself or on its class. They are found by reading
the sources, so this needs nothing installed. The level of a test is said by it (`level="WAN"`) or read off its file:

    simulated      state machines in virtual time
    one process    the real code, in threads of one process, over real sockets or without
    processes      real processes, ended by real signals
    WAN            over an emulated slow line
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "operating" / "faults.md"
PROCESSES = {"subprocess", "clusters", "multiprocessing", "nursery", "ranks"}
SIMULATED = "outerstep.simulate"


@dataclass(frozen=True)
class Proof:
    """A test, and a row that it proves."""

    row: str
    file: str
    test: str
    level: str


def read_rows(page: str) -> dict[str, str]:
    """Row → its fault or input, in the order of the page."""
    found: dict[str, str] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if re.fullmatch(r"[FB]\d\d", cells[0]):
            assert cells[0] not in found, f"{cells[0]} stands twice in {PAGE}"
            found[cells[0]] = cells[2] if cells[0].startswith("F") else cells[1]
    return found


def find_proofs(tests: Path = TESTS) -> list[Proof]:
    return [proof for file in sorted(tests.rglob("test_*.py")) for proof in _proofs_in(file, tests)]


def _proofs_in(file: Path, tests: Path) -> Iterator[Proof]:
    tree = ast.parse(file.read_text())
    usual = _level(tree, file)
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        of_class = owner.decorator_list if isinstance(owner, ast.ClassDef) else []
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for row, level in _marks([*of_class, *node.decorator_list]):
                    yield Proof(row, str(file.relative_to(tests)), node.name, level or usual)


def _marks(decorators: list[ast.expr]) -> Iterator[tuple[str, str | None]]:
    """(row, level) of every pytest.mark.row(…) among them, also inside a parametrize."""
    for decorator in decorators:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row":
                said = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
                yield from ((ast.literal_eval(row), said.get("level")) for row in node.args)


def _level(tree: ast.Module, file: Path) -> str:
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    if any(module.startswith(SIMULATED) for module in modules) or "coordination" in file.parts:
        return "simulated"
    return "processes" if modules & PROCESSES else "one process"


def report(rows: dict[str, str], proofs: list[Proof]) -> list[str]:
    """The lines to print; the rows without a test at the end."""
    lines: list[str] = []
    for row, what in rows.items():
        own = [proof for proof in proofs if proof.row == row]
        lines.append(f"{row}  {what}" + ("" if own else "   — NO TEST"))
        lines += [f"       {proof.level:<12} {proof.file}::{proof.test}" for proof in own]
    missing = missing_rows(rows, proofs)
    proven = len(rows) - len(missing)
    lines.append(f"{proven} of {len(rows)} rows are proven by {len({(p.file, p.test) for p in proofs})} tests")
    if missing:
        lines.append(f"no test: {', '.join(missing)}")
    return lines


def missing_rows(rows: dict[str, str], proofs: list[Proof]) -> list[str]:
    proven = {proof.row for proof in proofs}
    return [row for row in rows if row not in proven]


def main() -> int:
    rows, proofs = read_rows(PAGE.read_text()), find_proofs()
    print("\n".join(report(rows, proofs)))
    unknown = sorted({proof.row for proof in proofs} - rows.keys())
    if unknown:
        print(f"not on the page: {', '.join(unknown)}")
    return 1 if unknown or missing_rows(rows, proofs) else 0


if __name__ == "__main__":
    sys.exit(main())
