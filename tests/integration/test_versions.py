"""Ends of different versions in one run: of today, pretending to be older, and of release 0.2 itself (slow)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from outerstep.errors import BadRequest, ProtocolMismatch
from outerstep.types import Heartbeat, Join
from outerstep.versions import PROTOCOL_VERSION, spoken_here
from outerstep.wire.messages import PROTOCOL_HEADER, PROTOCOLS_HEADER
from outerstep.worker import DiLoCoWorker
from sites import Site
from support import tiny_model, train_steps


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.server.stop()


JOIN = Join(protocol=1, worker_id="w", instance="a" * 8, hostname="test")


def older_server(headers: Mapping[str, str]) -> int:
    """How a server that speaks 1 alone takes a request."""
    named = int(headers.get(PROTOCOL_HEADER.lower(), "1"))
    if named != 1:
        raise ProtocolMismatch(f"the other end speaks protocol {named}; spoken here: 1-1")
    return 1


class TestTheLine:
    def test_an_answer_says_what_is_spoken_and_only_to_who_has_a_token(self, site: Site) -> None:
        assert site.post("/v1/leave", b"{}").headers[PROTOCOLS_HEADER] == spoken_here()
        assert site.call(JOIN).headers[PROTOCOLS_HEADER] == spoken_here()
        stranger = site.say(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (stranger.status, stranger.headers[PROTOCOLS_HEADER]) == (401, None)

    def test_a_request_in_another_protocol_is_refused_whatever_it_asks(self, site: Site) -> None:
        said = site.post("/status", b"", f"{PROTOCOL_HEADER}: 9", method="GET")
        assert (said.status, said.body["code"]) == (426, "protocol_mismatch")
        assert "spoken here: 1-2" in said.body["message"]
        assert site.post("/status", b"", f"{PROTOCOL_HEADER}: new", method="GET").status == 400

    def test_both_ends_speak_the_newest(self, site: Site) -> None:
        transport = site.transport()
        transport.call(JOIN)
        assert transport.protocol == PROTOCOL_VERSION
        assert site.server.typed_status().workers["w"].protocol == PROTOCOL_VERSION

    def test_with_an_older_server_a_worker_speaks_what_that_does(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("outerstep.wire.http_server.protocol_of", older_server)
        monkeypatch.setattr("outerstep.wire.http_server.spoken_here", lambda: "1-1")
        transport = site.transport()
        answer = transport.call(JOIN)
        assert transport.protocol == 1
        assert site.server.typed_status().workers["w"].protocol == 1
        monkeypatch.undo()  # the server is restarted as a newer version
        head = {"run_id": site.server.run_id, "worker_id": "w", "incarnation": answer.incarnation}  # type: ignore[union-attr]
        transport.call(Heartbeat(**head, step=1, steps_per_second=1.0))  # type: ignore[arg-type]
        assert transport.protocol == PROTOCOL_VERSION

    def test_what_is_wrong_in_every_protocol_is_tried_in_one(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def protocol_of(headers: Mapping[str, str]) -> int:
            asked.append(headers[PROTOCOL_HEADER.lower()])
            return int(asked[-1])

        monkeypatch.setattr("outerstep.wire.http_server.protocol_of", protocol_of)
        with pytest.raises(BadRequest):
            site.transport().call(Join(protocol=1, worker_id="-", instance="a" * 8))
        assert asked == [str(PROTOCOL_VERSION)]


def test_a_worker_trains_with_an_older_server(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outerstep.wire.http_server.protocol_of", older_server)
    monkeypatch.setattr("outerstep.wire.http_server.spoken_here", lambda: "1-1")
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = str(site.credentials.folder)
    with DiLoCoWorker(model, optimizer, site.address, worker_id="a", sync_every=2, credentials=folder):
        train_steps(model, optimizer, 4, seed=0)
        assert site.server.typed_status().workers["a"].protocol == 1
    assert site.server.typed_status().sync_round == 2
