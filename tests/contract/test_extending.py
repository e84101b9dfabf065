"""The topology of docs/extending.md, as it stands there, goes through the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from contract.adapters import NAMES, Adapter, Run
from contract.member import Rank
from contract.sentences import SENTENCES
from support import in_threads

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def code() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(PAGE.read_text().split("```python\n")[1].split("```")[0], found)
    return found


class FolderRun(Run):
    kind = code()["FolderTopology"]

    def ranks(self, number: int) -> list[Rank]:
        workers = NAMES[: max(self.members, number + 1)]
        return [
            Rank(lambda anchors: self.kind(self.folder, NAMES[number], self.tensors(number), workers, self.deadline_s))
        ]


class Folder(Adapter):
    name, run = "folder", FolderRun
    cannot: ClassVar = {"is late": "a round that has closed names who is in it: what comes later goes into the next"}

    def shows(self, sentence: str, folder: Path) -> None:
        with self.open(folder) as run:
            a, b = run.member(0), run.member(1)
            in_threads(a.enter, b.enter)
            agreed = in_threads(a.learn(0).exchange, b.learn(1).exchange)
            assert all(one.counted_in <= one.version for one in agreed)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_it(sentence: str, tmp_path: Path) -> None:
    adapter = Folder()
    if sentence in adapter.cannot:
        adapter.shows(sentence, tmp_path)
    else:
        SENTENCES[sentence](adapter, tmp_path)
