"""Worker ids as old clients choose them, and how a client introduces itself.

The old protocol takes any text for a worker id. Here an id is in file names, log lines and commands, so it has letters,
digits and a few signs only (types.py). An id that is one here stays what it is. Any other becomes its harmless signs
and a hash of all of it: the same text gives the same id at every start, and two texts two ids. Clients are answered in
their own words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from ..topology.server.client import as_info
from ..types import InfoValue, Positive, Wishes, WorkerId

SaidId = Annotated[str, Meta(min_length=1, max_length=256)]
"""A worker id in its client's own words."""

KEPT = 48  # characters of it that are harmless
ADDRESS, SAID = "address", "worker_id"  # facts that this port adds to what a client tells of itself


def id_of(said: str) -> str:
    try:
        return msgspec.convert(said, WorkerId)
    except msgspec.ValidationError:
        harmless = re.sub(r"[^A-Za-z0-9_.:\-]", "_", said).lstrip(".:-")[:KEPT]
        return f"{harmless or 'worker'}-{sha256(said.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Introduction:
    """Who a client says that it is, and where it comes from. `info` also remembers, for the time after a restart of the
    server, what here depends on it: the address, and whether the id is another one in the client's words. What these
    were to the letter is forgotten then (`said` is None): only as much as may be printed is kept."""

    worker_id: str
    said: str | None
    hostname: str
    address: str
    info: Mapping[str, InfoValue]

    @classmethod
    def of(cls, said: str, hostname: str, address: str, told: Mapping[str, object]) -> Introduction:
        worker_id = id_of(said)
        own = {ADDRESS: address} if worker_id == said else {ADDRESS: address, SAID: said}
        first = {name: told[name] for name in ("sync_every", "bf16_comm", "dylu") if name in told}
        others = {name: value for name, value in told.items() if name not in own}
        return cls(worker_id, said, hostname, address, as_info({**own, **first, **others}))

    @classmethod
    def remembered(cls, worker_id: str, hostname: str, info: Mapping[str, InfoValue]) -> Introduction | None:
        """As it was before the server was restarted; None: the ledger does not say where it came from."""
        address = info.get(ADDRESS)
        if not isinstance(address, str):
            return None
        return cls(worker_id, None if SAID in info else worker_id, hostname, address, info)

    @property
    def shown(self) -> str:
        """The id in the client's words, as far as they are known."""
        return self.said or str(self.info.get(SAID, self.worker_id))

    def is_named(self, said: str) -> bool:
        """Two texts never mean the same worker, whatever they come to here. (An id that stands for another text is
        not that text itself.)"""
        return id_of(said) == self.worker_id and (said == self.said if self.said else said != self.worker_id)

    @property
    def sync_every(self) -> int | None:
        """The steps between its exchanges, if it says so and means it."""
        try:
            return msgspec.convert(self.info.get("sync_every"), Positive | None)
        except msgspec.ValidationError:
            return None

    @property
    def follows_advice(self) -> bool:
        """Does it take the number of steps that a heartbeat's answer recommends?"""
        return self.info.get("dylu") is True

    def wishes(self, said: Wishes) -> Wishes:
        """What it asks of a run that has no plan yet, beside what the operator has `said`. It sends bf16 if it says so,
        and it is answered in bf16 only where the operator wants that: the old servers answered in fp32."""
        wishes = Wishes(sync_every=self.sync_every) if said.sync_every is None else Wishes()
        if said.codec is None:
            codec = "bf16" if self.info.get("bf16_comm") is True else "fp32"
            wishes = msgspec.structs.replace(wishes, codec=codec)
            if said.down_codec is None:
                wishes = msgspec.structs.replace(wishes, down_codec="fp32")
        return wishes
