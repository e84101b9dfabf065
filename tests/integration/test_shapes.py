"""Real jobs on gloo of every shape, each of them one worker, some by torchrun: tensor-parallel, FSDP2 and TP,
pipeline stages, stages of FSDP2, beside a plain worker of one server."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clusters import Cluster
from integration.shape_job import RANKS, SYNC_EVERY, make_model, really_train_step, train_step
from integration.test_groups import Job, Versions, jobs, versions  # noqa: F401 - fixtures
from outerstep import DiLoCoWorker
from outerstep.model_folder import load_state_dict
from outerstep.server import DiLoCoServer
from support import assert_same, in_threads, wait_until

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("shape_job.py")
STEPS = 3 * SYNC_EVERY + 1
MODEL_BYTES = 4 * sum(p.numel() for p in make_model().parameters())
STREAMED = {"num_fragments": 2, "fragment_delay": 1, "fragment_carry": True}
BY_ROWS = ("fsdp", "hsdp")  # what releases before knew


def start(
    folder: Path, kind: str, server: DiLoCoServer, *, torchrun: bool = False, dies_at: int = 0, steps: int = STEPS
) -> Job:
    facts: dict[str, Any] = {"ranks": RANKS[kind], "steps": steps, "dies_at": dies_at, "torchrun": torchrun}
    return Job(folder, kind, server.address, script=JOB, **facts)


def make_server(**settings: Any) -> DiLoCoServer:
    facts = {"part_size_bytes": 64, "sync_every": SYNC_EVERY, "outer_lr": 1.0, "outer_momentum": 0.0, **settings}
    return DiLoCoServer(make_model().state_dict(), port=0, **facts)


def plain_worker(address: str, name: str = "plain", steps: int = STEPS) -> dict[str, Any]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCoWorker(model, optimizer, address, worker_id=name) as worker:
        for step in range(steps):
            train_step(model, optimizer, name, step)
    return worker.sync_metrics


def assert_agrees(result: dict[str, Any], versions: Versions) -> None:  # noqa: F811
    """Every anchor that this rank ever held is the server's, bit for bit; and it ends with the newest."""
    assert result["history"]
    for fragment, version, here in result["history"]:
        for name, values in here.items():
            assert values == cut(versions[fragment, version][name], result["places"][name]), (name, version)


def cut(whole: Tensor, place: list[list[int]]) -> list[float]:
    values: list[float] = whole[tuple(slice(b, b + n) for b, n in zip(*place, strict=True))].flatten().tolist()
    return values


@pytest.mark.parametrize(
    ("settings", "by_torchrun"),
    [
        ({"codec": "bf16"}, {"tp"}),
        ({"codec": "int4+feedback", "down_codec": "int4", **STREAMED}, {"pp_fsdp"}),
    ],
    ids=["bf16", "int4-with-feedback-streamed"],
)
def test_jobs_of_all_shapes_and_a_plain_worker_agree_bit_for_bit(
    tmp_path: Path,
    versions: Versions,  # noqa: F811
    jobs: list[Job],  # noqa: F811
    settings: dict[str, Any],
    by_torchrun: set[str],
) -> None:
    shapes = ["tp", "fsdp_tp", "pp", "pp_fsdp"]
    with make_server(num_workers=5, **settings) as server:
        jobs += [start(tmp_path, kind, server, torchrun=kind in by_torchrun) for kind in shapes]
        (alone,) = in_threads(lambda: plain_worker(server.address), timeout_s=200)
        results = {job.kind: job.results() for job in jobs}
        workers = {p.worker_id for store in server.service.stores for p in store.newest.agreement.participants}
        assert server.status()["total_worker_deaths"] == 0
    assert workers == {"plain", *shapes}
    for ranks in results.values():
        for result in ranks:
            assert result["is_tiled"]
            assert_agrees(result, versions)
            assert result["versions"] == alone["versions"]
            assert result["local_step"] == STEPS
        for name in ("peer_grad_similarity", "inner_grad_norm", "pseudo_grad_norm"):
            assert len({result[name] for result in ranks}) == 1, name
            assert ranks[0][name] is not None


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [({}, ["tp", "fsdp_tp", "pp_fsdp", "hsdp"]), (STREAMED, ["fsdp_tp", "pp_tied", "pp_fsdp", "fsdp"])],
    ids=["blocking", "streamed"],
)
def test_whatever_its_shape_a_job_makes_the_history_of_a_single_process(
    tmp_path: Path,
    jobs: list[Job],  # noqa: F811
    versions: Versions,  # noqa: F811
    settings: dict[str, Any],
    kinds: list[str],
) -> None:
    """Every version of every fragment, which is the one before and the only contribution. Weights and gradients are
    whole numbers, so every sum is exact. And all ranks together send the model once in each round, and fetch it once.
    """
    exact: dict[str, Any] = {"num_workers": 1, "codec": "fp32", "down_codec": "fp32", **settings}
    for kind in kinds:
        folder = tmp_path / kind
        folder.mkdir()
        versions.clear()
        with make_server(**exact) as server:
            jobs.append(start(folder, kind, server))
            results = jobs[-1].results()
            rounds, by_job = server.sync_round, dict(versions)
        assert len(by_job) > 3
        assert all(result["is_tiled"] == (kind not in BY_ROWS) for result in results)
        for result in results:
            assert_agrees(result, by_job)
        sent, received = (sum(result[name] for result in results) for name in ("bytes_sent", "bytes_received"))
        headers = 1500 * len(results)  # beside the values of a model of 2.4 KB
        if kind not in BY_ROWS:
            assert MODEL_BYTES * rounds <= sent <= (MODEL_BYTES + headers) * (rounds + 1)
            assert MODEL_BYTES * rounds <= received <= (MODEL_BYTES + 512) * (rounds + 1)
        versions.clear()
        with make_server(**exact) as server:
            plain_worker(server.address, kind)
            assert server.sync_round == rounds
        assert versions.keys() == by_job.keys()
        for version, params in versions.items():
            assert_same(by_job[version], params)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_a_pipeline_of_torchs_own_makes_the_history_of_a_single_process(
    tmp_path: Path,
    jobs: list[Job],  # noqa: F811
    versions: Versions,  # noqa: F811
    kind: str,
) -> None:
    """It really trains: forward and backward through two stages and four microbatches, by a schedule of
    torch.distributed.pipelining and by torchrun."""
    exact: dict[str, Any] = {"num_workers": 1, "codec": "fp32", "down_codec": "fp32"}
    with make_server(**exact) as server:
        jobs.append(start(tmp_path, kind, server, torchrun=True))
        results, by_job = jobs[-1].results(), dict(versions)
    for result in results:
        assert result["is_tiled"]
        assert_agrees(result, by_job)
    versions.clear()
    with make_server(**exact) as server:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCoWorker(model, optimizer, server.address, worker_id="plain"):
            for step in range(STEPS):
                really_train_step(model, optimizer, None, kind, step)
    assert versions.keys() == by_job.keys()
    assert not torch.equal(versions[0, 0]["layers.0.up.weight"], versions[0, 1]["layers.0.up.weight"])
    for version, params in versions.items():
        assert_same(by_job[version], params)


@pytest.mark.row("F29")
def test_a_job_whose_rank_was_killed_goes_on_in_another_shape_and_every_step_counts_once(
    tmp_path: Path,
    jobs: list[Job],  # noqa: F811
) -> None:
    """From FSDP2 and TP to pipeline stages, once more in these, and to a single process; each time with contributions
    under way."""
    (tmp_path / "name").write_text("job")
    settings: dict[str, Any] = {"codec": "fp32", "down_codec": "fp32", **STREAMED}
    steps = 4 * SYNC_EVERY + 1
    with make_server(num_workers=1, **settings) as server:
        for kind, dies_at in (("fsdp_tp", 4), ("pp", 7), ("pp", 10)):
            jobs.append(start(tmp_path, kind, server, torchrun=True, dies_at=dies_at, steps=steps))
            assert any(jobs[-1].ended())
            states = [torch.load(file, weights_only=True) for file in sorted(tmp_path.glob("state-*.pt"))]
            assert len(states) == RANKS[kind]
            assert all(any(fragment["contributions"] for fragment in state["fragments"]) for state in states)
        jobs.append(start(tmp_path, "plain", server, steps=steps))
        (result,) = jobs[-1].results()
        found, samples = server.get_global_params(), result["samples"]
        assert result["steps_discarded"] == 0
    with make_server(num_workers=1, **settings) as server:
        plain_worker(server.address, "job", steps)
        assert_same(found, server.get_global_params())
    assert samples == 8 * (4 * 4 + 2 * 3 + 2 * 3 + 3)  # of each step on each rank that took it


def test_a_job_of_boxes_outlives_its_server_and_every_step_counts_once(
    tmp_path: Path,
    jobs: list[Job],  # noqa: F811
) -> None:
    """The new server knows nothing of how the job cuts the model: each rank says it again."""
    for file in ("name", "slowly"):
        (tmp_path / file).write_text("job")
    flags = ["-n", "1", "--sync-every", str(SYNC_EVERY), "--outer-lr", "1", "--outer-momentum", "0"]
    flags += ["--codec", "fp32", "--down-codec", "fp32"]
    flags += ["--num-fragments", "2", "--fragment-delay", "1", "--fragment-carry"]
    steps = 8 * SYNC_EVERY + 1
    with Cluster(tmp_path, *flags, model=make_model()) as run:
        jobs.append(Job(tmp_path, "fsdp_tp", run.address, script=JOB, ranks=RANKS["fsdp_tp"], steps=steps))
        wait_until(lambda: run.round() >= 2, timeout_s=100)
        run.server.kill()
        run.server.wait()
        died_at = len(run.events("round"))
        run.start_server(*flags)
        results = jobs[-1].results()
        assert len(run.events("round")) >= died_at + 4
        run.server.send_signal(signal.SIGTERM)
        assert run.server.wait(60) == 0, run.log("server")
    assert [result["steps_discarded"] for result in results] == [0] * 4
    found = load_state_dict(tmp_path / "outerstep-run" / "latest")
    settings: dict[str, Any] = {"codec": "fp32", "down_codec": "fp32", **STREAMED}
    with make_server(num_workers=1, **settings) as server:
        plain_worker(server.address, "job", steps)
        assert_same(found, server.get_global_params())


@pytest.mark.row("F29")
def test_what_a_codec_owes_survives_every_change_of_shape(
    tmp_path: Path,
    jobs: list[Job],  # noqa: F811
) -> None:
    """Streamed, four bits with error feedback: what was sent and what is still owed are the steps that were taken. The
    steps are whole numbers, so one that is lost or counts twice is seen for certain, whatever int4 rounds."""
    (tmp_path / "name").write_text("job")
    settings: dict[str, Any] = {"codec": "int4+feedback", "down_codec": "fp32", **STREAMED}
    chain, steps = ("pp", "tp", "fsdp_tp", "fsdp"), 5 * SYNC_EVERY + 1
    with make_server(num_workers=1, **settings) as server:
        for number, kind in enumerate(chain):
            jobs.append(start(tmp_path, kind, server, dies_at=SYNC_EVERY * (number + 1) + 1, steps=steps))
            assert any(jobs[-1].ended())
            assert len(list(tmp_path.glob("state-*.pt"))) == RANKS[kind]
        jobs.append(start(tmp_path, "plain", server, steps=steps))
        (result,) = jobs[-1].results()
        found = server.get_global_params()
    assert result["steps_discarded"] == 0
    assert any(abs(value) > 0.01 for left in result["owed"].values() for value in left)
    with make_server(num_workers=1, codec="fp32", down_codec="fp32", **STREAMED) as server:
        plain_worker(server.address, "job", steps)
        expected = server.get_global_params()
    for name, theta in found.items():
        taken = theta - torch.tensor(result["owed"][name]).view(theta.shape)
        assert float((taken - expected[name]).abs().max()) < 0.01, name


def test_if_a_rank_is_killed_its_job_ends_and_a_plain_worker_goes_on(
    tmp_path: Path,
    jobs: list[Job],  # noqa: F811
) -> None:
    (tmp_path / "slowly").touch()
    with make_server(num_workers=2, codec="fp32", heartbeat_timeout=4.0) as server:
        jobs.append(start(tmp_path, "tp", server, steps=10**6))

        def kill_and_look() -> None:
            wait_until(lambda: server.sync_round >= 2, timeout_s=100)
            os.kill(jobs[0].pid(1), signal.SIGKILL)
            assert all(jobs[0].ended())
            wait_until(lambda: "tp" not in server.status()["workers"], timeout_s=100)  # type: ignore[operator]
            at = server.sync_round
            wait_until(lambda: server.sync_round >= at + 2, timeout_s=100)

        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ended = threading.Event()

        def train() -> None:
            with DiLoCoWorker(model, optimizer, server.address, worker_id="plain") as worker:
                step = 0
                while not ended.is_set() and not worker.should_stop:
                    train_step(model, optimizer, "plain", step)
                    step += 1

        def look() -> None:
            try:
                kill_and_look()
            finally:
                ended.set()

        in_threads(train, look, timeout_s=200)
        last = server.service.stores[0].newest.agreement
        assert [p.worker_id for p in last.participants] == ["plain"]
