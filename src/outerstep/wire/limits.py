"""What one server's connections may cost it.

*Strangers* are connections that have not shown a valid token yet. They live short and have a room of their own, so that
however many come, workers keep theirs. *Slow* is judged over long windows, and only while it is the peer's turn: the
first minute of a request is free, and after that 4 KiB a minute are enough, which is a hundredth of what one of several
transfers over a link of 100 kbit/s makes.

| what | limit | then |
|---|---|---|
| connections, all | `max_connections` | a stranger makes room, else the newcomer is closed |
| strangers | `max_strangers`, half of that | a stranger of the address that has most of them makes room |
| strangers of an address that was refused often | `doubtful_strangers` | the same |
| a stranger's life | `stranger_s` | closed |
| a TLS handshake | `stall_s` in all | closed |
| silence inside a request or an answer | `stall_s` | closed |
| a request or an answer under way | `least_bytes` in each `window_s` of waiting for the peer | closed |
| between two requests | `idle_s` | closed |
| refusals of one address | `free_refusals`, then `refusals_per_s` | each takes `penalty_s`, and the connection ends |
| messages (not parts) in memory | `message_bytes` | 503, ask again |
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_STRANGERS = 16


@dataclass(frozen=True)
class ServiceLimits:
    max_connections: int = 1024
    few_connections: int = 48  # up to so many need not take turns
    idle_s: float = 120.0  # between two requests on one connection
    stall_s: float = 30.0  # without a byte, inside a request
    window_s: float = 60.0
    least_bytes: int = 4096
    stranger_s: float = 120.0
    settling_s: float = 5.0  # younger strangers are not dropped for others of their own address
    doubtful_strangers: int = 4
    free_refusals: int = 256
    refusals_per_s: float = 2.0
    penalty_s: float = 1.0
    message_bytes: int = 256 << 20
    keepalive_s: int | None = None  # between probes by which the kernel finds out that a silent peer is gone
    control_from_anywhere: bool = False  # else the operator's orders are taken from this machine only

    @property
    def max_strangers(self) -> int:
        return min(self.max_connections, max(LEAST_STRANGERS, self.max_connections // 2))
