"""The contract: every topology goes through the same sentences, or shows what of them cannot happen in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.adapters import ADAPTERS, Adapter
from contract.sentences import SENTENCES


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


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_what_cannot_happen_has_a_reason(adapter: Adapter) -> None:
    assert set(adapter.cannot) <= set(SENTENCES)
    assert all(len(reason) > 20 for reason in adapter.cannot.values())
