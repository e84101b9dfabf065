"""States of the old layout: a dict that `torch.save` wrote. Read for its tensors; nothing in it is run."""

from __future__ import annotations

import io
import logging
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outerstep.core.outer import Nesterov, TorchOuter
from outerstep.errors import ModelError
from outerstep.server.saved import import_old, load_state, save_state
from support import assert_same
from unit.server.saved_states import assert_same_state

PARAMS = {"b.weight": (3, 2), "a.bias": (3,), "scale": ()}  # not in alphabetical order


def old_server(rounds: int = 2, **sgd: Any) -> tuple[dict[str, Any], torch.optim.SGD, dict[str, Tensor]]:
    """The documented dict, after some rounds of a real outer optimizer; and that optimizer."""
    generator = torch.Generator().manual_seed(1)
    params = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in PARAMS.items()}
    optimizer = torch.optim.SGD(params.values(), **{"lr": 0.7, "momentum": 0.9, "nesterov": True, **sgd})
    for _ in range(rounds):
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    saved = {
        "global_params": {name: param.detach().clone() for name, param in params.items()},
        "outer_optimizer": optimizer.state_dict(),
        "sync_round": rounds,
        "num_workers": 2,
        "param_names": list(params),
        "async_mode": False,
        "total_submissions": 2 * rounds,
    }
    return saved, optimizer, {name: param.data for name, param in params.items()}


def write(folder: Path, held: object, name: str = "diloco_server_state_latest.pt") -> Path:
    torch.save(held, folder / name)
    return folder / name


def gradients(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in PARAMS.items()}


class TestImported:
    def test_everything_of_the_documented_layout_is_there(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        saved, _, _ = old_server()
        with caplog.at_level(logging.INFO):
            state = load_state(write(tmp_path, saved))
        assert list(state.params) == list(PARAMS)
        assert_same(state.params, saved["global_params"])
        assert (state.manifest, state.plan, state.versions, state.round) == (None, None, (2,), 2)
        assert state.totals == {"total_submissions": 4}
        assert {n: list(entry) for n, entry in state.optimizer.by_name.items()} == {
            n: ["momentum_buffer"] for n in PARAMS
        }
        [group] = state.optimizer.facts["param_groups"]
        assert (group["lr"], group["momentum"], group["nesterov"]) == (0.7, 0.9, True)
        assert "num_workers=2, async_mode=False" in caplog.text

    def test_the_next_round_is_the_one_that_the_old_server_would_have_made(self, tmp_path: Path) -> None:
        saved, optimizer, live = old_server()
        state = import_old(write(tmp_path, saved))
        for group in optimizer.param_groups:
            for param, grad in zip(group["params"], gradients(7).values(), strict=True):
                param.grad = grad
        optimizer.step()
        for outer in (Nesterov(0.7, 0.9), TorchOuter(lambda p: torch.optim.SGD(p, 0.7, 0.9, nesterov=True), PARAMS)):
            params = {name: tensor.clone() for name, tensor in state.params.items()}
            outer.load_state_dict(state.optimizer.by_name)
            outer.step(params, gradients(7))
            assert_same(params, live)

    def test_an_imported_state_is_saved_and_loaded_as_ours(self, tmp_path: Path) -> None:
        state = import_old(write(tmp_path, old_server()[0]))
        place = save_state(state, tmp_path / "saves")
        assert place.name == "state-round-00000002"
        assert_same_state(load_state(place), state)

    def test_momentum_follows_the_names_and_not_the_order_of_the_tensors(self, tmp_path: Path) -> None:
        saved, _, _ = old_server()
        momentum = import_old(write(tmp_path, saved)).optimizer.by_name
        saved["global_params"] = dict(sorted(saved["global_params"].items()))
        again = import_old(write(tmp_path, saved)).optimizer.by_name
        assert all(torch.equal(again[name]["momentum_buffer"], momentum[name]["momentum_buffer"]) for name in PARAMS)

    def test_several_parameter_groups_count_on(self, tmp_path: Path) -> None:
        params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        optimizer = torch.optim.SGD([{"params": params[1:], "lr": 0.1}, {"params": params[:1]}], lr=1.0, momentum=0.9)
        for i, param in enumerate(params):
            param.grad = torch.full((2,), float(i))
        optimizer.step()
        names = ["one", "two", "zero"]  # the optimizer's order
        saved = {"global_params": dict.fromkeys(names, torch.zeros(2)), "outer_optimizer": optimizer.state_dict()}
        by_name = import_old(write(tmp_path, {**saved, "param_names": names})).optimizer.by_name
        assert {name: float(by_name[name]["momentum_buffer"][0]) for name in names} == {
            "zero": 0.0,
            "one": 1.0,
            "two": 2.0,
        }

    @pytest.mark.parametrize("changes", [{"momentum": 0.0, "nesterov": False}, {"rounds": 0}])
    def test_an_optimizer_without_momentum_yet_has_no_state(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        state = import_old(write(tmp_path, old_server(**changes)[0]))
        assert state.optimizer.by_name == {}
        Nesterov().load_state_dict(state.optimizer.by_name)

    def test_adam_keeps_its_step_and_both_moments(self, tmp_path: Path) -> None:
        param = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([param])
        param.grad = torch.ones(2)
        optimizer.step()
        file = write(tmp_path, {"global_params": {"p": param.detach()}, "outer_optimizer": optimizer.state_dict()})
        assert import_old(file).optimizer.by_name["p"].keys() == {"step", "exp_avg", "exp_avg_sq"}

    def test_optional_keys_may_be_missing(self, tmp_path: Path) -> None:
        state = import_old(write(tmp_path, {"global_params": {"w": torch.ones(2)}}))
        assert (state.versions, state.optimizer.by_name) == ((0,), {})

    def test_low_precision_becomes_fp32_and_counters_stay_what_they_are(self, tmp_path: Path) -> None:
        half, count = torch.randn(3).to(torch.bfloat16), torch.tensor(5)
        held = OrderedDict({"w": nn.Parameter(half), "count": count})
        state = import_old(write(tmp_path, {"global_params": held}))
        assert_same(state.params, {"w": half.float()})
        assert_same(state.rest, {"count": count})

    def test_the_documented_link_to_the_newest_file_is_followed(self, tmp_path: Path) -> None:
        write(tmp_path, old_server()[0], "diloco_server_state_round2.pt")
        (tmp_path / "diloco_server_state_latest.pt").symlink_to("diloco_server_state_round2.pt")
        assert load_state(tmp_path / "diloco_server_state_latest.pt").round == 2


class Trap:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


class TestRefused:
    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("where", ["top", "inside"])
    def test_code_is_not_run_and_its_name_is_shown(self, tmp_path: Path, legacy: bool, where: str) -> None:
        trap = Trap(tmp_path / "sprung")
        held: object = trap if where == "top" else {**old_server()[0], "num_workers": trap}
        file = tmp_path / "old.pt"
        torch.save(held, file, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(
            ModelError, match=r"was not imported: .* objects other than tensors and plain values"
        ) as refusal:
            load_state(file)
        assert "weights_only" not in str(refusal.value), "no advice to switch the safety off"
        assert legacy or "pathlib.Path.touch" in str(refusal.value) or "getattr" in str(refusal.value)
        assert not (tmp_path / "sprung").exists()

    def test_a_bare_pickle_is_not_run(self, tmp_path: Path) -> None:
        (tmp_path / "old.pt").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        with pytest.raises(ModelError, match=r"old\.pt"):
            load_state(tmp_path / "old.pt")
        assert not (tmp_path / "sprung").exists()

    def test_the_trap_works_where_it_is_not_guarded(self, tmp_path: Path) -> None:
        pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))  # noqa: S301 - our own
        assert (tmp_path / "sprung").exists()

    def test_an_archive_that_grows_when_unpacked_is_refused_before_it_does(self, tmp_path: Path) -> None:
        file = write(tmp_path, {"global_params": {"w": torch.zeros(1 << 18)}})
        bomb = tmp_path / "bomb.pt"
        with zipfile.ZipFile(file) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
            for entry in source.infolist():
                target.writestr(entry.filename, source.read(entry))
        assert bomb.stat().st_size < 20_000
        with pytest.raises(ModelError, match=r"claims \d{7} when unpacked"):
            load_state(bomb)

    def test_a_tensor_that_is_larger_than_its_file_is_refused(self, tmp_path: Path) -> None:
        huge = torch.zeros(1).expand(1 << 40)
        with pytest.raises(ModelError, match=r"global_params\['w'\] must be a dense tensor"):
            load_state(write(tmp_path, {"global_params": {"w": huge}}))

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"global_params": None}, "global_params must map names to tensors"),
            ({"global_params": {"w": [1.0]}}, r"global_params\['w'\] must be a dense tensor, got a list"),
            ({"global_params": {"w": torch.ones(2).to_sparse()}}, "must be a dense tensor"),
            ({"global_params": {3: torch.ones(2)}}, r"global_params\[3\]"),
            ({"sync_round": -1}, "sync_round must be a whole number ≥ 0, got -1"),
            ({"sync_round": "two"}, "got 'two'"),
            ({"total_submissions": True}, "total_submissions must be"),
            ({"param_names": ["scale"]}, "outer_optimizer has 3 parameters, param_names 1"),
            ({"param_names": "abc"}, "param_names must be a list"),
            ({"param_names": ["x", "y", "z"]}, "where no parameter is"),
            ({"param_names": ["a.bias", "b.weight", "scale"]}, r"'momentum_buffer' of 'a.bias' is \[3, 2\]"),
            ({"outer_optimizer": [1]}, "must be the state_dict of a torch optimizer"),
            ({"outer_optimizer": {"state": {}}}, "must be the state_dict of a torch optimizer"),
        ],
    )
    def test_what_does_not_fit_is_refused_by_name(self, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
        file = write(tmp_path, {**old_server()[0], **change})
        with pytest.raises(ModelError, match=reason) as refusal:
            load_state(file)
        assert str(file) in str(refusal.value)

    @pytest.mark.parametrize(
        "held", [torch.ones(2), {"model": {}}, [1, 2], None], ids=["tensor", "dict", "list", "none"]
    )
    def test_another_file_of_torch_save_is_refused_saying_what_is_expected(self, tmp_path: Path, held: object) -> None:
        with pytest.raises(ModelError, match="must be a dict with global_params"):
            load_state(write(tmp_path, held))

    @pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04", b"\x80\x04.", b"{}" * 100], ids=repr)
    def test_a_file_that_is_something_else_is_refused(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "old.pt").write_bytes(data)
        with pytest.raises(ModelError, match=r"old\.pt"):
            load_state(tmp_path / "old.pt")

    def test_a_file_with_any_bytes_changed_is_read_or_refused_and_nothing_else(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        torch.save(old_server()[0], buffer)
        sound, rng, refused = buffer.getvalue(), random.Random(5), 0
        for _ in range(200):
            data = bytearray(sound)
            for _ in range(rng.choice([1, 1, 4, 40])):
                data[rng.randrange(len(data))] = rng.randrange(256)
            (tmp_path / "old.pt").write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
            try:
                load_state(tmp_path / "old.pt")
            except ModelError:
                refused += 1
        assert refused > 50
