"""The codec of a run changes while it runs: nothing that is under way is lost, nothing counts twice."""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from integration.groups_in_threads import contribution, enter, finish, make_server, sharded
from integration.old_clients import like, minus, two_clients
from outerstep.errors import OtherCodec, PlanMismatch
from outerstep.server import DiLoCoServer
from outerstep.topology.protocol import Agreed
from outerstep.topology.server.topology import ServerTopology
from outerstep.types import Commit, CommitAnswer, Control, Plan, Wishes
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import EAGER, HandClient, assert_same, in_threads, kill, make_frame, params_of, tiny_model, wait_until
from thread_ranks import in_ranks

UNEVEN = torch.tensor([1.0, 0.3, 0.07, 0.011])  # what a step adds: a coarse codec leaves something out of it
LOSSLESS = {"outer_lr": 1.0, "outer_momentum": 0.0, "down_codec": "fp32", "heartbeat_timeout": 60.0}


class Uneven(nn.Module):
    """Two tensors of four values each, for up to two fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, 4))
        self.second = nn.Parameter(torch.zeros(2, 4))


class Station:
    """A server on a real socket that can be killed and started again at its address. It notes of every contribution
    that it accepts: whose it is, its fragment, its codec, and that of the plan at that moment."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = {**LOSSLESS, "save_dir": str(folder), **settings}
        self.accepted: list[tuple[str, int, str, str]] = []
        self.server = DiLoCoServer(Uneven().state_dict(), 2, port=0, **self.settings)
        self._watch()
        self.server.start()
        self.address = self.server.address

    def _watch(self) -> None:
        coordinator = self.server.service.coordinator
        accept = coordinator.accept

        def note(message: Commit, now: float, norm: float | None = None) -> CommitAnswer:
            upload = coordinator.uploads.by_key.get(message.key)
            answer, plan = accept(message, now, norm), coordinator.plan
            assert plan is not None
            if upload is not None:
                self.accepted.append((message.worker_id, message.fragment, upload.offer.codec, plan.codec))
            return answer

        coordinator.accept = note  # type: ignore[method-assign]

    def restart(self, *, resume: Path | None = None) -> None:
        """As after SIGKILL: nothing is written that was not before."""
        port = int(self.address.rsplit(":", 1)[1])
        self.end()
        place = str(resume or self.settings["save_dir"])
        self.server = DiLoCoServer(None, 2, port=port, **{**self.settings, "resume": place})
        self._watch()
        self.server.start()

    def end(self) -> None:
        server = self.server
        assert server._http is not None
        server.service.release_polls()
        server._http.stop()
        server.service.monitor.stop()
        kill(server)

    def change(self, codec: str) -> str:
        answer = MemoryTransport(self.server.service).call(Control(kind="plan", changes=Wishes(codec=codec)))
        return answer.done  # type: ignore[union-attr]

    @property
    def plan(self) -> Plan:
        plan = self.server.service.coordinator.plan
        assert plan is not None
        return plan

    def model(self) -> dict[str, torch.Tensor]:
        return self.server.get_global_params()


class Trainer:
    """A worker over HTTP whose steps add UNEVEN to its own row."""

    def __init__(self, station: Station, row: int, state: bytes | None = None) -> None:
        self.station, self.row, self.steps = station, row, 0
        self.model = Uneven()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.topology = ServerTopology(
            HttpTransport(station.address),
            worker_id=f"w{row}",
            instance=secrets.token_hex(8),
            hostname="test",
            patience=EAGER,
        )
        self.worker = DiLoCoWorker(
            self.model,
            self.optimizer,
            station.address,
            worker_id=f"w{row}",
            topology=self.topology,
            heartbeat_interval=0.0,
        )
        if state is not None:
            loaded = torch.load(io.BytesIO(state), weights_only=True)
            self.model.load_state_dict(loaded["model"])
            self.worker.load_state_dict(loaded["worker"])
            self.steps = loaded["steps"]
        self.worker.start()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for tensor in self.model.parameters():
                tensor.grad = torch.zeros_like(tensor)
                tensor.grad[self.row] = -UNEVEN
            self.optimizer.step()
            self.steps += 1

    def state(self) -> bytes:
        file = io.BytesIO()
        state = {"model": self.model.state_dict(), "worker": self.worker.state_dict(), "steps": self.steps}
        torch.save(state, file)
        return file.getvalue()

    def kill(self) -> None:
        self.topology.leave = lambda reason: self.topology.close()  # type: ignore[method-assign]
        self.worker.abandon("killed")


def train(pair: list[Trainer], steps: int) -> None:
    in_threads(*(lambda one=one: one.step(steps) for one in pair))


def stop(pair: list[Trainer]) -> None:
    in_threads(*(one.worker.stop for one in pair))


def owed(station: Station, pair: list[Trainer], *, each: float = 0.5) -> float:
    """How far the agreed model is from all steps that were taken, at most; each worker's count `each`."""
    return max(
        float((tensor[one.row] - each * one.steps * UNEVEN).abs().max())
        for tensor in station.model().values()
        for one in pair
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., tuple[Station, list[Trainer]]]]:
    stations: list[Station] = []

    def begin(**settings: Any) -> tuple[Station, list[Trainer]]:
        stations.append(Station(tmp_path / "run", **settings))
        return stations[0], [Trainer(stations[0], row) for row in (0, 1)]

    yield begin
    stations[0].end()


Begin = Callable[..., tuple[Station, list[Trainer]]]


# --- what is owed, what is under way ----------------------------------------------------------------------------------


def test_what_the_old_codec_left_out_goes_with_the_first_contribution_of_the_new_one(run: Begin) -> None:
    station, pair = run(codec="int4+feedback", sync_every=2)
    train(pair, 4)
    assert owed(station, pair) > 0.005
    done = station.change("fp32")
    assert "revision 1 holds from the next round that closes" in done
    train(pair, 2)  # the open round: both were told to encode it as before
    assert station.plan.codec == "fp32"
    assert owed(station, pair) > 0.005
    train(pair, 2)
    assert owed(station, pair) < 1e-5
    train(pair, 2)
    assert owed(station, pair) < 1e-5, "and it was sent once"
    assert [codec for _, _, codec, _ in station.accepted] == ["int4+feedback"] * 6 + ["fp32"] * 4
    assert [one.worker.plan.codec for one in pair] == ["fp32", "fp32"]
    stop(pair)


def test_there_and_back_with_every_kind_of_codec(run: Begin) -> None:
    station, pair = run(codec="bf16", sync_every=1)
    for codec in ("int8+feedback", "sparse64", "int4+feedback,norms=fp32", "bf16+stochastic", "int4", "bf16", "fp32"):
        station.change(codec)
        train(pair, 2)
        assert station.plan.codec == codec
    assert len({codec for _, _, codec, _ in station.accepted}) == 7
    assert_same(params_of(pair[0].model), station.model())
    stop(pair)
    facts = station.server.service.coordinator.remember().facts
    assert len(facts["codecs"]) == 7


def test_a_contribution_under_way_stays_valid(run: Begin) -> None:
    """Streaming: the second fragment is sent before the first one's agreement, which brings the plan, is adopted."""
    station, pair = run(codec="int8+feedback", sync_every=6, num_fragments=2, fragment_delay=4, fragment_carry=True)
    station.change("fp32")
    train(pair, 3)  # the first fragment is on its way
    wait_until(lambda: station.plan.codec == "fp32")
    train(pair, 3)
    wait_until(lambda: len(station.accepted) == 4)
    assert {(fragment, codec, now) for _, fragment, codec, now in station.accepted[2:]} == {
        (1, "int8+feedback", "fp32")
    }
    train(pair, 6)
    stop(pair)
    assert owed(station, pair) < 1e-5
    assert station.accepted[-1][2] == "fp32"


def test_nobody_waits_for_anybody_and_the_journal_replays_both_codecs(run: Begin) -> None:
    station, pair = run(codec="bf16", sync_every=1, async_mode=True, dn_buffer_size=2, durability="round")
    pair[0].step(2)
    station.change("fp32")
    pair[1].step(2)  # a push of the old codec closes the round that the new plan holds from
    pair[0].step(2)
    assert {codec for _, _, codec, _ in station.accepted} == {"bf16", "fp32"}
    before = station.model()
    station.restart()
    assert_same(station.model(), before)
    assert (station.plan.codec, station.server.service.coordinator.codecs) == ("fp32", ("bf16", "fp32"))
    pair[1].step(2)
    assert station.accepted[-1][2] == "fp32"
    for one in pair:
        one.worker.abandon("over")


# --- somebody is started again ----------------------------------------------------------------------------------------


def test_a_server_killed_before_the_next_round_has_not_forgotten_the_change(run: Begin) -> None:
    station, pair = run(codec="int4+feedback", sync_every=2)
    train(pair, 2)
    station.change("fp32")
    train_over_a_restart(station, pair, 2)
    assert station.plan.codec == "fp32"
    assert station.server.service.coordinator.codecs == ("int4+feedback", "fp32")
    train(pair, 2)
    assert owed(station, pair) < 1e-5
    assert station.accepted[-1][2] == "fp32"
    stop(pair)


def train_over_a_restart(station: Station, pair: list[Trainer], steps: int, resume: Path | None = None) -> None:
    """The server is killed when the first has contributed and waits for the second."""
    seen = len(station.accepted)

    def restart() -> None:
        wait_until(lambda: len(station.accepted) == seen + 1)
        station.restart(resume=resume)
        pair[1].step(steps)

    in_threads(lambda: pair[0].step(steps), restart)


def test_a_worker_comes_back_with_a_contribution_packed_under_the_old_codec(run: Begin) -> None:
    station, pair = run(codec="int4+feedback", sync_every=4, fragment_delay=2, fragment_carry=True)
    train(pair, 4)
    wait_until(lambda: len(station.accepted) == 2)
    train(pair, 2)
    station.change("fp32")
    pair[0].step(2)  # its contribution is under way: the round waits for the other
    wait_until(lambda: len(station.accepted) == 3)
    state = pair[0].state()
    pair[0].kill()
    pair[1].step(2)
    wait_until(lambda: station.plan.codec == "fp32")
    pair[0] = Trainer(station, 0, state)
    train(pair, 6)
    stop(pair)
    assert owed(station, pair) < 1e-5
    assert {codec for _, _, codec, _ in station.accepted} == {"int4+feedback", "fp32"}


def test_a_server_that_went_back_to_before_the_change_gets_the_steps_in_its_own_codec(
    run: Begin, tmp_path: Path
) -> None:
    station, pair = run(codec="int4+feedback", sync_every=2, durability="checkpoint")
    train(pair, 2)
    station.server.save_state(str(tmp_path / "before"))
    station.change("fp32")
    train(pair, 2)
    assert [one.worker.plan.codec for one in pair] == ["fp32", "fp32"]
    train_over_a_restart(station, pair, 2, tmp_path / "before")
    assert station.plan.codec == "int4+feedback"
    train(pair, 4)
    assert {codec for _, _, codec, now in station.accepted if now == "int4+feedback"} == {"int4+feedback"}
    assert [one.worker.plan.codec for one in pair] == ["int4+feedback"] * 2
    assert_same(params_of(pair[0].model), station.model())
    stop(pair)


def test_another_codec_at_a_start_is_a_change_and_the_same_command_again_is_none(run: Begin) -> None:
    station, pair = run(codec="bf16", sync_every=2)
    train(pair, 2)
    station.change("int8")
    train(pair, 2)
    station.restart()  # with --codec bf16, as before
    assert station.plan.codec == "int8"
    station.settings |= {"codec": "fp32", "down_codec": "same"}
    station.restart()
    assert station.plan.codec == "fp32"
    assert station.server.service.coordinator.codecs == ("bf16", "int8", "fp32")
    train(pair, 4)
    assert station.accepted[-1][2] == "fp32"
    stop(pair)


# --- other ends -------------------------------------------------------------------------------------------------------


def test_a_worker_of_release_0_2_goes_on_with_the_codec_that_it_joined_with(
    run: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the plan when it joins, and never again. (The release itself: test_versions.py.)"""
    station, pair = run(codec="bf16", sync_every=2)
    monkeypatch.setattr(pair[0].topology._link, "follow", lambda plan: None)
    train(pair, 2)
    station.change("fp32")
    train(pair, 6)
    assert {(worker, codec) for worker, _, codec, now in station.accepted[4:] if now == "fp32"} == {
        ("w0", "bf16"),
        ("w1", "fp32"),
    }
    assert_same(params_of(pair[0].model), station.model())
    assert_same(params_of(pair[1].model), station.model())
    stop(pair)


def test_clients_of_the_original_protocol_notice_nothing() -> None:
    with two_clients(codec="bf16") as (server, a, b, start):
        in_threads(lambda: a.submit(like(start, 1.0)), lambda: b.submit(like(start, 1.0)))
        MemoryTransport(server.service).call(Control(kind="plan", changes=Wishes(codec="int8+feedback")))
        in_threads(lambda: a.submit(like(start, 1.0)), lambda: b.submit(like(start, 1.0)))
        found = in_threads(lambda: a.submit(like(start, 2.0)), lambda: b.submit(like(start, 2.0)))
        for params in found:
            torch.testing.assert_close(params, minus(start, 4.0), rtol=0, atol=1e-3)


def test_the_ranks_of_a_sharded_group_change_at_the_same_contribution() -> None:
    server, codecs = make_server(codec="bf16", down_codec="fp32"), set[str]()
    server.service.start()

    def rank(ranks: Any) -> list[Agreed]:
        topology = sharded(server, ranks)
        held = enter(topology)
        for turn in range(3):
            if turn == 1 and ranks.rank == 0:
                MemoryTransport(server.service).call(Control(kind="plan", changes=Wishes(codec="int8+feedback")))
            ticket = topology.begin(contribution(held[0], turn, ranks.size, ranks.rank))
            if ranks.rank == 0:
                codecs.add(ticket.own.offer.codec)  # type: ignore[union-attr]
            held = [finish(ticket)]
            assert held[0].counted
        return held

    found = in_ranks(2, rank)
    assert codecs == {"bf16", "int8+feedback"}
    assert [agreed[0].version for agreed in found] == [3, 3]
    server.stop()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[tuple[DiLoCoServer, HandClient]]:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, codec="bf16", down_codec="fp32")
    server.service.start()
    client = HandClient(MemoryTransport(server.service))
    client.join()
    yield server, client
    server.stop()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"codec": "int5"}, "codec cannot be 'int5' in this run: .*int8"),
        ({"codec": "bf16,tables=fp32"}, "embeddings=CODEC and norms=CODEC"),
        ({"codec": "x" * 200}, "codec cannot be"),
    ],
)
def test_a_codec_that_is_none_is_refused_and_nothing_changes(
    alone: tuple[DiLoCoServer, HandClient], changes: dict[str, Any], problem: str
) -> None:
    server, client = alone
    with pytest.raises(PlanMismatch, match=problem):
        client.transport.call(Control(kind="plan", changes=Wishes(**changes)))
    assert server.service.coordinator.next_plan is None


def test_no_codec_is_taken_but_those_that_a_plan_of_the_run_has_had(alone: tuple[DiLoCoServer, HandClient]) -> None:
    server, client = alone
    frames = {codec: make_frame(params_of(tiny_model()), codec) for codec in ("fp32", "bf16", "int8")}
    with pytest.raises(OtherCodec, match="encoded as 'fp32'; the run uses 'bf16'"):
        client.contribute(frames["fp32"], codec="fp32")
    client.transport.call(Control(kind="plan", changes=Wishes(codec="int8")))
    with pytest.raises(OtherCodec):  # not before the round has closed that it holds from
        client.contribute(frames["int8"], codec="int8")
    for version, codec in enumerate(("bf16", "int8", "bf16")):
        client.contribute(frames[codec], codec=codec, base_version=version, oldest_base=version)
        wait_until(lambda version=version: server.sync_round == version + 1)
    with pytest.raises(OtherCodec, match="the run uses 'int8'"):
        client.contribute(frames["fp32"], codec="fp32", base_version=3, oldest_base=3)


def test_the_bytes_must_be_what_the_offer_says(alone: tuple[DiLoCoServer, HandClient]) -> None:
    server, client = alone
    client.transport.call(Control(kind="plan", changes=Wishes(codec="int8")))
    client.contribute(make_frame(params_of(tiny_model()), "bf16"), codec="bf16")
    wait_until(lambda: server.sync_round == 1)
    later: dict[str, Any] = {"base_version": 1, "oldest_base": 1}
    with pytest.raises(Exception, match="encoded as 'bf16', run has 'int8'"):
        client.contribute(make_frame(params_of(tiny_model()), "bf16"), codec="int8", **later)
    assert server.sync_round == 1


def test_where_everything_is_kept_there_must_be_room_for_it() -> None:
    size = sum(tensor.numel() for tensor in tiny_model().state_dict().values())
    room: dict[str, Any] = {"pool_bytes": 3 * size, "spool_bytes": 0}
    server = DiLoCoServer(tiny_model().state_dict(), 2, port=0, codec="int8", deterministic=True, **room)
    HandClient(MemoryTransport(server.service)).join()
    with pytest.raises(PlanMismatch, match=r"deterministic keeps all contributions.*raise spool_bytes"):
        MemoryTransport(server.service).call(Control(kind="plan", changes=Wishes(codec="fp32")))
