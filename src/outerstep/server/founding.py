"""The plan of a run, drawn up when its first worker has joined."""

from __future__ import annotations

from ..config import ServerConfig
from ..coordination.plan import Settled
from ..core.codecs import get_codec
from ..core.fragments import FragmentManager, check_cycle
from ..errors import ConfigError
from ..types import Manifest, Plan


def check_codec(name: str) -> None:
    """Is it known, and can workers use it?"""
    if get_codec(name).needs_feedback:
        raise ConfigError(
            f"codec {name!r} needs error feedback, which workers do not keep yet; int4 is the smallest without"
        )


def draw_up(config: ServerConfig, settled: Settled, manifest: Manifest) -> Plan:
    """What was settled, applied to this model. Raises ConfigError if it cannot be."""
    check_codec(settled.codec)
    check_cycle(settled.sync_every, settled.num_fragments)
    fragments = FragmentManager(
        manifest.parameters,
        settled.num_fragments,
        strategy=config.fragment_strategy,
        embeddings_apart=config.embeddings_apart,
    ).fragments
    return Plan(
        sync_every=settled.sync_every,
        codec=settled.codec,
        fragments=tuple(tuple(names) for names in fragments),
        part_size_bytes=config.part_size_bytes,
        max_staleness=config.rules.max_staleness,
        heartbeat_timeout_s=config.heartbeat_timeout,
        mode=config.rules.mode,
        delay=settled.delay,
        alpha=settled.alpha,
        carry=settled.carry,
        weight_by=config.weight_by,
        dylu=config.dylu_enabled,
    )
