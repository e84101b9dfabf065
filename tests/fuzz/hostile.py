"""Somebody with a token, and in half of what it says with a member's key, says everything there is to say.

    python tests/fuzz/hostile.py peers --messages 100000 --seed 7
    python tests/fuzz/hostile.py peers --messages 100000 --kills 20
    python tests/fuzz/hostile.py server --messages 100000 --seed 7

Four real peers, or a real server with two workers, run as processes; the messages come from grammar.py, for every
endpoint, with facts that are true at that moment. Meanwhile rounds must go on. Afterwards all must have survived,
memory must not have grown, nobody may have been expelled who did not lie; and started again from their folders, they
resume.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
from msgspec import UNSET  # noqa: E402

import nursery  # noqa: E402
from faults.histories import read_lines, violations  # noqa: E402
from faults.soak import Storm  # noqa: E402
from fuzz.grammar import Grammar, as_json, as_msgpack  # noqa: E402
from outerstep.compat.endpoints import CompatHeartbeat, Deregister, Register  # noqa: E402
from outerstep.digest import part_hash  # noqa: E402
from outerstep.errors import BY_CODE, OuterstepError  # noqa: E402
from outerstep.security import Access, Credentials, parse_address, parse_join_string  # noqa: E402
from outerstep.security.signing import SigningKey, make_key, open_key  # noqa: E402
from outerstep.security.tls import pinning_context  # noqa: E402
from outerstep.statements import AnyStatement, Beat, Converse, body_of, key_of, statement_of  # noqa: E402
from outerstep.types import (  # noqa: E402
    AskNonce,
    Commit,
    CompleteOffer,
    Control,
    GetPart,
    Heartbeat,
    Join,
    Lease,
    Leave,
    Offer,
    Poll,
    PutPart,
)
from outerstep.wire.http_transport import HttpTransport  # noqa: E402
from outerstep.wire.messages import PLACES, PROTOCOL_HEADER  # noqa: E402
from outerstep.wire.peers import AskParts, AskSnapshot, AskTerms, GetHeld  # noqa: E402
from ports import free_port  # noqa: E402
from support import HandClient, make_frame, wait_until  # noqa: E402

MOST_GROWTH_BYTES = 64 << 20
MOST_TIMES = 10  # so many times the messages that were asked for
FRAME = bytes(make_frame({"cells": torch.zeros(2)}))
STATUSES = {200, 431} | {kind.status for kind in BY_CODE.values()} - {500}
PEER_REQUESTS = [AskTerms, AskSnapshot, AskParts, GetHeld]
NAMES = "abcd"
LIAR = "e"
STOP_S = 60.0


class Line:
    """One connection, over TLS unless it is plain, opened anew when the other end has had enough."""

    def __init__(self, access: Access, *, is_plain: bool = False) -> None:
        self.access, self.is_plain = access, is_plain
        self.answers: Counter[int] = Counter()
        self._connection: http.client.HTTPConnection | None = None

    def say(
        self, method: str, target: str, body: bytes, *, protocol: int = 2, token: str | None = None, **more: str
    ) -> bytes:
        """`more`: headers, with _ for -."""
        headers = {"Authorization": f"Bearer {self.access.token if token is None else token}"}
        headers |= {PROTOCOL_HEADER: str(protocol), "Content-Type": "application/json"}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        for _ in range(2):
            try:
                connection = self._open()
                connection.request(method, target, body, headers)
                answer = connection.getresponse()
                data = answer.read()
            except (OSError, http.client.HTTPException):
                self.close()
                continue
            assert answer.status in STATUSES, (answer.status, data, method, target, body[:2000])
            self.answers[answer.status] += 1
            return data
        self.answers[0] += 1
        return b""

    def _open(self) -> http.client.HTTPConnection:
        if self._connection is None:
            where: dict[str, Any] = {"host": self.access.host, "port": self.access.port, "timeout": 20.0}
            if self.is_plain:
                connection = http.client.HTTPConnection(**where)
            else:
                connection = http.client.HTTPSConnection(**where, context=pinning_context())
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = connection
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} is gone")


# --- peers ------------------------------------------------------------------------------------------------------------


class Peers:
    """Four honest processes, and the key of a fifth member."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: dict[str, nursery.Child] = {}
        self.ports = {name: free_port() for name in NAMES + LIAR}  # the same after a restart

    def start(self, name: str, join: str | None = None) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "join").unlink(missing_ok=True)
        words = [
            Path(__file__).with_name("peer_process.py"),
            name,
            self.folder / name,
            str(self.ports[name]),
            *([join] if join else []),
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = nursery.start(words, log=log, env=os.environ, cwd=self.folder)
        wait_until(lambda: self.is_up(name))

    def is_up(self, name: str) -> bool:
        self.check_alive(name)
        return (self.folder / name / "join").exists()

    def check_alive(self, name: str) -> None:
        assert self.children[name].poll() is None, (self.folder / f"{name}.log").read_text()[-4000:]

    def join_string(self, name: str) -> str:
        return (self.folder / name / "join").read_text()

    def report(self, name: str) -> dict[str, Any]:
        self.check_alive(name)
        file = self.folder / name / "report.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"versions": [0, 0], "members": []}
        return found

    def begin(self) -> SigningKey:
        """All five; then the fifth ends, and what it says from now on is ours to say."""
        self.start(NAMES[0])
        for before, name in zip(NAMES, NAMES[1:] + LIAR, strict=True):
            self.start(name, self.join_string(before))
        wait_until(lambda: len(self.report(NAMES[0])["members"]) == len(NAMES) + 1)
        self.stop(LIAR)
        return open_key(self.folder / LIAR / "node" / "key.pem")

    def stop(self, name: str) -> None:
        child = self.children.pop(name)
        child.terminate()
        assert child.wait(STOP_S) == 0, (self.folder / f"{name}.log").read_text()[-4000:]

    def kill(self, name: str) -> None:
        """And start it again: what it knew then is in its folder."""
        child = self.children.pop(name)
        child.kill()
        child.wait(STOP_S)
        self.start(name)

    def contradictions(self) -> list[str]:
        """Versions of which two peers, or one before and after it was killed, hold different bits."""
        found, known = [], dict[tuple[int, int], str]()
        for name in NAMES:
            for seen in read_lines(self.folder / name / "seen"):
                place = (seen["fragment"], seen["version"])
                if known.setdefault(place, seen["hash"]) != seen["hash"]:
                    found.append(f"{name} holds another fragment {place[0]} at version {place[1]} than the others")
        return found

    def await_rounds(self, more: int) -> None:
        """Each of them has taken so many more of every fragment."""
        before = {name: self.report(name)["versions"] for name in NAMES}
        for name in NAMES:
            wait_until(
                lambda name=name: all(  # type: ignore[misc]
                    now >= then + more for now, then in zip(self.report(name)["versions"], before[name], strict=True)
                )
            )

    def close(self) -> None:
        for child in self.children.values():
            child.kill()


class Liar:
    """What it says under its own key it says once: two different statements would be a proof, which ends its
    membership, and with that what a member could do. `ends_honest` False: at the end it takes no such care."""

    def __init__(self, rng: random.Random, key: SigningKey, peers: Peers) -> None:
        self.rng, self.key, self.peers = rng, key, peers
        self.lines = {name: Line(parse_join_string(peers.join_string(name))) for name in NAMES}
        self.said: dict[tuple[object, ...], bytes] = {}
        self.pool: list[dict[str, Any]] = []
        self.is_careful, self.is_inside = True, False
        self.count: Counter[str] = Counter()
        self.known: dict[str, list[Any]] = {}
        self.strangers = [make_key() for _ in range(3)]
        self.number = 1 << 20
        self.statements = Grammar(rng, self.known, {"Signed": self.signed}, oddity=0.02)
        self.grammar = Grammar(rng, self.known, {"Signed": self.signed}, oddity=0.004)  # else few are heard to the end
        self.look_around()

    def look_around(self) -> None:
        """What is true at this moment, as any token holder can read it."""
        transport = HttpTransport(self.peers.join_string(NAMES[0]))
        terms = transport.ask(AskTerms(sender=LIAR, protocol=2))
        state = terms.state  # type: ignore[union-attr]
        keys = [member.key for member in state.members] + [self.key.public]
        self.known |= {
            "run_id": [terms.run_id],  # type: ignore[union-attr]
            "sender": [*NAMES, LIAR],
            "peer_id": [*NAMES, LIAR, "stranger"],
            "key": keys,
            "author": keys,
            "height": [state.height, state.height + 1, state.height + 2],
            "turn": [0, 1, 2],
            "parent": [state.tip],
            "fragment": [0, 1],
            "version": [version + more for version in state.versions for more in (0, 1, 2)],
            "address": ["127.0.0.1:9", "[::1]:9"],
            "incarnation": [1, 2],
            "size_bytes": [64, 40],
            "protocol": [1, 2],
        }
        for line in self.lines.values():  # so that it stays a member
            body = self.beat()
            said = {"author": self.key.public, "body": body, "signature": self.key.sign(body)}
            told = {"run_id": terms.run_id, "sender": LIAR, "height": state.height, "statements": [said]}  # type: ignore[union-attr]
            line.say("POST", PLACES[Converse][1], as_json(told))

    def signed(self) -> dict[str, Any]:
        """A statement and who is said to have made it: half of them by a member, and really. Those inside of others (of
        a block, say) are mostly ones that were made before, as they would be."""
        rng = self.rng
        if self.is_inside and self.pool and rng.random() < 0.9:
            return rng.choice(self.pool)
        is_inside, self.is_inside = self.is_inside, True
        body = as_msgpack(self.statements.draw(AnyStatement))
        self.is_inside = is_inside
        if (statement := statement_of(body)) is not None and rng.random() < 0.95:
            body = body_of(statement)  # written as peers write it: else it is no statement
        made = self.by_somebody(body)
        if not is_inside:
            self.count["statements"] += 1
            self.pool.append(made)
            del self.pool[:-200]
        return made

    def by_somebody(self, body: bytes) -> dict[str, Any]:
        rng = self.rng
        if rng.random() < 0.1:
            body = self.grammar.spoil(body)
        how = rng.random()
        if how < 0.55:
            body = self.once(body)
            self.count["signed by a member"] += 1
            return {"author": self.key.public, "body": body, "signature": self.key.sign(body)}
        if how < 0.75:
            stranger = rng.choice(self.strangers)
            return {"author": stranger.public, "body": body, "signature": stranger.sign(body)}
        author = rng.choice(self.known["author"])
        return {
            "author": author,
            "body": body,
            "signature": rng.randbytes(64 if rng.random() < 0.98 else rng.choice([0, 63, 65])),
        }

    def beat(self) -> bytes:
        self.number += 1
        return body_of(
            Beat(
                run_id=self.known["run_id"][0], peer_id=LIAR, incarnation=2, number=self.number, address="127.0.0.1:9",
                fingerprint="0" * 64, wants="belong", height=self.known["height"][0],
            )
        )  # fmt: skip

    def once(self, body: bytes) -> bytes:
        statement = statement_of(body)
        key = key_of(statement) if statement is not None else None
        return body if key is None or not self.is_careful else self.said.setdefault(key, body)

    def speak(self) -> None:
        """One request to one of them."""
        rng, line = self.rng, self.lines[self.rng.choice(NAMES)]
        kind = Converse if rng.random() < 0.7 else rng.choice(PEER_REQUESTS)
        self.count["requests"] += 1
        method, path, _ = PLACES[kind]
        value = self.grammar.draw(kind)
        protocol = rng.choice([2, 2, 2, 1])
        token = None if rng.random() < 0.9 else rng.choice(["", "run-nonsense", "x" * 300])
        if method == "GET":
            pairs = value.items() if isinstance(value, dict) else []
            query = "&".join(f"{_plain(name)}={_plain(one)}" for name, one in pairs)
            line.say(method, f"{path}?{query}", b"", protocol=protocol, token=token)
            return
        body = as_json(value)
        if rng.random() < 0.1:
            body = self.grammar.spoil(body)
        line.say(method, path, body, protocol=protocol, token=token)

    @property
    def messages(self) -> int:
        return self.count["statements"] + self.count["requests"]


def _plain(value: object) -> str:
    """For a target: what is no word there would not leave this end."""
    return "".join(c for c in str(value) if c.isascii() and (c.isalnum() or c in "-_.%"))[:2000]


def attack_peers(
    messages: int, seed: int, folder: Path, say: Any = lambda text: None, kills: int = 0
) -> dict[str, Any]:
    """`kills`: how many times in between one of them is killed and started again."""
    peers, killed = Peers(folder), 0
    try:
        liar = Liar(random.Random(seed), peers.begin(), peers)
        peers.await_rounds(1)
        warm = 0
        before = dict.fromkeys(NAMES, 0)
        versions = {}
        while liar.messages < messages:
            for _ in range(50):
                liar.speak()
            liar.is_careful = liar.messages < 0.9 * messages
            liar.look_around()
            for name in NAMES:
                peers.check_alive(name)
            if killed < kills and liar.messages * (kills + 1) > messages * (killed + 1):
                killed += 1
                peers.kill(liar.rng.choice(NAMES))
            if not warm and liar.messages > messages // 20:  # caches and arenas are filled
                warm = liar.messages
                before = {name: resident_bytes(peers.children[name].pid) for name in NAMES}
                versions = {name: peers.report(name)["versions"] for name in NAMES}
            say(f"{liar.messages} messages, versions {peers.report(NAMES[0])['versions']}")
        peers.await_rounds(2)
        grown = {name: resident_bytes(peers.children[name].pid) - before[name] for name in NAMES}
        reports = {name: peers.report(name) for name in NAMES}
        answers = sum((line.answers for line in liar.lines.values()), Counter())
        for name, report in reports.items():
            assert report["failure"] == ""
            assert set(report["expelled"]) <= {LIAR}, report["expelled"]
            assert set(NAMES) <= set(report["members"]), report["members"]
            assert kills or grown[name] < MOST_GROWTH_BYTES, grown
        for name in NAMES:
            peers.stop(name)
        for name in NAMES:  # each finds the others by what its folder holds
            peers.start(name)
        peers.await_rounds(2)
        assert peers.contradictions() == []
        return {
            "said": dict(liar.count),
            "answers": dict(answers),
            "grown_mib": {name: round(value / 2**20, 1) for name, value in grown.items()},
            "rounds": {name: sum(reports[name]["versions"]) - sum(versions[name]) for name in versions},
            "expelled": sorted({one for report in reports.values() for one in report["expelled"]}),
            "refused": {name: sum(report["refused"].values()) for name, report in reports.items()},
        }
    finally:
        peers.close()


# --- a server ---------------------------------------------------------------------------------------------------------

SERVER_REQUESTS = [
    AskNonce,
    Join,
    Heartbeat,
    Leave,
    Lease,
    Offer,
    CompleteOffer,
    PutPart,
    Commit,
    Poll,
    GetPart,
    Control,
]
COMPAT_REQUESTS = {"/register": Register, "/heartbeat": CompatHeartbeat, "/deregister": Deregister}
COMPAT_SUBMISSIONS = ["/submit_pseudograd", "/submit_fragment_pseudograd"]
WORKERS = ["w0", "w1"]
BESIDE = "liar"


class Insider:
    """A worker with the run's token and a seat of its own, which says everything; never a contribution that is one,
    because what it would move the model by is not what is asked here. (tests/integration/test_one_voice.py does.)"""

    def __init__(self, rng: random.Random, address: str, folder: Path, compat_port: int | None = None) -> None:
        self.rng, self.address = rng, address
        operator = Credentials(folder / "credentials")
        own = Credentials(folder / "liar-credentials")
        host, port = parse_address(address)
        known = operator.find(address)
        access = Access(host, port, operator.tokens.load().run, known.fingerprint if known is not None else None)
        own.remember(access)
        self.transport = HttpTransport(address, credentials=own.folder)
        self.line = Line(access)
        self.old = Line(Access(host, compat_port, ""), is_plain=True) if compat_port is not None else None
        self.count: Counter[str] = Counter()
        self.known: dict[str, list[Any]] = {}
        self.grammar = Grammar(rng, self.known, oddity=0.01)
        self.session = ""
        self.archive = io.BytesIO()
        torch.save({"worker_id": BESIDE, "pseudo_gradients": {"cells": torch.zeros(2)}}, self.archive)
        self.look_around()

    def look_around(self) -> None:
        """Take the seat, if it is not ours any more, and read what any token holder can."""
        client = HandClient(self.transport, BESIDE)
        status: dict[str, Any] = {}
        with contextlib.suppress(OuterstepError):  # the server may be down, or may have had enough of this worker
            answer = client.join()
            self.session = answer.session if answer.session is not UNSET else ""
            self.known["run_id"] = [answer.run_id]
            self.known["incarnation"] = [answer.incarnation, 1, 2]
            status = self.transport.status()
        version = int(status.get("sync_round", 0))
        self.known |= {
            "worker_id": [BESIDE, *WORKERS, f"new-{self.rng.randint(0, 50)}"],
            "protocol": [1, 2],
            "instance": [self.rng.randbytes(8).hex()],
            "fragment": [0],
            "sequence": [1, 2, 3, self.rng.randint(1, 100)],
            "base_version": [version],
            "oldest_base": [version],
            "version": [version, max(version - 1, 0)],
            "after": [version, version - 1, -1],
            "codec": ["fp32"],
            "size_bytes": [len(FRAME), 1, 1 << 40],
            "part": [0, 0, 1],
            "wait_s": [0.0],
            "hash": [part_hash(FRAME), "0" * 16],
            "payload_hash": ["0" * 32],  # never the right one
            "manifest": [None],
        }

    @property
    def messages(self) -> int:
        return self.count["requests"]

    def speak(self) -> None:
        rng, grammar = self.rng, self.grammar
        self.count["requests"] += 1
        if self.old is not None and rng.random() < 0.2:
            return self._speak_as_of_old(self.old)
        kind = rng.choice(SERVER_REQUESTS)
        method, path, _ = PLACES[kind]
        value = grammar.draw(kind)
        session = rng.choice([self.session] * 3 + ["", "0" * 64, "\xff"])
        said: dict[str, Any] = {"Outerstep_Session": session, "protocol": rng.choice([2, 2, 2, 1])}
        # (Whoever shows wrong tokens again and again is answered a second later each time.)
        said["token"] = None if rng.random() < 0.998 else rng.choice(["", "run-nonsense", "x" * 300])
        if kind in (CompleteOffer, PutPart, GetPart):
            pairs = value.items() if isinstance(value, dict) else []
            path += "?" + "&".join(f"{_plain(name)}={_plain(one)}" for name, one in pairs)
            # (With the right bytes a complete offer would be a contribution.)
            right = [] if kind is CompleteOffer else [FRAME, grammar.spoil(FRAME)]
            body = b"" if kind is GetPart else rng.choice([*right, rng.randbytes(300), rng.randbytes(len(FRAME))])
        else:
            body = as_json(value)
            if rng.random() < 0.1:
                body = grammar.spoil(body)
        self.count["with a session"] += session == self.session
        self.line.say(method, path, body, **said)
        return None

    def _speak_as_of_old(self, line: Line) -> None:
        rng, grammar = self.rng, self.grammar
        if rng.random() < 0.97:  # a submission that is still one waits for its round
            path = rng.choice(list(COMPAT_REQUESTS))
            line.say("POST", path, as_json(grammar.draw(COMPAT_REQUESTS[path])))
        else:
            line.say("POST", rng.choice(COMPAT_SUBMISSIONS), grammar.spoil(self.archive.getvalue()))


def attack_server(messages: int, seed: int, folder: Path, say: Any = lambda text: None) -> dict[str, Any]:
    storm = Storm(folder, len(WORKERS), seed, compat_port=free_port())
    try:
        wait_until(lambda: storm.round() >= 2)
        insider = Insider(random.Random(seed), storm.address, folder, storm.compat_port)
        before = first_round = 0
        # On a busy machine it says all that before the workers have taken their steps: then it says more.
        while insider.messages < messages or (
            storm.round() <= first_round and insider.messages < MOST_TIMES * messages
        ):
            for _ in range(30):
                insider.speak()
            insider.look_around()
            assert storm.server.poll() is None, (folder / "server.log").read_text()[-4000:]
            if not before and insider.messages > messages // 20:  # caches and arenas are filled
                before, first_round = resident_bytes(storm.server.pid), storm.round()
            say(f"{insider.messages} messages, round {storm.round()}")
        grown, rounds = resident_bytes(storm.server.pid) - before, storm.round() - first_round
        assert grown < MOST_GROWTH_BYTES, grown
        assert rounds > 0
        status = storm.status()
        assert status is not None
        assert status["failure"] == ""
        for name in WORKERS:
            assert status["workers"][name]["offences"] == 0, status["workers"][name]
        storm.server.send_signal(signal.SIGTERM)
        assert storm.server.wait(STOP_S) == 0, (folder / "server.log").read_text()[-4000:]
        storm.calm()  # it resumes, and rounds go on with both workers
        storm.finish()
        found = storm.problems + violations(read_lines(folder / "events.jsonl"), storm.seen(), storm.names)
        assert found == [], found
        answers = insider.line.answers + (insider.old.answers if insider.old is not None else Counter())
        return {"said": dict(insider.count), "answers": dict(answers), "grown_mib": grown / 2**20, "rounds": rounds}
    finally:
        storm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whom", choices=["peers", "server"], help="who is attacked")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0, help="of peers: how often one is killed and started again")
    args = parser.parse_args()
    began_at, said_at = time.monotonic(), 0.0

    def say(text: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > 10.0:
            said_at = time.monotonic()
            print(f"{said_at - began_at:6.0f} s  {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.whom == "peers":
            found = attack_peers(args.messages, args.seed, folder, say, args.kills)
        else:
            found = attack_server(args.messages, args.seed, folder, say)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
