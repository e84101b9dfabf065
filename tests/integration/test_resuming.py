"""A worker that goes on from its own checkpoint: what is older, equal or newer, here or at the server, counts once.

Ledgers of whole numbers, an outer step that adopts the mean, and for every round a record of who was in it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.errors import ExchangeFailed, OtherRun
from outerstep.events import WorkerDied
from outerstep.server import DiLoCoServer
from outerstep.types import Answer, Payload, Poll, PollAnswer, Request
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import Books, HandClient, Ledger, assert_same, count, in_threads, make_frame, memory_worker, wait_until

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 4}


class Line(MemoryTransport):
    """Records what is asked for and what comes, and can be pointed at another server."""

    def __init__(self, server: DiLoCoServer) -> None:
        super().__init__(server.service)
        self.fetched: list[Payload] = []  # with the answer to a poll: the model is small
        self.polls: list[Poll] = []

    def move(self, server: DiLoCoServer) -> None:
        self._service = server.service

    def call(self, request: Request, **buffers: object) -> Answer:
        if isinstance(request, Poll):
            self.polls.append(request)
        answer = super().call(request, **buffers)  # type: ignore[arg-type]
        if isinstance(answer, PollAnswer) and answer.agreement is not None and answer.carried_bytes:
            self.fetched += answer.agreement.payloads
        return answer


class Script:
    """One worker, which counts its steps in a cell of its own."""

    def __init__(self, server: DiLoCoServer, name: str, checkpoint: bytes | None = None, **settings: Any) -> None:
        self.name, self.cell, self.line = name, "ab".index(name), Line(server)
        self.model = Ledger(settings.pop("cells", 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.worker: DiLoCoWorker = memory_worker(
            server, name, self.model, self.optimizer, transport=self.line, heartbeat_interval=0.0, **settings
        )
        if checkpoint is not None:
            loaded = torch.load(io.BytesIO(checkpoint), weights_only=True)
            self.model.load_state_dict(loaded["model"])
            self.worker.load_state_dict(loaded["worker"])

    def start(self) -> Script:
        self.worker.start()
        return self

    def step(self, steps: int) -> None:
        count(self.model, self.optimizer, self.cell, steps)

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "worker": self.worker.state_dict()}, file)
        return file.getvalue()

    def kill(self) -> None:
        topology: Any = self.worker._topology
        topology.leave = lambda reason: topology.close()
        self.worker.abandon("killed")

    @property
    def cells(self) -> list[float]:
        return self.model.cells.tolist()  # type: ignore[no-any-return]

    def metric(self, name: str) -> Any:
        return self.worker.sync_metrics[name]


def make_server(workers: int = 2, **settings: Any) -> DiLoCoServer:
    server = DiLoCoServer(Ledger().state_dict(), workers, port=0, **{**PLAIN, **settings})
    server.service.start()
    return server


def make_run(**settings: Any) -> tuple[DiLoCoServer, Books, Script, Script]:
    server = make_server(**settings)
    books = Books(server, "ab")
    a, b = in_threads(lambda: Script(server, "a").start(), lambda: Script(server, "b").start())
    return server, books, a, b


def together(a: Script, b: Script, steps: int) -> None:
    in_threads(lambda: a.step(steps), lambda: b.step(steps))


# --- the checkpoint knows what the server knows ---------------------------------------------------------------------


def test_nothing_is_fetched_and_nothing_moves_where_the_hash_proves_the_anchor() -> None:
    server, books, a, b = make_run()
    together(a, b, 6)
    saved = a.save()
    a.kill()
    again = Script(server, "a", saved).start()
    assert again.cells == [4.0, 2.0]  # the mean of one round, and two steps of its own
    assert again.line.fetched == []
    assert again.metric("local_step") == 6
    together(again, b, 2)
    assert books.audit() == {"a": [8], "b": [8]}
    assert again.cells == b.cells == [4.0, 4.0]


def test_a_round_that_waited_for_it_still_does() -> None:
    """The other one has contributed and waits: the restart must not make the round close without us."""
    server, books, a, b = make_run()
    together(a, b, 3)
    saved = a.save()
    a.kill()

    def restart() -> None:
        wait_until(lambda: server.status()["pending_submissions"] == ["b"])
        again = Script(server, "a", saved).start()
        assert server.sync_round == 0
        again.step(1)

    in_threads(lambda: b.step(1), restart)
    assert books.audit() == {"a": [4], "b": [4]}
    assert server.sync_round == 1


def test_without_a_state_nobody_waits_for_steps_that_are_lost() -> None:
    server, books, a, b = make_run()
    together(a, b, 3)
    a.kill()

    def restart() -> None:
        wait_until(lambda: server.status()["pending_submissions"] == ["b"])
        Script(server, "a").start()

    in_threads(lambda: b.step(1), restart)
    assert books.audit() == {"a": [0], "b": [4]}


# --- the server has moved on ----------------------------------------------------------------------------------------


def declare_dead(server: DiLoCoServer, name: str) -> None:
    coordinator = server.service.coordinator
    with server.service.changed:
        dead = coordinator.members.find(name)
        assert dead is not None
        coordinator.remove(dead, WorkerDied(name, 0.0), server.service.clock())


def b_alone(server: DiLoCoServer, b: Script, rounds: int) -> None:
    declare_dead(server, "a")
    b.step(4 * rounds)


def a_first(server: DiLoCoServer, a: Script, b: Script, steps: int) -> None:
    """Who comes back from the dead is expected from the next round on, and counted in this one if it is in time."""

    def other() -> None:
        wait_until(lambda: server.status()["pending_submissions"] == ["a"])
        b.step(steps)

    in_threads(lambda: a.step(steps), other)


def test_who_was_away_moves_along_and_keeps_its_unsent_steps() -> None:
    server, books, a, b = make_run()
    together(a, b, 6)
    saved = a.save()
    a.kill()
    b_alone(server, b, 2)
    again = Script(server, "a", saved).start()
    assert again.cells == [4.0, 10.0]
    a_first(server, again, b, 2)
    assert books.audit() == {"a": [8], "b": [16]}
    assert again.metric("steps_discarded") == again.metric("missed_rounds") == 0


def test_a_chain_of_updates_leads_it_there() -> None:
    server = DiLoCoServer(Ledger(4096).state_dict(), 1, port=0, codec="fp32", down_codec="int4", sync_every=4)
    server.service.start()
    first = Script(server, "a", cells=4096).start()
    first.step(5)
    saved, base = first.save(), first.worker._replica.anchors["cells"].clone()
    first.kill()
    declare_dead(server, "a")
    hand = HandClient(MemoryTransport(server.service), "hand")
    hand.join()
    for version in (1, 2):
        hand.contribute(make_frame({"cells": torch.randn(4096)}), base_version=version, oldest_base=version)
        wait_until(lambda version=version: server.sync_round == version + 1)
    again = Script(server, "a", saved, cells=4096).start()
    assert [(part.kind, part.version) for part in again.line.fetched] == [("update", 2), ("update", 3)]
    assert_same(again.worker._replica.anchors, server.get_global_params())
    moved = again.worker._replica.anchors["cells"] - base
    assert torch.equal(again.model.cells.detach(), first.model.cells.detach() + moved)


def test_steps_that_have_become_too_old_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    server, books, a, b = make_run(max_staleness=1)
    together(a, b, 6)
    saved = a.save()
    a.kill()
    b_alone(server, b, 2)
    again = Script(server, "a", saved).start()
    assert again.metric("steps_discarded") == 2
    assert "2 local steps were older than max_staleness=1" in caplog.text
    assert again.cells == server.get_global_params()["cells"].tolist()
    a_first(server, again, b, 2)
    assert books.audit() == {"a": [6], "b": [16]}


def test_who_had_nothing_unsent_loses_nothing_however_long_it_was_away() -> None:
    server, books, a, b = make_run(max_staleness=1)
    together(a, b, 4)
    saved = a.save()
    a.kill()
    b_alone(server, b, 3)
    again = Script(server, "a", saved).start()
    assert again.metric("steps_discarded") == 0
    a_first(server, again, b, 4)
    assert books.audit() == {"a": [8], "b": [20]}


# --- the checkpoint is older than what was sent ---------------------------------------------------------------------


@pytest.mark.row("F03")
def test_what_counted_after_the_checkpoint_is_not_counted_again(caplog: pytest.LogCaptureFixture) -> None:
    server, books, a, b = make_run()
    together(a, b, 3)
    saved = a.save()
    together(a, b, 3)  # a round, and two steps more
    a.kill()
    again = Script(server, "a", saved).start()
    assert "later steps of this worker than its saved state knows of; the state's 3 unsent steps" in caplog.text
    assert again.cells == [2.0, 2.0]  # the agreed weights, and nothing else
    in_threads(lambda: again.step(4), lambda: b.step(2))
    assert books.audit() == {"a": [8], "b": [8]}
    assert again.cells == [4.0, 4.0]


def contribute_and_die(server: DiLoCoServer, script: Script) -> None:
    """In the last step of its cycle: what it sent is accepted, the round is open."""

    def step() -> None:
        with pytest.raises(ExchangeFailed, match="cancelled"):
            script.step(1)

    def kill() -> None:
        wait_until(lambda: server.status()["pending_submissions"] == [script.name])
        script.kill()

    in_threads(step, kill)


@pytest.mark.row("F03")
def test_what_is_in_a_round_still_open_is_waited_for() -> None:
    """Otherwise the same steps would be taken, and sent, a second time."""
    server, books, a, b = make_run()
    together(a, b, 3)
    saved = a.save()
    contribute_and_die(server, a)
    again = Script(server, "a", saved)

    def other() -> None:
        wait_until(lambda: len(again.line.polls) > 3)
        b.step(1)

    in_threads(again.worker.start, other)
    assert again.cells == b.cells == [2.0, 2.0]
    together(again, b, 4)
    assert books.audit() == {"a": [8], "b": [8]}


def test_what_overtook_the_state_and_was_forgotten_by_the_server_is_sent_after_all(tmp_path: Path) -> None:
    server, _, a, b = make_run(save_dir=str(tmp_path))
    together(a, b, 3)
    saved = a.save()
    server.save_state()
    contribute_and_die(server, a)
    again = Script(server, "a", saved)

    def restart() -> DiLoCoServer:
        wait_until(lambda: len(again.line.polls) > 3)
        second = resumed(tmp_path)
        again.line.move(second)
        b.line.move(second)
        return second

    _, second = in_threads(again.worker.start, restart)
    assert again.cells == [3.0, 0.0]
    together(again, b, 1)
    assert second.get_global_params()["cells"].tolist() == again.cells == [2.0, 2.0]


# --- the server has lost something ----------------------------------------------------------------------------------


def resumed(folder: Path, **settings: Any) -> DiLoCoServer:
    server = DiLoCoServer(None, 2, port=0, resume=str(folder), outer_lr=1.0, outer_momentum=0.0, **settings)
    server.service.start()
    return server


def test_rounds_that_the_server_has_lost_are_lost_and_unsent_steps_are_kept(tmp_path: Path) -> None:
    server, _, a, b = make_run(save_dir=str(tmp_path), durability="checkpoint")
    together(a, b, 4)
    server.save_state()
    together(a, b, 6)
    saved = a.save()
    a.kill()
    second = resumed(tmp_path)
    again = Script(second, "a", saved).start()
    b.line.move(second)
    assert a.cells == [6.0, 4.0]
    assert again.cells == [4.0, 2.0]
    together(again, b, 2)
    assert second.get_global_params()["cells"].tolist() == again.cells == b.cells == [4.0, 4.0]


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_counts_in_a_later_round_is_kept_and_sent_again_if_it_was_forgotten(
    forgotten: bool, tmp_path: Path
) -> None:
    rules = {"quorum": 2, "grace_period": 0.0}
    server = make_server(workers=3, save_dir=str(tmp_path), **rules)
    a, others = Script(server, "a").start(), [HandClient(MemoryTransport(server.service), name) for name in "xy"]
    for other in others:
        other.join()
    for other in others:
        other.contribute(make_frame({"cells": torch.zeros(2)}))
    wait_until(lambda: server.sync_round == 1)
    server.save_state()
    a.step(4)
    assert server.status()["pending_submissions"] == ["a"]
    assert a.worker._started.machine.state.fragments[0].late_in > 0
    saved = a.save()
    a.kill()
    place = resumed(tmp_path, **rules) if forgotten else server
    again = Script(place, "a", saved).start()

    def close_the_round() -> None:
        wait_until(lambda: place.status()["pending_submissions"] == ["a"])
        others[0].transport = MemoryTransport(place.service)
        others[0].contribute(make_frame({"cells": torch.zeros(2)}), base_version=1, oldest_base=1)

    in_threads(again.worker.stop, close_the_round)
    assert place.sync_round == 2
    assert again.cells == place.get_global_params()["cells"].tolist()
    assert 0.0 < again.cells[0] < 2.0, "half of four steps, less for being late"


def test_another_run_is_refused_by_name() -> None:
    server, _, a, b = make_run()
    together(a, b, 5)
    saved = a.save()
    other = make_server()
    with pytest.raises(OtherRun, match=f"holds run {other.run_id}, not {server.run_id}.*without load_state_dict"):
        Script(other, "a", saved).start()
    assert not other.service.coordinator.members.live_ids
