"""What every topology does, in sentences. Each is a function of an adapter; what it says holds for all of them, or the
adapter names it as impossible and shows why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch

from contract.adapters import Adapter, Run
from contract.member import CELLS, MANIFEST, OTHER_MANIFEST, Member, each_until, expected_anchor
from outerstep.errors import OuterstepError
from outerstep.topology.protocol import Joined
from support import in_threads

ZEROS = [0.0] * CELLS


def together(run: Run, *members: Member) -> None:
    """They join, and the next round counts on all of them."""
    first = members[: run.first]
    in_threads(*[member.enter for member in first])
    for number in range(len(first), len(members)):
        run.let_in(members[number], members[:number])
    run.all_in(members)


def exchange(*members: Member) -> None:
    in_threads(*[member.exchange for member in members])


def exchange_until_counted(*members: Member, tries: int = 5) -> None:
    """Round by round, until nothing of theirs is unsent."""
    for _ in range(tries):
        exchange(*members)
        if not any(member.unsent.any() for member in members):
            return
    raise AssertionError(f"not all of {[member.name for member in members]} were counted in {tries} exchanges")


def each_until_counted(*members: Member) -> None:
    """Each by itself, as workers do, until nothing of theirs is unsent and all hold the newest anchor."""

    def settled() -> bool:
        return len({member.version for member in members}) == 1 and not any(member.unsent.any() for member in members)

    each_until(settled, members)


def assert_one_anchor(*members: Member) -> None:
    for member in members[1:]:
        assert torch.equal(member.anchor, members[0].anchor), (
            f"{member.name} holds another anchor than {members[0].name}"
        )
        assert member.version == members[0].version


# --- the sentences ----------------------------------------------------------------------------------------------------


def joins(adapter: Adapter, folder: Path) -> None:
    """Whoever joins holds the run's anchor, whatever its own model held, and knows the plan."""
    with adapter.open(folder) as run:
        members = [run.member(0), run.member(1)]

        def enter(member: Member) -> Joined:
            joined = member.join()
            member.catch_up()
            return joined

        joined = in_threads(*[partial(enter, member) for member in members])
        for member, one in zip(members, joined, strict=True):
            assert one.worker_id == member.name
            assert one.plan.fragments == (("cells",),)
            assert one.manifest.parameters[0].shape == MANIFEST.parameters[0].shape
            assert not one.overtaken
            assert member.anchor.tolist() == ZEROS
        assert_one_anchor(*members)


def is_refused_another_model(adapter: Adapter, folder: Path) -> None:
    """Whoever brings another model is told so when it joins, and which tensor differs."""
    with adapter.open(folder, 1 if adapter.meets_at_exchanges else 2) as run:
        a, b = run.member(0), run.member(1)
        refused: list[str] = []
        is_there = Event()

        def come() -> None:
            if adapter.meets_at_exchanges:  # nobody refuses the first
                assert is_there.wait(60.0)
            with pytest.raises(OuterstepError) as caught:
                b.join(OTHER_MANIFEST)
            refused.append(str(caught.value))

        def be_there() -> None:
            with suppress(OuterstepError):  # of a collective, on all ranks alike
                a.enter()
                is_there.set()
                while adapter.meets_at_exchanges and not refused:
                    a.exchange()

        in_threads(come, be_there)
        assert "cells" in refused[0]


def contributes(adapter: Adapter, folder: Path) -> None:
    """What the members contribute is in the next anchor, once, with equal weight; all of them hold the same bits."""
    with adapter.open(folder) as run:
        a, b = run.member(0), run.member(1)
        together(run, a, b)
        for number in range(1, 4):
            agreed = in_threads(a.learn(0, 2.0).exchange, b.learn(1, 4.0).exchange)
            assert all(one.counted and not one.refused and not one.too_old for one in agreed)
            assert a.anchor.tolist() == [1.0 * number, 2.0 * number, *ZEROS[2:]]
            assert_one_anchor(a, b)
            assert a.version == number


def joins_later(adapter: Adapter, folder: Path) -> None:
    """Whoever joins a run that goes on gets its newest anchor, and counts from then on."""
    with adapter.open(folder, 2) as run:
        a, b = run.member(0), run.member(1)
        together(run, a, b)
        exchange(a.learn(0, 2.0), b)
        c = run.member(2)
        run.let_in(c, [a, b])
        run.all_in([a, b, c])
        assert c.anchor[0] == 1.0
        exchange_until_counted(a.learn(0, 3.0), b.learn(1, 3.0), c.learn(2, 3.0))
        assert c.anchor[2] > 0.0
        if adapter.has_one_anchor:
            assert_one_anchor(a, b, c)


def misses_a_round(adapter: Adapter, folder: Path) -> None:
    """A round may close without a member. Its steps are kept, and go into a later one, once."""
    with adapter.open(folder, 3, deadline_s=1.5) as run:  # enough for three on a busy machine to come in time
        a, b, c = (run.member(number) for number in range(3))
        together(run, a, b, c)
        exchange(a, b, c)  # a run begins when all are there
        exchange(a.learn(0, 6.0), b.learn(1, 6.0))
        assert a.version == c.version + 1
        assert_one_anchor(a, b)
        each_until_counted(a.learn(0, 6.0), b.learn(1, 6.0), c.learn(2, 6.0))
        assert torch.equal(c.unsent, torch.zeros(CELLS))
        torch.testing.assert_close(a.anchor, expected_anchor([a, b, c]))
        assert_one_anchor(a, b, c)


def is_late(adapter: Adapter, folder: Path) -> None:
    """What comes after its round has closed counts in the next one, and its worker is told in which."""
    with adapter.open(folder, 3, quorum=2) as run:
        a, b, c = (run.member(number) for number in range(3))
        together(run, a, b, c)
        exchange(a.learn(0, 2.0), b.learn(1, 2.0))
        agreed = c.learn(2, 2.0).exchange()
        assert (agreed.version, agreed.counted, agreed.counted_in) == (1, True, 2)
        exchange(a.learn(0, 2.0), c)
        assert c.anchor[2] > 0.0
        assert_one_anchor(a, c)
        before = c.anchor
        exchange(a, c)
        assert torch.equal(c.anchor, before), "it counted twice"


def is_refused(adapter: Adapter, folder: Path) -> None:
    """A contribution without use (NaN) harms nobody: its worker is told why, begins again from the agreed anchor, and
    counts in the next round."""
    with adapter.open(folder, deadline_s=1.5) as run:  # enough for two on a busy machine to come in time
        a, b = run.member(0), run.member(1)
        together(run, a, b)
        exchange(a, b)  # a run begins when all are there
        _, agreed = in_threads(a.learn(0, 2.0).exchange, b.learn(1, float("nan")).exchange)
        assert agreed.refused
        assert bool(b.anchor.isfinite().all())
        if not adapter.has_one_anchor:
            return
        each_until_counted(a, b.learn(1, 2.0))
        assert a.anchor[0] > 0.0
        assert a.anchor[1] > 0.0
        assert_one_anchor(a, b)


def leaves(adapter: Adapter, folder: Path) -> None:
    """When a member leaves, the others go on without waiting for it."""
    with adapter.open(folder, 3) as run:
        a, b, c = (run.member(number) for number in range(3))
        together(run, a, b, c)
        in_threads(*[m.exchange for m in (a, b, c)])
        before = a.version
        c.leave()
        exchange_until_counted(a.learn(0, 2.0), b.learn(1, 2.0))
        assert a.version > before
        assert_one_anchor(a, b)
        assert a.anchor[0] > 0.0
        in_threads(a.leave, b.leave)


def is_restored(adapter: Adapter, folder: Path) -> None:
    """From what it saved, a process goes on where another start of the same worker was."""
    with adapter.open(folder) as run:
        a, b = run.member(0), run.member(1)
        together(run, a, b)
        exchange(a.learn(0, 2.0), b.learn(1, 2.0))
        ending = [a, b] if adapter.restarts_together else [b]
        saved = {member.name: member.save() for member in ending}
        for member in ending:
            run.end(member)
        if adapter.restarts_together:
            run.begin_anew()  # type: ignore[attr-defined]
            a = run.member(0, saved["a"])
        again = run.member(1, saved["b"])
        if adapter.restarts_together:
            in_threads(a.enter, again.enter)
        elif adapter.meets_at_exchanges:
            in_threads(a.exchange, again.enter)
        else:
            again.enter()
        run.all_in([a, again])
        assert again.version == a.version
        assert_one_anchor(a, again)
        exchange_until_counted(a.learn(0, 2.0), again.learn(1, 2.0))
        assert_one_anchor(a, again)
        assert a.anchor[:2].tolist() == [2.0, 2.0]


def carries_on(adapter: Adapter, folder: Path) -> None:
    """A contribution that is under way when its process ends is carried on by the next start, and counts once."""
    with adapter.open(folder) as run:
        a, b = run.member(0), run.member(1)
        together(run, a, b)
        b.learn(1, 2.0).begin()
        saved = b.save(under_way=True)
        for rank in b.ranks:
            assert rank.ticket is not None
            rank.ticket.cancel()
        again = run.member(1, saved)
        again.join()
        again.sent = again.unsent = b.sent.clone()
        for rank, state in zip(again.ranks, saved, strict=True):
            rank.state = state["exchange"]

        def reopen(rank: object) -> None:
            rank.ticket = rank.topology.reopen(0, rank.state)  # type: ignore[attr-defined]
            assert rank.ticket is not None  # type: ignore[attr-defined]

        again.everywhere(reopen)
        in_threads(a.learn(0, 2.0).exchange, again.finish)
        assert a.anchor[:2].tolist() == [1.0, 1.0]
        exchange(a, again)
        assert a.anchor[:2].tolist() == [1.0, 1.0], "it counted twice"
        assert_one_anchor(a, again)


def heals(adapter: Adapter, folder: Path) -> None:
    """An anchor that is not the agreed one is noticed and mended, and the damage reaches nobody."""
    with adapter.open(folder, 3, deadline_s=1.0) as run:  # three: of two that differ, nobody knows which is right
        a, b, c = members = [run.member(number) for number in range(3)]
        together(run, *members)
        exchange(a.learn(0, 6.0), b.learn(1, 6.0), c.learn(2, 6.0))
        b.damage()
        for _ in range(4):
            exchange(a.learn(0, 6.0), b.learn(1, 6.0), c.learn(2, 6.0))
            if torch.equal(a.anchor, b.anchor):
                break
        assert_one_anchor(*members)
        each_until_counted(*members)
        assert_one_anchor(*members)
        torch.testing.assert_close(a.anchor, expected_anchor(members))


SENTENCES: dict[str, Callable[[Adapter, Path], None]] = {
    "joins": joins,
    "is refused another model": is_refused_another_model,
    "contributes": contributes,
    "joins later": joins_later,
    "misses a round": misses_a_round,
    "is late": is_late,
    "is refused": is_refused,
    "leaves": leaves,
    "is restored": is_restored,
    "carries on": carries_on,
    "heals": heals,
}
