"""Loggers by name: what a run's metrics are also written to (`log_to`, docs/operating/monitoring.md#loggers).

A logger is a `MetricWriter` in a file of its own here, an extra of the package, and imported when somebody names it. It
lives in a thread of its own behind a bounded queue (sink.py): whether it raises, hangs or is gone, training goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from ...errors import ConfigError
from ...installing import install_line
from .sink import LoggerSink, MetricWriter

NEEDS = {  # name → what must be importable, and the class in the module of its name
    "tensorboard": ("tensorboard", "TensorBoardWriter"),
    "wandb": ("wandb", "WandbWriter"),
    "mlflow": ("mlflow", "MlflowWriter"),
    "trackio": ("trackio", "TrackioWriter"),
    "otel": ("opentelemetry.exporter.otlp.proto.http", "OtelWriter"),
}


class WriterMaker(Protocol):
    """A class of writers: `place` is a folder for files, `run` the run's id, `who` the server or the worker's id."""

    def __call__(self, place: Path, run: str, who: str) -> MetricWriter: ...


class Loggers:
    """All that were named; `sinks` take events. `names` is checked."""

    def __init__(self, names: str | None, place: Path, run: str, who: str) -> None:
        self.sinks = [_make(name, place, run, who) for name in named(names)]

    @property
    def lost(self) -> dict[str, int]:
        """By name: how many points could not be written."""
        return {sink.name: sink.lost for sink in self.sinks}

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def named(names: str | None) -> Iterable[str]:
    return dict.fromkeys(name for name in (names or "").replace(",", " ").split())


def check_installed(names: str | None) -> None:
    """Said when a run begins, rather than when its first round is over."""
    for name in named(names):
        if not _is_there(NEEDS[name][0]):
            raise ConfigError(f"log_to {name} needs a package that is not here: {install_line(name)}")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that would hold it
        return False


def _make(name: str, place: Path, run: str, who: str) -> LoggerSink:
    return LoggerSink(name, lambda: _writer(name)(place, run, who))


def _writer(name: str) -> WriterMaker:
    made: WriterMaker = getattr(import_module(f".to_{name}", __name__), NEEDS[name][1])
    return made
