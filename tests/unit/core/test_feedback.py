"""Error feedback: nothing is lost and nothing is sent twice, whatever becomes of an exchange."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outerstep.core.codecs import CODECS, FP32, INT4, INT8, SPARSE64, Codec, Dither
from outerstep.core.feedback import ErrorFeedback, Pending, compensate
from outerstep.errors import ConfigError

SHAPES = {"a": (5,), "b": (2, 3)}


@dataclass(frozen=True)
class Eights:
    """Sends multiples of eight, so that all arithmetic is on integers and every sum is exact."""

    name: str = "eights"
    block_values: int = 1
    needs_feedback: bool = False

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, out: Tensor, dither: Dither | None = None) -> None:
        out.view(torch.int32).copy_((values / 8).round())

    def check(self, data: Tensor, numel: int) -> str:
        return ""

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.int32)).mul_(8)

    def decode_add(self, data: Tensor, out: Tensor, weight: float = 1.0) -> None:
        out.add_(data.view(torch.int32) * 8 * weight)


def decoded(codec: Codec, encoded: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    found = {}
    for name, data in encoded.items():
        found[name] = torch.empty(shapes[name])
        codec.decode(data, found[name].view(-1))
    return found


class Book:
    """One worker's account, parameter by parameter: applied + e + unsent = all local steps."""

    def __init__(self, codec: Codec, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        self.codec, self.shapes = codec, shapes
        self.feedback = ErrorFeedback(codec, decay=1.0)
        self.steps, self.applied, self.unsent = ({n: torch.zeros(s) for n, s in shapes.items()} for _ in range(3))
        self.lost = {n: torch.zeros(s) for n, s in shapes.items()}

    def step(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        for name, shape in self.shapes.items():
            move = torch.randint(-30, 31, shape, generator=source).float()
            self.steps[name] += move
            self.unsent[name] += move

    def begin(self, *names: str) -> tuple[dict[str, Tensor], Pending]:
        return self.feedback.begin({name: self.unsent[name].clone() for name in names})

    def counted(self, encoded: dict[str, Tensor], pending: Pending) -> None:
        self.feedback.commit(pending)
        for name, values in decoded(self.codec, encoded, self.shapes).items():
            self.applied[name] += values
            self.unsent[name] -= pending.deltas[name]  # the steps taken since stay in the local weights

    def failed(self, pending: Pending, discard_local: bool) -> None:
        self.feedback.rollback(pending, discard_local=discard_local)
        if discard_local:
            for name, delta in pending.deltas.items():
                self.lost[name] += self.unsent[name] - delta  # taken after Δ was, and in nobody's hands
                self.unsent[name].zero_()

    def save_and_load(self) -> None:
        state = {name: e.clone() for name, e in self.feedback.state_dict().items()}
        self.feedback = ErrorFeedback(self.codec, decay=1.0)
        self.feedback.load_state_dict(state)

    def difference(self, name: str) -> Tensor:
        e = self.feedback.residual(name)
        held = torch.zeros(self.shapes[name]) if e is None else e
        return self.applied[name] + held + self.unsent[name] + self.lost[name] - self.steps[name]


actions = st.lists(
    st.tuples(
        st.sampled_from(["step", "counted", "failed", "discarded", "restart"]),
        st.sampled_from([("a",), ("b",), ("a", "b")]),
        st.integers(0, 2),  # steps while the exchange is under way
        st.integers(0, 2**31),
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(actions=actions)
def test_every_step_is_applied_kept_or_unsent_exactly_once(
    actions: list[tuple[str, tuple[str, ...], int, int]],
) -> None:
    book = Book(Eights())
    for action, names, in_flight, seed in actions:
        if action == "step":
            book.step(seed)
        elif action == "restart":
            book.save_and_load()
        else:
            encoded, pending = book.begin(*names)
            for i in range(in_flight):
                book.step(seed + i + 1)
            if action == "counted":
                book.counted(encoded, pending)
            else:
                book.failed(pending, discard_local=action == "discarded")
        for name in SHAPES:
            assert (book.difference(name) == 0).all(), (action, name)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_it_holds_with_every_codec_to_rounding(codec: Codec) -> None:
    book = Book(codec, {"w": (5000,), "b": (3,), "none": (0,), "scalar": ()})
    for i in range(12):
        book.step(i)
        encoded, pending = book.begin(*book.shapes)
        if i % 4 == 1:
            book.failed(pending, discard_local=False)
        elif i % 4 == 3:
            book.failed(pending, discard_local=True)
        else:
            book.counted(encoded, pending)
    for name in book.shapes:
        assert (book.difference(name).abs() < 1e-2).all()
    assert (book.applied["w"] != 0).any()


def test_what_is_sent_is_the_delta_and_what_was_left_out_before() -> None:
    feedback = ErrorFeedback(Eights())
    encoded, pending = feedback.begin({"w": torch.tensor([3.0, 13.0])})
    assert decoded(Eights(), encoded, {"w": (2,)})["w"].tolist() == [0.0, 16.0]
    feedback.commit(pending)
    assert feedback.residual("w") is not None
    encoded, pending = feedback.begin({"w": torch.tensor([3.0, 0.0])})  # 3 + 3, 0 − 3
    assert decoded(Eights(), encoded, {"w": (2,)})["w"].tolist() == [8.0, 0.0]
    feedback.commit(pending)
    assert feedback.state_dict()["w"].tolist() == [-2.0, -3.0]


def test_a_failed_exchange_leaves_e_as_it_was_bit_by_bit() -> None:
    feedback = ErrorFeedback(INT4)
    feedback.commit(feedback.begin({"w": torch.randn(300)})[1])
    before = feedback.state_dict()["w"].clone()
    feedback.rollback(feedback.begin({"w": torch.randn(300)})[1], discard_local=False)
    assert torch.equal(feedback.state_dict()["w"], before)
    first = ErrorFeedback(INT4)
    first.rollback(first.begin({"w": torch.randn(300)})[1], discard_local=False)
    assert first.residual("w") is None


def test_thrown_away_work_lives_on_in_e_undecayed() -> None:
    feedback = ErrorFeedback(Eights(), decay=0.5)
    feedback.load_state_dict({"w": torch.tensor([2.0])})
    feedback.rollback(feedback.begin({"w": torch.tensor([20.0])})[1], discard_local=True)
    assert feedback.state_dict()["w"].tolist() == [22.0]


def test_decay_lets_the_old_fade() -> None:
    assert compensate(torch.tensor([8.0]), torch.tensor([1.0]), 0.5).tolist() == [5.0]
    assert ErrorFeedback(SPARSE64).decay == 0.95
    assert ErrorFeedback(INT8).decay == 1.0
    assert ErrorFeedback(SPARSE64, decay=1.0).decay == 1.0


def test_a_sparse_codec_gets_everything_across_in_time() -> None:
    """A constant delta: what is applied becomes the delta itself, though a round carries 64 of 4096 values."""
    delta = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    feedback, applied = ErrorFeedback(SPARSE64, decay=1.0), torch.zeros(4096)
    rounds = 600
    for _ in range(rounds):
        encoded, pending = feedback.begin({"w": delta})
        SPARSE64.decode_add(encoded["w"], applied)
        feedback.commit(pending)
    assert (applied / rounds - delta).norm() < 0.25 * delta.norm()
    alone = torch.zeros(4096)
    SPARSE64.decode_add(encode_alone(delta), alone)
    assert (alone - delta).norm() > 0.9 * delta.norm()  # without feedback most of it never arrives


def encode_alone(delta: Tensor) -> Tensor:
    data = torch.empty(SPARSE64.encoded_bytes(delta.numel()), dtype=torch.uint8)
    SPARSE64.encode(delta, data)
    return data


def test_a_delta_that_is_not_finite_does_no_lasting_harm() -> None:
    feedback = ErrorFeedback(INT4)
    feedback.commit(feedback.begin({"w": torch.ones(10)})[1])
    before = feedback.state_dict()["w"].clone()
    encoded, pending = feedback.begin({"w": torch.full((10,), float("nan"))})
    assert decoded(INT4, encoded, {"w": (10,)})["w"].isnan().all()  # the server will refuse it
    feedback.rollback(pending, discard_local=False)
    assert torch.equal(feedback.state_dict()["w"], before)


def test_the_callers_tensors_are_not_changed() -> None:
    delta = torch.randn(6, 4).t()  # not contiguous
    kept = delta.clone()
    feedback = ErrorFeedback(FP32)
    encoded, pending = feedback.begin({"w": delta})
    feedback.commit(pending)
    assert torch.equal(delta, kept)
    assert torch.equal(decoded(FP32, encoded, {"w": (4, 6)})["w"], kept)
    assert not feedback.state_dict()["w"].any()


def test_fragments_are_under_way_side_by_side() -> None:
    feedback = ErrorFeedback(Eights())
    _, first = feedback.begin({"a": torch.tensor([3.0])})
    _, second = feedback.begin({"b": torch.tensor([5.0])})
    feedback.commit(second)
    feedback.commit(first)
    assert {name: e.tolist() for name, e in feedback.state_dict().items()} == {"a": [3.0], "b": [-3.0]}


def test_a_parameter_is_in_one_exchange_at_a_time_and_that_ends_once() -> None:
    feedback = ErrorFeedback(Eights())
    _, pending = feedback.begin({"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(ConfigError, match="'b' is in an exchange already"):
        feedback.begin({"b": torch.ones(1)})
    with pytest.raises(ConfigError, match="before loading a state"):
        feedback.load_state_dict({})
    feedback.commit(pending)
    feedback.begin({"a": torch.ones(1), "b": torch.ones(1)})
    for settle in (feedback.commit, lambda old: feedback.rollback(old, discard_local=True)):
        with pytest.raises(ConfigError, match="once"):
            settle(pending)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\]"):
        ErrorFeedback(INT8, decay=decay)


def test_a_state_of_another_shape_is_refused_by_name() -> None:
    feedback = ErrorFeedback(INT8)
    feedback.load_state_dict({"w": torch.zeros(2, 3)})
    with pytest.raises(ConfigError, match=r"'w' has shape \[3\], its error feedback \[2, 3\]"):
        feedback.begin({"w": torch.zeros(3)})


def test_a_loaded_state_is_a_copy() -> None:
    state = {"w": torch.ones(3)}
    feedback = ErrorFeedback(INT8)
    feedback.load_state_dict(state)
    state["w"].zero_()
    assert feedback.state_dict()["w"].tolist() == [1.0, 1.0, 1.0]
