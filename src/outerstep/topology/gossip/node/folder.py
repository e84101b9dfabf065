"""A peer's folder: who it is, and what it must not forget.

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
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from ....coordination.gossip import Keepsake
from ....coordination.gossip.ballot import Ballots
from ....durable.disk import replace_synced
from ....durable.lock import lock
from ....errors import ConfigError
from ....security.secret_files import make_folder, read_secret, write_secret
from ....security.signing import SigningKey, open_key
from ....statements import ChainState, PeerId, Signed
from ....types import Plain, Positive, RunId

log = logging.getLogger(__name__)

FORMAT, VERSION = "outerstep peer", 1

T = TypeVar("T")


class RunFacts(Plain, frozen=True):
    """The content of run.json. `token` "" = a run without one."""

    run_id: RunId
    peer_id: PeerId
    token: str = ""
    liars: int = 1
    format: str = FORMAT
    version: Positive = VERSION


class PeerFolder:
    """Ours from here to `close`: a second peer is refused."""

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.place = Path(place)
        self._lock: int | None = None
        try:
            make_folder(self.place)
            self._lock = lock(self.place, owner="peer", folder="peer_dir")
            self.key: SigningKey = open_key(self.place / "key.pem")
            self.facts = self._read_facts()
            self.keepsake = self._read("keepsake", Keepsake) if self.facts is not None else None
            self.beats: tuple[Signed, ...] = self._read("beats", tuple[Signed, ...]) or ()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the peer's folder {self.place} cannot be used: {error.strerror or error}; choose another"
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def document(self) -> bytes:
        return (self.place / "document").read_bytes()

    def take_up(self, facts: RunFacts, document: bytes, state: ChainState, beats: tuple[Signed, ...]) -> Keepsake:
        """This run lies here from now on. What this peer has said in it before binds it still; where the run is, the
        folder knows, or `state`, whichever is newer."""
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
        """On the disk when this returns; OSError if it cannot be."""
        replace_synced(self.place / "keepsake", msgspec.msgpack.encode(keepsake))
        self.keepsake = keepsake

    def remember(self, beats: tuple[Signed, ...]) -> None:
        replace_synced(self.place / "beats", msgspec.msgpack.encode(beats))
        self.beats = beats

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read_facts(self) -> RunFacts | None:
        file = self.place / "run.json"
        try:
            facts = msgspec.json.decode(read_secret(file), type=RunFacts)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise _unreadable(file, error) from error
        if (facts.format, facts.version) != (FORMAT, VERSION):
            raise ConfigError(
                f"{file} must have format {FORMAT!r} {VERSION}, got {facts.format[:80]!r} {facts.version}"
            )
        return facts

    def _read(self, name: str, kind: type[T]) -> T | None:
        file = self.place / name
        try:
            return msgspec.msgpack.decode(file.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise _unreadable(file, error) from error


def remembered_id(place: str | os.PathLike[str]) -> str | None:
    """Under which id a peer has used this folder; None: nobody has."""
    try:
        return msgspec.json.decode(read_secret(Path(place) / "run.json"), type=RunFacts).peer_id
    except (OSError, msgspec.MsgspecError):  # who opens it says what is wrong with it
        return None


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{file} cannot be read: {error}; restore it, or give this peer an empty folder, with which it comes as "
        "somebody new (never with an older copy of its folder: it would contradict itself, and be expelled for it)"
    )


__all__ = ["PeerFolder", "RunFacts", "remembered_id"]
