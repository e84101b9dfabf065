"""No file imports another that imports it, for types either: what both need stands in a third, or is a protocol."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import outerstep

SOURCE = Path(outerstep.__file__).parent
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def imports_at_the_top(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run with the file, or that a type checker reads as if they did (`if TYPE_CHECKING`). An import in a
    function is another matter: a leader is a worker, and a worker that is told to lead makes a leader."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, FUNCTION):
            yield from imports_at_the_top(child)


def import_graph(folder: Path) -> dict[str, set[str]]:
    """Module → the modules of this package that it imports. `from . import name` is an import of the file `name`."""
    files: dict[str, Path] = {}
    for file in sorted(folder.rglob("*.py")):
        parts = (folder.name, *file.relative_to(folder).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        found: set[str] = set()
        for node in imports_at_the_top(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
                continue
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *((node.module or "").split(".") if node.module else [])])
            found |= {inner if (inner := f"{base}.{alias.name}") in files else base for alias in node.names}
        graph[module] = (found & files.keys()) - {module}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Each a way from a module back to itself; one for every module that has any."""
    found = []
    for start in graph:
        way_to: dict[str, list[str]] = {start: [start]}
        todo = [start]
        while todo:
            here = todo.pop()
            for there in sorted(graph[here]):
                if there == start:
                    found.append([*way_to[here], start])
                    todo.clear()
                    break
                if there not in way_to:
                    way_to[there] = [*way_to[here], there]
                    todo.append(there)
    return found


def test_no_file_imports_itself_through_others() -> None:
    graph = import_graph(SOURCE)
    assert len(graph) > 400, "the files were not found"
    assert sum(map(len, graph.values())) > 2000, "the imports were not found"
    assert cycles(graph) == []


def test_a_cycle_for_types_alone_is_found(tmp_path: Path) -> None:
    house = tmp_path / "house"
    (house / "room").mkdir(parents=True)
    (house / "__init__.py").write_text("from .room import Node\n")
    (house / "room" / "__init__.py").write_text("from .node import Node\n")
    (house / "room" / "node.py").write_text("from . import sweeping\nfrom ..shared import Lock\nclass Node: ...\n")
    (house / "shared.py").write_text("class Lock: ...\n")
    sweeping = house / "room" / "sweeping.py"
    sweeping.write_text("from ..shared import Lock\ndef sweep():\n    from .node import Node\n")
    assert cycles(import_graph(house)) == [], "an import in a function is no cycle"
    sweeping.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .node import Node\n")
    planted = ["house.room.node", "house.room.sweeping", "house.room.node"]
    assert planted in cycles(import_graph(house))


def test_a_cycle_through_several_files_and_absolute_imports_is_found(tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").write_text("")
    (house / "a.py").write_text("import house.b\n")
    (house / "b.py").write_text("from house import c\n")
    (house / "c.py").write_text("from house.a import thing\n")
    assert ["house.a", "house.b", "house.c", "house.a"] in cycles(import_graph(house))
