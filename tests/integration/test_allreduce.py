"""Runs without a server: real processes over gloo, each of them a worker."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.allreduce_job import CODECS, COMPARED, SYNC_EVERY, make_model, train
from outerstep.server import DiLoCoServer
from ranks import Ranks
from support import in_threads, memory_worker, params_of

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("allreduce_job.py")
PARAMETERS = sum(p.numel() for p in make_model(0).parameters())
RING_BYTES_PER_ROUND = {n: 2 * (n - 1) / n * 4 * PARAMETERS for n in (2, 3)}  # what each rank of a ring sends in fp32


class Job(Ranks):
    """The ranks of a scenario, and what they write down."""

    def __init__(self, folder: Path, scenario: str, ranks: int, environ: list[dict[str, str]] | None = None) -> None:
        self.folder, self.scenario, self.ranks = folder, scenario, ranks
        super().__init__([str(JOB), scenario, str(folder)], [self._log(rank) for rank in range(ranks)], environ)

    def _log(self, rank: int) -> Path:
        return self.folder / f"{self.scenario}-{rank}.log"

    def result(self, rank: int) -> dict[str, Any]:
        assert self.processes[rank].wait(240) == 0, self._log(rank).read_text()[-4000:]
        found: dict[str, Any] = json.loads((self.folder / f"{self.scenario}-{rank}.json").read_text())
        return found

    def results(self) -> list[dict[str, Any]]:
        return [self.result(rank) for rank in range(self.ranks)]


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    found: list[Job] = []
    yield found
    for job in found:
        job.close()


def test_every_codec_gives_the_same_bits_on_all_ranks_whatever_their_vectors_and_threads_and_small_ones_few_bytes(
    tmp_path: Path, jobs: list[Job]
) -> None:
    capabilities: list[dict[str, str]] = [{"ATEN_CPU_CAPABILITY": "default"}, {"ATEN_CPU_CAPABILITY": "avx2"}, {}]
    jobs.append(Job(tmp_path, "every_codec", 3, capabilities))
    told = jobs[0].results()
    assert told[0]["capability"].lower() == "default"
    assert len({one["capability"] for one in told}) >= 2
    for codec in [*CODECS, "streaming"]:
        first = told[0][codec]
        assert len(set(first["hashes"])) >= 4, codec  # it moved in every round
        for other in told[1:]:
            assert other[codec]["hashes"] == first["hashes"], codec
            assert other[codec]["anchor_repairs"] == 0
        assert_watched([rank[codec] for rank in told])
    for codec, most in (("int8", 0.3), ("int4", 0.2)):
        for one in (rank[codec] for rank in told):
            ring = RING_BYTES_PER_ROUND[3] * one["sync_count"]
            assert 0.05 < one["bytes_sent"] / ring <= most  # what was handed to the process group
            assert 0.05 < one["on_sockets"] / ring <= most  # what the kernel sent, all talk included
    fp32 = [rank["fp32"] for rank in told]
    ring = RING_BYTES_PER_ROUND[3] * 3
    assert sum(one["bytes_sent"] for one in fp32) == pytest.approx(3 * ring, rel=0.01)
    assert all(one["bytes_sent"] <= one["on_sockets"] <= 1.1 * ring for one in fp32)


def assert_watched(ranks: list[dict[str, Any]]) -> None:
    """All ranks know the same of the last round, and it fits what each knows of its own contribution."""
    for name in ("peer_grad_similarity", "aggregated_grad_norm", "weight_divergence"):
        assert len({rank[name] for rank in ranks}) == 1, name
    squares = sum(rank["pseudo_grad_norm"] ** 2 for rank in ranks) / len(ranks)
    mean, apart = ranks[0]["aggregated_grad_norm"] ** 2, ranks[0]["weight_divergence"]
    assert 0.0 < mean < squares
    assert mean + apart == pytest.approx(squares, rel=1e-6)
    assert -1.0 < ranks[0]["peer_grad_similarity"] < 1.0
    assert all(rank["inner_grad_norm"] > 0.0 for rank in ranks)


def by_a_server(**settings: Any) -> dict[str, torch.Tensor]:
    """The same training with a server, which adds in the order of the workers' names."""
    first = make_model(100)
    server = DiLoCoServer(
        {name: value.clone() for name, value in first.state_dict().items()},
        num_workers=2, port=0, sync_every=SYNC_EVERY, deterministic=True, **settings,
    )  # fmt: skip
    server.service.start()

    def work(rank: int) -> dict[str, torch.Tensor]:
        model, source = make_model(100 + rank), torch.Generator().manual_seed(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with memory_worker(server, f"rank-{rank}", model, optimizer):
            train(model, optimizer, source, 3 * SYNC_EVERY + 2)
        return {**params_of(model), "seen": model.seen.clone()}

    results = in_threads(lambda: work(0), lambda: work(1))
    server.service.stop()
    found: dict[str, torch.Tensor] = results[0]
    return found


def test_the_result_is_that_of_a_server_bit_for_bit_with_fp32_and_close_with_other_codecs(
    tmp_path: Path, jobs: list[Job]
) -> None:
    jobs.append(Job(tmp_path, "trained", 2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = {name: by_a_server(**settings) for name, settings in COMPARED.items()}
    finally:
        torch.set_num_threads(threads)
    first, second = jobs[0].results()
    assert first == second
    for name, values in expected.items():
        found = {key: torch.tensor(value) for key, value in first[name].items()}
        assert found.keys() == values.keys()
        # Of the largest distance that a parameter has travelled: one step of the codec.
        moved = max((values[key] - start).abs().max() for key, start in make_model(100).state_dict().items())
        most = {"powers of two": 0.0, "usual": 0.0, "bf16": 1e-2, "int8": 2e-2}[name] * float(moved)
        for key, value in values.items():
            assert (found[key] - value).abs().max() <= most, (name, key)


@pytest.mark.parametrize("where", ["before", "inside"])
def test_a_killed_rank_is_named_by_all_others_and_nobody_hangs(tmp_path: Path, jobs: list[Job], where: str) -> None:
    jobs.append(Job(tmp_path, where, 3))
    for rank in (0, 2):
        told = jobs[0].result(rank)
        assert told["kind"] == "PeerLost"
        assert f"rank 1, rank-1 (process {jobs[0].processes[1].pid}" in told["said"]
        assert "died" in told["said"]
        assert told["steps"] == 2 * SYNC_EVERY
    assert jobs[0].processes[1].wait(60) == -signal.SIGKILL


def test_what_ranks_must_not_disagree_on_is_refused_on_all_of_them_by_name(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(Job(tmp_path, "refused", 2))
    told = jobs[0].results()
    for one in told:
        assert (
            "PlanMismatch: ranks 0 and 1 want different runs: codec is bf16 on rank 0, int8 on rank 1" in one["codec"]
        )
        assert "outer_lr is 0.5 on rank 0, 1.5 on rank 1" in one["outer"]
        assert "ManifestMismatch: ranks 0 and 1 hold different models" in one["buffers"]
        assert "'seen' is kept local" in one["buffers"]
        assert "ModelError: this model is wrapped in DistributedDataParallel" in one["ddp"]
        assert "OutOfStep" in one["steps"] or "failed: OutOfStep" in one["steps"]
        assert "rank 0 offers fragment 0 after 2 steps on version 0, rank 1 fragment 0 after 3 steps" in one["steps"]
        assert "contributed NaN or Inf in tensor 'layers." in one["nan"]
        assert "rank 1, rank-1 (process" in one["nan"]
        assert "weighs contributions by tokens, and rank 0 reported none in 4 steps" in one["weights"]
        assert one["loads"].endswith(" True True"), one["loads"]
        assert "AnchorsDiffer: fragment 0, version 1: rank 1, rank-1 (process" in one["crooked"]
    assert "PeerLost: rank 0, rank-0" in told[1]["end"]
    assert "has left the run (done)" in told[1]["end"]
    assert told[0]["loads"] == told[1]["loads"]
    assert told[0]["repaired"] == told[1]["repaired"]
    assert told[0]["repaired"].endswith(" 1 repaired")


def test_a_saved_state_goes_on_as_if_nothing_had_happened(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(Job(tmp_path, "resumed", 2))
    for told in jobs[0].results():
        assert told["one go"] == told["two goes"]
        assert told["one go"][1] == [5]
