"""What a node is told, what it tells, and what it asks of the topology above it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ....defaults import PART_SIZE_BYTES, PEER_BEAT_S
from ....errors import ConfigError
from ....statements import Offered, PeerId, Round
from ....wire.messages import MAX_PART_BYTES


@dataclass(frozen=True)
class NodeSettings:
    """`listen`: host:port, port 0 = any free one. `advertise`: host or host:port that others should call. `join`:
    addresses or join strings of peers; none, and nothing in the folder: this peer founds a run. `folder`: where its
    identity and what it must not forget are kept; None = in memory only, and a restart makes it somebody else.
    `credentials`: the user's folder with certificate and tokens. `insecure`: plain HTTP without tokens. `page`: show
    the run to browsers.
    `invitation`: the founder's signature, if the run wants invitations (`outerstep invite`).
    `memory_bytes`: for contributions; what does not fit goes to a spool file."""

    peer_id: str
    listen: str = "0.0.0.0:0"
    advertise: str | None = None
    join: tuple[str, ...] = ()
    folder: str | None = None
    credentials: str | None = None
    insecure: bool = False
    page: bool = True
    invitation: str = ""
    beat_every_s: float = PEER_BEAT_S
    part_size_bytes: int = PART_SIZE_BYTES
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        try:
            msgspec.convert(self.peer_id, PeerId)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"a peer id has 1 to 128 letters, digits, '.', ':', '-' or '_'; got {self.peer_id!r}"
            ) from error
        if not re.fullmatch(r"([0-9a-f]{128})?", self.invitation):
            raise ConfigError(
                f"an invitation has 128 hexadecimal digits, got {len(self.invitation)} characters: give the line that "
                "`outerstep invite` printed"
            )
        if self.beat_every_s <= 0.0:
            raise ConfigError(f"beat_every_s must be > 0 s, got {self.beat_every_s:g}")
        if not 1 <= self.part_size_bytes <= MAX_PART_BYTES:
            raise ConfigError(f"part_size_bytes must be in 1 … {MAX_PART_BYTES}, got {self.part_size_bytes}")
        if self.memory_bytes < 0:
            raise ConfigError(f"memory_bytes must be at least 0, got {self.memory_bytes}")


class Callbacks(Protocol):
    """What the topology does for the node. The node calls them from its threads, each of them one call at a time."""

    def check(self, fragment: int, data: memoryview) -> str:
        """ "" = this contribution can be used; else why not."""

    def snapshot(self, fragment: int) -> tuple[int, memoryview] | None:
        """Version and bytes of the newest anchor with the outer state that goes with it, a consistent snapshot that
        does not change any more; None = it is not held. All peers must write the same state as the same bytes."""

    def most_snapshot_bytes(self, fragment: int) -> int:
        """The size limit of a snapshot of the fragment."""


@dataclass(frozen=True)
class DecidedRound:
    """A round that was decided, with the bytes of every contribution in it: (peer id, what was offered, its bytes), in
    the order of the ids."""

    block: Round
    contributions: tuple[tuple[str, Offered, memoryview], ...]
