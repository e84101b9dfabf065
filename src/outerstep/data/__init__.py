"""Elastic data: a run leases its data to whoever is there (docs/concepts/data.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .elastic import ElasticSampler
    from .hugging_face import DatasetShards
    from .mixed import MixedLoader
    from .sampler import LeasedLoader, LeasedSampler
    from .shards import LeasedShards, LeasedStream

_FILES = {
    "DatasetShards": "hugging_face",
    "ElasticSampler": "elastic",
    "LeasedLoader": "sampler",
    "LeasedSampler": "sampler",
    "LeasedShards": "shards",
    "LeasedStream": "shards",
    "MixedLoader": "mixed",
}

__all__ = [
    "DatasetShards",
    "ElasticSampler",
    "LeasedLoader",
    "LeasedSampler",
    "LeasedShards",
    "LeasedStream",
    "MixedLoader",
]


def __getattr__(name: str) -> object:
    """A command that lists samples imports no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'outerstep.data' has no attribute {name!r}")
    return getattr(import_module(f".{_FILES[name]}", __name__), name)
