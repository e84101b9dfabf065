"""The compatibility port: the endpoints of the older protocol on the HTTP server of today's.

A thread per connection is what the protocol wants: a submit is held open for as long as its round takes. While it is
held, the connection is watched, so that a client that hung up (or whose machine is gone: TCP keep-alive) is not kept
alive by its own open request.
"""

from __future__ import annotations

import logging

from ..config import DEFAULT_HOST
from ..errors import ConfigError
from ..server import DiLoCoServer
from ..wire.http_server import HttpServer
from ..wire.limits import ServiceLimits
from ..wire.sockets import KEEPALIVE_PROBES
from .answers import old_error_reply
from .endpoints import Endpoints
from .limits import CompatLimits

log = logging.getLogger(__name__)

LONGEST_KEEPALIVE_S = 15


class CompatServer:
    """Serves the old protocol for `server`, which must be started, on a port of its own (0 = any free one).

    There is no authentication and no encryption in that protocol, so it listens on 127.0.0.1 unless another `host` is
    named, or `server` is insecure itself: then where `server` does. Stop it before `server`.
    """

    def __init__(
        self,
        server: DiLoCoServer,
        port: int,
        host: str | None = None,
        *,
        limits: CompatLimits = CompatLimits(),  # noqa: B008 - frozen
    ) -> None:
        if server.config.weight_by != "equal":
            raise ConfigError(
                f"the compatibility protocol needs a server with weight_by='equal', got {server.config.weight_by!r}: "
                "its clients report neither samples nor tokens"
            )
        self._host = host or (server.config.host if server.config.insecure else DEFAULT_HOST)
        self._endpoints = Endpoints(server, limits)
        bounds = ServiceLimits(
            max_connections=limits.max_connections,
            idle_s=limits.idle_s,
            stall_s=limits.stall_s,
            window_s=limits.stall_s,
            least_bytes=int(limits.slowest_bytes_per_s * limits.stall_s),
            keepalive_s=keepalive_s(server.config.heartbeat_timeout_s),
        )
        try:
            self._http = HttpServer(
                self._endpoints.routes,
                self._host,
                port,
                bounds,
                names=[server.config.advertise or ""],
                reply_to_error=old_error_reply,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{port} for the compatibility protocol: {error.strerror}; "
                "choose another compat_port, or stop what uses it"
            ) from error
        self._stopped = False

    @property
    def address(self) -> str:
        return f"[{self._host}]:{self._http.port}" if ":" in self._host else f"{self._host}:{self._http.port}"

    def start(self) -> CompatServer:
        self._http.start()
        log.warning(
            "the compatibility protocol is served on %s, without authentication or encryption: anyone who reaches it "
            "can change the model",
            self.address,
        )
        return self

    def stop(self, *, patience_s: float = 5.0) -> None:
        """Send every client away that waits, and close. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        self._endpoints.close()
        self._http.stop(patience_s=patience_s)

    def __enter__(self) -> CompatServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


def keepalive_s(heartbeat_timeout_s: float) -> int:
    """So far apart that the kernel finds out within half a heartbeat timeout that a client's machine is gone."""
    if heartbeat_timeout_s == 0:  # no worker is ever declared dead, but a connection may be
        return LONGEST_KEEPALIVE_S
    return min(max(int(heartbeat_timeout_s / 2 / (1 + KEEPALIVE_PROBES)), 1), LONGEST_KEEPALIVE_S)
