"""What `torch.save` wrote, read without unpickling it.

Such a file is a zip archive of uncompressed records: `data.pkl`, a pickle that says how the tensors are made, and
`data/0`, `data/1`, …, the bytes of their storages. Here the pickle is *walked*: its opcodes are looked at one by one,
and those that a dict of dense tensors consists of are acted out on plain values; nothing is imported or called, and
nothing is allocated that is not in the file. What comes out says where each tensor's values lie, checked against the
sizes of the records.

torch's own loader would not run foreign code either, with `weights_only=True`. But it makes whatever size of bytearray
the pickle asks for, and a server must not.

The zip directory is read by the rules of torch's own reader, strictly: it ends where the file ends, every record is
stored as it is, and no two have the same name.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pickletools import genops
from typing import Any, NamedTuple

from ..errors import BadTensors, TooLarge, UnsupportedMedia

MAX_NAME_BYTES = 1024
SPARE_RECORDS = 32  # besides one per tensor: the pickle, version, byte order and the like
PICKLE_BYTES_PER_TENSOR = 1024
SPARE_PICKLE_BYTES = 64 * 1024
REMEDY = "send torch.save({name: tensor, …}, BytesIO()), dense tensors of float32, float16 or bfloat16 and nothing else"

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX32 = 0xFFFFFFFF

STORAGES = {
    "FloatStorage": ("float32", 4),
    "BFloat16Storage": ("bfloat16", 2),
    "HalfStorage": ("float16", 2),
    "DoubleStorage": ("float64", 8),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
}
"""torch's name of a storage → dtype, bytes per value."""

UNFIT = {
    "torch._utils _rebuild_sparse_tensor": "sparse",
    "torch._utils _rebuild_sparse_csr_tensor": "sparse",
    "torch._utils _rebuild_qtensor": "quantized",
    "torch._utils _rebuild_meta_tensor_no_storage": "on the meta device, without values",
    "torch._utils _rebuild_nested_tensor": "nested",
    "torch.nested._internal.nested_tensor _rebuild_njt": "nested",
    "torch._utils _rebuild_tensor_v3": "of a dtype that has no storage class",
    "torch._utils _rebuild_wrapper_subclass": "of a class of its own",
    "torch._tensor _rebuild_from_type_v2": "of a class of its own",
}
"""Ways to make tensors that cannot be a pseudo-gradient."""


@dataclass(frozen=True)
class Described:
    """A tensor in the file: a storage of so many `values` begins at byte `begin`; it is a strided view of that."""

    dtype: str
    begin: int
    values: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Storage(NamedTuple):
    dtype: str
    item_bytes: int
    key: str
    values: int


class _View(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Named(NamedTuple):
    """A global that the pickle names: something to call, or a kind of storage."""

    path: str


_REBUILD = _Named("torch._utils _rebuild_tensor_v2")
_PARAMETER = _Named("torch._utils _rebuild_parameter")
_ORDERED = _Named("collections OrderedDict")


def describe(data: memoryview, *, max_tensors: int) -> dict[str, Described]:
    """The tensors of the file by name. Refuses whatever else it is, or holds."""
    records = _directory(data, max_records=max_tensors + SPARE_RECORDS)
    if bytes(_record(data, records, "byteorder", 16) or b"little") != b"little":
        raise UnsupportedMedia("the tensors are big-endian", hint="send them little-endian")
    pickle = _record(data, records, "data.pkl", SPARE_PICKLE_BYTES + max_tensors * PICKLE_BYTES_PER_TENSOR)
    if pickle is None:
        raise _not_ours("the archive has no data.pkl")
    try:
        saved = _walk(bytes(pickle))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise _not_ours(f"its pickle is broken or of another kind ({type(error).__name__})") from error
    if type(saved) is not dict or not all(type(view) is _View for view in saved.values()):
        raise _not_ours("it must map names to tensors, and holds something else")
    return {name: _place(name, view, records) for name, view in saved.items()}


def _not_ours(what: str) -> UnsupportedMedia:
    return UnsupportedMedia(f"the payload is not a torch.save of named tensors: {what}", hint=REMEDY)


# --- the zip directory --------------------------------------------------------------------------------------------


def _directory(data: memoryview, *, max_records: int) -> dict[str, tuple[int, int]]:
    """Record → where its bytes begin and end."""
    if bytes(data[:4]) != b"PK\x03\x04":
        kind = (
            "a pickle without archive (torch.save's form of before 1.6)" if bytes(data[:1]) == b"\x80" else "no archive"
        )
        raise _not_ours(f"it is {kind}")
    try:
        count, begin, end = _central(data)
        if count > max_records:
            raise TooLarge(f"the payload has {count} records; the run's model needs at most {max_records}")
        entries = _entries(data, count, begin, end)
    except struct.error as error:
        raise _not_ours("the archive is cut short") from error
    declared = sum(entry.size for entry in entries)
    if declared > len(data):
        raise TooLarge(
            f"the payload has {len(data)} bytes but declares {declared} when unpacked",
            hint="torch.save never compresses",
        )
    root = entries[0].name.partition("/")[0] + "/" if entries else ""
    records: dict[str, tuple[int, int]] = {}
    for entry in entries:
        if entry.method != 0 or entry.packed != entry.size:
            raise _not_ours(f"record {entry.name[:64]!r} is compressed")
        name = entry.name.removeprefix(root).lower()  # torch's reader does not tell case apart
        if not entry.name.startswith(root) or name in records:
            raise _not_ours(f"record {entry.name[:64]!r} lies outside its folder, or is there twice")
        records[name] = _span(data, entry)
    return records


class _ZipEntry(NamedTuple):
    name: str
    method: int
    packed: int
    size: int
    header: int


def _central(data: memoryview) -> tuple[int, int, int]:
    """How many entries the directory has, and where it begins and ends. torch always writes the 64-bit form too."""
    at = len(data) - _END.size
    magic, _, _, _, count, size, begin, comment = _END.unpack(data[max(at, 0) :])
    if magic != b"PK\x05\x06" or comment:
        raise _not_ours("the archive does not end as one")
    locator = data[at - _LOCATOR64.size : at] if at >= _LOCATOR64.size else b""
    if bytes(locator[:4]) == b"PK\x06\x07":
        at = _LOCATOR64.unpack(locator)[2]
        magic, _, _, _, _, _, _, count, size, begin = _END64.unpack(data[at : at + _END64.size])
        if magic != b"PK\x06\x06":
            raise _not_ours("the archive's 64-bit directory is missing")
    if begin + size > len(data):
        raise _not_ours("the archive's directory lies outside it")
    return count, begin, begin + size


def _entries(data: memoryview, count: int, at: int, end: int) -> list[_ZipEntry]:
    made: list[_ZipEntry] = []
    for _ in range(count):
        facts = _ENTRY.unpack(data[at : at + _ENTRY.size])
        magic, method, packed, size = facts[0], facts[4], facts[8], facts[9]
        name_bytes, extra_bytes, comment_bytes, header = facts[10], facts[11], facts[12], facts[16]
        begin = at + _ENTRY.size
        at = begin + name_bytes + extra_bytes + comment_bytes
        if magic != b"PK\x01\x02" or at > end or name_bytes > MAX_NAME_BYTES:
            raise _not_ours("the archive's directory is broken")
        name = bytes(data[begin : begin + name_bytes]).decode("utf-8", "replace")
        extra = data[begin + name_bytes : begin + name_bytes + extra_bytes]
        size, packed, header = _wide(extra, [size, packed, header])
        made.append(_ZipEntry(name, method, packed, size, header))
    return made


def _wide(extra: memoryview, values: list[int]) -> list[int]:
    """The 64-bit values of those fields whose 32-bit form is full, in the order in which zip64 lists them."""
    if _MAX32 not in values:
        return values
    while len(extra) >= 4:
        kind, size = struct.unpack("<2H", extra[:4])
        if kind == 1:
            wide = iter(struct.unpack(f"<{size // 8}Q", extra[4 : 4 + size // 8 * 8]))
            return [next(wide, value) if value == _MAX32 else value for value in values]
        extra = extra[4 + size :]
    return values


def _span(data: memoryview, entry: _ZipEntry) -> tuple[int, int]:
    local = data[entry.header : entry.header + _LOCAL.size]
    facts = _LOCAL.unpack(local) if len(local) == _LOCAL.size else (b"",)
    if facts[0] != b"PK\x03\x04":
        raise _not_ours(f"record {entry.name[:64]!r} is not where the directory says")
    begin = entry.header + _LOCAL.size + int(facts[9]) + int(facts[10])
    if begin + entry.size > len(data):
        raise _not_ours(f"record {entry.name[:64]!r} lies outside the archive")
    return begin, begin + entry.size


def _record(data: memoryview, records: Mapping[str, tuple[int, int]], name: str, limit_bytes: int) -> memoryview | None:
    if name not in records:
        return None
    begin, end = records[name]
    if end - begin > limit_bytes:
        raise TooLarge(f"record {name!r} has {end - begin} bytes; at most {limit_bytes} make sense")
    return data[begin:end]


# --- the pickle ---------------------------------------------------------------------------------------------------


def _walk(pickle: bytes) -> Any:
    """Act the opcodes out on plain values. No value is ever compared, hashed or shown before its type is known: nested
    tuples that share their parts are small to build and endless to walk through."""
    stack: list[Any] = []
    below: list[list[Any]] = []
    memo: dict[int, Any] = {}
    last_text = ""
    arg: Any
    for opcode, arg, _ in genops(pickle):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "BINUNICODE" | "SHORT_BINUNICODE":
                last_text = arg
                stack.append(arg)
            case "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(arg)
            case "NEWTRUE" | "NEWFALSE" | "NONE":
                stack.append({"NEWTRUE": True, "NEWFALSE": False, "NONE": None}[opcode.name])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                below.append(stack)
                stack = []
            case "TUPLE":
                made, stack = tuple(stack), below.pop()
                stack.append(made)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                many = int(opcode.name[-1])
                made = tuple(stack[-many:])
                del stack[-many:]
                stack.append(made)
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "GLOBAL":
                stack.append(_named(arg, last_text))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                args, function = stack.pop(), stack.pop()
                stack.append(_called(function, args))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set(stack[-1], key, value)
            case "SETITEMS":
                items, stack = stack, below.pop()
                for key, value in zip(items[::2], items[1::2], strict=True):
                    _set(stack[-1], key, value)
            case "BUILD":
                stack.pop()  # attributes of an OrderedDict (a state dict's version numbers): of no interest
            case _:
                raise _not_ours(f"its pickle uses {opcode.name}")
    raise ValueError("no STOP")


def _named(path: str, last_text: str) -> _Named:
    if path in UNFIT:
        raise BadTensors(f"tensor {last_text[:128]!r} is {UNFIT[path]}", hint=REMEDY)
    module, _, name = path.partition(" ")
    found = _Named(path)
    if found in (_REBUILD, _PARAMETER, _ORDERED) or (module == "torch" and name in STORAGES):
        return found
    raise _not_ours(f"it names {path[:128].replace(' ', '.')}")


def _storage(saved: Any) -> _Storage:
    """("storage", kind, record, device, how many values)"""
    if type(saved) is not tuple or len(saved) != 5:
        raise _not_ours("a storage is described in another way")
    _, kind, key, _, count = saved
    if type(kind) is not _Named or type(key) is not str or type(count) is not int or count < 0:
        raise _not_ours("a storage is described in another way")
    dtype, item_bytes = STORAGES[kind.path.partition(" ")[2]]
    return _Storage(dtype, item_bytes, key, count)


def _called(function: Any, args: Any) -> Any:
    if type(function) is not _Named or type(args) is not tuple:
        raise _not_ours("it calls something that is no function")
    if function == _ORDERED and not args:
        return {}
    if function == _PARAMETER and args and type(args[0]) is _View:
        return args[0]
    if function == _REBUILD and len(args) >= 4 and type(args[0]) is _Storage:
        storage, offset, shape, stride = args[:4]
        if type(offset) is int and _are_counts(shape) and _are_counts(stride) and len(shape) == len(stride):
            return _View(storage, offset, shape, stride)
    raise _not_ours(f"it calls {function.path.replace(' ', '.')} with other arguments")


def _are_counts(values: Any) -> bool:
    return type(values) is tuple and len(values) <= 64 and all(type(v) is int and 0 <= v <= 2**53 for v in values)


def _set(target: Any, key: Any, value: Any) -> None:
    if type(target) is not dict or type(key) is not str:
        raise _not_ours("it must map names to tensors, and holds something else")
    target[key] = value


def _place(name: str, view: _View, records: Mapping[str, tuple[int, int]]) -> Described:
    storage = view.storage
    begin, end = records.get(f"data/{storage.key.lower()}", (0, -1))
    if end - begin != storage.values * storage.item_bytes:
        raise _not_ours(f"tensor {name[:128]!r} claims {storage.values} values that are not in the file")
    last = view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    if 0 not in view.shape and not 0 <= view.offset <= last < storage.values:
        raise _not_ours(f"tensor {name[:128]!r} reaches outside its storage")
    return Described(storage.dtype, begin, storage.values, view.offset, view.shape, view.stride)
