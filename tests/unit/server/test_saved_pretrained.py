"""A saved state is a folder that `transformers` loads a model from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.core.manifest import describe
from outerstep.server.saved import ServerState, load_state, save_state
from support import assert_same
from unit.server.saved_states import plan_of

transformers = pytest.importorskip("transformers")


def gpt2() -> Any:
    """With a head that is tied to the embedding."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    )


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_from_pretrained_loads_what_was_saved(tmp_path: Path, build: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = build().to(dtype)
    model.save_pretrained(tmp_path / "model")
    params, manifest = describe(model)
    trained = {name: p.detach().float() + 0.001 for name, p in params.items()}
    rest = {n: t for n, t in model.state_dict().items() if n not in trained and n not in manifest.aliases}
    state = ServerState(
        run_id="r",
        params=trained,
        rest=rest,
        manifest=manifest,
        plan=plan_of(tuple(trained)),
        versions=(5,),
    )
    place = save_state(state, tmp_path / "saves", model_files=tmp_path / "model")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(place, output_loading_info=True, dtype="auto")
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert type(again) is type(model)
    assert again.dtype == dtype
    assert_same({n: p.detach() for n, p in describe(again)[0].items()}, {n: t.to(dtype) for n, t in trained.items()})
    assert_same(load_state(place).params, trained)
    tokens = torch.arange(6).view(1, 6)
    again(tokens)  # and it runs
