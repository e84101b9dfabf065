"""core/codecs/recipe.py: which codec for which tensor."""

from __future__ import annotations

import pytest

from outerstep.core.codecs import CODECS, SPARSE64, SparseCodec
from outerstep.core.codecs.recipe import CodecRule, Recipe
from outerstep.errors import ConfigError
from outerstep.types import ParameterSpec

MATRIX = ParameterSpec(name="w", shape=(4, 4), dtype="float32")
TABLE = ParameterSpec(name="e", shape=(9, 4), dtype="float32", embedding=True)
GAIN = ParameterSpec(name="g", shape=(4,), dtype="float32")
VARIANCE = ParameterSpec(name="v", shape=(4,), dtype="float32", role="average")


def test_one_codec_is_for_all_parameters_and_buffers_travel_in_fp32() -> None:
    recipe = Recipe.parse("int8")
    assert [recipe.codec(spec).name for spec in (MATRIX, TABLE, GAIN, VARIANCE)] == ["int8", "int8", "int8", "fp32"]


def test_kinds_have_codecs_of_their_own() -> None:
    recipe = Recipe.parse("int4,norms=fp32,embeddings=int8+feedback")
    assert [str(recipe.rule(spec)) for spec in (MATRIX, TABLE, GAIN)] == ["int4", "int8+feedback", "fp32"]
    assert recipe.has_feedback
    assert not recipe.is_exact


def test_two_recipes_that_do_the_same_have_the_same_name() -> None:
    assert Recipe.parse("sparse64+feedback").name == "sparse64"
    assert Recipe.parse("int4,norms=fp32,embeddings=int4").name == "int4,norms=fp32"
    assert Recipe.parse("bf16+stochastic+feedback").name == Recipe.parse("bf16+feedback+stochastic").name
    assert Recipe.parse(Recipe.parse("int4,norms=fp32,embeddings=e3m0").name).name == "int4,embeddings=e3m0,norms=fp32"


def test_a_sparse_codec_always_has_feedback_and_never_goes_down() -> None:
    recipe = Recipe.parse("sparse64,norms=int8+feedback")
    assert recipe.rule(MATRIX) == CodecRule(recipe.codec(MATRIX), feedback=True)
    assert recipe.downlink().name == "bf16,norms=int8"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int9", "unknown codec"),
        ("", "unknown codec"),
        ("int8+loud", "one of feedback, stochastic"),
        ("sparse64+stochastic", "write 'sparse64'"),
        ("int8,heads=fp32", "embeddings=CODEC and norms=CODEC"),
        ("int8,norms", "embeddings=CODEC and norms=CODEC"),
        ("int8,norms=fp32,norms=bf16", "each once"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Recipe.parse(text)


def test_stochastic_rounding_is_read_written_and_kept_on_the_way_down() -> None:
    recipe = Recipe.parse("int8+feedback+stochastic,norms=int4")
    assert recipe.usual == CodecRule(recipe.codec(MATRIX), feedback=True, stochastic=True)
    assert not recipe.rule(GAIN).stochastic
    assert recipe.name == "int8+feedback+stochastic,norms=int4"
    assert recipe.downlink().usual == CodecRule(recipe.codec(MATRIX), feedback=False, stochastic=True)
    assert recipe.downlink().name == "int8+stochastic,norms=int4"


@pytest.mark.parametrize(
    ("text", "coarse"),
    [("control-2bit", "control-2bit"), ("int4,norms=control-2bit", "control-2bit"), ("sparse64", ""), ("int8", "")],
)
def test_a_recipe_names_the_codec_in_it_that_is_too_coarse_to_train_with(text: str, coarse: str) -> None:
    assert Recipe.parse(text).coarse == coarse


def test_every_sparse_codec_that_keeps_less_than_sparse64_is_too_coarse() -> None:
    kept = {name: codec.k for name, codec in CODECS.items() if isinstance(codec, SparseCodec)}
    assert {name for name in kept if Recipe.parse(name).coarse} == {n for n, k in kept.items() if k < SPARSE64.k}
