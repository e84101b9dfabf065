"""An Accelerate loop in the shape of LocalSGD: what `load_state` does inside the `with`, and what is refused.
(test_trainers.py kills one.)"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import outerstep
from outerstep.data import LeasedLoader, LeasedSampler
from outerstep.errors import ConfigError
from outerstep.server import DiLoCoServer
from support import Books, Ledger

pytestmark = pytest.mark.slow  # to import Accelerate takes seconds
accelerate = pytest.importorskip("accelerate")

RUN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 4}


class Loop:
    """Counts optimizer steps in a ledger; two batches to a step."""

    def __init__(self, server: DiLoCoServer, **settings: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Ledger(1)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        self.outer = outerstep.accelerate.OuterStep(
            self.accelerator, self.model, server_addr=f"http://{server.address}", worker_id="w", **settings
        )

    def step(self, steps: int) -> None:
        for _ in range(2 * steps):
            with self.accelerator.accumulate(self.model):
                loss = -self.model.cells.sum()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.outer.step(loss)

    @property
    def cells(self) -> list[float]:
        return self.model.cells.tolist()  # type: ignore[no-any-return]


def test_a_checkpoint_that_is_loaded_inside_the_with_is_resumed_and_no_step_counts_twice(tmp_path: Path) -> None:
    with DiLoCoServer(Ledger(1).state_dict(), num_workers=1, port=0, insecure=True, **RUN) as server:
        books = Books(server, ["w"])
        loop = Loop(server, local_sgd_steps=4)
        with suppress(KeyboardInterrupt), loop.outer as outer:
            loop.step(6)
            assert outer.num_steps == 12
            assert outer.metrics()["outerstep/local_step"] == 6
            assert outer.worker is not None
            assert outer.worker.last_loss == pytest.approx(-5.0)
            loop.accelerator.save_state(str(tmp_path))
            raise KeyboardInterrupt  # an exception leaves without contributing
        assert books.audit() == {"w": [4]}
        assert server.status()["workers"] == {}

        again = Loop(server)
        with again.outer as outer:
            assert again.cells == [4.0], "it has joined, from the agreed weights"
            again.accelerator.load_state(str(tmp_path))
            assert again.cells == [6.0]
            again.step(2)
            assert books.audit() == {"w": [8]}
            again.step(1)
            assert outer.worker is not None
            assert outer.worker.sync_metrics["outside_changes"] == 0
        assert books.audit() == {"w": [9]}
        assert again.cells == [9.0]


def test_what_it_cannot_do_is_refused_and_a_disabled_one_does_nothing() -> None:
    with DiLoCoServer(Ledger(1).state_dict(), num_workers=1, port=0, insecure=True, **RUN) as server:
        loop = Loop(server, enabled=False)
        with loop.outer as outer:
            loop.step(5)
        assert (outer.worker, outer.should_stop, loop.cells) == (None, False, [5.0])
        assert loop.accelerator._custom_objects == []

        several = Loop(server)
        several.accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
        with pytest.raises(ConfigError, match=r"must have prepared one optimizer, got 2.*optimizer=…"), several.outer:
            pass
        with pytest.raises(ConfigError, match="sync_steps is another name of sync_every, got both"):
            Loop(server, sync_every=4, local_sgd_steps=5).outer.__enter__()


def test_leased_data_comes_from_a_loader_that_is_not_prepared() -> None:
    with DiLoCoServer(Ledger(24).state_dict(), num_workers=1, port=0, insecure=True, **RUN) as server:

        def train(prepares: bool) -> None:
            accelerator = accelerate.Accelerator(cpu=True)
            model = Ledger(24)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            data = LeasedSampler(24, name=f"prepared-{prepares}", unit_samples=2)
            loader: Any = LeasedLoader(list(range(24)), data, batch_size=2)  # type: ignore[arg-type]
            with outerstep.accelerate.OuterStep(
                accelerator, model, server_addr=f"http://{server.address}", worker_id="w", data=data
            ):
                for batch in accelerator.prepare(loader) if prepares else loader:
                    accelerator.backward(-model.cells[batch].sum())
                    optimizer.step()
                    optimizer.zero_grad()

        train(prepares=False)
        assert server.get_global_params()["cells"].tolist() == [1.0] * 24
        with pytest.raises(ConfigError, match="no loader said which leased samples came out of it"):
            train(prepares=True)
