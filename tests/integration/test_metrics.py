"""`GET /metrics` of real servers and peers, and the files beside it: read by Prometheus' own client library, a parser
of PromQL and Grafana's own types. (`promtool check` says the same of both; it is no Python package.)"""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import torch
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import outerstep
from outerstep.events import MessageRefused, RoundSummary, VersionPublished, WorkerDied
from outerstep.observe.families import MOST_LINKS, MOST_WORKERS, families_of
from outerstep.observe.prometheus import CONTENT_TYPE, LONGEST_LABEL, write_metrics
from outerstep.observe.sinks import EventCounts
from outerstep.observe.status import (
    AboveStatus,
    LayerStatus,
    LinkStatus,
    PeerMemberStatus,
    PeerStatus,
    PlanStatus,
    ServerFragmentStatus,
    ServerStatus,
    TokensStatus,
    WorkerStatus,
)
from outerstep.security import parse_address
from outerstep.security.tls import pinning_context
from outerstep.topology.gossip.node import Node, NodeSettings
from outerstep.types import Agreement
from outerstep.worker import DiLoCoWorker
from sites import Site
from support import tiny_model, train_steps, wait_until

MONITORING = Path(outerstep.__file__).parents[2] / "examples" / "monitoring"
HOSTILE = 'a"} 1\nouterstep_loss 0\n\\x1b[31m\x1b]0;owned\x07'

FULL = ServerStatus(
    mode="sync",
    run_id="0" * 16,
    outerstep="9.9",
    uptime_s=3.5,
    bytes_received=7,
    bytes_sent=8,
    sync_round=4,
    num_workers=2,
    heartbeat_timeout=120.0,
    journal={"last": 3, "records": 2, "size_bytes": 100},
    plan=PlanStatus(sync_every=50, codec="bf16", revision=1),
    connections={"open": 2, "strangers": 1, "turned_away": 3},
    tokens=TokensStatus(total=10, budget=20, per_second=2.5, seconds_left=4.0),
    workers={
        "left": WorkerStatus(step=3, steps_per_second=1.5, loss=1.25, last_seen_s=0.5, delta_norm=2.0),
        HOSTILE: WorkerStatus(loss=float("inf"), last_seen_s=1.0),
    },
    links=[
        LinkStatus(source="left", target="the server", bytes_per_s=1e6, latency_s=0.01, age_s=9.0),
        LinkStatus(source="left", target="the server", bytes_per_s=2e6, latency_s=0.02, age_s=1.0),
    ],
    layer=LayerStatus(layer="top", target_utilization=0.95, utilization=0.9),
    above=AboveStatus(cluster="east", joined=True, exchanges=2),
    fragments=[
        ServerFragmentStatus(
            version=4,
            contributed=["left"],
            expected=["left", "right"],
            watched={"aggregated_grad_norm": 1.0, "peer_grad_similarity": 0.5, "weight_divergence": 0.1},
        )
    ],
)
PEER = PeerStatus(mode="gossip", peer_id="anna", begun=True, members=[PeerMemberStatus(peer_id="anna", loss=2.0)])


def counted() -> EventCounts:
    counts = EventCounts()
    counts(WorkerDied("left", 9.0))
    counts(MessageRefused("Join", "x", "unauthorized", "no"))
    counts(MessageRefused("Join", "x", "made up by a stranger", "no"))
    agreed = Agreement(fragment=0, version=1, anchor_hash="0" * 32)
    counts(VersionPublished(agreed, RoundSummary(losses=(1.0,), waited_s=0.5, size_bytes=700)))
    return counts


def read(page: bytes) -> dict[str, Metric]:
    return {metric.name: metric for metric in text_string_to_metric_families(page.decode())}


CALM = replace(FULL, workers={"left": FULL.workers["left"]})
ALL = {family.name: family for status in (FULL, PEER, CALM) for family in families_of(status, counted(), {"wandb": 1})}

NOT_BASE_UNITS = re.compile(r"_(ms|milliseconds|us|minutes|hours|kb|mb|kilobytes|megabytes|bits|percent)(_|$)")


@pytest.mark.parametrize("name", sorted(ALL))
def test_names_follow_prometheus_rules(name: str) -> None:
    """As `promtool check metrics` lints them."""
    family = ALL[name]
    assert re.fullmatch(r"outerstep(_[a-z]+)+", name)
    assert (family.kind == "counter") == name.endswith("_total")
    assert not NOT_BASE_UNITS.search(name)
    assert not re.search(r"_(gauge|counter|count|sum|bucket)(_|$)", name.removesuffix("_total"))
    assert family.help.endswith(".")
    assert "\n" not in family.help
    for unit in ("seconds", "bytes"):  # a unit is the last word, or stands before _total or _per_second
        if unit in name.split("_"):
            assert re.search(rf"_{unit}(_total|_per_second)?$", name) or name.endswith("_per_second"), name
    assert all(label in LABELS for labels, _ in family.samples for label, _ in labels)


LABELS = {
    "worker",
    "fragment",
    "source",
    "target",
    "event",
    "code",
    "state",
    "reason",
    "mode",
    "run_id",
    "version",
    "logger",
}


def test_a_page_has_each_family_once_and_a_hostile_name_is_text() -> None:
    page = write_metrics(families_of(FULL, counted()))
    found = read(page)
    assert page.count(b"# TYPE outerstep_worker_loss ") == 1
    assert len(found) == page.count(b"# HELP ") == page.count(b"# TYPE ")
    losses = {s.labels["worker"]: s.value for s in found["outerstep_worker_loss"].samples}
    assert losses["left"] == 1.25
    [other] = losses.keys() - {"left"}
    assert other.isprintable()
    assert "owned" in other
    assert b"\x1b" not in page
    assert "outerstep_loss" not in found  # inf and 1.25 have no mean
    assert [s.value for s in found["outerstep_round_wait_seconds"].samples] == [0.5]
    assert [s.value for s in found["outerstep_link_bytes_per_second"].samples] == [2e6]  # the newest
    assert {s.labels["code"]: s.value for s in found["outerstep_refusals"].samples} == {"unauthorized": 1, "other": 1}
    assert {s.labels["state"] for s in found["outerstep_connections"].samples} == {"open", "strangers"}


def test_many_workers_and_links_make_a_bounded_page() -> None:
    workers = {f"{'w' * 120}{i:04}": WorkerStatus(loss=1.0) for i in range(2 * MOST_WORKERS)}
    links = [LinkStatus(source=f"w{i}", target="x", bytes_per_s=1.0) for i in range(MOST_LINKS + 3)]
    found = read(write_metrics(families_of(ServerStatus(mode="sync", workers=workers, links=links), EventCounts())))
    assert len(found["outerstep_worker_loss"].samples) == MOST_WORKERS
    assert len(found["outerstep_link_latency_seconds"].samples) == MOST_LINKS
    assert [s.value for s in found["outerstep_samples_left_out"].samples] == [MOST_WORKERS + 3]
    assert [s.value for s in found["outerstep_workers"].samples] == [2 * MOST_WORKERS]


def test_names_that_are_the_same_once_cut_are_one_series() -> None:
    workers = {"w" * LONGEST_LABEL + end: WorkerStatus(loss=1.0) for end in "ab"}
    found = read(write_metrics(families_of(ServerStatus(mode="sync", workers=workers), EventCounts())))
    assert len(found["outerstep_worker_loss"].samples) == 1


# --- a live server and a live peer ------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, sync_every=1)
    yield made
    made.server.stop()


def scrape(site: Site, token: str | None) -> tuple[int, str, bytes]:
    """As Prometheus does: TLS, and a bearer token."""
    host, port = parse_address(site.address)
    connection = http.client.HTTPSConnection(host, port, timeout=30, context=pinning_context())
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request("GET", "/metrics", headers=headers)
    answer = connection.getresponse()
    try:
        return answer.status, answer.headers["Content-Type"], answer.read()
    finally:
        connection.close()


def test_a_server_is_scraped_with_a_token_that_may_read_and_with_no_other(site: Site) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCoWorker(model, optimizer, site.server.access.join_string, worker_id="left") as worker:
        worker.last_loss = 1.5
        train_steps(model, optimizer, 2, seed=1)
        wait_until(lambda: site.server.typed_status().workers["left"].loss == 1.5)
        status, kind, page = scrape(site, site.run_token)
    assert (status, kind) == (200, CONTENT_TYPE)
    found = read(page)
    assert [s.value for s in found["outerstep_worker_loss"].samples] == [1.5]
    assert [s.value for s in found["outerstep_rounds"].samples] == [2.0]
    assert {s.labels["event"] for s in found["outerstep_events"].samples} >= {"server", "join", "round"}
    assert next(s.value for s in found["outerstep_round_bytes"].samples) > 0
    for wrong in (None, "0" * 64):
        status, _, page = scrape(site, wrong)
        assert status == 401
        assert b"outerstep_" not in page


def test_a_peer_is_scraped_too() -> None:
    with (
        Node(NodeSettings(peer_id="anna", listen="127.0.0.1:0", insecure=True)) as node,
        urllib.request.urlopen(f"http://{node.address}/metrics", timeout=30) as answer,
    ):
        found = read(answer.read())
    assert [s.labels["mode"] for s in found["outerstep_run_info"].samples] == ["gossip"]
    assert [s.value for s in found["outerstep_member"].samples] == [0.0]


# --- the files for Prometheus and Grafana -----------------------------------------------------------------------------


def metrics_in(expression: str) -> set[str]:
    """Every metric that a PromQL expression names. Raises if it is none."""
    found, stack = set[str](), [promql_parser.parse(expression)]
    while stack:
        node = stack.pop()
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)
        for part in ("expr", "lhs", "rhs", "vector_selector", "param"):
            inner = getattr(node, part, None)
            if isinstance(inner, promql_parser.Expr):
                stack.append(inner)
        stack += [each for each in getattr(node, "args", None) or () if isinstance(each, promql_parser.Expr)]
    return found


def test_every_rule_is_promql_and_watches_metrics_that_exist() -> None:
    rules = yaml.safe_load((MONITORING / "outerstep.rules.yml").read_text())
    [group] = rules["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 8
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        named = metrics_in(rule["expr"])
        assert named
        assert named - {"up"} <= ALL.keys(), rule["alert"]
    with pytest.raises(ValueError, match="inside brackets"):
        metrics_in("rate(outerstep_loss[5m")


def test_the_dashboard_is_one_by_grafanas_own_types() -> None:
    """Every key of the file is one that Grafana's published schema has, down to queries and options of panels: what it
    does not know would be lost on the way through its types."""
    register_default_plugins()
    file = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    back = json.loads(JSONEncoder().encode(Dashboard.from_json(file)))
    assert list(lost(file, back)) == []
    assert list(lost({**file, "pannels": []}, json.loads(JSONEncoder().encode(Dashboard.from_json(file)))))
    queries = [target["expr"] for panel in file["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    for query in queries:
        plain = query.replace("$__rate_interval", "5m").replace("$job", "outerstep").replace("$instance", ".+")
        assert metrics_in(plain) <= ALL.keys(), query
    assert len({panel["id"] for panel in file["panels"]}) == len(file["panels"])
    cells = [(p["gridPos"]["x"] + dx, p["gridPos"]["y"] + dy) for p in file["panels"] for dx, dy in inside(p)]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


def inside(panel: dict[str, Any]) -> list[tuple[int, int]]:
    return [(dx, dy) for dx in range(panel["gridPos"]["w"]) for dy in range(panel["gridPos"]["h"])]


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Where `kept` has less than, or something else than, `given`."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{path}/{key}"
            else:
                yield from lost(value, kept[key], f"{path}/{key}")
    elif isinstance(given, list):
        if not isinstance(kept, list) or len(given) != len(kept):
            yield path
        else:
            for i, pair in enumerate(zip(given, kept, strict=True)):
                yield from lost(*pair, f"{path}[{i}]")
    elif given != kept:
        yield f"{path}: {given!r} became {kept!r}"
