"""The command line, as typed: real processes, their exit codes and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amounts import mostly_slow
from outerstep.model_folder import save_model
from outerstep.security import Credentials
from outerstep.server import DiLoCoServer
from outerstep.worker import DiLoCoWorker
from ports import free_port
from support import tiny_model

LOADS_A_MODEL = pytest.mark.slow  # and torch before it, which takes seconds


def outerstep(*arguments: str, timeout_s: float = 120.0, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "OUTERSTEP_"))}
    return subprocess.run(
        [sys.executable, "-m", "outerstep", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**clean, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", **environ},
    )


@pytest.mark.parametrize(
    "command",
    mostly_slow(
        [
            "",
            "server",
            "join",
            "worker",
            "peer",
            "status",
            "page",
            "export",
            "doctor",
            "control",
            "token",
            "config show",
            "demo",
        ],
        quick=["", "server"],
    ),
)
def test_help_teaches(command: str) -> None:
    done = outerstep(*command.split(), "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout
    assert len(done.stdout.splitlines()) > 8


def test_the_version_is_printed() -> None:
    assert outerstep("--version").stdout.startswith("outerstep 0.")


@pytest.mark.row("B21")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sevrer"], "server"),
        (["server", "-m", "x"], "--num-workers"),
        pytest.param(["server", "-m", "/nonexistent", "-n", "2"], "no model at /nonexistent", marks=LOADS_A_MODEL),
        pytest.param(["server", "-m", "{model}", "-n", "0"], "num_workers must be ≥ 1, got 0", marks=LOADS_A_MODEL),
        pytest.param(
            ["server", "-m", "{model}", "-n", "2", "--codec", "zip"],
            "unknown codec 'zip'; known: bf16, ",
            marks=LOADS_A_MODEL,
        ),
        pytest.param(
            ["server", "-m", "{model}", "-n", "2", "--min-workers", "3"],
            "min_workers (3) must not exceed num_workers (2)",
            marks=LOADS_A_MODEL,
        ),
        pytest.param(
            ["server", "-m", "{model}", "-n", "4", "--aggregation", "trimmed_mean", "--trim-fraction", "0.2"],
            "a trim_fraction of 0.2 trims nothing of 4",
            marks=LOADS_A_MODEL,
        ),
        pytest.param(
            ["server", "-m", "{model}", "-n", "4", "--async", "--aggregation", "median"],
            "async_mode has one in each",
            marks=LOADS_A_MODEL,
        ),
        pytest.param(["server", "-m", "{model}", "-n", "2", "--sync-evry", "3"], "--sync-every", marks=LOADS_A_MODEL),
        (["status", "--server", "127.0.0.1:9"], "no answer from 127.0.0.1:9"),
        (["status", "--server", "nonsense:port"], "host:port"),
        (["worker", "--server", "127.0.0.1:9"], "COMMAND"),
        (["worker", "--server", "127.0.0.1:9", "--", "no-such-program"], "command not found: 'no-such-program'"),
        (["worker", "--server", "http://127.0.0.1:9", "--", "python", "no.py"], "there is no 'no.py' in "),
        (["peer", "--", "python", "no.py"], "there is no 'no.py' in "),
        (["worker", "--", "true"], "--server"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(arguments: list[str], said: str, tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path / "model")
    done = outerstep(*[argument.format(model=tmp_path / "model") for argument in arguments])
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.row("B21")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sevrer"], "no such command 'sevrer'. Did you mean 'server'"),
        (["token", "rotat"], "Did you mean 'rotate'?"),
        (["server", "--sync-evry", "3"], "no such option: --sync-evry (Possible options: "),
        (["server", "--above"], "option '--above' requires an argument; outerstep server --help lists what it takes"),
        (["demo", "hierachy"], "invalid value for 'word': 'hierachy' is not one of"),
        (["worker", "--server", "127.0.0.1:9"], "missing argument 'COMMAND…'; outerstep worker --help"),
        (["control", "save", "--server", "127.0.0.1:9"], "it goes before save: outerstep control --server … save"),
        (["page", "127.0.0.1:9"], "an address goes behind --server: outerstep page --server 127.0.0.1:9"),
        (["status", "127.0.0.1:9"], "an address goes behind --server: outerstep status --server 127.0.0.1:9"),
        (
            ["status", "--server", "http://127.0.0.1:9"],
            "Connection refused; is it running there? `outerstep doctor 127.0.0.1:9`",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_of_the_finger_gets_one_line_that_says_what_to_type(arguments: list[str], said: str) -> None:
    done = outerstep(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_debug_shows_the_traceback() -> None:
    done = outerstep("--debug", "status", "--server", "127.0.0.1:9")
    assert "Traceback" in done.stderr
    assert done.returncode == 1


def test_a_worker_hands_its_settings_to_the_script_and_keeps_its_exit_code() -> None:
    script = (
        "import json, os, sys\n"
        "print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(('DILOCO_', 'CUDA_VISIBLE'))}))\n"
        "sys.exit(7)"
    )
    done = outerstep(
        "worker", "--server", "http://127.0.0.1:9", "--sync-every", "250", "--no-bf16", "--worker-id", "left",
        "--num-fragments", "4", "--heartbeat-interval", "5", "-d", "0", "--", sys.executable, "-c", script,
    )  # fmt: skip
    assert done.returncode == 7
    assert json.loads(done.stdout) == {
        "DILOCO_SERVER": "http://127.0.0.1:9",
        "DILOCO_SYNC_EVERY": "250",
        "DILOCO_BF16_COMM": "0",
        "DILOCO_WORKER_ID": "left",
        "DILOCO_NUM_FRAGMENTS": "4",
        "DILOCO_HEARTBEAT_INTERVAL": "5.0",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def test_what_a_worker_leaves_out_follows_the_plan() -> None:
    script = "import os; print([k for k in os.environ if k.startswith('DILOCO_')])"
    done = outerstep("worker", "--server", "http://127.0.0.1:9", "--", sys.executable, "-c", script)
    assert done.stdout.strip() == "['DILOCO_SERVER']"


def test_a_peer_hands_its_settings_to_the_script_and_the_join_string_not_in_argv() -> None:
    script = (
        "import json, os, sys\n"
        "print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(('DILOCO_', 'OUTERSTEP_'))}))\n"
        "sys.exit(len([word for word in sys.argv if 'outerstep:' in word]))"
    )
    place = f"outerstep://run-{'x' * 43}@10.0.0.1:8600#sha256={'0' * 64}"
    done = outerstep(
        "peer", "--join", place, "--min-peers", "3", "--aggregation", "median", "--worker-id", "left",
        "--", sys.executable, "-c", script,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = {
        "DILOCO_SERVER": "gossip",
        "DILOCO_WORKER_ID": "left",
        "OUTERSTEP_PEERS": place,
        "OUTERSTEP_MIN_PEERS": "3",
        "OUTERSTEP_AGGREGATION": "median",
        "OUTERSTEP_PEER_DIR": "outerstep-peer",
        "OUTERSTEP_ANNOUNCE": "1",
    }
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.slow
def test_status_tells_a_person_and_a_program() -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, sync_every=50) as server:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = DiLoCoWorker(model, optimizer, server.address, worker_id="left").start()
        for_people = outerstep("status", "--server", server.address)
        assert for_people.returncode == 0, for_people.stderr
        for word in ("left", "sync_every 50", "bf16", "round 0", "waiting for"):
            assert word in for_people.stdout
        for_programs = json.loads(outerstep("status", "--json", DILOCO_SERVER=server.address).stdout)
        assert for_programs["num_workers"] == 2
        assert list(for_programs["workers"]) == ["left"]
        worker.abandon("over")


@pytest.mark.slow
def test_a_server_says_what_to_type_on_the_next_machine(tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path / "model")
    port = str(free_port())
    child = subprocess.Popen(
        [sys.executable, "-m", "outerstep", "server", "-m", str(tmp_path / "model"), "-n", "2", "--port", port],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    try:
        assert child.stderr is not None
        said = ""
        for line in child.stderr:
            said += line
            if f"outerstep worker --server 127.0.0.1:{port} -- python train.py" in line:
                break
        else:
            pytest.fail("it never said so")
        said = " ".join(said.split())
        assert "the first round waits for 2 workers (-n)." in said
        assert "A round goes on with the workers that are alive, at least 1 (min_workers)." in said
    finally:
        child.terminate()
        assert child.wait(30) == 0


@pytest.mark.slow
def test_the_demo_compares_four_runs_and_leaves_a_model_that_loads(tmp_path: Path) -> None:
    done = outerstep("demo", "--steps", "6", "--sync-every", "2", "--folder", str(tmp_path), timeout_s=280.0)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())
    assert len(rows) == 4
    together = rows[2]
    assert together["label"] == "2 workers, outer model"
    assert together["rounds"] == 3
    assert 3 * 2 * 836_736 <= together["bytes_sent"] <= 3 * 2.05 * 836_736  # bf16, counted
    assert 0 < together["loss"] < 5.6  # log(256) = 5.55 before the first step
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "trained" / "model.safetensors").exists()
    assert "times as much" in done.stdout
    token = Credentials(tmp_path / "credentials").tokens.load().run
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert "certificate sha256" in logs  # it went over TLS
    assert token[4:] not in logs + done.stdout + done.stderr
