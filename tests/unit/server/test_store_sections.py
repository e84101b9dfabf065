"""A contribution in sections does to the model what the same contribution in one piece does, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from outerstep.core.codecs import get_codec
from outerstep.core.codecs.recipe import WHOLE, Recipe
from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov
from outerstep.digest import tree_hash
from outerstep.errors import BadFrame, BadTensors, NotFinite
from outerstep.server.store import Addend, FragmentStore
from outerstep.tiling import ModelTiling, make_tiling
from outerstep.topology.encode import encode_frame
from outerstep.topology.update import anchor_tree
from outerstep.types import ParameterSpec, Participant
from outerstep.wire.frames import rows_of, section_layout
from support import make_frame

SHAPES = {"wide": (7, 5), "one": (1, 3), "bias": (4,), "scale": (), "none": (0, 2)}
EVERYBODY = (Participant(worker_id="a", sequence=1, weight=1.0),)


def values(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def make_store(codec: str) -> FragmentStore:
    specs = [ParameterSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()]
    return FragmentStore(0, specs, values(0), Recipe.parse(codec), WHOLE, 64)


def in_sections(deltas: Mapping[str, Tensor], sections: int, codec: str) -> memoryview:
    coder = get_codec(codec)
    whole = bytearray()
    for section in range(sections):
        up = section_layout(codec, [(n, s, coder.encoded_bytes) for n, s in SHAPES.items()], sections, section)
        ours = {}
        for name, shape in SHAPES.items():
            rows = rows_of(shape, sections, section)
            ours[name] = deltas[name].reshape(-1)[rows.first_value : rows.first_value + rows.numel]
        whole += encode_frame(ours, up, dict.fromkeys(SHAPES, coder))
    return memoryview(whole)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("sections", [2, 3, 8])
def test_sections_add_up_to_the_whole(codec: str, sections: int) -> None:
    whole, cut = make_store(codec), make_store(codec)
    for seed, weight in [(1, 1.0), (2, 0.25)]:
        deltas = values(seed)
        payload, pieces = make_frame(deltas, codec), in_sections(deltas, sections, codec)
        precision = 2**-7 if codec == "bf16" else 1e-6  # each norm has bf16's own
        assert cut.decoder(sections).check(pieces) == pytest.approx(whole.decoder(1).check(payload), rel=precision)
        whole.accumulate(1, [Addend(payload, weight)])
        cut.accumulate(1, [Addend(pieces, weight, sections=sections)])
    made = [store.publish(store.close(1, Nesterov(0.7, 0.9)), EVERYBODY).agreement for store in (whole, cut)]
    assert made[0].anchor_hash == made[1].anchor_hash


def test_pushes_in_sections_move_the_model_as_whole_ones_do() -> None:
    whole, cut = make_store("fp32"), make_store("fp32")
    in_one = [Addend(make_frame(values(seed)), 0.5, 0) for seed in (1, 2, 3)]
    in_three = [Addend(in_sections(values(seed), 3, "fp32"), 0.5, 0, 3) for seed in (1, 2, 3)]
    before = whole.newest.agreement.anchor_hash
    made = [
        store.publish(store.close(1, DelayedNesterov(2, 0.7, 0.9), pushes), EVERYBODY).agreement.anchor_hash
        for store, pushes in ((whole, in_one), (cut, in_three))
    ]
    assert made[0] == made[1] != before


def test_a_tiling_is_forgotten_with_its_worker() -> None:
    """It may be half a million boxes, and whoever joins again and again brings as many as it likes."""
    store, specs = make_store("fp32"), [ParameterSpec(name=n, shape=s, dtype="float32") for n, s in SHAPES.items()]
    tiling = make_tiling(SHAPES, [{name: ((0,) * len(shape), shape) for name, shape in SHAPES.items()}])
    fragment = ModelTiling(tiling, specs).fragment(tuple(SHAPES))
    assert store.max_payload_bytes(fragment, "fp32") == store.max_payload_bytes(fragment, "fp32") > 0
    kept = weakref.ref(fragment)
    del fragment
    gc.collect()
    assert kept() is None


def test_a_range_hash_is_over_the_rows_of_its_section() -> None:
    store = make_store("fp32")
    hashes = store.range_hashes(0, 3)
    assert hashes is not None
    for section, found in enumerate(hashes):
        rows = {name: rows_of(shape, 3, section) for name, shape in SHAPES.items()}
        theta = store.params()
        ours = [theta[n].reshape(-1)[r.first_value : r.first_value + r.numel] for n, r in rows.items()]
        assert found == anchor_tree(ours)
    assert store.range_hashes(0, 3) is hashes
    assert len(set(hashes)) == 3
    assert store.range_hashes(0, 1) == (store.newest.agreement.anchor_hash,)


def test_rows_that_nobody_has_still_have_a_hash() -> None:
    store = make_store("fp32")
    hashes = store.range_hashes(0, 9)
    assert hashes is not None
    assert hashes[8] == tree_hash([])


class TestRefused:
    def test_a_section_that_is_not_finite_by_name_and_place(self) -> None:
        deltas = values(1)
        deltas["wide"][6, 0] = float("nan")
        with pytest.raises(NotFinite, match=r"'wide' holds NaN or Inf in section 1 of 2"):
            make_store("fp32").decoder(2).check(in_sections(deltas, 2, "fp32"))

    def test_sections_in_another_order(self) -> None:
        payload = bytes(in_sections(values(1), 2, "fp32"))
        first = section_layout("fp32", [(n, s, lambda n: 4 * n) for n, s in SHAPES.items()], 2, 0).size_bytes
        with pytest.raises((BadTensors, BadFrame)):
            make_store("fp32").decoder(2).check(memoryview(bytearray(payload[first:] + payload[:first])))

    @pytest.mark.parametrize("size", [-8, 8])
    def test_a_payload_that_is_too_short_or_too_long(self, size: int) -> None:
        payload = bytes(in_sections(values(1), 2, "fp32"))
        other = payload[:size] if size < 0 else payload + bytes(size)
        with pytest.raises(BadFrame):
            make_store("fp32").decoder(2).check(memoryview(bytearray(other)))

    def test_another_number_of_sections_than_it_was_cut_for(self) -> None:
        with pytest.raises((BadTensors, BadFrame)):
            make_store("fp32").decoder(2).check(in_sections(values(1), 3, "fp32"))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_what_is_added_by_the_step_itself_gives_the_bits_of_what_was_added_before(codec: str) -> None:
    """All before, some before, none before (then there is no sum at all); whole and in sections."""
    weights, hashes = [0.5, 1.0, 3.0, 0.0, 0.7], []
    addends = [
        Addend(make_frame(values(seed), codec), weight)
        if seed % 2
        else Addend(in_sections(values(seed), 3, codec), weight, sections=3)
        for seed, weight in enumerate(weights)
    ]
    for before in range(len(addends) + 1):
        store, rule = make_store(codec), Nesterov(0.7, 0.9)
        for version in (1, 2):
            for addend in addends[:before]:
                store.accumulate(version, [addend])
            hashes.append(store.publish(store.close(version, rule, addends[before:]), EVERYBODY).agreement.anchor_hash)
            assert store._sums == {}
    together = make_store(codec)
    together.accumulate(1, addends)
    hashes.append(together.publish(together.close(1, Nesterov(0.7, 0.9)), EVERYBODY).agreement.anchor_hash)
    assert len(set(hashes)) == 2  # one per version
