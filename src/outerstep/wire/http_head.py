"""The head of a request.

On top of h11's strictness come three rules: no Transfer-Encoding, no bare LF, no folded lines. They close the gap
between what h11 (rightly) tolerates and what a body loop that knows only Content-Length can read.
"""

from __future__ import annotations

import h11

from .turns import Line

HEAD_READ_BYTES = 16 * 1024


class Gone(Exception):
    """The peer closed the connection, or said nothing for too long."""


def read_head(http: h11.Connection, line: Line, began: bytes) -> tuple[h11.Request, bytes]:
    """Within a turn."""
    raw = began
    http.receive_data(began)
    while (event := http.next_event()) is h11.NEED_DATA:  # bounded: h11 refuses heads over 16 KiB
        with line.turn.away():
            data = line.receive(HEAD_READ_BYTES)
        raw += data
        http.receive_data(data)
    if not isinstance(event, h11.Request):
        raise Gone("closed between requests")
    beyond = http.trailing_data[0]
    head = raw[: len(raw) - len(beyond)]
    if head.count(b"\n") != head.count(b"\r\n") or b"\n " in head or b"\n\t" in head:
        raise h11.RemoteProtocolError("bare LF or folded line in the head", error_status_hint=400)
    if any(name == b"transfer-encoding" for name, _ in event.headers):
        raise h11.RemoteProtocolError("Transfer-Encoding is not taken; send Content-Length", error_status_hint=411)
    return event, beyond


def headers_of(head: h11.Request) -> dict[str, str]:
    """A header given twice is one with both values, and so, of those that we look at, none that we take."""
    headers: dict[str, str] = {}
    for name, value in head.headers:
        text = value.decode("latin-1")
        key = name.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers
