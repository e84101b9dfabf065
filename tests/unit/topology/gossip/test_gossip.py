"""Peers in one process, with real decisions and real tensors between them."""

from __future__ import annotations

import copy
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from hypothesis import given
from torch import nn

from amounts import cases, mostly_slow
from fuzz.cases import altered
from outerstep import DiLoCoWorker, OuterOptimizer
from outerstep.core.outer import OwnRule
from outerstep.errors import BadRequest, ConfigError, ManifestMismatch, OuterstepError, PlanMismatch
from outerstep.server import DiLoCoServer
from outerstep.topology.forms import forms_of
from outerstep.topology.gossip import build
from outerstep.topology.gossip.node import Node, NodeSettings
from outerstep.topology.gossip.terms import GossipTerms, GossipWishes, check_joiner, found
from outerstep.topology.update import anchor_hash
from outerstep.types import Manifest, ParameterSpec, Wishes
from support import in_threads, memory_worker, params_of, tiny_model, train_steps, wait_until

SYNC_EVERY = 3
PATIENCE_S = 240.0  # for a busy machine


class Around:
    """Whoever is called "a" founds; the others join through it. Their nodes are real ones, on the loopback."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._founded = threading.Event()
        self._place = ""

    def make_node(self, asked: NodeSettings, **more: Any) -> Node:
        peer_id = asked.peer_id
        if peer_id != "a":
            assert self._founded.wait(60)
        settings = NodeSettings(
            peer_id=peer_id,
            listen="127.0.0.1:0",
            join=(self._place,) if peer_id != "a" else (),
            insecure=True,
            beat_every_s=0.5,
        )
        node = self.nodes[peer_id] = Node(settings, **more)
        if peer_id == "a":
            self._place = node.join_string
            self._founded.set()
        return node

    def close(self) -> None:
        for node in self.nodes.values():
            node.stop()


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[Around]:
    found = Around()
    monkeypatch.setattr(build, "Node", found.make_node)
    yield found
    found.close()


def make_worker(peer_id: str, model: nn.Module | None = None, **settings: Any) -> DiLoCoWorker:
    model = tiny_model(ord(peer_id[0])) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if peer_id == "a":
        settings = {"sync_every": SYNC_EVERY, "codec": "fp32", **settings}
    return DiLoCoWorker(
        model, optimizer, "gossip", worker_id=peer_id, handle_signals=False, exit_patience_s=5.0, **settings
    )


def hash_of(worker: DiLoCoWorker) -> str:
    return anchor_hash(worker._replica.anchors[name] for names in worker.plan.fragments for name in names)


def run(
    peer_id: str, rounds: int, *, tell: Callable[[DiLoCoWorker], None] = lambda worker: None, **settings: Any
) -> list[str]:
    """Train so many rounds; the anchor's hash after each."""
    hashes = []
    with make_worker(peer_id, **settings) as worker:
        tell(worker)
        for number in range(rounds):
            train_steps(worker.model, worker.optimizer, SYNC_EVERY, seed=100 * ord(peer_id[0]) + number)
            hashes.append(hash_of(worker))
    return hashes


def together(ids: str, rounds: int, **settings: Any) -> list[list[str]]:
    """All of them, in every round."""
    first = {"min_peers": len(ids), **settings}
    return in_threads(*(lambda p=p: run(p, rounds, **(first if p == "a" else {})) for p in ids), timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    "codec", mostly_slow(["fp32", "bf16", "int4+feedback", "sparse64", "int8+stochastic"], ["bf16", "int4+feedback"])
)
def test_all_peers_hold_the_same_bits_after_every_round(around: Around, codec: str) -> None:
    found = together("abc", 3, codec=codec)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize(
    ("rule", "peers"),
    [
        pytest.param("trimmed_mean", 4, marks=pytest.mark.slow),
        ("median", 4),
        ("krum", 5),
        pytest.param("multi_krum", 5, marks=pytest.mark.slow),
        pytest.param("geometric_median", 4, marks=pytest.mark.slow),
        pytest.param("centered_clipping", 4, marks=pytest.mark.slow),
    ],
)
def test_each_rule_agrees_on_all_peers_with_an_attacker_among_them(around: Around, rule: str, peers: int) -> None:
    ids = "abcdef"[:peers]
    monstrous = threading.Event()

    def attack(data: memoryview) -> memoryview:
        """Δ·1000: in fp32 the values lie behind the header as they are."""
        copy = memoryview(bytearray(data))
        (length,) = struct.unpack_from("<I", data, 4)
        torch.frombuffer(copy, dtype=torch.float32, offset=8 + length).mul_(1000.0)
        monstrous.set()
        return copy

    def corrupt(worker: DiLoCoWorker) -> None:
        node = around.nodes[ids[-1]]
        offer = node.offer
        node.offer = lambda fragment, data, **facts: offer(fragment, attack(data), **facts)  # type: ignore[method-assign]

    jobs = [lambda p=p: run(p, 2, **({"aggregation": rule, "min_peers": peers} if p == "a" else {})) for p in ids[:-1]]
    found = in_threads(*jobs, lambda: run(ids[-1], 2, tell=corrupt), timeout_s=PATIENCE_S)
    assert monstrous.is_set()
    assert all(hashes == found[0] for hashes in found)


def by_a_server(rounds: int, peers: str, **settings: Any) -> dict[str, torch.Tensor]:
    """The same training with a server, which adds in the order of the workers' names."""
    server = DiLoCoServer(
        dict(tiny_model(ord("a")).state_dict()), len(peers), port=0, sync_every=SYNC_EVERY, codec="fp32",
        deterministic=True, **settings,
    )  # fmt: skip
    server.service.start()

    def work(peer_id: str) -> None:
        model = tiny_model(ord("a"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with memory_worker(server, peer_id, model, optimizer):
            for number in range(rounds):
                train_steps(model, optimizer, SYNC_EVERY, seed=100 * ord(peer_id) + number)

    in_threads(*(lambda p=p: work(p) for p in peers), timeout_s=PATIENCE_S)
    return server.get_global_params()


@pytest.mark.parametrize("outer", [{}, {"outer_lr": 0.3, "outer_momentum": 0.7, "nesterov": False}])
def test_the_mean_of_all_has_the_bits_of_a_deterministic_server(around: Around, outer: dict[str, Any]) -> None:
    models = {p: tiny_model(ord("a")) for p in "abc"}
    first = {"min_peers": 3, **outer}
    in_threads(
        *(lambda p=p: run(p, 4, model=models[p], **(first if p == "a" else {})) for p in "abc"), timeout_s=PATIENCE_S
    )
    expected = by_a_server(4, "abc", **outer)
    for model in models.values():
        for name, value in params_of(model).items():
            assert torch.equal(value, expected[name]), name


def test_a_peer_that_comes_later_gets_anchor_and_momentum_and_counts_from_then_on(around: Around) -> None:
    with make_worker("a") as first, make_worker("b") as second:
        both(first, second, rounds=3)
        with make_worker("c") as third:
            assert third.sync_metrics["versions"] == [3]
            assert hash_of(third) == hash_of(first)
            wait_until(lambda: len(around.nodes["a"].peer.state.members) == 3)
            hashes = in_threads(*(lambda w=w: train_rounds(w, 3) for w in (first, second, third)), timeout_s=PATIENCE_S)
            assert hashes[0] == hashes[1] == hashes[2]
            assert third.sync_metrics["sync_count"] == 3


def train_rounds(worker: DiLoCoWorker, rounds: int) -> list[str]:
    found = []
    for number in range(rounds):
        train_steps(worker.model, worker.optimizer, SYNC_EVERY, seed=ord(worker.worker_id) + number)
        found.append(hash_of(worker))
    return found


def both(*workers: DiLoCoWorker, rounds: int) -> list[list[str]]:
    return in_threads(*(lambda w=w: train_rounds(w, rounds) for w in workers), timeout_s=PATIENCE_S)


def test_a_peer_with_nan_says_so_is_not_waited_for_and_goes_on_from_the_agreed_weights(around: Around) -> None:
    with make_worker("a") as first, make_worker("b") as second:
        both(first, second, rounds=1)
        with torch.no_grad():
            next(second.model.parameters())[0, 0] = float("nan")
        hashes = both(first, second, rounds=1)
        assert hashes[0] == hashes[1]
        assert second.sync_metrics["reloads"] == 1
        assert all(p.isfinite().all() for p in second.model.parameters())
        assert second.sync_metrics["steps_discarded"] == SYNC_EVERY
        after = both(first, second, rounds=1)
        assert after[0] == after[1] != hashes[0]


def test_a_peer_whose_anchor_is_not_the_others_is_not_counted_and_takes_theirs(around: Around) -> None:
    with make_worker("a", min_peers=2) as a, make_worker("b") as b, make_worker("c") as c:
        both(a, b, c, rounds=2)
        name = a.plan.fragments[0][0]
        with torch.no_grad():  # a bit has flipped, and with it the hash
            c._replica.anchors[name].view(-1)[0] += 1.0
            held = around.nodes["c"].peer.anchors[0]
            c._topology._state[0].anchor_hash = "0" * 32  # type: ignore[attr-defined]
        assert held[0] == 2
        # c misses one round, takes the others' anchor, and contributes what it had at once to the next.
        jobs = [lambda w=w, n=n: train_rounds(w, n) for w, n in ((a, 2), (b, 2), (c, 1))]
        hashes = in_threads(*jobs, timeout_s=PATIENCE_S)
        assert hashes[0] == hashes[1]
        assert hashes[2] == hashes[0][1:]
        assert c.sync_metrics["missed_rounds"] == 1


def test_a_joiner_that_wants_something_else_is_refused_by_name_and_one_that_leaves_it_out_is_not(
    around: Around,
) -> None:
    with make_worker("a", outer_lr=0.5):
        for settings, said in (
            ({"sync_every": 7}, "sync_every=7, but the run has sync_every=3"),
            ({"codec": "int4"}, "codec=int4, but the run has codec=fp32"),
            ({"outer_lr": 0.7}, "outer_lr=0.7, but the run has outer_lr=0.5"),
            ({"aggregation": "median"}, "aggregation=median, but the run has aggregation=mean"),
        ):
            with pytest.raises(PlanMismatch, match=said):
                make_worker("b", **settings).start()
        with pytest.raises(ManifestMismatch, match="missing"):
            make_worker("b", nn.Linear(6, 5)).start()
        with make_worker("b", sync_every=3, codec="fp32") as second:
            assert second.plan.sync_every == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"aggregation": "trimmed_mean", "trim_fraction": 0.2, "min_peers": 3}, "trim"),
        ({"aggregation": "krum", "min_peers": 3}, "krum"),
        ({"down_codec": "int8"}, "down_codec"),
        ({"heartbeat_timeout": 0.6}, "heartbeat_timeout_s must be at least 3 beats"),
        ({"pattern": "pairs", "aggregation": "median"}, "aggregation=median compares the contributions of many"),
    ],
)
def test_a_run_that_cannot_be_is_not_founded(around: Around, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_worker("a", **settings).start()


def test_what_is_for_peers_is_refused_with_a_server(around: Around) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="needs topology gossip, and has no effect here"):
        DiLoCoWorker(model, torch.optim.SGD(model.parameters()), "127.0.0.1:1", aggregation="median")


def test_a_run_is_founded_from_a_saved_state_with_its_momentum_and_norms(
    around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_worker("a") as first, make_worker("b") as second:
        both(first, second, rounds=2)
        state, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(first.model.state_dict())
        expected = both(first, second, rounds=2)[0]
    again = Around()
    monkeypatch.setattr(build, "Node", again.make_node)
    model = tiny_model(ord("a"))
    model.load_state_dict(weights)
    worker = make_worker("a", model)
    worker.load_state_dict(state)
    with worker, make_worker("b") as other:
        assert worker.sync_metrics["versions"] == other.sync_metrics["versions"] == [2]
        assert both(worker, other, rounds=2) == [expected, expected]
    again.close()


def test_a_joiners_saved_state_yields_to_the_run(around: Around) -> None:
    with make_worker("a") as first, make_worker("b") as second:
        both(first, second, rounds=1)
        state, weights = copy.deepcopy(second.state_dict()), copy.deepcopy(second.model.state_dict())
        both(first, second, rounds=2)
        model = tiny_model(ord("b"))
        model.load_state_dict(weights)
        state["worker_id"] = "c"
        worker = make_worker("c", model)
        worker.load_state_dict(state)
        with worker:
            assert worker.sync_metrics["versions"] == [3]
            assert hash_of(worker) == hash_of(first)


def test_fragments_in_the_background_give_equal_bits_too(around: Around) -> None:
    settings = {"num_fragments": 2, "fragment_delay": 1, "sync_every": 4, "codec": "int8", "min_peers": 3}
    workers = [make_worker("a", **settings), make_worker("b"), make_worker("c")]
    for worker in workers:
        worker.start()
    both(*workers, rounds=6)
    in_threads(*(worker.stop for worker in workers), timeout_s=PATIENCE_S)
    assert all(min(worker.sync_metrics["versions"]) >= 4 for worker in workers)
    assert len({hash_of(worker) for worker in workers}) == 1


def test_a_peer_that_is_all_that_is_left_of_a_run_says_that_it_has_no_weights(tmp_path: Path) -> None:
    settings = {"peer_dir": str(tmp_path / "a"), "insecure": True, "listen": "127.0.0.1:0", "min_peers": 1}
    with make_worker("a", **settings) as worker:
        train_rounds(worker, 1)
        state, weights = copy.deepcopy(worker.state_dict()), copy.deepcopy(worker.model.state_dict())
    again = make_worker("a", **settings)
    with pytest.raises(ConfigError, match="a run at version 1 of which nobody else is left"):
        again.start()
    model = tiny_model()
    model.load_state_dict(weights)
    loaded = make_worker("a", model, **settings)
    loaded.load_state_dict(state)
    with loaded:
        train_rounds(loaded, 1)
        assert loaded.sync_metrics["versions"] == [2]


@pytest.mark.slow
def test_a_peer_whose_training_hangs_falls_silent(around: Around) -> None:
    with make_worker("a", min_peers=1, heartbeat_interval=0.0) as worker:
        train_rounds(worker, 1)
        node = around.nodes["a"]

        def beats() -> int:
            with node.lock:
                return node.peer._number

        node.note_progress(3, 1.0, None)
        before = beats()
        wait_until(lambda: beats() > before + 1)
        with node.lock:
            node.shared.progress_at = node.clock() - 1000.0
            before, said = beats(), node.shared.news
        wait_until(lambda: node.shared.news > said + 2)  # so many pulses later
        assert beats() == before
        node.note_progress(4, 1.0, None)
        wait_until(lambda: beats() > before)


def test_a_member_that_hands_out_a_spoiled_state_misleads_nobody(around: Around) -> None:
    """Of three, one word is enough to be believed; what it leads to is looked at all the same."""
    workers = [make_worker(name, **({"min_peers": 2} if name == "a" else {})) for name in "abc"]
    for worker in workers:
        worker.start()
    wait_until(lambda: all(len(node.peer.state.members) == 3 for node in around.nodes.values()))
    liar, honest = around.nodes["c"].snapshots._callbacks, workers[2]._topology.snapshot  # type: ignore[attr-defined]

    def lie(fragment: int) -> tuple[int, memoryview] | None:
        shown = honest(fragment)
        return shown and (shown[0], memoryview(bytearray(bytes(shown[1])[:-8] + b"\xff" * 8)))

    liar.snapshot = lie  # type: ignore[method-assign]
    for number in range(4):
        late = make_worker(f"late{number}")
        late.start()
        assert hash_of(late) == hash_of(workers[0])
        late.abandon("it has seen enough")
    for worker in workers:
        worker.abandon("over")


SPEC = ParameterSpec(name="w", shape=(4, 2), dtype="float32")
SOUND = found(Manifest(parameters=(SPEC,)), Wishes(sync_every=4), GossipWishes(), "a")


def can_be_written(facts: object) -> bool:
    try:
        msgspec.msgpack.encode(facts)
    except OverflowError:
        return False
    return True


@cases(400)
@given(altered(msgspec.to_builtins(SOUND)).filter(can_be_written))
def test_terms_with_odd_values_are_followed_or_refused(facts: dict[str, Any]) -> None:
    """And if they are followed, what follows from them can be worked out."""
    try:
        terms = GossipTerms.decode(msgspec.msgpack.encode(facts))
        check_joiner(terms, SOUND.manifest, Wishes(), GossipWishes())
    except OuterstepError:
        return
    assert forms_of(terms.plan, SOUND.manifest)
    assert terms.rules
    assert terms.aggregator


class TestAnOuterStepOfOnesOwn:
    """Each peer's own user names it: nobody imports a class because the run's terms do."""

    OWN: ClassVar = OwnRule("my_rules:Halving lr=0.5", lambda params: OuterOptimizer(params))

    def terms(self, own: OwnRule | None, **more: Any) -> GossipTerms:
        return found(SOUND.manifest, Wishes(), GossipWishes(own_outer=own, **more), "a")

    def test_peers_that_name_the_same_are_of_one_run(self) -> None:
        made = GossipTerms.decode(self.terms(self.OWN).encode())
        assert made.own_outer == "my_rules:Halving lr=0.5"
        assert made.keeps_momentum
        check_joiner(made, SOUND.manifest, Wishes(), GossipWishes(own_outer=self.OWN))

    def test_whoever_names_another_or_none_is_refused_and_told_both(self) -> None:
        other = OwnRule("my_rules:Halving lr=0.25", self.OWN.factory)
        for theirs, ours in ((self.OWN, None), (self.OWN, other), (None, self.OWN)):
            names = [f"'{one.name if one else 'nesterov'}'" for one in (theirs, ours)]
            with pytest.raises(PlanMismatch, match=f"the run steps by outer_optimizer {names[0]}, .* by {names[1]}"):
                check_joiner(self.terms(theirs), SOUND.manifest, Wishes(), GossipWishes(own_outer=ours))

    def test_a_run_that_older_releases_can_join_has_none(self) -> None:
        assert self.terms(None, protocol=1).own_outer is msgspec.UNSET
        with pytest.raises(ConfigError, match=r"protocol 1 has no outer_optimizer but nesterov, got 'my_rules:Halving"):
            self.terms(self.OWN, protocol=1)


@pytest.mark.parametrize("document", [b"", b"\xff", b"\x91" * 100_000, b"\x81\xa8manifest\xa2\xff\xfe", bytes(100)])
def test_terms_that_are_none_are_refused(document: bytes) -> None:
    with pytest.raises(BadRequest, match="the run's terms cannot be followed"):
        GossipTerms.decode(document)
