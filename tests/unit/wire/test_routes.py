"""A service brings its own paths; what is not among them is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest

from outerstep.dashboard.files import LIBRARY_NAMES, NAMES
from outerstep.errors import MethodNotAllowed, NotFound
from outerstep.server import DiLoCoServer
from outerstep.topology.gossip.node import Node, NodeSettings
from outerstep.types import AskNonce, FromMember, Request
from outerstep.wire.messages import place_of
from outerstep.wire.peers import PeerRequest
from outerstep.wire.routes import MessageRoute, PlainRoute, Routes, no_route
from support import tiny_model


@pytest.fixture(scope="module")
def server() -> Routes:
    return DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, insecure=True).service.routes


@pytest.fixture(scope="module")
def peer() -> Iterator[Routes]:
    with Node(NodeSettings(peer_id="a", insecure=True, listen="127.0.0.1:0")) as node:
        yield node.service.routes


def test_each_service_takes_its_own_messages_and_no_other(server: Routes, peer: Routes) -> None:
    for routes, kinds in ((server, (AskNonce, *get_args(Request))), (peer, get_args(PeerRequest))):
        taken = {place: route.kind for place, route in routes.items() if not isinstance(route, PlainRoute)}
        assert taken == {place_of(kind): kind for kind in kinds}


def test_a_token_is_checked_against_the_worker_or_peer_that_a_message_speaks_for(server: Routes, peer: Routes) -> None:
    """An operator's order alone speaks for nobody: it needs the admin token instead."""
    for routes in (server, peer):
        for route in routes.values():
            if isinstance(route, MessageRoute) and route.is_order:
                assert route.speaker is None
            elif not isinstance(route, PlainRoute):
                assert route.speaker in route.kind.__struct_fields__


def test_whatever_a_joined_worker_says_is_admitted_by_its_session(server: Routes) -> None:
    for route in server.values():
        if not isinstance(route, PlainRoute) and issubclass(route.kind, FromMember):
            assert route.admit is not None, route.kind


def test_without_a_token_there_is_the_health_and_the_page_without_its_contents(server: Routes, peer: Routes) -> None:
    """The page asks for a login by itself: its files hold nothing of a run (tests/integration/test_page.py)."""
    page = {("GET", "/page"), ("GET", "/page/"), ("POST", "/page/login"), ("POST", "/page/logout")}
    page |= {("GET", f"/page/{name}") for name in (*NAMES, *LIBRARY_NAMES)}
    for routes in (server, peer):
        public = {place for place, route in routes.items() if isinstance(route, PlainRoute) and route.is_public}
        assert public == {("GET", "/healthz"), *page}


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/", "/v1/joins", "/v2/join", "/v1/join/", "/V1/join", "v1/join"])
def test_an_unknown_path_is_not_found(server: Routes, path: str) -> None:
    refusal = no_route(server, "POST", path)
    assert isinstance(refusal, NotFound)
    assert refusal.message.startswith("no such path")
    assert "/v1/join" in refusal.hint


def test_a_path_of_any_length_is_shown_in_short(server: Routes) -> None:
    assert len(no_route(server, "GET", "/" + "x" * 100_000).message) < 300


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/join", {"POST"}),
        ("DELETE", "/v1/part", {"PUT", "GET"}),
        ("post", "/v1/join", {"POST"}),
        ("POST", "/status", {"GET"}),
        ("PUT", "/healthz", {"GET"}),
    ],
)
def test_a_wrong_method_is_answered_with_the_allowed_ones(
    server: Routes, method: str, path: str, allow: set[str]
) -> None:
    refusal = no_route(server, method, path)
    assert isinstance(refusal, MethodNotAllowed)
    assert f"{method} is not allowed on {path}" in refusal.message
    assert set(refusal.allow.split(", ")) == allow
