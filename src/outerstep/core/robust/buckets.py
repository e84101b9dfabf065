"""Bucketing: random pairs are averaged first, and the rule sees the means.

    (x_1 … x_n)  →  the means of random groups of s  →  any rule over ⌈n/s⌉

(Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing".) Means of two are closer
to each other than their members, which helps rules that would otherwise mistake honest scatter for an attack; but an
attacker spoils a whole group, so the rule must withstand as many of n/s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError
from ..aggregate import sum_in_order
from .rule import BlockFunction, Rule, RuleInputs, Selection, are_equal, check_weights, weighted_mean_of


@dataclass(frozen=True)
class Bucketing:
    """`rule` over the weighted means of groups of `size`, each with the weight of its members.

    seed: a value that all peers agree on and no contribution can depend on, new in every round.
    """

    rule: Rule
    size: int = 2
    seed: str = ""

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ConfigError(f"a bucket must have at least 2 contributions, got {self.size}; 2 is the usual size")
        if isinstance(self.rule, Bucketing):
            raise ConfigError("a bucketing cannot contain a bucketing; use one with a larger size")

    @property
    def name(self) -> str:
        return f"{self.rule.name} over buckets of {self.size}"

    @property
    def fewest(self) -> int:
        return (self.rule.fewest - 1) * self.size + 1

    @property
    def needs_products(self) -> bool:
        return self.rule.needs_products

    @property
    def needs_centre(self) -> bool:
        return self.rule.needs_centre

    def check(self, offered: int, weights: Sequence[float]) -> None:
        check_weights(weights)
        groups = deal(offered, self.size, self.seed)
        each = [sum_in_order([weights[i] for i in group]) for group in groups]
        if are_equal(weights):  # a smaller last group does not make the weights unequal
            each = [1.0] * len(groups)
        try:
            self.rule.check(len(groups), each)
        except ConfigError as error:
            raise ConfigError(
                f"{offered} contributions are {len(groups)} buckets of up to {self.size}, and over these: {error}"
            ) from error

    def begin(self, inputs: RuleInputs) -> BlockFunction:
        n, first = len(inputs.weights), int(self.needs_centre)  # the centre is a group by itself
        groups = deal(n, self.size, self.seed)
        shares = [[inputs.weights[i] for i in group] for group in groups]
        weights = [sum_in_order(each) for each in shares]
        products = None
        if inputs.products is not None:
            mixtures = [[1.0] + [0.0] * n] if first else []
            for group, total in zip(groups, weights, strict=True):
                mixtures.append([0.0] * first + [inputs.weights[i] / total if i in group else 0.0 for i in range(n)])
            products = inputs.products.mixed(mixtures)
        inner = self.rule.begin(RuleInputs(-(-inputs.offered // self.size), tuple(weights), products))

        def combine(values: Tensor) -> Tensor:
            centre, rows = values[:first], values[first:]
            means = [weighted_mean_of(rows[group], each) for group, each in zip(groups, shares, strict=True)]
            return inner(torch.cat([centre, torch.stack(means)]))

        if isinstance(inner, Selection):
            return Selection(combine, tuple(sorted(i for group in inner.unused for i in groups[group])))
        return combine


def deal(n: int, size: int, seed: str) -> list[list[int]]:
    """0 … n − 1 in random groups, each in ascending order; the same for the same arguments on every machine."""
    drawn = [hashlib.blake2b(f"{seed}\0{i}".encode(), digest_size=16).digest() for i in range(n)]
    shuffled = sorted(range(n), key=lambda i: drawn[i])
    return [sorted(shuffled[begin : begin + size]) for begin in range(0, n, size)]
