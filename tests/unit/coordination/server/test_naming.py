"""What a run trains, as long as nobody has brought a manifest."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from outerstep.coordination.server.naming import Naming, fitting, same_fragments, stated
from outerstep.coordination.server.plan import settle, settle_again
from outerstep.errors import ManifestMismatch, PlanMismatch
from outerstep.types import Manifest, ParameterSpec, Wishes


def spec(name: str, *shape: int, **facts: object) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype="float32", **facts)  # type: ignore[arg-type]


KNOWN = Manifest(
    parameters=(spec("a", 2), spec("head", 4, 3), spec("mean", 3), spec("z", 5)), aliases={"table": "head"}
)


def names_of(manifest: Manifest | None) -> list[str]:
    assert manifest is not None
    return [one.name for one in manifest.parameters]


def test_a_submission_says_what_is_trained_in_its_own_order_and_words() -> None:
    said = stated(KNOWN, {"table": (4, 3), "z": (5,), "a": (2,)}, {"count"})
    assert names_of(said) == ["table", "z", "a"]
    assert said is not None
    assert said.aliases == {"head": "table"}
    both = stated(KNOWN, {"head": (4, 3), "table": (4, 3)}, set())
    assert names_of(both) == ["head"]
    assert both is not None
    assert both.aliases == {"table": "head"}


def test_counters_are_passed_over_and_strangers_settle_nothing() -> None:
    assert names_of(stated(KNOWN, {"count": (), "a": (2,)}, {"count"})) == ["a"]
    assert stated(KNOWN, {"a": (2,), "stranger": (1,)}, {"count"}) is None
    assert stated(KNOWN, {"a": (3,)}, set()) is None
    assert stated(KNOWN, {"count": ()}, {"count"}) is None


def test_what_was_named_keeps_its_form_and_the_manifest_says_the_rest() -> None:
    brought = Manifest(
        parameters=(spec("z", 5), spec("a", 2, embedding=True), spec("mean", 3, role="average")), buffers=("count",)
    )
    brought = replace(brought, parameters=tuple(replace(one, dtype="bfloat16") for one in brought.parameters))
    made = fitting(KNOWN, ["a"], brought, whole=False)
    assert names_of(made) == ["z", "a", "mean"]
    assert made.parameters[1] == replace(spec("a", 2), dtype="bfloat16")
    assert made.parameters[0] == brought.parameters[0]
    assert made.buffers == ("count",)


@pytest.mark.parametrize(
    ("brought", "whole", "says"),
    [
        (Manifest(parameters=(spec("z", 5),)), False, "'a' is missing"),
        (Manifest(parameters=(spec("z", 5),), frozen=("a",)), False, "'a' is frozen"),
        (Manifest(parameters=(spec("a", 3),)), False, r"'a': got \[3\], run has \[2\]"),
        (Manifest(parameters=(spec("a", 2, role="average"),)), False, "'a' is a buffer"),
        (Manifest(parameters=(spec("a", 2), spec("new", 1))), True, "'new' is not in the run"),
    ],
)
def test_a_manifest_that_does_not_fit_what_was_named_is_refused(brought: Manifest, whole: bool, says: str) -> None:
    with pytest.raises(ManifestMismatch, match=says):
        fitting(KNOWN, ["a"], brought, whole=whole)


def test_the_names_of_the_next_fragment_are_news_and_those_before_are_not() -> None:
    naming = Naming(named=1)
    assert [naming.is_news(fragment) for fragment in (0, 1, 2, None)] == [False, True, False, True]
    assert not Naming(named=2, whole=True).is_news(None)
    assert not Naming(named=2, whole=True).is_news(2)


def test_fragments_are_the_same_up_to_the_first_that_is_not() -> None:
    before = ([["a"], ["z"], ["mean"]], KNOWN)
    assert same_fragments(before, ([["a"], ["z", "mean"]], KNOWN)) == 1
    assert same_fragments(before, ([["a"], ["z"], ["mean"], ["head"]], KNOWN)) == 3
    other = Manifest(parameters=tuple(replace(one, embedding=one.name == "z") for one in KNOWN.parameters))
    assert same_fragments(before, (before[0], other)) == 1
    rounded = Manifest(parameters=tuple(replace(one, dtype="bfloat16") for one in KNOWN.parameters))
    assert same_fragments(before, (before[0], rounded)) == 3


def test_what_no_client_has_said_is_the_first_workers_to_say() -> None:
    before = settle(Wishes(num_fragments=2), Wishes(codec="fp32"), "old")
    made = settle_again(before, Wishes(num_fragments=2), Wishes(sync_every=40), "new")
    assert (made.sync_every, made.codec, made.num_fragments) == (40, "fp32", 2)
    assert made.said_by["sync_every"] == "worker 'new'"
    assert made.said_by["codec"] == "worker 'old'"
    assert made.said_by["num_fragments"] == "the server"
    with pytest.raises(PlanMismatch, match=r"codec=bf16, but the run has codec=fp32 \(said by worker 'old'"):
        settle_again(before, Wishes(num_fragments=2), Wishes(codec="bf16"), "new")
    with pytest.raises(PlanMismatch, match=r"down_codec=fp32, but the run has down_codec=same \(said by the default"):
        settle_again(before, Wishes(num_fragments=2), Wishes(down_codec="fp32"), "new", fixed=("down_codec",))


def test_what_is_fixed_stays_whatever_a_restarted_server_says() -> None:
    before = settle(Wishes(), Wishes(codec="fp32"), "old")
    made = settle_again(before, Wishes(codec="bf16"), Wishes(), "new", fixed=("codec",))
    assert (made.codec, made.said_by["codec"]) == ("fp32", "worker 'old'")


def test_dynamic_local_updates_say_how_often_if_nobody_does() -> None:
    before = settle(Wishes(), Wishes(), "old")
    made = settle_again(before, Wishes(), Wishes(), "new", base_sync_every=77)
    assert (made.sync_every, made.said_by["sync_every"]) == (77, "dynamic local updates")


def test_of_a_run_from_before_something_could_be_said_nobody_has_said_it() -> None:
    before = settle(Wishes(), Wishes(), "old")
    older = dataclasses.replace(before, said_by={k: v for k, v in before.said_by.items() if k != "tokenizer"})
    assert settle_again(older, Wishes(), Wishes(tokenizer="gpt2"), "new").tokenizer == "gpt2"
    assert settle_again(older, Wishes(), Wishes(), "new", fixed=("tokenizer",)).said_by["tokenizer"] == "the default"


def test_a_manifest_that_fits_the_whole_is_taken_with_buffers_of_its_own() -> None:
    brought = Manifest(parameters=(*KNOWN.parameters, spec("running", 3, role="average")))
    assert names_of(fitting(KNOWN, ["a"], brought, whole=True)) == ["a", "head", "mean", "z", "running"]


def test_what_was_not_named_has_the_form_that_the_manifest_says() -> None:
    brought = Manifest(parameters=(spec("z", 5, embedding=True), spec("a", 2, embedding=True)))
    made = fitting(KNOWN, ["a"], brought, whole=False)
    assert [one.embedding for one in made.parameters] == [True, False]


def test_three_differences_are_named_and_the_others_counted() -> None:
    named = ["a", "head", "mean", "z"]
    with pytest.raises(ManifestMismatch, match="'mean' is missing; and 2 more"):
        fitting(KNOWN, named, Manifest(parameters=(spec("new", 1),)), whole=True)
    with pytest.raises(ManifestMismatch, match="'mean' is missing; and 1 more"):
        fitting(KNOWN, named, Manifest(parameters=()), whole=True)
    with pytest.raises(ManifestMismatch) as refused:
        fitting(KNOWN, named[:3], Manifest(parameters=()), whole=False)
    assert refused.value.message.endswith("'mean' is missing")
