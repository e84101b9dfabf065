"""A Hugging Face Trainer on several machines: the script for one, and a callback.

    outerstep run -n 2 --sync-every 20 -- python examples/hugging_face.py

on the first PC, and the line that it prints on the second, with `--seed 1` at its end. Or with a server by itself:

    python examples/hugging_face.py --make-model model
    outerstep server -m model -n 2 --sync-every 20
    outerstep worker --server 127.0.0.1:8512 --worker-id a -- python examples/hugging_face.py --output a
    outerstep worker --server 127.0.0.1:8512 --worker-id b -- python examples/hugging_face.py --output b --seed 1

A small GPT-2 learns Python from the standard library's own source, byte by byte. Kill a worker with any signal and
start it again: the Trainer resumes from its last checkpoint, and the worker's state is in it. Needs the extra hf.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from outerstep.hf import OuterstepCallback

CONTEXT = 32


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=256, n_positions=CONTEXT, bos_token_id=0, eos_token_id=0)
    )
    if options.make_model is not None:
        model.save_pretrained(options.make_model)
        return
    args = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=5,
        seed=options.seed,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=read_texts(), callbacks=[OuterstepCallback()])
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(options.output))


def last_whole_checkpoint(folder: Path) -> str | None:
    """A process that is killed while the Trainer writes leaves a part of a checkpoint. The worker's file comes last."""
    whole = [file.parent for file in folder.glob("checkpoint-*/outerstep.pt")]
    return str(max(whole, key=lambda place: int(place.name.rpartition("-")[2]))) if whole else None


def read_texts() -> list[dict[str, torch.Tensor]]:
    """Pieces of CONTEXT bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))
    data = torch.tensor(list(b"".join(file.read_bytes() for file in files)[: 1 << 16]))
    return [{"input_ids": piece, "labels": piece} for piece in data.split(CONTEXT) if len(piece) == CONTEXT]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("trained"), help="the Trainer's folder; resumed if there")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--seed", type=int, default=0, help="the order of the data: a different one on each worker")
    parser.add_argument("--make-model", type=Path, help="write the starting weights into this folder, and exit")
    return parser.parse_args()


if __name__ == "__main__":
    main()
