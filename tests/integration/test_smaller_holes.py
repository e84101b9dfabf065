"""Holes that a holder of a token, a neighbour on the machine or a web page could use, each closed for good.

Every test is named after its hole. Whoever attacks here holds the run's token, and says what a worker never would.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import socket
import stat
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rich.console import Console
from torch import nn

from outerstep.cli.status import render
from outerstep.compat import CompatServer
from outerstep.coordination.server import commits
from outerstep.coordination.server.remembered import LEAP
from outerstep.core.manifest import describe
from outerstep.errors import ConfigError, ManifestMismatch, ModelError, NotFinite, PlanMismatch, Quarantined
from outerstep.observe.log_lines import PrintableFormatter
from outerstep.server import DiLoCoServer, controlling
from outerstep.topology.gossip.node.records import PeerFolder, remembered_id
from outerstep.types import Control, Heartbeat, Leave, Manifest, MeasuredLink, MemberFacts, Wishes
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from sites import Site
from support import HandClient, Ledger, assert_same, count, kill, make_frame, memory_worker, params_of, tiny_model

MANIFEST = describe(tiny_model())[1]


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, codec="fp32") as made:
        yield made


def first_joiner(server: DiLoCoServer, manifest: Manifest | None = MANIFEST, **wishes: Any) -> HandClient:
    return HandClient(MemoryTransport(server.service), "mallory", manifest, wishes=Wishes(**wishes))


# --- the first joiner's manifest ----------------------------------------------------------------------------------


def without(manifest: Manifest, name: str, **changes: Any) -> Manifest:
    kept = tuple(spec for spec in manifest.parameters if spec.name != name)
    return replace(manifest, parameters=kept, **changes)


class TestFalseAliasesOfTheFirstJoiner:
    """Two tensors are tied only if the server's model says so too; else one of them would be dropped."""

    @pytest.mark.parametrize(
        ("alias", "kept", "why"),
        [
            ("2.weight", "0.weight", "shape"),
            ("4.weight", "2.weight", "shape"),
            ("2.bias", "0.missing", "not among the parameters"),
        ],
    )
    def test_false_aliases_are_refused_by_name(self, server: DiLoCoServer, alias: str, kept: str, why: str) -> None:
        with pytest.raises(ManifestMismatch, match=alias) as caught:
            first_joiner(server, without(MANIFEST, alias, aliases={alias: kept})).join()
        assert why in str(caught.value)
        assert_same(server.get_global_params(), params_of(tiny_model()))
        first_joiner(server).join()  # an honest one is the first then

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_false_aliases_of_equal_shape_must_have_equal_dtype_and_values(self, dtype: torch.dtype) -> None:
        state = {"a": torch.ones(3), "b": torch.ones(3, dtype=dtype), "c": torch.zeros(3)}
        model = nn.ParameterDict({name: nn.Parameter(value) for name, value in state.items()})
        manifest = describe(model)[1]
        with DiLoCoServer(state, num_workers=1, port=0, codec="fp32") as server:
            with pytest.raises(ManifestMismatch, match=r"'c'.*other values"):
                first_joiner(server, without(manifest, "c", aliases={"c": "a"})).join()
            tied = first_joiner(server, without(manifest, "b", aliases={"b": "a"}))
            if dtype is torch.float32:
                tied.join()  # they are the same: whether they are tied is the model's affair
            else:
                with pytest.raises(ManifestMismatch, match=r"'b'.*float16"):
                    tied.join()
            assert_same(server.get_global_params(), {name: value.float() for name, value in state.items()})

    def test_an_alias_that_is_a_parameter_too_is_refused(self, server: DiLoCoServer) -> None:
        with pytest.raises(ManifestMismatch, match=r"'2\.bias'.*both"):
            first_joiner(server, replace(MANIFEST, aliases={"2.bias": "0.bias"})).join()

    @pytest.mark.parametrize("dtype", ["int8", "bool", "no such thing"])
    def test_a_dtype_that_would_round_the_saved_model_is_refused(self, server: DiLoCoServer, dtype: str) -> None:
        odd = replace(MANIFEST.parameters[0], dtype=dtype)
        with pytest.raises(ManifestMismatch, match=rf"'0\.weight'.*{dtype}"):
            first_joiner(server, replace(MANIFEST, parameters=(odd, *MANIFEST.parameters[1:]))).join()

    def test_a_counter_is_no_parameter(self) -> None:
        state = {"weight": torch.ones(3), "steps": torch.tensor(7)}
        specs = [describe(nn.ParameterDict({"weight": nn.Parameter(state["weight"])}))[1].parameters[0]]
        specs.append(replace(specs[0], name="steps", shape=()))
        with (
            DiLoCoServer(state, num_workers=1, port=0, codec="fp32") as server,
            pytest.raises(ManifestMismatch, match=r"'steps'.*int64"),
        ):
            first_joiner(server, Manifest(parameters=tuple(specs))).join()


# --- the first joiner's wishes ------------------------------------------------------------------------------------


class TestWishesOfTheFirstJoiner:
    """What the server leaves open is the first worker's to say, but within reason."""

    @pytest.mark.parametrize(
        ("wishes", "named"),
        [
            ({"sync_every": 2**53}, "sync_every.*9007199254740992.*--sync-every"),
            ({"sync_every": 10_001}, "sync_every"),
            ({"num_fragments": 6, "sync_every": 2**53}, "sync_every"),
            ({"num_fragments": 2**53, "sync_every": 500}, "num_fragments"),
            ({"delay": 400, "alpha": 1.0, "sync_every": 500}, "fragment_alpha"),
            ({"codec": "control-2bit"}, "codec.*control-2bit.*--codec"),
            ({"codec": "fp32,norms=control-2bit"}, "codec.*control-2bit"),
            ({"codec": "sparse1"}, "codec.*sparse1"),
            ({"down_codec": "control-2bit"}, "down_codec.*control-2bit"),
            ({"codec": "fp32\x1b[2J"}, "unknown codec"),
        ],
    )
    def test_wishes_without_bounds_are_refused(self, wishes: dict[str, Any], named: str) -> None:
        with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0) as server:
            with pytest.raises(PlanMismatch, match=named):
                first_joiner(server, **wishes).join()
            assert server.service.coordinator.plan is None
            assert first_joiner(server, sync_every=10_000, codec="int8").join().plan.sync_every == 10_000

    def test_the_server_may_want_what_a_worker_may_not_wish_for(self) -> None:
        settings: dict[str, Any] = {"sync_every": 20_000, "codec": "control-2bit"}
        with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, **settings) as server:
            assert first_joiner(server, **settings).join().plan.codec == "control-2bit"


# --- text that moves the cursor -----------------------------------------------------------------------------------

ODD = "a\n2026-01-01 INFO forged\x1b[2J\x1b]0;title\x07\r\x9b31m\u202eb"


def is_plain(text: str) -> bool:
    """One line, and nothing in it that a terminal would act upon."""
    return text.isprintable()


class TestHostnamesReasonsAndNamesWithEscapeCodes:
    """Names and reasons come from anybody; a terminal and a log show them, and obey nothing in them."""

    def test_the_log_of_the_server(self, server: DiLoCoServer, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG, logger="outerstep"):
            client = HandClient(MemoryTransport(server.service), "mallory", MANIFEST, hostname=ODD)
            client.join()
            with pytest.raises(PlanMismatch):
                first_joiner(server, tokenizer=ODD).join()
            client.transport.call(Control(kind="drain", worker_id="mallory", reason=ODD))
            client.transport.call(Leave(**client.session.head, reason=ODD))
        said = [record.getMessage() for record in caplog.records]
        assert sum("forged" in line for line in said) >= 3, said
        assert all(map(is_plain, said)), said

    def test_the_log_of_refusals(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        site = Site(tmp_path)
        try:
            with caplog.at_level(logging.DEBUG, logger="outerstep"):
                head = b"GET /\x9b31m HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
                assert site.say(head).status in (400, 401)
                HandClient(site.transport(), "first", MANIFEST).join()
                with pytest.raises(PlanMismatch):
                    HandClient(site.transport(), "mallory", MANIFEST, wishes=Wishes(tokenizer=ODD)).join()
            said = [record.getMessage() for record in caplog.records]
            assert any("forged" in line for line in said), said
            assert all(map(is_plain, said)), said
        finally:
            site.server.stop()
        assert all(map(is_plain, site.events_file.read_text().split("\n")))
        assert ODD in site.events("refused")[-1]["why"]  # and programs read what was said

    def test_status_on_a_terminal(self) -> None:
        shown = on_terminal(
            {
                "mode": "sync",
                "run_id": ODD,
                "closing": ODD,
                "last_save": ODD,
                "plan": {"sync_every": 1, "codec": ODD},
                "workers": {ODD: {"hostname": ODD}},
                "fragments": [{"version": 1, "contributed": [ODD], "waiting_for": ODD}],
            }
        )
        assert shown.count("forged") >= 6
        assert all(map(is_plain, shown.split("\n")))
        assert not any(line.startswith("2026") for line in shown.split("\n"))

    def test_status_of_a_peer_on_a_terminal(self) -> None:
        member = {"peer_id": ODD, "address": ODD, "trouble": ODD}
        shown = on_terminal(
            {"mode": "gossip", "peer_id": ODD, "run_id": ODD, "begun": True, "members": [member], "silent": [ODD]}
        )
        assert shown.count("forged") >= 5
        assert all(map(is_plain, shown.split("\n")))

    def test_the_log_of_a_process_that_the_command_line_started(self) -> None:
        record = logging.LogRecord("outerstep", logging.INFO, "x.py", 1, "peer %s came", (ODD,), None)
        line = PrintableFormatter("%(levelname)s %(message)s").format(record)
        assert is_plain(line)
        assert line.startswith("INFO peer a\\n2026")


def on_terminal(status: dict[str, Any], address: str = "h:1") -> str:
    console = Console(width=400, no_color=True)
    with console.capture() as captured:
        console.print(render(status, address))
    return captured.get()


@pytest.mark.parametrize("address", ["[fe80::1]:8512", "[::1]:8512", "[2001:db8::1]:8512"])
@pytest.mark.parametrize("mode", ["sync", "gossip"])
def test_a_link_local_address_does_not_vanish_from_status(address: str, mode: str) -> None:
    members = [{"peer_id": "other", "address": "[fe80::2]:8513"}]
    shown = on_terminal(
        {
            "mode": mode,
            "peer_id": "me",
            "begun": True,
            "members": members,
            "run_id": "[bold]",
            "workers": {"left": {"hostname": "[fe80::2]:8513"}},
        },
        address,
    )
    assert address in shown
    assert "[fe80::2]:8513" in shown
    assert "run [bold]" in shown


# --- the journal --------------------------------------------------------------------------------------------------


def kept_server(folder: Path, **settings: Any) -> DiLoCoServer:
    """A server whose run is in `folder`, without a port."""
    facts = {"num_workers": 1, "codec": "fp32", "save_dir": str(folder), **settings}
    made = DiLoCoServer(Ledger().state_dict(), port=0, **facts)
    made.service.start()
    return made


def test_the_journal_does_not_grow_quadratically_by_joins_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 16
    monkeypatch.setattr(commits, "MOST_RECORDS", most)
    server, longest = kept_server(tmp_path), 0
    for guest in range(10 * most):
        client = HandClient(MemoryTransport(server.service), f"guest{guest}")
        client.join()
        client.transport.call(Leave(**client.session.head))
        longest = max(longest, len(list((tmp_path / "journal").iterdir())))
    assert longest <= 2 * most + 2  # behind the checkpoint before the last
    assert server.sync_round == 0
    kill(server)
    resumed = kept_server(tmp_path)
    assert resumed.service.coordinator.members.find(f"guest{10 * most - 1}") is not None
    resumed.service.stop()


def spoil(client: HandClient) -> None:
    """Offend until it is one too many."""
    for _ in range(3):
        with pytest.raises(NotFinite):
            client.contribute(make_frame({"cells": torch.tensor([float("nan"), 0.0])}))


def test_a_quarantine_holds_after_a_kill_without_another_record(tmp_path: Path) -> None:
    server = kept_server(tmp_path, num_workers=2)
    good, bad = (HandClient(MemoryTransport(server.service), name) for name in ("good", "bad"))
    good.join()
    bad.join()
    spoil(bad)
    kill(server)

    server = kept_server(tmp_path, num_workers=2)
    transport = MemoryTransport(server.service)
    bad.transport = transport
    bad.join()
    with pytest.raises(Quarantined):
        bad.contribute(make_frame({"cells": torch.ones(2)}))
    transport.call(Control(kind="pardon", worker_id="bad"))
    kill(server)

    server = kept_server(tmp_path, num_workers=2)
    bad.transport = MemoryTransport(server.service)
    bad.join()
    bad.contribute(make_frame({"cells": torch.ones(2)}))  # the pardon held too
    server.service.stop()


# --- what is remembered of members --------------------------------------------------------------------------------


def test_a_worker_that_leaves_before_its_join_is_answered_leaves_no_address(
    server: DiLoCoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else names that come and go would pile up in a table that nothing bounds."""
    mallory, decide = first_joiner(server), server.service._decide

    def and_leaves(request: Any, **more: Any) -> Any:
        answer = decide(request, **more)
        decide(Leave(run_id=answer.run_id, worker_id="mallory", incarnation=answer.incarnation, reason="done"))
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(server.service, "_decide", and_leaves)
        mallory.join()
    assert server.service.addresses == {}
    mallory.join()
    assert list(server.service.addresses) == ["mallory"]


def test_a_status_shows_so_many_links_and_no_more(server: DiLoCoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands may tell of 64; the status is made while rounds wait."""
    monkeypatch.setattr(controlling, "MOST_SHOWN_LINKS", 3)
    mallory = first_joiner(server)
    mallory.join()
    told = tuple(MeasuredLink(source="mallory", target=f"w{number}", bytes_per_s=1.0) for number in range(5))
    facts = MemberFacts(links=told)
    mallory.transport.call(Heartbeat(**mallory.session.head, step=1, steps_per_second=1.0, facts=facts))
    assert [link["target"] for link in server.status()["links"]] == ["w0", "w1", "w2"]


# --- sequences ----------------------------------------------------------------------------------------------------


def test_a_worker_whose_sequence_was_pushed_by_another_recovers() -> None:
    """However it came about. No step of the owner is lost, and it needs no restart."""
    settings: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 2}
    with DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0, **settings) as server:
        model = Ledger()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with memory_worker(server, "owner", model, optimizer):
            count(model, optimizer, 0, 4)
            member = server.service.coordinator.members.find("owner")
            assert member is not None
            for push in (1, 2):
                with server.service.changed:
                    entry = replace(member.accepted[0], sequence=member.last_sequence(0) + LEAP)
                    member.accepted[0] = member.closed[0] = entry
                count(model, optimizer, 0, 4)
                assert member.last_sequence(0) > push * LEAP
        assert server.get_global_params()["cells"].tolist() == [12.0, 0.0]


# --- models and folders that used to end in a traceback -----------------------------------------------------------


@pytest.mark.parametrize("dtypes", [("float64", "float64"), ("float64", "float32"), ("bfloat16", "float64")])
def test_a_float64_model_survives_its_first_exchange(dtypes: tuple[str, str], tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = tiny_model()
        for module, dtype in zip((model[0], model[2]), dtypes, strict=True):
            module.to(getattr(torch, dtype))
        return model

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    settings: dict[str, Any] = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}
    with DiLoCoServer(build().state_dict(), num_workers=1, port=0, save_dir=str(tmp_path), **settings) as server:
        with memory_worker(server, "w", model, optimizer) as worker:
            for _ in range(4):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            assert worker.sync_metrics["inner_grad_norm"] == pytest.approx(
                math.sqrt(sum(spec.numel for spec in MANIFEST.parameters))
            )
        assert server.sync_round == 2
        held = {name: value.float() for name, value in params_of(model).items()}
        assert_same(server.get_global_params(), held)
    assert [p.dtype for p in model[0].parameters()] == [getattr(torch, dtypes[0])] * 2


class OneTensor(nn.Module):
    def __init__(self, tensor: torch.Tensor, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(tensor))


def attached(model: nn.Module) -> None:
    """A worker with this model, as far as it gets before it looks for a server."""
    DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=0.1), "127.0.0.1:9", worker_id="w")


@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        (torch.ones(3, 1).expand(3, 4), r"'weight' must have a place in memory for each value.*clone\(\)"),
        (torch.ones(1).expand(4), r"'weight' must have a place in memory for each value.*clone\(\)"),
        (torch.ones(10).as_strided((4, 4), (2, 1)), r"'weight' must have a place in memory.*clone\(\)"),
        (torch.ones(3).to_sparse(), r"'weight' must be dense, got torch\.sparse_coo.*to_dense\(\)"),
    ],
    ids=["expanded", "expanded from one", "overlapping", "sparse"],
)
def test_expanded_and_sparse_parameters_are_refused_by_name(tensor: torch.Tensor, rule: str) -> None:
    with pytest.raises(ModelError, match=rule):
        attached(OneTensor(tensor))


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, 4).t(), torch.ones(10)[::2], torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)],
)
def test_a_parameter_in_another_order_of_its_values_is_not_refused(tensor: torch.Tensor) -> None:
    attached(OneTensor(tensor))


def test_a_sparse_tensor_in_the_servers_model_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'odd' must be dense, got torch\.sparse_coo.*to_dense\(\)"):
        DiLoCoServer({"weight": torch.ones(3), "odd": torch.ones(3).to_sparse()}, num_workers=1, port=0)


@pytest.mark.parametrize("where", ["worker", "frozen", "buffer", "server"])
def test_a_name_over_512_characters_is_refused_with_the_limit(where: str) -> None:
    name = "x" * 513
    model = OneTensor(torch.ones(3), "weight" if where in ("frozen", "buffer") else name)
    if where == "frozen":
        model.register_parameter(name, nn.Parameter(torch.ones(3), requires_grad=False))
    if where == "buffer":
        model.register_buffer(name, torch.ones(3))
    use = partial(DiLoCoServer, model.state_dict(), 1, 0) if where == "server" else partial(attached, model)
    with pytest.raises(ModelError, match=r"at most 512 characters, got 513: 'xxx.*rename"):
        use()


UNREADABLE = [b"", b"[]", b"{", b'{"run_id":"\xff"}', b"\0" * 64, b"[" * 100_000, b'{"run_id":"a b"}', b'{"run_id":7}']


@pytest.mark.parametrize("content", UNREADABLE, ids=range(len(UNREADABLE)))
def test_an_unreadable_run_json_is_named_with_what_to_do(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(content)
    file.chmod(0o600)
    tmp_path.chmod(0o700)
    with pytest.raises(ModelError, match=r"run\.json cannot be read: .*; restore it, or delete it"):
        kept_server(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.json cannot be read: .*restore it, or give this peer an empty"):
        PeerFolder(tmp_path)
    assert remembered_id(tmp_path) is None
    file.unlink()
    kept_server(tmp_path).service.stop()


def test_state_folders_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        place = tmp_path / "deep" / "run"
        server = kept_server(place)
        HandClient(MemoryTransport(server.service), "w").join()
        server.save_state()
        server.service.stop()
    finally:
        os.umask(before)
    folders = [path for path in (place.parent, place, *place.rglob("*")) if path.is_dir()]
    files = [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.name for path in folders} >= {"deep", "run", "journal"}
    assert {path.suffix for path in files} >= {".json", ".safetensors"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


# --- proxies ------------------------------------------------------------------------------------------------------


def test_torchft_healing_asks_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights travel between two machines of the run, whatever http_proxy says."""
    pytest.importorskip("torchft")
    from outerstep.topology.torchft.quorum import PlainTransport

    patience = timedelta(seconds=20)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        proxy.settimeout(0.0)
        transport = PlainTransport("127.0.0.1", patience)
        try:
            transport.send_checkpoint([1], 7, {"weight": torch.arange(3.0)}, patience)
            healed = transport.recv_checkpoint(0, transport.metadata(), 7, patience)
        finally:
            transport.shutdown()
        assert torch.equal(healed["weight"], torch.arange(3.0))
        with pytest.raises(BlockingIOError):
            proxy.accept()


# --- requests of web pages ----------------------------------------------------------------------------------------

ELSEWHERE = [
    {"Origin": "https://evil.example.com"},
    {"Origin": "null"},
    {"Origin": "http://evil.example.com", "Content-Type": "text/plain"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Host": "evil.example.com"},
    {"Host": "evil.example.com:8513", "Origin": "http://evil.example.com:8513", "Sec-Fetch-Site": "same-origin"},
    {"Host": "127.0.0.1.nip.io"},
]
FROM_WORKERS: list[dict[str, str]] = [
    {},
    {"Host": "localhost:8513"},
    {"Host": "[::1]:8513"},
    {"Host": "[fe80::1%25eth0]:8513"},
    {"Host": "gpu-box"},
    {"Host": "gpu-box.lan:8513"},
    {"Host": "server.default.svc.cluster.local"},
    {"Host": "192.168.1.7"},
    {"Host": "known.example.com", "Origin": "http://known.example.com"},
    {"Host": "KNOWN.example.com.:8513"},
]


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, str]]:
    """The ports that ask for no token, by name."""
    state = tiny_model().state_dict()
    named: dict[str, Any] = {"num_workers": 1, "port": 0, "codec": "fp32", "advertise": "known.example.com"}
    with (
        DiLoCoServer(state, **named) as server,
        CompatServer(server, 0) as compat,
        DiLoCoServer(state, insecure=True, **named) as insecure,
    ):
        yield {"compatibility": compat.address, "insecure": insecure.address}


class TestCrossSiteRequests:
    """A page in somebody's browser is no worker, also on the machine that the port is open to."""

    @pytest.mark.parametrize("port", ["compatibility", "insecure"])
    @pytest.mark.parametrize("headers", ELSEWHERE, ids=str)
    def test_the_port_answers_no_cross_site_request(
        self, ports: dict[str, str], port: str, headers: dict[str, str]
    ) -> None:
        orders = {
            "compatibility": ("/register", {"worker_id": "page"}),
            "insecure": ("/v1/leave", {"run_id": "x"}),
        }
        path, body = orders[port]
        for method, where, data in (("POST", path, json.dumps(body)), ("GET", "/status", None)):
            status, said = ask(ports[port], method, where, data, headers)
            error = said["error"] if port == "insecure" else said
            assert (status, error["code"]) == (403, "forbidden"), said
            assert error["hint"]

    @pytest.mark.parametrize("port", ["compatibility", "insecure"])
    @pytest.mark.parametrize("headers", FROM_WORKERS, ids=str)
    def test_a_worker_is_answered_by_whichever_name_it_came(
        self, ports: dict[str, str], port: str, headers: dict[str, str]
    ) -> None:
        assert ask(ports[port], "GET", "/status", None, headers)[0] == 200

    def test_a_port_with_tokens_refuses_a_page_for_want_of_one(self, tmp_path: Path) -> None:
        site = Site(tmp_path)
        try:
            assert site.ask("GET", "/status")[0] == 401
        finally:
            site.server.stop()


def ask(address: str, method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()
