"""Real processes that save their own checkpoints, are killed, and are started again with the same command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nursery
from outerstep.model_folder import load_state_dict
from outerstep.server import DiLoCoServer
from support import assert_same, in_threads, tiny_model, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "checkpointing.py"

SCRIPT = """
import os, pathlib, signal, sys
sys.path.insert(0, {tests!r})
import torch, outerstep
from support import tiny_model, train_steps

torch.set_num_threads(1)
folder, deaths = pathlib.Path(sys.argv[1]), [int(step) for step in sys.argv[2].split(",") if step]
name = os.environ["DILOCO_WORKER_ID"]
file = folder / f"{{name}}.pt"
model = tiny_model(ord(name))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
worker = outerstep.attach(model, optimizer)
step = 0
if file.exists():
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    worker.load_state_dict(saved["worker"])
    step = saved["step"]
with worker:
    while step < {steps}:
        train_steps(model, optimizer, 1, seed=1000 * ord(name) + step)
        step += 1
        if step in deaths:
            state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "worker": worker.state_dict()}}
            torch.save({{**state, "step": step}}, file)
            os.kill(os.getpid(), signal.SIGKILL)
outerstep.save_model(model, folder / name)
"""
STEPS = 25
SETTINGS: dict[str, Any] = {
    "codec": "int4+feedback",
    "sync_every": 6,
    "num_fragments": 2,
    "fragment_delay": 2,
    "fragment_carry": True,
    "deterministic": True,
}


def start(arguments: list[str], server: str, name: str, log: Path) -> nursery.Child:
    """A worker's process; who starts it ends it."""
    own = {"DILOCO_SERVER": server, "DILOCO_WORKER_ID": name}
    with log.open("ab") as out:
        return nursery.start(arguments, log=out, env={**os.environ, **own})


def run_until_done(arguments: list[str], server: str, name: str, log: Path) -> int:
    """Start it again whenever it was killed; says how often that was."""
    for deaths in range(9):
        child = start(arguments, server, name, log)
        try:
            code = child.wait(120)
        finally:
            child.kill()
            child.wait()
        if code != -signal.SIGKILL:
            assert code == 0, log.read_text()
            return deaths
    raise AssertionError("it never came to an end")


@pytest.mark.row("F29")
def test_processes_that_die_at_any_step_give_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests"), steps=STEPS))

    def run(kind: str, deaths: dict[str, str]) -> dict[str, torch.Tensor]:
        folder = tmp_path / kind
        folder.mkdir()
        with DiLoCoServer(tiny_model().state_dict(), 2, port=0, **SETTINGS) as server:

            def train(name: str) -> int:
                arguments = [str(script), str(folder), deaths[name]]
                return run_until_done(arguments, server.address, name, folder / f"{name}.log")

            died = in_threads(lambda: train("a"), lambda: train("b"), timeout_s=250.0)
            assert died == [len(at.split(",")) if at else 0 for at in deaths.values()]
            assert_same(load_state_dict(folder / "a"), load_state_dict(folder / "b"))
            return server.get_global_params()

    assert_same(run("killed", {"a": "4,15", "b": "14"}), run("straight", {"a": "", "b": ""}))


def test_the_example_is_killed_wherever_it_is_and_goes_on(tmp_path: Path) -> None:
    made = subprocess.run([sys.executable, EXAMPLE, "--make-model", tmp_path / "model"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    initial = load_state_dict(tmp_path / "model")
    with DiLoCoServer(initial, 2, port=0, sync_every=20, codec="int4+feedback") as server:

        def train(name: str) -> nursery.Child:
            files = ["--checkpoint", f"{tmp_path}/{name}.pt", "--save", f"{tmp_path}/{name}"]
            arguments = [str(EXAMPLE), *files, "--every", "3", "--steps", "400", "--seed", str(ord(name[0]))]
            return start(arguments, server.address, name, tmp_path / f"{name}.log")

        children = [train("left"), train("right")]
        try:
            for rounds in (3, 6):
                wait_until(lambda rounds=rounds: server.sync_round >= rounds)
                children[0].kill()
                children[0].wait()
                children[0] = train("left")
            codes = [child.wait(200) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        log = (tmp_path / "left.log").read_text()
        assert codes == [0, 0], log
        assert log.count("resuming after step") == 2
        # It took steps again, and so it is the last to leave.
        assert_same(load_state_dict(tmp_path / "left"), server.get_global_params())
        assert server.status()["total_worker_deaths"] == 0, "a restart is no death"
