"""Error feedback: nothing is lost and nothing is sent twice, whatever becomes of a contribution."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amounts import cases
from outerstep.core.codecs import CODECS, FP32, INT4, INT8, SPARSE64, Codec
from outerstep.core.feedback import ErrorFeedback, compensate, decay_of, send
from outerstep.errors import ConfigError
from support import Eights

SHAPES = {"a": (5,), "b": (2, 3)}
FRAGMENTS = {0: ("a",), 1: ("b",)}
CPU = torch.device("cpu")


def pieces(numel: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


class Book:
    """One worker's account, tensor by tensor: applied + e + unsent = all local steps."""

    def __init__(
        self,
        codec: Codec,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        fragments: dict[int, tuple[str, ...]] = FRAGMENTS,
        block: int = 4096,
    ) -> None:
        self.codec, self.shapes, self.fragments, self.block = codec, shapes, fragments, block
        self.keeps = True
        self.feedback = ErrorFeedback()
        self.steps, self.applied, self.unsent = ({n: torch.zeros(s) for n, s in shapes.items()} for _ in range(3))
        self.sequence = dict.fromkeys(fragments, 0)
        self.sent: dict[int, dict[str, Tensor]] = {}

    def step(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        for name, shape in self.shapes.items():
            move = torch.randint(-30, 31, shape, generator=source).float()
            self.steps[name] += move
            self.unsent[name] += move

    def begin(self, fragment: int) -> dict[str, Tensor]:
        """What the server decodes."""
        self.sequence[fragment] += 1
        self.feedback.begin(fragment, self.sequence[fragment])
        self.sent[fragment] = {name: self.unsent[name].clone() for name in self.fragments[fragment]}
        arrived = {}
        for name, delta in self.sent[fragment].items():
            flat, numel = delta.view(-1), delta.numel()
            data = torch.empty(self.codec.encoded_bytes(numel), dtype=torch.uint8)
            for start, stop in pieces(numel, self.block):
                out = data[self.codec.encoded_bytes(start) : self.codec.encoded_bytes(stop)]
                block = flat[start:stop]
                if self.keeps or self.feedback.owes(name):
                    self.feedback.encode(
                        fragment, name, start, block, self.codec, out, numel=numel, home=CPU, keeps=self.keeps
                    )
                else:
                    self.codec.encode(block, out)
            arrived[name] = torch.empty(delta.shape)
            self.codec.decode(data, arrived[name].view(-1))
        return arrived

    def count(self, fragment: int, arrived: dict[str, Tensor]) -> None:
        """The server accepts it."""
        for name, values in arrived.items():
            self.applied[name] += values

    def settle(self, fragment: int, *, counted: bool) -> None:
        """The worker hears of it."""
        self.feedback.settle(fragment, self.sequence[fragment], counted=counted)
        for name, delta in self.sent.pop(fragment).items():
            if counted:
                self.unsent[name] -= delta  # the steps taken since stay in the local weights

    def restart(self) -> None:
        """The process is started anew with its last state: its local weights, and what is under way."""
        state = saved(self.feedback.state_dict(self.sent))
        self.feedback = ErrorFeedback()
        self.feedback.load_state_dict(state)

    def difference(self, name: str) -> Tensor:
        e = self.feedback.residual(name)
        held = torch.zeros(self.shapes[name]) if e is None else e.view(self.shapes[name])
        return self.applied[name] + held + self.unsent[name] - self.steps[name]


def saved(state: Any) -> Any:
    """As it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


actions = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "step",
                "counted",
                "missed",
                "begun",
                "counted and restarted",
                "missed and restarted",
                "restarted",
                "codec",
            ]
        ),
        st.integers(0, 1),
        st.integers(0, 2),  # steps while it is under way
        st.integers(0, 2**31),
    ),
    max_size=25,
)


@cases(200)
@given(actions=actions)
def test_every_step_is_applied_kept_or_unsent_exactly_once(actions: list[tuple[str, int, int, int]]) -> None:
    book = Book(Eights(), block=2)
    for action, fragment, in_flight, seed in actions:
        if action == "step":
            book.step(seed)
        elif action == "restarted":
            book.restart()
        elif action == "codec":  # from one that leaves something out to one that does not, and back
            book.codec, book.keeps = (FP32, False) if book.keeps else (Eights(), True)
        else:
            arrived = book.begin(fragment)  # of one that was never settled: it did not count
            for i in range(in_flight):
                book.step(seed + i + 1)
            if action.startswith("counted"):
                book.count(fragment, arrived)
            if action.endswith("restarted"):
                book.restart()
            if action != "begun":
                book.settle(fragment, counted=action.startswith("counted"))
        for name in SHAPES:
            # (While it is pending e is the old one, and the steps are in the local weights.)
            assert (book.difference(name) == 0).all(), (action, name)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_it_holds_with_every_codec_to_rounding(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outerstep.core.feedback.SPARSE_DECAY", 1.0)
    book = Book(codec, {"w": (5000,), "b": (3,), "none": (0,), "scalar": ()}, {0: ("w", "b", "none", "scalar")})
    for i in range(12):
        book.step(i)
        arrived = book.begin(0)
        if i % 4 != 1:
            book.count(0, arrived)
        if i % 4 == 3:
            book.restart()
        book.settle(0, counted=i % 4 != 1)
    for name in book.shapes:
        assert (book.difference(name).abs() < 1e-2).all()
    assert (book.applied["w"] != 0).any()


def test_blocks_make_no_difference() -> None:
    """Whole blocks of the codec, whatever their number."""
    found = []
    for block in (4096, 8192, 1 << 20):
        book = Book(SPARSE64, {"w": (20_000,)}, {0: ("w",)}, block=block)
        for i in range(3):
            book.step(i)
            book.count(0, book.begin(0))
            book.settle(0, counted=True)
        found.append((book.applied["w"], book.feedback.residual("w")))
    for applied, e in found[1:]:
        assert torch.equal(applied, found[0][0])
        assert e is not None
        assert found[0][1] is not None
        assert torch.equal(e, found[0][1])


def contribute(feedback: ErrorFeedback, codec: Codec, delta: Tensor, sequence: int, *, counted: bool) -> Tensor:
    feedback.begin(0, sequence)
    out = torch.empty(codec.encoded_bytes(delta.numel()), dtype=torch.uint8)
    feedback.encode(0, "w", 0, delta, codec, out, numel=delta.numel(), home=CPU)
    feedback.settle(0, sequence, counted=counted)
    decoded = torch.empty_like(delta)
    codec.decode(out, decoded)
    return decoded


def residual(feedback: ErrorFeedback) -> list[float]:
    e = feedback.residual("w")
    assert e is not None
    return e.tolist()


def test_what_is_sent_is_the_delta_and_what_was_left_out_before() -> None:
    feedback = ErrorFeedback()
    assert contribute(feedback, Eights(), torch.tensor([3.0, 13.0]), 1, counted=True).tolist() == [0.0, 16.0]
    assert residual(feedback) == [3.0, -3.0]
    assert contribute(feedback, Eights(), torch.tensor([3.0, 0.0]), 2, counted=True).tolist() == [8.0, 0.0]
    assert residual(feedback) == [-2.0, -3.0]


def test_one_that_did_not_count_leaves_e_as_it_was_bit_by_bit() -> None:
    feedback = ErrorFeedback()
    contribute(feedback, INT4, torch.randn(300), 1, counted=True)
    before = residual(feedback)
    contribute(feedback, INT4, torch.randn(300), 2, counted=False)
    assert residual(feedback) == before
    first = ErrorFeedback()
    contribute(first, INT4, torch.randn(300), 1, counted=False)
    assert first.residual("w") is None


def test_an_outcome_is_heard_once_and_of_the_right_one() -> None:
    feedback = ErrorFeedback()
    contribute(feedback, Eights(), torch.tensor([3.0]), 1, counted=True)
    feedback.settle(0, 1, counted=True)  # again
    feedback.begin(0, 2)
    feedback.encode(0, "w", 0, torch.tensor([2.0]), Eights(), torch.empty(4, dtype=torch.uint8), numel=1, home=CPU)
    feedback.settle(0, 1, counted=True)  # and late, while another is under way
    assert residual(feedback) == [3.0]
    feedback.settle(0, 2, counted=True)
    assert residual(feedback) == [-3.0]


def test_what_others_have_sent_is_not_owed_any_more() -> None:
    feedback = ErrorFeedback()
    pending = {"sequence": 3, "left_over": {"w": torch.tensor([7.0])}}
    residuals = {"w": torch.tensor([2.0]), "other": torch.tensor([1.0])}
    feedback.load_state_dict({"residuals": residuals, "pending": {"0": pending}})
    feedback.forget(0, ["w"])
    feedback.settle(0, 3, counted=True)
    assert feedback.residual("w") is None
    assert feedback.residual("other") is not None


def test_decay_lets_the_old_fade() -> None:
    out = torch.empty(1)
    compensate(torch.tensor([8.0]), torch.tensor([1.0]), 0.5, out)
    assert out.tolist() == [5.0]
    compensate(None, torch.tensor([1.0]), 0.5, out)
    assert out.tolist() == [1.0]
    assert decay_of(SPARSE64) == 0.95
    assert decay_of(INT8) == 1.0


def test_a_sparse_codec_gets_everything_across_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant delta: what is applied becomes the delta itself, though a round carries 64 of 4096 values."""
    monkeypatch.setattr("outerstep.core.feedback.SPARSE_DECAY", 1.0)
    delta = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    feedback, applied = ErrorFeedback(), torch.zeros(4096)
    rounds = 600
    for i in range(rounds):
        applied += contribute(feedback, SPARSE64, delta, i + 1, counted=True)
    assert (applied / rounds - delta).norm() < 0.25 * delta.norm()
    alone, data = delta.clone(), torch.empty(SPARSE64.encoded_bytes(4096), dtype=torch.uint8)
    send(SPARSE64, alone, data)
    assert alone.norm() > 0.9 * delta.norm()  # without feedback most of it never arrives


def test_a_delta_that_is_not_finite_does_no_lasting_harm() -> None:
    feedback = ErrorFeedback()
    contribute(feedback, INT4, torch.ones(10), 1, counted=True)
    before = residual(feedback)
    decoded = contribute(feedback, INT4, torch.full((10,), float("nan")), 2, counted=False)
    assert decoded.isnan().all()  # the server refuses it
    assert residual(feedback) == before


def test_the_callers_tensors_are_not_changed() -> None:
    delta = torch.randn(24)
    kept = delta.clone()
    feedback = ErrorFeedback()
    assert torch.equal(contribute(feedback, FP32, delta, 1, counted=True), kept)
    assert torch.equal(delta, kept)
    assert not any(residual(feedback))


def test_memory_of_an_old_e_is_used_again_and_never_shared() -> None:
    feedback, seen = ErrorFeedback(), set()
    for i in range(8):
        contribute(feedback, INT4, torch.randn(300), i + 1, counted=i % 3 != 2)
        e = feedback.residual("w")
        assert e is not None
        seen.add(e.data_ptr())
        before = e.clone()
        feedback.begin(0, 100 + i)
        out = torch.empty(INT4.encoded_bytes(300), dtype=torch.uint8)
        feedback.encode(0, "w", 0, torch.randn(300), INT4, out, numel=300, home=CPU)
        assert torch.equal(e, before)
    assert len(seen) == 2


def test_a_state_of_another_size_is_refused_by_name() -> None:
    feedback = ErrorFeedback()
    feedback.load_state_dict({"residuals": {"w": torch.zeros(2, 3)}, "pending": {}})
    with pytest.raises(ConfigError, match=r"'w' has 3 values here, its error feedback 6"):
        contribute(feedback, INT8, torch.zeros(3), 1, counted=True)


def test_a_loaded_state_is_a_copy_and_what_no_flight_holds_is_not_pending() -> None:
    state = {"residuals": {"w": torch.ones(3)}, "pending": {}}
    feedback = ErrorFeedback()
    feedback.load_state_dict(state)
    state["residuals"]["w"].zero_()
    assert residual(feedback) == [1.0, 1.0, 1.0]
    feedback.begin(0, 1)
    assert feedback.state_dict({})["pending"] == {}


class TestMemoryIsWhereItIsAskedFor:
    ELSEWHERE = torch.device("meta")

    def test_room_for_a_residual_is_made_at_home(self) -> None:
        feedback = ErrorFeedback()
        assert feedback._room("a", 5, self.ELSEWHERE).device == self.ELSEWHERE
        assert feedback._room("a", 5, CPU).device == CPU

    def test_a_residual_follows_its_home(self) -> None:
        feedback = ErrorFeedback()
        feedback.load_state_dict({"residuals": {"a": torch.ones(5)}, "pending": {}})
        feedback._room("a", 5, CPU)
        residual = feedback.residual("a")
        assert residual is not None
        assert residual.tolist() == [1.0] * 5
        feedback._room("a", 5, self.ELSEWHERE)
        residual = feedback.residual("a")
        assert residual is not None
        assert residual.device == self.ELSEWHERE

    def test_memory_that_does_not_fit_is_not_reused(self) -> None:
        book = Book(INT4)
        book.step(0)
        book.begin(0)
        book.feedback.settle(0, None, counted=False)  # its memory is spare now
        assert book.feedback._room("a", 7, CPU).numel() == 7


def test_a_fragment_without_residuals_can_be_forgotten() -> None:
    feedback = ErrorFeedback()
    feedback.forget(3, ["a", "b"])
    assert feedback.residual("a") is None
