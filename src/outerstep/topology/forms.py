"""How a fragment travels: the frames of a contribution, of a whole anchor and of an update, each with its codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.codecs import Codec
from ..core.codecs.recipe import WHOLE, CodecRule, Recipe
from ..types import Manifest, ParameterSpec, Plan
from ..wire.frames import Layout, layout


@dataclass(frozen=True)
class Form:
    """One fragment's. `rules` and `codecs` are by tensor: what a contribution and an update are encoded with.
    `feeds_back`: what the codec of some tensor leaves out is kept for the next contribution."""

    up: Layout
    full: Layout
    update: Layout
    rules: Mapping[str, CodecRule]
    codecs: Mapping[str, Codec]
    feeds_back: bool


def forms_of(plan: Plan, manifest: Manifest) -> list[Form]:
    """Of every fragment. The manifest is the run's own: a worker's may say less about its tensors."""
    up, down = Recipe.parse(plan.codec), Recipe.parse(plan.down_codec)
    specs = {spec.name: spec for spec in manifest.parameters}
    return [_form(up, down, [specs[name] for name in names]) for names in plan.fragments]


def _form(up: Recipe, down: Recipe, specs: Sequence[ParameterSpec]) -> Form:
    rules = {spec.name: up.rule(spec) for spec in specs}
    return Form(
        up=_layout(up, specs),
        full=_layout(WHOLE, specs),
        update=_layout(down, specs),
        rules=rules,
        codecs={spec.name: down.codec(spec) for spec in specs},
        feeds_back=any(rule.feedback for rule in rules.values()),
    )


def _layout(recipe: Recipe, specs: Sequence[ParameterSpec]) -> Layout:
    return layout(recipe.name, [(s.name, s.shape, recipe.codec(s).encoded_bytes(s.numel)) for s in specs])
