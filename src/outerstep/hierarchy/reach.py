"""The probe of a replica's line to the layer above: a thread that now and then sends a few bytes there.

Any replica of a cluster may become its leader, but exchanges measure only the current leader's line. So every replica
measures in the same way, and reports the result at each quorum (topology/torchft/state.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..coordination.autoconfig.meter import LinkMeter
from ..errors import OuterstepError, Refused
from ..types import THE_SERVER
from ..wire.http_transport import HttpTransport
from ..wire.pages import noise
from .ways_up import PROBE_BYTES, PROBE_TIMEOUT_S, addresses

log = logging.getLogger(__name__)

PROBE_S = 60.0
AGAIN_S = 5.0  # after a probe without an answer
CUT_AFTER = 3  # failures in a row
LEAST_SHARE = 0.25  # the least share of a probe's time that is not latency
OWN = "this replica"

Connect = Callable[[str], HttpTransport]


class ReachProbe:
    """The thread. `above`: one address, or several of the same server. The slower direction is a line's rate."""

    def __init__(self, above: str, credentials: str | None = None, connect: Connect | None = None) -> None:
        self._addresses = addresses(above)
        self._connect = connect or (lambda at: HttpTransport(at, credentials=credentials, timeout_s=PROBE_TIMEOUT_S))
        self._meter = LinkMeter(OWN)
        self._failures = 0
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._live, name="outerstep-reach", daemon=True)

    def start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self._ending.set()

    def reach(self) -> tuple[bool, float]:
        """(Does this replica reach the layer above, as far as is known?, bytes per second; 0 = not measured)."""
        with self._lock:
            rates = [report.bytes_per_s for report in self._meter.reports(time.monotonic())]
            return self._failures < CUT_AFTER, min(rates) if len(rates) == 2 else 0.0

    def _live(self) -> None:
        pause_s = AGAIN_S
        while not self._ending.wait(pause_s):
            pause_s = PROBE_S if self.look() else AGAIN_S

    def look(self) -> bool:
        """Probe. Did the server answer? A refusal is an answer."""
        answered = any(self._probe(address) for address in self._addresses)
        with self._lock:
            self._failures = 0 if answered else self._failures + 1
        return answered

    def _probe(self, address: str) -> bool:
        try:
            transport = self._connect(address)
            try:
                transport.probe_up(noise(1))  # connects
                latency_s = _timed(lambda: transport.probe_up(noise(1)))
                up_s = _timed(lambda: transport.probe_up(noise(PROBE_BYTES)))
                down_s = _timed(lambda: transport.probe_down(memoryview(bytearray(PROBE_BYTES))))
            finally:
                transport.close()
        except Refused as error:
            log.debug("a probe of the layer above was refused: %s", error)
            return True
        except OuterstepError as error:
            log.debug("a probe of the layer above failed: %s", error)
            return False
        now = time.monotonic()
        with self._lock:
            for ends, seconds in (((OWN, THE_SERVER), up_s), ((THE_SERVER, OWN), down_s)):
                seconds = max(seconds - latency_s, LEAST_SHARE * seconds)
                self._meter.transferred(*ends, PROBE_BYTES, seconds, now)
        return True


def _timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began
