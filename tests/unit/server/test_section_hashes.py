"""The hashes of sections that are kept, and until when."""

from __future__ import annotations

import gc

from outerstep.server.section_hashes import ROW_HASHES, SectionHashes
from outerstep.tiling import FragmentTiling, ModelTiling, make_tiling
from outerstep.types import ParameterSpec

SPEC = ParameterSpec(name="w", shape=(64, 2), dtype="float32")


def cut_at(row: int) -> FragmentTiling:
    held = [{"w": ((0, 0), (row, 2))}, {"w": ((row, 0), (64 - row, 2))}]
    return ModelTiling(make_tiling({"w": (64, 2)}, held), [SPEC]).fragment(["w"])


def test_those_of_every_job_that_is_here_are_kept_however_many_there_are() -> None:
    kept, jobs = SectionHashes(), [cut_at(row) for row in range(1, 60)]
    for i, job in enumerate(jobs):
        kept.put(job, True, (f"{i}", "rest"))
    assert [kept.get(job, True) for job in jobs] == [(f"{i}", "rest") for i in range(59)]
    del jobs[1:], job
    gc.collect()
    assert len(kept._of_boxes) == 1


def test_of_cuts_by_rows_so_many_are_kept_and_the_one_that_was_asked_for_last_goes_last() -> None:
    kept, each = SectionHashes(), ("hash",) * (ROW_HASHES // 4)
    for sections in (1, 2, 3, 4):
        kept.put(sections, True, each)
    assert kept.get(1, True) == each
    kept.put(5, True, each)
    assert kept.get(2, True) is None
    assert kept.get(1, True) == each
    assert kept.get(1, False) is None
    kept.put(6, True, ("hash",) * (ROW_HASHES + 1))
    assert kept.get(6, True) is not None
    assert len(kept._of_rows) == 1
