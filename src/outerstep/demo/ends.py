"""What each server and each group of a demo ended with, and whether that is as it must be.

Whoever holds the same version holds the same weights. All end at the same version, unless a group was held up in the
last seconds: then its steps count in a round that the others did not wait for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class End:
    """`weights`: their hash. `place`: whose version this is, the top's or a cluster's. `agreed`: the hash under which
    the server at that place agreed on this version; an agreement from above has the same one at every place."""

    weights: str
    place: str
    version: int
    agreed: str


def verdict(ends: Mapping[str, End]) -> str:
    """By name of who ended so. For people."""
    held: dict[str, dict[str, str]] = defaultdict(dict)  # by agreement: the weights that each of its holders has
    for name, end in ends.items():
        held[end.agreed][name] = end.weights
    if wrong := [names for names in held.values() if len(set(names.values())) > 1]:
        return f"{_listed(wrong[0])} hold the same version with different weights: this must not happen."
    if len(held) == 1:
        return "All servers and groups ended with the same weights."
    versions = [f"{_listed(names)} at {_version(ends[next(iter(names))])}" for names in held.values()]
    return (
        "Not all ended at the same version, because somebody's steps came too late for the last round of the others: "
        f"{'; '.join(versions)}. Whoever holds the same version holds the same weights."
    )


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(names)


def _version(end: End) -> str:
    return f"round {end.version} of {end.place}"
