"""Lightning's Trainer with our callback: its logs, its end, what is refused. (test_trainers.py kills one.)"""

from __future__ import annotations

import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import outerstep
from outerstep.data import LeasedLoader, LeasedSampler
from outerstep.errors import ConfigError
from outerstep.server import DiLoCoServer
from support import Books

pytestmark = pytest.mark.slow  # to import Lightning takes seconds
pl = pytest.importorskip("lightning.pytorch")

RUN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 4}


class Counter(pl.LightningModule):  # type: ignore[misc]
    """Counts optimizer steps."""

    def __init__(self, optimizers: int = 1, fails_at: int = -1) -> None:
        super().__init__()
        self.cells = torch.nn.Parameter(torch.zeros(1))
        self._wanted, self._fails_at = optimizers, fails_at
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == self._fails_at:
            raise RuntimeError("the script fails")
        return -self.cells.sum()

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), lr=1.0) for _ in range(self._wanted)]
        return made[0] if self._wanted == 1 else made


class Fit:
    """One `fit`, with two batches to a step; of 30 batches in an epoch."""

    def __init__(
        self,
        server: DiLoCoServer,
        folder: Path,
        module: Counter,
        limits: dict[str, int] | None = None,
        also: Any = None,
        **settings: Any,
    ) -> None:
        self.callback = outerstep.lightning.OuterstepCallback(
            server_addr=f"http://{server.address}", worker_id="w", **settings
        )
        self.trainer = pl.Trainer(
            **(limits or {"max_steps": 10}),
            accumulate_grad_batches=2 if module.automatic_optimization else 1,
            callbacks=[self.callback, *([also] if also is not None else [])],
            logger=False,
            enable_checkpointing=False,
            accelerator="cpu",
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.trainer.fit(module, DataLoader(torch.zeros(30, 1)))


@pytest.fixture
def server() -> Any:
    with DiLoCoServer({"cells": torch.zeros(1)}, num_workers=1, port=0, insecure=True, **RUN) as made:
        yield made


def test_metrics_are_in_its_logs_and_the_module_ends_with_the_agreed_weights(
    server: DiLoCoServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outerstep")
    books, module = Books(server, ["w"]), Counter()
    fit = Fit(server, tmp_path, module)
    assert books.audit() == {"w": [10]}
    assert module.cells.tolist() == [10.0]
    logged = {name: float(value) for name, value in fit.trainer.callback_metrics.items()}
    assert (logged["outerstep/round"], logged["outerstep/local_step"]) == (2.0, 10.0), "the third round is at the end"
    assert fit.callback.worker.last_loss == pytest.approx(-9.0), "of both batches together"
    assert re.search(r"round 2 · w · .* · step 8 of 10 · \S+ left", caplog.text), "the Trainer knows its end"


def test_the_end_is_known_from_epochs_too_and_training_without_an_end_has_none(
    server: DiLoCoServer, tmp_path: Path
) -> None:
    fit = Fit(server, tmp_path, Counter(), {"max_epochs": 2})
    assert fit.callback.worker.config.total_steps == 30

    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = True

    endless = Fit(server, tmp_path, Counter(), {"max_epochs": -1}, also=Stop())
    assert endless.callback.worker.config.total_steps is None


def test_a_training_that_fails_leaves_without_contributing(server: DiLoCoServer, tmp_path: Path) -> None:
    books = Books(server, ["w"])
    with pytest.raises(RuntimeError, match="the script fails"):
        Fit(server, tmp_path, Counter(fails_at=12))
    assert books.audit() == {"w": [4]}
    assert server.status()["workers"] == {}


def test_a_preempted_worker_contributes_and_the_trainer_stops(server: DiLoCoServer, tmp_path: Path) -> None:
    books = Books(server, ["w"])
    fit = Fit(server, tmp_path, Counter(), on_round=lambda report: os.kill(os.getpid(), signal.SIGUSR1))
    assert fit.trainer.global_step in (4, 5)
    assert books.audit() == {"w": [fit.trainer.global_step]}


def test_several_optimizers_are_refused(server: DiLoCoServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs one optimizer, got 2"):
        Fit(server, tmp_path, Counter(optimizers=2))


class Cells(Counter):
    """Adds one to the cells of a batch's samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.cells = torch.nn.Parameter(torch.zeros(samples))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return -self.cells[batch].sum()


@pytest.mark.parametrize("loaders", [0, 2])
def test_leased_data_is_trained_once_though_a_checkpoint_is_resumed_in_the_middle(tmp_path: Path, loaders: int) -> None:
    """Lightning makes the loader's iterator before the worker is there, and its processes draw ahead."""

    def fit(server: DiLoCoServer, resumed: str | None) -> None:
        data = LeasedSampler(40, unit_samples=4)
        trainer = pl.Trainer(
            max_epochs=1, callbacks=[outerstep.lightning.OuterstepCallback(
                server_addr=f"http://{server.address}", worker_id="w", on_exit="local", data=data)],
            logger=False, enable_checkpointing=False, accelerator="cpu", default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        loader = LeasedLoader(range(40), data, batch_size=3, num_workers=loaders)  # type: ignore[arg-type]
        saver = Saves(str(tmp_path / "last.ckpt"), at=5)
        trainer.callbacks.append(saver)
        trainer.fit(Cells(40), loader, ckpt_path=resumed)

    with DiLoCoServer({"cells": torch.zeros(40)}, num_workers=1, port=0, insecure=True, **RUN) as server:
        with pytest.raises(RuntimeError, match="the script fails"):
            fit(server, None)
        fit(server, str(tmp_path / "last.ckpt"))
        assert server.get_global_params()["cells"].tolist() == [1.0] * 40
        (table,) = server.service.coordinator.leases.tables.values()
        assert (table.done.total, table.repeated) == (10, 0)


class Saves(pl.Callback):  # type: ignore[misc]
    """Saves after so many steps, and fails in the first fit."""

    def __init__(self, file: str, at: int) -> None:
        self._file, self._at = file, at

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step == self._at and not Path(self._file).exists():
            trainer.save_checkpoint(self._file)
        elif trainer.global_step == self._at + 1 and trainer.ckpt_path is None:
            raise RuntimeError("the script fails")
