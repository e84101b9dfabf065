"""`outerstep.hf.OuterstepCallback`: a Hugging Face Trainer as a worker (docs/integrations/hugging-face.md).

Trainer(model=model, args=args, train_dataset=data, callbacks=[OuterstepCallback()]).train()

on_train_begin    model and optimizer are made, and loaded if the Trainer resumes: join
optimizer.step    the worker's own hook counts and exchanges; accumulated batches are no steps
on_save           the worker's state into checkpoint-N
the last step     finish, so that the Trainer's last evaluation and checkpoint are of the agreed weights, and
                  `load_best_model_at_end` comes after the end of the worker
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.sampler import LeasedSampler, delivering
from ..data.shards import LeasedShards
from ..errors import ConfigError
from ..model_folder import save_model
from ..worker import DiLoCoWorker
from .extras import needing
from .trainer_worker import TrainerWorker, read_state, write_state

with needing("transformers", "hf"):
    from transformers import Trainer, TrainerCallback

log = logging.getLogger(__name__)

PREFIX = "outerstep_"  # of our metrics in the Trainer's logs
AGREED = "agreed"  # the folder in output_dir for the agreed weights


class OuterstepCallback(TrainerCallback):  # type: ignore[misc]  # the library's class is not typed for us
    """Makes the Trainer a worker. Settings are those of `outerstep.attach`, from keywords, environment or file.

    `data`: an `outerstep.data.LeasedSampler` of the train dataset. The Trainer then draws what the run leases to this
    worker, resumes at the exact sample, and stops when the data is used up.

    `resume_worker=False`: join as a new worker even if the Trainer resumes. `save_agreed=False`: leave out the folder
    `agreed`, which is written to `output_dir` at the end."""

    def __init__(
        self,
        *,
        resume_worker: bool = True,
        save_agreed: bool = True,
        data: LeasedSampler | None = None,
        **settings: Any,
    ) -> None:
        if data is not None and (not isinstance(data, LeasedSampler) or isinstance(data, LeasedShards)):
            raise ConfigError(f"data must be a LeasedSampler of the train dataset, got {type(data).__name__}")
        self._life = TrainerWorker(settings if data is None else {**settings, "data": data})
        self._data, self._draws = data, False
        self._resume_worker, self._save_agreed = resume_worker, save_agreed
        self._losses: list[Tensor] = []
        self._are_shares = self._sees_loss = False
        self._undo: list[Any] = []

    @property
    def worker(self) -> DiLoCoWorker | None:
        """Of the training that runs, or ran last."""
        return self._life.worker

    # --- the Trainer's events -------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        trainer, _ = _find_trainer()
        if self._data is not None and trainer is not None:
            _lease(trainer, args, self._data)
            self._draws = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        _check_supported(args, state)
        if self._data is not None and not self._draws:
            raise ConfigError(
                "leased data needs the callback when the Trainer is made: "
                "Trainer(…, callbacks=[OuterstepCallback(data=…)])"
            )
        model, optimizer = held["model"], held["optimizer"]
        trainer, resumed_from = _find_trainer()
        self._unhook()
        if state.global_step > 0 and self._resume_worker:
            self._life.load(_read_checkpoint(args, state.global_step, resumed_from))
        wrapped = model if trainer is None else trainer.model_wrapped
        self._life.start(wrapped, optimizer, steps_left=state.max_steps - state.global_step)
        if not args.torch_compile:  # a compiled model would trace what the hook does
            # DataParallel copies the model, hooks included, to every GPU: there the hook is on the whole of it.
            whole = wrapped if isinstance(wrapped, nn.DataParallel) else model
            self._undo.append(whole.register_forward_hook(self._after_forward, with_kwargs=True).remove)
        if trainer is not None:
            self._add_to_log(trainer)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        losses, self._losses = self._losses, []
        if losses:
            total = torch.stack(losses).sum()
            shared = args.world_size if self._are_shares and args.average_tokens_across_devices else 1
            self._life.report(total * shared if self._are_shares else total / len(losses))

    def on_step_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        if self.worker is not None and self.worker.should_stop:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy != "no"
        self._finish_if_last(args, control, held)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        self._finish_if_last(args, control, held)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **held: Any) -> None:
        if not self._sees_loss and "loss" in (logs or {}):  # the model's output has none
            self._life.report(float(logs["loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)  # on other machines of the job it may be missing
        write_state(self._life.state_dict(), folder / _file_name(args.process_index))

    def on_train_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        self._finish(args, held)
        self._unhook()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _finish_if_last(self, args: Any, control: Any, held: Mapping[str, Any]) -> None:
        if control.should_training_stop:
            self._finish(args, held)

    def _finish(self, args: Any, held: Mapping[str, Any]) -> None:
        """The agreed weights are in the model from here on; a later event may load others."""
        worker = self._life.worker
        if worker is None or self._life.is_over:
            return
        self._life.finish()
        if self._save_agreed and args.should_save:
            folder = Path(args.output_dir) / AGREED
            with worker.global_weights():  # with on_exit="local" the model does not hold them
                _save(held["model"], held.get("processing_class"), folder)
            log.info("the agreed model is in %s: from_pretrained loads it", folder)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        worker = self._life.running
        if worker is None or not module.training or not torch.is_grad_enabled():
            return
        inputs = kwargs.get("input_ids", kwargs.get(getattr(module, "main_input_name", "input_ids")))
        if isinstance(inputs, Tensor) and inputs.dim() > 0:
            worker.count(samples=inputs.shape[0], tokens=inputs.numel() if "input_ids" in kwargs else 0)
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, Tensor) and (loss.dim() == 0 or isinstance(module, nn.DataParallel)):
            self._sees_loss = True
            self._are_shares = kwargs.get("num_items_in_batch") is not None
            loss = loss.detach()  # DataParallel's has one for each GPU
            self._losses.append(loss.sum() if self._are_shares else loss.mean())

    def _add_to_log(self, trainer: Any) -> None:
        """Our numbers into each line that the Trainer logs. (Its `on_log` is too late: whatever reports to TensorBoard
        and the like is called before us.)"""
        log_line = trainer.log

        def with_metrics(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            logs.update(self._life.metrics(PREFIX))
            log_line(logs, *args, **kwargs)

        trainer.log = with_metrics
        self._undo.append(lambda: delattr(trainer, "log"))

    def _unhook(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._losses = []


def _lease(trainer: Any, args: Any, data: LeasedSampler) -> None:
    """From now on its training draws leased samples. It skips none when it resumes: the worker's state knows the next
    sample."""
    if len(trainer.train_dataset) != data.spec.samples:
        raise ConfigError(f"{data.spec.samples} samples are leased, and train_dataset has {len(trainer.train_dataset)}")
    make_loader = trainer.get_train_dataloader
    trainer._get_train_sampler = lambda *dataset: data
    trainer.get_train_dataloader = lambda: _Delivering(make_loader(), data, args)
    args.ignore_data_skip = True


class _Delivering:
    """The Trainer's loader, of which the data is told when a batch comes out. (The Trainer's own loader is one batch
    ahead of that.)"""

    def __init__(self, loader: Any, data: LeasedSampler, args: Any) -> None:
        self._loader, self._data, self._args = loader, data, args

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        size, drop_last = self._args.train_batch_size, self._args.dataloader_drop_last
        return delivering(self._loader, self._data, size, drop_last=drop_last)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _check_supported(args: Any, state: Any) -> None:
    if state.is_hyper_param_search:
        raise ConfigError(
            "a hyperparameter search trains many models, and a run agrees on one: search without OuterstepCallback"
        )
    if args.deepspeed:
        raise ConfigError(
            "OuterstepCallback needs the optimizer's steps, which DeepSpeed takes itself: leave `deepspeed` out, and "
            "shard with FSDP2, or use one process per worker"
        )


def _find_trainer() -> tuple[Any, str | None]:
    """The Trainer that calls us, and the checkpoint that it resumes from. It tells its callbacks neither."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found, frame.f_locals.get("resume_from_checkpoint")
    return None, None


def _read_checkpoint(args: Any, step: int, resumed_from: str | None) -> dict[str, Any] | None:
    folder = Path(resumed_from or Path(args.output_dir) / f"checkpoint-{step}")
    file = folder / _file_name(args.process_index)
    if not file.is_file():
        log.warning(
            "%s has no %s: joining as a new worker, from the agreed weights; steps of that checkpoint that were not "
            "sent are lost",
            folder,
            file.name,
        )
        return None
    return read_state(file)


def _file_name(rank: int) -> str:
    """Each process of a job has its own."""
    return "outerstep.pt" if rank == 0 else f"outerstep-{rank}.pt"


def _save(model: Any, processing_class: Any, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        save_model(model, folder)
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(folder)
