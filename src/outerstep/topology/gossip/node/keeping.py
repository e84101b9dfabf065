"""Nothing is said, and nothing that was decided is acted on, before the disk holds what the peer must not forget.

One thread writes. Who wants to speak waits until what it is about to say is written (`wait_until_kept`); the training
thread never waits for a disk. Several changes while one is being written cost one more write, not several.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ....coordination.gossip import Keepsake
from ....statements import ChainState, Decision, Signed
from .folder import PeerFolder
from .shared import Shared

log = logging.getLogger(__name__)

RETRY_S = 1.0


class Keeper:
    """`on_decided` is called for every decided block, in order, with the lock held; `on_leap` when the run was found to
    be so far ahead that its blocks are not to be had. `folder` None: what is not kept need not be waited for."""

    def __init__(
        self,
        shared: Shared,
        folder: PeerFolder | None,
        on_decided: Callable[[Decision], None],
        on_leap: Callable[[ChainState], None],
    ) -> None:
        self._shared, self._folder = shared, folder
        self._on_decided, self._on_leap = on_decided, on_leap
        self._newest: Keepsake | None = None
        self._number = 0  # of the newest
        self._written = 0
        self._written_height = -1
        self._taken_height = shared.peer.state.height
        self._leap: ChainState | None = None
        self._beats: tuple[Signed, ...] | None = None

    def start(self) -> None:
        if self._folder is not None:
            self._shared.start("peer-keeping", self._write_always)

    def note(self) -> None:
        """With the lock held, after anything was done with the peer."""
        peer = self._shared.peer
        keepsake = peer.keepsake
        if keepsake != self._newest:
            self._newest, self._number = keepsake, self._number + 1
        if self._folder is None:
            self._written, self._written_height = self._number, keepsake.state.height
            self._act()
        if peer.stirred:
            peer.stirred = False
            self._shared.news += 1
        self._shared.changed()

    def leap(self, state: ChainState) -> None:
        """With the lock held: go on from this state."""
        self._shared.peer.leap(state, self._shared.clock())
        self._leap = state
        self.note()

    def wait_until_kept(self, timeout_s: float) -> bool:
        """With the lock held: is all that the peer has said so far on the disk?"""
        number = self._number
        return self._shared.wait(lambda: self._written >= number, timeout_s)

    def remember(self, beats: tuple[Signed, ...]) -> None:
        """With the lock held: where the members are. Nobody waits for that to be written."""
        self._beats = beats

    def _act(self) -> None:
        """Act on what was decided, as far as it is written."""
        if self._leap is not None and self._leap.height <= self._written_height:
            self._on_leap(self._leap)
            self._taken_height, self._leap = self._leap.height, None
        while self._leap is None and self._taken_height < self._written_height:
            decision = self._shared.peer.take()
            if decision is None:
                return
            self._taken_height = decision.block.height
            self._on_decided(decision)

    def _write_always(self) -> None:
        assert self._folder is not None
        shared = self._shared
        while True:
            with shared.lock:
                goes_on = shared.wait(lambda: self._written < self._number or self._beats is not None, 3600.0)
                keepsake, number = self._newest, self._number
                is_new, beats, self._beats = self._written < number, self._beats, None
            if not goes_on and not is_new:
                return
            try:
                if keepsake is not None and is_new:
                    self._folder.keep(keepsake)
                if beats is not None:
                    self._folder.remember(beats)
            except OSError as error:
                self._wait_for_disk(error)
                if not goes_on:
                    return
                continue
            with shared.lock:
                shared.trouble = ""
                self._written = number
                if keepsake is not None:
                    self._written_height = keepsake.state.height
                self._act()
                shared.changed()

    def _wait_for_disk(self, error: OSError) -> None:
        """The peer falls silent, and goes on when it can write again."""
        assert self._folder is not None
        shared, why = self._shared, f"cannot write to {self._folder.place}: {error.strerror or error}"
        with shared.lock:
            if shared.trouble != why:
                log.error("this peer %s; it says nothing until it can", why)
            shared.trouble = why
            shared.wait(lambda: False, RETRY_S)


__all__ = ["Keeper"]
