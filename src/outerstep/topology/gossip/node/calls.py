"""Asking another peer. Whatever comes of it other than an answer of the right kind is that peer's trouble: one error,
an `OuterstepError`, which the caller notes, puts off or holds against it."""

from __future__ import annotations

import logging
from typing import TypeVar

from ....errors import OuterstepError, Refused, TransportError
from ....wire.http_transport import HttpTransport
from ....wire.peers import GetHeld, HeldAnswer, PeerAnswer, PeerRequest
from .listener import Contacts

log = logging.getLogger(__name__)

A = TypeVar("A", bound=PeerAnswer)


def ask(transport: HttpTransport, request: PeerRequest, kind: type[A], *, timeout_s: float | None = None) -> A:
    return _ask(transport, request, kind, None, timeout_s)


def ask_member(
    contacts: Contacts, key: str, request: PeerRequest, kind: type[A], *, timeout_s: float | None = None
) -> A:
    """Ask the member with this key."""
    transport = contacts.transport(key)
    if transport is None:
        raise Refused("nobody has said where it is")
    return _ask(transport, request, kind, None, timeout_s)


def get_part(transport: HttpTransport, request: GetHeld, into: memoryview) -> None:
    _ask(transport, request, HeldAnswer, into, None)


def _ask(
    transport: HttpTransport, request: PeerRequest, kind: type[A], into: memoryview | None, timeout_s: float | None
) -> A:
    try:
        answer = transport.ask(request, into=into, timeout_s=timeout_s)
    except OuterstepError:
        raise
    except Exception as error:
        # The other end chose this address or answer. If the standard library stumbles over it, the bug is not ours.
        log.debug("asking %s failed", transport.address, exc_info=True)
        raise TransportError(f"{transport.address}: {type(error).__name__}: {error}") from error
    if not isinstance(answer, kind):
        raise Refused(f"{transport.address} answered with something else")
    return answer
