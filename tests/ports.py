"""Ports for servers that must be told theirs: those whose address is written down before they are started, or that are
started again where they were. Everything else listens on port 0."""

from __future__ import annotations

import random
import socket

RANGE = range(10_000, 32_768)
"""Below those that the system gives to outgoing connections: none of theirs takes the place of a server that is away,
of this test or of another that runs at the same time."""

_source = random.SystemRandom()  # a seed would give the same to the tests of another process


def free_port() -> int:
    while True:
        port = _source.choice(RANGE)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
