"""Messages of every kind, from the types that read them: right, nearly right, and absurd.

    grammar = Grammar(random.Random(7), known={"run_id": ["r1"], "height": [4, 5]})
    grammar.draw(Converse)            # plain values, as a JSON or msgpack encoder takes them

What a type allows is read from the type itself, so a field that is added tomorrow is drawn tomorrow. `known` are values
that are true at this moment, by field name: without them nearly everything would be refused at the first look, and
what lies behind it never reached. `oddity`: of every hundred values, how many are what no honest end would write.

The same grammar serves a long run with a seeded Random, and hypothesis, whose `st.randoms()` it can shrink.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as kinds

from fuzz.cases import SNIPPETS

ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**53, 2**53 + 1, 2**63, -(2**63), 2**64 - 1, 1.5, -0.0, 1e308, 5e-324, "", "x",
    "\0", "\x1b[2J", "a\nb", "ü", "0", "a" * 600, "0" * 64, "[::1]:1", "no such place", [], [[]], {}, {"a": 1},
    [0] * 50, "../..", "none", "nan", b"", b"\xff\xfe", b"\x91" * 500,
)  # fmt: skip
HEX = re.compile(r"^\^\(?\[0-9a-f\]\{(\d+)\}\)?\??\\Z$")


class Grammar:
    """`makers`: by name of a type, how a value of it is made instead."""

    def __init__(
        self,
        rng: random.Random,
        known: Mapping[str, Sequence[Any]],
        makers: Mapping[str, Callable[[], Any]] | None = None,
        oddity: float = 0.03,
    ) -> None:
        self.rng, self.known, self.makers, self.oddity = rng, known, dict(makers or {}), oddity

    def draw(self, kind: type | Any) -> Any:
        return self._value(_type_of(kind), "", 0)

    def _value(self, kind: kinds.Type, name: str, depth: int) -> Any:
        rng = self.rng
        if rng.random() < self.oddity:
            return rng.choice(ODD)
        if name in self.known and rng.random() < 0.8:
            return rng.choice(self.known[name])
        match kind:
            case kinds.Metadata():
                return self._value(kind.type, name, depth)
            case kinds.UnionType():
                options = [one for one in kind.types if not isinstance(one, kinds.CustomType)]
                return self._value(rng.choice(options), name, depth)
            case kinds.StructType():
                return self._struct(kind, depth)
            case kinds.IntType():
                least, most = kind.ge if kind.ge is not None else 0, kind.le if kind.le is not None else 2**53
                return rng.choice([least, most, rng.randint(least, min(most, least + 3)), rng.randint(least, most)])
            case kinds.FloatType():
                least, most = kind.ge if kind.ge is not None else -1e9, kind.le if kind.le is not None else 1e9
                return rng.choice([least, most, rng.uniform(least, most)])
            case kinds.StrType():
                return self._text(kind)
            case kinds.BytesType():
                least, most = kind.min_length or 0, kind.max_length or 64
                return rng.randbytes(rng.randint(least, min(most, least + 64)))
            case kinds.BoolType():
                return rng.random() < 0.5
            case kinds.NoneType():
                return None
            case kinds.AnyType():
                return rng.choice(ODD)
            case kinds.LiteralType():
                return rng.choice(kind.values)
            case kinds.TupleType():
                return [self._value(one, name, depth + 1) for one in kind.item_types]
            case kinds.VarTupleType() | kinds.ListType():
                return self._row(kind, name, depth)
            case kinds.DictType():
                pairs = range(rng.choice([0, 1, 2]))
                keys = [self._value(kind.key_type, name, depth + 1) for _ in pairs]
                return {str(key): self._value(kind.value_type, name, depth + 1) for key in keys}
            case _:
                raise AssertionError(f"the grammar does not know how to make a {kind}")

    def _struct(self, kind: kinds.StructType, depth: int) -> Any:
        rng = self.rng
        if kind.cls.__name__ in self.makers:
            return self.makers[kind.cls.__name__]()
        made: dict[str, Any] = {}
        for field in kind.fields:
            if field.required or rng.random() < 0.5:
                made[field.encode_name] = self._value(field.type, field.name, depth + 1)
        if kind.tag_field is not None:
            made[kind.tag_field] = kind.tag
        if made and rng.random() < self.oddity:
            del made[rng.choice(list(made))]
        if rng.random() < self.oddity:
            made[rng.choice(["surprise", "", "protocol", "__class__"])] = rng.choice(ODD)
        return made

    def _row(self, kind: kinds.VarTupleType | kinds.ListType, name: str, depth: int) -> list[Any]:
        least, most = kind.min_length or 0, kind.max_length if kind.max_length is not None else 70
        wanted = self.rng.choice([least, least + 1, least + 2, min(most, 3)])
        if self.rng.random() < self.oddity:
            wanted = most + 1 if most < 100 else 100
        if depth > 3:
            wanted = min(wanted, 2)
        return [self._value(kind.item_type, name, depth + 1) for _ in range(wanted)]

    def _text(self, kind: kinds.StrType) -> str:
        rng, least, most = self.rng, kind.min_length or 0, kind.max_length or 64
        if kind.pattern is not None and (digits := HEX.match(kind.pattern)):
            return rng.randbytes(int(digits[1]) // 2).hex()
        length = rng.choice([least, most, rng.randint(least, min(most, least + 12))])
        return "".join(rng.choices("abcxyz0189_", k=length))

    def spoil(self, data: bytes) -> bytes:
        """A few edits, as cases.spoiled makes them."""
        rng = self.rng
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randint(0, len(data))
            end = min(len(data), at + rng.randint(0, 40))
            how = rng.randint(0, 4)
            if how == 0 and at < len(data):
                data = data[:at] + bytes([data[at] ^ (1 << rng.randint(0, 7))]) + data[at + 1 :]
            elif how == 1:
                data = data[:at] + data[end:]
            elif how == 2:
                data = data[:end] + data[at:]
            elif how == 3:
                data = data[:at] + rng.choice(SNIPPETS) + data[end:]
            else:
                data = data[:at]
        return data


@cache
def _type_of(kind: Any) -> kinds.Type:
    return kinds.type_info(kind)


def as_json(value: Any) -> bytes:
    """As our encoder writes it: bytes in base64. Numbers that JSON does not have are written all the same."""
    return json.dumps(value, default=lambda one: base64.b64encode(one).decode()).encode()


def as_msgpack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)
