"""What a user is told whose Python lacks the package that an integration is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..installing import install_line


@contextmanager
def needing(package: str, extra: str) -> Iterator[None]:
    """Around the imports of `package`: an error names the line that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"outerstep.{extra} needs the package {package}, which is not installed: {install_line(extra)}",
            name=error.name,
        ) from error
