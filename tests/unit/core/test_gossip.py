"""Rounds of two: the rule against its equation, who exchanges with whom, and what it leads to."""

from __future__ import annotations

import pytest
import torch

from outerstep.core.gossip import NoLoCo, PairOuter, average_step, exponential_partner, noloco_step, random_partner
from outerstep.errors import ConfigError

IDS = [f"peer-{i:02d}" for i in range(8)]


def test_the_step_is_the_papers_with_its_signs() -> None:
    source = torch.Generator().manual_seed(0)
    phi, theta, other_phi, other_theta, m = (torch.randn(50, generator=source) for _ in range(5))
    moved, memory = phi.clone(), m.clone()
    noloco_step(moved, memory, phi - theta, other_phi, other_phi - other_theta, NoLoCo())
    learned = ((theta - phi) + (other_theta - other_phi)) / 2
    expected = 0.5 * m + 0.7 * learned - 0.7 * (phi - (phi + other_phi) / 2)
    torch.testing.assert_close(memory, expected)
    torch.testing.assert_close(moved, phi + expected)


def test_a_peer_moves_the_way_it_has_learned() -> None:
    phi, m = torch.zeros(3), torch.zeros(3)
    delta = torch.tensor([-1.0, -2.0, 0.0])  # anchor − local: it has learned (1, 2, 0)
    noloco_step(phi, m, delta, torch.zeros(3), delta, NoLoCo())
    assert phi.tolist() == pytest.approx([0.7, 1.4, 0.0])


def test_two_that_learn_nothing_come_together() -> None:
    ours, theirs = torch.ones(4), -torch.ones(4)
    m_ours, m_theirs, nothing = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    for _ in range(40):
        before = ours.clone()
        noloco_step(ours, m_ours, nothing, theirs, nothing, NoLoCo())
        noloco_step(theirs, m_theirs, nothing, before, nothing, NoLoCo())
    assert float((ours - theirs).abs().max()) < 1e-3
    assert float(ours.abs().max()) < 1e-3  # and their mean stays where it was


def test_a_round_of_pairs_pairs_everybody_with_one_and_differs_from_the_next() -> None:
    seen = set()
    for turn in range(20):
        partners = {one: random_partner(IDS, one, "seed", turn) for one in IDS}
        assert all(other is not None and partners[other] == one and other != one for one, other in partners.items())
        seen.add(tuple(partners.values()))
    assert len(seen) > 10


def test_with_an_odd_number_one_sits_out_and_not_always_the_same() -> None:
    alone = [next(one for one in IDS[:5] if random_partner(IDS[:5], one, "seed", t) is None) for t in range(30)]
    assert len(set(alone)) > 2
    for turn in range(5):
        assert sum(random_partner(IDS[:5], one, "seed", turn) is None for one in IDS[:5]) == 1


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_exponential_graph_has_the_exact_mean_after_log2_n_rounds(n: int) -> None:
    source = torch.Generator().manual_seed(n)
    ids = IDS[:n]
    phi = {one: torch.randint(-512, 512, (5,), generator=source).float() for one in ids}
    mean = torch.stack(list(phi.values())).mean(0)  # whole numbers: halves are exact
    nothing = torch.zeros(5)
    for turn in range(n.bit_length() - 1):
        partners = {one: exponential_partner(ids, one, turn) for one in ids}
        assert all(other is not None and partners[other] == one for one, other in partners.items())
        before = {one: values.clone() for one, values in phi.items()}
        for one, other in partners.items():
            assert other is not None
            average_step(phi[one], nothing, before[other], nothing)
    assert all(torch.equal(values, mean) for values in phi.values())


@pytest.mark.parametrize("n", [1, 3, 5, 6, 7])
def test_with_other_numbers_of_peers_some_sit_out_and_pairs_are_still_mutual(n: int) -> None:
    for turn in range(6):
        partners = {one: exponential_partner(IDS[:n], one, turn) for one in IDS[:n]}
        assert all(other is None or partners[other] == one for one, other in partners.items())
    everybody = [exponential_partner(IDS[:n], one, turn) for one in IDS[:n] for turn in range(6)]
    assert n == 1 or any(everybody)


def test_settings_out_of_range_are_refused_by_name() -> None:
    for settings, name in (({"momentum": 1.0}, "momentum"), ({"outer_lr": 0.0}, "lr"), ({"pull": 2.0}, "pull")):
        with pytest.raises(ConfigError, match=name):
            NoLoCo(**settings)


@pytest.mark.parametrize("allowed", [{"momentum": 0.0}, {"pull": 0.0}, {"pull": 1.0}, {"outer_lr": 1e-6}])
def test_the_limits_of_the_settings_are_allowed(allowed: dict[str, float]) -> None:
    NoLoCo(**allowed)


@pytest.mark.parametrize(
    "refused", [{"momentum": 1.0}, {"momentum": -0.1}, {"pull": 1.1}, {"outer_lr": 0.0}, {"outer_lr": float("inf")}]
)
def test_and_nothing_beyond_them(refused: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(refused.values())))):
        NoLoCo(**refused)


@pytest.mark.parametrize("count", range(2, 9))
def test_at_random_each_has_a_partner_that_has_it_and_one_of_an_odd_number_sits_out(count: int) -> None:
    ids = IDS[:count]
    partners = {own: random_partner(ids, own, "seed", 3) for own in ids}
    assert sum(partner is None for partner in partners.values()) == count % 2
    for own, partner in partners.items():
        assert partner is None or (partner != own and partners[partner] == own)


@pytest.mark.parametrize("count", range(2, 9))
def test_the_exponential_graph_goes_round_all_its_levels_and_no_further(count: int) -> None:
    """After as many turns as there are levels it begins again, and in each somebody has a partner."""
    ids, levels = IDS[:count], (count - 1).bit_length()
    turns = [tuple(exponential_partner(ids, own, turn) for own in ids) for turn in range(2 * levels)]
    assert turns[:levels] == turns[levels:]
    assert all(any(turn) for turn in turns)
    assert len(set(turns)) == levels


class TestOneStepOfAPair:
    """`PairOuter`: the same step by ranges of values, with its momentum kept by name."""

    @staticmethod
    def drawn(count: int = 12) -> tuple[torch.Tensor, ...]:
        source = torch.Generator().manual_seed(3)
        return tuple(torch.randn(count, generator=source) for _ in range(4))

    def test_two_ranges_move_as_the_whole_does_and_the_momentum_is_kept_for_the_next_round(self) -> None:
        phi, own, other_phi, other = self.drawn()
        outer, moved = PairOuter(NoLoCo()), phi.clone()
        expected, m = phi.clone(), torch.zeros(12)
        for _ in range(2):
            noloco_step(expected, m, own, other_phi, other, NoLoCo())
            for start, stop in ((0, 5), (5, 12)):
                cut = slice(start, stop)
                outer.block("w", moved[cut], own[cut], other_phi[cut], other[cut], start, phi)
        assert torch.equal(moved, expected)
        assert torch.equal(outer.momentum.tensors["w"], m)

    def test_the_rules_own_numbers_are_used(self) -> None:
        phi, own, other_phi, other = self.drawn()
        rule = NoLoCo(momentum=0.25, outer_lr=0.5, pull=0.125)
        moved, expected, m = phi.clone(), phi.clone(), torch.zeros(12)
        PairOuter(rule).block("w", moved, own, other_phi, other, 0, phi)
        noloco_step(expected, m, own, other_phi, other, rule)
        assert torch.equal(moved, expected)

    @pytest.mark.parametrize("rule", [None, NoLoCo()])
    def test_of_a_statistic_both_take_the_mean_and_nothing_is_remembered(self, rule: NoLoCo | None) -> None:
        phi, own, other_phi, other = self.drawn()
        outer, moved = PairOuter(rule), phi.clone()
        outer.block("running_mean", moved, own, other_phi, other, 0, None)
        torch.testing.assert_close(moved, ((phi - own) + (other_phi - other)) / 2)
        assert outer.momentum.tensors == {}

    def test_without_a_rule_parameters_take_the_mean_too(self) -> None:
        phi, own, other_phi, other = self.drawn()
        outer, moved = PairOuter(None), phi.clone()
        outer.block("w", moved, own, other_phi, other, 0, phi)
        torch.testing.assert_close(moved, ((phi - own) + (other_phi - other)) / 2)
        assert outer.momentum.tensors == {}
