"""The hashes of what each section holds, of one version: kept for those who ask again.

To make them, the whole fragment is read. Of a job that holds boxes they are kept for as long as one such job is here,
so that none has to make room for others. Of cuts by rows, which need nothing but a number, so many are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakKeyDictionary

from ..tiling import Cutting, FragmentTiling

ROW_HASHES = 1 << 16  # of all numbers of sections together; but the last one's always

Hashes = tuple[str, ...]


class SectionHashes:
    """Thread-safe. `trees`: as asked for, by the rule of the anchor's hash or as protocol 1 has them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_boxes: WeakKeyDictionary[FragmentTiling, Hashes] = WeakKeyDictionary()
        self._of_rows: OrderedDict[tuple[int, bool], Hashes] = OrderedDict()

    def get(self, cutting: Cutting, trees: bool) -> Hashes | None:
        with self._lock:
            if not isinstance(cutting, int):
                return self._of_boxes.get(cutting)
            found = self._of_rows.get((cutting, trees))
            if found is not None:
                self._of_rows.move_to_end((cutting, trees))
            return found

    def put(self, cutting: Cutting, trees: bool, hashes: Hashes) -> None:
        with self._lock:
            if not isinstance(cutting, int):
                self._of_boxes[cutting] = hashes
                return
            self._of_rows[cutting, trees] = hashes
            while len(self._of_rows) > 1 and sum(map(len, self._of_rows.values())) > ROW_HASHES:
                self._of_rows.popitem(last=False)
