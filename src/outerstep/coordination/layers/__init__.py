"""Layers of a run: the decisions of a cluster, and the life of a replica group in any layer."""
