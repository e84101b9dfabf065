"""A run without a server as real processes: one is killed and comes back, one lies, the others go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import wait_until

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("gossip_job.py")
PATIENCE_S = 120.0
CAPABILITY = {"a": "default", "b": "avx2", "c": "", "d": "default"}


class Peers:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, peer_id: str, how: str = "") -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        if CAPABILITY[peer_id]:
            environ["ATEN_CPU_CAPABILITY"] = CAPABILITY[peer_id]
        with (self.folder / f"{peer_id}.log").open("ab") as log:
            self.processes[peer_id] = subprocess.Popen(
                [sys.executable, str(JOB), peer_id, str(self.folder), *([how] if how else [])],
                stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=self.folder,
            )  # fmt: skip

    def notes(self, peer_id: str, about: str) -> list[Any]:
        file = self.folder / f"{peer_id}.jsonl"
        text = file.read_text() if file.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line[about] for line in lines if about in line]

    def hashes(self, peer_id: str) -> dict[int, str]:
        return dict(zip(self.notes(peer_id, "version"), self.notes(peer_id, "hash"), strict=True))

    def newest(self, peer_id: str) -> int:
        return max(self.notes(peer_id, "version"), default=0)

    def log(self) -> str:
        return "\n".join(f"== {p}\n" + (self.folder / f"{p}.log").read_text()[-3000:] for p in self.processes)

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(60)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    found = Peers(tmp_path)
    yield found
    found.close()


def test_four_peers_go_on_when_one_is_killed_and_heals_and_another_is_proven_to_lie(peers: Peers) -> None:
    peers.start("a")
    peers.start("b")
    peers.start("c", "die")
    peers.start("d", "lie")
    try:
        # c is killed in the middle of a round: the others decide with or without it, and go on.
        assert peers.processes["c"].wait(PATIENCE_S) == -signal.SIGKILL
        before = max(map(peers.newest, "abd"))
        wait_until(lambda: min(map(peers.newest, "abd")) >= before + 2, PATIENCE_S)
        # It comes back with its folder alone, and is one of them again.
        peers.start("c")
        wait_until(lambda: len(peers.notes("c", "joined")) == 2, PATIENCE_S)
        again = peers.notes("c", "joined")[1]
        wait_until(lambda: peers.newest("c") >= again + 2, PATIENCE_S)
        # d says two different things under one key: the others prove it to each other, and do without it.
        (peers.folder / "lie").touch()
        assert peers.processes["d"].wait(PATIENCE_S) == 0
        assert "excluded this peer" in peers.notes("d", "lost")[0]
        (peers.folder / "stop").write_text(str(max(map(peers.newest, "abc")) + 10))
        for peer_id in "abc":
            assert peers.processes[peer_id].wait(PATIENCE_S) == 0
    except (AssertionError, IndexError, subprocess.TimeoutExpired) as error:
        raise AssertionError(peers.log()) from error
    found = {p: peers.hashes(p) for p in "abcd"}
    by_version = [{found[p][v] for p in "abcd" if v in found[p]} for v in found["a"].keys() | found["b"].keys()]
    assert all(len(hashes) == 1 for hashes in by_version)  # nobody ever held anything else than the others
    assert len(set(found["a"].values())) == len(found["a"]) > 10  # and it moved
    assert [peers.notes(p, "expelled")[-1] for p in "abc"] == [["d"]] * 3
    last = max(found["a"])
    assert found["a"][last] == found["b"][last] == found["c"][last]
    assert peers.notes("c", "metrics")[0]["sync_count"] >= 2
    assert len({*peers.notes("a", "capability"), *peers.notes("b", "capability")}) == 2
