"""The codecs' compiled loops give the bits of the torch expressions: as numba compiles them, where it is installed, and
as Python runs them, so that their logic is tested everywhere."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outerstep.core.codecs import E3M0, INT4, INT8, Codec, SparseCodec, compiled, get_codec, kernels
from outerstep.core.codecs.scaled import ScaledCodec

NAMES = ["int8", "int4", "e3m0", "sparse1", "sparse63", "sparse64", "sparse512"]
every_codec = pytest.mark.parametrize("name", NAMES)
every_size = pytest.mark.parametrize("numel", [0, 1, 2, 3, 255, 257, 4095, 4096, 4096 + 256 + 7])


@pytest.fixture(params=["interpreted", "compiled"])
def fast(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The kernels in one form or the other."""
    if request.param == "compiled":
        pytest.importorskip("numba", reason="not installed here")
        yield compiled.all_kernels()
    else:
        with np.errstate(all="ignore"):  # Python warns of an overflow that the loops mean
            yield kernels


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """use(kernels): let the codecs work with these; None: in torch."""
    return lambda made: monkeypatch.setattr(compiled, "all_kernels", lambda: made)


def values_of(numel: int) -> Tensor:
    """Every kind of number that a codec has to treat by itself."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
    x[: numel // 16] = 0.0
    x[numel // 16 : numel // 8] = -0.0
    x[numel // 8 : numel // 4] *= 1e-38  # some are subnormal
    x[numel // 4 : numel // 3] = 0.25  # equal magnitudes
    x[numel // 3 : numel // 2] = x[numel // 3 : numel // 2].abs().neg()
    x[numel // 2 : numel // 2 + 40] = torch.arange(40).sub(20)[: len(x[numel // 2 : numel // 2 + 40])] * 0.5  # ties
    return x


def encoded(codec: Codec, values: Tensor) -> Tensor:
    out = torch.full((codec.encoded_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values, out)
    return out


def added(codec: Codec, data: Tensor, onto: Tensor, weight: float) -> Tensor:
    total = onto.clone()
    codec.decode_add(data, total, weight)
    return total


def decoded(codec: Codec, data: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), 7.0)
    codec.decode(data, out)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@every_codec
@every_size
def test_the_bytes_are_those_of_torch(name: str, numel: int, fast: Any, use: Any) -> None:
    codec, values = get_codec(name), values_of(numel)
    use(None)
    expected = encoded(codec, values)
    use(fast)
    assert torch.equal(encoded(codec, values), expected)


@every_codec
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1.0, 1e30, 3.4e38])
def test_the_bytes_are_those_of_torch_at_every_magnitude(name: str, size: float, fast: Any, use: Any) -> None:
    codec = get_codec(name)
    values = torch.rand(4096 + 77, generator=torch.Generator().manual_seed(5)).mul_(2.0).sub_(1.0) * size
    use(None)
    expected = encoded(codec, values)
    use(fast)
    assert torch.equal(encoded(codec, values), expected)


@every_codec
@every_size
@pytest.mark.parametrize("weight", [1.0, -1.0, 0.3])
def test_the_values_are_those_of_torch(name: str, numel: int, weight: float, fast: Any, use: Any) -> None:
    codec, values = get_codec(name), values_of(numel)
    use(None)
    data = encoded(codec, values)
    read, total = decoded(codec, data, numel), added(codec, data, values, weight)
    use(fast)
    assert same_bits(decoded(codec, data, numel), read)
    assert same_bits(added(codec, data, values, weight), total)


@pytest.mark.parametrize("codec", [INT8, INT4, E3M0], ids=lambda codec: codec.name)
def test_any_bytes_have_the_values_that_torch_reads(codec: ScaledCodec, fast: Any, use: Any) -> None:
    numel = 4096 + 300
    data = torch.randint(0, 256, (codec.encoded_bytes(numel),), generator=torch.Generator().manual_seed(1))
    data = data.to(torch.uint8)
    use(None)
    expected = decoded(codec, data, numel)
    use(fast)
    read = decoded(codec, data, numel)
    assert torch.equal(read.isnan(), expected.isnan())
    assert same_bits(read.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 4096 + 20])  # in a whole block, in the incomplete one at the end
def test_what_is_not_finite_stays_so(name: str, bad: float, at: int, fast: Any, use: Any) -> None:
    codec, values = get_codec(name), values_of(4096 + 100)
    use(None)
    clean = decoded(codec, encoded(codec, values), len(values))
    use(fast)
    values[at] = bad
    read = decoded(codec, encoded(codec, values), len(values))
    block = torch.arange(len(values)) // codec.block_values == at // codec.block_values
    sent = block & (read != 0.0)
    assert bool(sent.any())
    assert bool(read[sent].isnan().all())
    assert same_bits(read[~block], clean[~block])


@pytest.mark.parametrize("k", [2, 64])
@pytest.mark.parametrize("numel", [100, 4096, 2 * 4096 + 100])
def test_indices_that_do_not_ascend_or_reach_beyond_the_end_are_found(k: int, numel: int, fast: Any, use: Any) -> None:
    codec = SparseCodec(k)
    use(fast)
    data = encoded(codec, values_of(numel))
    assert codec.check(data, numel) == ""
    first = codec.encoded_bytes((numel - 1) // 4096 * 4096) + 8  # of the indices in the last chunk
    for change in (0xFF, 0x00):
        wrong = data.clone()
        wrong[first : first + 3 * k // 2] = change
        use(None)
        slow = codec.check(wrong, numel)
        use(fast)
        assert "must ascend" in slow
        assert "must ascend" in codec.check(wrong, numel)


def test_a_wrong_index_is_dropped_where_nobody_checked(fast: Any, use: Any) -> None:
    codec = get_codec("sparse2")
    use(fast)
    data = encoded(codec, values_of(100))
    data[8:11] = 0xFF
    assert bool(decoded(codec, data, 100).eq(0.0).all())


def test_tensors_in_other_places_and_orders_go_to_torch(use: Any) -> None:
    use(SimpleNamespace())  # it has no kernel: to ask for one is an error
    values = torch.randn(600)[::2]
    out = torch.empty(INT4.encoded_bytes(300), dtype=torch.uint8)
    assert compiled.kernels_for(values, out) is None
    assert compiled.kernels_for(torch.empty(3, device="meta")) is None


def test_without_numba_codecs_work_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compiled.all_kernels.__wrapped__() is None


def test_numba_that_cannot_be_loaded_is_reported_once_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.4 or less")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.warns(RuntimeWarning, match=r"numba cannot be used.*NumPy 2\.4 or less"):
        assert compiled.all_kernels.__wrapped__() is None


def test_a_folder_that_cannot_be_written_to_only_costs_the_kept_copy() -> None:
    asked: list[bool] = []

    def njit(signature: str, *, cache: bool = False, **options: Any) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    numba = SimpleNamespace(njit=njit, extending=SimpleNamespace(register_jitable=lambda function: function))
    assert compiled.CompiledKernels(numba).decode_scaled is kernels.decode_scaled
    assert asked == [True, False]
