"""A GPT in one file, trained by a plain loop on one machine, with checkpoints: a script as many people have one.

    python examples/nanogpt.py --out alone

examples/nanogpt.diff is all it takes to train it on several machines (docs/integrations/nanogpt.md). The text is the
source of Python's own standard library, byte by byte; nothing is downloaded.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import nn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the checkpoint; resumed if there")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save-every", type=int, default=100)
parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--seed", type=int, default=0, help="which pieces of the text are read, and in which order")
parser.add_argument("--make-model", type=Path, help="write the starting weights to this folder, and exit")
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, context: int, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))
data = torch.tensor(list(b"".join(file.read_bytes() for file in files)[: 1 << 20]))


def get_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1_000_000 * options.seed + number)
    starts = torch.randint(len(data) - options.context - 1, (options.batch,), generator=source)
    pieces = torch.stack([data[start : start + options.context + 1] for start in starts]).to(device)
    return pieces[:, :-1], pieces[:, 1:]


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = GPT(options.context, options.layers, options.width).to(device)
if options.make_model:
    options.make_model.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), options.make_model / "model.safetensors")
    raise SystemExit
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
checkpoint_file = options.out / "ckpt.pt"
checkpoint, step = {}, 0
if checkpoint_file.exists():
    checkpoint = torch.load(checkpoint_file, map_location=device, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    step = checkpoint["step"]

while step < options.steps:
    for micro in range(options.accumulate):
        loss = model(*get_batch(step * options.accumulate + micro)) / options.accumulate
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item() * options.accumulate:.3f}", flush=True)
    if step % options.save_every == 0:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
        }
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, partial := checkpoint_file.with_suffix(".partial"))
        os.replace(partial, checkpoint_file)

options.out.mkdir(parents=True, exist_ok=True)
save_file(model.state_dict(), options.out / "model.safetensors")
