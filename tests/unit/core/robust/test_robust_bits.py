"""Peers that aggregate for themselves must agree to the last bit: vector widths, numbers of threads, CPU and GPU."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from other_vectors import computed_elsewhere
from outerstep.core.robust import RULES, RobustAggregator

NUMEL = 40_003  # enough for torch to use its second thread
WEIGHTS = [1.0, 2.5, 0.7, 1.0, 3.0, 1.1, 1.0, 0.3]


def some_contributions() -> list[Tensor]:
    """All magnitudes, ties, zeros of both signs: from integers alone, so that every machine starts from the same."""
    index = torch.arange(NUMEL)
    made = []
    for worker in range(8):
        mantissa = ((index + worker * 7919) * 2654435761 % 2**24 - 2**23 + 2**20).float()
        scale = 2.0 ** (index * 40503 % 97 % 13 - 20).float()
        made.append(mantissa * scale * ((index + worker) % 7 != 3))
    made[5] = made[2].clone()
    return made


def digests(device: str = "cpu") -> dict[str, str]:
    """setting -> a digest of two rounds and of who was refused; one worker flips, one shouts."""
    values, found = [each.to(device) for each in some_contributions()], {}
    for name in RULES:
        for weights in (None, WEIGHTS) if name != "krum" else (None,):
            for bucket_size in (1, 2) if name not in ("krum", "multi_krum") else (1,):
                aggregator = RobustAggregator(name, cosine_screen=True, bucket_size=bucket_size)
                digest = hashlib.sha256()
                for shouted in (1.0, 30.0):
                    sent = [-values[0], values[1] * shouted, *values[2:]]
                    made = aggregator.aggregate(sent, weights, fragment=0, seed=str(shouted))
                    digest.update(made.cpu().numpy().tobytes())
                    digest.update(str(aggregator.verdict).encode())
                found[f"{name} {weights is not None} {bucket_size}"] = digest.hexdigest()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "matrices"), [("default", "COMPATIBLE"), ("avx2", "AVX2")])
def test_vector_width_and_threads_do_not_change_a_bit(capability: str, matrices: str) -> None:
    """`MKL_CBWR`: which of its ways the matrix library takes; they add in different orders."""
    found = computed_elsewhere(__file__, "sorted(t.digests().items())", capability, MKL_CBWR=matrices)
    assert found == {str(sorted(digests().items()))}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_does_not_change_a_bit() -> None:
    assert digests("cuda") == digests("cpu")
