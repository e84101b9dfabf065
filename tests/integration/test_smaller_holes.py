"""Holes that a holder of a token, a neighbour on the machine or a web page could use, each closed for good.

Every test is named after its hole. Whoever attacks here holds the run's token, and says what a worker never would.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rich.console import Console
from torch import nn

from outerstep.cli.status import render
from outerstep.coordination.server import commits
from outerstep.coordination.server.remembered import LEAP
from outerstep.core.manifest import describe
from outerstep.errors import ManifestMismatch, NotFinite, PlanMismatch, Quarantined
from outerstep.observe.log_lines import PrintableFormatter
from outerstep.server import DiLoCoServer
from outerstep.types import Control, Leave, Manifest, Wishes
from outerstep.wire.memory import MemoryTransport
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
