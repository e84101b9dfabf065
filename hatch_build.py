"""Before a wheel, a source distribution or an editable install is built: fetch the chart library of the page.

A build without it goes on, with a warning: the page shows its tables then, and says what is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibraryBuildHook(BuildHookInterface):  # type: ignore[misc,type-arg]
    """Hatchling calls it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = load_library_module(Path(self.root))
        try:
            library.chart_library().place()
        except (library.LibraryMissing, OSError) as error:
            self.app.display_warning(str(error))


def load_library_module(root: Path) -> ModuleType:
    """By its path: where a package is built, what it depends on is not installed, and it cannot be imported."""
    path = root / "src" / "outerstep" / "dashboard" / "library.py"
    spec = importlib.util.spec_from_file_location("outerstep_chart_library", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks for itself there
    spec.loader.exec_module(module)
    return module
