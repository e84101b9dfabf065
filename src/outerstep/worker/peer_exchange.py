"""What a trainer without a server needs of its peers, and what it makes of their answers.

Everybody aggregates for itself, so everybody must have the same contributions in the same order. A gossip sees to that
(GradientGossip). Peers that are asked one by one answer in whatever order they are listed: what they say is put into
the order of its hashes, which is the same everywhere if the bytes are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..errors import ConfigError, OuterstepError
from ..topology.update import values_hash

log = logging.getLogger(__name__)

PseudoGradient = Mapping[str, Tensor]


@runtime_checkable
class Gossip(Protocol):
    """All peers at once."""

    async def gossip_round(self, local_grad: dict[str, Tensor]) -> Sequence[PseudoGradient]:
        """The contributions that everybody has agreed on, one's own among them (as the others have it), in the same
        order for everybody."""


@runtime_checkable
class Peer(Protocol):
    """One of them."""

    async def exchange_gradients(self, local_grad: dict[str, Tensor]) -> PseudoGradient:
        """Its contribution to this round, for ours: the same that it gives to all others."""


async def collect(local: dict[str, Tensor], peers: Gossip | Sequence[Peer]) -> list[dict[str, Tensor]]:
    """Everybody's contribution, in an order that is the same for all. Who fails, or sends something else than these
    tensors, is left out and said so."""
    if isinstance(peers, Gossip):
        return _fitting(await _gossip(peers, local), local)
    odd = next((peer for peer in peers if not isinstance(peer, Peer)), None)
    if odd is not None:
        raise ConfigError(
            "peers must be one object with `async gossip_round(local)`, or a list of objects with "
            f"`async exchange_gradients(local)`; got {type(odd).__name__}"
        )
    answers = await asyncio.gather(*(_ask(peer, local) for peer in peers))
    found = _fitting([local, *(answer for answer in answers if answer is not None)], local)
    return sorted(found, key=lambda one: values_hash(one[name] for name in sorted(one)))


async def _gossip(peers: Gossip, local: dict[str, Tensor]) -> Sequence[PseudoGradient]:
    try:
        return await peers.gossip_round(local)
    except ConfigError:
        raise  # trying again will not mend it
    except (OuterstepError, OSError) as error:
        log.warning("the gossip round failed: %s", error)
        return []


async def _ask(peer: Peer, local: dict[str, Tensor]) -> PseudoGradient | None:
    try:
        return await peer.exchange_gradients(local)
    except Exception as error:  # noqa: BLE001 - it is the user's object, and whatever it does, training goes on without it
        log.warning("no pseudo-gradient from %s: %s: %s", _name(peer), type(error).__name__, error)
        return None


def _fitting(offered: Sequence[PseudoGradient], local: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Those that are of this model, in fp32 on its device. (Everybody leaves out the same: all have the same model.)"""
    shapes = {name: tensor.shape for name, tensor in local.items()}
    fitting = []
    for number, one in enumerate(offered):
        odd = _misfit(one, shapes)
        if odd:
            log.warning("pseudo-gradient %d of %d is left out: %s", number + 1, len(offered), odd)
            continue
        fitting.append({name: one[name].detach().to(own.device, own.dtype) for name, own in local.items()})
    return fitting


def _misfit(one: object, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Why it is not of this model; "" = it is."""
    if not isinstance(one, Mapping):
        return f"it must be a mapping from names to tensors, got {type(one).__name__}"
    for name in sorted({*shapes, *one}, key=str):
        if name not in shapes:
            return f"{name!r} is not trained here"
        there = one.get(name)
        if not isinstance(there, Tensor) or not there.is_floating_point() or there.shape != shapes[name]:
            shown = list(there.shape) if isinstance(there, Tensor) else there
            return f"{name!r} must be a floating point tensor of shape {list(shapes[name])}, got {shown}"
    return ""


def _name(peer: object) -> str:
    return str(getattr(peer, "id", None) or type(peer).__name__)


__all__ = ["Gossip", "Peer", "PseudoGradient", "collect"]
