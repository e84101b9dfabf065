"""What a replica of torchft's DiLoCo heals from: all of it, and copies. In the bare library it is neither."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

pytest.importorskip("torchft", reason="torchft has no wheel for this platform")

from torchft.local_sgd import DiLoCo

from outerstep.integrations.torchft import STATE_KEY, CheckedDiLoCo, make_diloco
from support import assert_same, in_threads, params_of, tiny_model, train_steps, wait_until
from torchft_replicas import StandInManager, adamw, alone, anchors, lighthouse, nesterov, real_manager, same

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchft_fsdp2.py"

Make = Callable[[Any, nn.Module, torch.optim.Optimizer], DiLoCo]


def _ours(manager: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> DiLoCo:
    return make_diloco(manager, model, optimizer, sync_every=1, outer_momentum=0.0)


def _bare(manager: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> DiLoCo:
    """With torchft's own state: the anchor and the outer optimizer, but neither model nor inner optimizer."""
    return DiLoCo(manager, [model], optimizer, torch.optim.SGD(model.parameters(), lr=0.7), sync_every=1)


class Healed(NamedTuple):
    trained: dict[str, Tensor]  # the first replica's weights when it stopped training
    first: dict[str, Tensor]  # the same after the newcomer's first sync
    newcomer: dict[str, Tensor]
    inner_states: list[dict[str, Any]]


def _a_newcomer_heals(make: Make) -> Healed:
    """One replica trains, then stands still; a second one with other weights joins it, and stands still too."""
    has_trained = threading.Event()
    trained: dict[str, Tensor] = {}

    def first(address: str) -> tuple[dict[str, Tensor], Any]:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        with real_manager(address, "first") as manager, make(manager, model, optimizer):
            train_steps(model, optimizer, 3, seed=0)
            trained.update(params_of(model))
            optimizer.param_groups[0]["lr"] = 0.0
            has_trained.set()
            for _ in range(10_000):
                train_steps(model, optimizer, 1, seed=1)
                if manager.num_participants() == 2:
                    return params_of(model), copy.deepcopy(optimizer.state_dict()["state"])
        raise AssertionError("nobody came")

    def second(address: str) -> tuple[dict[str, Tensor], Any]:
        model = tiny_model(seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
        assert has_trained.wait(30)
        with real_manager(address, "second") as manager, make(manager, model, optimizer):
            train_steps(model, optimizer, 1, seed=1)
            assert manager.num_participants() == 2
            return params_of(model), copy.deepcopy(optimizer.state_dict()["state"])

    with lighthouse(1, join_timeout_ms=20_000) as address:  # whoever heartbeats is waited for
        (after, state), (newcomer, its_state) = in_threads(lambda: first(address), lambda: second(address))
    return Healed(trained, after, newcomer, [state, its_state])


def test_in_the_bare_library_a_newcomer_sends_garbage() -> None:
    healed = _a_newcomer_heals(_bare)
    assert not same(healed.first, healed.trained)  # though nobody trained


def test_a_newcomer_heals_completely() -> None:
    healed = _a_newcomer_heals(_ours)
    assert_same(healed.first, healed.trained)
    assert_same(healed.newcomer, healed.trained)
    for mine, its in zip(*(state.values() for state in healed.inner_states), strict=True):
        assert torch.equal(mine["momentum_buffer"], its["momentum_buffer"])


class Everything(nn.Module):
    """Trainable, frozen, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = tiny_model(seed)
        self.frozen = nn.Parameter(torch.full((2,), float(seed)), requires_grad=False)
        self.register_buffer("seen", torch.full((2,), float(seed)))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1.0
        outputs: Tensor = self.net(inputs)
        return outputs


def _replica(seed: int) -> tuple[StandInManager, Everything, torch.optim.Optimizer, CheckedDiLoCo]:
    manager, model = alone(), Everything(seed)
    optimizer = adamw(model)
    diloco = make_diloco(manager, model, optimizer, sync_every=4, num_fragments=2, buffers="local")
    with diloco:
        train_steps(model, optimizer, 3, seed)
    return manager, model, optimizer, diloco


def test_what_heals_is_everything() -> None:
    source, healthy, inner, diloco = _replica(seed=0)
    target, healed, its_inner, its_diloco = _replica(seed=1)
    target.heal(source.saved())
    assert_same(healthy.state_dict(), healed.state_dict())
    assert_same(anchors(diloco), anchors(its_diloco))
    optimizers = [inner, *(f._outer_optimizer for f in diloco._fragments)]
    its_optimizers = [its_inner, *(f._outer_optimizer for f in its_diloco._fragments)]
    for mine, its in zip(optimizers, its_optimizers, strict=True):
        torch.testing.assert_close(its.state_dict(), mine.state_dict(), rtol=0.0, atol=0.0)
    assert inner.state_dict()["state"]


def test_what_heals_does_not_change_while_training_goes_on() -> None:
    """Nor does what the user gave to the manager, though those are the live tensors."""
    manager, model = alone(), Everything(0)
    manager.register_state_dict_fn("default", model.load_state_dict, model.state_dict)
    optimizer = adamw(model)
    with make_diloco(manager, model, optimizer, sync_every=2, buffers="local"):
        train_steps(model, optimizer, 3, seed=0)
        state = manager.saved()
        before = copy.deepcopy(state)
        train_steps(model, optimizer, 3, seed=1)
    assert state.keys() == {"default", STATE_KEY}
    torch.testing.assert_close(state, before, rtol=0.0, atol=0.0)


def test_what_heals_changes_while_training_goes_on_in_the_bare_library() -> None:
    manager, model = alone(), tiny_model()
    manager.register_state_dict_fn("default", model.load_state_dict, model.state_dict)
    optimizer = adamw(model)
    with DiLoCo(manager, [model], optimizer, nesterov(model.parameters()), sync_every=2):
        train_steps(model, optimizer, 3, seed=0)
        state = manager.saved()
        before = copy.deepcopy(state)
        train_steps(model, optimizer, 3, seed=1)
    assert not same(dict(state["default"]), dict(before["default"]))
    momentum, then = (s["StreamingDiLoCoFragment_0"]["outer_optimizer"]["state"][0] for s in (state, before))
    assert not torch.equal(momentum["momentum_buffer"], then["momentum_buffer"])


class Group:
    """The example's ranks, started as torchrun would, so that all of them can be killed at once."""

    def __init__(self, folder: Path, number: int, lighthouse_addr: str, ranks: int = 2) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's
        self.log = folder / f"group-{number}-{self._store.port}.log"
        options = [
            "--lighthouse",
            lighthouse_addr,
            "--group",
            str(number),
            "--outer-steps",
            "12",
            "--host",
            "127.0.0.1",
        ]
        shared = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        self.ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            with self.log.open("ab") as log:
                self.ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(EXAMPLE), *options],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    )
                )

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait(30)

    def said(self, what: str) -> bool:
        assert all(rank.poll() in (None, 0) for rank in self.ranks), self.log.read_text()[-4000:]
        return what in self.log.read_text()

    def weights(self) -> str:
        assert all(rank.wait(120) == 0 for rank in self.ranks), self.log.read_text()[-4000:]
        return self.log.read_text().rsplit("weights ", 1)[1].split()[0]


@pytest.mark.slow
def test_a_killed_fsdp2_group_comes_back_and_heals_its_shards(tmp_path: Path) -> None:
    """The example: two groups of two ranks, two fragments, a delay. The lighthouse lets no group go on alone."""
    groups: list[Group] = []
    try:
        with lighthouse(2, join_timeout_ms=5000, heartbeat_timeout_ms=1000) as address:
            groups += [Group(tmp_path, 0, address), Group(tmp_path, 1, address)]
            wait_until(lambda: groups[1].said("outer step 3"), 120)
            groups[1].kill()
            groups.append(Group(tmp_path, 1, address))
            assert groups[2].weights() == groups[0].weights()
        assert "outer step 1," not in groups[2].log.read_text()
    finally:
        for group in groups:
            group.kill()
