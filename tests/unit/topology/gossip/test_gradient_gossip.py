"""One agreed round of gossip by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep import GradientGossip
from outerstep.errors import ModelError, NotFinite, PlanMismatch

ALONE: dict[str, Any] = {"listen": "127.0.0.1:0", "insecure": True, "beat_every_s": 0.5}


def gradient(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 5, generator=source), "b": torch.randn(5000, generator=source)}


async def rounds(gossip: GradientGossip, seeds: list[int]) -> list[list[dict[str, Tensor]]]:
    return [await gossip.gossip_round(gradient(seed)) for seed in seeds]


def run(codec: str, count: int) -> list[list[list[dict[str, Tensor]]]]:
    """Three peers, so many rounds: what each got."""

    async def together() -> list[list[list[dict[str, Tensor]]]]:
        async with GradientGossip("anna", codec=codec, min_peers=3, **ALONE) as anna:
            others = [GradientGossip(name, [anna.join_string], **ALONE) for name in ("ben", "cleo")]
            peers = [anna, *others]
            jobs = [rounds(peer, [10 * i + r for r in range(count)]) for i, peer in enumerate(peers)]
            found = await asyncio.gather(*jobs)
            assert [peer.current_round for peer in peers] == [count] * 3
            assert anna.peers == ("anna", "ben", "cleo")
            await asyncio.gather(*(other.close() for other in others))
            return list(found)

    return asyncio.run(asyncio.wait_for(together(), 120))


def test_everybody_gets_the_same_contributions_in_the_order_of_the_ids() -> None:
    found = run("fp32", 2)
    for number in range(2):
        for peer in found:
            assert len(peer[number]) == 3
            for i, contribution in enumerate(peer[number]):
                expected = gradient(10 * i + number)
                assert all(torch.equal(contribution[name], expected[name]) for name in ("w", "b"))


def test_what_top_k_leaves_out_comes_later() -> None:
    (first, *_) = run("sparse64", 3)
    sent = sum(found[0]["b"] for found in first)
    wanted = sum(gradient(seed)["b"] for seed in range(3))
    assert 0.0 < float((first[0][0]["b"] != 0).float().mean()) < 0.05
    assert float((sent - wanted).norm()) < float(wanted.norm())
    twice = first[1][0]["b"] - gradient(1)["b"]  # what came in round 1 beside its own, at the places that were sent
    assert float(twice[first[1][0]["b"] != 0].abs().max()) > 0.0


def test_nan_is_not_sent_and_other_tensors_are_refused() -> None:
    async def alone() -> None:
        async with GradientGossip("anna", min_peers=1, **ALONE) as anna:
            assert len(await anna.gossip_round(gradient(0))) == 1
            with pytest.raises(NotFinite, match="'b' holds NaN"):
                await anna.gossip_round({**gradient(0), "b": torch.full((5000,), float("nan"))})
            with pytest.raises(ModelError, match=r"'w' was .3, 5., is now .2,."):
                await anna.gossip_round({**gradient(0), "w": torch.zeros(2)})
            assert anna.current_round == 1
            other = GradientGossip("ben", [anna.join_string], codec="int4", **ALONE)
            with pytest.raises(PlanMismatch, match="codec=int4"):
                await other.gossip_round(gradient(0))
            other._node.stop()

    asyncio.run(asyncio.wait_for(alone(), 60))
