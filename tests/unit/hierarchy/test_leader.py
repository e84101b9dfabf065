"""The thread that speaks for a cluster: what it does when it is stopped, told to stand down, or fails."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from outerstep.coordination.layers.between import LayerTerms
from outerstep.coordination.server.claims import NOTHING, ClaimedWork
from outerstep.coordination.server.plan import changed
from outerstep.errors import Kicked, TransportError
from outerstep.hierarchy.below import Hearing
from outerstep.hierarchy.leader import Leader
from outerstep.hierarchy.state_file import pack, unpack
from outerstep.server import DiLoCoServer
from outerstep.types import Answer, Join, Manifest, ParameterSpec, Request, Wishes
from outerstep.wire.memory import MemoryTransport
from support import EAGER, kill, wait_until

MANIFEST = Manifest(parameters=(ParameterSpec(name="w", shape=(2,), dtype="float32"),))


class BelowInMemory:
    """A layer of one tensor. `record`: what it keeps."""

    record_may_be_old = False
    manifest = MANIFEST
    fragments: Sequence[Collection[str]] = (("w",),)
    data = None
    terms = LayerTerms(momentum=0.0, waits_s=60.0)

    def __init__(self, record: dict[str, Any] | None = None) -> None:
        self.record, self.target, self.rounds = record, {"w": torch.zeros(2)}, 0
        self.leader: Hearing | None = None

    def begin(self, leader: Hearing) -> None:
        self.leader = leader
        leader.began(self.target, is_new=self.record is None)

    def close_round(self, values: Tensor) -> None:
        """With members in it; T becomes `values`."""
        assert self.leader is not None
        self.rounds, self.target = self.rounds + 1, {"w": values}
        self.leader.published(self.target)
        self.leader.round_closed()

    def keep(self, record: Mapping[str, Any]) -> None:
        self.record = unpack(pack(record), "the record")

    def kept(self) -> dict[str, Any] | None:
        return self.record

    def moves_known(self) -> dict[int, int]:
        return {0: 0}

    def joined(self, *, overtaken: bool) -> None: ...

    def move(
        self, serial: int, fragments: Collection[int], moved: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        self.target = dict(moved(self.target))

    def version(self) -> int:
        return self.rounds

    def rounds_since(self, version: int) -> int:
        return self.rounds - version

    def done(self) -> ClaimedWork:
        return NOTHING

    def hold(self, limit_s: float) -> None: ...

    def release(self) -> None: ...

    def name_leader(self, name: str) -> None: ...

    def shut_down(self, reason: str) -> None: ...


class Line(MemoryTransport):
    """A way up that can be cut. `tried`: a join was to go there."""

    def __init__(self, above: DiLoCoServer, *, is_cut: bool = False) -> None:
        super().__init__(above.service)
        self.is_cut, self.tried = is_cut, threading.Event()
        self.refuses = self.is_closed = False

    def call(self, request: Request, **parts: Any) -> Answer:
        if isinstance(request, Join):
            self.tried.set()
        if self.refuses:
            raise Kicked("this cluster is not wanted")
        if self.is_cut:
            raise TransportError("the line is cut")
        return super().call(request, **parts)

    def close(self) -> None:
        self.is_closed = True
        super().close()


def top() -> DiLoCoServer:
    server = DiLoCoServer({"w": torch.zeros(2)}, 1, port=0, outer_lr=1.0, outer_momentum=0.0, codec="fp32")
    server.service.start()
    return server


def leader_over(line: Line, below: BelowInMemory | None = None) -> Leader:
    return Leader(below or BelowInMemory(), "memory:1", "east", every=1, transport=line, patience=EAGER)


def test_who_stood_down_while_it_tried_to_join_does_not_fence_its_successor_when_its_line_is_back() -> None:
    above = top()
    line = Line(above, is_cut=True)
    old = leader_over(line).start()
    assert line.tried.wait(60.0)
    old.stand_down("another replica leads the cluster from now on")
    new = leader_over(Line(above)).start()
    wait_until(lambda: new.is_at_rest)
    line.is_cut = False
    wait_until(lambda: old.machine.is_over)
    east = above.service.coordinator.members.find("east")
    assert east is not None
    assert (east.live, east.incarnation) == (True, 1)
    new.stop()
    assert not new.failure
    kill(above)


def test_a_round_that_closes_while_the_record_is_read_is_no_step_too_few() -> None:
    """Else it would go up only with the round after it, and after the last there is none."""
    above, below = top(), BelowInMemory()
    first = leader_over(Line(above), below).start()
    wait_until(lambda: first.is_at_rest)
    first.stand_down("its process dies")
    wait_until(lambda: first.machine.is_over)

    class ClosesOne(BelowInMemory):
        def rounds_since(self, version: int) -> int:
            found = super().rounds_since(version)
            closing = threading.Thread(target=self.close_round, args=(torch.ones(2),), daemon=True)
            closing.start()
            closing.join(0.5)  # it may have to wait until that many were taken down
            return found

    again = ClosesOne(below.record)
    second = leader_over(Line(above), again).start()
    wait_until(lambda: above.sync_round == 1)
    second.stop()
    assert above.get_global_params()["w"].tolist() == [1.0, 1.0]
    kill(above)


def test_what_is_no_number_above_stays_there() -> None:
    above, below = top(), BelowInMemory()
    leader = leader_over(Line(above), below)
    adopt = leader._join

    def join_what_is_worthless(*, resumes: bool) -> bool:
        unsettled = adopt(resumes=resumes)
        assert leader._shadow is not None
        with torch.no_grad():
            leader._shadow.tensors["w"][0] = math.nan
        return unsettled

    leader._join = join_what_is_worthless  # type: ignore[method-assign]
    leader.start()
    wait_until(lambda: leader.machine.is_over)
    assert "must be finite" in leader.failure
    assert below.target["w"].tolist() == [0.0, 0.0]
    assert below.record is not None
    assert bool(below.record["shadow"]["w"].isfinite().all()), "whoever leads next is not to hand it down either"
    kill(above)


def test_a_leader_that_cannot_even_take_its_leave_ends_all_the_same() -> None:
    above = top()
    leader = leader_over(Line(above)).start()
    wait_until(lambda: leader.is_at_rest)
    tried = 0

    def fails() -> None:
        nonlocal tried
        tried += 1
        raise RuntimeError("nobody can be released")

    leader._release = fails  # type: ignore[method-assign]
    leader._alone("the layer above is lost")
    wait_until(lambda: leader.machine.is_over, 10.0)
    assert tried == 1
    assert leader.failure == "the layer above is lost"
    kill(above)


def test_one_that_never_joined_closes_its_way_up() -> None:
    above = top()
    line = Line(above)
    line.refuses = True
    leader = leader_over(line).start()
    wait_until(lambda: leader.machine.is_over)
    leader.stop()
    assert leader.worker is None
    assert line.is_closed
    kill(above)


def test_a_leader_compares_its_layers_terms_with_those_that_the_layer_above_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said: dict[str, Any] = {"port": 0, "outer_momentum": 0.5, "heartbeat_timeout_s": 60.0}
    above = DiLoCoServer({"w": torch.zeros(2)}, 1, codec="fp32", **said)
    above.service.start()
    below = BelowInMemory()
    below.terms = LayerTerms(momentum=0.9, waits_s=60.0)
    leader = leader_over(Line(above), below).start()
    wait_until(lambda: leader.is_at_rest)
    momentum, timeout = leader.describe().warnings
    assert "momentum must be on one level only, got 0.9 in this cluster and 0.5 in the run above" in momentum
    assert "heartbeat_timeout_s of the run above, got 60 and 60 s" in timeout
    below.close_round(torch.ones(2))
    wait_until(lambda: leader.describe().exchanges > 0)
    leader.stop()
    kill(above)
    assert [record.message.count("one level only") for record in caplog.records].count(1) == 1, "said once"


@pytest.mark.parametrize(
    ("waits_s", "member_leads", "said"),
    [
        (60.0, False, {"round_deadline_s": 40.0}),
        (60.0, True, {"heartbeat_timeout_s": 60.0}),
        (math.inf, False, {"heartbeat_timeout_s": 60.0}),
    ],
)
def test_a_cluster_that_joins_with_more_patience_than_the_run_above_has_for_it_is_refused_and_leaves(
    waits_s: float, member_leads: bool, said: dict[str, Any]
) -> None:
    above = DiLoCoServer({"w": torch.zeros(2)}, 1, port=0, codec="fp32", outer_momentum=0.0, **said)
    above.service.start()
    below = BelowInMemory()
    below.terms = LayerTerms(momentum=0.0, waits_s=waits_s, member_leads=member_leads)
    for _ in range(2):  # nothing is written down that would let it in after a restart
        leader = leader_over(Line(above), below).start()
        wait_until(lambda leader=leader: leader.machine.is_over)
        assert "must be below" in leader.failure
        assert f"got {waits_s:g} and" in leader.failure
        assert not leader.describe().joined
        assert above.service.coordinator.members.live_ids == set(), "nobody above waits for it"
        below.close_round(torch.ones(2))
        leader.stop()
    assert above.get_global_params()["w"].tolist() == [0.0, 0.0]
    kill(above)


def test_a_cluster_that_was_in_the_run_is_warned_when_the_run_above_has_less_patience_since() -> None:
    """Alone it would lose more than a place in a round."""
    above, below = top(), BelowInMemory()
    first = leader_over(Line(above), below).start()
    wait_until(lambda: first.is_at_rest)
    below.close_round(torch.ones(2))
    wait_until(lambda: above.sync_round == 1 and first.is_at_rest)
    first.stand_down("its process dies")
    wait_until(lambda: first.machine.is_over)
    below.terms = LayerTerms(momentum=0.0, waits_s=math.inf)
    again = leader_over(Line(above), below).start()
    wait_until(lambda: again.is_at_rest)
    assert not again.failure
    assert "got inf and 120 s" in again.describe().warnings[0]
    again.stop()
    kill(above)


def test_a_leader_that_is_told_what_suits_it_warns_of_nothing() -> None:
    above = top()
    leader = leader_over(Line(above)).start()
    wait_until(lambda: leader.is_at_rest)
    assert leader.describe().warnings == []
    leader.stop()
    kill(above)


@pytest.mark.parametrize(
    ("deadline_s", "said", "waits_s"), [(90.0, None, 90.0), (5.0, None, 60.0), (1e8, None, 600.0), (90.0, 2.0, 2.0)]
)
def test_members_wait_as_long_as_the_run_above_gives_a_round_but_not_for_ever(
    deadline_s: float, said: float | None, waits_s: float
) -> None:
    above = DiLoCoServer({"w": torch.zeros(2)}, 1, port=0, outer_momentum=0.0, round_deadline_s=deadline_s)
    above.service.start()
    below = BelowInMemory()
    below.terms = LayerTerms(momentum=0.0, waits_s=1.0)
    leader = Leader(below, "memory:1", "east", every=1, transport=Line(above), patience=EAGER, wait_s=said)
    leader.start()
    wait_until(lambda: leader.is_at_rest)
    assert leader.machine.wait_s == waits_s
    leader.stop()
    kill(above)


def test_members_wait_longer_when_the_controller_above_decides_so() -> None:
    above, below = top(), BelowInMemory()
    leader = leader_over(Line(above), below).start()
    wait_until(lambda: leader.is_at_rest)
    assert leader.machine.wait_s == 60.0
    coordinator = above.service.coordinator
    with above.service.changed:
        assert coordinator.plan is not None
        later = changed(coordinator.plan, Wishes())
        coordinator.next_plan = msgspec.structs.replace(later, round_deadline_s=160.0)
    for exchanges in (1, 2):
        below.close_round(torch.full((2,), float(exchanges)))
        wait_until(lambda exchanges=exchanges: leader.describe().exchanges >= exchanges and leader.is_at_rest)
    assert leader.machine.wait_s == 160.0
    leader.stop()
    kill(above)
