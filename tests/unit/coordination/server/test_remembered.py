"""What outlives the server's process, and what must not."""

from __future__ import annotations

import msgspec

from outerstep.coordination.server.membership import KnownWorker
from outerstep.coordination.server.remembered import Acceptance, Remembered
from outerstep.types import Plan


def accepted(sequence: int, payload_hash: str | None, version: int) -> Acceptance:
    return Acceptance(sequence=sequence, payload_hash=payload_hash, version=version)


def a_member(entries: dict[int, Acceptance], closed: dict[int, Acceptance]) -> KnownWorker:
    member = KnownWorker("left", "i" * 16, "host", 3, 0.0, 5.0, accepted=entries, closed=closed)
    member.retired.extend(["j" * 16, "k" * 16])
    return member


def test_what_is_in_the_model_comes_back_as_it_was() -> None:
    entries = {0: accepted(4, "ab" * 16, 7), 1: accepted(9, "cd" * 16, 6)}
    member = a_member(entries, entries)
    back = KnownWorker.recorded("left", member.record(), now=100.0)
    assert not back.live
    assert (back.worker_id, back.instance, back.hostname, back.incarnation) == ("left", "i" * 16, "host", 3)
    assert back.retired == member.retired
    assert back.retired.maxlen == member.retired.maxlen
    assert back.accepted == back.closed == entries
    assert (back.joined_at, back.last_seen) == (100.0, 100.0)


def test_a_payload_whose_hash_is_not_known_stays_so() -> None:
    member = a_member({}, {0: accepted(4, None, 7)})
    record = member.record()
    assert record.accepted[0].payload_hash is None
    assert KnownWorker.recorded("left", record, now=0.0).closed == {0: accepted(4, None, 7)}


def test_what_the_open_round_accepted_is_asked_for_again() -> None:
    """It is not in the saved model: the worker has to see that its last sequences are not there any more."""
    member = a_member({0: accepted(6, "ab" * 16, 8), 1: accepted(1, "cd" * 16, 7)}, {0: accepted(4, "ef" * 16, 7)})
    back = KnownWorker.recorded("left", member.record(), now=0.0)
    assert (back.last_sequence(0), back.last_sequence(1)) == (4, 0)
    assert back.accepted[0].payload_hash == "ef" * 16


def test_it_survives_json() -> None:
    ledger = {"left": a_member({}, {1: accepted(4, "ab" * 16, 2)}).record()}
    plan = Plan(
        sync_every=3,
        codec="fp32",
        fragments=(("a",), ("b",)),
        part_size_bytes=64,
        max_staleness=4,
        heartbeat_timeout_s=9.0,
    )
    remembered = Remembered(
        run_id="r", plan=plan, versions=(3, 2), ledger=ledger, totals={"n": 2}, facts={"live": ["left"]}
    )
    assert msgspec.json.decode(msgspec.json.encode(remembered), type=Remembered) == remembered
