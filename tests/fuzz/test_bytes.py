"""What lies on disk or comes over the wire as bytes: frames, journal records, saved states, archives of torch.save.
Right ones are read back bit for bit; spoiled ones are refused by name, and nothing else happens."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cases import cases, spoiled
from outerstep.compat.archive import describe
from outerstep.compat.tensors import Expected, read_tensors
from outerstep.digest import Buffer
from outerstep.durable.disk import FolderDisk
from outerstep.durable.journal import Journal
from outerstep.errors import BadFrame, BadTensors, ConfigError, ModelError, Refused, UnsupportedMedia
from outerstep.model_folder import STATE
from outerstep.security import Access, Credentials
from outerstep.security.tokens import TokenFile, new_token
from outerstep.server.saved import load_state, save_state
from outerstep.wire.frames import check_frame, layout, parse_frame
from support import make_frame, make_layout
from unit.server.saved_states import assert_same_state, make_state

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.5), "empty": torch.zeros(0, 4)}
FRAME, EXPECTED = bytes(make_frame(TENSORS)), make_layout(TENSORS)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@cases(300)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), SHAPES, max_size=5))
def test_a_frame_of_any_tensors_is_taken_for_exactly_those(shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    frame, expected = make_frame(tensors), make_layout(tensors)
    check_frame(frame, expected)
    header = parse_frame(frame, max_header_bytes=len(frame))
    assert [(entry.name, entry.shape) for entry in header.tensors] == list(shapes.items())
    if FRAME[: EXPECTED.data_begin] != expected.prefix:
        with pytest.raises((BadFrame, BadTensors)):
            check_frame(frame, EXPECTED)


@cases(900)
@given(spoiled(FRAME) | st.binary(max_size=300).map(lambda data: b"OSF1" + data))
def test_a_spoiled_frame_is_refused_unless_only_values_changed(data: bytes) -> None:
    frame = memoryview(data)
    try:
        check_frame(frame, EXPECTED)
    except (BadFrame, BadTensors, UnsupportedMedia) as refusal:
        assert refusal.message
    else:
        assert len(data) == len(FRAME)
        assert data[: EXPECTED.data_begin] == FRAME[: EXPECTED.data_begin]
    try:
        header = parse_frame(frame, max_header_bytes=4096)
    except (BadFrame, UnsupportedMedia) as refusal:
        assert refusal.message
    else:
        again = layout(header.codec, [(e.name, e.shape, e.end - e.begin) for e in header.tensors])
        assert again.header == header  # what is accepted has only this one layout


# --- the journal ----------------------------------------------------------------------------------------------------


class Shelf:
    """A disk that is a dictionary."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def names(self) -> list[str]:
        return sorted(self.files)

    def read(self, name: str) -> memoryview:
        return memoryview(self.files[name])

    def write(self, name: str, pieces: Iterable[Buffer]) -> None:
        self.files[name] = b"".join(bytes(piece) for piece in pieces)

    def sync(self, name: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        self.files[new] = self.files.pop(old)

    def remove(self, name: str) -> None:
        del self.files[name]

    def sync_folder(self) -> None: ...


RECORDS = st.lists(st.tuples(st.binary(max_size=60), st.lists(st.binary(max_size=40), max_size=3)), max_size=4)


@cases(200)
@given(RECORDS, st.integers(0, 5))
def test_a_journal_of_any_records_is_read_back(records: list[tuple[bytes, list[bytes]]], begin: int) -> None:
    disk = Shelf()
    journal = Journal(disk)
    journal.begin_after(begin)
    serials = [journal.append(head, payload) for head, payload in records]
    read = list(Journal(disk).after(begin))
    assert [(r.serial, r.head, bytes(r.payload)) for r in read] == [
        (serial, head, b"".join(payload)) for serial, (head, payload) in zip(serials, records, strict=True)
    ]


@cases(300)
@given(st.data())
def test_a_spoiled_journal_gives_its_records_or_is_refused_by_name(data: st.DataObject) -> None:
    disk = Shelf()
    journal = Journal(disk)
    written = {journal.append(head, [head * 2]): head for head in (b"first", b"second", b"third")}
    name = data.draw(st.sampled_from(sorted(disk.files)))
    match data.draw(st.sampled_from(["spoil", "lose", "copy", "rename"])):
        case "spoil":
            disk.files[name] = data.draw(spoiled(disk.files[name]))
        case "lose":
            del disk.files[name]
        case "copy":
            disk.files[f"record-{9:016}"] = disk.files[name]
        case "rename":
            disk.files[data.draw(st.sampled_from(["record-x", "notes", name + ".unfinished"]))] = disk.files.pop(name)
    try:
        read = {record.serial: (record.head, bytes(record.payload)) for record in Journal(disk).after(0)}
    except ModelError as error:
        assert "record" in str(error)
    else:
        # Nothing but the end may be missing: a file that was never renamed is a record that was never written.
        expected = {serial: (head, head * 2) for serial, head in written.items()}
        assert read == {serial: expected[serial] for serial in read}
        assert list(read) == list(range(1, len(read) + 1))


# --- saved states ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state_json(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    place = save_state(make_state(), tmp_path_factory.mktemp("saves"))
    return place, (place / STATE).read_bytes()


@cases(200)
@given(data=st.data())
def test_a_spoiled_state_json_is_refused_unless_it_says_the_same(
    state_json: tuple[Path, bytes], data: st.DataObject
) -> None:
    place, good = state_json
    (place / STATE).write_bytes(data.draw(spoiled(good)))
    try:
        state = load_state(place)
    except ModelError as error:
        assert str(place) in str(error)
    else:
        assert_same_state(state, make_state())
    finally:
        (place / STATE).write_bytes(good)
    assert_same_state(load_state(place), make_state())


@cases(100)
@given(data=st.data())
def test_a_saved_file_with_spoiled_bytes_is_refused_by_name(
    state_json: tuple[Path, bytes], data: st.DataObject
) -> None:
    place, _ = state_json
    file = data.draw(st.sampled_from(sorted(place.glob("*.safetensors"))))
    good = file.read_bytes()
    bad = data.draw(spoiled(good))
    file.write_bytes(bad)
    try:
        state = load_state(place)
    except ModelError as error:
        assert file.name in str(error)
        assert bad != good
    else:
        assert bad == good
        assert_same_state(state, make_state())
    finally:
        file.write_bytes(good)


# --- what torch.save wrote ------------------------------------------------------------------------------------------


def saved(tensors: dict[str, torch.Tensor]) -> bytes:
    sink = io.BytesIO()
    torch.save(tensors, sink)
    return sink.getvalue()


SMALL = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
ARCHIVE = saved(SMALL)
NEEDED = Expected({name: tuple(tensor.shape) for name, tensor in SMALL.items()}, frozenset(), "the run's model")


@cases(300)
@given(spoiled(ARCHIVE, most=2) | st.binary(max_size=200))
def test_a_spoiled_archive_is_refused_or_holds_tensors_of_the_right_form(data: bytes) -> None:
    try:
        view = memoryview(bytearray(data))
        read = read_tensors(view, describe(view, max_tensors=8), NEEDED)
    except Refused as refusal:
        assert refusal.status in (413, 415, 422)
    else:
        assert {name: tuple(tensor.shape) for name, tensor in read.items()} == NEEDED.needed


def test_the_shelf_does_what_a_folder_does() -> None:
    """The journal's fuzz test is about journals on disks."""
    with tempfile.TemporaryDirectory() as folder:
        disks = [Shelf(), FolderDisk(Path(folder))]
        for disk in disks:
            Journal(disk).append(b"head", [b"pay", b"load"])
        assert bytes(disks[0].read(f"record-{1:016}")) == bytes(disks[1].read(f"record-{1:016}"))


# --- files of secrets -------------------------------------------------------------------------------------------------


@cases(150)
@given(data=st.data())
def test_a_spoiled_file_of_tokens_is_refused_by_name_and_a_running_server_keeps_those_it_has(
    data: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = TokenFile(Path(folder) / "tokens.json")
        tokens = file.ensure()
        assert file.current() == tokens
        bad = data.draw(spoiled(file.path.read_bytes()))
        file.path.write_bytes(bad)
        try:
            found = file.load()
        except ConfigError as error:
            assert str(file.path) in str(error)
            assert tokens.run[4:] not in str(error)
            assert file.current() == tokens
        else:
            assert file.current() == found


@cases(100)
@given(data=st.data())
def test_a_spoiled_file_of_known_servers_is_refused_by_name(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        credentials = Credentials(folder)
        credentials.remember(Access("gpu.example.org", 8512, new_token("run"), "ab" * 32))
        credentials.known_file.write_bytes(data.draw(spoiled(credentials.known_file.read_bytes())))
        try:
            credentials.known()
        except ConfigError as error:
            assert str(credentials.known_file) in str(error)
