"""Tokens of a name against a real server over TLS: rights, ends, overlaps, and a revocation that holds at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outerstep.errors import Busy, Forbidden, QuotaExceeded, Refused, TransportError, Unauthorized, UnknownWorker
from outerstep.types import Control, Poll
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.transport import Transport
from sites import Site
from support import HandClient, in_threads, intercept, params_of, tiny_model, wait_until

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
    handler = service.poll

    def announce(*request: Any) -> object:
        waiting.set()
        return handler(*request)

    intercept(service, handler, announce)

    def wait_for_news() -> None:
        with pytest.raises((*OVER, UnknownWorker)):  # refused at its answer, or put out of the run before
            guest.transport.call(Poll(**guest.session.head, fragment=0, after=0, held=0, wait_s=2.0))

    def revoke_it() -> None:
        assert waiting.wait(60.0)
        site.tokens.revoke("guest")

    in_threads(wait_for_news, revoke_it)


# --- quotas and the account of who was refused ------------------------------------------------------------------------


def lines(site: Site, event: str) -> list[dict[str, Any]]:
    said = [json.loads(line) for line in site.events_file.read_text().splitlines()]
    return [line for line in said if line["event"] == event]


def flood(transport: Transport) -> None:
    for i in range(100):
        HandClient(transport, f"sybil-{i}").join()


def test_a_holder_of_the_token_who_floods_it_with_ids_does_not_keep_a_working_worker_out(tmp_path: Path) -> None:
    site = Site(tmp_path, num_workers=1, max_joins_per_minute=10)
    try:
        honest = HandClient(site.transport(), "honest")
        honest.join()
        honest.contribute(honest.frame(params_of(tiny_model())))
        hostile = site.with_token(site.run_token)
        with pytest.raises(QuotaExceeded) as refused:
            flood(hostile)
        assert "newcomers with the token 'run' may have 10 joins a minute" in refused.value.message
        assert refused.value.retry_after_s >= 1.0
        assert len(site.server.service.status().workers) <= 1 + 4 * 10
        HandClient(site.transport(), "honest").join()
        HandClient(site.with_token(site.tokens.give("site-b")), "elsewhere").join()
        [line] = lines(site, "refused")
        assert (line["code"], line["token"], line["address"]) == ("quota", "run", "127.0.0.1")
        assert line["worker"].startswith("sybil-")
    finally:
        site.server.stop()


def test_a_worker_of_an_older_release_is_told_to_ask_again(tmp_path: Path) -> None:
    """Its code book has no "quota"."""
    site = Site(tmp_path, num_workers=1, max_joins_per_minute=1)
    try:
        old = MemoryTransport(site.server.service, protocol=1)
        with pytest.raises(Busy) as refused:
            flood(old)
        assert refused.value.code == "busy"
    finally:
        site.server.stop()


def test_an_order_and_a_refusal_name_the_token_the_worker_and_the_address(site: Site) -> None:
    shift = site.tokens.give("shift", rights=["control"])
    orders = HttpTransport(replace(site.server.access, token="", admin=shift).join_string)
    orders.call(Control(kind="budget", tokens=5, reason="a\nb\x1b[31m"))
    with pytest.raises(Refused):
        orders.call(Control(kind="kick", worker_id="nobody"))
    [budget, _] = lines(site, "control")
    assert (budget["command"], budget["token"], budget["address"]) == ("budget", "shift", "127.0.0.1")
    [refused] = lines(site, "refused")
    assert (refused["request"], refused["worker"], refused["token"]) == ("Control", "nobody", "shift")
    assert site.ask("POST", "/v1/control", f"Bearer {site.run_token}")[0] == 403
    with pytest.raises(Forbidden):
        HandClient(site.with_token(site.tokens.give_worker("left")), "right").join()
    [_, denied, impostor] = lines(site, "refused")
    assert (denied["path"], denied["token"], denied["peer"]) == ("/v1/control", "run", "127.0.0.1")
    assert (impostor["token"], impostor["worker"]) == ("left", "right")
    written = site.events_file.read_text()
    assert not any(secret in written for secret in (shift, site.run_token, site.tokens.load().admin))
    assert "\x1b" not in written


def test_whoever_joined_with_a_revoked_token_is_out_of_the_run_at_once(tmp_path: Path) -> None:
    """Others do not wait for it until it is declared dead, which here is never."""
    site = Site(tmp_path, num_workers=2, heartbeat_timeout_s=0.0)
    try:
        honest = HandClient(site.transport(), "honest")
        guest = HandClient(site.with_token(site.tokens.give("guest")), "guest")
        payload = honest.frame(params_of(tiny_model()))
        for client in (honest, guest):
            client.join()
        honest.contribute(payload)
        assert site.server.sync_round == 0
        site.tokens.revoke("guest")
        wait_until(lambda: site.server.sync_round == 1)
        [left] = lines(site, "leave")
        assert (left["worker"], left["reason"]) == ("guest", "its token 'guest' was revoked, or has expired")
        with pytest.raises(OVER):
            guest.contribute(payload)
    finally:
        site.server.stop()
