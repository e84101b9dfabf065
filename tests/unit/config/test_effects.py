"""A setting that has no effect in the chosen mode is refused or warned about by name: every one of the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outerstep.config import ROLES, SERVER, WORKER, Role, Sourced, build, make_command, make_config, warnings_about
from outerstep.config import resolve as resolve_settings
from outerstep.config.kinds import write
from outerstep.config.reference import renew
from outerstep.errors import ConfigError

# By role and setting: a value that says something, a mode in which it has no effect, one in which it has.
SERVER_CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "from_checkpoint": (True, {}, {"model": "m"}),
    "cluster": ("east", {}, {"above": "h:1"}),
    "above_every": (4, {}, {"above": "h:1"}),
    "above_wait_s": (5.0, {}, {"above": "h:1"}),
    "inner_momentum": (True, {}, {"above": "h:1"}),
    "via": ("h:2", {}, {"above": "h:1"}),
    "relay": (True, {}, {"above": "h:1"}),
    "grace_s": (5.0, {}, {"quorum": 2}),
    "staleness_policy": ("log", {}, {"async_mode": True}),
    "round_deadline_s": (5.0, {"async_mode": True}, {}),
    "start_deadline_s": (5.0, {"async_mode": True}, {}),
    "trim_fraction": (0.25, {}, {"aggregation": "trimmed_mean"}),
    "attackers": (1, {}, {"aggregation": "krum"}),
    "clip_radius": (1.0, {"aggregation": "median"}, {"aggregation": "centered_clipping"}),
    "aggregation_iterations": (2, {"aggregation": "median"}, {"aggregation": "geometric_median"}),
    "bucket_size": (2, {}, {"aggregation": "median"}),
    "dn_buffer_size": (4, {"quorum": 1}, {"async_mode": True}),
    "dylu_base_sync_every": (500, {"async_mode": True}, {"dylu": True}),
    "fragment_strategy": ("strided", {"num_fragments": 1}, {}),
    "embeddings_apart": (True, {"num_fragments": 1}, {"num_fragments": 2}),
    "outer_options": ("lr=0.5", {}, {"outer_optimizer": "adam"}),
    "least_sync_every": (5, {}, {"target_utilization": 0.9}),
    "most_sync_every": (200, {}, {"target_utilization": 0.9}),
    "global_batch": (4096, {}, {"target_utilization": 0.9}),
    "policy": ("own:policy", {}, {"target_utilization": 0.9}),
    "durability": ("checkpoint", {}, {"save_dir": "x"}),
    "save_every": (10, {}, {"save_dir": "x"}),
    "keep_saves": (9, {}, {"save_dir": "x"}),
    "compat_host": ("127.0.0.1", {}, {"compat_port": 8600}),
    "spool_dir": ("/tmp", {"spool_bytes": 0}, {}),
}
SERVED, RANKS, PEERS, REPLICAS = (
    {"server_addr": "h:1"},
    {"topology": "allreduce"},
    {"topology": "gossip"},
    {"topology": "torchft"},
)
CLUSTER_OF_REPLICAS = {"topology": "torchft", "above": "h:2", "cluster": "east"}
WORKER_CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "credentials": ("x", RANKS, SERVED),
    "stalled_after_s": (5.0, RANKS, SERVED),
    "join_timeout_s": (5.0, RANKS, REPLICAS),
    "group": ("off", RANKS, SERVED),
    "down_codec": ("fp32", PEERS, RANKS),
    "dylu": (True, REPLICAS, SERVED),
    "connections": (2, PEERS, SERVED),
    "give_up_after_s": (5.0, RANKS, REPLICAS),
    "offline_after_s": (5.0, {**SERVED, "max_sync_retries": 3}, REPLICAS),
    "offline_rounds": (2, RANKS, SERVED),
    "max_sync_retries": (2, PEERS, SERVED),
    "outer_lr": (0.5, SERVED, RANKS),
    "outer_momentum": (0.0, SERVED, PEERS),
    "nesterov": (False, SERVED, REPLICAS),
    "outer_optimizer": ("my:Rule", SERVED, RANKS),
    "outer_options": ("lr=0.5", SERVED, {**RANKS, "outer_optimizer": "my:Rule"}),
    "weight_by": ("equal", SERVED, RANKS),
    "on_divergence": ("repair", PEERS, RANKS),
    "peer_timeout_s": (5.0, SERVED, RANKS),
    "lighthouse": ("h:1", SERVED, REPLICAS),
    "min_replicas": (2, SERVED, REPLICAS),
    "quorum_timeout_s": (5.0, SERVED, REPLICAS),
    "transfer_timeout_s": (5.0, RANKS, REPLICAS),
    "replica_backend": ("nccl", SERVED, REPLICAS),
    "above": ("h:1", SERVED, CLUSTER_OF_REPLICAS),
    "cluster": ("west", REPLICAS, CLUSTER_OF_REPLICAS),
    "above_every": (3, REPLICAS, CLUSTER_OF_REPLICAS),
    "above_wait_s": (90.0, REPLICAS, CLUSTER_OF_REPLICAS),
    "inner_momentum": (True, REPLICAS, CLUSTER_OF_REPLICAS),
    "peers": ("h:1", SERVED, PEERS),
    "listen": ("h:1", SERVED, PEERS),
    "advertise": ("h:1", SERVED, PEERS),
    "peer_dir": ("x", SERVED, PEERS),
    "insecure": (True, SERVED, PEERS),
    "announce": (True, RANKS, PEERS),
    "page": (False, RANKS, PEERS),
    "aggregation": ("median", SERVED, PEERS),
    "trim_fraction": (0.25, SERVED, PEERS),
    "cosine_screen": (True, SERVED, PEERS),
    "bucket_size": (2, SERVED, PEERS),
    "min_peers": (2, SERVED, PEERS),
    "attackers": (1, SERVED, PEERS),
    "round_deadline_s": (5.0, SERVED, PEERS),
    "heartbeat_timeout_s": (5.0, SERVED, PEERS),
    "pattern": ("pairs", SERVED, PEERS),
    "protocol": (1, SERVED, PEERS),
    "invite_only": (False, SERVED, PEERS),
    "invitation": ("x", SERVED, PEERS),
}
CASES = {"server": SERVER_CASES, "worker": WORKER_CASES}
ALL = [(role, name, *case) for role in ROLES.values() for name, case in CASES[role.name].items()]
EVERY = pytest.mark.parametrize(
    ("role", "name", "value", "idle", "busy"), ALL, ids=[f"{role.name}-{name}" for role, name, *_ in ALL]
)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def kind_of(role: Role, name: str) -> type[Any]:
    return role.command if name in role.command_fields else role.config


def required(role: Role, name: str) -> dict[str, Any]:
    return {"num_workers": 5} if role is SERVER and kind_of(role, name) is role.config else {}


def made(role: Role, name: str, found: dict[str, Sourced]) -> Any:
    return (make_command if kind_of(role, name) is role.command else make_config)(role, found)


def resolve(role: Role, mode: dict[str, Any], environ: dict[str, str] | None = None) -> dict[str, Sourced]:
    said = {field: Sourced(value, f"flag {role.by_field[field].flag}") for field, value in mode.items()}
    return resolve_settings(role, said, environ=environ or {})


@pytest.mark.parametrize("role", ROLES.values(), ids=lambda role: role.name)
def test_the_cases_are_the_table(role: Role) -> None:
    assert set(CASES[role.name]) == {setting.field for setting in role.settings if setting.needs is not None}


@EVERY
def test_a_keyword_without_effect_is_refused_by_name_with_what_it_needs(
    role: Role, name: str, value: Any, idle: dict[str, Any], busy: dict[str, Any]
) -> None:
    kind, needs = kind_of(role, name), role.by_field[name].needs
    assert needs is not None
    build(kind, {**required(role, name), **busy, name: value})
    build(kind, {**required(role, name), **idle, name: role.defaults[name]})  # which changes nothing
    with pytest.raises(ConfigError, match=rf"^{name} (\({re.escape(repr(value))}\) needs|is for|\d averages) .*leave "):
        build(kind, {**required(role, name), **idle, name: value})


@EVERY
def test_a_flag_without_effect_is_refused_and_said_to_be_one(
    role: Role, name: str, value: Any, idle: dict[str, Any], busy: dict[str, Any]
) -> None:
    flag = re.escape(role.by_field[name].flag)
    with pytest.raises(ConfigError, match=rf"^{name} .*{name}: flag {flag}"):
        made(role, name, resolve(role, {**required(role, name), **idle, name: value}))
    found = resolve(role, {**required(role, name), **busy, name: value})
    made(role, name, found)
    assert warnings_about(role, found) == []


@EVERY
@pytest.mark.parametrize("place", ["variable", "file"])
def test_where_others_may_read_it_it_is_left_out_with_a_warning(
    role: Role, name: str, value: Any, idle: dict[str, Any], busy: dict[str, Any], place: str
) -> None:
    variable = role.variables(name)[0]
    environ = {variable: write(value)} if place == "variable" else {}
    if place == "file":
        text = f'"{value}"' if isinstance(value, str) else str(value).lower()
        Path("outerstep.toml").write_text(f"[{role.name}]\n{name} = {text}\n")
    source = variable if place == "variable" else "outerstep.toml:2"
    found = resolve(role, {**required(role, name), **idle}, environ)
    needs = role.by_field[name].needs
    assert needs is not None
    expected = f"{name} ({value!r}, {source}) is left out: it needs {needs.text}, and has no effect here"
    assert warnings_about(role, found) == [expected]
    assert made(role, name, found) == made(role, name, resolve(role, {**required(role, name), **idle})), "the default"
    assert warnings_about(role, resolve(role, {**required(role, name), **busy}, environ)) == []


def test_all_of_them_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^grace_s \(5.0\) needs .*; dylu_base_sync_every \(500\) needs dylu"):
        build(SERVER.config, {"num_workers": 2, "grace_s": 5.0, "dylu_base_sync_every": 500})


def test_a_bad_value_is_a_bad_value_even_where_it_would_have_no_effect() -> None:
    with pytest.raises(ConfigError, match=r"^grace_s must be ≥ 0, got -1.0 \(grace_s: OUTERSTEP_GRACE_S\)$"):
        make_config(SERVER, resolve(SERVER, {"num_workers": 2}, {"OUTERSTEP_GRACE_S": "-1"}))


def test_delayed_nesterov_that_is_off_is_off_in_every_mode() -> None:
    assert build(SERVER.config, {"num_workers": 2, "dn_buffer_size": 0}).delayed_nesterov == 0


def test_a_topology_of_ones_own_reads_what_it_likes() -> None:
    build(WORKER.config, {"topology": "mine", "min_peers": 3, "lighthouse": "h:1", "dylu": True, "outer_lr": 0.5})


def test_the_reference_page_lists_each_with_what_it_needs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "configuration.md").read_text()
    assert page == renew(page)
    table = page.partition("<!-- needs -->")[2].partition("<!-- end of needs -->")[0]
    for role, name, *_ in ALL:
        assert any(line.startswith(f"| {role.name} |") and f"`{name}`" in line for line in table.splitlines()), name
