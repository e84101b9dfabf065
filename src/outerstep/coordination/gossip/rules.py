"""What all peers of a run must have in common to decide alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...defaults import PEER_HEARTBEAT_TIMEOUT_S
from ...errors import ConfigError
from ...versions import PROTOCOL_VERSION, SPOKEN_HERE, is_spoken
from .ballot import TurnTimeouts


@dataclass(frozen=True)
class GossipRules:
    """What all peers of a run must have in common.

    `attackers`: how many may say what they like (chain.py says how many must then agree). `min_peers`: contributions
    that a round needs at least, beside more than half of the members. `round_deadline_s`: how long after its first
    contribution a round waits for members that are alive; None: as long as they are. `heartbeat_timeout_s`: how long a
    member may be silent. `protocol`: in which all that is signed is said, for as long as the run lasts. `inviter`: the
    key of whoever invites peers; "" = a peer needs no invitation."""

    min_peers: int = 2
    attackers: int = 1
    heartbeat_timeout_s: float = PEER_HEARTBEAT_TIMEOUT_S
    round_deadline_s: float | None = None
    protocol: int = PROTOCOL_VERSION
    inviter: str = ""
    pace: TurnTimeouts = field(default_factory=TurnTimeouts)

    def __post_init__(self) -> None:
        if self.min_peers < 1:
            raise ConfigError(f"min_peers must be at least 1, got {self.min_peers}")
        if self.attackers < 0:
            raise ConfigError(f"attackers must be at least 0, got {self.attackers}")
        if not is_spoken(self.protocol):
            raise ConfigError(f"protocol must be one of {SPOKEN_HERE}, got {self.protocol}: update outerstep")
        if self.inviter and self.protocol < 2:
            raise ConfigError(f"invite_only needs protocol 2, got {self.protocol}: leave one of the two out")
        if not 0.0 < self.heartbeat_timeout_s < math.inf:
            raise ConfigError(f"heartbeat_timeout_s must be > 0 s, got {self.heartbeat_timeout_s:g}")
