"""docs/extending.md as it stands there: its topology goes through the contract, its other parts take part in a run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from contract.adapters import NAMES, Adapter, AllReduceRun, GossipRun, Run, ServerRun, TorchftRun
from contract.member import Rank
from contract.sentences import SENTENCES, assert_one_anchor, exchange, together
from outerstep import DiLoCoWorker, register_codec, register_rule
from outerstep.coordination.server import rounds
from outerstep.core.codecs import CODECS
from outerstep.core.outer import OuterRule, OwnRule
from outerstep.core.robust.aggregator import RULES
from outerstep.errors import ConfigError
from outerstep.server import DiLoCoServer
from outerstep.topology.protocol import Topology
from outerstep.types import Wishes
from outerstep.worker import connect
from support import in_threads, tiny_model, train_steps

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(autouse=True)
def _own_names() -> Iterator[None]:
    """What a test registers is gone after it."""
    tables: list[dict[str, Any]] = [CODECS, RULES, rounds.OWN_RULES, connect._FACTORIES]
    before = [dict(table) for table in tables]
    yield
    for table, names in zip(tables, before, strict=True):
        table.clear()
        table.update(names)


def code(title: str, blocks: int = 2) -> dict[str, Any]:
    """What the first blocks under this title define."""
    found: dict[str, Any] = {}
    section = PAGE.read_text().split(f"## {title} of your own\n")[1].split("\n## ")[0]
    for block in section.split("```python\n")[1 : blocks + 1]:
        exec(block.split("```")[0], found)
    return found


class FolderRun(Run):
    kind = code("A topology", blocks=1)["FolderTopology"]  # the second registers it

    def ranks(self, number: int) -> list[Rank]:
        def make(anchors: dict[str, Tensor]) -> Topology:
            topology: Topology = self.kind(
                self.folder, NAMES[number], self.tensors(number), founds=number == 0, deadline_s=self.deadline_s
            )
            return topology

        return [Rank(make)]


class Folder(Adapter):
    name, run = "folder", FolderRun
    cannot: ClassVar = {"is late": "a round that has closed names who is in it: what comes later goes into the next"}

    def shows(self, sentence: str, folder: Path) -> None:
        with self.open(folder) as run:
            a, b = run.member(0), run.member(1)
            in_threads(a.enter, b.enter)
            agreed = in_threads(a.learn(0).exchange, b.learn(1).exchange)
            assert all(one.counted_in <= one.version for one in agreed)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_it(sentence: str, tmp_path: Path) -> None:
    adapter = Folder()
    if sentence in adapter.cannot:
        adapter.shows(sentence, tmp_path)
    else:
        SENTENCES[sentence](adapter, tmp_path)


def test_workers_train_over_the_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_FOLDER", str(tmp_path))
    code("A topology")

    def train(worker_id: str) -> dict[str, Tensor]:
        model = tiny_model(ord(worker_id))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCoWorker(
            model, optimizer, topology="folder", worker_id=worker_id, sync_every=2, num_fragments=2
        ) as worker:
            met.wait(30)
            train_steps(model, optimizer, 5, seed=ord(worker_id))
            assert min(worker.sync_metrics["versions"]) >= 1
        return model.state_dict()

    met = threading.Barrier(2)
    a, b = in_threads(lambda: train("a"), lambda: train("b"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_codec_is_used_by_its_name(tmp_path: Path) -> None:
    code("A codec")

    class HalfRun(ServerRun):
        more: ClassVar = {"codec": "half"}

    run = HalfRun(2, None, None, tmp_path)
    a, b = run.member(0), run.member(1)
    joined = in_threads(partial(a.join, wishes=Wishes()), partial(b.join, wishes=Wishes()))
    assert {(one.plan.codec, one.plan.down_codec) for one in joined} == {("half", "half")}
    in_threads(a.catch_up, b.catch_up)
    for _ in range(2):
        exchange(a.learn(0, 1.0 + 2.0**-12), b.learn(1, 1.0 + 2.0**-10))
    assert_one_anchor(a, b)
    assert a.anchor[:2].tolist() == [1.0, 1.0 + 2.0**-10], "of eleven significant bits"
    run.close()


LATER = """
import sys, torch, outerstep
from outerstep.errors import OuterstepError
page, address, codec = sys.argv[1:]
if codec:
    exec(open(page).read().split("## A codec of your own")[1].split("```python\\n")[1].split("```")[0])
model = torch.nn.Linear(2, 1)
try:
    with outerstep.DiLoCoWorker(model, torch.optim.SGD(model.parameters()), address, codec=codec or None):
        print("joined")
except OuterstepError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("registered_by", ["server", "worker"])
def test_a_codec_that_is_not_registered_on_the_other_side_is_named(registered_by: str) -> None:
    settings = {}
    if registered_by == "server":
        code("A codec")
        settings = {"codec": "half"}
    state = torch.nn.Linear(2, 1).state_dict()
    with DiLoCoServer(state, 1, 0, insecure=True, **settings) as server:
        wanted = "half" if registered_by == "worker" else ""
        said = subprocess.run(
            [sys.executable, "-c", LATER, str(PAGE), f"http://{server.address}", wanted],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert "unknown codec 'half'" in said.stdout, said
    assert "outerstep.register_codec" in said.stdout
    assert not server.service.status().workers, "nobody is to wait for it"


@pytest.mark.parametrize("kind", [ServerRun, GossipRun])
def test_the_rule_is_used_by_its_name(kind: type[Run], tmp_path: Path) -> None:
    name = code("An aggregation rule")["AgreeingSigns"].name

    class RuleRun(kind):  # type: ignore[misc,valid-type]
        more: ClassVar = {"aggregation": name, **({"codec": "fp32"} if kind is ServerRun else {})}

    run = RuleRun(3, None, None, tmp_path)
    a, b, c = (run.member(number) for number in range(3))
    together(run, a, b, c)
    exchange(a.learn(0, 2.0), b.learn(0, 4.0), c.learn(0, -3.0))
    assert_one_anchor(a, b, c)
    assert a.anchor[0] == 3.0, "c points the other way"
    run.close()


def test_a_rule_is_asked_how_many_it_needs() -> None:
    rule = code("An aggregation rule")["AgreeingSigns"]
    rule.fewest = 4
    register_rule(rule())
    with pytest.raises(
        ConfigError, match=r"'agreeing_signs' needs at least 4 contributions in a round, got num_workers 3"
    ):
        DiLoCoServer({"cells": torch.zeros(2)}, 3, aggregation="agreeing_signs")
    with pytest.raises(ConfigError, match=r"aggregation must be one of 'mean', .*'agreeing_signs', got 'agreeing'"):
        DiLoCoServer({"cells": torch.zeros(2)}, 3, aggregation="agreeing")


@pytest.mark.parametrize("kind", [ServerRun, AllReduceRun, GossipRun, TorchftRun])
def test_the_outer_optimizer_takes_the_step(kind: type[Run], tmp_path: Path) -> None:
    optimizer = code("An outer optimizer")["SignOfMomentum"]
    own = OwnRule("page:SignOfMomentum", lambda params: optimizer(params, lr=0.125, momentum=0.5))

    class SignRun(kind):  # type: ignore[misc,valid-type]
        outer: ClassVar = OuterRule(own=own)
        more: ClassVar = {
            ServerRun: {
                "codec": "fp32",
                "outer_lr": None,
                "outer_momentum": None,
                "outer_optimizer_factory": own.factory,
            },
            GossipRun: {"min_peers": 1, "own_outer": own},
        }.get(kind, {})

    run = SignRun(2, None, None, tmp_path)
    a, b = run.member(0), run.member(1)
    together(run, a, b)
    exchange(a.learn(0, 5.0), b.learn(1, -7.0))
    assert_one_anchor(a, b)
    assert a.anchor.tolist() == [0.125, -0.125, *[0.0] * 6]
    exchange(a.learn(0, -1.0), b.learn(1, 9.0))
    assert_one_anchor(a, b)
    assert a.anchor.tolist() == [0.25, 0.0, *[0.0] * 6], "its momentum outweighs the second round, or does not"
    run.close()


@pytest.mark.parametrize(
    "name", ["fp32", "int8", "sparse64", "sparse7", "", "Half", "a b", "a+b", "a,b", "a=b", "x" * 33]
)
def test_a_codec_that_ships_keeps_its_name(name: str) -> None:
    codec = code("A codec")["Half"]()
    codec.name = name
    with pytest.raises(ConfigError, match="codec of your own cannot be called"):
        register_codec(codec)


@pytest.mark.parametrize("values", [0, 3, 8192])
def test_blocks_of_a_codec_fit_where_tensors_are_cut(values: int) -> None:
    codec = code("A codec")["Half"]()
    codec.block_values = values
    with pytest.raises(ConfigError, match=rf"power of two, at most 4096, got {values}"):
        register_codec(codec)


@pytest.mark.parametrize("name", ["mean", "krum", "my rule"])
def test_a_rule_that_ships_keeps_its_name(name: str) -> None:
    rule = code("An aggregation rule")["AgreeingSigns"]()
    rule.name = name
    with pytest.raises(ConfigError, match="aggregation of your own cannot be called"):
        register_rule(rule)
