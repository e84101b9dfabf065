"""The leased data of a cluster: its members draw and train it, and its own worker numbers what is in their model."""

from __future__ import annotations

from msgspec.structs import replace

from outerstep.coordination.worker.units import LeasedWork
from outerstep.ranges import NONE, Ranges
from outerstep.types import Dataset, Trained

DATASET = Dataset(name="train", samples=95, unit_samples=10)


def test_places_in_the_clusters_model_get_the_next_numbers_and_leave_the_queue() -> None:
    work = LeasedWork(())
    holding = work.add(DATASET)
    holding.queue = Ranges([(0, 10)])
    assert work.trained_below("train", Ranges([(0, 2), (5, 7)])) == ((0, 4),)
    assert (holding.queue, holding.open) == (Ranges([(2, 5), (7, 10)]), Ranges([(0, 2), (5, 7)]))
    assert work.trained_below("train", Ranges([(2, 3)])) == ((4, 5),)
    assert (holding.queue, holding.open) == (Ranges([(3, 5), (7, 10)]), Ranges([(0, 3), (5, 7)]))
    assert work.describe(((0, 4),)) == (Trained(dataset="train", places=((0, 2), (5, 7))),)
    assert work.describe(((1, 3), (4, 5))) == (Trained(dataset="train", places=((1, 3), (5, 6))),)


def test_nothing_new_has_no_numbers() -> None:
    work = LeasedWork(())
    work.add(DATASET)
    assert work.trained_below("train", NONE) == ()
    assert work.trained_below("train", Ranges([(0, 1)])) == ((0, 1),)


def test_a_dataset_that_is_described_again_keeps_what_is_held_of_it() -> None:
    work = LeasedWork(())
    holding, other = work.add(DATASET), replace(DATASET, samples=50)
    assert (holding.dataset, work.holdings) == (DATASET, {"train": holding})
    assert work.add(other) is holding
    assert holding.dataset == other
    assert work.add(replace(DATASET, name="eval")) is not holding
