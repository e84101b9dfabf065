"""From the bytes of a contribution to its values: where they lie, whether they are fit, block by block."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core.codecs import Codec
from ..errors import BadFrame, NotFinite
from ..wire.frames import Layout, check_frame, layout
from ..wire.sections import rows_of, section_layout
from .blocks import BLOCK_VALUES

ABSURD = 1e18  # no honest difference of weights; sums and momentum of values below it stay finite in fp32

Tensors = Sequence[tuple[str, tuple[int, ...], Codec]]


class Decoder:
    """Contributions to one fragment that come in the same number of sections."""

    def __init__(self, codec_name: str, tensors: Tensors, sections: int = 1) -> None:
        self.sections = sections
        self._codec_name = codec_name
        self._tensors = {name: (shape, codec) for name, shape, codec in tensors}
        self._begins = {name: array("q") for name in self._tensors}  # per section, the tensor's first byte
        self.section_bytes: list[int] = []
        begin = 0
        for up in self._layouts():
            for entry in up.entries:
                self._begins[entry.name].append(begin + up.data_begin + entry.begin)
            self.section_bytes.append(up.size_bytes)
            begin += up.size_bytes

    def _layouts(self) -> Iterator[Layout]:
        """One after the other: thousands of them at once would take more memory than the model."""
        if self.sections == 1:
            sizes = [(n, shape, codec.encoded_bytes(math.prod(shape))) for n, (shape, codec) in self._tensors.items()]
            yield layout(self._codec_name, sizes)
            return
        shares = [(name, shape, codec.encoded_bytes) for name, (shape, codec) in self._tensors.items()]
        for section in range(self.sections):
            yield section_layout(self._codec_name, shares, self.sections, section)

    def check(self, payload: memoryview) -> float:
        """Refuse a payload with the wrong tensors, with NaN or Inf, or with bytes that mean nothing, naming the tensor.
        Returns ‖Δ‖."""
        begin, squares = 0, 0.0
        for section, up in enumerate(self._layouts()):
            # What is left over goes to the last section, whose check will say so.
            end = begin + up.size_bytes if section < self.sections - 1 else len(payload)
            check_frame(payload[begin:end], up)
            begin = end
        data = torch.frombuffer(payload, dtype=torch.uint8)
        for name, (shape, codec) in self._tensors.items():
            step = max(BLOCK_VALUES // codec.block_values, 1) * codec.block_values
            for section in range(self.sections):
                count = rows_of(shape, self.sections, section).numel
                for start in range(0, count, step):
                    stop = min(start + step, count)
                    first = self._begins[name][section]
                    encoded = data[first + codec.encoded_bytes(start) : first + codec.encoded_bytes(stop)]
                    squares += self._check(name, section, codec, encoded, stop - start)
        return math.sqrt(squares)

    def _check(self, name: str, section: int, codec: Codec, encoded: Tensor, count: int) -> float:
        where = f" in section {section} of {self.sections}" if self.sections > 1 else ""
        wrong = codec.check(encoded, count)
        if wrong:
            raise BadFrame(f"tensor {name!r}{where}: {wrong}")
        values = torch.empty(count)
        codec.decode(encoded, values)
        square = float(torch.dot(values, values))
        if square <= ABSURD:
            return square
        # In fp32 the square of an honest number can be infinite: look again, exactly.
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        if norm <= ABSURD:
            return norm * norm
        what = f"values of about {norm:.0e}, which is absurd" if math.isfinite(norm) else "NaN or Inf"
        raise NotFinite(
            f"tensor {name!r} holds {what}{where}",
            hint="the contribution was not applied; lower the learning rate, or reload the model",
        )

    def read(self, payload: Tensor, name: str, start: int, stop: int, out: Tensor) -> None:
        """Values [start, stop) of a tensor, from a payload (uint8) that was checked, to fp32."""
        shape, codec = self._tensors[name]
        if self.sections == 1:
            self._decode(payload, codec, self._begins[name][0], math.prod(shape), start, stop, out)
            return
        each = max(rows_of(shape, self.sections, 0).numel, 1)  # every section but the last ones has so many
        for section in range(start // each, -(-stop // each)):
            first = section * each
            count = rows_of(shape, self.sections, section).numel
            begin, end = max(start - first, 0), min(stop - first, count)
            place = out[first + begin - start : first + end - start]
            self._decode(payload, codec, self._begins[name][section], count, begin, end, place)

    @staticmethod
    def _decode(payload: Tensor, codec: Codec, at: int, count: int, start: int, stop: int, out: Tensor) -> None:
        """Values [start, stop) of `count` encoded ones that begin at byte `at`; what the codec cannot take apart is
        decoded with its neighbours."""
        before, beyond = -start % -codec.block_values, -stop % codec.block_values
        first, last = start + before, min(stop + beyond, count)
        encoded = payload[at + codec.encoded_bytes(first) : at + codec.encoded_bytes(last)]
        if first == start and last == stop:
            codec.decode(encoded, out)
            return
        values = torch.empty(last - first)
        codec.decode(encoded, values)
        out.copy_(values[start - first : stop - first])
