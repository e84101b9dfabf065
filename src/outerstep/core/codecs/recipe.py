"""Recipes: which codec encodes which tensor, as in the plan's `codec` and `down_codec`.

    recipe = rule | rule,kind=rule,…          "int4"     "int4,embeddings=int8,norms=fp32"
    rule   = codec [+feedback] [+stochastic]   "int8+feedback"     "bf16+stochastic"

The first rule is for every tensor not covered by a kind. Kinds: `embeddings`, the tables; `norms`, tensors with at most
one dimension (gains, biases). Buffers always travel in fp32: they are few, and not sums of steps.

`+feedback` keeps what the codec left out and adds it to the next contribution (core/feedback.py). The sparse codecs
always use it, so it may be omitted there. `+stochastic` rounds up or down at random, unbiased; it changes the bytes but
not how they are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ...errors import ConfigError
from ...types import ParameterSpec
from . import CONTROL_2BIT, FP32, SPARSE64, Codec, SparseCodec, get_codec

KINDS: Final = ("embeddings", "norms")
OPTIONS: Final = ("feedback", "stochastic")


@dataclass(frozen=True)
class CodecRule:
    """How the tensors of one kind are encoded."""

    codec: Codec
    feedback: bool = False
    stochastic: bool = False

    @classmethod
    def parse(cls, text: str) -> CodecRule:
        name, *options = text.split("+")
        for option in options:
            if option not in OPTIONS:
                raise ConfigError(f"a codec's option must be one of {', '.join(OPTIONS)}, got {option!r} in {text!r}")
        codec = get_codec(name)
        if "stochastic" in options and codec.needs_feedback:
            raise ConfigError(f"a sparse codec has no stochastic rounding: write {name!r} instead of {text!r}")
        return cls(codec, "feedback" in options or codec.needs_feedback, "stochastic" in options)

    def __str__(self) -> str:
        feedback = "+feedback" if self.feedback and not self.codec.needs_feedback else ""
        return self.codec.name + feedback + ("+stochastic" if self.stochastic else "")


BUFFERS: Final = CodecRule(FP32)


@dataclass(frozen=True)
class Recipe:
    usual: CodecRule
    by_kind: tuple[tuple[str, CodecRule], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Recipe:
        first, *others = text.split(",")
        by_kind: dict[str, CodecRule] = {}
        for part in others:
            kind, equals, rule = part.partition("=")
            if not equals or kind not in KINDS or kind in by_kind:
                raise ConfigError(
                    f"after its first codec a recipe has {' and '.join(f'{k}=CODEC' for k in KINDS)}, each once; "
                    f"got {part!r} in {text!r}"
                )
            by_kind[kind] = CodecRule.parse(rule)
        return cls(CodecRule.parse(first), tuple((kind, by_kind[kind]) for kind in KINDS if kind in by_kind))

    @cached_property
    def name(self) -> str:
        """The canonical form: recipes that do the same have the same name."""
        kinds = [f"{kind}={rule}" for kind, rule in self.by_kind if rule != self.usual]
        return ",".join([str(self.usual), *kinds])

    def rule(self, spec: ParameterSpec) -> CodecRule:
        if spec.role != "parameter":
            return BUFFERS
        kind = "embeddings" if spec.embedding else "norms" if len(spec.shape) <= 1 else ""
        return dict(self.by_kind).get(kind, self.usual)

    def codec(self, spec: ParameterSpec) -> Codec:
        return self.rule(spec).codec

    @property
    def rules(self) -> tuple[CodecRule, ...]:
        return self.usual, *(rule for _, rule in self.by_kind)

    @property
    def has_feedback(self) -> bool:
        return any(rule.feedback for rule in self.rules)

    @property
    def coarse(self) -> str:
        """The name of a codec in it that is too coarse to train with; "" if there is none. (Measured:
        docs/results/codecs.md.)"""
        return next((rule.codec.name for rule in self.rules if _is_coarse(rule.codec)), "")

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded."""
        return all(rule.codec is FP32 for rule in self.rules)

    def downlink(self) -> Recipe:
        """The default downlink recipe for this uplink recipe. The server keeps what its codec leaves out (it holds the
        exact outer parameters), so feedback is dropped; a sparse update would leave the workers far behind, so they get
        bf16."""
        return Recipe(_downlink(self.usual), tuple((kind, _downlink(rule)) for kind, rule in self.by_kind))


def _is_coarse(codec: Codec) -> bool:
    return codec is CONTROL_2BIT or (isinstance(codec, SparseCodec) and codec.k < SPARSE64.k)


def _downlink(rule: CodecRule) -> CodecRule:
    return CodecRule.parse("bf16") if rule.codec.needs_feedback else CodecRule(rule.codec, False, rule.stochastic)


WHOLE: Final = Recipe(CodecRule(FP32))
