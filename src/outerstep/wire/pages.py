"""What servers and peers show to anybody who looks: health, status, and a probe of the line.

    GET /healthz             "ok" or not; without a token
    GET /status              what the service says of itself, and the connections that its port has
    PUT /v1/probe            takes up to 4 MiB and throws them away; answers with the server's clock, and the protocol
    GET /v1/probe?bytes=N    sends N ≤ 4 MiB of noise

The probe is for `outerstep doctor`: how fast is the line, and what does the clock at its other end say? It reads into a
buffer that it throws away and sends from one that all requests share, so it costs the server no memory; nothing of it
reaches the run.
"""

from __future__ import annotations

import os
import re
import time
from functools import cache

from msgspec.structs import replace

from ..errors import BadRequest, TooLarge
from .http_request import HttpRequest
from .messages import BYTES_TYPE, PROBE_PATH, STATUS_PATH, ProbeAnswer, encode_json
from .routes import PlainRoute, Reply, Routes, Service

HEALTH_PATH = "/healthz"
MAX_BYTES = 4 << 20


def pages(service: Service) -> Routes:
    """For a service's own table."""

    def health(request: HttpRequest) -> Reply:
        """For everybody, so it says no more than that; what is wrong is in the status."""
        state = "failing" if service.failure else "waiting for its disk" if service.trouble else "ok"
        return Reply(encode_json({"status": state}), status=200 if state == "ok" else 503)

    def status(request: HttpRequest) -> Reply:
        return Reply(encode_json(replace(service.status(), connections=request.connections.summary())))

    return {
        ("GET", HEALTH_PATH): PlainRoute(health, is_public=True),
        ("GET", STATUS_PATH): PlainRoute(status, reads=True),
        ("GET", PROBE_PATH): PlainRoute(_probe_down),
        ("PUT", PROBE_PATH): PlainRoute(_probe_up),
    }


def _probe_up(request: HttpRequest) -> Reply:
    request.body.check_size(MAX_BYTES, "a probe")
    request.body.discard()
    answer = ProbeAnswer(received_bytes=request.body.length, time_s=time.time(), protocol=request.protocol)
    return Reply(encode_json(answer))


def _probe_down(request: HttpRequest) -> Reply:
    """Random bytes, so that no link on the way can make them smaller."""
    asked = re.fullmatch(r"bytes=([0-9]{1,12})", request.query)
    if asked is None:
        raise BadRequest(f"GET {PROBE_PATH} must say how much: ?bytes=N")
    if int(asked[1]) > MAX_BYTES:
        raise TooLarge(f"a probe of {asked[1]} bytes was asked for; at most {MAX_BYTES} are sent")
    return Reply(noise(int(asked[1])), headers=(("Content-Type", BYTES_TYPE),))


def noise(size_bytes: int) -> memoryview:
    """Of a piece that is made once."""
    return memoryview(_noise())[:size_bytes]


@cache
def _noise() -> bytes:
    return os.urandom(MAX_BYTES)
