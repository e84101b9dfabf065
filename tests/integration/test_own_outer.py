"""An outer optimizer of the user's own through a whole run: by name, saved, resumed, replayed; and without a server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nursery
from outerstep import DiLoCoServer, DiLoCoTrainer, OuterOptimizer
from outerstep.cli.server import inside_a_cluster
from outerstep.config import SERVER, Sourced, make_command, resolve
from outerstep.errors import ConfigError, ModelError
from outerstep.model_folder import save_model
from outerstep.topology.server.client import DiLoCoClient
from outerstep.wire.memory import MemoryTransport
from ports import free_port
from support import Ledger, kill, wait_until

OPTIONS = "lr=0.5 momentum=0.5"


class Halving(OuterOptimizer):
    """θ − η·m, m ← μ·m + g: exact on whole numbers with halves."""

    def update(self, theta: Tensor, g: Tensor, momentum: Tensor, options: Mapping[str, Any]) -> None:
        momentum.mul_(options["momentum"]).add_(g)
        theta.sub_(momentum * options["lr"])


def make_server(folder: Path | None, **settings: Any) -> DiLoCoServer:
    more = {} if folder is None else {"save_dir": str(folder)}
    made = DiLoCoServer(
        Ledger(2).state_dict(), num_workers=1, port=0, codec="fp32", heartbeat_timeout=0.0,
        **{"outer_optimizer": Halving, "outer_options": OPTIONS, **more, **settings},
    )  # fmt: skip
    made.service.start()
    return made


def push(server: DiLoCoServer, *rounds: float) -> list[float]:
    client = DiLoCoClient("memory", transport=MemoryTransport(server.service))
    client.register("w", codec="fp32")
    for g in rounds:
        client.submit_pseudogradients("w", {"cells": torch.full((2,), g)})
    return server.get_global_params()["cells"].tolist()


def expected(*rounds: float, lr: float = 0.5) -> list[float]:
    theta = momentum = 0.0
    for g in rounds:
        momentum = 0.5 * momentum + g
        theta -= lr * momentum
    return [theta] * 2


@pytest.mark.parametrize("down", ["fp32", "int8"])
def test_it_steps_is_replayed_and_resumed(tmp_path: Path, down: str) -> None:
    server = make_server(tmp_path, down_codec=down)
    first = push(server, 8.0, -4.0, 2.0)
    if down == "fp32":
        assert first == expected(8.0, -4.0, 2.0)
    kill(server)  # killed: everything since the start is in the journal
    replayed = make_server(tmp_path)
    assert replayed.get_global_params()["cells"].tolist() == first
    then = push(replayed, 16.0)
    if down == "fp32":
        assert then == expected(8.0, -4.0, 2.0, 16.0)
    replayed.service.stop()  # stopped: it is in a saved state, its momentum too
    replayed.service.writer.close()
    resumed = make_server(tmp_path)
    last = push(resumed, 0.0)
    if down == "fp32":
        assert last == expected(8.0, -4.0, 2.0, 16.0, 0.0)
    assert last != then, "its momentum goes on"
    kill(resumed)


@pytest.mark.slow
def test_typed_on_the_command_line_it_survives_a_kill(tmp_path: Path) -> None:
    """The user's module lies in the folder where `outerstep server` is typed."""
    save_model(Ledger(2), tmp_path / "model")
    (tmp_path / "my_rules.py").write_text(
        "import outerstep\n\n\nclass Halving(outerstep.OuterOptimizer):\n"
        "    def update(self, theta, g, momentum, options):\n"
        '        momentum.mul_(options["momentum"]).add_(g)\n'
        '        theta.sub_(momentum * options["lr"])\n'
    )
    program = tmp_path / "bin" / "outerstep-program.py"
    program.parent.mkdir()
    program.write_text("from outerstep.cli import main\n\nmain()\n")
    port = free_port()
    line = (
        f"server -m model -n 1 --insecure --port {port} --codec fp32 --outer-optimizer my_rules:Halving "
        "--outer-option lr=0.5 --outer-option momentum=0.5"
    )
    found: list[list[float]] = []
    for g, ends in ((8.0, "kill"), (-4.0, "terminate")):
        with (tmp_path / "server.log").open("ab") as log:
            child = nursery.start([program, *line.split()], log=log, env=os.environ, cwd=tmp_path)
        try:
            wait_until(lambda: child.poll() is not None or _answers(port), timeout_s=60.0)  # noqa: B023
            assert child.poll() is None, (tmp_path / "server.log").read_text()
            client = DiLoCoClient(f"http://127.0.0.1:{port}")
            client.register("w", codec="fp32")
            found.append(client.submit_pseudogradients("w", {"cells": torch.full((2,), g)})["cells"].tolist())
            client.close()
        finally:
            getattr(child, ends)()
            child.wait(30)
    assert found == [expected(8.0), expected(8.0, -4.0)], "its momentum was in the journal"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_changed_options_hold_from_then_on(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    before = push(server, 8.0, -4.0)
    kill(server)
    again = make_server(tmp_path, outer_options="lr=0.25 momentum=0.5")
    assert again.get_global_params()["cells"].tolist() == before
    assert push(again, 4.0) == [before[0] - 0.25 * (0.5 * (0.5 * 8.0 - 4.0) + 4.0)] * 2
    kill(again)


def test_a_run_is_not_resumed_with_another_rule(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    push(server, 8.0, -4.0)
    kill(server)
    with pytest.raises((ConfigError, ModelError), match="outer"):
        make_server(tmp_path, outer_optimizer="nesterov", outer_options=None)
    make_server(tmp_path).service.writer.close()


def test_a_copy_of_the_state_goes_where_one_likes_and_is_loaded_from_there(tmp_path: Path) -> None:
    """`save_state(path)`, with a folder of its own or without one."""
    place = tmp_path / "elsewhere" / "state"
    for folder in (None, tmp_path / "run"):
        server = make_server(folder)
        push(server, 8.0)
        assert server.save_state(place) == place
        after = push(server, 6.0)
        assert server.save_state(str(place)) == place, "a state there is replaced"
        with pytest.raises(Exception, match="is no saved state"):
            server.save_state(tmp_path)
        loaded = make_server(None)
        loaded.load_state(place)
        assert loaded.get_global_params()["cells"].tolist() == after
        assert push(loaded, 2.0) == push(server, 2.0), "momentum and all"
        kill(server)
        if folder is not None:  # killed: its own folder knows nothing of the copy, and lacks nothing
            again = make_server(folder)
            assert again.get_global_params()["cells"].tolist() == server.get_global_params()["cells"].tolist()
            kill(again)
    assert sorted(entry.name for entry in place.parent.iterdir()) == ["state"]


def test_adam_by_name_and_options() -> None:
    server = make_server(None, outer_optimizer="adam", outer_lr=0.25, outer_options="betas=0.5,0.5 eps=1e-8")
    reference = torch.zeros(2)
    adam = torch.optim.Adam([param := torch.nn.Parameter(reference)], lr=0.25, betas=(0.5, 0.5))
    for g in (3.0, -1.0):
        param.grad = torch.full((2,), g)
        adam.step()
    assert push(server, 3.0, -1.0) == param.tolist()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"outer_optimizer": "adamm"}, "got 'adamm'"),
        ({"outer_optimizer": "lbfgs", "outer_options": None}, "outer_optimizer 'lbfgs' .* cannot step by itself"),
        ({"outer_optimizer": "adam", "outer_options": "mass=3"}, "'adam' cannot be made with mass=3"),
        ({"outer_options": "lr"}, r"KEY=VALUE with spaces between, got 'lr'"),
        ({"outer_options": "lr=1 lr=2"}, "say lr twice"),
        ({"outer_lr": 0.5}, r"outer_lr is short for lr= in outer_options, got both \(0\.5 and 0\.5\)"),
        ({"outer_optimizer": "nesterov"}, "outer_options .*an outer_optimizer by name"),
        ({"outer_optimizer_factory": lambda params: Halving(params)}, "leave one of the two out"),
        (
            {
                "outer_optimizer": "nesterov",
                "outer_options": None,
                "outer_momentum": 0.5,
                "outer_optimizer_factory": lambda params: Halving(params),
            },
            r"outer_momentum \(0\.5\) has no effect where outer_optimizer_factory",
        ),
        ({"outer_optimizer": "adam", "outer_options": None, "async_mode": True}, "torch.optim.SGD, got Adam"),
        ({"async_mode": True}, "torch.optim.SGD, got Halving"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run_begins(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_server(None, **settings)


def test_delayed_nesterov_takes_the_rule_that_ships_under_its_public_name() -> None:
    named = make_server(None, async_mode=True, outer_optimizer=OuterOptimizer, outer_options="lr=0.5 momentum=0.5")
    plain = make_server(
        None, async_mode=True, outer_optimizer="nesterov", outer_options=None, outer_lr=0.5, outer_momentum=0.5
    )
    assert push(named, 8.0, -4.0, 2.0) == push(plain, 8.0, -4.0, 2.0)


def test_a_trainer_among_peers_steps_by_it() -> None:
    model = Ledger(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = DiLoCoTrainer(model, optimizer, 1, outer_optimizer=Halving, outer_options=OPTIONS)
    rounds: Any = trainer._rounds
    for g in (8.0, -4.0):
        sent = {"cells": torch.full((2,), g)}
        with torch.no_grad():
            model.cells.sub_(sent["cells"])
        rounds._adopt({"cells": sent["cells"].clone()}, sent, 0)
    assert model.cells.tolist() == expected(8.0, -4.0)
    with pytest.raises(ConfigError, match=r"among peers everybody takes the outer step.*got 'adam'"):
        DiLoCoTrainer(model, optimizer, 1, outer_optimizer="adam")


def test_in_a_cluster_it_is_taken_only_where_the_layer_above_has_no_momentum() -> None:
    said = {
        "num_workers": Sourced(2, "flag"), "above": Sourced("h:1", "flag"), "outer_optimizer": Sourced("adam", "flag"),
    }  # fmt: skip
    found = resolve(SERVER, said, environ={})
    with pytest.raises(ConfigError, match="outer_optimizer must be left out in a cluster, got 'adam', which may have"):
        inside_a_cluster(found, make_command(SERVER, found))
    found = resolve(SERVER, {**said, "inner_momentum": Sourced(True, "flag")}, environ={})
    assert inside_a_cluster(found, make_command(SERVER, found))["outer_lr"].value is None, "as Adam has it"
