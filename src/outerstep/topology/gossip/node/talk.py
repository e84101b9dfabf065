"""Conversations: with every other member, in a thread of its own, so that none waits for another's slow or dead link.

A conversation is one request and its answer, in which both sides tell all that the other may need. There is one at once
when this peer has something new of its own to tell, and one every `beat_every_s` anyway. Who does not answer is called
less and less often, until it calls itself.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

from ....coordination.backoff import Backoff
from ....errors import OuterstepError, Refused
from ....statements import Converse
from .door import Contacts
from .keeping import Keeper
from .shared import Shared

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
DISK_PATIENCE_S = 60.0
FAILURES_OF_THE_GONE = 2
STALLED_S = 120.0  # a worker reports several times a minute, or it has stopped to on purpose (stalled_after_s)


@dataclass(eq=False)
class _Line:
    """What is known of the talks with one member."""

    key: str
    height: int = -1  # of the last block that it knows; -1 = it has not said yet
    seen: int = -1  # the news that it was told of
    heard: int = -1  # those that it has answered to
    failures: int = 0
    not_before: float = 0.0
    is_wanted: bool = True
    trouble: str = ""


class Talk:
    def __init__(self, shared: Shared, keeper: Keeper, contacts: Contacts, beat_every_s: float) -> None:
        self._shared, self._keeper, self._contacts = shared, keeper, contacts
        self._beat_every_s = beat_every_s
        self._lines: dict[str, _Line] = {}
        self._draw = random.Random()
        self.stuck_at = -1  # a height at which nobody has the next block any more, as it seems
        self.conversations = 0

    def start(self) -> None:
        self._shared.start("peer-pulse", self._beat_always)

    def ensure(self) -> None:
        """With the lock held: a thread for each other member, and none for anybody else."""
        peer = self._shared.peer
        keys = {member.key for member in peer.state.members} - {peer.member.key}
        for key in self._lines.keys() - keys:
            self._lines.pop(key).is_wanted = False
        for member in peer.state.members:
            if member.key in keys and member.key not in self._lines:
                line = self._lines[member.key] = _Line(member.key)
                self._shared.start(f"peer-talk-{member.peer_id}", lambda line=line: self._talk_always(line))  # type: ignore[misc]

    def was_heard(self, peer_id: str) -> None:
        """With the lock held: it has called, so it is there, and worth calling at once."""
        for member in self._shared.peer.state.members:
            if member.peer_id == peer_id and (line := self._lines.get(member.key)) is not None:
                line.not_before = 0.0

    def is_gone(self, key: str) -> bool:
        """With the lock held: it does not answer any more. (It may have left just before.)"""
        line = self._lines.get(key)
        return line is not None and line.failures >= FAILURES_OF_THE_GONE

    def have_heard(self, news: int) -> bool:
        """With the lock held: does every member that can be reached know what was new then?"""
        return all(line.heard >= news or line.failures for line in self._lines.values())

    def troubles(self) -> dict[str, str]:
        """By key: why the last talk with it came to nothing."""
        return {key: line.trouble for key, line in self._lines.items() if line.trouble}

    def _beat_always(self) -> None:
        shared = self._shared
        with shared.lock:
            while not shared.is_stopping:
                if not self._is_stalled():
                    shared.peer.tick(shared.clock())
                shared.news += 1
                self._keeper.note()
                self._contacts.keep_only({member.key for member in shared.peer.state.members})
                shared.wait(lambda: False, self._beat_every_s)

    def _is_stalled(self) -> bool:
        """Alive is who trains, not who has a thread: whose training has stopped to report falls silent, so that the
        others go on without it. If it wakes up, it is let in again."""
        at = self._shared.progress_at
        return at is not None and self._shared.clock() - at > STALLED_S

    # --- one line ---------------------------------------------------------------------------------------------------

    def _talk_always(self, line: _Line) -> None:
        shared = self._shared
        while True:
            with shared.lock:
                while not self._is_due(line):
                    shared.wait(lambda: self._is_due(line), self._beat_every_s)
                if shared.is_stopping or not line.is_wanted:
                    return
                told = self._say(line)
            if told is not None:
                self._converse(line, told)

    def _is_due(self, line: _Line) -> bool:
        if self._shared.is_stopping or not line.is_wanted:
            return True
        return line.seen != self._shared.news and self._shared.clock() >= line.not_before

    def _say(self, line: _Line) -> Converse | None:
        """With the lock held: what it is to be told now, once that is on the disk."""
        peer = self._shared.peer
        if line.height < 0:
            beat = peer.contacts.get(line.key)
            line.height = beat.height if beat is not None else peer.state.height
        line.seen = self._shared.news
        told = peer.say_to(line.height)
        return told if self._keeper.wait_until_kept(DISK_PATIENCE_S) else None

    def _converse(self, line: _Line, told: Converse) -> None:
        transport, said = self._contacts.transport(line.key), line.seen
        try:
            if transport is None:
                raise Refused("nobody has said where it is")
            answer = transport.ask(told)
            if not isinstance(answer, Converse):
                raise Refused("it answered with something else")
        except OuterstepError as error:
            self._put_off(line, error)
            return
        with self._shared.lock:
            self.conversations += 1
            line.failures, line.trouble, line.heard = 0, "", said
            self._hear(line, told, answer)

    def _hear(self, line: _Line, told: Converse, answer: Converse) -> None:
        """With the lock held. Who is behind, or ahead by more than fits into one answer, is called again at once; but
        only as long as that leads further."""
        peer = self._shared.peer
        before, line_before = peer.state.height, line.height
        peer.hear(answer, self._shared.clock())
        line.height = answer.height
        we_lag = answer.height > peer.state.height
        if we_lag and not answer.decisions and peer.state.height == told.height:
            self.stuck_at = told.height
        moved = peer.state.height > before or answer.height > line_before
        if (we_lag or answer.height < peer.state.height) and moved:
            line.seen = -1
        self._keeper.note()

    def _put_off(self, line: _Line, error: OuterstepError) -> None:
        """It did not answer, or not as it should."""
        with self._shared.lock:
            backoff = Backoff(self._beat_every_s, LONGEST_PAUSE_S)
            line.not_before = self._shared.clock() + backoff.pause_s(line.failures, self._draw)
            line.failures += 1
            line.seen, line.height = -1, -1
            if not line.trouble:
                log.info("a peer does not answer: %s", error)
            line.trouble = str(error)


__all__ = ["Talk"]
