"""Faults of the line, with real sockets: cut, flapping, answers lost, bytes changed. What was sent is counted in bytes.

Server and worker are the real ones; between them is a line that misbehaves (proxy.py). The books are exact: ledgers of
whole numbers, an outer step that adopts the mean.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from faults.proxy import CutAfter, Flapping, FlipOnce, Judge, LoseAnswers, Proxy, pass_on
from outerstep.coordination.worker.exchange import Patience
from outerstep.server import DiLoCoServer
from outerstep.wire.pipeline import IN_A_ROW
from outerstep.worker import DiLoCoWorker
from support import Ledger, count, in_threads, record_agreements

PART_BYTES = 64 << 10
CELLS = 16 * PART_BYTES // 4  # sixteen parts, and a header
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "down_codec": "fp32"}
CONNECTIONS = 4
HEADS_BYTES = 96 << 10  # requests, answers, handshakes: what goes beside the parts, generously


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test does not wait half a second between two tries."""
    monkeypatch.setattr(
        "outerstep.topology.server.build.Patience", partial(Patience, first_backoff_s=0.01, longest_backoff_s=0.05)
    )


@pytest.fixture(autouse=True, params=[False, True], ids=["near", "far"])
def _far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a long link parts follow each other on their connections."""
    if request.param:
        monkeypatch.setattr("outerstep.topology.server.link.LONG_S", 0.0)


@pytest.fixture(params=[False, True], ids=["TLS", "plain"])
def server(request: pytest.FixtureRequest) -> Iterator[DiLoCoServer]:
    with make_server(insecure=request.param) as made:
        yield made


def make_server(**settings: Any) -> DiLoCoServer:
    facts = {"num_workers": 1, "sync_every": 2, "part_size_bytes": PART_BYTES, **PLAIN, **settings}
    return DiLoCoServer(Ledger(CELLS).state_dict(), port=0, **facts)


def way_to(server: DiLoCoServer, line: Proxy) -> str:
    return f"http://{line.address}" if server.config.insecure else line.address


def train(server: DiLoCoServer, line: Proxy, rounds: int) -> DiLoCoWorker:
    """So many rounds of two steps each, and a clean end."""
    model = Ledger(CELLS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worker = DiLoCoWorker(
        model, optimizer, way_to(server, line), worker_id="w", heartbeat_interval=0.0, connections=CONNECTIONS
    )
    with worker:
        count(model, optimizer, 0, 2 * rounds)
    return worker


def cells(server: DiLoCoServer) -> torch.Tensor:
    return server.get_global_params()["cells"]


def payload_bytes(server: DiLoCoServer) -> int:
    return server.service.stores[0].uplink().layout.size_bytes


@pytest.mark.row("F02")
def test_after_a_cut_in_the_middle_of_an_upload_only_what_is_missing_is_sent(server: DiLoCoServer) -> None:
    cut = CutAfter(CELLS * 4 // 2)
    with Proxy(server.address, up=cut) as line:
        train(server, line, rounds=1)
        assert cut.fired >= 1
        assert server.status()["bytes_received"] == payload_bytes(server)  # each part was stored once
        again = CONNECTIONS * IN_A_ROW * PART_BYTES  # what was on its way when the line was cut
        assert line.carried["up"] <= payload_bytes(server) + again + HEADS_BYTES
    assert server.status()["total_submissions"] == 1
    assert cells(server)[0] == 2.0
    assert int(cells(server).count_nonzero()) == 1


@pytest.mark.row("F14")
def test_over_a_flapping_line_no_byte_travels_more_than_twice_on_average(server: DiLoCoServer) -> None:
    """No connection carries more than a few parts."""
    flapping, rounds = Flapping(seed=1, least=3 * PART_BYTES, most=6 * PART_BYTES), 3
    with Proxy(server.address, up=flapping, down=flapping) as line:
        train(server, line, rounds)
        assert flapping.fired > 10
        useful = {"up": rounds * payload_bytes(server), "down": (rounds + 1) * payload_bytes(server)}
        assert sum(line.carried.values()) <= 2 * sum(useful.values())
        assert line.carried["up"] <= 2 * useful["up"]
    assert server.sync_round == rounds
    assert server.status()["bytes_received"] == useful["up"]
    assert cells(server)[0] == 2.0 * rounds


@pytest.mark.row("F04")
def test_when_answers_are_lost_the_same_is_asked_again_and_applied_once(server: DiLoCoServer) -> None:
    lose, rounds = LoseAnswers(seed=3, probability=0.2), 4
    with Proxy(server.address, down=lose) as line:
        train(server, line, rounds)
        assert lose.fired > 10
    assert server.status()["total_submissions"] == server.sync_round == rounds
    assert cells(server)[0] == 2.0 * rounds


@pytest.mark.row("F04")
def test_a_commit_whose_answer_is_lost_gets_the_same_answer_again() -> None:
    """In plain text, so that the line can see which request it is."""
    asked, lost = [], []

    def see(flow: Any, piece: bytes) -> bytes:
        if piece.startswith(b"POST /v1/commit"):
            asked.append(flow)
        return piece

    def lose(flow: Any, piece: bytes) -> bytes | None:
        if asked and flow is asked[-1] and len(lost) < 2:
            lost.append(piece)
            return None
        return piece

    with make_server(insecure=True) as server, Proxy(server.address, up=see, down=lose) as line:
        train(server, line, rounds=1)
        assert [piece.startswith(b"HTTP/1.1 200 ") for piece in lost] == [True, True]  # it had said yes each time
        assert lost[0].split(b"\r\n\r\n")[1] == lost[1].split(b"\r\n\r\n")[1]
        assert server.status()["total_submissions"] == 1
        assert cells(server)[0] == 2.0


@pytest.mark.row("F21")
@pytest.mark.parametrize("way", ["up", "down"])
def test_in_plain_text_a_changed_byte_costs_one_part(way: str) -> None:
    flip = FlipOnce()
    with make_server(insecure=True) as server:
        ways: dict[str, Judge] = {"up": pass_on, "down": pass_on, way: flip}
        with Proxy(server.address, **ways) as line:
            worker = train(server, line, rounds=1)
            assert flip.fired == 1
            size = payload_bytes(server)
            assert line.carried["up"] <= size + (way == "up") * PART_BYTES + HEADS_BYTES
            assert line.carried["down"] <= 2 * size + (way == "down") * PART_BYTES + HEADS_BYTES
        assert worker.sync_metrics["sync_retries"] == 0  # not a failed exchange: one part, once more
        assert server.status()["bytes_received"] == size
        assert cells(server)[0] == 2.0
        assert int(cells(server).count_nonzero()) == 1


@pytest.mark.row("F21")
@pytest.mark.parametrize("way", ["up", "down"])
def test_under_tls_a_changed_byte_costs_its_connection_and_is_never_taken_for_data(way: str) -> None:
    flip = FlipOnce()
    with make_server() as server:
        ways: dict[str, Judge] = {"up": pass_on, "down": pass_on, way: flip}
        with Proxy(server.address, **ways) as line:
            train(server, line, rounds=1)
            assert flip.fired == 1
            size = payload_bytes(server)
            assert line.carried["up"] <= size + 4 * PART_BYTES + HEADS_BYTES
        assert server.status()["bytes_received"] == size
        assert cells(server)[0] == 2.0
        assert int(cells(server).count_nonzero()) == 1


@pytest.mark.row("F05", "F28")
def test_over_a_line_that_does_everything_wrong_two_workers_agree_and_go_on_when_it_is_mended() -> None:
    """Answers lost, so that requests come twice; connections cut, so that parts come in any order."""
    lose, flapping = LoseAnswers(seed=5, probability=0.1), Flapping(seed=6, least=PART_BYTES, most=8 * PART_BYTES)

    def both(flow: Any, piece: bytes) -> bytes | None:
        return None if lose(flow, piece) is None else flapping(flow, piece)

    with make_server(num_workers=2) as server, Proxy(server.address, up=flapping, down=both) as line:
        agreements = record_agreements(server)

        def mend() -> None:
            assert lose.fired > 0
            assert flapping.fired > 5
            line.up = line.down = pass_on

        stormy = threading.Barrier(2, action=mend, timeout=60)

        def work(name: str, cell: int) -> None:
            model = Ledger(CELLS)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCoWorker(model, optimizer, line.address, worker_id=name, heartbeat_interval=0.0):
                count(model, optimizer, cell, 4)
                stormy.wait()
                count(model, optimizer, cell, 2)

        in_threads(lambda: work("a", 0), lambda: work("b", 1))
        assert server.sync_round == 3
    assert [sorted(p.worker_id for p in agreement.participants) for agreement in agreements] == [["a", "b"]] * 3
    assert cells(server)[:2].tolist() == [3.0, 3.0]
