"""Ranks that one of them leads: what the layer above says reaches all, and what their saved states have of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from contract.adapters import ThreadLinks
from outerstep.core.outer import OuterRule
from outerstep.errors import ConfigError
from outerstep.topology.allreduce.cluster import NewAnchor, RankCluster, SavedCluster
from outerstep.topology.allreduce.peers import Peers
from outerstep.topology.cluster_part import ClusterPart
from outerstep.topology.forms import forms_of
from outerstep.topology.leadership import ClusterSettings, KeptRecord, Leadership, MakeLeader, MoveRefused
from outerstep.topology.terms import ExchangeHeader, introduction
from outerstep.types import Manifest, ParameterSpec, Plan
from support import in_threads

MANIFEST = Manifest(parameters=(ParameterSpec(name="cells", shape=(2,), dtype="float32"),))
PLAN = Plan(
    sync_every=1, codec="fp32", down_codec="fp32", fragments=(("cells",),), part_size_bytes=64, max_staleness=0,
    heartbeat_timeout_s=0.0,
)  # fmt: skip
RANKS = [introduction(f"rank-{r}", "test", 2, MANIFEST, PLAN, OuterRule()) for r in (0, 1)]
DONE = [ExchangeHeader(fragment=0, base_version=0, steps=4, samples=0, tokens=0, last=False)] * 2


def record(number: int) -> KeptRecord:
    return KeptRecord(torch.tensor([number], dtype=torch.uint8))


def anchor(version: int, *values: float) -> NewAnchor:
    return NewAnchor(version, {"cells": torch.tensor(values)}, "")


class ScriptedLeader:
    """After its first round it moves T to these values. `says_joined`: it has joined the layer above at once."""

    def __init__(self, leadership: Leadership, values: list[float], *, says_joined: bool) -> None:
        self.leadership, self.heard, self._values = leadership, list[list[float]](), values
        self.refused: list[str] = []
        if says_joined:
            leadership.joined(leadership.term, overtaken=False)
        leadership.release(leadership.term)

    def published(self, target: Mapping[str, Tensor], versions: Mapping[int, int]) -> None:
        self.heard.append(target["cells"].tolist())

    def round_closed(self, fragment: int = 0) -> None:
        self.leadership.hold(20.0)
        threading.Thread(target=self._move, daemon=True).start()

    def _move(self) -> None:
        term = self.leadership.term
        self.leadership.keep(term, record(1))
        try:
            self.leadership.move(term, record(1), 7, [0], lambda t: {"cells": t["cells"] + torch.tensor(self._values)})
        except MoveRefused as error:
            self.refused.append(str(error))
        self.leadership.release(term)

    def stop(self) -> None: ...

    def stand_down(self, why: str) -> None: ...


class Ranks:
    """Two of them, at one store."""

    def __init__(self, *values: float, says_joined: bool = True, saved: SavedCluster | None = None) -> None:
        self.leaders: list[ScriptedLeader] = []

        def lead(leadership: Leadership, members: object, manifest: object) -> MakeLeader:
            def make(target: Mapping[str, Tensor], is_new: bool) -> ScriptedLeader:
                self.leaders.append(ScriptedLeader(leadership, list(values), says_joined=says_joined))
                return self.leaders[-1]

            return make

        settings = ClusterSettings(wait_s=20.0, terms={}, lead=lead)
        store, boxes = HashStore(), {(i, j): queue.SimpleQueue[Tensor]() for i in (0, 1) for j in (0, 1)}
        self.clusters = [
            RankCluster(
                settings, RANKS, forms_of(PLAN, MANIFEST), Peers(store, rank, 2, name="test", timeout_s=20.0),
                ThreadLinks(rank, 2, boxes), saved,  # type: ignore[arg-type]
            )
            for rank in (0, 1)
        ]  # fmt: skip

    def each(self, job: Any) -> list[Any]:
        return in_threads(*[lambda c=cluster: job(c) for cluster in self.clusters])

    def begin(self) -> list[dict[int, NewAnchor]]:
        return self.each(lambda c: c.begin(MANIFEST, {0: anchor(0, 0.0, 0.0)}, is_new=c.cluster.rounds == 0))

    def round(self) -> list[dict[int, NewAnchor]]:
        zeros = {"cells": torch.zeros(2)}
        return self.each(lambda c: c.after_round(0, anchor(1, 1.0, 2.0), zeros, [0], DONE))


def test_what_comes_from_above_follows_a_round_with_the_same_bits_on_every_rank() -> None:
    ranks = Ranks(0.5, 0.25)
    assert ranks.begin() == [{}, {}]
    first, second = (ahead[0] for ahead in ranks.round())
    assert (first.version, first.values["cells"].tolist()) == (2, [1.5, 2.25])  # made from what the round came to
    assert (second.version, second.values["cells"].tolist(), second.digest) == (2, [1.5, 2.25], first.digest)
    assert ranks.leaders[0].heard == [[1.0, 2.0], [1.5, 2.25]]
    assert len(ranks.leaders) == 1
    for cluster in ranks.clusters:
        assert cluster.cluster == ClusterPart((1,), (7,), ((2,),), rounds=1, steps=8)


def test_what_is_no_number_is_refused_to_the_leader_and_nobody_moves() -> None:
    ranks = Ranks(0.5, float("nan"))
    ranks.begin()
    assert [ahead[0].version for ahead in ranks.round()] == [1, 1]
    assert "must be finite numbers" in ranks.leaders[0].refused[0]
    assert ranks.clusters[1].cluster.serials == (0,)


def test_a_state_has_the_newest_record_that_is_no_newer_than_its_anchors() -> None:
    ranks = Ranks(0.5, 0.25)
    ranks.begin()
    leading = ranks.clusters[0]
    leading.adopted()
    leading.leadership.keep(leading.leadership.term, record(0))
    ranks.round()  # in which record 1 is kept; the training thread has not adopted it
    before = leading.state_dict()
    assert (before["record"].tolist(), ClusterPart.fresh(1)) == ([0], SavedCluster({**before, "under_way": []}, 1).part)
    leading.adopted()
    after = leading.state_dict()
    assert after["record"].tolist() == [1]
    assert SavedCluster({**after, "under_way": []}, 1).part.serials == (7,)
    assert ranks.clusters[1].state_dict()["record"].tolist() == []  # rank 0 leads


@pytest.mark.parametrize(("says_joined", "kept", "dropped"), [(True, 1, False), (False, 1, True), (True, None, True)])
def test_unsent_steps_in_a_state_are_dropped_unless_it_is_known_what_was_sent(
    says_joined: bool, kept: int | None, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outerstep.topology.leadership.BEGIN_S", 0.1)
    part = '{"moves": [0], "serials": [0], "above": [[]], "rounds": 3}'
    held = record(kept).data if kept is not None else KeptRecord().data
    ranks = Ranks(says_joined=says_joined, saved=SavedCluster({"cluster": part, "record": held, "under_way": []}, 1))
    moved = ranks.begin()
    doubts = [cluster.doubtful(ahead) for cluster, ahead in zip(ranks.clusters, moved, strict=True)]
    assert doubts == [frozenset({0}) if dropped else frozenset()] * 2


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("{", "not one of a cluster"),
        ('{"moves": 3}', "not one of a cluster"),
        ('{"moves": [], "serials": [], "above": []}', "must have 1 fragments, got 0"),
    ],
)
def test_a_state_that_is_none_is_refused(part: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SavedCluster({"cluster": part, "record": record(0).data, "under_way": []}, 1)
