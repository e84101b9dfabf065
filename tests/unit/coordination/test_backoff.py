"""Pauses double up to a limit, and no two clients pause alike."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import outerstep
from outerstep.coordination.backoff import Backoff, jittered_s

BACKOFF = Backoff(first_s=0.5, longest_s=30.0)


@pytest.mark.parametrize(("failures", "longest_s"), [(0, 0.5), (1, 1.0), (5, 16.0), (6, 30.0), (10**9, 30.0)])
def test_a_pause_doubles_with_each_failure_up_to_the_limit(failures: int, longest_s: float) -> None:
    rng = random.Random(0)
    assert BACKOFF.longest_pause_s(failures) == longest_s
    pauses = [BACKOFF.pause_s(failures, rng) for _ in range(200)]
    assert longest_s / 2 <= min(pauses) < 0.55 * longest_s
    assert 0.95 * longest_s < max(pauses) <= longest_s


def test_each_pause_takes_one_number_from_the_generator() -> None:
    """A simulated run is repeated by its seed: a second draw would change every one that follows."""
    rng, same = random.Random(1), random.Random(1)
    assert BACKOFF.pause_s(2, rng) == 2.0 * same.uniform(0.5, 1.0)
    assert rng.random() == same.random()


@pytest.mark.parametrize("least", [0.5, 1.0])
def test_a_pause_that_the_other_end_names_is_spread_around_it(least: float) -> None:
    rng = random.Random(0)
    pauses = [jittered_s(4.0, rng, least=least) for _ in range(200)]
    assert 4.0 * least <= min(pauses) < 4.4 * least
    assert 5.8 < max(pauses) <= 6.0
    rng, same = random.Random(1), random.Random(1)
    assert jittered_s(4.0, rng) == 4.0 * same.uniform(0.5, 1.5), "half of it at least, unless told otherwise"
    assert rng.random() == same.random(), "each pause takes one number from the generator"


def test_no_other_file_draws_pauses_of_its_own() -> None:
    """The simulator draws times, too: those of a virtual network."""
    source = Path(outerstep.__file__).parent
    files = [file for file in source.rglob("*.py") if "simulate" not in file.relative_to(source).parts]
    assert len(files) > 300
    drawing = {file.relative_to(source).as_posix() for file in files if ".uniform(" in file.read_text()}
    assert drawing == {"coordination/backoff.py"}
