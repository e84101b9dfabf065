"""One transport over several ways to the layer above: if a call gets no answer on one way, it is repeated on the next.

coordination/layers/routing.py chooses the way. This file makes and times the calls, and a thread probes the ways that
are not in use. Every request of the protocol may be repeated. So a contribution counts once even if its offer took one
way and its parts take another, as after a broken connection.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec import UNSET

from ..coordination.layers.routing import Routing, WayUp
from ..errors import ConfigError, OuterstepError, Refused, TransportError, UntrustedServer
from ..observe.status import WayStatus
from ..security import redact
from ..topology.server.link import MOST_BYTES_PER_S
from ..types import THE_SERVER, Answer, Heartbeat, JoinAnswer, MeasuredLink, Poll, Request
from ..versions import PROTOCOL_VERSION
from ..wire.http_transport import HttpTransport
from ..wire.pages import noise
from ..wire.transport import Transport

log = logging.getLogger(__name__)

PROBE_BYTES = 128 << 10
PROBE_TIMEOUT_S = 10.0
LOOK_S = 0.5
MOST_LATENCY_S = 60.0  # the most that is reported
MOST_LATENCY = 0.75  # of a transfer's time: the last measured latency may exceed the actual one

Connect = Callable[[WayUp], HttpTransport]


def addresses(text: str | None) -> list[str]:
    """The addresses in the text, which commas or spaces separate."""
    return [each for each in re.split(r"[,\s]+", text or "") if each]


def transport_up(above: str, via: Sequence[str] = (), *, kept_connections: int, credentials: str | None) -> Transport:
    """The transport to the layer above at `above`, one address or several of the same run, and through relays `via`."""
    servers = addresses(above)
    if not servers:
        raise ConfigError("above must be the address of a server, got nothing")

    def connect(way: WayUp) -> HttpTransport:
        relay = HttpTransport(way.relay, credentials=credentials, timeout_s=PROBE_TIMEOUT_S) if way.relay else None
        return HttpTransport(way.server, kept_connections=kept_connections, credentials=credentials, relay=relay)

    if len(servers) == 1 and not via:
        return connect(WayUp(servers[0]))
    return WaysUp(Routing(servers, via), connect)


@dataclass
class _Burst:
    """The simultaneous transfers on one way. Together they show its speed."""

    count: int = 0
    since: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0

    def begin(self, now: float, size_bytes: int) -> None:
        if size_bytes:
            if self.count == 0:
                self.since, self.up_bytes, self.down_bytes = now, 0, 0
            self.count += 1

    def end(self, up_bytes: int, down_bytes: int, *, arrived: bool) -> bool:
        """Has the last transfer ended, and has anything arrived?"""
        if not up_bytes and not down_bytes:
            return False
        self.count -= 1
        if arrived:
            self.up_bytes += up_bytes
            self.down_bytes += down_bytes
        return self.count == 0 and self.up_bytes + self.down_bytes > 0


class WaysUp:
    """(`Transport`.) `connect` makes the transport of a way on first use."""

    def __init__(self, routing: Routing, connect: Connect, clock: Callable[[], float] = time.monotonic) -> None:
        self._routing, self._connect, self._clock = routing, connect, clock
        self._lock = threading.Lock()
        self._made: dict[WayUp, HttpTransport] = {}
        self._busy = {way: _Burst() for way in routing.ways}
        self._sessions: dict[str, str] = {}
        self._spread = {True: 0, False: 0}  # how many connections parts share, up and down
        self._ending = threading.Event()
        self._prober = threading.Thread(target=self._probe_always, name="outerstep-ways", daemon=True)
        self._prober.start()

    @property
    def address(self) -> str:
        return redact(str(self._routing.current))

    @property
    def protocol(self) -> int:
        made = self._made.get(self._routing.current)
        return made.protocol if made is not None else PROTOCOL_VERSION

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        failed: list[WayUp] = []
        is_silent = False  # at least one way gave no answer
        while True:
            way = self._choose(failed)
            try:
                comes = into is not None and not isinstance(request, Poll)  # a poll's answer may be delayed on purpose
                sizes = len(body) if body is not None else 0, len(into) if into is not None and comes else 0
                with self._timing(way, *sizes, is_short=isinstance(request, Heartbeat)):
                    answer = self._transport(way).call(request, body=body, into=into, timeout_s=timeout_s)
            except (TransportError, UntrustedServer) as error:  # a wrong server deceives nobody
                log.debug("no answer on %s: %s", redact(str(way)), error)
                failed.append(way)
                is_silent = is_silent or isinstance(error, TransportError)
                if len(failed) == len(self._routing.ways):
                    if is_silent and isinstance(error, UntrustedServer):  # the right server may still answer
                        raise TransportError(str(error)) from error
                    raise
                continue
            if isinstance(answer, JoinAnswer) and answer.session is not UNSET:
                self.show_session(getattr(request, "worker_id", ""), answer.session)
            return answer

    def show_session(self, worker_id: str, session: str) -> None:
        with self._lock:
            self._sessions[worker_id] = session
            made = list(self._made.values())
        for transport in made:
            transport.show_session(worker_id, session)

    def spread(self, connections: int, *, up: bool) -> None:
        with self._lock:
            self._spread[up], made = connections, list(self._made.values())
        for transport in made:
            transport.spread(connections, up=up)

    def status(self) -> dict[str, object]:
        return self._transport(self._choose([])).status()

    def close(self) -> None:
        self._ending.set()
        with self._lock:
            made = list(self._made.values())
        for transport in made:
            transport.close()

    def order(self, sends_to: str | None) -> None:
        """Follow the plan above. It names a relaying cluster, the server itself, or nothing (None)."""
        with self._lock:
            relays = {made.relay_cluster: way.relay for way, made in self._made.items() if way.relay}
            self._routing.order("" if sends_to == THE_SERVER else relays.get(sends_to) if sends_to else None)

    def told(self, cluster: str) -> tuple[tuple[MeasuredLink, ...], str]:
        """For the plan: (measurements of this cluster's ways, the relaying cluster in use; "" = direct). A way through
        a relay is reported as a link to the relaying cluster."""
        with self._lock:
            ways = self._routing.measured(self._clock())
            names = {way: made.relay_cluster if way.relay else THE_SERVER for way, made in self._made.items()}
            via = names.get(self._routing.current, THE_SERVER)
        links = []
        for each in ways:
            view, other = each.view, names.get(each.view.way, "")
            if other and other != cluster:
                rates = min(view.up_bytes_per_s, MOST_BYTES_PER_S), min(view.down_bytes_per_s, MOST_BYTES_PER_S)
                half_s = min(view.latency_s / 2, MOST_LATENCY_S)
                for source, target, rate, age_s in (
                    (cluster, other, rates[0], each.up_age_s),
                    (other, cluster, rates[1], each.down_age_s),
                ):
                    links.append(
                        MeasuredLink(source=source, target=target, bytes_per_s=rate, latency_s=half_s, age_s=age_s)
                    )
        return tuple(links), "" if via == THE_SERVER else via

    def describe(self) -> list[WayStatus]:
        """The ways, for a status."""
        with self._lock:
            views = self._routing.views()
        return [
            WayStatus(
                way=redact(str(view.way)),
                used=view.is_used,
                works=view.is_whole,
                ordered=view.is_ordered,
                up_bytes_per_s=view.up_bytes_per_s,
                down_bytes_per_s=view.down_bytes_per_s,
                latency_s=view.latency_s,
            )
            for view in views
        ]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _choose(self, failed: list[WayUp]) -> WayUp:
        with self._lock:
            before, chosen = self._routing.current, self._routing.best(self._clock(), failed)
            reason = self._routing.reason
        if chosen is None:  # another call has just taken the only way that this call has not tried
            chosen = next(way for way in self._routing.ways if way not in failed)
        elif chosen != before:
            log.warning("the way to the layer above is now %s%s", redact(str(chosen)), f": {reason}" if reason else "")
        return chosen

    def _transport(self, way: WayUp) -> HttpTransport:
        """The transport of a way, made on first use: a relay that has not joined yet must not block the direct way."""
        with self._lock:
            made = self._made.get(way)
            if made is None:
                try:
                    made = self._made[way] = self._connect(way)
                except ConfigError as error:  # no credentials yet
                    if len(self._made) == 0 and way == self._routing.ways[0]:
                        raise
                    raise TransportError(f"no way to {redact(str(way))}: {error}") from error
                for worker_id, session in self._sessions.items():
                    made.show_session(worker_id, session)
                for up, connections in self._spread.items():
                    made.spread(connections, up=up)
            return made

    @contextmanager
    def _timing(self, way: WayUp, up_bytes: int, down_bytes: int, *, is_short: bool) -> Iterator[None]:
        """Report to the routing how a call went. A refusal is an answer. `is_short`: the other end answers at once."""
        began, answered, arrived = self._clock(), False, False
        with self._lock:
            self._busy[way].begin(began, up_bytes + down_bytes)
        try:
            yield
            answered = arrived = True
        except Refused:
            answered = True
            raise
        finally:
            now = self._clock()
            with self._lock:
                if answered:
                    self._routing.answered(way, now, now - began if is_short else None)
                else:
                    self._routing.failed(way, now, since=began)
                busy = self._busy[way]
                if busy.end(up_bytes, down_bytes, arrived=arrived):
                    seconds = _without_latency(now - busy.since, self._routing.latency_s(way))
                    self._routing.moved(way, now, seconds, up_bytes=busy.up_bytes, down_bytes=busy.down_bytes)

    def _probe_always(self) -> None:
        while not self._ending.wait(LOOK_S):
            with self._lock:
                due = self._routing.due(self._clock())
            for way in due:
                if not self._ending.is_set():
                    self._probe(way)

    def _probe(self, way: WayUp) -> None:
        """Measure the latency with a few bytes and the speed with more."""
        try:
            transport = self._transport(way)
            transport.probe_up(noise(1))  # may have to connect first
            began = self._clock()
            transport.probe_up(noise(1))
            latency_s = self._clock() - began
            began = self._clock()
            transport.probe_up(noise(PROBE_BYTES))
            up_s = self._clock() - began
            began = self._clock()
            transport.probe_down(memoryview(bytearray(PROBE_BYTES)))
            down_s = self._clock() - began
        except OuterstepError as error:
            log.debug("a probe of %s failed: %s", redact(str(way)), error)
            with self._lock:
                if isinstance(error, Refused):  # a refusal is an answer
                    self._routing.probed_in_vain(way, self._clock())
                else:
                    self._routing.failed(way, self._clock())
            return
        now = self._clock()
        with self._lock:
            self._routing.answered(way, now, latency_s)
            self._routing.moved(way, now, _without_latency(up_s, latency_s), up_bytes=PROBE_BYTES)
            self._routing.moved(way, now, _without_latency(down_s, latency_s), down_bytes=PROBE_BYTES)


def _without_latency(seconds: float, latency_s: float) -> float:
    return seconds - min(latency_s, MOST_LATENCY * seconds)
