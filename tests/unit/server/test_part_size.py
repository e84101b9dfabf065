"""Into how many parts a contribution is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.core.codecs.recipe import Recipe
from outerstep.defaults import PART_SIZE_BYTES
from outerstep.lanes import PARTS, SMALLEST_PART_BYTES, part_size
from outerstep.server import DiLoCoServer
from outerstep.server.run import largest_contribution
from outerstep.types import Manifest, ParameterSpec, Wishes
from support import Ledger, memory_topology


def manifest(*numels: int) -> Manifest:
    return Manifest(
        parameters=tuple(ParameterSpec(name=f"p{i}", shape=(numel,), dtype="float32") for i, numel in enumerate(numels))
    )


@given(numel=st.integers(0, 4_000_000_000))
def test_the_largest_contribution_has_at_most_so_many_parts_unless_they_would_be_too_large(numel: int) -> None:
    size = part_size(largest_contribution(manifest(numel), [["p0"]], Recipe.parse("bf16")))
    assert SMALLEST_PART_BYTES <= size <= PART_SIZE_BYTES
    assert size & (size - 1) == 0
    assert size == PART_SIZE_BYTES or 2 * numel <= PARTS * size
    assert size == SMALLEST_PART_BYTES or 2 * numel > PARTS * size // 2, "and no larger than they have to be"


@pytest.mark.parametrize(("codec", "expected"), [("fp32", 8 << 20), ("bf16", 4 << 20), ("int4", 1 << 20)])
def test_it_is_the_encoded_size_of_the_largest_fragment_that_counts(codec: str, expected: int) -> None:
    made = manifest(100_000_000, 1_000_000)
    assert part_size(largest_contribution(made, [["p0"], ["p1"]], Recipe.parse(codec))) == expected


@pytest.mark.parametrize(("said", "expected"), [(None, SMALLEST_PART_BYTES), (128, 128)])
def test_the_plan_says_it_and_an_operator_may_have_said_it_before(said: int | None, expected: int) -> None:
    server = DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0, part_size_bytes=said)
    server.service.start()
    memory_topology(server, "a").join(None, Wishes())
    assert server.service.coordinator.plan is not None
    assert server.service.coordinator.plan.part_size_bytes == expected
    assert server.service.coordinator.uploads.part_size_bytes == expected
    assert {store.down.part_size_bytes for store in server.service.stores} == {expected}
