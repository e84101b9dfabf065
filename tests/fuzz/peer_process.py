"""A peer as a process of its own, for attacks on it: it contributes to one round after the other until it is stopped.

    python tests/fuzz/peer_process.py NAME FOLDER PORT [JOIN_STRING]

In FOLDER: `node/` (the peer's own), `join` (what others type), `report.json` (written anew after each round), `anchors`
(what a real topology would keep in its checkpoint), `seen` (each version that it has adopted). Started again with the
same folder, it resumes.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import RULES, SHORT, SIZES, Peer

PROMPT = replace(
    RULES, round_deadline_s=0.5, heartbeat_timeout_s=5.0
)  # a member that says nothing of use is not awaited
LOOK_S = 0.05


class Process:
    def __init__(self, name: str, folder: Path, port: int, join: str | None) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        joins = (join,) if join else ()
        self.peer = Peer(name, join=joins, rules=PROMPT, folder=str(folder / "node"), listen=f"127.0.0.1:{port}")
        self.stopping = threading.Event()

    def begin(self) -> None:
        """Found a run, join one, or resume the one that lies in the folder."""
        node, kept = self.peer.node, self.folder / "anchors"
        terms = node.ask_terms(SHORT)
        if kept.exists():
            saved = json.loads(kept.read_text())
            self.peer.topology.versions = saved["versions"]
            self.peer.topology.anchors = [bytes.fromhex(one) for one in saved["anchors"]]
        self.peer.begin(terms)
        if terms is None or kept.exists():
            self.peer.hold_all()
        else:
            self.peer.heal()
        node.belong()
        _write(self.folder / "join", node.join_string)

    def run(self) -> None:
        """Contribute to every fragment as soon as its last round is adopted: whoever waited at one of them alone would
        wait in a circle with others that wait at another."""
        offered = [-1] * len(SIZES)
        while not self.stopping.wait(LOOK_S):
            for fragment in range(len(SIZES)):
                if offered[fragment] != (version := self.peer.topology.versions[fragment]):
                    self.offer(fragment, version)
                    offered[fragment] = version
                self.adopt(fragment, version)

    def offer(self, fragment: int, version: int) -> None:
        data, digest = bytes([version % 250 + 1]) * SIZES[fragment], self.peer.topology.hash(fragment)
        self.peer.node.offer(fragment, memoryview(data), base_version=version, base_hash=digest, steps=1)

    def adopt(self, fragment: int, version: int) -> None:
        """What was decided since; with or without this peer."""
        node, topology = self.peer.node, self.peer.topology
        if (decided := node.round_of(fragment, version + 1)) is not None:
            topology.add(fragment, decided)
            node.release(fragment, version + 1)
        elif node.is_lost(fragment, version + 1):
            found, anchor = node.fetch_snapshot(fragment, patience_s=SHORT)
            topology.adopt(fragment, found, bytes(anchor))
        else:
            return
        version, digest = topology.versions[fragment], topology.hash(fragment)
        node.hold_anchor(fragment, version, digest)
        with (self.folder / "seen").open("a") as seen:
            seen.write(json.dumps({"fragment": fragment, "version": version, "hash": digest}) + "\n")
        self.report()

    def report(self) -> None:
        topology, status = self.peer.topology, self.peer.node.status()
        anchors = {"versions": topology.versions, "anchors": [one.hex() for one in topology.anchors]}
        _write(self.folder / "anchors", json.dumps(anchors))
        facts = {
            "versions": topology.versions,
            "height": status.height,
            "members": [member.peer_id for member in status.members],
            "expelled": status.expelled,
            "refused": status.refused,
            "failure": status.failure,
            "time": time.time(),
        }
        _write(self.folder / "report.json", json.dumps(facts))


def _write(file: Path, text: str) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(file)


def main() -> None:
    name, folder, port, *join = sys.argv[1:]
    process = Process(name, Path(folder), int(port), join[0] if join else None)
    signal.signal(signal.SIGTERM, lambda *_: process.stopping.set())
    process.begin()
    try:
        process.run()
    finally:
        process.peer.node.stop()


if __name__ == "__main__":
    main()
