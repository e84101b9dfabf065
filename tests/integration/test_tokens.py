"""Tokens of a name against a real server over TLS: rights, ends, overlaps, and a revocation that holds at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outerstep.errors import Forbidden, TransportError, Unauthorized
from outerstep.types import Control, Poll
from outerstep.wire.http_transport import HttpTransport
from sites import Site
from support import HandClient, in_threads, intercept, wait_until

OVER = (TransportError, Unauthorized)  # a transport that was let in before asks again; a new one is told at once


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, num_workers=1)
    yield made
    made.server.stop()


def test_a_token_is_good_for_its_rights_and_no_more(site: Site) -> None:
    reader = site.with_token(site.tokens.give("dashboard", rights=["read"]))
    assert reader.status()["num_workers"] == 1
    with pytest.raises(Forbidden, match="'dashboard' does not have the right to join"):
        HandClient(reader).join()
    joiner = site.with_token(site.tokens.give("site-a", rights=["join"]))
    HandClient(joiner, "a").join()
    with pytest.raises(Forbidden, match="'site-a' does not have the right to read"):
        joiner.status()
    shift = site.tokens.give("shift", rights=["control"])
    orders = HttpTransport(replace(site.server.access, token="", admin=shift).join_string)
    orders.call(Control(kind="budget", tokens=5))
    assert site.server.service.coordinator.budget.limit == 5
    for token in (site.run_token, site.tokens.give("both", rights=["join", "read"])):
        assert site.ask("POST", "/v1/control", f"Bearer {token}")[0] == 403


def test_an_expired_token_is_refused_on_an_open_connection(site: Site) -> None:
    guest = site.with_token(site.tokens.give("guest", expires_in_s=0.5))
    assert guest.status()["num_workers"] == 1

    def is_over() -> bool:
        try:
            guest.status()
        except OVER as error:
            return "was valid until" in str(error)
        return False

    wait_until(is_over)


def test_rotation_with_an_overlap_interrupts_nobody(site: Site) -> None:
    before = site.run_token
    old = site.with_token(before)
    old.status()
    site.tokens.rotate("run", overlap_s=600.0)
    assert site.run_token != before
    for transport in (old, site.with_token(before), site.with_token(site.run_token)):
        assert transport.status()["num_workers"] == 1


def test_a_worker_that_waits_is_told_nothing_when_its_token_is_revoked_meanwhile(site: Site) -> None:
    """Its request was let in before the revocation, and would be answered after it."""
    guest = HandClient(site.with_token(site.tokens.give("guest")), "guest")
    guest.join()
    service, waiting = site.server.service, threading.Event()
    handler = service.answer

    def announce(*request: Any) -> object:
        waiting.set()
        return handler(*request)

    intercept(service, handler, announce)

    def wait_for_news() -> None:
        with pytest.raises(OVER, match="not valid here, or no longer"):
            guest.transport.call(Poll(**guest.session.head, fragment=0, after=0, held=0, wait_s=2.0))

    def revoke_it() -> None:
        assert waiting.wait(60.0)
        site.tokens.revoke("guest")

    in_threads(wait_for_news, revoke_it)
