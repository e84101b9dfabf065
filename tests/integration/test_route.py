"""The route of a round through the code, as docs/concepts/one-round.md tells it, is the one that a round takes."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import outerstep
from outerstep import DiLoCoServer, DiLoCoWorker
from outerstep.threads import process_helpers, process_team
from support import tiny_model, train_steps

SOURCE = Path(outerstep.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| ([^|]+) \| `([a-z_/]+\.py)` \| `([A-Za-z_.]+)` \|$", re.MULTILINE)

Stop = tuple[str, str]
"""(file under src/outerstep, function with its class)"""


def read_route() -> list[tuple[str, Stop]]:
    """(what happens, where), in the order of the page's table."""
    page = (DOCS / "concepts" / "one-round.md").read_text()
    return [(what.strip(), (file, function)) for what, file, function in ROW.findall(page)]


@contextmanager
def walked() -> Iterator[set[Stop]]:
    """The functions of the package that are entered meanwhile, in every thread."""
    seen: set[Stop] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(SOURCE)):
            seen.add((Path(path).relative_to(SOURCE).as_posix(), frame.f_code.co_qualname))

    process_team.cache_clear()  # threads that an earlier test has begun are not looked into
    process_helpers.cache_clear()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> set[Stop]:
    """What a round enters, and another one that closes without a worker, which rebases and contributes to the next."""
    models = [tiny_model(), tiny_model()]
    with walked() as seen:
        server = DiLoCoServer(
            models[0].state_dict(),
            num_workers=2,
            port=0,
            insecure=True,
            sync_every=2,
            round_deadline_s=0.2,
            save_dir=str(tmp_path_factory.mktemp("run")),
        )
        server.start()
        workers = [
            DiLoCoWorker(
                model, torch.optim.SGD(model.parameters(), lr=0.05), f"http://{server.address}", worker_id=name
            )
            for model, name in zip(models, ("early", "late"), strict=True)
        ]
        try:
            early, late = (worker.start() for worker in workers)
            train_steps(models[0], early.optimizer, 2, seed=0)
            train_steps(models[1], late.optimizer, 2, seed=1)
            missed = late.sync_metrics["missed_rounds"]
        finally:
            for worker in workers:
                worker.abandon("the test is over")
            server.stop()
    assert missed == 1, "the first round closed without the late worker"
    return seen


def test_the_page_tells_the_whole_route() -> None:
    assert len(read_route()) > 15


@pytest.mark.parametrize(
    ("what", "stop"), read_route(), ids=lambda value: value if isinstance(value, str) else value[1]
)
def test_the_page_names_functions_that_a_round_passes_through(what: str, stop: Stop, entered: set[Stop]) -> None:
    file, function = stop
    found: Any = import_module("outerstep." + file.removesuffix(".py").replace("/", "."))
    for name in function.split("."):
        found = getattr(found, name)
    assert callable(found)
    assert stop in entered, f"{what}: no round passed through {function} of {file}"


@pytest.mark.parametrize("question", ["a round closes", "a late worker rebases", "the outer step", "is refused"])
def test_the_readme_says_where(question: str) -> None:
    """From there, and without a search, a reader finds the function."""
    readme = (DOCS.parent / "README.md").read_text()
    line = next(line for line in readme.splitlines() if question in line and ".py`" in line)
    stops = {(file, function) for _, (file, function) in read_route()}
    assert any(f"`{file}`" in line and f"`{function}`" in line for file, function in stops), line
