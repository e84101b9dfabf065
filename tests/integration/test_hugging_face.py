"""A real Hugging Face Trainer inside the `with`: it resumes from a checkpoint and loads its best model at the end, and
harms nobody."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def make_trainer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, max_steps: int) -> Any:
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
        model=model, args=args, train_dataset=texts(), eval_dataset=texts()[:4], optimizers=(optimizer, schedule)
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
