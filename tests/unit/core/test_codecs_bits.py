"""The same bytes and the same values on every machine: vector widths, numbers of threads, CPU and GPU."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from other_vectors import computed_elsewhere
from outerstep.core.codecs import CODECS, Codec, Dither

NUMEL = 300_003  # enough for torch to use its second thread


def some_values() -> Tensor:
    """All magnitudes, ties, zeros: from integers alone, so that every machine starts from the same bits."""
    index = torch.arange(NUMEL)
    mantissa = (index * 2654435761 % 2**24 - 2**23).float()
    return mantissa * 2.0 ** (index * 40503 % 97 % 13 - 20).float() * (index % 7 != 3)


def digests(device: str = "cpu") -> dict[str, str]:
    """codec -> a digest of what it encodes, decodes and adds."""
    values, found = some_values().to(device), {}
    for name, codec in CODECS.items():
        made = [coded(codec, values, None)]
        if not codec.needs_feedback:
            made.append(coded(codec, values, Dither.of("run", 1, 2, "weight")))
        parts = []
        for data in made:
            out, total = torch.empty(NUMEL, device=device), values.clone()
            codec.decode(data, out)
            codec.decode_add(data, total, 0.3)
            parts += [data, out.view(torch.uint8), total.view(torch.uint8)]
        found[name] = hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in parts)).hexdigest()
    return found


def coded(codec: Codec, values: Tensor, dither: Dither | None) -> Tensor:
    data = torch.empty(codec.encoded_bytes(NUMEL), dtype=torch.uint8, device=values.device)
    codec.encode(values, data, dither)
    return data


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_vector_width_and_threads_do_not_change_a_bit(capability: str) -> None:
    found = computed_elsewhere(__file__, "sorted(t.digests().items())", capability)
    assert found == {str(sorted(digests().items()))}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_does_not_change_a_bit() -> None:
    assert digests("cuda") == digests("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["int8", "int4", "e3m0"])
def test_a_compiled_encoder_does_not_change_a_bit(name: str) -> None:
    codec, values = CODECS[name], some_values().cuda()
    torch.compiler.reset()
    out = torch.empty(codec.encoded_bytes(NUMEL), dtype=torch.uint8, device="cuda")
    torch.compile(codec.encode, fullgraph=True, dynamic=False)(values, out)
    assert torch.equal(out, coded(codec, values, None))
