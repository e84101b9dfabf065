"""From a model folder to a run and back: what `from_pretrained` loads after training is what the run agreed on."""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from outerstep import load_model
from outerstep.cli import app
from outerstep.errors import ConfigError, ModelError
from outerstep.events import Event, RunEnded
from outerstep.model_folder import load_state_dict, save_model
from outerstep.server import DiLoCoServer
from outerstep.topology.server.reading import read_files
from outerstep.wire.http_transport import HttpTransport
from outerstep.worker import DiLoCoTrainer, DiLoCoWorker
from ports import free_port
from support import assert_same, in_threads, kill, memory_worker, params_of, tiny_model, train_steps, wait_until

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(8).view(1, 8)


def gpt2(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **changes
    )
    return transformers.GPT2LMHeadModel(config).eval()


def load(folder: Path) -> Any:
    """In the dtype that its configuration names."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def logits(model: Any) -> Tensor:
    """In fp32: not every processor has instructions for less."""
    with torch.no_grad():
        return copy.deepcopy(model).float()(TOKENS).logits  # type: ignore[no-any-return]


def learn(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        wide = copy.deepcopy(model).float()
        wide(TOKENS, labels=TOKENS).loss.backward()
        for parameter, of in zip(model.parameters(), wide.parameters(), strict=True):
            parameter.grad = of.grad.to(parameter.dtype)
        optimizer.step()


def export(*arguments: str) -> str:
    """The command, in this process; what it printed."""
    done = CliRunner().invoke(app, ["export", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[DiLoCoServer]:
    """As `outerstep server -m FOLDER` does."""
    facts = {"num_workers": 1, "port": 0, "insecure": True, "sync_every": 2, "model_files": str(folder), **settings}
    with DiLoCoServer(load_state_dict(folder), **facts) as server:
        yield server


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "tied": lambda folder: gpt2().save_pretrained(folder),
    "untied": lambda folder: gpt2(tie_word_embeddings=False).save_pretrained(folder),
    "sharded": lambda folder: gpt2().save_pretrained(folder, max_shard_size="20KB"),
    "unprefixed": lambda folder: gpt2().transformer.save_pretrained(folder),
    "unprefixed and sharded": lambda folder: gpt2().transformer.save_pretrained(folder, max_shard_size="20KB"),
    "bf16": lambda folder: gpt2().to(torch.bfloat16).save_pretrained(folder),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_out_has_the_logits_that_the_worker_ended_with(layout: str, tmp_path: Path) -> None:
    LAYOUTS[layout](tmp_path / "model")
    ended: list[RunEnded] = []

    def notice(event: Event) -> None:
        if isinstance(event, RunEnded):
            ended.append(event)

    with serving(tmp_path / "model", save_dir=str(tmp_path / "run"), event_sink=notice) as server:
        model = load(tmp_path / "model")
        before = logits(model)
        with DiLoCoWorker(model, torch.optim.SGD(model.parameters(), lr=0.5), f"http://{server.address}") as worker:
            learn(model, worker.optimizer, 4)
        trained = logits(model)
        assert not torch.equal(trained, before)
        said = export(str(tmp_path / "served"), "--server", f"http://{server.address}")
        assert f"round {server.sync_round} of run {server.run_id}" in said
        assert "from_pretrained" in said
        wait_until(lambda: ended)
        assert ended[0].model == str(tmp_path / "run/latest")
        export(str(tmp_path / "from-folder"), "--from", str(tmp_path / "run"))
    for place in ("served", "from-folder", "run/latest"):
        assert torch.equal(logits(load(tmp_path / place)), trained), place
        beside = {file.name for file in (tmp_path / "model").glob("*.json")} - {"model.safetensors.index.json"}
        assert beside <= {file.name for file in (tmp_path / place).iterdir()}, place


TRAIN = """
import sys, torch, transformers, outerstep
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = torch.arange(8).view(1, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with outerstep.attach(model, optimizer) as worker:
    for _ in range(4):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_when_the_last_worker_leaves_latest_is_the_trained_model_and_the_server_says_so(tmp_path: Path) -> None:
    """As typed: a server, a worker, an export, each a process of its own."""
    gpt2().save_pretrained(tmp_path / "model")
    (tmp_path / "train.py").write_text(TRAIN)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "OUTERSTEP_"))}
    environ = {**clean, "OMP_NUM_THREADS": "1"}
    outerstep, address = [sys.executable, "-m", "outerstep"], f"127.0.0.1:{free_port()}"
    log = tmp_path / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [*outerstep, "server", "-m", "model", "-n", "1", "--port", address.rpartition(":")[2], "--sync-every", "2"],
            cwd=tmp_path,
            env=environ,
            stderr=out,
        )
    try:
        wait_until(lambda: "On each worker" in log.read_text())
        script = [sys.executable, "train.py", "model", "ended-with"]
        subprocess.run(
            [*outerstep, "worker", "--server", address, "--", *script], cwd=tmp_path, env=environ, check=True
        )
        wait_until(lambda: "finished after round 2" in log.read_text())
        said = log.read_text().partition("finished after round 2")[2].splitlines()[0]
        assert "the model is in outerstep-run/latest: from_pretrained('outerstep-run/latest') loads it" in said
        assert server.poll() is None, "it waits for more workers"
        trained = logits(load(tmp_path / "ended-with"))
        assert torch.equal(logits(load(tmp_path / "outerstep-run/latest")), trained)
        subprocess.run([*outerstep, "export", "mine", "--server", address], cwd=tmp_path, env=environ, check=True)
        assert torch.equal(logits(load(tmp_path / "mine")), trained)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_a_run_that_is_resumed_without_its_model_folder_still_ends_with_a_whole_model(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "model")
    facts: dict[str, Any] = {"num_workers": 1, "port": 0, "sync_every": 2, "save_dir": str(tmp_path / "run")}
    facts |= {"keep_saves": 1, "insecure": True}
    model = load(tmp_path / "model")
    for start in range(3):
        state = load_state_dict(tmp_path / "model") if start == 0 else None
        files = str(tmp_path / "model") if start == 0 else None
        with DiLoCoServer(state, model_files=files, **facts) as server:
            with memory_worker(server, "w", model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1)):
                learn(model, optimizer, 2)
            assert set(read_files(HttpTransport(f"http://{server.address}"))) == {
                "config.json",
                "generation_config.json",
            }
    assert torch.equal(logits(load(tmp_path / "run/latest")), logits(model))


@pytest.mark.parametrize(
    ("saves", "reason", "said"),
    [
        (
            True,
            "done",
            "finished after round 2; the model is in {run}/latest: outerstep.load_model(model, '{run}/latest')",
        ),
        (True, "ValueError: x", "all workers have left (the last one: ValueError: x) after round 1; the model is in"),
        (False, "done", "finished after round 2; the model is in this server's memory alone: `outerstep export"),
    ],
)
def test_the_server_says_what_became_of_the_run(
    saves: bool, reason: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outerstep")
    model, place = tiny_model(), {"save_dir": str(tmp_path / "run")} if saves else {}
    server = DiLoCoServer(model.state_dict(), 1, port=0, sync_every=2, **place)
    server.service.start()
    worker = memory_worker(server, "w", model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1)).start()
    train_steps(model, optimizer, 3, seed=1)
    worker.stop() if reason == "done" else worker.abandon(reason)
    wait_until(lambda: said.format(run=tmp_path / "run") in caplog.text)
    assert "The server waits for more workers" in caplog.text
    server.service.stop()


class TestFromAFolder:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"deterministic": True, "down_codec": "int4"},
            {"async_mode": True, "dn_buffer_size": 3},
            {"num_fragments": 2, "outer_lr": 0.3, "outer_momentum": 0.5},
        ],
        ids=["mean", "deterministic, int4", "asynchronous", "two fragments, own rule"],
    )
    def test_rounds_that_are_in_the_journal_alone_are_in_the_model(
        self, settings: dict[str, Any], tmp_path: Path
    ) -> None:
        """While the server is running, and has the folder's lock; and after it was killed."""
        facts = {"num_workers": 1, "port": 0, "sync_every": 2, "save_dir": str(tmp_path / "run"), **settings}
        model = tiny_model()
        server = DiLoCoServer(model.state_dict(), **facts)
        server.service.start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = memory_worker(server, "w", model, optimizer).start()
        train_steps(model, optimizer, 8, seed=1)
        export(str(tmp_path / "while"), "--from", str(tmp_path / "run"))
        expected = server.get_global_params()
        assert server.sync_round > load_round(tmp_path / "run/latest"), "the newest rounds are in the journal"
        kill(server)
        worker.abandon("the server was killed")
        export(str(tmp_path / "after"), "--from", str(tmp_path / "run"))
        for place in ("while", "after"):
            assert_same(load_state_dict(tmp_path / place), expected)

    def test_what_is_no_run_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="holds no run"):
            export(str(tmp_path / "out"), "--from", str(tmp_path))
        assert not (tmp_path / "out").exists()
        assert list(tmp_path.iterdir()) == []

    def test_an_optimizer_that_only_the_script_knows_is_said(self, tmp_path: Path) -> None:
        facts = {"num_workers": 1, "port": 0, "sync_every": 2, "save_dir": str(tmp_path / "run")}
        model = tiny_model()
        server = DiLoCoServer(
            model.state_dict(), outer_optimizer_factory=lambda params: torch.optim.Adam(params, lr=0.01), **facts
        )
        server.service.start()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with memory_worker(server, "w", model, optimizer):
            train_steps(model, optimizer, 8, seed=1)
            with pytest.raises(ModelError, match=r"cannot be replayed here.*control save"):
                export(str(tmp_path / "out"), "--from", str(tmp_path / "run"))
            server.save_state()
            export(str(tmp_path / "out"), "--from", str(tmp_path / "run"))
            assert_same(load_state_dict(tmp_path / "out"), server.get_global_params())
            kill(server)


def load_round(state: Path) -> int:
    return min(json.loads((state / "state.json").read_bytes())["state"]["versions"])


class TestTheFolderThatIsWritten:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[str]:
        save_model(tiny_model(), tmp_path / "model")
        with serving(tmp_path / "model") as server:
            yield f"http://{server.address}"

    def test_a_model_is_replaced_only_by_force_and_other_things_never(self, run: str, tmp_path: Path) -> None:
        target = tmp_path / "out"
        assert "outerstep.load_model" in export(str(target), "--server", run)
        with pytest.raises(ConfigError, match=r"is there already.*--force"):
            export(str(target), "--server", run)
        (target / "model.safetensors").write_bytes(b"old")
        export(str(target), "--server", run, "--force")
        model = tiny_model(seed=1)
        load_model(model, target)
        assert_same(params_of(model), params_of(tiny_model()))
        (target / "thesis").mkdir()
        with pytest.raises(ConfigError, match="not a model folder"):
            export(str(target), "--server", run, "--force")
        assert {entry.name for entry in tmp_path.iterdir()} == {"model", "out"}, "nothing half written is left"

    def test_in_another_dtype(self, tmp_path: Path) -> None:
        gpt2(dtype="float32").save_pretrained(tmp_path / "model")
        with serving(tmp_path / "model", save_dir=str(tmp_path / "run")) as server:
            source = ("--server", f"http://{server.address}")
            export(str(tmp_path / "half"), *source, "--dtype", "bf16")
        assert {t.dtype for t in load_state_dict(tmp_path / "half").values()} == {torch.bfloat16}
        assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
        assert (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
        )

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--server", "a:1", "--from", "b"], "one source at a time"),
            (["--dtype", "int3"], "--dtype must be"),
            (["--model-files", "/nonexistent"], "must be a folder"),
        ],
    )
    def test_a_mistake_is_said_before_anything_is_written(
        self, arguments: list[str], said: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=said):
            export(str(tmp_path / "out"), *arguments)
        assert list(tmp_path.iterdir()) == []

    def test_what_cannot_be_written_is_one_line(self, run: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelError, match="was not written"):
            export(str(tmp_path / "file/out"), "--server", run)

    def test_configuration_from_elsewhere(self, run: str, tmp_path: Path) -> None:
        (tmp_path / "files").mkdir()
        (tmp_path / "files/config.json").write_text("{}")
        export(str(tmp_path / "out"), "--server", run, "--model-files", str(tmp_path / "files"))
        assert (tmp_path / "out/config.json").read_text() == "{}"


def test_each_peer_of_a_run_without_a_server_writes_the_agreed_model_and_says_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outerstep")
    founded, where = threading.Event(), list[str]()

    def peer(name: str) -> tuple[RunEnded, Any]:
        at: dict[str, Any] = {"peer_dir": str(tmp_path / name), "insecure": True, "listen": "127.0.0.1:0"}
        if name == "a":
            at |= {"sync_every": 2, "min_peers": 2, "codec": "fp32"}
        else:
            assert founded.wait(60)
            at["peers"] = where[0]
        model, seen = gpt2(), list[Event]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        worker = DiLoCoWorker(model, optimizer, "gossip", worker_id=name, event_sink=seen.append, **at)
        if name == "a":
            where.append(worker._topology._node.join_string)  # type: ignore[attr-defined]
            founded.set()
        with worker:
            learn(model, optimizer, 4)
        return next(event for event in seen if isinstance(event, RunEnded)), model

    for ended, model in in_threads(lambda: peer("a"), lambda: peer("b")):
        assert ended.round == 2
        assert torch.equal(logits(load(Path(ended.model))), logits(model))
        assert f"finished after round 2; the agreed model is in {ended.model}: from_pretrained loads it" in caplog.text


def test_a_trainer_among_peers_says_where_the_model_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="outerstep")
    model = tiny_model()
    with DiLoCoTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), inner_steps=2):
        pass
    assert "finished after 0 agreements with the peers; the model in this process holds the agreed" in caplog.text
