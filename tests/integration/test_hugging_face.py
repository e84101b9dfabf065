"""A real Hugging Face Trainer inside the `with`: it resumes from a checkpoint and loads its best model at the end, and
harms nobody. And one with our callback, which does the same without losing a step. (test_trainers.py kills it.)"""

from __future__ import annotations

import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outerstep
from outerstep.errors import OtherRun
from outerstep.server import DiLoCoServer
from outerstep.worker import DiLoCoWorker

pytestmark = pytest.mark.slow  # to import the Trainer takes seconds
transformers = pytest.importorskip("transformers")


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=0)
    )


def texts() -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 32, (16, 1), generator=source)
    rows = (starts + torch.arange(8)) % 32
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, max_steps: int, *callbacks: Any
) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=4,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1000,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the worst, so that what is loaded at the end is far from what was learned
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=texts(),
        eval_dataset=texts()[:4],
        optimizers=(optimizer, schedule),
        callbacks=list(callbacks),
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@torch.no_grad()
def loss_of(state: dict[str, Tensor]) -> float:
    model = tiny_gpt2().eval()
    model.load_state_dict(state, strict=False)
    rows = torch.stack([text["input_ids"] for text in texts()])
    return float(model(input_ids=rows, labels=rows).loss)


class Watcher(transformers.TrainerCallback):
    """What the model holds after each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, list[dict[str, Tensor]]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(weights(self.model))


def test_resuming_and_loading_the_best_model_inside_the_with_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled = tiny_gpt2()  # a checkpoint of some other training, which went wrong
    with torch.no_grad():
        for param in spoiled.parameters():
            param.add_(torch.randn_like(param))
    make_trainer(tmp_path / "other", spoiled, torch.optim.SGD(spoiled.parameters(), lr=0.05), 2).train()

    model = tiny_gpt2()
    begins = weights(model)
    caplog.set_level(logging.WARNING, logger="outerstep")
    run = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 4}
    with DiLoCoServer(model.state_dict(), num_workers=1, port=0, insecure=True, **run) as server:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        worker = DiLoCoWorker(model, optimizer, f"http://{server.address}", worker_id="hf")
        trainer = make_trainer(tmp_path / "own", model, optimizer, 13)
        watcher = Watcher(model)
        trainer.add_callback(watcher)
        with worker:
            trainer.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-2"))
            assert worker.sync_metrics["outside_changes"] == 1
            agreed = server.get_global_params()
            assert same(weights(model), weights(spoiled)), "the best model, as the Trainer sees it, was loaded"
        assert same(server.get_global_params(), agreed), "and nobody else's model moved by it"
        assert same(weights(model), agreed), "after the `with` the model holds what was agreed"

    assert worker.sync_metrics["local_step"] == 11
    assert worker.sync_metrics["outside_changes"] == 2
    assert worker.sync_metrics["steps_discarded"] == 1 + 3, "the first step, and those after the last exchange"
    assert same(watcher.seen[0], begins), "the checkpoint was gone after the first step"
    assert same(watcher.seen[7], agreed), "all that was agreed on was learned after that"
    assert loss_of(agreed) < loss_of(begins) < loss_of(weights(spoiled))
    said = [r.getMessage() for r in caplog.records if "outside optimizer.step()" in r.getMessage()]
    assert len(said) == 2
    assert "own_change" in said[0]
    assert "on_exit" in said[1]


# --- with the callback ----------------------------------------------------------------------------------------------


class Reporter(transformers.TrainerCallback):
    """Stands before our callback, as TensorBoard's does."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **held: Any) -> None:
        self.lines.append(dict(logs))


class Meddler(transformers.TrainerCallback):
    """Loads weights that nobody has learned."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **held: Any) -> None:
        if state.global_step == 3:
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1.0)


RUN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_steps": 4}


def train(
    folder: Path, *others: Any, steps: int = 10, resume_from: Path | None = None, **settings: Any
) -> tuple[DiLoCoServer, Any, Any]:
    """Until the Trainer is done."""
    model = tiny_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with DiLoCoServer(model.state_dict(), num_workers=1, port=0, insecure=True, **RUN) as server:
        callback = outerstep.hf.OuterstepCallback(server_addr=f"http://{server.address}", worker_id="hf", **settings)
        trainer = make_trainer(folder, model, optimizer, steps, *others, callback)
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return server, callback.worker, trainer


def test_the_callback_contributes_every_step_before_the_best_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outerstep")
    reporter = Reporter()
    server, worker, trainer = train(tmp_path, reporter)
    told, agreed = worker.sync_metrics, server.get_global_params()
    assert (told["local_step"], told["steps_discarded"], told["outside_changes"]) == (10, 0, 0)
    assert told["versions"] == [3], "after steps 4 and 8, and at the end"
    kept = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "agreed")
    assert same(weights(kept), agreed)
    assert not same(weights(trainer.model), agreed), "the model is the best one, as the Trainer was asked"
    assert trainer.state.best_model_checkpoint is not None
    last = [line for line in reporter.lines if "train_loss" in line][-1]
    assert (last["outerstep_round"], last["outerstep_local_step"]) == (3, 10)
    assert "log" not in vars(trainer), "its method is its own again"
    told_lines = [record.getMessage() for record in caplog.records]
    assert any(re.search(r"round 1 · hf · .* · step 4 of 10 · \S+ left", line) for line in told_lines), told_lines


def test_the_callback_hides_no_weights_that_somebody_else_has_loaded(tmp_path: Path) -> None:
    server, worker, _ = train(tmp_path, Meddler(), steps=8, save_agreed=False)
    told = worker.sync_metrics
    assert (told["outside_changes"], told["steps_discarded"]) == (1, 4)
    assert loss_of(server.get_global_params()) < 10.0
    assert not (tmp_path / "agreed").exists()


class TwoGpus(transformers.TrainerCallback):
    """What a Trainer finds on a PC with two, without torchrun: it wraps the model in DataParallel."""

    def on_init_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        args._n_gpu = 2


def test_a_trainer_that_spreads_the_model_over_the_gpus_of_a_pc_is_a_worker_like_any_other(tmp_path: Path) -> None:
    _, worker, trainer = train(tmp_path, TwoGpus(), steps=4, save_agreed=False)
    assert isinstance(trainer.model_wrapped, torch.nn.DataParallel)
    assert (worker.sync_metrics["local_step"], worker.sync_metrics["steps_discarded"]) == (4, 0)
    assert worker.last_loss is not None


class Broken(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("the script fails")


def test_a_training_that_failed_is_left_when_the_next_one_begins_and_a_preempted_one_saves_what_was_agreed(
    tmp_path: Path,
) -> None:
    model = tiny_gpt2()
    with DiLoCoServer(model.state_dict(), num_workers=1, port=0, insecure=True, **RUN) as server:
        callback = outerstep.hf.OuterstepCallback(
            server_addr=f"http://{server.address}",
            on_round=lambda report: os.kill(os.getpid(), signal.SIGUSR1),
        )
        trainer = make_trainer(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), 20, callback, Broken())
        with pytest.raises(RuntimeError, match="the script fails"):
            trainer.train()
        first = callback.worker
        trainer.remove_callback(Broken)
        trainer.train()
        assert callback.worker is not first
        assert trainer.state.global_step in (4, 5), "it leaves at the step after the signal, or the same"
        assert server.status()["workers"] == {}, "neither is there any more"
        saved = tmp_path / f"checkpoint-{trainer.state.global_step}"
        assert (saved / "outerstep.pt").is_file()
        assert same(weights(transformers.GPT2LMHeadModel.from_pretrained(saved)), server.get_global_params())


def test_a_checkpoint_without_a_worker_is_no_change_from_outside_and_one_of_another_run_can_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = tiny_gpt2()
    make_trainer(tmp_path / "alone", alone, torch.optim.SGD(alone.parameters(), lr=0.05), 2).train()
    caplog.set_level(logging.WARNING, logger="outerstep")
    _, worker, _ = train(tmp_path / "first", steps=6, resume_from=tmp_path / "alone" / "checkpoint-2")
    assert "checkpoint-2 has no outerstep.pt: joining as a new worker" in caplog.text
    assert (worker.sync_metrics["local_step"], worker.sync_metrics["outside_changes"]) == (4, 0)

    before = tmp_path / "first" / "checkpoint-4"  # of a server that is gone, and in another folder
    with pytest.raises(OtherRun) as refusal:
        train(tmp_path / "second", steps=6, resume_from=before)
    assert "resume_worker=False" in refusal.value.__notes__[0]
    _, worker, _ = train(tmp_path / "second", steps=6, resume_from=before, resume_worker=False)
    assert (worker.sync_metrics["local_step"], worker.sync_metrics["outside_changes"]) == (2, 0)
