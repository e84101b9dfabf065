"""The Python blocks of the documentation run as they are typed there, against a real server.

What a block leaves to its reader (a model, data, how to train and to evaluate) is given to it; `…` and `...` stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outerstep
from outerstep.data import LeasedLoader, LeasedSampler
from outerstep.server import DiLoCoServer
from outerstep.worker import DiLoCoWorker

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LOOPS = {  # page → how many blocks it has that run here
    "start.md": 3,
    "start/two-pcs.md": 1,
    "concepts/data.md": 4,
    "concepts/modes.md": 1,
    "concepts/robust-aggregation.md": 1,
    "concepts/what-to-watch.md": 1,
    "howto/evaluate.md": 1,
    "howto/resume.md": 1,
    "howto/spot-machines.md": 1,
    "howto/unequal-gpus.md": 1,
    "operating/control.md": 1,
    "operating/restarts.md": 1,
    "reference/compat.md": 1,
    "reference/exit-codes.md": 1,
    "reference/trainer.md": 2,
}
ELSEWHERE = {  # a part of a block → who runs it, or the like of it
    "dist.init_process_group()": "test_groups.py",
    "stage = build_layers": "test_shapes.py",
    "shards = DatasetShards(rows)": "test_leased_data.py",
    "dcp.save": "test_shapes.py",
    "part = (dp_mesh.get_local_rank()": "test_leased_data.py",
    '"allreduce", sync_every=500': "test_allreduce.py",
    'outerstep.GradientGossip("anna")': "test_node.py",
    "from outerstep.hierarchy import Cluster": "test_hierarchy.py",
    '"torchft", lighthouse="EAST:29510"': "test_torchft_cluster.py",
    '"allreduce", sync_every=50, above=': "test_allreduce_cluster.py",
    'lighthouse="HOST:29510"': "test_torchft.py",
    "from outerstep.hf import": "test_hugging_face.py",
    "OuterstepCallback(data=data)": "test_leased_data.py",
    "from outerstep.lightning import": "test_lightning.py",
    "from outerstep.integrations.torchft import": "test_torchft_library.py",
    "outerstep.torchtitan.attach_trainer": "test_trainers.py",
    "AutoModelForCausalLM.from_pretrained": "test_models_on_disk.py",
    "class ContributeAtTheEnd": "test_hugging_face.py",
    "async def train(model, batches, peers)": "test_trainers.py",
}
SIGNATURES = {"reference/python.md", "extending.md"}  # made from the code; run by tests/contract/test_extending.py


class Net(nn.Module):
    """Of a batch it gives what a model of a library gives: something with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.layer(inputs) - inputs.sum(1, keepdim=True)).square().mean())


class Given:
    """What a reader brings, and what came of it."""

    def __init__(self, server: DiLoCoServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.steps = self.evaluated = 0
        self.dataset = list(torch.randn(64, 4))
        self.files = [folder / f"{i}.jsonl" for i in range(3)]

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.steps += 1
        return loss

    def evaluate(self, model: nn.Module) -> float:
        self.evaluated += 1
        return float(model(torch.ones(2, 4)).loss)

    def names(self) -> dict[str, Any]:
        batches = [torch.randn(8, 4) for _ in range(6)]
        return {
            "outerstep": outerstep, "torch": torch, "model": self.model, "optimizer": self.optimizer,
            "data": batches, "batches": batches, "batch": batches[0], "loss": 1.0,
            "train_step": self.train_step, "evaluate": self.evaluate, "dataset": self.dataset, "books": self.dataset,
            "code": self.dataset, "files": self.files,
            "read_jsonl": lambda _: iter(()), "server": f"http://{self.server.address}", "clip_weights": lambda _: None,
            "DiLoCoServer": DiLoCoServer, "DiLoCoWorker": DiLoCoWorker, "DiLoCoTrainer": outerstep.DiLoCoTrainer,
            "checkpoint": self.folder / "checkpoint.pt", "path": self.folder / "state.pt",
        }  # fmt: skip


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    monkeypatch.chdir(tmp_path)
    with DiLoCoServer(Net().state_dict(), 1, port=0, insecure=True, sync_every=10) as server:
        monkeypatch.setenv("DILOCO_SERVER", f"http://{server.address}")
        made = Given(server, tmp_path)
        for file in made.files:
            file.write_text('{"a": 1}\n')
        yield made


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / page).read_text())


def runs_elsewhere(block: str) -> bool:
    return any(part in block for part in ELSEWHERE)


def run(block: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(block, "a page", "exec"), names)
    return names


def in_a_run(given: Given, block: str, names: dict[str, Any]) -> dict[str, Any]:
    """A block that speaks of `worker` and did not make it."""
    with outerstep.attach(given.model, given.optimizer) as names["worker"]:
        given.train_step(given.model, given.optimizer, names["batch"])
        return run(block, names)


def bring(given: Given, block: str) -> dict[str, Any]:
    """What this block uses and does not make."""
    names = given.names()
    if "worker_ids=ids" in block:
        names |= {
            "pseudo_gradients": [{"w": torch.ones(3) + i / 100} for i in range(5)],
            "ids": [*"abcde"],
            "steps": [2] * 5,
        }
    if "while step < steps" in block:
        names["steps"] = 100
    if "DiLoCoTrainer(" in block:
        names["batches"] = [{"inputs": batch} for batch in names["data"]]
    if 'torch.load("base.pt")' in block:
        torch.save(given.model.state_dict(), "base.pt")
    if "MixedLoader" in block:
        names |= {name: LeasedSampler(given.dataset, name=called) for name, called in (("b", "books"), ("c", "code"))}
    if "import LeasedLoader" not in block:
        names["LeasedLoader"] = LeasedLoader
    return names


HERE = {  # what differs on this machine
    "port=8513": "port=0",
    "num_workers=4": "num_workers=0",
    "...  # forward, backward, optimizer.step()": "train_step(model, optimizer, batch)",
}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), [(page, i) for page, count in LOOPS.items() for i in range(count)])
def test_a_block_runs_as_it_is_typed(page: str, number: int, given: Given) -> None:
    block = [block for block in blocks(page) if not runs_elsewhere(block)][number]
    names = bring(given, block)
    for typed, here in {**HERE, "192.168.1.100:8512": f"http://{given.server.address}"}.items():
        block = block.replace(typed, here)
    if re.search(r"\bworker\b", block) and not re.search(r"as worker|worker = ", block):  # it speaks of one
        in_a_run(given, block, names)
    else:
        run(block, names)
    trains = given.steps > 0 or "train_step(" in block or "optimizer.step()" in block
    assert (given.server.typed_status().sync_round > 0) == trains


def test_every_block_of_the_documentation_runs_somewhere() -> None:
    for file in sorted((ROOT / "docs").rglob("*.md")):
        page = file.relative_to(ROOT / "docs").as_posix()
        if page in SIGNATURES or page.startswith("adr/"):
            continue
        left = [block for block in blocks(page) if not runs_elsewhere(block)]
        assert len(left) == LOOPS.get(page, 0), f"{page}: run it here, or say which test does"
    text = "".join(block for file in (ROOT / "docs").rglob("*.md") for block in BLOCK.findall(file.read_text()))
    assert [part for part in ELSEWHERE if part not in text] == []
    tests = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    assert set(ELSEWHERE.values()) <= tests
