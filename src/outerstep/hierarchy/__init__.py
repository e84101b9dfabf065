"""Clusters of clusters: a run whose server is a worker of the run above it (docs/concepts/hierarchy.md)."""

from .cluster import Cluster
from .leader import Leader

__all__ = ["Cluster", "Leader"]
