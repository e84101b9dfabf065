"""What a round's record is made of: the smaller of its contributions and their mean. A restart replays either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outerstep.core.aggregate import sum_in_order
from outerstep.core.codecs.recipe import Recipe
from outerstep.durable.disk import FolderDisk
from outerstep.durable.journal import Journal, Record
from outerstep.errors import ModelError
from outerstep.server import DiLoCoServer, persistence, rounds
from outerstep.server.persistence import RoundRecord, read_record
from outerstep.topology.encode import encode_frame
from outerstep.types import Manifest, ParameterSpec
from outerstep.wire.frames import layout
from support import HandClient, Relocatable, kill, wait_until

SHAPES = {"weight": (40, 50), "mean": (30,)}
MANIFEST = Manifest(
    parameters=(
        ParameterSpec(name="weight", shape=SHAPES["weight"], dtype="float32"),
        ParameterSpec(name="mean", shape=SHAPES["mean"], dtype="float32", role="average"),
    )
)
MEAN_BYTES = 4 * (40 * 50 + 30)


def values(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def frame(seed: int, codec: str = "int4") -> memoryview:
    """A contribution as a worker of that codec encodes it: buffers go as they are."""
    recipe = Recipe.parse(codec)
    codecs = {spec.name: recipe.codec(spec) for spec in MANIFEST.parameters}
    entries = [(spec.name, spec.shape, codecs[spec.name].encoded_bytes(spec.numel)) for spec in MANIFEST.parameters]
    return encode_frame(values(seed), layout(recipe.name, entries), codecs)


class Run:
    """Three workers by hand and their server, which can be killed and started again."""

    def __init__(self, folder: Path, *, codec: str = "int4", workers: str = "abc", **settings: Any) -> None:
        self.folder, self.codec = folder, codec
        self.settings = {"port": 0, "sync_every": 4, "codec": codec, "down_codec": "int8", **settings}
        self.settings.setdefault("norm_screen", 0.0)  # it keeps the first contributions until their round closes
        self.settings["save_dir"], self.workers = str(folder), len(workers)
        self.server = self._start()
        self.server.service.coordinator.run_id = "run"
        self.server.service.start()
        self.clients = {name: HandClient(Relocatable(self.server.service), name, MANIFEST) for name in workers}
        for client in self.clients.values():
            client.join()

    def _start(self) -> DiLoCoServer:
        model = nn.Module()
        for name, tensor in values(0).items():
            model.register_buffer(name, tensor)
        return DiLoCoServer(model.state_dict(), self.workers, **self.settings)

    def restart(self) -> None:
        kill(self.server)
        self.server = self._start()
        self.server.service.start()
        for client in self.clients.values():
            client.transport.move(self.server)  # type: ignore[attr-defined]

    @property
    def version(self) -> int:
        return self.server.sync_round

    @property
    def anchor_hash(self) -> str:
        return self.server.service.stores[0].newest.agreement.anchor_hash

    @property
    def held_bytes(self) -> int:
        return int(self.server.status()["pool_held_bytes"])

    def contribute(self, name: str, *, early: bool = False, **changes: Any) -> None:
        """`early`: it is added before the next one comes."""
        client, version = self.clients[name], self.version
        payload = frame(100 * version + ord(name), self.codec)
        facts = {"codec": self.codec, "base_version": version, "oldest_base": version, "samples": ord(name)}
        client.contribute(payload, **{**facts, **changes})
        if early:
            counted = [p.weight for p in self.server.service.coordinator.fragments[0].round.participants]
            sums = self.server.service.stores[0]._sums
            wait_until(lambda: version + 1 in sums and sums[version + 1].weight == sum_in_order(counted))

    def round(self, order: str, *, early: bool = True) -> None:
        made = self.version + 1
        for name in order:
            self.contribute(name, early=early and name != order[-1])
        wait_until(lambda: self.version == made)

    def records(self) -> list[tuple[RoundRecord, Record]]:
        """Between two tasks of the server: a checkpoint of its start may still cut what is older."""
        found: list[tuple[RoundRecord | None, Record]] = []

        def read() -> None:
            journal = Journal(FolderDisk(self.folder / "journal"), ours=False)
            records = journal.after(journal.last - len(journal._sizes))
            found.extend((read_record(record).round, record) for record in records)

        self.server.service._rounds.look(read)
        return [(round_, record) for round_, record in found if round_ is not None]

    def replays(self) -> bool:
        """Does a restart make the anchor that the workers were told of? (It refuses to start, if not.)"""
        before = self.version, self.anchor_hash
        self.restart()
        return (self.version, self.anchor_hash) == before


def test_contributions_that_were_added_early_are_in_the_record_in_the_order_in_which_they_were_added(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, weight_by="samples", keep_saves=9)
    for order in ("bca", "cab", "abc"):
        run.round(order)
        round_, record = run.records()[-1]
        assert round_.kind == "pushes"
        assert len(round_.pushes) == 3
        assert len(record.payload) < MEAN_BYTES
        assert len({push.scale for push in round_.pushes}) > 1 or run.version == 1
        assert run.held_bytes == 0
        assert run.replays()
    run.server.service.stop()


@pytest.mark.parametrize(
    ("codec", "kind"),
    [("fp32", "mean"), ("bf16", "mean"), ("int8", "pushes"), ("int4", "pushes"), ("sparse64", "pushes")],
)
def test_a_record_is_the_smaller_of_the_contributions_and_their_mean(codec: str, kind: str, tmp_path: Path) -> None:
    run = Run(tmp_path, codec=codec, down_codec="int4")
    for early in (False, True):
        run.round("abc", early=early)
        round_, record = run.records()[-1]
        assert round_.kind == kind
        assert len(record.payload) <= MEAN_BYTES
        assert run.replays()
    run.server.service.stop()


def test_bytes_that_had_to_make_room_are_not_missed(tmp_path: Path) -> None:
    """The pool has room for those of one round, and another worker wants some: the record is the mean again."""
    size = len(frame(1))
    run = Run(tmp_path, pool_bytes=3 * size, spool_bytes=0)
    run.contribute("a", early=True)
    assert run.held_bytes == size
    late = HandClient(run.clients["a"].transport, "d", MANIFEST)
    late.join()
    late.sequence = 1
    for name in "bc":
        run.clients[name].sequence = 1
        assert run.clients[name].offer(size, codec="int4").state == "send"
    wait_until(lambda: late.offer(size, codec="int4").state == "send")  # the bytes of "a" made room
    assert run.held_bytes == 3 * size
    for name in "bc":
        payload = frame(ord(name))
        run.clients[name].put(payload, 0)
        run.clients[name].commit(payload)
    wait_until(lambda: run.version == 1)
    round_, record = run.records()[-1]
    assert (round_.kind, len(record.payload)) == ("mean", MEAN_BYTES)
    assert run.replays()
    run.server.service.stop()


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"quorum": 2}, {"outer_optimizer": "adamw"}], ids=str)
def test_every_kind_of_plain_mean_replays_from_its_contributions(settings: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path, **settings)
    for made in range(1, 4):
        late = {"base_version": max(made - 3, 0), "oldest_base": max(made - 3, 0)} if "quorum" in settings else {}
        for name in "cab"[: settings.get("quorum", 3)]:
            run.contribute(name, **late)
        wait_until(lambda made=made: run.version == made)
        assert run.records()[-1][0].kind == "pushes"
        assert run.replays()
    run.server.service.stop()


def test_a_rule_that_compares_contributions_writes_what_it_made_of_them(tmp_path: Path) -> None:
    run = Run(tmp_path, aggregation="median")
    run.round("abc", early=False)
    round_, record = run.records()[-1]
    assert (round_.kind, len(record.payload)) == ("mean", MEAN_BYTES)
    assert run.replays()
    run.server.service.stop()


def test_a_journal_of_means_is_continued_with_contributions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a server wrote it that knew nothing else."""
    run = Run(tmp_path, keep_saves=9)
    with monkeypatch.context() as before:
        before.setattr(rounds, "smaller_than_mean", lambda addends, numel: False)
        for _ in range(2):
            run.round("abc", early=False)
        assert {round_.kind for round_, _ in run.records()} == {"mean"}
        assert run.replays()
    run.round("bca")
    assert run.records()[-1][0].kind == "pushes"
    assert run.replays()
    run.server.service.stop()


@pytest.mark.parametrize("change", ["another order", "one less", "another weight"])
def test_a_record_that_replays_other_contributions_is_refused(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Planted: what is written is not what was added."""
    run = Run(tmp_path, weight_by="samples")
    run.round("abc", early=False)
    append = persistence.RunWriter._round

    def wrong(writer: Any, stepped: Any) -> Any:
        addends = stepped.addends
        if change == "another order":
            addends.reverse()
        elif change == "one less":
            del addends[1]
        else:
            addends[1] = persistence.Addend(addends[1].payload, addends[1].weight * 1.01, addends[1].base)
        return append(writer, stepped)

    monkeypatch.setattr(persistence.RunWriter, "_round", wrong)
    run.round("abc", early=False)
    with pytest.raises(ModelError, match=r"replaying journal record [0-9]+ makes version 2 of fragment 0 with hash"):
        run.restart()
