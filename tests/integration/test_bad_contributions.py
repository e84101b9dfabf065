"""What is wrong is refused by name over real HTTP, and the round it was meant for is unharmed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from outerstep.errors import (
    BadFrame,
    BadRequest,
    BadTensors,
    Conflict,
    FutureRound,
    HashMismatch,
    MissingParts,
    NotFinite,
    PlanMismatch,
    Refused,
    StaleRound,
    TooLarge,
    UnknownWorker,
    UnsupportedMedia,
)
from outerstep.server import DiLoCoServer
from outerstep.wire.http_transport import HttpTransport
from support import HandClient, assert_same, make_frame, params_of, tiny_model, wait_until

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "part_size_bytes": 128}


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, **PLAIN) as made:
        yield made


@pytest.fixture
def client(server: DiLoCoServer) -> Iterator[HandClient]:
    made = HandClient(HttpTransport(server.address))
    made.join()
    yield made
    made.transport.close()


def ones() -> dict[str, Tensor]:
    return {name: torch.ones_like(value) for name, value in params_of(tiny_model()).items()}


def check_unharmed(server: DiLoCoServer, client: HandClient) -> None:
    """A good contribution closes the round, and the model is what that one alone makes of it."""
    assert server.sync_round == 0
    assert_same(server.get_global_params(), params_of(tiny_model()))
    assert client.contribute(make_frame(ones())).version == 1
    client_sees = client.session.head
    assert client_sees["worker_id"] in server.status()["workers"]  # type: ignore[operator]
    wait_until(lambda: server.sync_round == 1)
    assert_same(server.get_global_params(), {n: v - 1.0 for n, v in params_of(tiny_model()).items()})
    assert server.status()["pool_held_bytes"] == 0


def wrong_shape() -> memoryview:
    tensors = ones()
    tensors["0.weight"] = torch.ones(6, 5)
    return make_frame(tensors)


def unknown_name() -> memoryview:
    return make_frame({("9.weight" if name == "0.weight" else name): value for name, value in ones().items()})


def missing_tensor() -> memoryview:
    tensors = ones()
    del tensors["4.bias"]
    return make_frame(tensors)


def extra_tensor() -> memoryview:
    return make_frame({**ones(), "extra": torch.ones(2)})


def not_finite(value: float) -> Callable[[], memoryview]:
    def make() -> memoryview:
        tensors = ones()
        tensors["2.weight"][1, 1] = value
        return make_frame(tensors)

    return make


def truncated() -> memoryview:
    return make_frame(ones())[:-8]


def trailing() -> memoryview:
    return memoryview(bytes(make_frame(ones())) + bytes(64))


def torch_save() -> memoryview:
    buffer = io.BytesIO()
    torch.save(ones(), buffer)
    return memoryview(buffer.getvalue())


def wrong_codec_inside() -> memoryview:
    return make_frame(ones(), "bf16")


@pytest.mark.row("B07", "B09", "B10")
@pytest.mark.parametrize(
    ("payload", "kind", "message"),
    [
        (wrong_shape, BadTensors, r"'0.weight': got \[6, 5\], run has \[5, 6\]"),
        (unknown_name, BadTensors, r"'0.weight' is missing; '9.weight' is unknown"),
        (missing_tensor, BadTensors, "'4.bias' is missing"),
        (extra_tensor, BadTensors, "'extra' is unknown"),
        (not_finite(float("nan")), NotFinite, "'2.weight' holds NaN or Inf"),
        (not_finite(float("inf")), NotFinite, "'2.weight' holds NaN or Inf"),
        (not_finite(float("-inf")), NotFinite, "'2.weight' holds NaN or Inf"),
        (truncated, BadFrame, "too few bytes"),
        (trailing, BadFrame, "trailing bytes"),
        (torch_save, UnsupportedMedia, r"pickle or a torch\.save file"),
        (wrong_codec_inside, BadTensors, "encoded as 'bf16', run has 'fp32'"),
        (lambda: memoryview(b"\x00" * 256), BadFrame, "begins with"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) and not isinstance(value, type) else "",
)
def test_a_bad_payload_is_refused_by_name(
    server: DiLoCoServer, client: HandClient, payload: Callable[[], memoryview], kind: type[Refused], message: str
) -> None:
    with pytest.raises(kind, match=message):
        client.contribute(payload())
    check_unharmed(server, client)


def test_an_over_long_contribution_is_refused_before_a_byte_is_sent(server: DiLoCoServer, client: HandClient) -> None:
    client.sequence += 1
    with pytest.raises(TooLarge, match=r"contribution of 999999999 bytes; fragment 0 as fp32 takes at most"):
        client.offer(999_999_999)
    check_unharmed(server, client)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"base_version": 5, "oldest_base": 5}, FutureRound, "is at version 0; got base_version 5"),
        ({"base_version": 0, "oldest_base": 1}, FutureRound, "oldest_base 1"),
        ({"fragment": 3}, BadRequest, "fragment 3 does not exist: the plan has 1"),
        ({"codec": "bf16"}, PlanMismatch, "encoded as 'bf16'; the run uses 'fp32'"),
        ({"incarnation": 7}, UnknownWorker, "has not joined"),
        ({"worker_id": "stranger"}, UnknownWorker, "'stranger' has not joined"),
    ],
)
def test_a_bad_offer_is_refused(
    server: DiLoCoServer, client: HandClient, changes: dict[str, object], kind: type[Refused], message: str
) -> None:
    client.sequence += 1
    with pytest.raises(kind, match=message):
        client.offer(len(make_frame(ones())), **changes)
    check_unharmed(server, client)


@pytest.mark.row("B13")
def test_an_unregistered_worker_never_moves_the_model(server: DiLoCoServer, client: HandClient) -> None:
    stranger = HandClient(HttpTransport(server.address), "stranger")
    stranger.session.answer = client.session.answer  # it knows everything but has not joined
    stranger.sequence = 1
    payload = make_frame(ones())
    for attempt in (
        lambda: stranger.offer(len(payload)),
        lambda: stranger.put(payload, 0),
        lambda: stranger.commit(payload),
    ):
        with pytest.raises(UnknownWorker):
            attempt()
    check_unharmed(server, client)


@pytest.mark.row("F21")
def test_a_flipped_byte_costs_one_part(server: DiLoCoServer, client: HandClient) -> None:
    payload = make_frame(ones())
    client.sequence += 1
    answer = client.offer(len(payload))
    assert len(answer.missing) > 2
    flipped = bytearray(payload[128:256])
    flipped[17] ^= 1
    client.put(payload, 0)
    with pytest.raises(HashMismatch, match="part 1 of"):
        client.put(payload, 1, body=memoryview(flipped))
    assert 1 in client.offer(len(payload)).missing
    assert 0 not in client.offer(len(payload)).missing
    for part in client.offer(len(payload)).missing:
        client.put(payload, part)
    assert client.commit(payload).version == 1


@pytest.mark.row("B11")
def test_a_commit_with_missing_parts_lists_them(server: DiLoCoServer, client: HandClient) -> None:
    payload = make_frame(ones())
    client.sequence += 1
    client.offer(len(payload))
    client.put(payload, 1)
    with pytest.raises(MissingParts, match=r"misses \d+ of \d+ parts: \[0, 2"):
        client.commit(payload)
    for part in client.offer(len(payload)).missing:
        client.put(payload, part)
    assert client.commit(payload).version == 1


def test_a_part_of_the_wrong_size_or_number_is_refused(server: DiLoCoServer, client: HandClient) -> None:
    payload = make_frame(ones())
    client.sequence += 1
    client.offer(len(payload))
    with pytest.raises(BadRequest, match="part 0 has 128 bytes, got 100"):
        client.put(payload, 0, body=payload[:100])
    with pytest.raises(BadRequest, match="part 99 is out of range"):
        client.put(payload, 99, body=payload[:128], hash_="0" * 16)
    client.sequence -= 1
    check_unharmed(server, client)


def test_the_same_key_with_other_bytes_is_refused(server: DiLoCoServer, client: HandClient) -> None:
    payload = make_frame(ones())
    assert client.contribute(payload).version == 1
    assert client.commit(payload).version == 1  # again: the same answer
    assert client.offer(len(payload)).state == "accepted"
    with pytest.raises(Conflict, match="was accepted with payload"):
        client.commit(make_frame({n: 2 * v for n, v in ones().items()}))
    assert server.status()["total_submissions"] == 1


@pytest.mark.row("B12")
def test_a_contribution_to_a_closed_round_is_stale(server: DiLoCoServer, client: HandClient) -> None:
    client.contribute(make_frame(ones()))
    with pytest.raises(StaleRound, match="round 1 of fragment 0 closed without this contribution; it is at version 1"):
        client.contribute(make_frame(ones()))


def test_nothing_is_refused_after_all_that_when_it_is_right(server: DiLoCoServer, client: HandClient) -> None:
    check_unharmed(server, client)
