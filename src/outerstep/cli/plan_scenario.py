"""What a plan recommends, as a file that `outerstep simulate` plays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..coordination.cost import NOMINAL, NONE
from ..coordination.failures import RoundClosing
from ..coordination.planning import Option, PlannedSite, Situation
from ..coordination.planning.capacity import LEAST_POOL_BYTES, MOST_SPOOL_BYTES
from ..errors import ConfigError

HOURS = 24


def write_scenario(file: Path, situation: Situation, option: Option) -> None:
    text = scenario_text(situation, option)
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"--scenario {file} cannot be written: {error}") from error


def pool_bytes(members: int, up_bytes: float) -> int | None:
    """What a server needs on its disk for a whole round of contributions; None = what is usual is enough."""
    needed = math.ceil(members * up_bytes)
    return needed if needed > MOST_SPOOL_BYTES else None


def scenario_text(situation: Situation, option: Option) -> str:
    from ..simulate.fleet.scenario import TOPOLOGIES  # who only plans does not load the simulator

    if option.topology not in TOPOLOGIES:
        raise ConfigError(
            f"outerstep simulate plays {' and '.join(TOPOLOGIES)}, and {option.topology} is recommended; leave "
            "--scenario out"
        )
    if option.inside is not None and option.inside.engine != "server":
        raise ConfigError(
            "outerstep simulate plays clusters with a server, and one job for each site is recommended; "
            "plan with --inside server, or leave --scenario out"
        )
    return "\n".join(_lines(situation, option)) + "\n"


def _lines(situation: Situation, option: Option) -> Iterator[str]:
    inside = option.inside
    yield "# As outerstep plan recommends: outerstep simulate plays it."
    yield f'params = "{situation.parameters}"'
    yield f"hours = {HOURS}"
    yield "seed = 1"
    yield f'topology = "{option.topology}"'
    yield f'target = "{_plain(100 * situation.target_utilization)}%"'
    yield f'heartbeat_timeout = "{_seconds(situation.noticed_s)}"'
    if situation.overheads == NONE:
        yield "ideal = true"
    yield "\n[plan]"
    yield f"sync_every = {option.sync_every}"
    yield f'codec = "{option.codec}"'
    yield f"fragments = {option.num_fragments}"
    yield f"delay = {option.delay}"
    yield from _closes(option.closing, option.members)
    if inside is not None:
        workers = max(site.workers for site in situation.sites)
        yield "\n[inside]"
        yield f"sync_every = {inside.sync_every}"
        yield f'codec = "{inside.codec}"'
        yield from _closes(inside.closing, workers)
    yield "\n[server]"
    if situation.server_out_bytes_per_s:
        yield f'up = "{_rate(situation.server_out_bytes_per_s)}"'
        yield f'down = "{_rate(situation.server_in_bytes_per_s)}"'
    if situation.overheads.server_s_per_byte:
        yield f"speed = {_plain(NOMINAL.server_s_per_byte / situation.overheads.server_s_per_byte)}"
    members = max([option.members, *(site.workers for site in situation.sites if inside is not None)])
    needed = pool_bytes(members, option.up_bytes)
    if needed is not None:
        yield f'pool = "{needed + LEAST_POOL_BYTES}"'
    for site, count in _alike(situation.sites):
        yield "\n[[clusters]]"
        yield f'name = "{site.name}"'
        yield f"count = {count}"
        yield f"workers = {site.workers}"
        yield f'up = "{_rate(site.up_bytes_per_s)}"'
        yield f'down = "{_rate(site.down_bytes_per_s)}"'
        yield f'latency = "{_seconds(site.round_trip_s)}"'
        yield f'step_time = "{_seconds(site.step_s)}"'
        if inside is not None:
            yield f'lan = "{_rate(situation.local.bytes_per_s)}"'
            yield f'lan_latency = "{_seconds(2 * situation.local.latency_s)}"'
            yield f'server_lan = "{_rate(situation.server_local_bytes_per_s or situation.local.bytes_per_s)}"'
    if situation.expects_failures:
        yield "\n[failures]"
        yield f'per_hour = "{_plain(100 * situation.failures.per_hour)}%"'
        yield f'restart = "{_seconds(situation.failures.restart_s)}"'


def _closes(closing: RoundClosing, members: int) -> Iterator[str]:
    if closing.quorum is None:
        yield 'quorum = "all"'
    else:
        yield f'quorum = "{_plain(100 * closing.quorum / members)}%"'
        yield f'grace = "{_seconds(closing.grace_s)}"'


def _alike(sites: tuple[PlannedSite, ...]) -> Iterator[tuple[PlannedSite, int]]:
    """Each kind of site under the name of its first, and how many there are."""
    kinds: dict[PlannedSite, list[PlannedSite]] = {}
    for site in sites:
        kinds.setdefault(replace(site, name=""), []).append(site)
    for alike in kinds.values():
        yield alike[0], len(alike)


def _rate(bytes_per_s: float) -> str:
    return f"{_plain(8e-6 * bytes_per_s)}mbit"


def _seconds(seconds: float) -> str:
    return f"{_plain(seconds)}s" if seconds >= 1.0 else f"{_plain(1000 * seconds)}ms"


def _plain(number: float) -> str:
    """Without an exponent."""
    return f"{number:.9f}".rstrip("0").rstrip(".")
