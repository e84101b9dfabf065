"""A server told to work on a GPU: the bits of one that was not, a journal that either of them replays, and what happens
where there is no room. (The device is this CPU, worked on as a GPU is; and a
GPU, where there is one.)"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.errors import ConfigError
from outerstep.events import DeviceLeft, Event
from outerstep.server import DiLoCoServer
from outerstep.server import run as server_run
from outerstep.server.blocks import Block
from outerstep.server.outer_state import state_of
from outerstep.server.places import DeviceBlocks, Pass
from outerstep.worker import DiLoCoWorker
from support import in_threads, params_of, tiny_model, train_steps

STEPS = 14
SETTINGS: dict[str, dict[str, Any]] = {
    "blocking int4": {"codec": "int4"},
    "fp32 both ways": {"codec": "fp32", "down_codec": "fp32"},
    "streaming, feedback": {"codec": "int4+feedback", "num_fragments": 2, "fragment_delay": 1, "fragment_carry": True},
    "sparse": {"codec": "sparse64"},
    "stochastic": {"codec": "int8+stochastic"},
    "trimmed mean": {"aggregation": "trimmed_mean", "num_workers": 3},
    "centered clipping": {"aggregation": "centered_clipping", "num_workers": 3},
    "asynchronous": {"async_mode": True, "num_workers": 1, "dn_buffer_size": 2},
}


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def _any_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_run, "device_of", lambda name: None if name == "cpu" else torch.device(request.param))


def train(server: DiLoCoServer, before_it_ends: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    def work(name: str) -> dict[str, Tensor]:
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with DiLoCoWorker(model, optimizer, server.address, worker_id=name) as worker:
            train_steps(model, optimizer, STEPS, seed=ord(name))
            if name == "a":
                before_it_ends()
        assert worker.sync_metrics["anchor_repairs"] == 0
        return params_of(model)

    names = "abc"[: server.config.num_workers]
    first, *_ = in_threads(*(lambda name=name: work(name) for name in names))  # type: ignore[misc]
    return first


def make(device: str, **settings: Any) -> DiLoCoServer:
    given = {"num_workers": 2, "sync_every": 4, "deterministic": True, **settings}
    server = DiLoCoServer(tiny_model().state_dict(), port=0, device=device, **given)
    if server.config.resume is None:
        server.service.coordinator.run_id = "run"  # rounding at random depends on it
    return server


def state(server: DiLoCoServer) -> dict[str, Any]:
    stores, optimizer = server.service.stores, server.service.optimizer
    assert optimizer is not None
    tensors = {n: t for store in stores for n, t in {**store.copy_params(), **_named("T", store)}.items()}
    hashes = [store.newest.agreement.anchor_hash for store in stores]
    by_name = state_of(optimizer).on_host().by_name
    kept = {f"{key} {name}": t for name, entry in by_name.items() for key, t in entry.items()}
    return {"hashes": hashes, **{n: t.numpy().tobytes() for n, t in {**tensors, **kept}.items()}}


def _named(prefix: str, store: Any) -> dict[str, Tensor]:
    return {f"{prefix} {name}": values for name, values in store.targets_on_host().items()}


@pytest.mark.usefixtures("_any_device")
@pytest.mark.parametrize("mode", SETTINGS)
def test_a_run_on_a_device_has_the_bits_of_one_on_the_host(mode: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        with make(device, **SETTINGS[mode]) as server:
            weights = train(server)
            assert server.typed_status().device == device
            assert all(store.place.is_host == (device == "cpu") for store in server.service.stores)
            found.append({**state(server), **{f"w {n}": t.numpy().tobytes() for n, t in weights.items()}})
    assert found[0] == found[1]


@pytest.mark.usefixtures("_any_device")
@pytest.mark.parametrize("mode", ["blocking int4", "fp32 both ways", "trimmed mean", "asynchronous"])
@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_what_one_of_them_has_recorded_the_other_replays(first: str, mode: str, tmp_path: Path) -> None:
    """The folder is copied while a worker is still there: as a crash leaves it, with a journal and no newer state."""
    second = {"cpu": "cuda", "cuda": "cpu"}[first]
    settings = {**SETTINGS[mode], "deterministic": False}  # on a CPU alone the step is then torch's
    folders, expected = [tmp_path / name for name in ("run", "copy", "again")], list[dict[str, Any]]()
    for device, folder, copy in zip((first, second), folders, folders[1:], strict=False):
        with make(device, save_dir=str(folder), **settings) as server:
            if expected:
                assert server.is_resumed
                assert state(server) == expected[-1]
                assert all(store.place.is_host == (second == "cpu") for store in server.service.stores)

            def crash(server: DiLoCoServer = server, folder: Path = folder, copy: Path = copy) -> None:
                def look() -> None:
                    expected.append(state(server))
                    shutil.copytree(folder, copy)

                server.service.between_rounds(look)

            train(server, crash)
        assert len(list((copy / "journal").glob("record-*"))) >= 3
    with make(first, save_dir=str(folders[-1]), **settings) as server:
        assert state(server) == expected[-1]


@pytest.mark.usefixtures("_any_device")
def test_without_room_for_the_run_it_is_on_the_cpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_run, "free_bytes", lambda device: 1 << 20)
    events = list[Event]()
    with make("cuda", event_sink=events.append) as server:
        train(server)
        status, found = server.typed_status(), state(server)
    left = [event for event in events if isinstance(event, DeviceLeft)]
    assert [event.device for event in left] == ["cuda"]
    assert "1 MiB are free" in left[0].why
    assert (status.device, status.device_left) == ("cpu", left[0].why)
    with make("cpu") as server:
        train(server)
        assert state(server) == found


@pytest.mark.usefixtures("_any_device")
@pytest.mark.parametrize("at", [2, 11, 20])
@pytest.mark.parametrize("mode", ["streaming, feedback", "asynchronous"])
def test_no_round_is_lost_when_there_is_no_more_room(mode: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, asked = DeviceBlocks._whole_or_not, list[str]()

    def full(place: DeviceBlocks, block: Block, room: Tensor, one: Pass) -> None:
        def work(block: Block, room: Tensor) -> Any:
            made = one.work(block, room)
            asked.append(block.name)
            if len(asked) == at:
                raise torch.OutOfMemoryError("CUDA out of memory (as a test has it)")
            return made

        whole(place, block, room, Pass(work, one.seal, one.touched, one.rows))

    monkeypatch.setattr(DeviceBlocks, "_whole_or_not", full)
    events = list[Event]()
    with make("cuda", event_sink=events.append, **SETTINGS[mode]) as server:
        train(server)
        found = state(server)
        assert server.typed_status().device == "cpu"
        assert all(store.place.is_host for store in server.service.stores)
    assert [event.why for event in events if isinstance(event, DeviceLeft)] == ["CUDA out of memory (as a test has it)"]
    with make("cpu", **SETTINGS[mode]) as server:
        train(server)
        assert state(server) == found


def test_what_cannot_be_is_said_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"device must be cpu, cuda or cuda:N, got 'gpu'"):
        make("gpu")
    with pytest.raises(ConfigError, match=r"device is 'cuda:99', and torch finds"):
        make("cuda:99")
    with pytest.raises(ConfigError, match=r"torch's Adam promises none"):
        make("cuda", outer_optimizer="adam", deterministic=False)
