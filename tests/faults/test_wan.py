"""Over slow lines: nothing that is merely slow is taken for dead, and nobody waits for the slowest longer than agreed.

The line is emulated (proxy.py): real sockets and TLS, its rate and round trip those of the row. What is asserted is
counted in rounds, steps and bytes.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from functools import partial

import pytest
import torch

from faults.proxy import Link, Proxy
from outerstep.server import DiLoCoServer
from outerstep.wire.http_transport import HttpTransport
from outerstep.worker import DiLoCoWorker
from support import Ledger, count, in_threads, record_agreements

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "down_codec": "fp32"}


@pytest.mark.slow
@pytest.mark.row("F16", level="WAN")
def test_at_10_mbit_and_200_ms_rounds_complete_and_no_timeout_fires(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the ratio of a large model: sending it takes longer than anybody stays silent for. (With the usual limit of
    30 s that would be 40 MB and more; here limit and model are smaller.)"""
    link, silence_s, cells = Link(10.0, 0.2), 3.0, 1_000_000
    assert 4 * cells / link.bytes_per_s > silence_s
    monkeypatch.setattr("outerstep.topology.server.build.HttpTransport", partial(HttpTransport, timeout_s=silence_s))
    settings = {"part_size_bytes": 256 << 10, "heartbeat_timeout": silence_s, "sync_every": 1, **PLAIN}
    with DiLoCoServer(Ledger(cells).state_dict(), num_workers=1, port=0, **settings) as server:
        assert server._http is not None
        server._http._limits = dataclasses.replace(server._http._limits, stall_s=silence_s)
        with Proxy(server.address, link=link) as line:
            model = Ledger(cells)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCoWorker(model, optimizer, line.address, heartbeat_interval=0.5) as worker:
                count(model, optimizer, 0, 2)
            assert line.carried["up"] > 2 * 4 * cells
            assert line.carried["up"] < 2.1 * 4 * cells
            assert line.cuts == 0
        assert server.sync_round == 2
        assert server.get_global_params()["cells"][0] == 2.0
        metrics = worker.sync_metrics
        assert (metrics["sync_retries"], metrics["reconnections"], metrics["offline_exchanges"]) == (0, 0, 0)
        assert server.status()["total_worker_deaths"] == 0


@pytest.mark.slow
@pytest.mark.row("F15", level="WAN")
def test_nobody_waits_for_a_worker_whose_line_is_ten_times_slower_and_it_still_contributes() -> None:
    """A quorum of two: rounds close while the third one's bytes are still on their way, and then they count."""
    cells, contributions = 32 << 10, 2
    settings = {"quorum": 2, "max_staleness": 10_000, "sync_every": 2, "staleness_policy": "log", **PLAIN}
    with DiLoCoServer(Ledger(cells).state_dict(), num_workers=3, port=0, **settings) as server:
        agreements, enough = record_agreements(server), threading.Event()

        def of_c() -> list[int]:
            """The rounds that it is in."""
            found = [a.version for a in list(agreements) if "c" in [p.worker_id for p in a.participants]]
            if len(found) >= contributions:
                enough.set()
            return found

        def work(name: str, cell: int, address: str) -> DiLoCoWorker:
            model = Ledger(cells)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCoWorker(model, optimizer, address, worker_id=name, heartbeat_interval=0.0) as worker:
                while not enough.is_set():
                    count(model, optimizer, cell, 1)
                    of_c()
            return worker

        quick, slow = Link(20.0, 0.01), Link(2.0, 0.1)
        with Proxy(server.address, link=quick) as near, Proxy(server.address, link=slow) as far:
            workers = in_threads(
                lambda: work("a", 0, near.address),
                lambda: work("b", 1, near.address),
                lambda: work("c", 2, far.address),
            )
        first, second, *_ = of_c()
        assert second - first >= 3, "the others waited for it"
        assert all(len(a.participants) >= 2 for a in agreements[:second])
        assert next(p.staleness for p in agreements[second - 1].participants if p.worker_id == "c") >= 2
        assert workers[2].sync_metrics["steps_discarded"] == 0
        assert server.get_global_params()["cells"][2] > 0


@pytest.mark.slow
@pytest.mark.row("F15", level="WAN")
def test_with_dynamic_local_updates_a_machine_ten_times_slower_takes_fewer_steps_and_is_in_every_round() -> None:
    steps, rounds = 30, 4
    settings = {"dylu_enabled": True, "sync_every": steps, "heartbeat_timeout": 60.0, **PLAIN}
    with DiLoCoServer(Ledger().state_dict(), num_workers=2, port=0, **settings) as server:
        agreements, enough = record_agreements(server), threading.Event()

        def work(name: str, cell: int, address: str, step_s: float) -> int:
            model = Ledger()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with DiLoCoWorker(model, optimizer, address, worker_id=name, heartbeat_interval=0.1) as worker:
                while not enough.is_set():
                    time.sleep(step_s)  # its computation
                    count(model, optimizer, cell, 1)
                    if len(agreements) >= rounds:
                        enough.set()
                return int(worker.sync_metrics["local_step"])  # type: ignore[arg-type]

        with Proxy(server.address, link=Link(100.0, 0.02)) as line:
            quick, slow = in_threads(
                lambda: work("a", 0, line.address, 0.004), lambda: work("b", 1, line.address, 0.04)
            )
            assert line.cuts == 0
        together = [{p.worker_id for p in a.participants} for a in agreements[:rounds]]
    assert together == [{"a", "b"}] * rounds
    # In the first round nobody's speed is known, and both take all steps; from then on the slow one a tenth or so.
    assert quick - steps > 2 * (slow - steps)
    assert slow > steps
