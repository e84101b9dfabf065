"""Elastic data: a run leases its data to whoever is there (docs/concepts/data.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sampler import LeasedLoader, LeasedSampler

__all__ = ["LeasedLoader", "LeasedSampler"]


def __getattr__(name: str) -> object:
    """A command that lists samples imports no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'outerstep.data' has no attribute {name!r}")
    return getattr(import_module(".sampler", __name__), name)
