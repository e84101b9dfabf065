"""The plan of a run, drawn up when its first worker has joined."""

from __future__ import annotations

from ..config import ServerConfig
from ..coordination.plan import Settled
from ..core.codecs.recipe import Recipe
from ..core.fragments import FragmentManager, check_cycle
from ..errors import ConfigError
from ..types import Manifest, Plan


def read_codecs(up: str, down: str) -> tuple[Recipe, Recipe]:
    """What the two settings mean. Raises ConfigError if one of them means nothing."""
    codec = Recipe.parse(up)
    if down == "same":
        return codec, codec.downlink()
    down_codec = Recipe.parse(down)
    for rule in down_codec.rules:
        if rule.codec.needs_feedback:
            raise ConfigError(f"down_codec must send every value, got {rule.codec.name}; int4 is the smallest")
        if rule.feedback:
            raise ConfigError(f"down_codec {down!r}: leave +feedback out, the server always keeps what it left out")
    return codec, down_codec


def draw_up(config: ServerConfig, settled: Settled, manifest: Manifest) -> Plan:
    """What was settled, applied to this model. Raises ConfigError if it cannot be."""
    codec, down_codec = read_codecs(settled.codec, settled.down_codec)
    check_cycle(settled.sync_every, settled.num_fragments)
    fragments = FragmentManager(
        manifest.parameters,
        settled.num_fragments,
        strategy=config.fragment_strategy,
        embeddings_apart=config.embeddings_apart,
    ).fragments
    return Plan(
        sync_every=settled.sync_every,
        codec=codec.name,
        down_codec=down_codec.name,
        fragments=tuple(tuple(names) for names in fragments),
        part_size_bytes=config.part_size_bytes,
        max_staleness=config.rules.max_staleness,
        heartbeat_timeout_s=config.heartbeat_timeout,
        mode=config.rules.mode,
        delay=settled.delay,
        alpha=settled.alpha,
        carry=settled.carry,
        tokenizer=settled.tokenizer,
        weight_by=config.weight_by,
        dylu=config.dylu_enabled,
    )


def check_room(config: ServerConfig, plan: Plan, manifest: Manifest) -> None:
    """The deterministic mode adds nothing before a round closes: the contributions of everybody must have room until
    then, or the last would wait for the first and the first for the last."""
    codec = Recipe.parse(plan.codec)
    size = sum(codec.codec(spec).encoded_bytes(spec.numel) for spec in manifest.parameters)
    needed, room = config.num_workers * size, config.pool_bytes + config.spool_bytes
    if config.deterministic and needed > room:
        raise ConfigError(
            f"deterministic keeps all contributions until their round closes: {config.num_workers} workers with {size} "
            f"bytes each need {needed}, pool_bytes and spool_bytes make {room}; raise spool_bytes"
        )
