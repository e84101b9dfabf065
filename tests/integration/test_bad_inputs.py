"""The table of bad inputs (docs/operating/faults.md), row by row, against a live server over TLS.

What is said here is said by hand, with the right token unless the row is about tokens. Every refusal has the documented
form, and after every case the server is as it was: same round, same weights, nothing held, still answering.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import resource
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from outerstep.core.manifest import describe
from outerstep.digest import part_count, part_hash, part_range, payload_hash
from outerstep.security.tokens import new_token
from outerstep.types import PROTOCOL_VERSION, Commit, Join, Leave, Manifest, Offer, PutPart, Wishes
from outerstep.wire.frames import MAGIC
from outerstep.wire.messages import MAX_JSON_BYTES, MAX_PART_BYTES, address_of
from sites import Said, Site
from support import HandClient, assert_same, make_frame, make_layout, params_of, tiny_model, wait_until

PART_BYTES = 128
FORM = {"code", "message", "hint", "request_id", "retry_after_s"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"), part_size_bytes=PART_BYTES, tokenizer="bytes-v1")
    yield made
    made.server.stop()


@pytest.fixture
def client(site: Site) -> Iterator[HandClient]:
    made = HandClient(site.transport(), "by-hand", MANIFEST)
    made.join()
    made.sequence += 1
    yield made
    made.transport.call(Leave(**made.session.head))
    made.transport.close()


@pytest.fixture(autouse=True)
def unharmed(site: Site) -> Iterator[None]:
    """Whatever a test of this file says, the server is afterwards what it was before."""
    yield
    status = site.server.status()
    assert (status["sync_round"], status["total_submissions"], status["failure"]) == (0, 0, "")
    assert (status["pool_held_bytes"], status["pool_queue"]) == (0, 0)
    assert_same(site.server.get_global_params(), params_of(tiny_model()))
    assert site.ask("GET", "/healthz") == (200, {"status": "ok"})


MANIFEST = describe(tiny_model())[1]


def refused(said: Said, status: int, code: str, *words: str) -> Said:
    """It is a refusal of this kind in the documented form, and says these words."""
    assert (said.status, said.body["code"]) == (status, code), said.body
    assert said.body.keys() == FORM
    assert said.body["request_id"]
    for word in words:
        assert word in said.text, said.text
    return said


def ones() -> dict[str, Tensor]:
    return {name: torch.ones_like(value) for name, value in params_of(tiny_model()).items()}


def offer_of(client: HandClient, size_bytes: int, **changes: Any) -> Offer:
    facts: dict[str, Any] = {"base_version": 0, "oldest_base": 0, "steps": 1, "codec": "fp32", **changes}
    return Offer(**client.session.head, fragment=0, sequence=client.sequence, size_bytes=size_bytes, **facts)


def part_of(client: HandClient, payload: memoryview, part: int, number: int | None = None) -> PutPart:
    piece = payload[slice(*part_range(part, len(payload), PART_BYTES))]
    facts: dict[str, Any] = {"part": part if number is None else number, "hash": part_hash(piece)}
    return PutPart(**client.session.head, fragment=0, sequence=client.sequence, **facts)


def commit_of(client: HandClient, payload: memoryview) -> Commit:
    count = part_count(len(payload), PART_BYTES)
    hashes = [part_hash(payload[slice(*part_range(i, len(payload), PART_BYTES))]) for i in range(count)]
    return Commit(**client.session.head, fragment=0, sequence=client.sequence, payload_hash=payload_hash(hashes))


def commit(site: Site, client: HandClient, payload: bytes | memoryview) -> Said:
    """Everything up to the commit goes well; what the commit is answered."""
    view = memoryview(bytes(payload))
    for part in client.offer(len(view)).missing:
        client.put(view, part)
    return site.call(commit_of(client, view))


# --- who is asking --------------------------------------------------------------------------------------------------

TOKENS: dict[str, bytes | None] = {
    "none": None,
    "empty": b"Bearer ",
    "wrong": b"Bearer " + new_token("run").encode(),
    "nearly right": b"",  # made from the right one below
    "huge": b"Bearer " + b"x" * 1_000_000,
    "not ASCII": "Bearer schlüssel-ключ".encode(),
    "not text": b"Bearer \xff\xfe\x80",
}


@pytest.mark.row("B01")
@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS.keys())
@pytest.mark.parametrize("target", ["GET /status", "POST /v1/join", "PUT /v1/part?x=1", "POST /v1/control"])
def test_without_the_token_everything_is_401(site: Site, target: str, token: bytes | None) -> None:
    if token == b"":
        token = f"Bearer {site.run_token[:-1]}".encode()
    head = f"{target} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n".encode()
    if token is not None:
        head += b"Authorization: " + token + b"\r\n"
    said = refused(site.say(head + b"\r\n{}"), 401, "unauthorized", "outerstep join -")
    assert said.headers["WWW-Authenticate"] == "Bearer"
    assert site.run_token not in said.text


@pytest.mark.row("B02")
def test_a_workers_own_token_speaks_for_nobody_else(site: Site, client: HandClient) -> None:
    token = site.tokens.give_worker("left")
    try:
        body = msgspec.json.encode({**msgspec.to_builtins(client.session.join_request), "worker_id": "right"})
        head = f"POST /v1/join HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n"
        said = site.say(f"{head}\r\n".encode() + body)
        refused(said, 403, "forbidden", "belongs to worker 'left'", "speaks for 'right'", "--worker-id left")
        assert "right" not in site.server.status()["workers"]  # type: ignore[operator]
    finally:
        site.tokens.revoke("left")


# --- the request ----------------------------------------------------------------------------------------------------


@pytest.mark.row("B04")
def test_a_length_is_needed_before_anything_else_is_read(site: Site) -> None:
    head = f"POST /v1/offer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.run_token}\r\n"
    refused(site.say(f"{head}\r\n".encode()), 411, "length_required", "Content-Length")
    chunked = site.say(f"{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
    assert (chunked.status, chunked.body["code"]) == (411, "bad_request")
    assert "send Content-Length" in chunked.text
    assert chunked.body["request_id"]


@pytest.mark.row("B04")
@pytest.mark.parametrize("announced", [MAX_JSON_BYTES + 1, 1 << 40, 10**18])
def test_a_body_over_the_limit_is_refused_before_a_byte_of_it_is_read(site: Site, announced: int) -> None:
    """No byte of it is ever sent, so none can have been waited for."""
    said = site.post("/v1/offer", b"", f"Content-Length: {announced}")
    refused(said, 413, "too_large", f"{announced} bytes; at most {MAX_JSON_BYTES}", "protocol")


@pytest.mark.row("B04")
def test_a_part_over_the_limit_is_refused_naming_the_setting(site: Site, client: HandClient) -> None:
    target = address_of(part_of(client, memoryview(bytes(PART_BYTES)), 0))[1]
    said = site.post(target, b"", f"Content-Length: {MAX_PART_BYTES + 1}", method="PUT")
    refused(said, 413, "too_large", f"at most {MAX_PART_BYTES}", "part_size_bytes")
    refused(site.call(offer_of(client, 1 << 40)), 413, "too_large", "takes at most", "fragment 0 as fp32")


@pytest.mark.row("B05")
def test_a_body_shorter_than_announced_is_400_and_nothing_of_it_is_kept(site: Site, client: HandClient) -> None:
    payload = make_frame(ones())
    client.offer(len(payload))
    target = address_of(part_of(client, payload, 0))[1]
    said = site.post(target, bytes(payload[:100]), f"Content-Length: {PART_BYTES}", method="PUT")
    refused(said, 400, "bad_request", "28 bytes short of its announced 128")
    assert 0 in client.offer(len(payload)).missing
    refused(site.post("/v1/offer", b"{", "Content-Length: 64"), 400, "bad_request", "63 bytes short")


@pytest.mark.row("B06")
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
def test_a_compressed_body_is_not_taken_however_much_it_would_become(
    site: Site, client: HandClient, encoding: str
) -> None:
    """A gigabyte of zeros in a megabyte. Nothing is unpacked, so memory stays where it was."""
    bomb = gzip.compress(bytes(64 << 20)) * 16
    target = address_of(part_of(client, memoryview(bytes(PART_BYTES)), 0))[1]
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        for path, method in ((target, "PUT"), ("/v1/join", "POST")):
            said = site.post(path, b"", f"Content-Encoding: {encoding}", f"Content-Length: {len(bomb)}", method=method)
            refused(said, 415, "unsupported_media", "compressed bodies are not taken", "without Content-Encoding")
            refused(site.post(path, bomb, f"Content-Encoding: {encoding}", method=method), 415, "unsupported_media")
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 16 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


@pytest.mark.row("B06")
@pytest.mark.parametrize("length", [MAX_PART_BYTES + 1, 1 << 35])
def test_a_body_that_claims_to_be_huge_is_413_with_flat_memory(site: Site, client: HandClient, length: int) -> None:
    target = address_of(part_of(client, memoryview(bytes(PART_BYTES)), 0))[1]
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        refused(site.post(target, bytes(1000), f"Content-Length: {length}", method="PUT"), 413, "too_large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 << 10


DEEP = b"[" * 100_000
JSON: dict[str, bytes] = {
    "not JSON": b"{",
    "NaN": b'{"base_version": NaN}',
    "Infinity": b'{"base_version": -Infinity}',
    "overflow": b'{"base_version": 1e999}',
    "a key twice": b'{"steps": 1, "steps": 1}',
    "100 000 levels": DEEP,
    "100 000 levels in a field": b'{"steps": ' + DEEP + b"}",
    "100 000 objects": b'{"a":' * 100_000,
    "bad UTF-8": b'{"codec": "\xff\xfe"}',
    "half a character": b'{"codec": "\\ud800"}',
    "a pickle": pickle.dumps({"steps": 1}),
    "unknown field": b'{"surprise": 1}',
    "a list": b"[]",
    "nothing": b"",
    "zeros": bytes(100),
}


@pytest.mark.row("B15")
@pytest.mark.parametrize("path", ["/v1/offer", "/v1/join", "/v1/poll"])
@pytest.mark.parametrize("body", JSON.values(), ids=JSON.keys())
def test_bad_json_is_400(site: Site, path: str, body: bytes) -> None:
    refused(site.post(path, body), 400, "bad_request")


@pytest.mark.row("B16")
def test_an_unknown_path_is_404_and_a_wrong_method_405_with_the_right_ones(site: Site) -> None:
    refused(site.post("/v1/nothing", b"{}"), 404, "not_found", "/v1/nothing", "/v1/join")
    refused(site.post("/", b"{}"), 404, "not_found")
    for path, method, allow in (
        ("/v1/part", "POST", "PUT, GET"),
        ("/v1/offer", "DELETE", "POST, PUT"),
        ("/status", "POST", "GET"),
        ("/healthz", "PUT", "GET"),
    ):
        said = refused(site.post(path, b"{}", method=method), 405, "method_not_allowed", method)
        assert said.headers["Allow"] == allow


# --- the payload ----------------------------------------------------------------------------------------------------


def torch_save(value: object, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


class Trap:
    """Whoever unpickles it leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


@pytest.mark.row("B07")
@pytest.mark.parametrize("protocol", [2, 3, 4, 5, "torch.save", "torch.save of before 1.6"])
def test_a_pickle_is_not_opened_and_told_what_is_accepted(
    site: Site, client: HandClient, protocol: int | str, tmp_path: Path
) -> None:
    trap = Trap(tmp_path / "sprung")
    match protocol:
        case int():
            payload = pickle.dumps(trap, protocol=protocol)
        case "torch.save":
            payload = torch_save(trap)
        case _:
            payload = torch_save(trap, _use_new_zipfile_serialization=False)
    said = commit(site, client, payload + bytes(-len(payload) % 64))
    refused(said, 415, "unsupported_media", "pickle or a torch.save file", "OSF1")
    assert not trap.file.exists()
    pickle.loads(pickle.dumps(trap))  # noqa: S301 - the trap works
    assert trap.file.exists()


SIZE = make_layout(ones()).size_bytes  # of a right frame: none may be larger


def with_header(header: object, length: int | None = None) -> bytes:
    """A frame of this header, and zeros behind it; `length` is what it says of itself."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return (MAGIC + struct.pack("<I", length or len(text)) + text).ljust(SIZE, b"\0")


def moved(begin: int, end: int) -> bytes:
    """The right header, but the second tensor lies elsewhere."""
    entries = [[e.name, list(e.shape), e.begin, e.end] for e in make_layout(ones()).entries]
    entries[1][2:] = [begin, end]
    return with_header({"codec": "fp32", "tensors": entries})


HEADERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "huge": (lambda: with_header(b"{}", 2**32 - 1), "4294967295 bytes; at most"),
    "longer than the frame": (lambda: with_header(b"{}", SIZE), f"says {SIZE} bytes"),
    "not JSON": (lambda: with_header(b"{codec}"), "frame header"),
    "not UTF-8": (lambda: with_header(b'{"codec":"\xff"}'), "frame header"),
    "deep": (lambda: with_header(b"[" * 300), "nested deeper"),
    "overlapping": (lambda: moved(0, 20), "'0.bias' at [0, 20) overlaps"),
    "with a hole": (lambda: moved(128, 148), "'0.bias' at [128, 148) leaves a hole"),
    "backwards": (lambda: moved(120, 100), "'0.bias' at [120, 100)"),
    "overflow": (lambda: moved(120, 2**53), "'2.weight' at"),
    "beyond 64 bits": (lambda: moved(120, 2**70), "frame header"),
    "negative": (lambda: moved(-8, 20), "frame header"),
    "trailing bytes": (
        lambda: with_header({"codec": "fp32", "tensors": [["0.weight", [5, 6], 0, 120]]}),
        "trailing bytes: the tensors take 120 bytes",
    ),
    "a tensor twice": (
        lambda: with_header({"codec": "fp32", "tensors": [["0.weight", [5, 6], 0, 120], ["0.weight", [5, 6], 0, 120]]}),
        "'0.weight' appears twice",
    ),
}


@pytest.mark.row("B08")
@pytest.mark.parametrize(("make", "words"), HEADERS.values(), ids=HEADERS.keys())
def test_a_broken_tensor_header_is_400_naming_the_tensor(
    site: Site, client: HandClient, make: Callable[[], bytes], words: str
) -> None:
    refused(commit(site, client, make()), 400, "bad_frame", words)


def changed(**tensors: Tensor | None) -> dict[str, Tensor]:
    made = {**ones(), **{name.replace("_", "."): value for name, value in tensors.items()}}
    return {name: value for name, value in made.items() if value is not None}


TENSORS: dict[str, tuple[Callable[[], memoryview], str]] = {
    "missing": (lambda: make_frame(changed(**{"4_bias": None})), "'4.bias' is missing"),
    "extra": (lambda: make_frame({**ones(), "extra": torch.ones(64)}), "'extra' is unknown"),
    "another": (lambda: make_frame(changed(**{"4_bias": None, "b": torch.ones(1)})), "'b' is unknown"),
    "wrong shape": (lambda: make_frame(changed(**{"2_weight": torch.ones(5, 4)})), "got [5, 4], run has [4, 5]"),
    "wrong dtype": (lambda: make_frame(ones(), "bf16"), "encoded as 'bf16', run has 'fp32'"),
    "several": (
        lambda: make_frame({"x": torch.ones(2), "y": torch.ones(2)}),
        "'0.weight' is missing; '0.bias' is missing; '2.weight' is missing; and 5 more",
    ),
}


@pytest.mark.row("B09")
@pytest.mark.parametrize(("make", "words"), TENSORS.values(), ids=TENSORS.keys())
def test_other_tensors_are_422_naming_the_first_few(
    site: Site, client: HandClient, make: Callable[[], memoryview], words: str
) -> None:
    refused(commit(site, client, make()), 422, "bad_tensors", words)


@pytest.mark.row("B10")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_what_is_not_finite_is_422_naming_the_tensor(site: Site, client: HandClient, value: float) -> None:
    tensors = ones()
    tensors["2.weight"][1, 1] = value
    refused(commit(site, client, make_frame(tensors)), 422, "not_finite", "'2.weight' holds", "not applied")


@pytest.mark.row("B10")
def test_a_part_with_another_hash_is_422_and_still_missing(site: Site, client: HandClient) -> None:
    payload = make_frame(ones())
    client.offer(len(payload))
    flipped = bytearray(payload[:PART_BYTES])
    flipped[5] ^= 1
    said = site.call(part_of(client, payload, 0), flipped)
    refused(said, 422, "hash_mismatch", part_hash(flipped), part_hash(payload[:PART_BYTES]), "send this part again")
    assert 0 in client.offer(len(payload)).missing


@pytest.mark.row("B11")
def test_a_part_out_of_range_is_400_and_a_commit_without_all_parts_409(site: Site, client: HandClient) -> None:
    payload = make_frame(ones())
    count = part_count(len(payload), PART_BYTES)
    client.offer(len(payload))
    said = site.call(part_of(client, payload, 0, number=99), payload[:PART_BYTES])
    refused(said, 400, "bad_request", "part 99 is out of range", f"has {count} parts")
    for part in ("-1", "1.5", "x", str(2**60)):
        target = address_of(part_of(client, payload, 0))[1].replace("part=0", f"part={part}")
        refused(site.post(target, bytes(payload[:PART_BYTES]), method="PUT"), 400, "bad_request", "part")
    client.put(payload, 1)
    missing = [0, *range(2, count)]
    said = refused(site.call(commit_of(client, payload)), 409, "missing_parts", f"misses {count - 1} of {count} parts")
    assert str(missing[:16]) in said.text


@pytest.mark.row("B12")
@pytest.mark.parametrize("base", [-1, 1.5, "three", None, True, 10**30], ids=repr)
def test_a_round_that_is_none_is_400_with_the_current_one(site: Site, client: HandClient, base: object) -> None:
    facts = {**msgspec.to_builtins(offer_of(client, 1000)), "base_version": base}
    said = site.post("/v1/offer", json.dumps(facts).encode())
    refused(said, 400, "bad_request", "base_version", "has completed round 0")


@pytest.mark.row("B12")
@pytest.mark.parametrize("facts", [{"base_version": 7, "oldest_base": 7}, {"base_version": 0, "oldest_base": 1}])
def test_a_round_in_the_future_is_409_with_the_current_one(
    site: Site, client: HandClient, facts: dict[str, int]
) -> None:
    said = site.call(offer_of(client, len(make_frame(ones())), **facts))
    refused(said, 409, "future_round", "is at version 0", f"base_version {facts['base_version']}")


@pytest.mark.row("B12")
def test_a_round_that_has_closed_is_409_with_the_current_one(tmp_path: Path) -> None:
    elsewhere = Site(tmp_path, part_size_bytes=PART_BYTES)
    try:
        client = HandClient(elsewhere.transport())
        client.join()
        client.contribute(make_frame(ones()))
        wait_until(lambda: elsewhere.server.sync_round == 1)
        client.sequence += 1
        said = elsewhere.call(offer_of(client, len(make_frame(ones()))))
        refused(said, 409, "stale_round", "round 1 of fragment 0 closed", "it is at version 1", "rebase")
    finally:
        elsewhere.server.stop()


@pytest.mark.row("B13")
def test_who_has_not_joined_is_404_and_a_name_that_is_taken_409(site: Site, client: HandClient) -> None:
    stranger = HandClient(client.transport, "stranger")
    stranger.session.answer, stranger.sequence = client.session.answer, 1
    payload = make_frame(ones())
    for request in (offer_of(stranger, len(payload)), commit_of(stranger, payload)):
        refused(site.call(request), 404, "unknown_worker", "'stranger' has not joined", "join")
    refused(site.call(part_of(stranger, payload, 0), payload[:PART_BYTES]), 404, "unknown_worker", "'stranger'")
    elsewhere = Join(protocol=PROTOCOL_VERSION, worker_id="by-hand", instance="b" * 16, hostname="elsewhere")
    refused(site.call(elsewhere), 409, "id_in_use", "'by-hand'", "on 'test'", "--worker-id")
    assert client.offer(len(payload)).state == "send"  # the one who has it is not disturbed


def joining(**changes: Any) -> dict[str, Any]:
    facts = {"protocol": PROTOCOL_VERSION, "worker_id": "newcomer", "instance": "a" * 16, "hostname": "test"}
    return {**facts, **changes}


def other_model() -> Manifest:
    torch.manual_seed(0)
    return describe(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 8)))[1]


@pytest.mark.row("B14")
def test_another_model_tokenizer_run_or_protocol_is_refused_by_its_first_difference(
    site: Site, client: HandClient
) -> None:
    """`client` has joined: the run has its model."""
    for facts, status, code, words in (
        (joining(manifest=other_model()), 409, "manifest_mismatch", ["'2.weight': got [8, 5], run has [4, 5]"]),
        (joining(manifest=describe(tiny_model().bfloat16())[1]), 409, "manifest_mismatch", ["got bfloat16, run has"]),
        (
            joining(wishes=Wishes(tokenizer="bytes-v2")),
            409,
            "plan_mismatch",
            ["wants tokenizer=bytes-v2, but the run has tokenizer=bytes-v1 (said by the server)"],
        ),
        (joining(run_id="another"), 409, "other_run", [site.server.run_id, "another", "restart the worker"]),
        (joining(protocol=9), 426, "protocol_mismatch", ["speaks protocol 9; understood: 1-2", "update"]),
        (joining(a_field_to_come={"x": 1}), 400, "bad_request", ["unknown field `a_field_to_come`"]),
    ):
        refused(site.post("/v1/join", msgspec.json.encode(facts)), status, code, *words)
    assert "newcomer" not in site.server.status()["workers"]  # type: ignore[operator]
    said = site.post("/v1/join", msgspec.json.encode(joining(wishes=Wishes(tokenizer="bytes-v1"))))
    assert said.status == 200
    site.call(Leave(run_id=site.server.run_id, worker_id="newcomer", incarnation=said.body["incarnation"]))
