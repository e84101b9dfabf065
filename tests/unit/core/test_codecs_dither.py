"""Stochastic rounding: on average the value itself, and the same numbers wherever they are drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amounts import cases
from outerstep.core.codecs import BF16, CONTROL_2BIT, E3M0, FP32, INT4, INT8, Codec, Dither
from outerstep.core.codecs.dither import unit

ROUNDING = [BF16, INT8, INT4, E3M0, CONTROL_2BIT]
rounding = pytest.mark.parametrize("codec", ROUNDING, ids=lambda codec: codec.name)
CPU = torch.device("cpu")


def encoded(codec: Codec, values: Tensor, dither: Dither | None) -> Tensor:
    out = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, out, dither)
    return out


def decoded(codec: Codec, values: Tensor, dither: Dither | None) -> Tensor:
    out = torch.empty(values.numel())
    codec.decode(encoded(codec, values, dither), out)
    return out


@rounding
def test_the_mean_of_many_roundings_is_the_value(codec: Codec) -> None:
    values = torch.randn(512, generator=torch.Generator().manual_seed(1)).clamp(-2, 2)
    rounds = torch.stack([decoded(codec, values, Dither(seed)) for seed in range(2000)]).double()
    spread = rounds.std(0) / 2000**0.5
    off = (rounds.mean(0) - values).abs()
    unseen = 1e-4 * values.abs()  # a value that close to a level may never have gone to the other one
    assert (off <= 6 * spread + unseen + 1e-9).all()
    if codec is not CONTROL_2BIT:  # rounding to nearest is off by far more than that
        nearest = (decoded(codec, values, None) - values).abs()
        assert off.mean() < nearest.mean() / 5


@rounding
def test_what_needs_no_rounding_is_not_changed(codec: Codec) -> None:
    exact = decoded(codec, torch.tensor([64.0, 1.0, -1.0, 32.0, 0.0, -64.0, 16.0]), None)
    for seed in range(20):
        assert torch.equal(decoded(codec, exact, Dither(seed)), exact)


@rounding
@cases(30)
@given(blocks=st.integers(0, 2), seed=st.integers(0, 2**64 - 1))
def test_a_piece_is_rounded_as_it_is_within_the_whole(codec: Codec, blocks: int, seed: int) -> None:
    border, values = blocks * codec.block_values, torch.randn(3 * codec.block_values + 5)
    whole = encoded(codec, values, Dither(seed))
    piece = encoded(codec, values[border:], Dither(seed).after(border))
    assert torch.equal(piece, whole[codec.encoded_bytes(border) :])


@pytest.mark.parametrize("codec", [INT8, INT4, E3M0, CONTROL_2BIT], ids=lambda codec: codec.name)
def test_the_largest_magnitudes_do_not_wrap_around(codec: Codec) -> None:
    values = torch.linspace(0.9, 1.1, 256).repeat_interleave(2)
    values[1::2] *= -1
    for scale in (1.0, 3e38):
        scaled = (values * scale).clamp(-3.4e38, 3.4e38)
        for seed in range(50):
            back = decoded(codec, scaled, Dither(seed))
            assert back.isfinite().all()
            assert (back * scaled.sign() >= 0).all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, -0x007FFFFF, 0x7F800000, -0x00800000])
def test_nan_and_infinity_survive_in_bf16(bits: int) -> None:
    value = torch.tensor([bits] * 64, dtype=torch.int32).view(torch.float32)
    for seed in range(20):
        back = decoded(BF16, value, Dither(seed))
        assert torch.equal(back.isnan(), value.isnan())
        assert torch.equal(back.isinf(), value.isinf())


@rounding
def test_a_block_that_is_not_finite_stays_so(codec: Codec) -> None:
    assert not decoded(codec, torch.tensor([1.0, float("inf"), 2.0]), Dither(1)).isfinite().all()


def test_fp32_has_nothing_to_round() -> None:
    values = torch.randn(100)
    assert torch.equal(decoded(FP32, values, Dither(1)), values)


def test_every_run_fragment_version_and_tensor_has_its_own_numbers() -> None:
    keys = [("a", 0, 1, "w"), ("b", 0, 1, "w"), ("a", 1, 1, "w"), ("a", 0, 2, "w"), ("a", 0, 1, "v"), ("a", 0, 11, "w")]
    drawn = [tuple(Dither.of(*key).bits(8, CPU).tolist()) for key in keys]
    assert len(set(drawn)) == len(keys)
    assert Dither.of(*keys[0]) == Dither.of(*keys[0])


def test_the_numbers_are_known() -> None:
    """Written down once: a change of the hash would be a change of the format."""
    assert Dither(0).bits(4, CPU).tolist() == [57418, 30911, 30163, 60201]
    assert Dither(2**64 - 1, first=2**24 - 2).bits(4, CPU).tolist() == [9583, 6008, 52378, 5516]


def test_numbers_run_on_across_the_border_of_two_keys() -> None:
    far = Dither(3, first=2**24 - 5)
    assert torch.equal(far.bits(10, CPU)[5:], far.after(5).bits(5, CPU))
    assert torch.equal(far.bits(10, CPU)[:5], far.bits(5, CPU))


def test_the_numbers_look_uniform_and_independent() -> None:
    count = 1 << 18
    noise = Dither.of("run", 0, 5, "w").bits(count, CPU)
    assert noise.min() >= 0
    assert noise.max() < 1 << 16
    for bits in (noise >> 8, noise & 0xFF):  # 255 degrees of freedom: mean 255, deviation 22.6
        expected = count / 256
        assert ((bits.bincount(minlength=256) - expected) ** 2 / expected).sum() < 255 + 6 * 22.6
    u = unit(noise).double() - 0.5
    others = [u.roll(1), u.roll(2), u.roll(256), u.roll(4096)]
    others += [unit(Dither.of("run", 0, 6, "w").bits(count, CPU)).double() - 0.5]
    for other in others:
        assert abs(float((u * other).mean() * 12)) < 6 / count**0.5


def test_unit_numbers_stay_inside() -> None:
    u = unit(torch.tensor([0, 0xFFFF], dtype=torch.int32))
    assert u.tolist() == [2.0**-17, 1 - 2.0**-17]
    assert (torch.tensor([127.0, -128.0, 0.0]) + u[1] < torch.tensor([128.0, -127.0, 1.0])).all()


class TestTheNumbersAreTheSameInEveryRelease:
    """They are part of what is sent: two ends that draw others round differently."""

    def test_of_a_tensor(self) -> None:
        assert Dither.of("run", 1, 2, "w").seed == 1584933200360370301
        assert Dither.of("run", 12, 0, "w") != Dither.of("run", 1, 20, "w")

    def test_of_its_positions(self) -> None:
        assert Dither(5).bits(4, CPU).tolist() == [9940, 39848, 61599, 611]
        assert Dither(5, (1 << 24) - 2).bits(4, CPU).tolist() == [5732, 50278, 61849, 48501]  # under two keys

    def test_they_are_made_where_they_are_asked_for(self) -> None:
        drawn = Dither(5).bits(4, torch.device("meta"))
        assert (drawn.device.type, drawn.dtype) == ("meta", torch.int32)
