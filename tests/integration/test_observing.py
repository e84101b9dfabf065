"""A user's function sees typed events of a server and of its workers, and a report of every round."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from outerstep.errors import Refused
from outerstep.events import (
    ContributionRefused,
    Event,
    MessageRefused,
    OffenceNoted,
    RoundReport,
    ServerStarted,
    ServerStopped,
    VersionPublished,
    WorkerJoined,
    WorkerLeft,
    WorkerStarted,
)
from outerstep.observe import EventLog, EventRing
from outerstep.server import DiLoCoServer
from outerstep.worker import DiLoCoWorker
from support import Ledger, count, in_threads, memory_worker, tiny_model, wait_until

E = TypeVar("E", bound=Event)
PLAIN: dict[str, Any] = {"codec": "fp32", "port": 0, "insecure": True, "outer_lr": 1.0, "outer_momentum": 0.0}


def of(kind: type[E], events: list[Event]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def test_a_function_sees_joins_rounds_and_refusals(tmp_path: Path) -> None:
    at_server: list[Event] = []
    log = tmp_path / "events.jsonl"
    with DiLoCoServer(
        Ledger().state_dict(), 2, sync_every=2, event_sink=at_server.append, event_log=str(log), **PLAIN
    ) as server:

        def work(i: int) -> tuple[list[Event], list[RoundReport]]:
            events: list[Event] = []
            reports: list[RoundReport] = []
            model = Ledger()
            optimizer = sgd(model)
            threads = set()

            def see(report: RoundReport) -> None:
                reports.append(report)
                threads.add(threading.current_thread())

            with DiLoCoWorker(
                *(model, optimizer, f"http://{server.address}"),
                worker_id=f"w{i}",
                event_sink=events.append,
                on_round=see,
            ):
                count(model, optimizer, i, 4)
            assert threads == {threading.current_thread()}
            return events, reports

        done = in_threads(*(lambda i=i: work(i) for i in range(2)))
        with pytest.raises(Refused):
            DiLoCoWorker(m := tiny_model(), sgd(m), f"http://{server.address}", worker_id="other").start()
    for i, (events, reports) in enumerate(done):
        assert [(r.worker, r.step, r.fragment, r.version) for r in reports] == [(f"w{i}", 2, 0, 1), (f"w{i}", 4, 0, 2)]
        for report in reports:
            assert (report.adoption, report.counted, report.steps_sent, report.steps_discarded) == (
                "adopted",
                True,
                2,
                0,
            )
            assert sorted(p.worker_id for p in report.participants) == ["w0", "w1"]
            assert report.bytes_sent > 0
            assert report.bytes_received > 0
            assert 0.0 < report.waited_s < 60.0
            assert report.metrics["pseudo_grad_norm"] == pytest.approx(2.0)
            assert report.metrics["inner_grad_norm"] == pytest.approx(1.0)
        assert [type(event) for event in events] == [WorkerStarted, RoundReport, RoundReport, WorkerLeft]
        assert of(RoundReport, events) == reports
        assert events[0] == WorkerStarted(f"w{i}", f"http://{server.address}", 0, [0])
    assert sorted(event.worker for event in of(WorkerJoined, at_server)) == ["w0", "w1"]
    assert sorted(event.worker for event in of(WorkerLeft, at_server)) == ["w0", "w1"]
    assert [event.agreement.version for event in of(VersionPublished, at_server)] == [1, 2]
    [refused] = [event for event in of(MessageRefused, at_server) if event.request == "Join"]  # a late beat may be, too
    assert refused.worker == "other"
    assert at_server[0] == ServerStarted(server.run_id, 0, resumed=False)
    assert at_server[-1] == ServerStopped(2)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == [event.kind for event in at_server]  # the file tells the same
    assert [{k: v for k, v in line.items() if k not in ("time", "event")} for line in lines] == [
        json.loads(json.dumps(event.facts, default=str)) for event in at_server
    ]


def test_a_missed_round_is_reported_as_rebased_and_a_nan_as_reloaded() -> None:
    ring, reports = EventRing(), list[RoundReport]()
    server = DiLoCoServer(Ledger(2).state_dict(), 1, sync_every=2, event_sink=ring, **PLAIN)
    server.service.start()
    model, late = Ledger(2), Ledger(2)
    optimizer, late_optimizer = sgd(model), sgd(late)
    with memory_worker(server, "old", model, optimizer):
        count(model, optimizer, 0, 3)
        joiner = memory_worker(server, "late", late, late_optimizer, outside_changes="keep")
        joiner.on_round(reports.append)
        joiner.start()
        count(late, late_optimizer, 1, 1)
        count(model, optimizer, 0, 1)  # the open round closes without waiting for the joiner
        in_threads(lambda: count(late, late_optimizer, 1, 1), lambda: count(model, optimizer, 0, 2))
        assert [(r.version, r.adoption, r.counted, r.steps_sent) for r in reports] == [
            (2, "rebased", False, 2),
            (3, "adopted", True, 2),
        ]
        late.cells.data[0] = float("nan")
        in_threads(lambda: count(late, late_optimizer, 1, 4), lambda: count(model, optimizer, 0, 2))
        assert (reports[2].adoption, reports[2].counted, reports[2].steps_discarded) == ("reloaded", False, 2)
        assert (reports[3].version, reports[3].adoption, reports[3].steps_sent) == (4, "adopted", 2)
        assert late.cells.isfinite().all()
        joiner.abandon("test over")
    events = [seen.event for seen in ring.since()]
    assert [event.code for event in of(OffenceNoted, events)] == ["not_finite"]
    assert not of(ContributionRefused, events)  # it is told of once, where the answer is given
    assert [event.code for event in of(MessageRefused, events)] == ["not_finite"]
    server.service.stop()


def test_with_a_delay_the_report_says_whether_steps_were_carried_or_mixed() -> None:
    for settings, adoption in (({"fragment_carry": True}, "carried"), ({"fragment_alpha": 0.5}, "mixed")):
        reports: list[RoundReport] = []
        server = DiLoCoServer(Ledger().state_dict(), 1, sync_every=4, fragment_delay=2, **settings, **PLAIN)
        server.service.start()
        model = Ledger()
        optimizer = sgd(model)
        with memory_worker(server, "w", model, optimizer, on_round=reports.append):
            count(model, optimizer, 0, 4)
            wait_until(lambda server=server: server.sync_round == 1)
            count(model, optimizer, 0, 2)
            assert [(r.step, r.version, r.adoption, r.steps_sent) for r in reports] == [(6, 1, adoption, 4)]
        server.service.stop()


def test_observers_and_sinks_that_raise_stop_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(event: Event) -> None:
        raise RuntimeError("a bug of the user's")

    server = DiLoCoServer(Ledger().state_dict(), 1, sync_every=2, event_sink=fails, **PLAIN)
    server.service.start()
    model, reports = Ledger(), list[RoundReport]()
    optimizer = sgd(model)
    with EventLog(str(tmp_path / "worker.jsonl")) as log:
        worker = memory_worker(server, "w", model, optimizer, event_sink=log, on_round=fails)
        worker.on_round(reports.append)
        with worker:
            count(model, optimizer, 0, 6)
    assert model.cells.tolist() == [6.0, 0.0]
    assert [report.version for report in reports] == [1, 2, 3]
    assert caplog.text.count("an event sink failed") == 2  # once at the server, once at the worker
    lines = [json.loads(line) for line in (tmp_path / "worker.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["worker", "report", "report", "report", "leave"]
    assert lines[1]["participants"] == ["w"]
    server.service.stop()


def test_the_sink_and_the_observer_of_the_page_work_as_they_stand_there() -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    code: dict[str, Any] = {}
    exec(page.split("## An event sink of your own")[1].split("```python\n")[1].split("```")[0], code)
    tally, said = code["Tally"](), list[str]()
    server = DiLoCoServer(Ledger().state_dict(), 1, sync_every=2, event_sink=tally, **PLAIN)
    server.service.start()
    model = Ledger()
    optimizer = sgd(model)
    with memory_worker(server, "w", model, optimizer, on_round=lambda report: said.append(code["describe"](report))):
        count(model, optimizer, 0, 4)
    server.service.stop()
    assert tally.kinds == {
        "server": 1,
        "join": 1,
        "start": 1,
        "state": 2,
        "round": 2,
        "leave": 1,
        "ended": 1,
        "stop": 1,
    }
    assert tally.dead == []
    assert said == [f"version {i} adopted at step {2 * i}: 2 steps, with w" for i in (1, 2)]
