"""The folder of a run: what is damaged in it, whose it is, and what comes back beside the model."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.errors import ConfigError, Kicked, ModelError
from outerstep.server import DiLoCoServer
from outerstep.server.saved import load_state
from outerstep.types import Control, Leave, Wishes
from outerstep.wire.memory import MemoryTransport
from support import HandClient, Ledger, Relocatable, in_threads, kill, make_frame, tiny_model, wait_until

# --- what lies on the disk -----------------------------------------------------------------------------------------


def make_server(folder: Path, model: Any = tiny_model, **settings: Any) -> DiLoCoServer:
    facts = {"sync_every": 4, "codec": "fp32", "port": 0, **settings}
    fresh = not (folder / "run.json").exists() and "resume" not in facts
    run_id = facts.pop("run_id", "run")
    server = DiLoCoServer(model().state_dict(), facts.pop("num_workers", 1), save_dir=str(folder), **facts)
    if fresh:
        server.service.coordinator.run_id = run_id
    server.service.start()
    return server


class Ledgers:
    """A run over a ledger, by hand: each round adds one to both cells."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = {"outer_lr": 1.0, "outer_momentum": 0.5, "model": Ledger, **settings}
        self.server = make_server(folder, **self.settings)
        self.client = HandClient(Relocatable(self.server.service))
        self.client.join()

    def rounds(self, count: int) -> None:
        for _ in range(count):
            base = self.server.sync_round
            self.client.contribute(make_frame({"cells": -torch.ones(2)}), base_version=base, oldest_base=base)
            wait_until(lambda base=base: self.server.sync_round == base + 1)

    def restart(self, **settings: Any) -> None:
        kill(self.server)
        self.server = make_server(self.folder, **{**self.settings, **settings})
        self.client.transport.move(self.server)  # type: ignore[attr-defined]

    @property
    def cells(self) -> list[float]:
        return self.server.get_global_params()["cells"].tolist()  # type: ignore[no-any-return]

    def states(self) -> list[Path]:
        return sorted(self.folder.glob("state-round-*"))

    def records(self) -> list[Path]:
        return sorted((self.folder / "journal").iterdir())


def damage(file: Path, how: str) -> None:
    match how:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-3])
        case "empty":
            file.write_bytes(b"")
        case "flipped":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "missing":
            file.unlink()


@pytest.mark.row("F12")
@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "missing", "gone"])
@pytest.mark.parametrize("file", ["state.json", "model.safetensors", "outer.safetensors"])
def test_a_damaged_checkpoint_is_passed_over_by_name_and_nothing_is_lost(
    file: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Ledgers(tmp_path, save_every=2)
    run.rounds(5)  # checkpoints of rounds 2 and 4, and the journal since round 2
    expected = run.cells
    kill(run.server)
    newest = run.states()[-1]
    assert newest.name == "state-round-00000004"
    if how == "gone":
        shutil.rmtree(newest)
    else:
        damage(newest / file, how)
    with caplog.at_level(logging.INFO):
        run.restart()
    assert run.server.sync_round == 5
    assert run.cells == expected
    assert f"using saved state {tmp_path / 'state-round-00000002'}" in caplog.text
    assert how == "gone" or "saved state state-round-00000004 is skipped" in caplog.text
    run.rounds(2)
    run.restart()
    assert run.server.sync_round == 7


@pytest.mark.row("F12")
def test_after_one_round_there_is_a_second_checkpoint_to_fall_back_on(tmp_path: Path) -> None:
    run = Ledgers(tmp_path)
    run.rounds(3)
    expected = run.cells
    kill(run.server)
    assert [state.name for state in run.states()] == ["state-round-00000000", "state-round-00000001"]
    damage(run.states()[1] / "state.json", "empty")
    run.restart()
    assert (run.server.sync_round, run.cells) == (3, expected)


@pytest.mark.row("F12")
def test_without_any_whole_checkpoint_it_refuses_and_names_them(tmp_path: Path) -> None:
    run = Ledgers(tmp_path, save_every=2)
    run.rounds(4)
    kill(run.server)
    for state in run.states():
        damage(state / "model.safetensors", "truncated")
    with pytest.raises(ModelError, match=r"no state in .* can be used: .*state-round-00000004.*state-round-00000002"):
        run.restart()
    for state in run.states():
        shutil.rmtree(state)
    with pytest.raises(ModelError, match="holds no saved state"):
        run.restart()
    shutil.rmtree(tmp_path / "journal")  # run.json still says that there was a run
    with pytest.raises(ModelError, match="holds no saved state"):
        run.restart()


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "missing"])
def test_a_damaged_record_is_refused_by_name_and_a_state_by_its_path_gives_up_what_came_after(
    how: str, tmp_path: Path
) -> None:
    run = Ledgers(tmp_path)
    run.rounds(2)
    path = run.server.save_state()
    saved = run.cells
    run.rounds(3)
    victim = run.records()[-2]
    damage(victim, how)
    number = int(victim.name.removeprefix("record-"))
    named = f"journal record {number} is missing" if how == "missing" else f"journal {victim.name} is damaged"
    with pytest.raises(ModelError, match=f"{named}.* resume a saved state by its path"):
        run.restart()
    run.restart(resume=str(path))
    assert (run.server.sync_round, run.cells) == (2, saved)
    run.rounds(2)
    expected = run.cells
    run.restart()  # and from here on as ever
    assert (run.server.sync_round, run.cells) == (4, expected)


def test_what_was_given_up_is_never_mixed_with_what_came_instead(tmp_path: Path) -> None:
    """Going back writes a checkpoint of its own. Without those that follow, the older ones lead nowhere."""
    run = Ledgers(tmp_path, keep_saves=9)
    run.rounds(2)
    path = run.server.save_state()
    run.rounds(2)
    given_up = load_state(run.server.save_state()).facts["journal"]
    run.restart(resume=str(path))
    run.rounds(1)
    kill(run.server)
    for state in run.states():
        if load_state(state).facts["journal"] > given_up:
            shutil.rmtree(state)
    with pytest.raises(ModelError, match=r"journal record \d+ is missing"):
        run.restart()


def test_a_record_that_gives_other_bits_is_refused(tmp_path: Path) -> None:
    def factory(momentum: float) -> Any:
        return lambda params: torch.optim.SGD(params, lr=1.0, momentum=momentum)

    run = Ledgers(tmp_path, outer_lr=None, outer_momentum=None, outer_optimizer_factory=factory(0.5))
    run.rounds(2)
    with pytest.raises(ModelError, match=r"replaying journal record \d+ makes version 2 .* outer_optimizer_factory"):
        run.restart(outer_optimizer_factory=factory(0.4))
    run.restart()
    assert run.server.sync_round == 2


def test_the_journal_is_cut_back_to_the_checkpoint_before_the_last(tmp_path: Path) -> None:
    run = Ledgers(tmp_path, save_every=3)
    run.rounds(10)
    kill(run.server)
    included = [load_state(state).facts["journal"] for state in run.states()]
    assert len(included) == 3
    assert int(run.records()[0].name.removeprefix("record-")) == included[-2] + 1


def test_a_long_journal_is_followed_by_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outerstep.coordination.server.commits.MOST_RECORDS", 4)
    run = Ledgers(tmp_path)
    run.rounds(9)
    kill(run.server)
    assert [state.name for state in run.states()] == [f"state-round-{n:08}" for n in (1, 5, 9)]


@pytest.mark.parametrize("mode", [{}, {"async_mode": True, "dn_buffer_size": 2}], ids=["synchronous", "asynchronous"])
def test_another_outer_rate_from_the_next_start_on_does_not_rewrite_the_rounds_before(
    mode: dict[str, Any], tmp_path: Path
) -> None:
    run = Ledgers(tmp_path, **mode)
    run.rounds(4)
    before = run.cells
    run.restart(outer_lr=0.25)
    assert run.cells == before
    run.rounds(2)
    later = run.cells
    run.restart(outer_lr=0.25)
    assert run.cells == later
    run.restart(outer_lr=0.125)
    assert run.cells == later


# --- whose it is ---------------------------------------------------------------------------------------------------


def test_a_second_server_on_the_folder_is_refused_and_the_first_one_named(tmp_path: Path) -> None:
    run = Ledgers(tmp_path)
    with pytest.raises(ConfigError, match=rf"belongs to a server that is running \(process {os.getpid()} on "):
        make_server(tmp_path)
    run.server.service.stop()
    DiLoCoServer(None, 1, port=0, save_dir=str(tmp_path)).stop()


def test_weights_given_to_a_folder_that_holds_a_run_are_said_not_to_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Ledgers(tmp_path / "run")
    run.rounds(3)
    assert "are not used" not in caplog.text, "a new run begins with them"
    run.restart()
    assert (
        f"the weights given (-m) are not used: the run in {run.folder} goes on from its own, at round 3. For a new run "
        "choose another save_dir (--save-dir), or move this one away"
    ) in caplog.text
    state = str(run.server.save_state())
    kill(run.server)
    caplog.clear()
    kill(make_server(tmp_path / "other", Ledger, resume=state))
    assert f"the run in {state} goes on from its own, at round 3. For a new run leave resume out" in caplog.text
    caplog.clear()
    DiLoCoServer(None, 1, port=0, save_dir=str(run.folder)).service.writer.close()
    assert "are not used" not in caplog.text, "none were given"


def test_a_run_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    run = Ledgers(tmp_path)
    run.rounds(1)
    run.server.service.stop()
    with pytest.raises(ConfigError, match=r"holds run run of another model .* 'cells' is missing"):
        make_server(tmp_path)
    assert make_server(tmp_path, model=Ledger).sync_round == 1


def test_another_run_is_not_resumed_into_a_folder_that_has_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        run = Ledgers(tmp_path / name, run_id=name)
        run.rounds(1)
        run.server.service.stop()
    with pytest.raises(ConfigError, match=r"holds run first, and .*second' is of run second"):
        make_server(tmp_path / "first", model=Ledger, resume=str(tmp_path / "second"))
    fresh = make_server(tmp_path / "third", model=Ledger, resume=str(tmp_path / "second"))
    assert (fresh.run_id, fresh.sync_round) == ("second", 1)


def test_resuming_by_name_refuses_when_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is nothing to resume in .*: leave resume out to begin a run there"):
        make_server(tmp_path, resume=str(tmp_path))
    run = Ledgers(tmp_path)
    run.rounds(2)
    run.restart(resume=str(tmp_path))
    assert run.server.sync_round == 2


def test_a_server_that_nobody_joined_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    first = make_server(tmp_path)
    first.service.stop()
    second = make_server(tmp_path, model=Ledger)
    assert (second.run_id, second.is_resumed) == ("run", False)


# --- what comes back beside the model ------------------------------------------------------------------------------


def test_joins_and_orders_are_on_the_disk_when_they_are_answered(tmp_path: Path) -> None:
    run = Ledgers(tmp_path, sync_every=4, token_budget=1000, num_workers=2)
    other = HandClient(Relocatable(run.server.service), "other")
    assert other.join().incarnation == 1
    again = HandClient(Relocatable(run.server.service), "other")
    assert again.join().incarnation == 2
    other.transport.call(Control(kind="plan", changes=Wishes(sync_every=9)))
    other.transport.call(Control(kind="budget", tokens=5000))
    other.transport.call(Control(kind="kick", worker_id="by-hand", reason="it misbehaved"))
    run.restart()  # by the same command, whose sync_every and token_budget are older than the orders
    status: Any = run.server.status()
    assert status["plan"]["sync_every"] == 9
    assert status["tokens"]["budget"] == 5000
    assert status["workers"]["other"]["incarnation"] == 2
    with pytest.raises(Kicked, match="it misbehaved"):
        run.client.join()
    run.restart(sync_every=7, token_budget=2000)  # that is news
    status = run.server.status()
    assert (status["plan"]["sync_every"], status["tokens"]["budget"]) == (7, 2000)


def test_who_left_is_not_waited_for_after_a_restart(tmp_path: Path) -> None:
    run = Ledgers(tmp_path, num_workers=2)
    other = HandClient(Relocatable(run.server.service), "other")
    other.join()
    other.transport.call(Leave(**other.session.head, reason="done"))
    run.restart()
    run.rounds(1)


def test_joins_that_come_together_are_written_as_one(tmp_path: Path) -> None:
    run = Ledgers(tmp_path, num_workers=30)
    gate, append = threading.Event(), run.server.service.writer.append

    def slow(*arguments: Any) -> int:
        gate.wait(30.0)
        return append(*arguments)

    run.server.service.writer.append = slow  # type: ignore[method-assign]
    before = len(run.records())
    clients = [HandClient(MemoryTransport(run.server.service), f"w{i}") for i in range(20)]

    def open_gate() -> None:
        wait_until(lambda: len(run.server.status()["workers"]) == 21)  # type: ignore[arg-type]
        gate.set()

    in_threads(open_gate, *(client.join for client in clients))
    assert len(run.records()) <= before + 3
    run.restart()
    assert len(run.server.status()["workers"]) == 21  # type: ignore[arg-type]


def test_with_checkpoints_alone_a_kill_goes_back_to_the_last(tmp_path: Path) -> None:
    run = Ledgers(tmp_path, durability="checkpoint", save_every=2)
    run.rounds(3)
    assert not (tmp_path / "journal").exists()
    run.restart()
    assert run.server.sync_round == 2
    run.restart(durability="round")
    run.rounds(1)
    run.restart(durability="checkpoint")
    assert run.server.sync_round == 3


def test_without_durability_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    run = Ledgers(tmp_path, durability="none")
    run.rounds(1)
    assert run.states() == []
    run.server.save_state()
    run.rounds(1)
    run.restart()
    assert run.server.sync_round == 1
