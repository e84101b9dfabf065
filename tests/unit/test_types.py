"""The bounds of names and hashes: part of the type, and exact to the last character."""

from typing import Any

import msgspec
import pytest

from outerstep.errors import BadRequest
from outerstep.types import Commit, Hash, Instance, Join, Offer, PartHash, PutPart, RunId, WorkerId
from outerstep.wire.messages import decode_json, encode_json

GOOD: dict[str, tuple[Any, list[str]]] = {
    "WorkerId": (WorkerId, ["w", "_", "0", "host-1.lan:4711", "w" * 128]),
    "RunId": (RunId, ["r", "-", "_", "aB3-_", "r" * 64]),
    "Instance": (Instance, ["01234567", "aB3-_aB3", "i" * 64]),
    "PartHash": (PartHash, ["0123456789abcdef"]),
    "Hash": (Hash, ["0123456789abcdef" * 2]),
}
BAD: dict[str, list[str]] = {
    "WorkerId": ["", "w" * 129, "-w", ".w", ":w", "..", "a/b", "a b", "a%b", "wörker"],
    "RunId": ["", "r" * 65, "a.b", "a:b", "a/b", "..", "rün"],
    "Instance": ["", "0123456", "i" * 65, "0123456.", "0123456/"],
    "PartHash": ["", "0" * 15, "0" * 17, "0" * 15 + "g", "0" * 15 + "A", "٠" * 16],
    "Hash": ["", "0" * 31, "0" * 33, "0" * 31 + "g", "0" * 31 + "A", "0" * 16],
}
EVERY_GOOD = [(kind, value) for kind, (_, values) in GOOD.items() for value in values]

HEAD = {"run_id": "run", "worker_id": "w", "incarnation": 1}
KEY = {**HEAD, "fragment": 0, "sequence": 1}
MESSAGES: dict[type, dict[str, Any]] = {
    Join: {"protocol": 1, "worker_id": "w", "instance": "01234567", "run_id": "run"},
    Offer: {
        **KEY,
        "base_version": 0,
        "oldest_base": 0,
        "steps": 1,
        "codec": "fp32",
        "size_bytes": 64,
    },
    PutPart: {**KEY, "part": 0, "hash": "0" * 16},
    Commit: {**KEY, "payload_hash": "0" * 32},
}
NAMED = {"run_id", "worker_id", "instance", "hash", "payload_hash"}


@pytest.mark.parametrize(("kind", "value"), EVERY_GOOD, ids=lambda x: repr(x)[:20])
def test_what_fits_is_accepted_as_it_is(kind: str, value: str) -> None:
    assert msgspec.convert(value, GOOD[kind][0]) == value


@pytest.mark.parametrize(
    ("kind", "value"), [(kind, value) for kind, values in BAD.items() for value in values], ids=lambda x: repr(x)[:20]
)
def test_what_does_not_fit_is_refused(kind: str, value: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, GOOD[kind][0])


@pytest.mark.parametrize(("kind", "value"), EVERY_GOOD, ids=lambda x: repr(x)[:20])
@pytest.mark.parametrize("extra", ["\n", "\r\n", "\0", " ", "\u2028"], ids=repr)
def test_a_good_one_is_refused_with_a_line_end_behind_or_before_it(kind: str, value: str, extra: str) -> None:
    """`$` in a pattern would let one line feed at the end pass, into log lines and file names."""
    for changed in (value + extra, extra + value):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(changed, GOOD[kind][0])


@pytest.mark.parametrize(
    ("message", "field"),
    [(message, field) for message, facts in MESSAGES.items() for field in facts if field in NAMED],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_no_message_carries_a_name_or_hash_that_ends_with_a_line_feed(message: type, field: str) -> None:
    facts = MESSAGES[message]
    assert isinstance(decode_json(encode_json(facts), message), message)
    changed = {**facts, field: facts[field] + "\n"}
    with pytest.raises(BadRequest, match=rf"^not a {message.__name__}: .*`\$\.{field}`"):
        decode_json(encode_json(changed), message)
