"""W&B, MLflow and trackio with their real libraries, in a process of its own without a network: what a run wrote is
read back from their files, and none of them stops a run if it cannot work."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nursery

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("logger_job.py")
NAMES = "wandb,mlflow,trackio"


def train(folder: Path, **environ: str) -> str:
    """Three rounds; what the process said."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))}
    env = {**own, "OMP_NUM_THREADS": "1", "HOME": str(folder), "WANDB_SILENT": "true", **environ}
    log = folder / "log"
    with log.open("wb") as out:
        assert nursery.start([JOB, NAMES], log=out, env=env, cwd=folder).wait(240) == 0, log.read_text()
    return log.read_text()


def wandb_records(file: Path) -> Iterator[Any]:
    """Of a run that was offline: the records that `wandb sync` would send, in leveldb's log format behind a header."""
    from wandb.proto import wandb_internal_pb2

    data, at, block = file.read_bytes(), 7, 1 << 15
    while at + 7 <= len(data) and at + 7 <= block:  # the first block has all of so short a run
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if not length:
            return
        assert kind == 1, "a record that is whole"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        yield record


def wandb_points(folder: Path) -> list[dict[str, float]]:
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(file))
    kinds = [record.WhichOneof("record_type") for record in records]
    assert kinds[-1] == "exit", "the run was finished"
    history = [record.history.item for record, kind in zip(records, kinds, strict=True) if kind == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in history]


def mlflow_points(file: Path, who: str) -> dict[int, float]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{file}")
    experiment = client.get_experiment_by_name("outerstep")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["outerstep.who"]) == (who, "FINISHED", who)
    name = "outerstep/loss" if who == "server" else "outerstep/inner_loss"
    return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}


def test_a_run_is_in_wandb_mlflow_and_trackio(tmp_path: Path) -> None:
    said = train(tmp_path, WANDB_MODE="offline", TRACKIO_DIR=str(tmp_path / "trackio"))
    assert "rounds 3, lost {'wandb': 0, 'mlflow': 0, 'trackio': 0}" in said, said
    rounds = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["version"]: line["loss"] for line in rounds if line["event"] == "round"}
    assert sorted(losses) == [1, 2, 3]

    points = wandb_points(tmp_path / "run")
    of_server = {point["outerstep/step"]: point["outerstep/loss"] for point in points if "outerstep/loss" in point}
    assert of_server == pytest.approx(losses)
    steps = [point["outerstep/step"] for point in points if "outerstep/inner_loss" in point]
    assert steps == [2, 4, 6], "the worker's, in the run that it found begun"

    assert mlflow_points(tmp_path / "run" / "mlflow.db", "server") == pytest.approx(losses)
    of_worker = mlflow_points(tmp_path / "metrics" / "left" / "mlflow.db", "left")
    assert sorted(of_worker) == [2, 4, 6], "a worker's are over its optimizer steps"

    with sqlite3.connect(tmp_path / "trackio" / "outerstep.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
    written = {step: json.loads(values) for run, step, values in rows if run.startswith("server-")}
    assert {step: values["outerstep/loss"] for step, values in written.items()} == pytest.approx(losses)
    assert {step for run, step, _ in rows if run.startswith("left-")} == {2, 4, 6}


def test_loggers_without_a_network_a_key_or_a_folder_stop_no_run(tmp_path: Path) -> None:
    """W&B is to go online and has no key, MLflow's server is not there, trackio's folder cannot be one."""
    dead = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    (tmp_path / "file").touch()
    quick = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "TRACKIO_DIR": str(tmp_path / "file" / "trackio")}
    said = train(tmp_path, **dead, **quick)
    assert "rounds 3, lost {'wandb': 3, 'mlflow': 3, 'trackio': 0}" in said, said
    assert "the logger wandb fails (it could not be opened: UsageError: No API key configured" in said, said
    assert "the logger mlflow fails (it could not be opened: MlflowException" in said, said
    assert "trackio failed to flush metric logs" in said, "it raises nothing, and warns by itself"
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"event": "round"') == 3, "the file is always there"
