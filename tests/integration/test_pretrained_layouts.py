"""Model folders as transformers writes them: a server and a worker start from each as `from_pretrained` would. (With 11
layers: sorted by name, the tenth comes before the second.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from integration.old_clients import PLAIN, OldClient
from outerstep.compat import CompatServer
from outerstep.errors import ConfigError, ManifestMismatch
from outerstep.model_folder import load_state_dict
from outerstep.server import DiLoCoServer
from support import assert_same, memory_worker

transformers = pytest.importorskip("transformers")

WORDS = torch.arange(12).view(2, 6)


def config(**changes: Any) -> Any:
    small = {"n_layer": 11, "n_head": 2, "n_embd": 8, "vocab_size": 32, "n_positions": 16, **changes}
    return transformers.GPT2Config(**small)


def tied(folder: Path) -> None:
    transformers.GPT2LMHeadModel(config()).save_pretrained(folder)


def untied(folder: Path) -> None:
    transformers.GPT2LMHeadModel(config(tie_word_embeddings=False)).save_pretrained(folder)


def base_model(folder: Path) -> None:
    """Without the head, and so without the prefix that the names have in a model with one."""
    transformers.GPT2Model(config()).save_pretrained(folder)


def sharded(folder: Path) -> None:
    transformers.GPT2LMHeadModel(config()).save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def sharded_base(folder: Path) -> None:
    transformers.GPT2Model(config()).save_pretrained(folder, max_shard_size="8KB")


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(WORDS).logits


@pytest.mark.parametrize(
    "write", [tied, base_model, sharded, *(pytest.param(one, marks=pytest.mark.slow) for one in (untied, sharded_base))]
)
def test_server_and_worker_start_from_a_folder_as_from_pretrained_does(tmp_path: Path, write: Any) -> None:
    torch.manual_seed(0)
    folder, saves = tmp_path / "model", tmp_path / "saves"
    write(folder)
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected = logits(load(folder))
    settings: dict[str, Any] = {
        "save_dir": str(saves),
        "model_files": str(folder),
        "port": 0,
        "insecure": True,
        **PLAIN,
    }
    server = DiLoCoServer(load_state_dict(folder), num_workers=1, **settings).start()
    other = transformers.GPT2LMHeadModel(load(folder).config)  # other weights: the server's take their place
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with memory_worker(server, "w", other, optimizer, sync_every=1) as worker:
        assert torch.equal(logits(other), expected)
        other.train()(WORDS, labels=WORDS).loss.backward()
        optimizer.step()
        trained = {name: p.detach().clone() for name, p in other.named_parameters()}
        assert worker.sync_metrics["sync_count"] == 1
    assert not torch.equal(logits(other), expected)
    place = server.save_state()
    assert_same({name: server.get_global_params()[name] for name in trained}, trained)
    server.stop()
    assert torch.equal(logits(load(place)), logits(other))
    # The same command again goes on with the run, whatever the folder's names are.
    again = DiLoCoServer(load_state_dict(folder), num_workers=1, **settings)
    assert again.is_resumed
    assert_same({name: again.get_global_params()[name] for name in trained}, trained)
    again.stop()


def test_a_model_with_a_head_serves_workers_that_train_its_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tied(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    expected = base.state_dict()
    server = DiLoCoServer(load_state_dict(tmp_path), num_workers=1, port=0, **PLAIN)
    with memory_worker(server, "w", transformers.GPT2Model(config()), torch.optim.SGD(base.parameters()), sync_every=1):
        assert_same({name: server.get_global_params()[name] for name in expected}, expected)
    server.stop()


def test_a_head_that_the_folder_does_not_have_is_named(tmp_path: Path) -> None:
    """`from_pretrained` would draw it, in each worker another one."""
    base_model(tmp_path)
    server = DiLoCoServer(load_state_dict(tmp_path), num_workers=1, port=0, **PLAIN)
    model = transformers.GPT2LMHeadModel(config(tie_word_embeddings=False))
    with pytest.raises(ManifestMismatch, match="saved with its head"):
        memory_worker(server, "w", model, torch.optim.SGD(model.parameters())).start()
    server.stop()


@pytest.mark.parametrize("write", [tied, base_model])
def test_an_old_client_trains_a_folder_of_transformers(tmp_path: Path, write: Any) -> None:
    """It has loaded the folder itself. What it sends has its names; those of the folder may lack a prefix."""
    torch.manual_seed(0)
    write(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    server = DiLoCoServer(load_state_dict(tmp_path), num_workers=1, port=0, insecure=True, **PLAIN).start()
    with CompatServer(server, 0) as compat:
        client = OldClient(compat.address, "old")
        client.register()
        got = client.submit({name: torch.full_like(p, 0.5) for name, p in params.items()})
        assert_same({name: got[name] for name in params}, {name: p - 0.5 for name, p in params.items()})
        assert_same({name: client.register()[name] for name in params}, {name: got[name] for name in params})
        client.post_json("/deregister", worker_id="old")
        with memory_worker(server, "w", model, torch.optim.SGD(model.parameters()), sync_every=1):
            assert_same({name: p.detach() for name, p in model.named_parameters()}, {n: got[n] for n in params})
    server.stop()


def old_state(folder: Path, model: Any) -> Path:
    """As a server of the older protocol saved it: of a tied tensor each name by itself, and only one was trained."""
    state = {name: tensor.detach().clone().float() for name, tensor in model.state_dict().items()}
    trained = [name for name, _ in model.named_parameters()]
    for name in trained:
        state[name] += 0.25
    names = list(state)
    momentum = {names.index(name): {"momentum_buffer": torch.full_like(state[name], 0.125)} for name in trained}
    group = {"lr": 0.7, "momentum": 0.9, "nesterov": True, "params": list(range(len(names)))}
    saved = {
        "global_params": state,
        "outer_optimizer": {"state": momentum, "param_groups": [group]},
        "sync_round": 7,
        "num_workers": 2,
        "param_names": names,
        "async_mode": False,
        "total_submissions": 14,
    }
    file = folder / "diloco_server_state_latest.pt"
    torch.save(saved, file)
    return file


@pytest.mark.parametrize("first", ["a worker", "an old client"])
def test_an_old_state_of_a_tied_model_is_imported_beside_its_folder(tmp_path: Path, first: str) -> None:
    torch.manual_seed(0)
    tied(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    resume = str(old_state(tmp_path, model))
    folder = load_state_dict(tmp_path / "model")
    settings: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "codec": "fp32"}
    server = DiLoCoServer(folder, num_workers=1, port=0, resume=resume, insecure=True, **settings).start()
    imported = {name: value + 0.25 for name, value in start.items()}
    # One round of nothing: only the momentum moves. SGD: buf ← 0.9·buf, θ ← θ − 0.7·0.9·buf
    after = {name: value - 0.7 * (0.9 * (0.9 * 0.125)) for name, value in imported.items()}
    with CompatServer(server, 0) as compat:
        if first == "an old client":
            client = OldClient(compat.address, "old")
            client.register()
            got = client.submit({name: torch.zeros_like(p) for name, p in start.items()})
            torch.testing.assert_close({name: got[name] for name in start}, after)
            client.post_json("/deregister", worker_id="old")
            imported = {name: got[name] for name in start}
        with memory_worker(server, "w", model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=50):
            assert_same({name: p.detach() for name, p in model.named_parameters()}, imported)
            params = server.get_global_params()
            assert torch.equal(params["lm_head.weight"], params["transformer.wte.weight"])
            assert server.sync_round == (7 if first == "a worker" else 8)
    server.stop()


def test_an_old_state_of_another_model_is_refused(tmp_path: Path) -> None:
    tied(tmp_path / "model")
    other = transformers.GPT2LMHeadModel(config(n_embd=16))
    file = old_state(tmp_path, other)
    with pytest.raises(ConfigError, match="of another model"):
        DiLoCoServer(load_state_dict(tmp_path / "model"), num_workers=1, port=0, resume=str(file))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["n_embd"] == 8
