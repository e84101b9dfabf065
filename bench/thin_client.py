"""A client that speaks the wire by hand: it sends a frame that was encoded before, and keeps nothing it receives.

It has no model, so sixteen fit where one worker would, and what it takes is what the wire takes: the requests of
docs/reference/wire.md over the worker's own transport, as many parts at a time as a worker has.
"""

from __future__ import annotations

import mmap
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from outerstep.digest import part_count, part_hash, part_range, payload_hash
from outerstep.errors import Busy
from outerstep.lanes import FEWEST
from outerstep.types import (
    PROTOCOL_VERSION,
    Agreement,
    Answer,
    Commit,
    GetPart,
    GetPartAnswer,
    Join,
    JoinAnswer,
    Leave,
    Offer,
    OfferAnswer,
    Payload,
    Poll,
    PollAnswer,
    PutPart,
)
from outerstep.wire.http_transport import HttpTransport

POLL_S = 5.0


def map_file(file: str) -> memoryview:
    """A frame that all clients of a machine share; its pages are brought in."""
    with Path(file).open("rb") as opened:
        view = memoryview(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED))
    sum(view[:: mmap.PAGESIZE])
    return view


class ThinClient:
    """One worker, one fragment. upload → commit (waits for the round) → fetch."""

    def __init__(self, number: int) -> None:
        self._worker_id = f"thin-{number}"
        self._sequence = 0
        self.version = 0
        self._received = memoryview(b"")
        self._held: Agreement | None = None  # the last one that was fetched: updates from there will do
        self._pool = ThreadPoolExecutor(FEWEST)

    def join(self, address: str) -> JoinAnswer:
        """Anew, also at another server."""
        self._held = None
        self._transport = HttpTransport(address)
        join = Join(protocol=PROTOCOL_VERSION, worker_id=self._worker_id, instance=secrets.token_hex(8))
        answer = self._until_written(join)
        assert isinstance(answer, JoinAnswer)
        self._head: dict[str, Any] = {
            "run_id": answer.run_id,
            "worker_id": self._worker_id,
            "incarnation": answer.incarnation,
            "fragment": 0,
        }
        self._plan = answer.plan
        self.version = answer.fragments[0].version
        self._sequence = answer.fragments[0].last_sequence
        return answer

    def _until_written(self, join: Join) -> Answer:
        """A large model takes its time to be on the server's disk; until then nobody has joined."""
        while True:
            try:
                return self._transport.call(join)
            except Busy as busy:
                time.sleep(busy.retry_after_s)

    def load(self, file: str) -> None:
        """The frame to send, round after round."""
        self._frame = map_file(file)
        self._hashes = [part_hash(self._part(self._frame, i)) for i in range(self._parts(len(self._frame)))]

    def upload(self) -> None:
        """Offer and send all parts."""
        self._sequence += 1
        offer = Offer(
            **self._head,
            sequence=self._sequence,
            base_version=self.version,
            oldest_base=self.version,
            steps=1,
            samples=1,
            tokens=1,
            codec=self._plan.codec,
            size_bytes=len(self._frame),
        )
        answer = self._transport.call(offer)
        assert isinstance(answer, OfferAnswer)
        assert answer.state == "send", answer
        list(self._pool.map(self._put, answer.missing))

    def commit(self) -> Agreement:
        """Say that it was all, and wait until the round is closed."""
        commit = Commit(**self._head, sequence=self._sequence, payload_hash=payload_hash(self._hashes))
        self._transport.call(commit)
        return self.wait(after=self.version)

    def wait(self, after: int) -> Agreement:
        """For a newer agreement than that."""
        while True:
            held = {"held": self._held.version, "held_hash": self._held.anchor_hash} if self._held else {}
            answer = self._transport.call(Poll(**self._head, after=after, wait_s=POLL_S, trees=True, **held))
            assert isinstance(answer, PollAnswer)
            if answer.agreement is not None:
                self.agreement = answer.agreement
                self.version = answer.agreement.version
                return answer.agreement

    def fetch(self) -> int:
        """All parts of the agreement, compared with their hashes; returns how many bytes."""
        for payload in self.agreement.payloads:
            if len(self._received) != payload.size_bytes:
                self._received = memoryview(bytearray(payload.size_bytes))
            list(self._pool.map(partial(self._get, payload), range(self._parts(payload.size_bytes))))
        self._held = self.agreement
        return self.agreement.size_bytes

    def round(self) -> None:
        self.upload()
        self.commit()
        self.fetch()

    def visit(self, address: str) -> int:
        """Join, fetch the newest agreement whole, leave; returns how many bytes."""
        self.join(address)
        self.wait(after=-1)
        size_bytes = self.fetch()
        self._transport.call(Leave(**{name: self._head[name] for name in ("run_id", "worker_id", "incarnation")}))
        self._transport.close()
        return size_bytes

    def close(self) -> None:
        self._pool.shutdown()

    def _parts(self, size_bytes: int) -> int:
        return part_count(size_bytes, self._plan.part_size_bytes)

    def _part(self, frame: memoryview, number: int) -> memoryview:
        return frame[slice(*part_range(number, len(frame), self._plan.part_size_bytes))]

    def _put(self, number: int) -> None:
        put = PutPart(**self._head, sequence=self._sequence, part=number, hash=self._hashes[number])
        self._transport.call(put, body=self._part(self._frame, number))

    def _get(self, payload: Payload, number: int) -> None:
        into = self._part(self._received, number)
        get = GetPart(**self._head, version=payload.version, kind=payload.kind, part=number)
        answer = self._transport.call(get, into=into)
        assert isinstance(answer, GetPartAnswer)
        if part_hash(into) != answer.hash:
            raise RuntimeError(f"part {number} arrived damaged")
