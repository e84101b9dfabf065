"""The agreed model as it travels to those who only read it: one safetensors file, with what it is in its header.

    8 bytes     N, the header's length, uint64 little-endian
    N bytes     header: JSON, padded with spaces to a multiple of 8
    …           tensors, one after the other without gaps, those with 8 bytes per value first

    header = {"__metadata__": {"format": "pt", "outerstep": facts as JSON}, name: {"dtype", "shape", "data_offsets"}, …}

Trained tensors are in fp32, as the workers hold them, each fragment's in the plan's order; the others are as the model
was given. The facts name the version and the hash of every fragment, so a reader knows what it has, and that it has all
of it: a fragment's hash is that of its anchor (digest.py), that of the rest xxh3-128 over its tensors, and that of the
model xxh3-128 over the fragments' roots and the rest's hash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ..digest import TREE_MARK, data_hash
from ..errors import BadRequest, TransportError
from ..types import AnchorHash, Count, Hash, Label, Plain, RunId, TensorName
from .messages import MAX_JOIN_BYTES, convert, decode_json, encode_json

MODEL_PATH: Final = "/v1/model"
MODEL_FILES_PATH: Final = "/v1/model/files"
MOST_HEADER_BYTES: Final = MAX_JOIN_BYTES
MOST_FILE_BYTES: Final = 64 << 20  # a tokenizer has up to 35 MB; what is larger is no setting
MOST_FILES: Final = 32
METADATA: Final = "__metadata__"
OURS: Final = "outerstep"
LENGTH_BYTES: Final = 8

_OF_8 = {"F64": "float64", "I64": "int64", "U64": "uint64", "C64": "complex64"}
_OF_4 = {"F32": "float32", "I32": "int32", "U32": "uint32"}
_OF_2 = {"F16": "float16", "BF16": "bfloat16", "I16": "int16", "U16": "uint16"}
_OF_1 = {"I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
DTYPES: Final[Mapping[str, str]] = {**_OF_8, **_OF_4, **_OF_2, **_OF_1}
"""What safetensors calls a type, and what torch does."""
ITEM_BYTES: Final[Mapping[str, int]] = {
    name: size for size, names in ((8, _OF_8), (4, _OF_4), (2, _OF_2), (1, _OF_1)) for name in names
}

FileName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")]


class ModelFacts(Plain, frozen=True):
    """`fragments`: the names of each fragment's tensors, in order; with one fragment asked for, there is one. `rest`:
    the names of the tensors that nobody trains, and `rest_hash` over them. `dtypes`: of trained tensors that the
    workers' model does not keep in float32. `aliases`: other name → the one that a tied tensor is kept under."""

    run_id: RunId
    round: Count
    versions: tuple[Count, ...]
    hashes: tuple[AnchorHash, ...]
    fragments: tuple[tuple[TensorName, ...], ...]
    rest: tuple[TensorName, ...] = ()
    rest_hash: Hash | None = None
    dtypes: dict[TensorName, Label] = msgspec.field(default_factory=dict)
    aliases: dict[TensorName, TensorName] = msgspec.field(default_factory=dict)

    @property
    def hash(self) -> str:
        return model_hash(self.hashes, self.rest_hash)


class FileEntry(Plain, frozen=True):
    """A small file beside the model."""

    name: FileName
    size_bytes: Annotated[int, Meta(ge=0, le=MOST_FILE_BYTES)]
    hash: Hash


class FileList(Plain, frozen=True):
    files: Annotated[tuple[FileEntry, ...], Meta(max_length=MOST_FILES)] = ()


@dataclass(frozen=True)
class StoredTensor:
    """`dtype` as safetensors calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class ModelHeader:
    """What a file holds, in the order of its bytes; `data_begin`: where those of the first tensor are."""

    facts: ModelFacts
    tensors: tuple[StoredTensor, ...]
    data_begin: int

    @property
    def size_bytes(self) -> int:
        return self.data_begin + sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where each tensor begins and ends in the file."""
        found, begin = {}, self.data_begin
        for tensor in self.tensors:
            found[tensor.name] = begin, begin + tensor.size_bytes
            begin += tensor.size_bytes
        return found


def model_hash(hashes: Iterable[str], rest_hash: str | None) -> str:
    return data_hash(
        bytes.fromhex(one.removeprefix(TREE_MARK)) for one in (*hashes, *([rest_hash] if rest_hash is not None else []))
    )


def write_header(facts: ModelFacts, tensors: Sequence[StoredTensor]) -> bytes:
    """The file up to its first tensor. The tensors come in the order of their bytes."""
    described: dict[str, Any] = {METADATA: {**facts.aliases, "format": "pt", OURS: encode_json(facts).decode()}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.size_bytes
        described[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
        begin = end
    text = encode_json(described)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


class _TensorEntry(Plain, frozen=True):
    dtype: Label
    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    data_offsets: tuple[Count, Count]


def header_bytes(length: bytes | memoryview) -> int:
    """How long the header is, from the first 8 bytes."""
    size = int.from_bytes(length, "little")
    if not 2 <= size <= MOST_HEADER_BYTES:
        raise TransportError(f"the model's header has {size} bytes; from 2 to {MOST_HEADER_BYTES} are read")
    return size


def read_header(text: bytes | memoryview) -> ModelHeader:
    """Refuses what does not say of itself what `write_header` would say: nothing of it is believed before."""
    try:
        held: dict[str, Any] = decode_json(text, dict)
        metadata = convert(held.pop(METADATA, {}), dict[str, str])
        facts = decode_json(metadata.get(OURS, "").encode(), ModelFacts)
        described = {convert(name, TensorName): convert(entry, _TensorEntry) for name, entry in held.items()}
    except (BadRequest, msgspec.MsgspecError) as error:
        raise TransportError(f"the model's header cannot be read: {error}") from error
    tensors, offset = [], 0
    for name, entry in sorted(described.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in ITEM_BYTES:
            raise TransportError(f"tensor {name!r} has the type {entry.dtype!r}, which safetensors does not know")
        tensor = StoredTensor(name, entry.dtype, entry.shape)
        if entry.data_offsets != (offset, offset + tensor.size_bytes):
            raise TransportError(
                f"tensor {name!r} must have the bytes [{offset}, {offset + tensor.size_bytes}), got "
                f"{list(entry.data_offsets)}: gaps and overlaps are not taken"
            )
        tensors.append(tensor)
        offset += tensor.size_bytes
    _check_facts(facts, tensors)
    return ModelHeader(facts, tuple(tensors), LENGTH_BYTES + len(text))


def _check_facts(facts: ModelFacts, tensors: Sequence[StoredTensor]) -> None:
    named = [name for names in facts.fragments for name in names]
    trained, wrong = frozenset(named), ""
    if sorted([*named, *facts.rest]) != sorted(tensor.name for tensor in tensors):
        wrong = "it does not hold the tensors that its facts name, each once"
    elif not len(facts.fragments) == len(facts.versions) == len(facts.hashes):
        wrong = "it must have a version and a hash for each fragment"
    elif bool(facts.rest) != (facts.rest_hash is not None):
        wrong = "the rest and its hash belong together"
    elif odd := next((t.name for t in tensors if t.name in trained and t.dtype != "F32"), None):
        wrong = f"trained tensor {odd!r} is not in F32"
    if wrong:
        raise TransportError(f"the model's header contradicts itself: {wrong}")
