"""Every file that a docstring or a comment names exists."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import outerstep

SOURCE = Path(outerstep.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NAMED = re.compile(r"[\w./-]*\w\.py\b")


def prose_of(file: Path) -> str:
    """All docstrings and comments of a file."""
    text = file.read_text()
    documented = (node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED))
    comments = (t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT)
    return "\n".join([*(ast.get_docstring(node) or "" for node in documented), *comments])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_every_file_that_is_named_exists(file: Path) -> None:
    """From the file's own folder, or from one of those around it, up to the repository."""
    missing = [
        name
        for name in NAMED.findall(prose_of(file))
        if not any((folder / name).exists() for folder in file.parents[: len(file.parts) - len(SOURCE.parts) + 2])
    ]
    assert not missing, f"{file.relative_to(SOURCE)} names {missing}, which do not exist"
