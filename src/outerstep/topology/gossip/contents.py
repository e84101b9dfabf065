"""From the bytes of a peer's contribution to its values, block by block; and whether they are fit to be used.

A server looks at each contribution before it takes it. Without one everybody looks for itself: what holds NaN, absurd
values or bytes that mean nothing is not voted for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.robust import TensorSpan
from ...core.watch import sum_of_squares
from ...errors import Refused
from ...wire.frames import check_frame
from ..forms import Form
from ..update import cuts

ABSURD = 1e18  # a norm that no honest difference of weights has; sums and momentum of values below it stay finite
CPU = torch.device("cpu")


class Contents:
    """Of contributions to one fragment."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._codecs = {name: rule.codec for name, rule in form.rules.items()}
        self._begins = {entry.name: form.up.data_begin + entry.begin for entry in form.up.entries}
        self.sizes: Mapping[str, int] = {entry.name: math.prod(entry.shape) for entry in form.up.entries}

    def check(self, data: memoryview) -> str:
        """Why it cannot be used, naming the tensor; "" if it can."""
        try:
            check_frame(data, self._form.up)
        except Refused as refusal:
            return refusal.message
        reader = self.reader(data)
        for name, numel in self.sizes.items():
            for start, stop in cuts(numel, CPU):
                wrong = self._wrong_with(reader, TensorSpan(name, start, stop))
                if wrong:
                    return f"tensor {name!r} {wrong}"
        return ""

    def _wrong_with(self, reader: Reading, block: TensorSpan) -> str:
        encoded, codec = reader.encoded(block), self._codecs[block.name]
        wrong = codec.check(encoded, block.count)
        if wrong:
            return f"cannot be decoded: {wrong}"
        values = torch.empty(block.count)
        codec.decode(encoded, values)
        norm = math.sqrt(square) if math.isfinite(square := sum_of_squares(values)) else math.inf
        if norm <= ABSURD:
            return ""
        if values.isfinite().all():
            return f"holds values of about {float(values.abs().max()):.0e}, which is absurd"
        return "holds NaN or Inf"

    def reader(self, data: memoryview) -> Reading:
        return Reading(self, torch.frombuffer(data, dtype=torch.uint8))

    def span(self, block: TensorSpan) -> tuple[int, int]:
        """Where its bytes are; blocks begin at multiples of 4096 values, as the blocks of every codec do."""
        codec, first = self._codecs[block.name], self._begins[block.name]
        return first + codec.encoded_bytes(block.start), first + codec.encoded_bytes(block.stop)

    def decode(self, name: str, encoded: Tensor, out: Tensor) -> None:
        self._codecs[name].decode(encoded, out)


class Reading:
    """The values of one contribution: a `core.robust.Reader`."""

    def __init__(self, contents: Contents, data: Tensor) -> None:
        self._contents, self._data = contents, data

    def encoded(self, block: TensorSpan) -> Tensor:
        begin, end = self._contents.span(block)
        return self._data[begin:end]

    def read(self, block: TensorSpan, out: Tensor) -> None:
        self._contents.decode(block.name, self.encoded(block), out)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name, flat fp32."""
        found = {name: torch.empty(numel) for name, numel in self._contents.sizes.items()}
        for name, values in found.items():
            self.read(TensorSpan(name, 0, values.numel()), values)
        return found


__all__ = ["Contents", "Reading"]
