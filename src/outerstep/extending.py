"""Codecs and aggregation rules of your own, by name (docs/extending.md). worker/connect.py registers topologies."""

from __future__ import annotations

import re
from typing import get_args

from .coordination.server.rounds import OWN_RULES, RuleName
from .core.codecs import CODECS, Codec
from .core.robust.aggregator import RULES
from .core.robust.rule import Rule
from .errors import ConfigError

LONGEST_BLOCK = 4096  # values: a server and a worker cut tensors at multiples of it
_SHIPPED = frozenset(CODECS)


def register_codec(codec: Codec) -> None:
    """Make `codec=codec.name` mean this codec, alone or in a recipe. Every process of the run registers it before it
    joins; one that has not is refused."""
    _check_name("codec", codec.name, taken=codec.name in _SHIPPED or bool(re.fullmatch(r"sparse\d+", codec.name)))
    if codec.block_values not in [1 << power for power in range(LONGEST_BLOCK.bit_length())]:
        raise ConfigError(
            f"block_values of a codec must be a power of two, at most {LONGEST_BLOCK}, got {codec.block_values}"
        )
    CODECS[codec.name] = codec


def register_rule(rule: Rule) -> None:
    """Make `aggregation=rule.name` mean this rule: on a server where it is registered, and among peers that all have
    registered it."""
    _check_name("aggregation", rule.name, taken=rule.name in get_args(RuleName))
    RULES[rule.name] = lambda: rule
    OWN_RULES[rule.name] = rule.fewest


def _check_name(what: str, name: str, *, taken: bool) -> None:
    if taken or not re.fullmatch(r"[a-z][a-z0-9_.\-]{0,31}", name):
        problem = "outerstep has one of that name" if taken else "use lower-case letters, digits, '_', '.' and '-'"
        raise ConfigError(f"{what} of your own cannot be called {name!r}: {problem}")


__all__ = ["register_codec", "register_rule"]
