"""torch.save's bytes described without unpickling: everything torch writes for dense tensors, and nothing else."""

from __future__ import annotations

import builtins
import io
import os
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amounts import cases
from outerstep.compat.archive import describe
from outerstep.compat.tensors import Expected, read_tensors, write_tensors
from outerstep.errors import BadTensors, NotFinite, Refused, TooLarge, UnsupportedMedia

MANY = 64


def saved(value: object, **how: object) -> memoryview:
    sink = io.BytesIO()
    torch.save(value, sink, **how)  # type: ignore[arg-type]
    return memoryview(bytearray(sink.getvalue()))


def read(data: memoryview, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    needed = {name: tuple(tensor.shape) for name, tensor in like.items()}
    return read_all(data, Expected(needed, frozenset(), "the run's model"))


def read_all(data: memoryview, expected: Expected) -> dict[str, Tensor]:
    return read_tensors(data, describe(data, max_tensors=MANY), expected)


def rewritten(data: memoryview, change: Callable[[dict[str, bytes]], None], method: int = 0) -> memoryview:
    """The same archive with other records, written by Python's zipfile."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    change(records)
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return memoryview(bytearray(sink.getvalue()))


def with_pickle(pickle: bytes) -> memoryview:
    return rewritten(saved({"a": torch.ones(4)}), lambda records: records.update({"archive/data.pkl": pickle}))


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@cases(100)
@given(st.dictionaries(st.text(min_size=1, max_size=40), st.tuples(shapes, dtypes), max_size=8), st.booleans())
def test_what_torch_saves_is_read_bit_for_bit(
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]], ordered: bool
) -> None:
    try:
        [name.encode() for name in kinds]
    except UnicodeEncodeError:
        return  # half a character: no name of anything
    tensors = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in kinds.items()}
    got = read(saved(OrderedDict(tensors) if ordered else tensors), tensors)
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


def test_views_parameters_and_shared_storages_are_read_as_they_are() -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors = {
        "transposed": whole.T,
        "part": whole[1:3, 2:5],
        "expanded": torch.ones(1).expand(3, 3),
        "parameter": nn.Parameter(torch.randn(3)),
        "number": torch.tensor(2.5),
    }
    got = read(saved(tensors), tensors)
    for name, tensor in tensors.items():
        assert torch.equal(got[name], tensor), name


def test_a_state_dict_with_its_version_numbers_is_read() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = model.state_dict()
    assert hasattr(state, "_metadata")
    found = describe(saved(state), max_tensors=MANY)
    assert list(found) == list(state)
    assert found["1.num_batches_tracked"].dtype == "int64"


def test_what_we_write_torch_loads(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.tensor(3)}
    file = tmp_path / "answer.pt"
    file.write_bytes(write_tensors(tensors))
    loaded = torch.load(file, weights_only=True)
    assert list(loaded) == ["a", "b"]
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


class Touches:
    """Unpickled, it would make a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.file}",)


def test_a_pickle_that_would_run_code_is_named_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "executed"
    payload = saved({"a": Touches(file)})
    with pytest.raises(UnsupportedMedia, match="system"):
        describe(payload, max_tensors=MANY)
    assert not file.exists()
    torch.load(io.BytesIO(payload), weights_only=False)  # the trap does work
    assert file.exists()


class Grows:
    def __reduce__(self) -> tuple[object, ...]:
        return builtins.bytearray, (1 << 50,)


UNFIT: list[tuple[str, Callable[[], object], type[Refused], str]] = [
    ("memory", lambda: {"a": Grows()}, UnsupportedMedia, "bytearray"),
    ("a list", lambda: [torch.ones(2)], UnsupportedMedia, "EMPTY_LIST"),
    ("a tensor", lambda: torch.ones(2), UnsupportedMedia, "map names to tensors"),
    ("a number in it", lambda: {"a": torch.ones(2), "step": 3}, UnsupportedMedia, "map names to tensors"),
    ("a dict in it", lambda: {"a": {"b": torch.ones(2)}}, UnsupportedMedia, "map names to tensors"),
    ("numbers as names", lambda: {3: torch.ones(2)}, UnsupportedMedia, "map names to tensors"),
    ("sparse", lambda: {"x": torch.ones(2), "a": torch.eye(3).to_sparse()}, BadTensors, "'a' is sparse"),
    ("sparse rows", lambda: {"a": torch.eye(3).to_sparse_csr()}, BadTensors, "'a' is sparse"),
    ("meta", lambda: {"a": torch.ones(2, device="meta")}, BadTensors, "'a' is on the meta device"),
    (
        "quantized",
        lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
        BadTensors,
        "'a' is quantized",
    ),
    ("nested", lambda: {"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, BadTensors, "'a' is nested"),
    ("float8", lambda: {"a": torch.ones(2).to(torch.float8_e4m3fn)}, BadTensors, "'a' is of a dtype"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "error", "says"), [row[1:] for row in UNFIT], ids=[row[0] for row in UNFIT])
def test_what_is_no_dict_of_dense_tensors_is_refused_by_name(
    make: Callable[[], object], error: type[Refused], says: str
) -> None:
    with pytest.raises(error, match=says):
        describe(saved(make()), max_tensors=MANY)


def test_the_old_form_without_an_archive_is_refused() -> None:
    with pytest.raises(UnsupportedMedia, match=r"before 1\.6"):
        describe(saved({"a": torch.ones(2)}, _use_new_zipfile_serialization=False), max_tensors=MANY)


@pytest.mark.parametrize("data", [b"", b"PK", b"PK\x03\x04", b"hello" * 100, b"PK\x03\x04" + bytes(500)])
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedMedia):
        describe(memoryview(data), max_tensors=MANY)


@pytest.mark.row("B06")
def test_a_zip_bomb_is_refused_by_what_it_declares() -> None:
    zeros = bytes(64 << 20)
    bomb = rewritten(saved({"a": torch.ones(4)}), lambda r: r.update({"archive/data/0": zeros}), zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 20
    with pytest.raises(TooLarge, match=r"declares \d{8} when unpacked"):
        describe(bomb, max_tensors=MANY)


def test_compressed_records_are_refused_even_if_small() -> None:
    packed = rewritten(saved({"a": torch.randn(2)}), lambda r: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedMedia, match="compressed"):
        describe(packed, max_tensors=MANY)


def test_more_records_than_the_model_can_need_are_refused() -> None:
    with pytest.raises(TooLarge, match="records"):
        describe(saved({str(i): torch.ones(1) for i in range(200)}), max_tensors=8)


def test_records_that_overlap_do_not_multiply() -> None:
    """Many directory entries for the same bytes: their declared sum is more than the file."""
    data = bytearray(saved({str(i): torch.ones(5000) for i in range(4)}))
    places = [m for m in range(len(data)) if data[m : m + 4] == b"PK\x01\x02"]
    first = next(p for p in places if b"data/0" in data[p : p + 64])
    for place in places:
        if b"archive/data/" in data[place : place + 64]:
            data[place + 20 : place + 28] = data[first + 20 : first + 28]
            data[place + 42 : place + 46] = data[first + 42 : first + 46]
    assert describe(
        memoryview(data), max_tensors=MANY
    )  # each is fine by itself; together they hold what the file holds
    data[first + 20 : first + 28] = struct.pack("<2L", 70_000, 70_000)
    with pytest.raises(TooLarge, match="declares"):
        describe(memoryview(data), max_tensors=MANY)


def test_a_storage_that_claims_more_than_its_record_holds_is_refused() -> None:
    pickle = bytes(zipfile.ZipFile(io.BytesIO(saved({"a": torch.ones(4)}))).read("archive/data.pkl"))
    assert pickle.count(b"K\x04") == 2  # how many values the storage has; how many the tensor has
    for claimed in (b"K\x05", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\x7f" * 8):
        with pytest.raises(UnsupportedMedia, match="not in the file"):
            describe(with_pickle(pickle.replace(b"K\x04", claimed, 1)), max_tensors=MANY)
        only_the_view = pickle[::-1].replace(b"\x04K", claimed[::-1], 1)[::-1]
        with pytest.raises(UnsupportedMedia, match=r"outside its storage|other arguments"):
            describe(with_pickle(only_the_view), max_tensors=MANY)


def test_big_endian_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedMedia, match="big-endian"):
        describe(
            rewritten(saved({"a": torch.ones(4)}), lambda r: r.update({"archive/byteorder": b"big"})), max_tensors=MANY
        )


def test_a_pickle_of_shared_tuples_costs_no_time() -> None:
    """2⁶⁰ leaves in a few hundred bytes: nobody may walk through them, hash them or show them."""
    bomb = b"\x80\x02}(X\x01\x00\x00\x00a" + b")" + b"q\x00h\x00\x86" * 60
    for end in (b"u.", b"R.", b"Q.", b"X\x01\x00\x00\x00bu.", b"K\x01u."):
        with pytest.raises(UnsupportedMedia):
            describe(with_pickle(bomb + end), max_tensors=MANY)
    as_key = b"\x80\x02}(" + b")" + b"q\x00h\x00\x86" * 60 + b"K\x01u."
    with pytest.raises(UnsupportedMedia):
        describe(with_pickle(as_key), max_tensors=MANY)


def test_damaged_files_are_refused_and_never_crash() -> None:
    good = saved({"a": torch.ones(4), "b": torch.zeros(2, 3, dtype=torch.bfloat16)})
    source = random.Random(7)
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(source.randint(1, 6)):
            data[source.randrange(len(data))] = source.randrange(256)
        if source.random() < 0.3:
            del data[source.randrange(len(data)) :]
        try:
            found = describe(memoryview(data), max_tensors=MANY)
        except Refused:
            refused += 1
            continue
        for at in found.values():
            assert 0 <= at.begin <= len(data)
    assert refused > 1000


def test_missing_unknown_and_misshapen_tensors_are_named() -> None:
    expected = Expected({"a": (2, 3), "b": (4,)}, frozenset({"tied", "buffer"}), "the run's model")

    def refusal(tensors: dict[str, Tensor]) -> str:
        with pytest.raises(BadTensors) as caught:
            read_all(saved(tensors), expected)
        return caught.value.message

    good = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    assert "'b' is missing" in refusal({"a": good["a"]})
    assert "'c' is not in the run's model" in refusal({**good, "c": torch.ones(1)})
    assert "'a': got [3, 2], run has [2, 3]" in refusal({**good, "a": torch.ones(3, 2)})
    assert "'b': got int64" in refusal({**good, "b": torch.ones(4, dtype=torch.int64)})
    assert "'b': got float64" in refusal({**good, "b": torch.ones(4, dtype=torch.float64)})
    extra = {**good, "tied": torch.ones(9), "buffer": torch.ones(1, dtype=torch.int64)}
    assert read_all(saved(extra), expected).keys() == good.keys()


def test_a_buffer_that_is_not_sent_has_not_moved() -> None:
    expected = Expected({"a": (2,)}, frozenset(), "the run's model", {"mean": (3,)})
    assert torch.equal(read_all(saved({"a": torch.ones(2)}), expected)["mean"], torch.zeros(3))
    sent = {"a": torch.ones(2), "mean": torch.full((3,), 2.0)}
    assert torch.equal(read_all(saved(sent), expected)["mean"], sent["mean"])
    with pytest.raises(BadTensors, match=r"'mean': got \[4\], run has \[3\]"):
        read_all(saved({**sent, "mean": torch.ones(4)}), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_none_are_refused_by_the_tensors_name(bad: float, dtype: torch.dtype) -> None:
    tensors = {"a": torch.ones(5, dtype=dtype), "b": torch.ones(3, 3, dtype=dtype)}
    tensors["b"][1, 1] = bad
    with pytest.raises(NotFinite, match="'b'"):
        read(saved(tensors), tensors)
