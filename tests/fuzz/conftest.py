"""A profile that draws more cases than usual takes as long as it takes."""

import pytest
from hypothesis import settings

from amounts import USUAL


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if settings.default.max_examples > USUAL:  # type: ignore[union-attr]
        for item in items:
            item.add_marker(pytest.mark.timeout(0))
