"""What metrics are written to: metrics.jsonl always, TensorBoard's and OpenTelemetry's real libraries, and what becomes
of a run whose logger raises, hangs or is gone. (W&B, MLflow and trackio: test_logger_libraries.py.)"""

from __future__ import annotations

import http.server
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from outerstep.config import ServerConfig, build
from outerstep.errors import ConfigError
from outerstep.events import RoundSummary, RunEnded, VersionPublished, WorkerDied
from outerstep.installing import install_line
from outerstep.observe import loggers
from outerstep.observe.loggers.sink import LoggerSink
from outerstep.observe.points import MOST_WORKERS, point_of
from outerstep.observe.sinks import MetricsFile
from outerstep.server import DiLoCoServer
from outerstep.types import Agreement, Participant, Watched
from outerstep.worker import DiLoCoWorker
from support import tiny_model, train_steps, wait_until

PLAIN = {"insecure": True, "port": 0, "codec": "fp32"}


def published(version: int, workers: tuple[str, ...] = ("left",), fragment: int = 0) -> VersionPublished:
    taken = tuple(Participant(worker_id=who, sequence=1, weight=1.0) for who in workers)
    seen = Watched(peer_grad_similarity=0.5)
    made = Agreement(fragment=fragment, version=version, anchor_hash="0" * 32, participants=taken, watched=seen)
    return VersionPublished(made, RoundSummary(losses=(1.5,) * len(workers), waited_s=0.1, size_bytes=700))


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class TestMetricsFile:
    def test_a_round_is_a_line_and_other_events_are_not(self, tmp_path: Path) -> None:
        sink = MetricsFile(tmp_path / "deep" / "metrics.jsonl", clock=lambda: 1763190000.1234)
        for event in (published(1), WorkerDied("left", 3.0), published(2), RunEnded(2, 1.5, "done", "there")):
            sink(event)
        found = lines(sink.path)
        assert [(line["event"], line.get("version")) for line in found] == [("round", 1), ("round", 2), ("ended", None)]
        assert found[0]["time"] == 1763190000.123
        assert (found[0]["loss"], found[0]["bytes"], found[0]["peer_grad_similarity"]) == (1.5, 700, 0.5)
        assert sink.path.stat().st_mode & 0o777 == 0o600

    def test_it_stays_within_its_bounds(self, tmp_path: Path) -> None:
        sink = MetricsFile(tmp_path / "metrics.jsonl", most_bytes=2000)
        for version in range(1, 40):
            sink(published(version))
        kept = [*lines(tmp_path / "metrics.1.jsonl"), *lines(sink.path)]
        assert [line["version"] for line in kept] == list(range(kept[0]["version"], 40))  # type: ignore[call-overload]
        assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.1.jsonl", "metrics.jsonl"]
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 4 * 2000

    def test_a_disk_that_is_full_or_gone_is_said_once_and_counted(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = MetricsFile(Path("/dev/full"))
        for version in (1, 2):
            full(published(version))
        assert full.lost == 2
        assert caplog.text.count("/dev/full cannot be written") == 1
        (tmp_path / "file").touch()
        gone = MetricsFile(tmp_path / "file" / "metrics.jsonl")
        gone(published(1))
        assert gone.lost == 1
        # A line that was written in part does not spoil the one behind it.
        torn, write = MetricsFile(tmp_path / "metrics.jsonl"), os.write
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
        torn(published(1))
        monkeypatch.undo()
        torn(published(2))
        assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["version"] == 2


def test_points_have_few_names_whoever_chose_them() -> None:
    point = point_of(published(3, workers=("a/../b\n", "c")))
    assert point is not None
    assert point.step == 3
    assert point.values["outerstep/loss"] == 1.5
    assert point.values.keys() >= {"outerstep/loss_of/a_.._b_", "outerstep/waited_s", "outerstep/peer_grad_similarity"}
    many = point_of(published(3, workers=tuple(f"w{i}" for i in range(2 * MOST_WORKERS)), fragment=2))
    assert many is not None
    assert sum("loss_of" in name for name in many.values) == MOST_WORKERS
    assert all(name.startswith("outerstep/fragment_2/") for name in many.values)
    assert point_of(WorkerDied("left", 1.0)) is None


# --- a run with loggers -----------------------------------------------------------------------------------------------


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportMetricsServiceRequest]]]:
    """Takes OTLP over HTTP, as an OpenTelemetry collector does."""
    got: list[ExportMetricsServiceRequest] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()


def test_a_run_is_in_metrics_jsonl_in_tensorboard_and_at_a_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real event files, read back by TensorBoard; real OTLP messages, decoded by OpenTelemetry's types."""
    with collector() as (address, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        run, mine = tmp_path / "run", tmp_path / "mine"
        settings = {**PLAIN, "save_dir": str(run), "log_to": "tensorboard,otel"}
        with DiLoCoServer(tiny_model().state_dict(), num_workers=1, **settings) as server:  # type: ignore[arg-type]
            model = tiny_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with DiLoCoWorker(
                *(model, optimizer, f"http://{server.address}"),
                sync_every=2,
                worker_id="left",
                metrics_dir=str(mine),
                log_to="tensorboard",
            ) as worker:
                for step in range(4):
                    worker.last_loss = 4.0 - step
                    train_steps(model, optimizer, 1, seed=step)
            wait_until(lambda: server.sync_round == 2)
    assert [line["version"] for line in lines(run / "metrics.jsonl") if line["event"] == "round"] == [1, 2]
    reports = lines(mine / "left" / "metrics.jsonl")
    assert [(line["event"], line["step"], line["version"]) for line in reports] == [("report", 2, 1), ("report", 4, 2)]
    assert reports[0]["metrics"]["inner_loss"] == pytest.approx(3.9)  # type: ignore[index]
    of_server = EventAccumulator(str(run / "tensorboard" / "server")).Reload()
    assert [point.step for point in of_server.Scalars("outerstep/waited_s")] == [1, 2]
    of_worker = EventAccumulator(str(mine / "left" / "tensorboard" / "left")).Reload()
    losses = of_worker.Scalars("outerstep/inner_loss")
    assert [point.step for point in losses] == [2, 4]
    assert losses[0].value == pytest.approx(3.9)
    sent = [m for one in got for r in one.resource_metrics for s in r.scope_metrics for m in s.metrics]
    points = {m.name: m.gauge.data_points[-1] for m in sent}
    assert points["outerstep.step"].as_double == 2.0
    about = {a.key: a.value.string_value for a in points["outerstep.bytes"].attributes}
    assert about == {"outerstep.run": server.run_id, "outerstep.who": "server"}


class Broken:
    """A logger that fails as it is told to."""

    def __init__(self, how: str) -> None:
        self.how, self.hang = how, threading.Event()
        if how == "opening":
            raise RuntimeError("no network")
        if how == "exits":
            raise SystemExit(3)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self.how == "hangs":
            self.hang.wait()
        raise ValueError(f"step {step}")

    def close(self) -> None:
        raise OSError("gone")


@pytest.mark.parametrize("how", ["opening", "exits", "writing"])
def test_a_logger_that_raises_is_warned_of_once_counted_and_trains_on(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = LoggerSink("wandb", lambda: Broken(how))
    for version in range(1, 4):
        sink(published(version))
    sink.close()
    sink.close()
    sink(published(4))
    assert sink.lost == 3
    assert caplog.text.count("the logger wandb fails") == 1
    assert caplog.text.count("the logger wandb has lost 3 points") == 1


def test_a_logger_that_hangs_delays_neither_the_run_nor_its_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outerstep.observe.loggers.sink.MOST_WAITING", 2)
    broken = Broken("hangs")
    sink = LoggerSink("mlflow", lambda: broken, close_s=0.1)
    for version in range(1, 10):
        sink(published(version))
    assert sink.lost >= 6
    sink.close()
    assert "did not end within 0.1 s" in caplog.text
    broken.hang.set()


def test_a_run_trains_on_without_its_loggers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loggers, "_writer", lambda name: lambda place, run, who: Broken("opening"))
    settings = {**PLAIN, "save_dir": str(tmp_path / "run"), "log_to": "tensorboard"}
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, **settings) as server:  # type: ignore[arg-type]
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCoWorker(model, optimizer, f"http://{server.address}", sync_every=1, log_to="tensorboard"):
            train_steps(model, optimizer, 3, seed=1)
        assert server.sync_round == 3
        wait_until(lambda: server.service.loggers.lost == {"tensorboard": 3})


def test_a_name_that_is_none_and_an_extra_that_is_not_installed_are_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"log_to must name tensorboard, .* got 'tensorbord'; did you mean 'tensorbo"):
        build(ServerConfig, {"num_workers": 1, "log_to": "otel,tensorbord"})
    monkeypatch.setitem(loggers.NEEDS, "wandb", ("no_such_package.inside", "WandbWriter"))
    with pytest.raises(ConfigError, match="log_to wandb needs .*: " + re.escape(install_line("wandb"))):
        DiLoCoServer(tiny_model().state_dict(), num_workers=1, log_to="wandb", **PLAIN)  # type: ignore[arg-type]
