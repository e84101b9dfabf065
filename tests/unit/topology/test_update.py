"""An anchor is moved by what the server sent, to the same bits as the server's, whatever carried it."""

from __future__ import annotations

import logging
import secrets
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outerstep.errors import ExchangeFailed
from outerstep.topology.encode import encode_frame
from outerstep.topology.server.topology import ServerTopology
from outerstep.topology.update import CPU_BLOCK_VALUES, Extent, UpdateChain, WholeAnchor, anchor_tree, cuts, read_update
from outerstep.types import Poll
from outerstep.worker import DiLoCoWorker
from outerstep.worker.replica import Replica
from support import EAGER, assert_same, params_of
from unit.topology.one_fragment import OneFragment

DOWN = ["bf16", "int8", "int4", "e3m0", "bf16,norms=fp32,embeddings=int8"]


class Odd(nn.Module):
    """More values than a block, a tensor in another order of dimensions, a table, a gain, a scalar, nothing, and a
    buffer that is exchanged."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wide = nn.Parameter(torch.randn(CPU_BLOCK_VALUES // 512 + 1, 517))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.table = nn.Embedding(300, 7)
        self.norm = nn.BatchNorm1d(9)
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.empty(0, 3))


def nudge(model: nn.Module, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.01 * torch.randn(param.shape, generator=source).to(param.dtype))


def make(down_codec: str, dtype: torch.dtype = torch.float32) -> tuple[Replica, OneFragment]:
    replica = Replica(Odd().to(dtype), "average")
    theta = {name: tensor.detach() for name, tensor in replica.tensors.items()}
    return replica, OneFragment(theta, replica.manifest, codec="bf16", down_codec=down_codec)


def whole_of(server: OneFragment) -> WholeAnchor | UpdateChain:
    frame = server.frame("full", server.version)
    return read_update(server.form, ["full"], [frame], server.hashes[server.version])


def chain_of(server: OneFragment, held: int) -> WholeAnchor | UpdateChain:
    versions = range(held + 1, server.version + 1)
    frames = [server.updates[version] for version in versions]
    return read_update(server.form, ["update"] * len(frames), frames, server.hashes[server.version])


def some_move(server: OneFragment, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    server.move({name: 1e-3 * torch.randn(t.shape, generator=source) for name, t in server.theta.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("down_codec", DOWN)
@pytest.mark.parametrize("versions", [1, 3])
def test_updates_lead_to_the_servers_bits(down_codec: str, versions: int, dtype: torch.dtype) -> None:
    replica, server = make(down_codec, dtype)
    assert replica.adopt(whole_of(server))
    for i in range(versions):
        some_move(server, i)
    assert replica.adopt(chain_of(server, 0))
    assert_same(replica.anchors, server.theta)
    for name, local in replica.tensors.items():
        assert torch.equal(local.detach(), server.theta[name].to(local.dtype)), name
    assert anchor_tree(replica.anchors.values()) == server.hashes[versions]


def test_an_anchor_in_host_memory_is_the_same() -> None:
    replica, server = make("int8")
    other = Replica(Odd(), "average", anchor="host")
    for one in (replica, other):
        assert one.adopt(whole_of(server))
        nudge_locals(one)
    some_move(server, 1)
    for one in (replica, other):
        assert one.rebase(chain_of(server, 0))
    assert_same(replica.anchors, other.anchors)
    assert_same(replica.deltas(replica.tensors), other.deltas(other.tensors))
    kept = [one.to_send(one.tensors, keep=True)[1] for one in (replica, other)]
    assert_same(kept[0] or {}, kept[1] or {})


def test_an_empty_chain_is_the_anchor_that_is_held() -> None:
    replica, server = make("bf16")
    assert replica.adopt(whole_of(server))
    nudge_locals(replica)
    assert replica.adopt(chain_of(server, 0))
    assert_same({name: t.detach() for name, t in replica.tensors.items()}, server.theta)
    replica.anchors["wide"][0, 0] += 1.0
    assert not replica.adopt(chain_of(server, 0))


def nudge_locals(replica: Replica) -> None:
    with torch.no_grad():
        for i, tensor in enumerate(replica.tensors.values()):
            tensor.add_(0.25 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)))


@pytest.mark.parametrize("way", ["adopt", "rebase", "carry", "mix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whether_whole_or_in_updates_the_local_weights_move_alike(way: str, dtype: torch.dtype) -> None:
    """And as if each tensor were moved at once."""
    found: list[dict[str, Tensor]] = []
    for chain in (False, True):
        replica, server = make("bf16", dtype)
        assert replica.adopt(whole_of(server))
        nudge_locals(replica)
        sent = replica.deltas(replica.tensors)
        nudge_locals(replica)
        some_move(server, 1)
        some_move(server, 2)
        update = chain_of(server, 0) if chain else whole_of(server)
        extra: dict[str, Any] = {"carry": {"sent": sent}, "mix": {"alpha": 0.25}}.get(way, {})
        assert getattr(replica, way)(update, **extra)
        assert_same(replica.anchors, server.theta)
        found.append({name: t.detach().clone() for name, t in replica.tensors.items()})
    assert_same(*found)
    if way in ("rebase", "carry"):  # a statistic is taken as it was agreed
        assert torch.equal(found[0]["norm.running_var"], server.theta["norm.running_var"].to(dtype))
        assert not torch.equal(found[0]["wide"], server.theta["wide"].to(dtype))


@pytest.mark.parametrize("whole", [True, False])
def test_one_changed_bit_is_found(whole: bool) -> None:
    replica, server = make("bf16")
    assert replica.adopt(whole_of(server))
    some_move(server, 1)
    update = whole_of(server) if whole else chain_of(server, 0)
    frame = update.frames[0]
    frame[len(frame) // 2] ^= 1
    assert not replica.adopt(update)


def test_a_frame_of_other_tensors_is_refused() -> None:
    _, server = make("bf16")
    some_move(server, 1)
    with pytest.raises(ExchangeFailed, match="encoded as 'bf16', run has 'fp32'"):
        read_update(server.form, ["full"], [server.updates[1]], server.hashes[1])


def test_the_whole_by_name_is_checked_too() -> None:
    _, server = make("bf16")
    good = whole_of(server)
    assert isinstance(good, WholeAnchor)
    assert_same(dict(good.checked()), server.theta)
    bad = whole_of(server)
    assert isinstance(bad, WholeAnchor)
    bad.frames[0][server.form.full.data_begin] ^= 1
    with pytest.raises(ExchangeFailed, match="does not have the hash"):
        bad.checked()


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("first", [0, 1, 4096, 5000])
def test_some_rows_are_moved_as_the_whole_is(codec: str, first: int) -> None:
    """Of a tensor of which only some values are held: the codec's blocks that cover them are enough."""
    theta, d = torch.randn(9001), 1e-3 * torch.randn(9001)
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(theta.clone()))
    server = OneFragment({"w": theta}, Replica(model).manifest, codec="bf16", down_codec=codec)
    server.move({"w": d})
    frame = torch.frombuffer(server.updates[1], dtype=torch.uint8)
    rows = slice(first, first + 3001)
    expected = server.theta["w"][rows]
    hashed = range(7, 1999)
    update = UpdateChain(
        [lambda begin, end: frame[begin:end]],
        server.form.update,
        server.form.codecs,
        anchor_tree([expected[7:1999]]),
        {"w": Extent(first, hashed)},
    )
    blocks = [update.apply("w", a, b, theta[rows][a:b]).clone() for a, b in ((0, 1000), (1000, 1001), (1001, 3001))]
    assert torch.equal(torch.cat(blocks), expected)
    assert update.is_proven


def test_blocks_cover_a_tensor_once() -> None:
    cpu = torch.device("cpu")
    for numel in (0, 1, CPU_BLOCK_VALUES, 2 * CPU_BLOCK_VALUES + 1):
        assert [i for start, stop in cuts(numel, cpu) for i in (start, stop)][1:-1:2] == [
            start for start, _ in cuts(numel, cpu)
        ][1:]
        assert sum(stop - start for start, stop in cuts(numel, cpu)) == numel


# --- what the server is told, and what comes of it ------------------------------------------------------------------


class Run:
    """A worker that trains against the server above."""

    def __init__(self, server: OneFragment, model: nn.Module) -> None:
        self.server, self.model = server, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        topology = ServerTopology(server, worker_id="w", instance=secrets.token_hex(8), hostname="test", patience=EAGER)
        self.worker = DiLoCoWorker(model, self.optimizer, "none:1", topology=topology, buffers="local")

    def step(self, seed: int) -> None:
        with self.worker.own_change():
            nudge(self.model, seed)
        self.optimizer.step()

    @property
    def anchors(self) -> dict[str, Tensor]:
        return self.worker._replica.anchors


def make_run(down_codec: str = "bf16") -> Run:
    model = nn.Sequential(nn.Linear(50, 30), nn.Linear(30, 3))
    replica = Replica(model)
    return Run(OneFragment(params_of(model), replica.manifest, codec="bf16", down_codec=down_codec), model)


def test_a_worker_says_what_it_holds_and_takes_updates_over() -> None:
    run = make_run("int8")
    with run.worker:
        for i in range(5):
            run.step(i)
            assert_same(run.anchors, run.server.theta)
            assert_same(params_of(run.model), run.server.theta)
    first, *later = run.server.polls
    assert first.held_hash is None
    assert [(poll.held, poll.held_hash) for poll in later] == [(i, run.server.hashes[i]) for i in range(5)]
    assert run.worker.sync_metrics["anchor_repairs"] == 0
    whole = run.server.form.full.size_bytes
    assert run.worker.sync_metrics["bytes_received"] == 5 * run.server.form.update.size_bytes < whole * 5


def test_a_worker_that_was_away_gets_a_chain() -> None:
    run = make_run("int4")
    with run.worker:
        run.step(0)
        for i in range(3):
            some_move(run.server, i)
        run.step(1)
        assert_same(run.anchors, run.server.theta)
        assert run.worker.sync_metrics["versions"] == [5]


def test_an_anchor_that_is_not_the_agreed_one_is_fetched_anew(caplog: pytest.LogCaptureFixture) -> None:
    run = make_run()
    with run.worker:
        run.step(0)
        run.anchors["0.weight"].view(-1)[3] += 0.5  # as a broken memory would
        with caplog.at_level(logging.WARNING):
            run.step(1)
        assert "was not the one agreed on as version 2" in caplog.text
        assert run.worker.sync_metrics["anchor_repairs"] == 1
        assert_same(run.anchors, run.server.theta)
        for name, param in params_of(run.model).items():
            assert torch.allclose(param, run.server.theta[name], atol=1e-6)
        run.step(2)  # and the next one is an update again
        assert run.server.polls[-1].held_hash == run.server.hashes[2]
        assert run.worker.sync_metrics["anchor_repairs"] == 1
        assert_same(run.anchors, run.server.theta)


def test_after_a_mismatch_the_server_is_not_told_of_an_anchor() -> None:
    run = make_run()
    with run.worker:
        run.anchors["0.weight"].view(-1)[3] += 0.5
        run.step(0)
        assert [poll.held_hash is None for poll in run.server.polls] == [True, False, True]


def test_a_server_that_never_sends_what_it_names_is_given_up() -> None:
    run = make_run()

    def payloads(poll: Poll) -> list[tuple[str, int]]:
        run.server.hashes[run.server.version] = "0" * 32
        return [("full", run.server.version)]

    with run.worker:
        run.server.payloads = payloads
        with pytest.raises(ExchangeFailed, match="even whole"):
            run.step(0)
        run.worker.abandon("it cannot be trusted")


@pytest.mark.parametrize("odd", [[("update", 2)], [("update", 1)], []])
def test_a_chain_that_does_not_lead_on_from_our_anchor_is_not_applied(odd: list[tuple[str, int]]) -> None:
    run = make_run("int4")
    with run.worker:

        def payloads(poll: Poll) -> list[tuple[str, int]]:
            while run.server.version < 2:  # ours, and one more
                some_move(run.server, 0)
            return run.server.as_agreed(poll) if poll.held_hash is None else odd

        run.server.payloads = payloads
        run.step(0)
        assert_same(run.anchors, run.server.theta)
        assert run.worker.sync_metrics["sync_count"] == 1
        assert run.worker.sync_metrics["anchor_repairs"] == 0


def test_payloads_of_one_version_are_no_chain() -> None:
    run = make_run("int4")
    with run.worker:
        run.server.payloads = lambda poll: [("update", 1), ("update", 1)]
        with pytest.raises(ExchangeFailed, match=r"payloads of versions \[1, 1\]"):
            run.step(0)
        run.worker.abandon("it cannot be trusted")


def test_who_asked_for_the_whole_and_got_something_else_says_so() -> None:
    run = make_run()
    some_move(run.server, 0)
    run.server.payloads = lambda poll: [("update", 1)]
    with pytest.raises(ExchangeFailed, match="asked for the whole of fragment 0"):
        run.worker.start()


def test_encode_frame_is_what_the_layout_says() -> None:
    _, server = make("int4")
    frame = encode_frame(server.theta, server.form.update, server.form.codecs)
    assert len(frame) == server.form.update.size_bytes
