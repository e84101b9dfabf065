"""`outerstep run` with a Hugging Face Trainer: two commands, no model folder, no server to start."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outerstep.model_folder import load_state_dict
from pcs import Pc
from ports import free_port

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face.py"
IMPORTS = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
STEPS = 160


@pytest.fixture
def pcs(tmp_path: Path) -> Iterator[list[Pc]]:
    port = free_port()
    size = ("--steps", str(STEPS), "--save-every", "30")
    made = [
        Pc(tmp_path / name, port, EXAMPLE.read_text(), *size, "--seed", str(seed), imports=IMPORTS)
        for seed, name in enumerate(("first", "second"))
    ]
    yield made
    for pc in made:
        pc.end()


def losses(pc: Pc) -> list[float]:
    state = json.loads((pc.folder / "trained" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert state["global_step"] == STEPS
    return [line["loss"] for line in state["log_history"] if "loss" in line]


def test_a_trainer_needs_its_callback_and_two_commands_and_a_killed_pc_types_its_own_again(pcs: list[Pc]) -> None:
    first, second = pcs
    server = first.run("--sync-every", "20")
    worker = second.join(first)
    second.await_said("round 3 ·", worker)
    worker.send_signal(signal.SIGKILL)
    assert worker.wait(60) == -signal.SIGKILL
    kept = [place.name for place in (second.folder / "trained").glob("checkpoint-*/outerstep.pt")]
    assert kept, "there is a checkpoint to resume from"

    again = second.join(first)
    assert again.wait(240) == 0, second.said()
    assert server.wait(240) == 0, first.said()
    assert "joining as a new worker" not in second.said(), "it resumed its own state"
    agreed = load_state_dict(second.folder / "trained" / "agreed")  # it has steps to repeat, and leaves last
    latest = first.folder / "outerstep-run" / "latest"
    model = transformers.GPT2LMHeadModel.from_pretrained(latest)  # configuration and all
    assert all(torch.equal(model.state_dict()[name], value) for name, value in agreed.items())
    for pc in pcs:
        seen = losses(pc)
        assert sum(seen[-5:]) < 0.8 * sum(seen[:5]), "it learned"
        assert re.search(rf"round 1 · \S+ \+ \S+ · loss .* · step 20 of {STEPS} · \S+ left", pc.said()), pc.said()
    assert "is in outerstep-run/latest. The same command resumes the run." in first.said()
