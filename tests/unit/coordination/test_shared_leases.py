"""The lease table that all members hold: what a decision makes of it, and what a liar can do to it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from outerstep.coordination.gossip.bounds import MOST_OFFER_BYTES
from outerstep.coordination.shared_leases import MOST_SAID, MOST_TRAINED, SharedLeases, covering, shortened, terms_of
from outerstep.coordination.shares import FEW
from outerstep.errors import BadRequest
from outerstep.events import Event, UnitsDone
from outerstep.ranges import NONE, Ranges
from outerstep.statements import Offered, body_of
from outerstep.types import MOST_RANGES, Dataset, LeaseStatement, Places, Trained

UNITS = 120


def made(**facts: Any) -> SharedLeases:
    usual: dict[str, Any] = {"name": "train", "samples": UNITS, "unit_samples": 1}
    return SharedLeases([Dataset(**{**usual, **facts})])


def held(leases: SharedLeases, name: str) -> Ranges:
    return leases.tables["train"].held.get(name, NONE)


def word(leases: SharedLeases, name: str, **facts: Any) -> tuple[LeaseStatement, ...]:
    """An honest one's: it has drawn nothing."""
    places = tuple(held(leases, name))
    usual: dict[str, Any] = {"holds": places, "spare": places, "untrained": held(leases, name).total, "pace": 4.0}
    return (LeaseStatement(dataset="train", turn=leases.turn, **{**usual, **facts}),)


def brings(places: Places) -> tuple[Trained, ...]:
    return (Trained(dataset="train", places=places),)


def test_members_share_an_epoch_and_one_that_comes_gets_its_part() -> None:
    leases = made()
    leases.decide({"a": "1"}, {}, {})
    assert held(leases, "a").total == UNITS
    leases.decide({"a": "1", "b": "1"}, {}, {})  # nobody has said anything: a's part is cut at its end
    assert abs(held(leases, "a").total - held(leases, "b").total) <= UNITS // 8 + 2
    assert 0 in held(leases, "a")
    members = dict.fromkeys("abc", "1")
    leases.decide(members, {name: word(leases, name) for name in "ab"}, {})
    assert min(held(leases, name).total for name in "abc") >= UNITS // 5
    assert sum(held(leases, name).total for name in "abc") == UNITS


def test_parts_follow_the_paces() -> None:
    leases, members = made(), {"a": "1", "b": "1", "c": "1"}
    leases.decide(members, {n: word(leases, n, pace=p) for n, p in (("a", 1.0), ("b", 2.0), ("c", 4.0))}, {})
    assert [held(leases, name).total for name in "abc"] == [17, 34, 69]


def test_what_one_holds_that_is_gone_is_the_others_and_what_it_contributed_stays() -> None:
    leases, members = made(), {"a": "1", "b": "1"}
    leases.decide(members, {}, {})
    first = tuple(held(leases, "b").first(5))
    leases.decide(members, {n: word(leases, n) for n in "ab"}, {"b": brings(first)}, (0, 1))
    leases.decide({"a": "1"}, {"a": word(leases, "a")}, {})
    assert leases.tables["train"].done == Ranges(first)
    assert held(leases, "a") == Ranges([(0, UNITS)]) - Ranges(first)


def test_what_was_given_while_a_statement_was_under_way_is_not_taken_back() -> None:
    leases = made(epochs=2)
    leases.decide({"a": "1", "b": "1"}, {}, {})
    old = word(leases, "a")
    leases.decide({"a": "1"}, {}, {})  # b is gone, and a has what it had
    leases.decide({"a": "1"}, {"a": old}, {})
    assert held(leases, "a").total >= UNITS


def test_a_liar_misreports_its_own_units_alone_and_gets_little_more_than_its_part() -> None:
    leases, members = made(), dict.fromkeys(("a", "b", "c", "liar"), "1")
    leases.decide(members, {}, {})
    everything: Places = ((0, UNITS), (10**9, 10**9 + 7))
    for turn in range(1, 6):
        own, honest = held(leases, "liar"), {n: held(leases, n) for n in "abc"}
        lie = LeaseStatement(dataset="train", holds=everything, dropped=everything, pace=1e9, turn=10**6)
        odd = LeaseStatement(dataset="nobody has it")
        said = {**{n: word(leases, n) for n in "abc"}, "liar": (lie, odd)}
        leases.decide(members, said, {"liar": (*brings(everything), *odd_trained())}, (0, turn))
        done = leases.tables["train"].done
        assert not any(done & theirs for theirs in honest.values()), "only what it held is done"
        assert (done & own).total <= FEW or turn > 1, "the others have brought nothing yet"
        assert held(leases, "liar").total <= 0.6 * UNITS


def test_one_that_is_a_hundred_times_as_fast_is_believed_within_a_few_decisions() -> None:
    leases, members = made(samples=9600), dict.fromkeys(("a", "b", "fast"), "1")
    leases.decide(members, {}, {})
    brought_of = {"a": 12, "b": 12, "fast": 1200}
    doubted, total = [], 0
    for turn in range(1, 7):
        brought = {n: brings(tuple(held(leases, n).first(count))) for n, count in brought_of.items()}
        total += Ranges(brought["fast"][0].places).total
        first = {n: held(leases, n) - held(leases, n).first(count) for n, count in brought_of.items()}
        said = {
            n: word(leases, n, holds=tuple(first[n]), spare=tuple(first[n]), pace=float(brought_of[n])) for n in members
        }
        leases.decide(members, said, brought, (0, turn))
        doubted.append(leases.tables["train"].doubted.get("fast", NONE).total)
    assert max(doubted) > 0
    assert doubted[-1] == 0
    assert leases.tables["train"].done_by["fast"] == total > 6000
    assert leases.tables["train"].repeated == 0


def test_a_contribution_to_a_round_that_is_believed_later_is_told_then() -> None:
    leases, members = made(samples=1000), dict.fromkeys("ab", "1")
    leases.decide(members, {}, {})
    events: list[Event] = []
    mine = held(leases, "a")
    for turn in range(1, 8):
        theirs = held(leases, "b")
        brought = {"b": brings(tuple(theirs.first(20))), **({"a": brings(tuple(mine.first(300)))} if turn == 1 else {})}
        said = {"b": word(leases, "b", holds=tuple(theirs - theirs.first(20)))}
        events += leases.decide(members, said, brought, (0, turn))
    of_a = [event for event in events if isinstance(event, UnitsDone) and event.worker == "a"]
    assert len(of_a) > 1
    assert sum(Ranges(event.places).total for event in of_a) == 300


@pytest.mark.parametrize("trick", ["trains", "loses", "drops", "spares"])
def test_a_liar_cannot_crumble_the_table(trick: str) -> None:
    """All members hold it, and a newcomer fetches it: it must stay small."""
    leases, members = made(samples=100_000), dict.fromkeys("abcd", "1")
    for turn in range(40):
        said = {name: word(leases, name, pace=200.0) for name in members}
        brought = {name: brings(tuple(held(leases, name).first(200))[:64]) for name in members}
        mine = held(leases, "a")
        every_second = tuple((at, at + 1) for at in list(mine.numbers())[::2][:250])
        rest = tuple(mine - Ranges(every_second))
        match trick:
            case "trains":
                between = Ranges((after + 1, after + 2) for after, _ in every_second[:-1])
                brought["a"] = brings(every_second)
                said["a"] = word(leases, "a", holds=tuple(mine - between)[-MOST_RANGES:], pace=200.0)
            case "loses":
                said["a"] = word(leases, "a", holds=rest[-1:] + rest[: MOST_RANGES - 1], pace=200.0)
            case "drops":
                said["a"] = word(leases, "a", dropped=every_second, pace=200.0)
            case "spares":
                said["a"] = word(leases, "a", spare=every_second, pace=1e-3 if turn % 2 else 1e9)
        leases.decide(members, said, brought, (0, turn + 1), 1)
    table = leases.tables["train"]
    assert table.done.pieces + table.free.pieces < 1000
    assert len(leases.encode()) < 1 << 16
    assert all(table.done_by[name] > 1000 for name in "bcd")


def odd_trained() -> tuple[Trained, ...]:
    return (Trained(dataset="nobody has it", places=((0, 1),)),)


def test_a_table_is_the_same_after_it_was_written_and_read() -> None:
    leases, members = made(epochs=3), {"a": "1", "b": "1"}
    for turn in range(1, 4):
        said = {name: word(leases, name) for name in members}
        leases.decide(members, said, {"a": brings(tuple(held(leases, "a").first(3)))}, (0, turn), 2)
    again = SharedLeases.decode(leases.encode())
    assert again.digest == leases.digest
    for one in (leases, again):
        one.decide({"b": "1", "c": "1"}, {"b": word(leases, "b")}, {})
    assert again.encode() == leases.encode()


@pytest.mark.parametrize("table", [b"", b"{}", b'{"tables": [{}]}', b'{"tables": 3}', b"\xff", b"[" * 5000])
def test_what_is_no_table_is_refused(table: bytes) -> None:
    with pytest.raises(BadRequest, match="cannot be read"):
        SharedLeases.decode(table)


@pytest.mark.parametrize(
    "wrong", [{"instances": []}, {"instances": None}, {"tables": [{"done_by": []}]}, {"tables": [{"shares": 1}]}]
)
def test_a_table_of_which_one_part_is_something_else_is_refused_too(wrong: dict[str, Any]) -> None:
    """One peer says so to another that would join, which must go on and ask the next."""
    kept = json.loads(made().encode())
    for name, value in wrong.items():
        kept[name] = [{**kept["tables"][0], **value[0]}] if name == "tables" else value
    with pytest.raises(BadRequest, match="cannot be read"):
        SharedLeases.decode(json.dumps(kept).encode())


@pytest.mark.parametrize("seed", range(20))
def test_few_ranges_cover_many(seed: int) -> None:
    rng = random.Random(seed)
    places = tuple(Ranges((at, at + rng.randint(1, 3)) for at in rng.sample(range(1000), 80)))
    for most in (1, 2, 7, 200):
        cover = covering(places, most)
        assert len(cover) <= max(most, 1)
        assert not Ranges(places) - Ranges(cover)
    assert covering((), 4) == ()
    said = LeaseStatement(dataset="train", holds=places, spare=places, dropped=places)
    (short,) = shortened([said])
    assert max(len(short.holds), len(short.spare), len(short.dropped)) <= MOST_SAID
    assert not Ranges(short.spare) - Ranges(places)


def test_what_a_peer_says_of_two_datasets_fits_its_offer() -> None:
    """A larger offer nobody reads, and its peer would have no part in any round."""
    places = tuple((2**32 - 1000 + 2 * i, 2**32 - 999 + 2 * i) for i in range(200))
    names = ["a" * 128, "b" * 128]
    said = [LeaseStatement(dataset=name, holds=places, spare=places, dropped=places, pace=0.1) for name in names]
    offer = Offered(
        run_id="r" * 64,
        fragment=2**16,
        version=2**32,
        sequence=2**32,
        digest="0" * 64,
        size_bytes=2**40,
        base_hash="0" * 32,
        steps=2**20,
        samples=2**32,
        tokens=2**40,
        data=shortened(said),
        trained=tuple(Trained(dataset=name, places=places[:MOST_TRAINED]) for name in names),
    )
    assert len(body_of(offer)) <= MOST_OFFER_BYTES


def test_terms_name_each_dataset() -> None:
    one = Dataset(name="b", samples=3, unit_samples=1)
    assert list(terms_of([one, Dataset(name="a", samples=3, unit_samples=1)])) == ["dataset 'a'", "dataset 'b'"]
