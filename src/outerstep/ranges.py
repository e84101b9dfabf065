"""Sets of whole numbers that are mostly runs: a million units of data, of which all but a few ranges are done.

A set is kept as its ranges [begin, end), sorted, none touching the next. Every operation takes time in the number of
ranges and not of numbers. (The interval libraries carry payloads, real ends and trees; ours are integers, and few.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

Range = tuple[int, int]


class Ranges:
    """An immutable set. Compared by content."""

    __slots__ = ("_begins", "_ends")

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        """From ranges in any order, which may touch and overlap; empty ones are left out."""
        begins: list[int] = []
        ends: list[int] = []
        for begin, end in sorted((int(begin), int(end)) for begin, end in ranges):
            if begin >= end:
                continue
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        self._begins, self._ends = begins, ends

    @classmethod
    def _of(cls, begins: list[int], ends: list[int]) -> Ranges:
        made = cls.__new__(cls)
        made._begins, made._ends = begins, ends
        return made

    def __iter__(self) -> Iterator[Range]:
        return zip(self._begins, self._ends, strict=True)

    def __bool__(self) -> bool:
        return bool(self._begins)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and (self._begins, self._ends) == (other._begins, other._ends)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._begins, number) - 1
        return at >= 0 and number < self._ends[at]

    @property
    def total(self) -> int:
        """How many numbers there are."""
        return sum(self._ends) - sum(self._begins)

    @property
    def pieces(self) -> int:
        """How many ranges they make."""
        return len(self._begins)

    @property
    def end(self) -> int:
        """Above the largest; 0 if there is none."""
        return self._ends[-1] if self._ends else 0

    def numbers(self) -> Iterator[int]:
        """One by one, the smallest first."""
        for begin, end in self:
            yield from range(begin, end)

    def __or__(self, other: Ranges) -> Ranges:
        if not other:
            return self
        if not self:
            return other
        if other.pieces == 1:
            return self._with(*next(iter(other)))
        return Ranges([*self, *other])

    def _with(self, begin: int, end: int) -> Ranges:
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        return Ranges._of(
            [*self._begins[:first], begin, *self._begins[last:]], [*self._ends[:first], end, *self._ends[last:]]
        )

    def __and__(self, other: Ranges) -> Ranges:
        """(The smaller one is gone through, the larger one searched.)"""
        few, many = (self, other) if self.pieces <= other.pieces else (other, self)
        begins: list[int] = []
        ends: list[int] = []
        for begin, end in few:
            at = bisect_right(many._ends, begin)
            while at < many.pieces and many._begins[at] < end:
                begins.append(max(begin, many._begins[at]))
                ends.append(min(end, many._ends[at]))
                at += 1
        return Ranges._of(begins, ends)

    def __sub__(self, other: Ranges) -> Ranges:
        shared = self & other
        if not shared:
            return self
        begins, ends = list(self._begins), list(self._ends)
        for begin, end in shared:
            at = bisect_right(begins, begin) - 1
            upper = ends[at]
            ends[at] = begin
            if end < upper:
                begins.insert(at + 1, end)
                ends.insert(at + 1, upper)
            if begins[at] == ends[at]:
                del begins[at], ends[at]
        return Ranges._of(begins, ends)

    def first(self, count: int) -> Ranges:
        """The smallest `count` numbers, or all if there are fewer."""
        begins: list[int] = []
        ends: list[int] = []
        for begin, end in self:
            if count <= 0:
                break
            begins.append(begin)
            ends.append(min(end, begin + count))
            count -= ends[-1] - begin
        return Ranges._of(begins, ends)


NONE = Ranges()
