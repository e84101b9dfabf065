"""One of eight attacks: the aggregate stays near the honest mean, where the plain mean does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outerstep import RobustAggregator
from outerstep.core.robust import RULES
from outerstep.core.robust.attacks import (
    ATTACKS,
    Attack,
    Scene,
    a_little_is_enough,
    against_the_mean,
    gaussian,
    scaled,
    spoiled_by,
)

SIZE, HONEST = 20_000, 7
ATTACKER = "worker-3"


def honest(seed: int) -> tuple[Tensor, Tensor]:
    """[8, m], and the attacker's own of an earlier round. As measured on language models: a common direction that
    makes up an eighth of each square, another one in each round, and the rest every worker's own."""
    generator = torch.Generator().manual_seed(seed)
    common, earlier = (torch.randn(SIZE, generator=generator) * (1 / 8) ** 0.5 for _ in range(2))
    own = torch.randn(HONEST + 2, SIZE, generator=generator) * (7 / 8) ** 0.5
    return common + own[:-1], earlier + own[-1]


def attacked(attack: str, seed: int) -> tuple[list[Tensor], list[str], Tensor]:
    """All eight, their ids, and the mean of the honest ones."""
    values, earlier = honest(seed)
    others = values[1:]
    sent = ATTACKS[attack](Scene(values[0], others, [earlier], seed))
    ids = [ATTACKER, *(f"worker-{i}" for i in range(9) if i not in (3, 8))]
    return [sent, *others], ids, others.mean(0)


def error(made: Tensor, expected: Tensor) -> float:
    """Relative to the honest mean, which is half as long as one contribution."""
    return float(torch.linalg.vector_norm(made - expected) / torch.linalg.vector_norm(expected))


REFUSED = {"sign_flip", "flip_10", "scale_1000", "gaussian", "gaussian_1000", "ipm", "ipm_10", "nan", "inf"}
SEEDS = range(5)


@pytest.mark.parametrize("attack", ATTACKS)
class TestTheRecommendedSetting:
    """The mean behind both screens."""

    def test_the_aggregate_stays_near_the_honest_mean(self, attack: str) -> None:
        """One that passes both screens has an eighth of the say, and at most twice the usual length."""
        for seed in SEEDS:
            values, ids, expected = attacked(attack, seed)
            made = RobustAggregator("mean", cosine_screen=True).aggregate(values, worker_ids=ids)
            assert error(made, expected) < (1e-6 if attack in REFUSED else 0.4)

    def test_the_attacker_is_refused_and_nobody_else(self, attack: str) -> None:
        for seed in SEEDS:
            values, ids, _ = attacked(attack, seed)
            aggregator = RobustAggregator("mean", cosine_screen=True)
            aggregator.aggregate(values, worker_ids=ids)
            assert aggregator.verdict is not None
            assert aggregator.verdict.refused.keys() == ({ATTACKER} if attack in REFUSED else set())


@pytest.mark.parametrize("attack", ["scale_1000", "gaussian", "gaussian_1000", "flip_10", "ipm_10"])
def test_the_plain_mean_is_led_astray(attack: str) -> None:
    for seed in SEEDS:
        values, _, expected = attacked(attack, seed)
        assert error(torch.stack(values).mean(0), expected) > 1.0


@pytest.mark.parametrize("aggregation", [name for name in RULES if name != "krum"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_rule_behind_its_screens_is_led_far(aggregation: str, attack: str) -> None:
    """(Krum gives up averaging: what it takes is one honest contribution, twice as long as the mean.)"""
    values, ids, expected = attacked(attack, 0)
    assert error(RobustAggregator(aggregation).aggregate(values, worker_ids=ids), expected) < 0.75


def test_krum_takes_an_honest_one() -> None:
    for attack in REFUSED:
        values, ids, _ = attacked(attack, 1)
        made = RobustAggregator("krum").aggregate(values, worker_ids=ids)
        taken = [i for i, each in enumerate(values) if torch.equal(made, each)]
        assert len(taken) == 1
        assert taken != [0] or attack in ("sign_flip", "ipm")  # as long as the others, or shorter: Krum cannot tell


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_a_function_of_the_scene(attack: str) -> None:
    values, earlier = honest(0)
    scene = Scene(values[0].clone(), values[1:].clone(), [earlier.clone()], 5)
    first, second = ATTACKS[attack](scene), ATTACKS[attack](scene)
    assert torch.equal(first.nan_to_num(0.5), second.nan_to_num(0.5))
    assert first.shape == values[0].shape
    assert torch.equal(scene.own, values[0])
    assert torch.equal(scene.honest, values[1:])
    assert first.data_ptr() not in (scene.own.data_ptr(), scene.honest.data_ptr(), scene.past[0].data_ptr())


class TestEveryAttackSendsWhatItSays:
    OWN = torch.tensor([3.0, -4.0, 0.0, 0.0])
    HONEST = torch.tensor([[1.0, 2.0, 3.0, 0.0], [3.0, 2.0, -1.0, 0.0]])

    def sent(self, attack: Attack, seed: int = 0) -> Tensor:
        return attack(Scene(self.OWN, self.HONEST, seed=seed))

    def test_scaled(self) -> None:
        assert self.sent(scaled(-10.0)).tolist() == [-30.0, 40.0, 0.0, 0.0]

    def test_noise_has_its_length_and_is_drawn_anew_in_each_round(self) -> None:
        first, second = self.sent(gaussian(10.0), 1), self.sent(gaussian(10.0), 2)
        assert torch.linalg.vector_norm(first).item() == pytest.approx(50.0)
        assert torch.equal(first, self.sent(gaussian(10.0), 1))
        assert not torch.equal(first, second)

    def test_noise_is_as_long_as_that_however_short_the_drawn_numbers_are(self) -> None:
        for seed in range(20):
            one = gaussian(2.0)(Scene(self.OWN[:1], self.HONEST[:, :1], seed=seed))
            assert one.abs().item() == pytest.approx(6.0)

    def test_a_little_less_than_the_mean(self) -> None:
        assert self.sent(a_little_is_enough(1.5)).tolist() == [0.5, 2.0, -2.0, 0.0]

    def test_against_the_mean(self) -> None:
        assert self.sent(against_the_mean(0.5)).tolist() == [-1.0, -1.0, -0.5, 0.0]

    def test_one_value_in_the_middle_is_spoiled_in_a_copy(self) -> None:
        before = self.OWN.clone()
        assert self.sent(spoiled_by(9.0)).tolist() == [3.0, -4.0, 9.0, 0.0]
        assert torch.equal(self.OWN, before)
