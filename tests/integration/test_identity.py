"""An id belongs to a key. What can somebody who holds a token, and knows all of `/status`, do to a worker that is
not its own? Real servers, real sockets; each person has a credentials folder of its own."""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from integration.old_clients import Answered, OldClient, like, one_client
from outerstep.errors import IdInUse, NoIdentity, NotOwner, Refused, StaleRound
from outerstep.security import Access, Credentials, parse_address
from outerstep.security.joining import sign_join
from outerstep.security.signing import make_key
from outerstep.server import DiLoCoServer
from outerstep.types import (
    PROTOCOL_VERSION,
    AskNonce,
    Commit,
    Control,
    GetPart,
    Heartbeat,
    Join,
    JoinAnswer,
    Leave,
    Offer,
    Poll,
    PutPart,
)
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.messages import convert, written_in
from outerstep.wire.transport import Transport
from outerstep.worker import DiLoCoWorker
from sites import Site
from support import HandClient, make_frame, params_of, tiny_model, train_steps, wait_until


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "site")
    yield made
    made.server.stop()


class Person:
    """Somebody with the run's token and a folder, on the machine that every test runs on."""

    def __init__(self, site: Site, folder: Path, token: str | None = None) -> None:
        self.site, self.credentials = site, Credentials(folder)
        server = site.server.access
        self.credentials.remember(Access(*parse_address(site.address), token or site.run_token, server.fingerprint))

    def transport(self) -> HttpTransport:
        return HttpTransport(self.site.address, credentials=self.credentials.folder)

    def worker(self, worker_id: str, **changes: Any) -> HandClient:
        return hand(self.transport(), worker_id, **changes)


def hand(transport: Transport, worker_id: str, **changes: Any) -> HandClient:
    client = HandClient(transport, worker_id)
    client.session._join = replace(client.session._join, **changes)
    return client


@pytest.fixture
def owner(site: Site, tmp_path: Path) -> Person:
    return Person(site, tmp_path / "owner")


@pytest.fixture
def attacker(site: Site, tmp_path: Path) -> Person:
    return Person(site, tmp_path / "attacker")


def ones() -> memoryview:
    return make_frame({name: torch.ones_like(p) for name, p in params_of(tiny_model()).items()})


def alive(client: HandClient) -> None:
    """It is heard, and what it contributes counts."""
    client.transport.call(Heartbeat(**client.session.head, step=1, steps_per_second=1.0))
    for _ in range(100):
        version = client.poll().version
        try:
            counted_in = client.contribute(ones(), base_version=version, oldest_base=version).version
        except StaleRound:  # its last contribution is accepted, and not published yet
            continue
        assert counted_in == version + 1
        return
    raise AssertionError("the round before was never published")


# --- taking it ------------------------------------------------------------------------------------------------------


def test_the_id_of_a_live_worker_cannot_be_taken_by_another_token_holder(
    site: Site, owner: Person, attacker: Person
) -> None:
    left = owner.worker("left")
    left.join()
    seen: Any = attacker.transport().status()["workers"]
    facts = {"worker_id": "left", "hostname": seen["left"]["hostname"]}
    with pytest.raises(NotOwner, match="belongs to another key") as refusal:
        attacker.worker(**facts).join()
    assert "outerstep control release left" in refusal.value.hint
    # Nor with the instance of the process that lives, which is not in the status, nor as one that has no key.
    with pytest.raises(NotOwner):
        attacker.worker(**facts, instance=left.session.join_request.instance).join()
    keyless = Join(protocol=PROTOCOL_VERSION, instance="a" * 16, **facts)
    assert site.call(keyless, sessions=[]).body["code"] == "not_owner"
    alive(left)


def test_the_id_of_a_worker_that_is_away_cannot_be_taken_either(owner: Person, attacker: Person) -> None:
    left = owner.worker("left")
    left.join()
    left.transport.call(Leave(**left.session.head))
    with pytest.raises(NotOwner):
        attacker.worker("left").join()
    back = owner.worker("left")
    assert back.join().incarnation == left.session.joined.incarnation + 1
    alive(back)


def test_a_restarted_server_remembers_whose_an_id_is_and_the_sessions_go_on(tmp_path: Path) -> None:
    folder, site = str(tmp_path / "run"), Site(tmp_path / "site", save_dir=str(tmp_path / "run"))
    owner, attacker = Person(site, tmp_path / "owner"), Person(site, tmp_path / "attacker")
    left, away = owner.worker("left"), owner.worker("away")
    left.join()
    away.join()
    away.transport.call(Leave(**away.session.head))
    alive(left)
    site.server.stop()
    port = parse_address(site.address)[1]
    again = DiLoCoServer(None, 1, port, credentials=str(site.credentials.folder), codec="fp32", save_dir=folder).start()
    try:
        for name in ("left", "away"):
            with pytest.raises(NotOwner):
                attacker.worker(name).join()
        alive(left)  # without joining again
        assert owner.worker("away").join().incarnation > away.session.joined.incarnation
    finally:
        again.stop()


# --- speaking for it ------------------------------------------------------------------------------------------------

FARTHEST = 2**53

SPOKEN: dict[str, Any] = {
    "heartbeat": lambda head: Heartbeat(**head, step=0, steps_per_second=1e9),
    "leave": lambda head: Leave(**head),
    "offer": lambda head: Offer(
        **head, fragment=0, sequence=FARTHEST, base_version=0, oldest_base=0, steps=1, codec="fp32", size_bytes=8
    ),
    "part": lambda head: PutPart(**head, fragment=0, sequence=FARTHEST, part=0, hash="0" * 16),
    "commit": lambda head: Commit(**head, fragment=0, sequence=FARTHEST, payload_hash="0" * 32),
    "poll": lambda head: Poll(**head, fragment=0, after=-1),
    "get": lambda head: GetPart(**head, fragment=0, version=0, part=0),
}


@pytest.mark.parametrize("message", SPOKEN.values(), ids=SPOKEN.keys())
@pytest.mark.parametrize("session", ["none", "wrong", "of another worker", "twice"])
def test_nobody_speaks_for_a_worker_without_its_session(
    site: Site, owner: Person, attacker: Person, message: Any, session: str
) -> None:
    left, mine = owner.worker("left"), attacker.worker("mine")
    secret, own = left.join().session, mine.join().session
    assert secret
    assert own
    incarnation: Any = attacker.transport().status()["workers"]
    head = {"run_id": site.server.run_id, "worker_id": "left", "incarnation": incarnation["left"]["incarnation"]}
    shown = {"none": [], "wrong": ["0" * 64], "of another worker": [own], "twice": [secret, secret]}[session]
    said = site.call(message(head), sessions=shown)
    assert (said.status, said.body["code"]) == (403, "no_session")
    assert secret not in said.text
    alive(left)


def test_sequences_cannot_be_pushed_to_their_end_by_another(site: Site, owner: Person) -> None:
    left = owner.worker("left")
    left.join()
    alive(left)
    payload = ones()
    pushed = Offer(
        **left.session.head,
        fragment=0,
        sequence=FARTHEST,
        base_version=1,
        oldest_base=1,
        steps=1,
        codec="fp32",
        size_bytes=len(payload),
    )
    assert site.call(pushed, sessions=[]).body["code"] == "no_session"
    alive(left)
    assert left.sequence == 2


# --- the same worker again --------------------------------------------------------------------------------------------


def test_a_restart_on_the_same_folder_is_the_same_worker_and_fences_the_old_process(owner: Person) -> None:
    first, second = owner.worker("left"), owner.worker("left")
    first.join()
    second.join()
    with pytest.raises(Refused, match="was started again"):
        alive(first)
    alive(second)


def test_two_machines_that_share_a_folder_are_kept_apart_as_before(owner: Person) -> None:
    owner.worker("left").join()
    with pytest.raises(IdInUse, match="in use by a live worker"):
        owner.worker("left", hostname="elsewhere").join()


def test_a_worker_moved_to_another_machine_is_known_by_its_saved_state(site: Site, tmp_path: Path) -> None:
    """Its key stayed behind; the state lies on storage that both machines have."""

    def start(person: Person, state: dict[str, Any] | None) -> tuple[DiLoCoWorker, torch.nn.Module, Any]:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = DiLoCoWorker(
            model, optimizer, site.address, worker_id="left", credentials=str(person.credentials.folder), sync_every=2
        )
        if state is not None:
            model.load_state_dict(state["model"])
            worker.load_state_dict(state["worker"])
        return worker, model, optimizer

    here, there = Person(site, tmp_path / "here"), Person(site, tmp_path / "there")
    worker, model, optimizer = start(here, None)
    with worker:
        train_steps(model, optimizer, 3, seed=1)
        state = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "worker": worker.state_dict()}
    with pytest.raises(NotOwner):
        start(there, None)[0].__enter__()
    worker, model, optimizer = start(there, state)
    with worker:
        train_steps(model, optimizer, 2, seed=2)
    assert len(site.server.service.coordinator.members.find("left").keys) == 2  # type: ignore[union-attr]
    # The key that came with it is enrolled: the next start there needs no state.
    assert there.worker("left").join().incarnation == 3


def test_a_process_of_a_group_on_another_machine_joins_again_by_the_session_it_was_told(
    owner: Person, attacker: Person
) -> None:
    """Rank 0 has joined; another rank, whose user has another folder there, finds the worker declared dead."""
    first = owner.worker("left")
    answer = first.join()
    assert answer.session
    other = attacker.worker("left", instance=first.session.join_request.instance)
    with pytest.raises(NotOwner):
        other.join()
    other.transport.show_session("left", answer.session)
    assert other.join() == answer
    alive(other)
    first.transport.call(Heartbeat(**first.session.head, step=1, steps_per_second=1.0))


def test_a_lost_key_is_replaced_by_a_token_of_the_workers_own(site: Site, owner: Person, tmp_path: Path) -> None:
    left = owner.worker("left")
    left.join()
    given = site.tokens.give_worker("left")
    moved = Person(site, tmp_path / "moved", token=given).worker("left")
    moved.join()
    alive(moved)
    worker = site.server.service.coordinator.members.find("left")
    assert worker is not None
    assert len(worker.keys) == 2


def test_a_worker_of_protocol_1_with_its_own_token_needs_no_session(site: Site, owner: Person) -> None:
    owner.worker("left").join()
    old = KeylessTransport(site.with_token(site.tokens.give_worker("left")))
    alive_client = hand(old, "left")
    alive_client.join()
    alive(alive_client)


def test_an_operator_releases_an_id_whose_key_is_lost(site: Site, owner: Person, tmp_path: Path) -> None:
    left = owner.worker("left")
    left.join()
    anew = Person(site, tmp_path / "reinstalled")
    with pytest.raises(NotOwner):
        anew.worker("left").join()
    ordered = site.call(Control(kind="release", worker_id="left"), b"", "Content-Type: application/json")
    assert ordered.body["code"] == "forbidden"  # not with the run's token
    site.transport().call(Control(kind="release", worker_id="left", reason="its disk is gone"))
    assert site.events("release")[0]["reason"] == "its disk is gone"
    back = anew.worker("left")
    back.join()
    alive(back)
    with pytest.raises(NotOwner):
        owner.worker("left").join()


def test_a_live_worker_whose_id_is_released_joins_again_by_itself_and_owns_it(site: Site, owner: Person) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = str(owner.credentials.folder)
    with DiLoCoWorker(model, optimizer, site.address, worker_id="left", credentials=folder, sync_every=2):
        train_steps(model, optimizer, 2, seed=1)
        site.transport().call(Control(kind="release", worker_id="left"))
        train_steps(model, optimizer, 2, seed=2)
    worker = site.server.service.coordinator.members.find("left")
    assert worker is not None
    assert worker.keys == (owner.credentials.worker_key("left").public,)
    wait_until(lambda: site.server.sync_round == 2)


# --- workers without a key --------------------------------------------------------------------------------------------


class KeylessTransport:
    """As a worker of protocol 1 speaks: no key, no session."""

    def __init__(self, inner: HttpTransport) -> None:
        self._inner = inner
        self.address = inner.address
        self.protocol = 1

    def call(self, request: Any, **options: Any) -> Any:
        said: Any = written_in(request, 1)
        return self._inner._say(said, 1, options.get("body"), options.get("into"), options.get("timeout_s"))

    def show_session(self, worker_id: str, session: str) -> None:
        raise AssertionError("there are no sessions in protocol 1")

    def status(self) -> dict[str, object]:
        return self._inner.status()

    def close(self) -> None:
        self._inner.close()


def test_a_worker_of_protocol_1_is_taken_as_before_under_an_id_that_is_nobodys(site: Site, owner: Person) -> None:
    old = hand(KeylessTransport(owner.transport()), "old")
    assert old.join().session is UNSET
    alive(old)
    owner.worker("old").join()  # it was upgraded: from here on the id has a key
    with pytest.raises(NotOwner):
        hand(KeylessTransport(owner.transport()), "old").join()


def test_a_server_can_ask_for_a_key_of_everybody(tmp_path: Path) -> None:
    site = Site(tmp_path / "site", require_identity=True)
    try:
        with pytest.raises(NoIdentity, match="require_identity"):
            hand(KeylessTransport(site.transport()), "old").join()
        assert site.server.service.coordinator.plan is None  # nothing of it was taken up
        own = hand(KeylessTransport(site.with_token(site.tokens.give_worker("mine"))), "mine")
        own.join()
        Person(site, tmp_path / "new").worker("new").join()
    finally:
        site.server.stop()


# --- the proof --------------------------------------------------------------------------------------------------------


def nonce_of(site: Site) -> str:
    said = site.call(AskNonce(worker_id="left"))
    return str(said.body["nonce"])


@pytest.mark.parametrize(
    "forged", ["for another worker", "for another start", "for another token", "of another nonce", "by another key"]
)
def test_a_signature_is_good_for_one_worker_one_start_and_one_token(site: Site, forged: str) -> None:
    key, nonce, token = make_key(), nonce_of(site), site.run_token
    join = Join(protocol=PROTOCOL_VERSION, worker_id="left", instance="a" * 16)
    signed = sign_join(join, key, nonce, token)
    assert signed.proof is not UNSET
    wrong = {
        "for another worker": replace(signed, worker_id="right"),
        "for another start": replace(signed, instance="b" * 16),
        "for another token": sign_join(join, key, nonce, "run-" + "x" * 43),
        "of another nonce": replace(signed, proof=replace(signed.proof, nonce=nonce_of(site))),
        "by another key": replace(signed, proof=replace(signed.proof, key=make_key().public)),
    }[forged]
    assert site.call(wrong).body["code"] == "forbidden"
    assert site.server.service.coordinator.members.find("left") is None
    said = site.call(signed)
    assert said.status == 200
    assert convert(said.body, JoinAnswer).session is not UNSET


def test_a_nonce_of_another_server_or_none_at_all_is_refused(site: Site) -> None:
    join = Join(protocol=PROTOCOL_VERSION, worker_id="left", instance="a" * 16)
    for nonce in (secrets.token_hex(32), "0" * 64):
        said = site.call(sign_join(join, make_key(), nonce, site.run_token))
        assert (said.status, said.body["code"]) == (503, "busy")
        assert "nonce" in said.text


def test_a_join_may_be_repeated_and_gets_the_same_session(owner: Person) -> None:
    left = owner.worker("left")
    assert left.join() == left.join()


def test_the_first_start_of_two_users_is_theirs_alone_and_asks_for_nothing(site: Site, owner: Person) -> None:
    """Nothing to type: the key is made at the first join, private, and one user's ids have different keys."""
    file = owner.credentials.folder / "worker.key"
    assert not file.exists()
    owner.worker("a").join()
    owner.worker("b").join()
    assert file.stat().st_mode & 0o777 == 0o600
    keys = [site.server.service.coordinator.members.find(name) for name in ("a", "b")]
    assert len({worker.keys for worker in keys if worker is not None}) == 2


# --- the compatibility port -------------------------------------------------------------------------------------------


class FromElsewhere(OldClient):
    """The same client on another machine of this network."""

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60, source_address=("127.0.0.2", 0))
        connection.request(method, path, body=body, headers={"Connection": "close", **headers})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        if response.status != 200:
            raise Answered(response.status, json.loads(data), dict(response.headers))
        return data


def test_neither_port_takes_an_id_from_the_other() -> None:
    with one_client() as (server, old, start):
        native = HandClient(HttpTransport(server.address), old.worker_id)
        with pytest.raises(NotOwner):
            native.join()
        own = hand(native.transport, "native")
        own.join()
        with pytest.raises(Answered) as refused:
            OldClient(f"{old.host}:{old.port}", "native").register()
        assert refused.value.error["code"] == "not_owner"
        own.transport.call(Leave(**own.session.head))
        assert old.submit(like(start, 1.0)).keys() == start.keys()
        old.register()  # and who comes back there is the same worker as before


def test_a_client_of_the_old_protocol_is_told_by_its_address() -> None:
    with one_client() as (_, old, start):
        other = FromElsewhere(f"{old.host}:{old.port}", old.worker_id)
        for said in (
            other.register,
            lambda: other.post_json("/heartbeat", worker_id=old.worker_id, steps_per_second=1e9),
            lambda: other.post_json("/deregister", worker_id=old.worker_id),
            lambda: other.submit(like(start, 1e6)),
        ):
            with pytest.raises(Answered, match=r"registered from 127\.0\.0\.1, and this comes from 127\.0\.0\.2"):
                said()
        assert old.submit(like(start, 1.0)).keys() == start.keys()
        old.post_json("/deregister", worker_id=old.worker_id)
        other.register()  # it has left: whoever comes now has the id
