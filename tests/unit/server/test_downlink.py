"""Every anchor is the same, whatever led to it: a chain of updates or the whole; and nothing is lost on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import Tensor

from outerstep.core.codecs.recipe import WHOLE, Recipe
from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import NamedOptimizer, Nesterov, TorchOuter
from outerstep.core.state import bytes_of, fp32_views
from outerstep.digest import data_hash, part_count, part_hash, payload_hash, tree_hash
from outerstep.errors import BadRequest, ServerFailed, Superseded
from outerstep.server.publish import READING_S
from outerstep.server.store import Addend, FragmentStore
from outerstep.types import GetPart, ParameterSpec, Participant, Payload
from outerstep.wire.frames import check_frame, layout
from support import make_frame

SPECS = [
    ParameterSpec(name="table", shape=(37, 64), dtype="float32", embedding=True),
    ParameterSpec(name="weight", shape=(130, 71), dtype="float32"),
    ParameterSpec(name="bias", shape=(71,), dtype="float32"),
    ParameterSpec(name="scale", shape=(), dtype="float32"),
    ParameterSpec(name="none", shape=(0, 3), dtype="float32"),
    ParameterSpec(name="mean", shape=(5,), dtype="float32", role="average"),
    ParameterSpec(name="fixed", shape=(3,), dtype="float32", role="server"),
]
RECIPES = [
    "bf16",
    "bf16+stochastic",
    "int8",
    "int8+stochastic",
    "int4",
    "int4+stochastic",
    "e3m0",
    "int4,embeddings=int8,norms=fp32",
    "fp32,embeddings=bf16",
]
PART_BYTES = 1024
EVERYBODY = (Participant(worker_id="a", sequence=1, weight=1.0),)


def values(seed: int, size: float = 1.0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {spec.name: size * torch.randn(spec.shape, generator=source) for spec in SPECS}


def make_store(down: str | Recipe, version: int = 0) -> FragmentStore:
    recipe = down if isinstance(down, Recipe) else Recipe.parse(down)
    return FragmentStore(0, SPECS, values(0), WHOLE, recipe, PART_BYTES, version=version, run_id="run")


def advance(
    store: FragmentStore, optimizer: NamedOptimizer | DelayedNesterov, rounds: int = 1, now: float = 0.0
) -> None:
    for _ in range(rounds):
        version = store.newest.version + 1
        made = store.close(version, optimizer, [Addend(make_frame(values(version, 0.1)), 1.0, version - 1)], now)
        store.publish(made, EVERYBODY, now)


def fetch(store: FragmentStore, payload: Payload, worker: str = "w", now: float = 0.0) -> memoryview:
    whole = bytearray()
    hashes = []
    for part in range(part_count(payload.size_bytes, PART_BYTES)):
        request = GetPart(
            run_id="run",
            worker_id=worker,
            incarnation=1,
            fragment=0,
            version=payload.version,
            part=part,
            kind=payload.kind,
        )
        announced, data = store.part(request, now)
        assert announced == part_hash(data)
        hashes.append(announced)
        whole += data
    assert len(whole) == payload.size_bytes
    assert payload_hash(hashes) == payload.hash
    return memoryview(whole)


class Worker:
    """Holds an anchor, and follows agreements as a worker does."""

    def __init__(self, store: FragmentStore, recipe: Recipe) -> None:
        self.store, self.recipe = store, recipe
        self.full = layout("fp32", [(s.name, s.shape, 4 * s.numel) for s in SPECS])
        self.update = layout(recipe.name, [(s.name, s.shape, recipe.codec(s).encoded_bytes(s.numel)) for s in SPECS])
        self.anchor = values(99)
        self.version, self.hash = 0, None
        self.follow()

    def follow(self, now: float = 0.0) -> list[str]:
        newest = self.store.newest.agreement
        payloads = self.store.payloads(newest.version, "w", self.version, self.hash, now)
        assert payloads is not None
        for payload in payloads:
            self.take(payload, fetch(self.store, payload, now=now))
        self.version, self.hash = newest.version, hash_of(self.anchor)
        assert self.hash == newest.anchor_hash
        return [f"{payload.kind} {payload.version}" for payload in payloads]

    def take(self, payload: Payload, frame: memoryview) -> None:
        if payload.kind == "full":
            check_frame(frame, self.full)
            self.anchor = fp32_views(frame, self.full.places, self.full.data_begin)
            return
        check_frame(frame, self.update)
        for spec, entry in zip(SPECS, self.update.entries, strict=True):
            data = frame[self.update.data_begin + entry.begin : self.update.data_begin + entry.end]
            if len(data):
                encoded = torch.frombuffer(data, dtype=torch.uint8)
                self.recipe.codec(spec).decode_add(encoded, self.anchor[spec.name].view(-1))


def hash_of(anchor: Mapping[str, Tensor]) -> str:
    return tree_hash(bytes_of(anchor[spec.name]) for spec in SPECS)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rule", ["nesterov", "torch", "delayed"])
def test_by_chain_or_whole_the_anchor_has_the_same_bits(recipe: str, rule: str) -> None:
    store = make_store(recipe)
    shapes = {spec.name: spec.shape for spec in SPECS if spec.role == "parameter"}
    optimizer = {
        "nesterov": Nesterov(),
        "torch": TorchOuter(lambda params: torch.optim.AdamW(params, lr=0.01), shapes),
        "delayed": DelayedNesterov(2),
    }[rule]
    follower = Worker(store, Recipe.parse(recipe))
    for version in range(1, 8):
        advance(store, optimizer)
        late = Worker(store, Recipe.parse(recipe))
        follower.follow()
        assert follower.version == late.version == version
        assert hash_of(follower.anchor) == hash_of(late.anchor) == hash_of(store.params())


@pytest.mark.parametrize("recipe", ["bf16", "int8", "int4"])
def test_each_round_costs_one_update(recipe: str) -> None:
    store = make_store(recipe)
    follower = Worker(store, Recipe.parse(recipe))
    for version in range(1, 5):
        advance(store, Nesterov())
        assert follower.follow() == [f"update {version}"]
    assert follower.follow() == []  # nothing is new


def test_an_exact_downlink_sends_the_whole_and_holds_one_copy() -> None:
    store = make_store("fp32")
    follower = Worker(store, WHOLE)
    advance(store, Nesterov())
    assert follower.follow() == ["full 1"]
    assert store.down.targets() == {}
    assert store.down.ring_versions == []


def test_the_ring_holds_half_of_the_whole_at_most_and_the_newest_at_least() -> None:
    for recipe, kept in [("bf16", 1), ("int8", 1), ("int4", 3), ("fp32,embeddings=bf16", 1)]:
        store = make_store(recipe)
        advance(store, Nesterov(), rounds=9)
        assert store.down.ring_versions == list(range(10 - kept, 10)), recipe


def test_whoever_is_further_behind_than_the_ring_gets_the_whole() -> None:
    store, recipe = make_store("int4"), Recipe.parse("int4")
    followers = [Worker(store, recipe) for _ in range(5)]
    for behind, follower in enumerate(followers):
        follower.follow()
        if behind < 4:
            advance(store, Nesterov())
    assert [follower.follow() for follower in followers] == [
        ["full 4"],
        ["update 2", "update 3", "update 4"],
        ["update 3", "update 4"],
        ["update 4"],
        [],
    ]


def test_a_chain_that_is_no_shorter_than_the_whole_is_not_sent() -> None:
    spec = [ParameterSpec(name="x", shape=(1,), dtype="float32")]  # 4 bytes or 2, and then a gap: 8 in either case
    store = FragmentStore(0, spec, {"x": torch.zeros(1)}, WHOLE, Recipe.parse("bf16"), PART_BYTES)
    held = store.newest.agreement.anchor_hash
    store.publish(store.close(1, Nesterov(), [Addend(make_frame({"x": torch.ones(1)}), 1.0)]), EVERYBODY)
    payloads = store.payloads(1, "w", 0, held, 0.0)
    assert payloads is not None
    assert [payload.kind for payload in payloads] == ["full"]


@pytest.mark.parametrize("held", [0, 2, 3, 7])
def test_who_holds_something_else_gets_the_whole(held: int) -> None:
    store = make_store("int8")
    advance(store, Nesterov(), rounds=3)
    payloads = store.payloads(3, "w", held, "0" * 32, 0.0)
    assert payloads is not None
    assert [payload.kind for payload in payloads] == ["full"]


@pytest.mark.parametrize("recipe", ["bf16", "int8", "int4", "e3m0"])
def test_on_whole_numbers_what_was_sent_and_what_is_left_are_the_steps(recipe: str) -> None:
    """Σ steps = Σ sent + (T − θ), exactly: the codec delays, and loses nothing."""
    spec = [ParameterSpec(name="x", shape=(3000,), dtype="float32")]
    down = Recipe.parse(recipe)
    store = FragmentStore(0, spec, {"x": torch.zeros(3000)}, WHOLE, down, PART_BYTES)
    source, steps, sent = torch.Generator().manual_seed(1), torch.zeros(3000), torch.zeros(3000)
    left = 0
    for version in range(1, 12):
        step = torch.randint(-300, 300, (3000,), generator=source).float()
        steps += step
        store.publish(store.close(version, Nesterov(1.0, 0.0), [Addend(make_frame({"x": -step}), 1.0)]), EVERYBODY)
        request = GetPart(run_id="r", worker_id="w", incarnation=1, fragment=0, version=version, part=0, kind="update")
        parts = part_count(store.down.update.size_bytes, PART_BYTES)
        frame = b"".join(store.part(GetPart(**{**_fields(request), "part": i}), 0.0)[1] for i in range(parts))
        out = torch.empty(3000)
        encoded = torch.frombuffer(bytearray(frame), dtype=torch.uint8)[store.down.update.data_begin :]
        down.usual.codec.decode(encoded[: down.usual.codec.encoded_bytes(3000)], out)
        sent += out
        target, theta = store.down.targets()["x"], store.params()["x"]
        assert torch.equal(target, steps)
        assert torch.equal(theta, sent)
        assert torch.equal(target - theta + sent, steps)
        left += int((target != theta).sum())
    assert left > 0  # the codec did leave something out


def _fields(request: GetPart) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


class TestReaders:
    def test_a_view_that_was_given_out_never_changes(self) -> None:
        store = make_store("bf16")
        request = GetPart(run_id="r", worker_id="w", incarnation=1, fragment=0, version=0, part=3)
        announced, held = store.part(request, 0.0)
        before = bytes(held)
        for _ in range(3):
            advance(store, Nesterov(), now=10 * READING_S)  # nobody has asked for long: but it is still being sent
        assert bytes(held) == before
        assert part_hash(held) == announced

    def test_who_is_in_the_middle_finishes_and_then_the_memory_moves_again(self) -> None:
        store = make_store("bf16")
        (payload,) = store.payloads(0, "w", 0, None, 0.0) or ()
        before = hash_of(store.params())
        advance(store, Nesterov(), rounds=2)
        assert store.down.held_versions == [0, 2]
        frame = fetch(store, payload)
        assert hash_of(fp32_views(frame, store.down.full.places, store.down.full.data_begin)) == before
        address = store.params()["weight"].data_ptr()
        advance(store, Nesterov())
        assert store.down.held_versions == [3]
        assert store.params()["weight"].data_ptr() == address

    @pytest.mark.parametrize(("recipe", "held"), [("bf16", [4, 5]), ("fp32", [3, 4, 5])])
    def test_few_older_versions_are_held_however_many_are_read(self, recipe: str, held: list[int]) -> None:
        store = make_store(recipe)
        for version in range(5):
            store.payloads(version, f"w{version}", 0, None, float(version))
            advance(store, Nesterov(), now=float(version))
        assert store.down.held_versions == held

    @pytest.mark.parametrize("recipe", ["bf16", "fp32"])
    def test_with_a_reader_at_every_version_two_pieces_of_memory_take_turns(self, recipe: str) -> None:
        store, addresses = make_store(recipe), []
        for version in range(8):
            (payload,) = store.payloads(version, "w", 0, None, 0.0) or ()
            advance(store, Nesterov())
            fetch(store, payload)
            addresses.append(store.params()["weight"].data_ptr())
        assert len(set(addresses)) == 2

    def test_who_stops_reading_holds_nothing_back(self) -> None:
        store = make_store("bf16")
        store.payloads(0, "w", 0, None, 0.0)
        advance(store, Nesterov(), now=READING_S + 1.0)
        assert store.down.held_versions == [1]
        request = GetPart(run_id="r", worker_id="w", incarnation=1, fragment=0, version=0, part=0)
        with pytest.raises(Superseded, match="version 0 of fragment 0 is not held as full; the newest is 1"):
            store.part(request, READING_S + 1.0)

    def test_who_is_in_the_middle_of_an_update_finishes_it(self) -> None:
        store = make_store("bf16")
        held = store.newest.agreement.anchor_hash
        advance(store, Nesterov())
        (payload,) = store.payloads(1, "slow", 0, held, 0.0) or ()
        advance(store, Nesterov())
        assert store.down.ring_versions == [2]
        fetch(store, payload, worker="slow")
        advance(store, Nesterov())
        with pytest.raises(Superseded, match="version 1 of fragment 0 is not held as update; the newest is 3"):
            fetch(store, payload, worker="slow")

    def test_an_update_that_is_being_sent_is_not_written_over(self) -> None:
        store = make_store("bf16")
        advance(store, Nesterov())
        request = GetPart(run_id="r", worker_id="w", incarnation=1, fragment=0, version=1, part=0, kind="update")
        announced, data = store.part(request, 0.0)
        for _ in range(3):
            advance(store, Nesterov(), now=10 * READING_S)
        assert announced == part_hash(data)

    def test_the_memory_of_an_update_that_nobody_reads_is_used_for_the_next(self) -> None:
        store = make_store("bf16")
        follower, frames = Worker(store, Recipe.parse("bf16")), set()
        for _ in range(4):
            advance(store, Nesterov())
            follower.follow()
            frames.add(id(store.down._ring[-1].frame))
        assert len(frames) == 1

    def test_a_part_asked_for_while_the_memory_moves_waits_and_is_superseded(self) -> None:
        store = make_store("bf16")
        asked, answers = threading.Event(), []
        request = GetPart(run_id="r", worker_id="w", incarnation=1, fragment=0, version=0, part=0)

        def ask() -> None:
            asked.set()
            try:
                answers.append(store.part(request, 0.0))
            except Superseded as refusal:
                answers.append(refusal)

        with store.down.moving(1, 0.0) as motion:
            thread = threading.Thread(target=ask)
            thread.start()
            asked.wait(10)
            store._follow(motion)
            assert not answers
        store.publish(motion, EVERYBODY)
        thread.join(10)
        assert isinstance(answers[0], Superseded)

    def test_the_hashes_of_the_whole_are_computed_once_however_many_ask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store, hashed = make_store("bf16"), []

        def counted(data: memoryview) -> str:
            hashed.append(len(data))
            return part_hash(data)

        monkeypatch.setattr("outerstep.server.publish.part_hash", counted)
        together = threading.Barrier(16)

        def ask(i: int) -> None:
            together.wait(10)
            assert store.payloads(0, f"w{i}", 0, None, 0.0)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sum(hashed) == store.down.full.size_bytes

    def test_nobody_computes_hashes_that_nobody_asks_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the parts of a version as a whole, and of its values one after the other, as protocol 1 has it."""
        store = make_store("bf16")
        follower = Worker(store, Recipe.parse("bf16"))
        hashed: list[int] = []

        def counting(data: memoryview) -> str:
            hashed.append(len(data))
            return part_hash(data)

        def never(pieces: Iterable[memoryview]) -> str:
            raise AssertionError("nobody asked")

        monkeypatch.setattr("outerstep.server.publish.part_hash", counting)
        monkeypatch.setattr("outerstep.server.publish.data_hash", never)
        advance(store, Nesterov())
        assert follower.follow() == ["update 1"]
        assert sum(hashed) == store.down.update.size_bytes

    @pytest.mark.parametrize("kind", ["full", "update"])
    def test_a_part_beyond_the_end_is_refused(self, kind: str) -> None:
        store = make_store("bf16")
        advance(store, Nesterov())
        request = GetPart(run_id="r", worker_id="w", incarnation=1, fragment=0, version=1, part=10_000, kind=kind)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="part 10000 is out of range: there are"):
            store.part(request, 0.0)


class TestProtocolOne:
    """A worker of release 0.2 knows no trees: it is told the hash over the values as they follow each other."""

    def test_it_follows_by_updates_from_the_hash_that_it_was_told(self) -> None:
        store = make_store("int4")
        told = store.down.flat_hash(0)
        assert told == data_hash(bytes_of(tensor) for tensor in store.params().values())
        advance(store, Nesterov())
        advance(store, Nesterov())
        assert [p.kind for p in store.payloads(2, "w", 0, told, 0.0) or ()] == ["update", "update"]
        assert [p.kind for p in store.payloads(2, "w", 0, "0" * 32, 0.0) or ()] == ["full"]

    def test_it_is_sent_nothing_if_it_holds_the_newest(self) -> None:
        store = make_store("bf16")
        advance(store, Nesterov())
        assert store.payloads(1, "w", 1, store.down.flat_hash(1), 0.0) == ()

    def test_only_hashes_of_versions_that_an_update_leads_from_are_kept(self) -> None:
        store = make_store("bf16")
        for version in range(40):
            assert store.down.flat_hash(version) is not None
            advance(store, Nesterov())
        assert store.down.flat_hash(3) is None
        assert len(store.down._told) <= len(store.down.ring_versions) + len(store.down.held_versions)


def test_a_step_that_is_not_finite_is_never_served() -> None:
    store = make_store("bf16")
    with pytest.raises(FloatingPointError, match="made tensor 'table' of version 1 not finite"):
        store.close(1, Nesterov(1e38, 0.0), [Addend(make_frame(values(1, 1e17)), 1.0)])
    assert store.payloads(0, "w", 0, None, 0.0) is None
    with pytest.raises(ServerFailed):
        store.copy_params()


def test_who_waits_for_a_step_that_never_ends_is_let_go() -> None:
    store, waiting = make_store("bf16"), threading.Event()
    with store.down.moving(1, 0.0) as motion:
        store._follow(motion)
    answers: list[object] = []

    def ask() -> None:
        waiting.set()
        answers.append(store.payloads(0, "w", 0, None, 0.0))

    thread = threading.Thread(target=ask)
    thread.start()
    assert waiting.wait(10)
    store.down.abandon()  # the server failed before it could publish
    thread.join(10)
    assert answers == [None]


def test_a_round_without_training_sends_what_is_left() -> None:
    store = make_store("int4")
    follower = Worker(store, Recipe.parse("int4"))
    advance(store, Nesterov())
    distance = (store.down.targets()["weight"] - store.params()["weight"]).norm()
    store.publish(store.close(2, Nesterov(), [Addend(make_frame(values(1)), 0.0)]), EVERYBODY)
    assert (store.down.targets()["weight"] - store.params()["weight"]).norm() < distance
    assert follower.follow() == ["update 1", "update 2"]


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_a_fragment_without_values_has_versions_too(recipe: str) -> None:
    spec = [ParameterSpec(name="none", shape=(0, 3), dtype="float32")]
    store = FragmentStore(0, spec, {"none": torch.zeros(0, 3)}, WHOLE, Recipe.parse(recipe), PART_BYTES)
    payload = make_frame({"none": torch.zeros(0, 3)})
    assert store.decoder(1).check(payload) == 0.0
    for version in (1, 2):
        store.accumulate(version, [Addend(payload, 1.0)])
        store.publish(store.close(version, Nesterov(), [Addend(payload, 1.0)]), EVERYBODY)
    assert store.payloads(2, "w", 0, None, 0.0)


class TestFromAbove:
    """A version without contributions: an agreement of a layer above says where T is."""

    @pytest.mark.parametrize("recipe", ["fp32", *RECIPES])
    def test_those_who_follow_it_hold_the_same_bits(self, recipe: str) -> None:
        store, outer = make_store(recipe), Nesterov()
        follower, absent = (Worker(store, Recipe.parse(recipe)) for _ in range(2))
        advance(store, outer)
        follower.follow()
        momentum = {name: entry["momentum_buffer"].clone() for name, entry in outer.state_dict().items()}
        above = {name: theta + 0.01 for name, theta in store.params().items()}
        published = store.publish(store.move_to(2, above), ())
        assert (published.version, published.agreement.participants, published.agreement.watched) == (2, (), None)
        for name, target in store.state.target.items():
            assert torch.equal(target, above[name]), name  # T moves exactly, whatever the codec can say of it
        assert follower.follow() == ["full 2" if recipe == "fp32" else "update 2"]
        for name, entry in outer.state_dict().items():
            assert torch.equal(entry["momentum_buffer"], momentum[name]), name
        advance(store, outer)
        for worker in (follower, absent, Worker(store, Recipe.parse(recipe))):  # by one update, by all, by the whole
            worker.follow()
            assert hash_of(worker.anchor) == hash_of(store.params()) == store.state.anchor_hash

    def test_what_the_codec_leaves_out_is_in_the_next_update(self) -> None:
        store = make_store("int4")
        store.publish(store.move_to(1, {"weight": store.params()["weight"] + values(5)["weight"]}), ())
        distances = []
        for version in range(2, 6):
            distances.append(float((store.state.target["weight"] - store.params()["weight"]).norm()))
            store.publish(store.close(version, Nesterov()), ())  # nobody had trained
        assert distances == sorted(distances, reverse=True)
        assert distances[-1] < 0.01 * distances[0]
