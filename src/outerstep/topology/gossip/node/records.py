"""What a peer must not forget: the record on its disk, and the thread that writes it.

Nothing is said, and nothing that was decided is acted on, before the disk holds it. One thread writes. A thread that
wants to speak waits until what it is about to say is written (`wait_until_kept`); the training thread never waits for a
disk. Several changes while one is being written cost one more write, not several.

A peer's folder:

lock             held for as long as a peer lives
key.pem          its Ed25519 key, mode 0600: with this it is the same peer after a restart
run.json         which run it belongs to, under which id, and the run's token, mode 0600
document         what the topology agreed on with the others
keepsake         where the run was, and everything that the peer has said and may not say differently
beats            the members' latest beats: where they were

A file holds what it held before or what it holds now, whenever the power is cut.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from ....coordination.gossip import Keepsake
from ....coordination.gossip.ballot import Ballots
from ....coordination.gossip.meaning import wrong_with_state
from ....durable.disk import replace_synced
from ....durable.lock import lock
from ....errors import ConfigError
from ....events import DiskFails, DiskWorks
from ....security.secret_files import make_folder, read_secret, write_secret
from ....security.signing import SigningKey, open_key
from ....statements import ChainState, Decision, PeerId, Signed
from ....types import Plain, Positive, RunId, Signature
from ....versions import Since2
from .shared import Shared

log = logging.getLogger(__name__)

RETRY_S = 1.0


class Recorder:
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
            self._shared.start("peer-recorder", self._write_always)

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
        """With the lock held: resume from this state."""
        if self._shared.peer.leap(state, self._shared.clock()):
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
                if shared.trouble:
                    shared.events(DiskWorks())
                shared.trouble = ""
                self._written = number
                if keepsake is not None:
                    self._written_height = keepsake.state.height
                self._act()
                shared.changed()

    def _wait_for_disk(self, error: OSError) -> None:
        """Fall silent until the disk can be written again."""
        assert self._folder is not None
        shared, why = self._shared, f"cannot write to {self._folder.place}: {error.strerror or error}"
        with shared.lock:
            if shared.trouble != why:
                log.error("this peer %s; it says nothing until it can", why)
                shared.events(DiskFails(why))
            shared.trouble = why
            shared.wait(lambda: False, RETRY_S)


FORMAT, VERSION = "outerstep peer", 1

T = TypeVar("T")


class PeerRunFacts(Plain, frozen=True):
    """The content of run.json. `token` "" = a run without one. `protocol`: the run's."""

    run_id: RunId
    peer_id: PeerId
    token: str = ""
    attackers: int = msgspec.field(default=1, name="liars")  # as earlier versions wrote it
    format: str = FORMAT
    version: Positive = VERSION
    protocol: Since2[Positive] = msgspec.UNSET
    invitation: Since2[Signature] = msgspec.UNSET


class PeerFolder:
    """A peer's folder, locked until `close`. `is_whole`: what binds the peer must be readable; else it is only `kept`
    as it is."""

    def __init__(self, place: str | os.PathLike[str], *, is_whole: bool = True) -> None:
        self.place = Path(place)
        self._lock: int | None = None
        try:
            make_folder(self.place)
            self._lock = lock(self.place, owner="peer", folder="peer_dir")
            self.key: SigningKey = open_key(self.place / "key.pem")
            self.facts = self._read_facts()
            self.kept = self._find("keepsake") if self.facts is not None else None
            self.keepsake: Keepsake | None = None
            if self.kept is not None and is_whole:
                self.keepsake = decode_kept(self.place / "keepsake", self.kept, Keepsake)
                self._check_state(self.keepsake.state)
            self.beats = self._read_beats()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the peer's folder {self.place} cannot be used: {error.strerror or error}; choose another"
            ) from error
        except BaseException:
            self.close()
            raise

    def _check_state(self, state: ChainState) -> None:
        wrong = wrong_with_state(state)
        if wrong:
            raise ConfigError(
                f"the peer's folder {self.place} {wrong}: give this peer an empty folder, with which it joins as "
                "somebody new"
            )

    @property
    def document(self) -> bytes:
        return (self.place / "document").read_bytes()

    def take_up(self, facts: PeerRunFacts, document: bytes, state: ChainState, beats: tuple[Signed, ...]) -> Keepsake:
        """Use the folder for this run from now on. What the peer has said before still binds it. Where the run stands
        is read from the folder or from `state`, whichever is newer."""
        kept = self.keepsake
        if kept is not None and kept.run_id != facts.run_id:
            raise ConfigError(
                f"the folder {str(self.place)!r} holds run {kept.run_id}, this is run {facts.run_id}: give this peer "
                "an empty folder"
            )
        if kept is None:
            kept = Keepsake(run_id=facts.run_id, state=state, incarnation=0)
        elif state.height > kept.state.height:
            kept = replace(kept, state=state, ballots=Ballots())
        kept = replace(kept, incarnation=kept.incarnation + 1)
        replace_synced(self.place / "document", document)
        write_secret(self.place / "run.json", msgspec.json.encode(facts))
        self.facts = facts
        self.keep(kept)
        self.remember(beats or self.beats)
        return kept

    def keep(self, keepsake: Keepsake) -> None:
        """Write it to the disk before this returns, or raise OSError."""
        replace_synced(self.place / "keepsake", msgspec.msgpack.encode(keepsake))
        self.keepsake = keepsake

    def remember(self, beats: tuple[Signed, ...]) -> None:
        replace_synced(self.place / "beats", msgspec.msgpack.encode(beats))
        self.beats = beats

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read_facts(self) -> PeerRunFacts | None:
        file = self.place / "run.json"
        try:
            facts = msgspec.json.decode(read_secret(file), type=PeerRunFacts)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise _unreadable(file, error) from error
        if (facts.format, facts.version) != (FORMAT, VERSION):
            raise ConfigError(
                f"{file} must have format {FORMAT!r} {VERSION}, got {facts.format[:80]!r} {facts.version}"
            )
        return facts

    def _find(self, name: str) -> bytes | None:
        try:
            return (self.place / name).read_bytes()
        except FileNotFoundError:
            return None

    def _read_beats(self) -> tuple[Signed, ...]:
        """Where the members were. A spoiled file is no reason not to begin: each member says it again."""
        file, data = self.place / "beats", self._find("beats")
        try:
            return () if data is None else decode_kept(file, data, tuple[Signed, ...])
        except ConfigError as error:
            log.warning("%s is left aside: %s", file, error.__cause__)
            return ()


def decode_kept(file: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _unreadable(file, error) from error


def remembered_id(place: str | os.PathLike[str]) -> str | None:
    """The id of the peer that has used this folder; None: none has."""
    try:
        return msgspec.json.decode(read_secret(Path(place) / "run.json"), type=PeerRunFacts).peer_id
    except (OSError, msgspec.MsgspecError, UnicodeError):  # `PeerFolder` says what is wrong with it
        return None


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{file} cannot be read: {error}; try `outerstep repair {file.parent}`, or restore it, or give this peer an "
        "empty folder, with which it comes as somebody new (never with an older copy of its folder: it would "
        "contradict itself, and be expelled for it)"
    )
