"""How much of what there is to test is tested: all of it in `make test` and `make schedules`,
some of it in `make quick`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

F = TypeVar("F", bound=Callable[..., Any])

USUAL = 100  # max_examples of the profile "ci"


def cases(count: int, **more: Any) -> Callable[[F], F]:
    """So many drawn cases in `make test`; as many more or fewer as the profile has more or fewer than usual."""
    more.setdefault("suppress_health_check", [HealthCheck.too_slow])  # a busy machine says nothing about the code
    many = max(count * settings.default.max_examples // USUAL, 1)  # type: ignore[union-attr]
    return settings(max_examples=many, deadline=None, **more)  # type: ignore[return-value]


def mostly_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """For `parametrize`: all values, of which only those in `quick` are for `make quick` too."""
    found = list(values)
    assert all(value in found for value in quick), f"{quick} are not all among {found}"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in found]


def mostly_schedules(firsts: Iterable[int]) -> list[Any]:
    """Where each stretch of seeds begins: `make test` runs the first stretch, `make schedules` the others."""
    return [pytest.param(first, marks=[pytest.mark.schedules] if i else []) for i, first in enumerate(firsts)]
