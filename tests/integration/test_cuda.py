"""A model on a GPU: the anchor lies beside it or in host memory, contributions are encoded and updates decoded there,
and the bits are those of a CPU and of the server."""

from __future__ import annotations

import contextlib
import gc
import threading
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from device_rounds import LARGE, OUTERS, RULES, Rounds, same
from outerstep.core.codecs import E3M0, FP32, INT4, INT8, Dither
from outerstep.core.codecs.on_device import may_use
from outerstep.core.codecs.scaled import ScaledCodec
from outerstep.core.feedback import ErrorFeedback
from outerstep.server import DiLoCoServer
from outerstep.server.places import hashes_on, pinned_memory
from outerstep.threads import process_helpers
from outerstep.topology.encode import Sender, encode_frame, write_frame
from outerstep.topology.forms import Form, forms_of
from outerstep.topology.payload import Memory, OutgoingFrame
from outerstep.topology.update import UpdateChain, WholeAnchor, anchor_tree, read_update
from outerstep.types import Plan
from outerstep.worker import DiLoCoWorker
from outerstep.worker.replica import Differences, Replica
from support import assert_same, in_threads, params_of, tiny_model, train_steps

if find_spec("triton") is not None:
    from outerstep.core.codecs import device_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RECIPES = [
    "fp32",
    "bf16",
    "bf16+stochastic",
    "int8",
    "int8+feedback",
    "int4",
    "int4+feedback",
    "e3m0",
    "e3m0+feedback",
    "sparse64",
    "int4,norms=fp32",
]
PLACES = ["device", "host"]


def cuda_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    source = torch.Generator(device="cuda").manual_seed(seed)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=source, device="cuda").to(param.dtype)
        optimizer.step()


def check_worker(worker: DiLoCoWorker, server: DiLoCoServer, place: str, dtype: torch.dtype = torch.float32) -> None:
    newest = [fragment["anchor_hash"] for fragment in server.status()["fragments"]]  # type: ignore[attr-defined]
    anchors = worker._replica.anchors
    for anchor in anchors.values():
        assert anchor.dtype == torch.float32
        assert anchor.is_cuda if place == "device" else anchor.is_pinned()
    assert [anchor_tree(anchors[name] for name in names) for names in worker.plan.fragments] == newest
    assert worker.sync_metrics["anchor_repairs"] == 0
    for name, param in worker._replica.tensors.items():
        assert torch.equal(param.detach().cpu(), anchors[name].cpu().to(dtype))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4+feedback", "sparse64"])
@pytest.mark.parametrize("streaming", [{}, {"fragment_delay": 1, "fragment_carry": True}])
def test_two_gpu_workers_hold_the_servers_bits(
    dtype: torch.dtype, codec: str, place: str, streaming: dict[str, Any]
) -> None:
    settings = {"codec": codec, "sync_every": 4, "num_fragments": 2, **streaming}
    with DiLoCoServer(tiny_model().to(dtype).state_dict(), num_workers=2, port=0, **settings) as server:

        def work(i: int) -> DiLoCoWorker:
            model = tiny_model().to("cuda", dtype)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with DiLoCoWorker(model, optimizer, server.address, worker_id=f"w{i}", anchor=place) as worker:
                cuda_steps(model, optimizer, 19, seed=i)
            return worker

        for worker in in_threads(lambda: work(0), lambda: work(1)):
            check_worker(worker, server, place, dtype)


@pytest.mark.parametrize("place", PLACES)
def test_global_weights_and_a_mixed_pair_of_gpu_and_cpu(place: str) -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, sync_every=5) as server:

        def on_gpu() -> dict[str, Tensor]:
            model = tiny_model().cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with DiLoCoWorker(model, optimizer, server.address, worker_id="gpu", anchor=place) as worker:
                cuda_steps(model, optimizer, 7, seed=1)
                local = params_of(model)
                with worker.global_weights():
                    assert not torch.equal(params_of(model)["0.weight"], local["0.weight"])
                assert_same(params_of(model), local)
                cuda_steps(model, optimizer, 8, seed=2)
            return {name: value.cpu() for name, value in params_of(model).items()}

        def on_cpu() -> dict[str, Tensor]:
            model = tiny_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with DiLoCoWorker(model, optimizer, server.address, worker_id="cpu"):
                train_steps(model, optimizer, 15, seed=3)
            return params_of(model)

        first, second = in_threads(on_gpu, on_cpu)
        assert_same(first, second)
        assert_same(first, server.get_global_params())


def test_weights_that_are_loaded_are_given_up_and_those_that_come_back_are_not() -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, sync_every=4) as server:
        model = tiny_model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with DiLoCoWorker(model, optimizer, server.address) as worker:
            for param in model.parameters():
                param.data.add_(100.0)  # no counter shows it: before the first step values are read
            cuda_steps(model, optimizer, 2, seed=1)
            assert worker.sync_metrics["outside_changes"] == 1
            own = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: value + 100.0 for name, value in own.items()})
            model.load_state_dict(own)
            cuda_steps(model, optimizer, 1, seed=2)
            assert worker.sync_metrics["outside_changes"] == 1
            model.load_state_dict({name: value + 100.0 for name, value in own.items()})
            cuda_steps(model, optimizer, 5, seed=3)
            assert worker.sync_metrics["outside_changes"] == 2
        assert all(float(value.abs().max()) < 10.0 for value in server.get_global_params().values())


# --- the same bits as a CPU -----------------------------------------------------------------------------------------


class Large(nn.Module):
    """More values than a block of a GPU, and one tensor in another order of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Parameter(torch.randn(5001, 4001))
        self.conv = nn.Conv2d(30, 50, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.gain = nn.Parameter(torch.randn(700))


class Pair:
    """The same model and anchor on a CPU and on a GPU."""

    def __init__(self, codec: str, down_codec: str = "bf16", place: str = "device") -> None:
        self.models = [Large(), Large().cuda()]
        self.replicas = [Replica(self.models[0]), Replica(self.models[1], anchor=place)]  # type: ignore[arg-type]
        names = tuple(self.replicas[0].tensors)
        plan = Plan(
            sync_every=1,
            codec=codec,
            fragments=(names,),
            part_size_bytes=1 << 20,
            max_staleness=4,
            heartbeat_timeout_s=0.0,
            down_codec=down_codec,
        )
        self.form: Form = forms_of(plan, self.replicas[0].manifest)[0]
        source = torch.Generator().manual_seed(1)
        self.theta = {n: p.detach() + 0.01 * torch.randn(p.shape, generator=source) for n, p in self.named(0).items()}
        full = encode_frame(self.theta, self.form.full, dict.fromkeys(names, FP32))
        for replica, model in zip(self.replicas, self.models, strict=True):
            own = {name: p.detach().clone() for name, p in model.named_parameters()}
            assert replica.adopt(read_update(self.form, ["full"], [full], anchor_tree(self.theta.values())))
            replica.restore(own)
        self.feedbacks = [ErrorFeedback(), ErrorFeedback()]

    def named(self, i: int) -> dict[str, Tensor]:
        return dict(self.models[i].named_parameters())

    def frame(self, i: int, sequence: int) -> bytes:
        replica, feedback = self.replicas[i], self.feedbacks[i]
        payload = OutgoingFrame(self.form.up, 1 << 20, pinned=i == 1, memory=Memory())
        feedback.begin(0, sequence)
        write_frame(
            payload,
            self.form.up,
            Sender(
                0,
                Differences(replica.anchors, replica.tensors),
                self.form.rules,
                feedback,
                lambda n: Dither.of("r", 0, sequence, n),
                {},
            ),
        )
        with torch.no_grad():  # training goes on at once
            for param in replica.tensors.values():
                param.add_(0.125)
        payload.wait()
        feedback.settle(0, sequence, counted=True)
        return payload.data.numpy().tobytes()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", RECIPES)
def test_a_gpu_writes_the_frames_of_a_cpu_while_training_goes_on(codec: str, place: str) -> None:
    pair = Pair(codec, place=place)
    for sequence in (1, 2, 3):
        assert pair.frame(0, sequence) == pair.frame(1, sequence)
    for name in pair.theta:
        ours, theirs = (feedback.residual(name) for feedback in pair.feedbacks)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert theirs.is_cuda == (place == "device")
            assert torch.equal(ours, theirs.cpu())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["adopt", "rebase", "carry", "mix"])
@pytest.mark.parametrize("down_codec", ["bf16", "int8", "int4", "e3m0"])
def test_a_gpu_takes_news_over_as_a_cpu_does(down_codec: str, way: str, place: str) -> None:
    pair = Pair("bf16", down_codec, place)
    source = torch.Generator().manual_seed(2)
    frames = [
        encode_frame(
            {name: 1e-3 * torch.randn(t.shape, generator=source) for name, t in pair.theta.items()},
            pair.form.update,
            pair.form.codecs,
        )
        for _ in range(2)
    ]
    expected = _expected_hash(pair, frames)
    for i, replica in enumerate(pair.replicas):
        sent = replica.deltas(replica.tensors)
        with torch.no_grad():
            for param in replica.tensors.values():
                param.add_(0.125)
        extra: dict[str, Any] = {"carry": {"sent": sent}, "mix": {"alpha": 0.25}}.get(way, {})
        held = [
            frame if i == 0 else torch.frombuffer(frame, dtype=torch.uint8).pin_memory().numpy().data
            for frame in frames
        ]
        update: WholeAnchor | UpdateChain = read_update(pair.form, ["update"] * 2, held, expected)
        assert getattr(replica, way)(update, **extra)
    for name in pair.theta:
        assert torch.equal(pair.replicas[0].anchors[name], pair.replicas[1].anchors[name].cpu()), name
        assert torch.equal(pair.named(0)[name].detach(), pair.named(1)[name].detach().cpu()), name


def _expected_hash(pair: Pair, frames: list[memoryview]) -> str:
    theta = {name: t.clone(memory_format=torch.contiguous_format) for name, t in pair.theta.items()}
    for frame in frames:
        data = torch.frombuffer(frame, dtype=torch.uint8)
        for entry in pair.form.update.entries:
            begin, end = (pair.form.update.data_begin + edge for edge in (entry.begin, entry.end))
            decoded = torch.empty(theta[entry.name].numel())
            pair.form.codecs[entry.name].decode(data[begin:end], decoded)
            theta[entry.name].view(-1).add_(decoded)
    return anchor_tree(theta.values())


def test_one_changed_bit_is_found_on_a_gpu() -> None:
    pair = Pair("bf16")
    frame = encode_frame({n: torch.zeros_like(t) for n, t in pair.theta.items()}, pair.form.update, pair.form.codecs)
    frame[len(frame) // 2 | 1] ^= 0x3F  # an exponent: the last bit of a zero would be lost in the sum
    assert not pair.replicas[1].adopt(read_update(pair.form, ["update"], [frame], anchor_tree(pair.theta.values())))


# --- what is compiled, and what is kept -----------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA")


@needs_triton
@pytest.mark.parametrize("codec", [INT8, INT4, E3M0], ids=lambda codec: codec.name)
def test_compiled_codecs_pass_their_trial_and_are_used(codec: ScaledCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    used: list[str] = []
    for name in ("encode_scaled", "decode_scaled", "add_scaled"):
        real = getattr(device_kernels, name)
        monkeypatch.setattr(
            device_kernels, name, lambda *given, real=real, name=name: (used.append(name), real(*given))
        )
    codec.prepare(device)
    assert may_use(codec.name, codec._gives_torchs_bits, device)
    used.clear()
    source = torch.Generator().manual_seed(3)
    for numel in (codec.block_values, 3 * codec.block_values + 77, 200_000, 3_000_001):
        for magnitude in (1e-40, 1e-30, 1.0, 3e38):
            values = (torch.rand(numel, generator=source) * 2.0 - 1.0) * magnitude
            kept = torch.randn(numel, generator=source)
            found = []
            for place in (values, values.to(device)):
                data = torch.full((codec.encoded_bytes(numel),), 0xA5, dtype=torch.uint8, device=place.device)
                decoded, total = torch.full_like(place, 7.0), kept.to(place.device, copy=True)
                codec.encode(place, data)
                codec.decode(data, decoded)
                codec.decode_add(data, total, -0.3)
                found.append([one.cpu().view(torch.uint8) for one in (data, decoded, total)])
            assert all(map(torch.equal, *found)), (codec.name, numel, magnitude)
    assert set(used) == {"encode_scaled", "decode_scaled", "add_scaled"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("streaming", [{}, {"num_fragments": 2, "fragment_delay": 1}])
def test_an_exchange_begins_no_thread_and_pins_no_memory_if_earlier_ones_did(
    streaming: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"codec": "int4", "down_codec": "bf16", "sync_every": 4, "part_size_bytes": 1 << 20, **streaming}
    begun: list[str] = []
    real = threading.Thread.start
    with DiLoCoServer(Large().state_dict(), num_workers=1, port=0, **settings) as server:
        model = Large().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with DiLoCoWorker(model, optimizer, server.address, anchor=place) as worker:
            cuda_steps(model, optimizer, 20, seed=1)
            monkeypatch.setattr(threading.Thread, "start", lambda one: (begun.append(one.name), real(one))[1])
            helpers, pinned = process_helpers().started, torch.cuda.host_memory_stats()["num_host_alloc"]
            before = worker.sync_metrics["versions"]
            cuda_steps(model, optimizer, 16, seed=2)
            assert min(worker.sync_metrics["versions"]) >= min(before) + 3
            now = torch.cuda.host_memory_stats()["num_host_alloc"]
        check_worker(worker, server, place)
    # One thread more than ever before may be needed at once; not one per exchange, nor one per request.
    assert process_helpers().started <= helpers + 2
    assert sum(not name.startswith("outerstep-connection") for name in begun) <= 2, begun
    assert now <= pinned + 2


# --- the server on a GPU ----------------------------------------------------------------------------------------------

CUDA = torch.device("cuda")
DEVICE_BLOCK = 3 << 19


def rounds_on(device: torch.device | None, codec: str, outer: str, rule: dict[str, Any] | None = None) -> Rounds:
    return Rounds(codec, OUTERS[outer](), device=device, rule=rule, shapes=LARGE, device_block=DEVICE_BLOCK)


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("codec", [*RECIPES, "int4+stochastic", "control-2bit"])
def test_a_servers_rounds_have_the_same_bits_on_a_gpu(codec: str, outer: str) -> None:
    here, there = (rounds_on(device, codec, outer) for device in (None, CUDA))
    for version in (1, 2, 3):
        same(there.mean_round(version, keep_mean=version == 2), here.mean_round(version, keep_mean=version == 2))
    assert not there.store.place.is_host
    assert there.store.down.on_device is not None
    assert there.store.down.on_device.is_cuda
    sums = [there.store._take() for _ in range(2)]
    there.store._shelf.give_back(sums[0])
    assert there.store._take().data_ptr() == sums[0].data_ptr()  # memory of the device is used again
    assert hashes_on(CUDA)


@pytest.mark.parametrize("codec", ["fp32", "int4", "sparse64"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_servers_other_rules_have_the_same_bits_and_verdicts_on_a_gpu(rule: dict[str, Any], codec: str) -> None:
    here, there = (rounds_on(device, codec, "nesterov", rule) for device in (None, CUDA))
    for version in (1, 2):
        same(there.rule_round(version), here.rule_round(version))
    assert not there.store.place.is_host


@pytest.mark.parametrize("codec", ["fp32", "int4"])
@pytest.mark.parametrize("outer", ["nesterov", "delayed"])
def test_a_servers_round_that_runs_out_of_a_gpus_memory_goes_on_without_it(outer: str, codec: str) -> None:
    """Of its memory there is a little less for each, until it suffices."""
    here = rounds_on(None, codec, outer)
    expected = [here.mean_round(version) for version in (1, 2)]
    total, left = torch.cuda.get_device_properties(CUDA).total_memory, 0
    for room in range(0, 64 << 20, 2 << 20):
        there = rounds_on(CUDA, codec, outer)
        same(there.mean_round(1), expected[0])
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(CUDA) + room) / total)
        try:
            same(there.mean_round(2), expected[1])
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        left += there.store.place.is_host
        if not there.store.place.is_host:
            break
        assert len(there.full) == 1
    assert left > 0


def test_memory_that_a_gpu_reads_by_itself_is_pinned_and_given_back() -> None:
    memory = pinned_memory(10 << 20)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    assert data.is_pinned()
    assert data[4096:8192].is_pinned()
    address = data.data_ptr()
    del data, memory
    gc.collect()
    assert int(torch.cuda.cudart().cudaHostUnregister(address)) != 0  # it is not registered any more
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # the next kernel is told of it


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4+feedback", "e3m0", "sparse64"])
def test_a_server_and_workers_on_either_have_the_same_bits(codec: str, place: str) -> None:
    """A worker on the GPU and one on the CPU, with a server on either."""
    found = []
    for device in ("cpu", "cuda"):
        settings = {"sync_every": 5, "codec": codec, "deterministic": True, "device": device}
        with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, **settings) as server:
            server.service.coordinator.run_id = "run"

            def on_gpu(server: DiLoCoServer = server) -> DiLoCoWorker:
                model = tiny_model().cuda()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                with DiLoCoWorker(model, optimizer, server.address, worker_id="gpu", anchor=place) as worker:
                    cuda_steps(model, optimizer, 12, seed=1)
                return worker

            def on_cpu(server: DiLoCoServer = server) -> None:
                model = tiny_model()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                with DiLoCoWorker(model, optimizer, server.address, worker_id="cpu"):
                    train_steps(model, optimizer, 12, seed=3)

            worker, _ = in_threads(on_gpu, on_cpu)
            check_worker(worker, server, place)
            assert server.typed_status().device == device
            found.append([fragment.anchor_hash for fragment in server.typed_status().fragments])
    assert found[0] == found[1]
