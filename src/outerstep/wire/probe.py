"""How fast is the line, and what does the clock at its other end say? For `outerstep doctor`.

    PUT /v1/probe            takes up to 4 MiB and throws them away; answers with the server's clock and protocol
    GET /v1/probe?bytes=N    sends N ≤ 4 MiB of noise

Like everything but /healthz it needs a token. It reads into a buffer that it throws away and sends from one that all
requests share, so it costs the server no memory; nothing of it reaches the run.
"""

from __future__ import annotations

import os
import re
import time
from functools import cache

from ..errors import BadRequest, TooLarge
from ..types import PROTOCOL_VERSION, Plain

PATH = "/v1/probe"
METHODS = ("GET", "PUT")
MAX_BYTES = 4 << 20


class ProbeAnswer(Plain, frozen=True):
    received_bytes: int
    time_s: float  # since 1970
    protocol: int


def received(size_bytes: int) -> ProbeAnswer:
    return ProbeAnswer(received_bytes=size_bytes, time_s=time.time(), protocol=PROTOCOL_VERSION)


def noise_for(query: str) -> memoryview:
    """What a GET asks for. Random, so that no link on the way can make it smaller."""
    asked = re.fullmatch(r"bytes=([0-9]{1,12})", query)
    if asked is None:
        raise BadRequest(f"GET {PATH} must say how much: ?bytes=N")
    if int(asked[1]) > MAX_BYTES:
        raise TooLarge(f"a probe of {asked[1]} bytes was asked for; at most {MAX_BYTES} are sent")
    return noise(int(asked[1]))


def noise(size_bytes: int) -> memoryview:
    """Of a piece that is made once."""
    return memoryview(_noise())[:size_bytes]


@cache
def _noise() -> bytes:
    return os.urandom(MAX_BYTES)
