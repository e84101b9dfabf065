"""Whether a replica reaches the layer above, and how fast: a thread that sends a few bytes there now and then.

Every replica of a cluster may come to lead it, and only the leader's exchanges show what its line is like. So all of
them measure in the same way, and tell each other at their quorums (topology/torchft/state.py).
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
AGAIN_S = 5.0  # after one that got no answer
CUT_AFTER = 3  # in a row
LEAST_SHARE = 0.25  # of a probe's time that is no latency, at least
OWN = "this replica"

Connect = Callable[[str], HttpTransport]


class ReachProbe:
    """`above`: one address, or several of the same server. A line is measured by its slower direction."""

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
        """Whether it reaches the layer above, as far as is known; and its bytes per second, 0 = not measured."""
        with self._lock:
            rates = [report.bytes_per_s for report in self._meter.reports(time.monotonic())]
            return self._failures < CUT_AFTER, min(rates) if len(rates) == 2 else 0.0

    def _live(self) -> None:
        pause_s = AGAIN_S
        while not self._ending.wait(pause_s):
            pause_s = PROBE_S if self.look() else AGAIN_S

    def look(self) -> bool:
        """Was there an answer? A refusal is one."""
        answered = any(self._probe(address) for address in self._addresses)
        with self._lock:
            self._failures = 0 if answered else self._failures + 1
        return answered

    def _probe(self, address: str) -> bool:
        try:
            transport = self._connect(address)
            try:
                transport.probe_up(noise(1))  # which connects
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
