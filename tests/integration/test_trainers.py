"""Each trainer with its real library, as a worker in a process of its own: it learns, is killed, resumes from its own
checkpoint, and no step counts twice.

H = 4, a checkpoint after every 5 steps, 16 steps in all, two batches to a step. A process that is killed after step 7
has steps in its checkpoint that were not sent, and steps that are in no checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nursery import start
from outerstep.integrations.trainer_worker import read_state
from outerstep.model_folder import load_state_dict
from outerstep.server import DiLoCoServer
from support import Books, Ledger

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = Path(__file__).with_name("trainer_job.py")
RUN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 4}
OPTIONS = ("--steps", "16", "--save-every", "5", "--accumulate", "2")
SMALL = ("--out", "out", *OPTIONS, "--batch", "4", "--context", "16", "--layers", "1", "--width", "32")


class TrainerRun:
    """A server, and one worker whose script is started again and again."""

    def __init__(self, folder: Path, script: Path, imports: tuple[str, ...], *size: str) -> None:
        self.folder, self._script, self._imports = folder, script, imports
        self.launch("--make-model", str(folder / "model"), *size, job=False)
        self.server = DiLoCoServer(load_state_dict(folder / "model"), num_workers=1, port=0, insecure=True, **RUN)
        self.server.start()
        self.books = Books(self.server, ["w"])

    def launch(self, *arguments: str, die_at: int = 0, job: bool = True) -> list[dict[str, Any]]:
        """Run the script to its end, and say what was seen after each of its steps."""
        witness, log = self.folder / "witness.jsonl", self.folder / "log"
        witness.unlink(missing_ok=True)
        program = [JOB, witness, str(die_at), self._script] if job else [self._script]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if job:
            env |= {"DILOCO_SERVER": f"http://{self.server.address}", "DILOCO_WORKER_ID": "w"}
        with log.open("wb") as out:
            child = start([*program, *arguments], log=out, env=env, cwd=self.folder, imports=self._imports)
            code = child.wait(240)
        self.log = log.read_text(errors="replace")
        assert code == (-signal.SIGKILL if die_at else 0), self.log
        return [json.loads(line) for line in witness.read_text().splitlines()] if witness.exists() else []

    def close(self) -> None:
        self.server.stop()


LIBRARIES = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "lightning.pytorch", "accelerate")
IMPORTS = tuple(name for name in LIBRARIES if find_spec(name.partition(".")[0]) is not None)  # once for all of them
TRAINERS: dict[str, tuple[str, str]] = {
    "accelerate": ("accelerate_loop.py", "accelerate"),
    "lightning": ("lightning_module.py", "lightning.pytorch"),
}


def assert_agreed(server: DiLoCoServer, folder: Path) -> None:
    """The model in that folder is the server's. (Hugging Face saves tied weights once.)"""
    agreed, saved = server.get_global_params(), load_state_dict(folder)
    assert agreed.keys() - saved.keys() <= {"lm_head.weight"}
    for name, value in saved.items():
        assert torch.equal(agreed[name], value), name


def assert_resumed(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """`first` was killed after step 7, its last checkpoint is of step 5: the second repeats two steps bit for bit."""
    assert len(first) == 7
    assert [seen["local_step"] for seen in second][:2] == [6, 7]
    for before, after in zip(first[5:], second, strict=False):
        assert before["hash"] == after["hash"], "weights after the same step differ"
    assert first[6]["loss"] == pytest.approx(second[1]["loss"], rel=1e-6)
    assert first[6]["norm"] == second[1]["norm"]


def assert_learned(seen: list[dict[str, Any]]) -> None:
    losses = [one["loss"] for one in seen if one["loss"] is not None]
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3]), losses
    assert all(one["outside_changes"] == 0 for one in seen), "a load before the start is no change from outside"


@pytest.fixture(params=TRAINERS)
def trainer_run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrainerRun]:
    script, library = TRAINERS[request.param]
    pytest.importorskip(library)
    run = TrainerRun(tmp_path, EXAMPLES / script, IMPORTS)
    yield run
    run.close()


def test_a_trainer_learns_is_killed_and_resumes_from_its_own_checkpoint(trainer_run: TrainerRun) -> None:
    first = trainer_run.launch("--output", "out", *OPTIONS, die_at=7)
    assert (trainer_run.server.sync_round, trainer_run.books.steps_of("w")) == (1, 4)
    second = trainer_run.launch("--output", "out", *OPTIONS)
    assert_resumed(first, second)
    assert_learned(first[:5] + second)
    assert second[-1]["local_step"] == 16, "batches that are accumulated are no steps"
    assert (trainer_run.server.sync_round, trainer_run.books.steps_of("w")) == (4, 16), "each step counts once"
    assert_agreed(trainer_run.server, trainer_run.folder / "out" / "agreed")


def killed_twice(run: TrainerRun, *arguments: str) -> list[list[dict[str, Any]]]:
    """What three processes saw. The second is killed after step 13: its checkpoint is of step 10, and a round that
    closed since then has steps 9 to 12 in the model. They count there, and not once more."""
    first = run.launch(*arguments, die_at=7)
    assert (run.server.sync_round, run.books.steps_of("w")) == (1, 4)
    second = run.launch(*arguments, die_at=8)
    assert_resumed(first, second)
    assert (run.server.sync_round, run.books.steps_of("w")) == (3, 12)
    third = run.launch(*arguments)
    assert "later steps of this worker than its saved state knows of" in run.log
    assert [seen["local_step"] for seen in third] == [11, 12, 13, 14, 15, 16]
    assert run.books.steps_of("w") == 12 + 6, "those that were sent before, and those of the last process"
    assert third[0]["norm"] == pytest.approx(second[-1]["norm"], rel=0.01), "from the agreed weights, without a jump"
    before, after = ([seen["loss"] for seen in each if seen["loss"] is not None] for each in (first, third))
    assert after[0] < 1.3 * max(before), "nor has the loss one"
    return [first, second, third]


def test_a_trainer_that_is_killed_after_a_round_closed_counts_no_step_of_it_twice(trainer_run: TrainerRun) -> None:
    killed_twice(trainer_run, "--output", "out", *OPTIONS)
    assert_agreed(trainer_run.server, trainer_run.folder / "out" / "agreed")


def test_the_hugging_face_trainer_is_killed_twice_and_counts_no_step_twice(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = TrainerRun(tmp_path, EXAMPLES / "hugging_face.py", IMPORTS)
    try:
        first, second, third = killed_twice(run, "--output", "out", *OPTIONS)
        assert_learned(first[:5] + second + third)
        assert third[0]["loss"] < 1.1 * second[-1]["loss"]
        assert third[-1]["tokens"] == 16 * 2 * 8 * 32, "steps, batches to a step, pieces in a batch, bytes in a piece"

        assert_agreed(run.server, tmp_path / "out" / "agreed")
        assert_agreed(run.server, tmp_path / "out" / "checkpoint-16")  # the last checkpoint, too
        state = json.loads((tmp_path / "out" / "checkpoint-16" / "trainer_state.json").read_text())
        shown = [line for line in state["log_history"] if "outerstep_round" in line]
        assert [line["step"] for line in shown] == [5, 10, 15]
        assert all({"loss", "outerstep_local_step", "outerstep_bytes_sent"} <= line.keys() for line in shown)
        assert read_state(tmp_path / "out" / "checkpoint-16" / "outerstep.pt") == {"format": 1, "worker": None}
    finally:
        run.close()


FAILING = """
import sys, torch
sys.path.append({tests!r})
from outerstep.integrations.trainer_worker import TrainerWorker
from support import Ledger, count

model = Ledger(1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
TrainerWorker({{}}).start(model, optimizer)
count(model, optimizer, 0, 5)
raise RuntimeError("the script fails, and its trainer tells nobody")
"""


def test_a_worker_whose_script_fails_has_left_when_the_process_is_gone(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(tests=str(Path(__file__).parents[1])))
    with DiLoCoServer(Ledger(1).state_dict(), num_workers=1, port=0, insecure=True, **RUN) as server:
        books = Books(server, ["w"])
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env |= {"DILOCO_SERVER": f"http://{server.address}", "DILOCO_WORKER_ID": "w"}
        with (tmp_path / "log").open("wb") as out:
            assert start([script], log=out, env=env, cwd=tmp_path).wait(120) == 1
        assert "its trainer tells nobody" in (tmp_path / "log").read_text()
        assert server.status()["workers"] == {}, "nobody waits for its heartbeat"
        assert books.audit() == {"w": [4]}, "and what it had not sent is not sent"


# --- a script of one's own ------------------------------------------------------------------------------------------


@pytest.fixture
def plain_run(tmp_path: Path) -> Iterator[TrainerRun]:
    """The plain script with its five lines."""
    diff = (EXAMPLES / "nanogpt.diff").read_text()
    changes = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert [line[0] for line in changes] == ["+"] * 5
    (tmp_path / "examples").mkdir()
    script = tmp_path / "examples" / "nanogpt.py"
    script.write_text((EXAMPLES / "nanogpt.py").read_text())
    subprocess.run(["git", "apply", "--verbose", EXAMPLES / "nanogpt.diff"], cwd=tmp_path, check=True)
    assert script.read_text().count("outerstep.attach") == 1
    run = TrainerRun(tmp_path, script, (), *SMALL[8:])
    yield run
    run.close()


def test_five_lines_make_a_plain_script_a_worker(plain_run: TrainerRun) -> None:
    first = plain_run.launch(*SMALL, die_at=7)
    second = plain_run.launch(*SMALL)
    assert_resumed(first, second)
    assert_learned(first[:5] + second)
    assert (plain_run.server.sync_round, plain_run.books.steps_of("w")) == (4, 16)
    assert_agreed(plain_run.server, plain_run.folder / "out")


def test_a_plain_script_that_is_killed_after_a_round_closed_counts_no_step_of_it_twice(plain_run: TrainerRun) -> None:
    killed_twice(plain_run, *SMALL)
    assert_agreed(plain_run.server, plain_run.folder / "out")
