"""Replicas without a server whose models are on a GPU, over torchft and over torch.distributed, by NCCL and by gloo:
their anchors have the bits of replicas on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration.cuda_replica_job import ROUNDS, SETTINGS
from ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

JOB = Path(__file__).with_name("cuda_replica_job.py")
PATIENCE_S = 300.0


def run(topology: str, backend: str, device: str) -> dict[str, list[str]]:
    """The hashes of two replicas, which are equal."""
    os.environ.setdefault("RUST_LOG", "warn")
    if topology == "torchft":
        coordination = pytest.importorskip("torchft.coordination")
        lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=2000)
        where = lighthouse.address().removeprefix("http://")
    else:
        where = f"127.0.0.1:{free_port()}"
    found = os.pathsep.join([str(JOB.parents[1]), os.environ.get("PYTHONPATH", "")])
    children = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(number), where, topology, backend, device],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": found, "NCCL_HOSTID": f"host-{number}", "NCCL_SOCKET_IFNAME": "lo"},
        )
        for number in range(2)
    ]
    try:
        told = [json.loads(child.communicate(timeout=PATIENCE_S)[0].splitlines()[-1]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    if topology == "torchft":
        lighthouse.shutdown()
    assert told[0] == told[1]
    assert told[0].keys() == SETTINGS.keys()
    hashes: dict[str, list[str]] = told[0]
    return hashes


@pytest.mark.parametrize("topology", ["torchft", "allreduce"])
def test_replicas_on_a_gpu_hold_the_bits_of_those_on_a_cpu_by_gloo_and_by_nccl(topology: str) -> None:
    on_a_cpu = run(topology, "gloo", "cpu")
    assert all(len(set(hashes)) >= ROUNDS for hashes in on_a_cpu.values())
    assert run(topology, "gloo", "cuda") == on_a_cpu
    assert run(topology, "nccl", "cuda") == on_a_cpu
