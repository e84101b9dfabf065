"""A server as it starts by itself, with tokens: who is let in, what the others hear, what is written down.

Every row of the table of bad inputs that concerns tokens, against a live server; fingerprints and plain HTTP are in
test_secure_certificates.py."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from outerstep.coordination.worker.exchange import Patience
from outerstep.errors import (
    Forbidden,
    TlsRequired,
    TransportError,
    Unauthorized,
)
from outerstep.security import Credentials
from outerstep.security.tokens import new_token
from outerstep.types import Control, Wishes
from outerstep.wire.http_transport import HttpTransport
from outerstep.worker import DiLoCoWorker
from sites import Site, answer
from support import HandClient, in_threads, make_frame, params_of, tiny_model, wait_until


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.server.stop()


def ones() -> memoryview:
    return make_frame({name: torch.ones_like(p) for name, p in params_of(tiny_model()).items()})


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_with_the_token_a_round_is_made(site: Site) -> None:
    client = HandClient(site.transport())
    client.join()
    assert client.contribute(ones()).version == 1
    wait_until(lambda: site.server.sync_round == 1)


WRONG = {
    "none": None,
    "empty": "Bearer ",
    "only the word": "Bearer",
    "wrong": f"Bearer {new_token('run')}",
    "another scheme": "Basic cnVuOnJ1bg==",
    "long": "Bearer " + "x" * 12_000,
    "huge": "Bearer " + "x" * 300_000,
    "not ASCII": "Bearer schlüssel-ключ".encode(),
    "not UTF-8": b"Bearer \xff\xfe\x80",
}


@pytest.mark.row("B01")
@pytest.mark.parametrize("authorization", WRONG.values(), ids=WRONG.keys())
def test_without_a_valid_token_the_answer_is_401_and_says_what_to_do(
    site: Site, authorization: str | bytes | None
) -> None:
    status, body = site.ask("GET", "/status", authorization)
    assert (status, body["error"]["code"]) == (401, "unauthorized")
    assert "outerstep join -" in body["error"]["hint"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "BREW"])
@pytest.mark.parametrize("path", ["/", "/status", "/v1/join", "/v1/part?x=1", "/v1/control", "/nothing", "/healthz/x"])
def test_a_stranger_does_not_learn_which_paths_there_are(site: Site, method: str, path: str) -> None:
    status, body = site.ask(method, path, WRONG["wrong"])
    body["error"].pop("request_id")
    assert (status, body) == (
        401,
        {
            "error": {
                "code": "unauthorized",
                "message": "this token is not valid here, or no longer",
                "hint": "get the join string from the server (`outerstep token show` on its machine) and give it to "
                "`outerstep join -` here",
                "retry_after_s": 0.0,
            }
        },
    )


def test_anybody_may_ask_whether_it_is_well_and_learns_no_more(site: Site) -> None:
    assert site.ask("GET", "/healthz") == (200, {"status": "ok"})
    site.server.service.failure = "the disk is full"
    assert site.ask("GET", "/healthz") == (503, {"status": "failing"})
    site.server.service.failure = ""


def test_a_token_given_twice_is_none(site: Site) -> None:
    value = f"Bearer {site.run_token}\r\nAuthorization: Bearer {site.run_token}"
    assert site.ask("GET", "/status", value)[0] == 401
    assert site.ask("GET", "/status", f"Bearer {site.run_token}")[0] == 200


@pytest.mark.row("B02")
def test_a_token_of_one_worker_does_not_speak_for_another(site: Site) -> None:
    transport = site.with_token(site.tokens.give_worker("left"))
    left, right = HandClient(transport, "left"), HandClient(transport, "right")
    left.join()
    with pytest.raises(Forbidden, match="belongs to worker 'left', the request speaks for 'right'"):
        right.join()
    right.session.answer = left.session.answer
    payload = ones()
    for request in (
        lambda: right.offer(len(payload)),
        lambda: right.put(payload, 0),
        lambda: right.commit(payload),
    ):
        right.sequence = 1
        with pytest.raises(Forbidden, match="belongs to worker 'left'"):
            request()
    with pytest.raises(Forbidden, match="'left' has a token of its own"):
        HandClient(site.transport(), "left").join()
    assert left.contribute(payload).version == 1


def test_status_is_for_every_token_and_control_for_the_admins(site: Site) -> None:
    tokens = site.tokens.load()
    for token in (tokens.run, tokens.admin, site.tokens.give_worker("left")):
        assert site.with_token(token).status()["num_workers"] == 1
    order = Control(kind="budget", tokens=5)
    with pytest.raises(Forbidden, match=r"no admin token of .* is known here") as here:
        site.with_token(tokens.run).call(order)
    assert "outerstep token show --admin" in here.value.hint
    assert site.ask("POST", "/v1/control", f"Bearer {tokens.run}")[0] == 403
    assert site.server.service.coordinator.budget.limit is None
    with pytest.raises(Forbidden, match="workers do not join with it"):
        HandClient(site.with_token(tokens.admin)).join()
    site.transport().call(order)  # on the server's machine the admin's token is found
    assert site.server.service.coordinator.budget.limit == 5


# --- rotation -------------------------------------------------------------------------------------------------------


@pytest.mark.row("F26")
def test_a_rotated_token_is_refused_without_a_restart(site: Site) -> None:
    old = site.with_token(site.run_token)
    old.status()
    site.tokens.rotate("run")
    with pytest.raises(Unauthorized, match="not valid here, or no longer"):
        site.with_token(parse_token(old)).status()
    with pytest.raises(TransportError, match=r"no longer.*outerstep join -"):  # it knew us: worth another try
        old.status()
    assert site.with_token(site.run_token).status()["num_workers"] == 1


def parse_token(transport: HttpTransport) -> str:
    assert transport._access is not None
    return transport._access.token


@pytest.mark.row("F26")
def test_a_running_worker_goes_on_when_its_machine_has_been_told_the_new_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere: another credentials folder, which `outerstep join` filled; after a rotation it is filled again."""
    site, elsewhere = Site(tmp_path, sync_every=2, num_workers=1), Credentials(tmp_path / "elsewhere")
    elsewhere.remember(site.server.access)
    eager = partial(Patience, first_backoff_s=0.01, longest_backoff_s=0.05)
    monkeypatch.setattr("outerstep.topology.server.build.Patience", eager)
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    handler = Listener(said)
    logging.getLogger("outerstep.topology.server.exchange").addHandler(handler)
    try:
        with DiLoCoWorker(
            model, optimizer, site.address, worker_id="w", credentials=str(elsewhere.folder), offline_after_s=600.0
        ) as worker:
            train(model, optimizer, 2)
            site.tokens.rotate("run")

            def help_it() -> None:
                wait_until(lambda: any("outerstep join -" in text for text in said))
                elsewhere.remember(site.server.access)

            in_threads(help_it, lambda: train(model, optimizer, 2))
            assert worker.sync_metrics["sync_count"] == 2
    finally:
        logging.getLogger("outerstep.topology.server.exchange").removeHandler(handler)
        site.server.stop()
    assert site.server.sync_round == 2
    assert site.run_token not in "".join(said)


class Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# --- the account of it ----------------------------------------------------------------------------------------------


def test_every_refusal_is_written_down_with_who_and_what_and_no_secret(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    secret = new_token("run")
    with caplog.at_level(logging.DEBUG, logger="outerstep"):
        site.ask("GET", f"/v1/x?token={secret}", f"Bearer {secret}")
        with contextlib.suppress(TlsRequired):
            HttpTransport(f"http://{site.address}").status()
        site.ask("POST", "/nothing", f"Bearer {site.run_token}")
    events = site.events("refused")
    assert [(event["code"], event["peer"], event["path"]) for event in events] == [
        ("unauthorized", "127.0.0.1", "/v1/x"),
        ("tls_required", "127.0.0.1", ""),
        ("not_found", "127.0.0.1", "/nothing"),
    ]
    assert re.search(r"GET /v1/x from 127\.0\.0\.1 refused: unauthorized", caplog.text)
    for text in (caplog.text, site.events_file.read_text()):
        for token in (secret, site.run_token, site.tokens.load().admin):
            assert token[4:] not in text


def test_a_flood_of_strangers_does_not_fill_the_disk(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    flood = 200
    with caplog.at_level(logging.INFO, logger="outerstep"), site.connection() as sock:
        for _ in range(flood):
            sock.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer(sock)[0] == 401
    assert caplog.text.count("refused: unauthorized") == 60
    assert len(site.events("refused")) == 60
    site.server.stop()
    assert site.events("refused")[-1]["count"] == flood - 60


def test_nothing_that_the_server_shows_holds_a_secret(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        client = HandClient(site.transport())
        client.join()
        client.contribute(ones())
        site.transport().call(Control(kind="plan", changes=Wishes(sync_every=20)))
    tokens = site.tokens.load()
    shown = [json.dumps(site.transport().status()), repr(site.server.config), repr(site.server.access), caplog.text]
    shown += [site.events_file.read_text(), repr(client.transport.__dict__), repr(site.server._identity)]
    for text in shown:
        assert tokens.run not in text
        assert tokens.admin not in text


def test_a_server_that_stops_lets_its_connections_go(site: Site) -> None:
    transport = site.transport()
    transport.status()
    site.server.stop()
    with pytest.raises(TransportError):
        transport.status()
