"""The contract: every topology goes through the same sentences, or shows what of them cannot happen in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from contract.adapters import ADAPTERS, Adapter
from contract.member import CELLS
from contract.sentences import SENTENCES, exchange, together
from outerstep.core.feedback import ErrorFeedback
from outerstep.topology.server.topology import ServerTopology
from support import in_threads


def cases(*, possible: bool) -> list[object]:
    return [
        pytest.param(adapter, sentence, id=f"{adapter.name} {sentence}", marks=adapter.marks)
        for adapter in ADAPTERS
        for sentence in SENTENCES
        if (sentence not in adapter.cannot) == possible
    ]


@pytest.mark.parametrize(("adapter", "sentence"), cases(possible=True))
def test_it(adapter: Adapter, sentence: str, tmp_path: Path) -> None:
    SENTENCES[sentence](adapter, tmp_path)


@pytest.mark.parametrize(("adapter", "sentence"), cases(possible=False))
def test_it_cannot(adapter: Adapter, sentence: str, tmp_path: Path) -> None:
    adapter.shows(sentence, tmp_path)


@pytest.mark.parametrize("adapter", [pytest.param(one, id=one.name, marks=one.marks) for one in ADAPTERS])
def test_a_worker_that_started_over_brings_nothing_owes_nothing_and_hinders_nobody(
    adapter: Adapter, tmp_path: Path
) -> None:
    """Its own contribution counts nothing, and what its codec left out of earlier ones is forgotten."""
    with adapter.open(tmp_path) as run:
        a, b = run.member(0), run.member(1)
        together(run, a, b)
        exchange(a.learn(0), b.learn(1))
        owed = [feedback for rank in a.ranks for feedback in feedbacks_of(rank.topology)]
        for feedback in owed:
            feedback._residuals["cells"] = torch.ones(CELLS)
        before = b.anchor

        def begin_anew() -> None:
            a.begin(owes_nothing=True)
            a.finish()

        in_threads(begin_anew, b.learn(2).exchange)
        if adapter.has_one_anchor:
            assert (a.anchor - before).tolist() == [0.0, 0.0, 1.0, *[0.0] * (CELLS - 3)]
        assert owed
        assert all(feedback.residual("cells") is None for feedback in owed)


def feedbacks_of(topology: object) -> list[ErrorFeedback]:
    """Its own, or that of the topology inside it."""
    found = [value for value in vars(topology).values() if isinstance(value, ErrorFeedback)]
    inner = [value for value in vars(topology).values() if isinstance(value, ServerTopology)]
    return found + [feedback for one in inner for feedback in feedbacks_of(one)]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_what_cannot_happen_has_a_reason(adapter: Adapter) -> None:
    assert set(adapter.cannot) <= set(SENTENCES)
    assert all(len(reason) > 20 for reason in adapter.cannot.values())
