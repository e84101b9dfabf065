"""Error feedback: what a codec leaves out is kept and sent later.

    e′ = β·e + Δ;   send C(e′);   e ← e′ − decode(C(e′))                      (β = 1; 0.95 for sparse codecs)

What is subtracted is what was *sent*, so nothing is lost with β = 1 (Seide et al. 2014; Karimireddy et al. 2019):
over all rounds, Σ applied + e + unsent = Σ local steps. With β < 1 residuals that wait for many rounds fade out.

The new e is tentative until the outcome of the contribution is known:

    counted         e ← e′ − decode(C(e′))
    not counted     e stays: the local weights keep their steps, and the next Δ contains them

A worker that resumes from its own state does the same: it has its local weights and its pending contribution back. If
the server holds later contributions than the state knows of, e was sent with those; it is forgotten, because to send it
again would count it twice.

The codec may change in a run. e is of no codec: it goes with the next contribution, whatever encodes that. If the new
one keeps nothing (`keeps=False`), nothing is owed from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .codecs import Codec, Dither

SPARSE_DECAY = 0.95


def decay_of(codec: Codec) -> float:
    """β: what a sparse codec leaves out may wait for many rounds, and loses value with each."""
    return SPARSE_DECAY if codec.needs_feedback else 1.0


@torch.no_grad()
def compensate(e: Tensor | None, delta: Tensor, decay: float, out: Tensor) -> None:
    """out ← β·e + Δ, the product rounded first; all of one shape. No e yet: e = 0."""
    if e is None:
        out.copy_(delta)
    elif decay == 1.0:
        torch.add(e, delta, out=out)
    else:
        torch.mul(e, decay, out=out).add_(delta)


@torch.no_grad()
def send(codec: Codec, wanted: Tensor, out: Tensor, dither: Dither | None = None) -> None:
    """out ← C(e′), and in place e′ ← e′ − decode(C(e′)), for flat fp32 e′."""
    codec.encode(wanted, out, dither)
    codec.decode_add(out, wanted, -1.0)


@dataclass
class Pending:
    """The residual of a pending contribution: what the codec left out, by tensor, flat. One without values: e went with
    it, and nothing is owed if it counts."""

    sequence: int
    left_over: dict[str, Tensor] = field(default_factory=dict)


class ErrorFeedback:
    """e by tensor name, flat, for one worker; and per fragment the pending contribution. `is_used`: there was one, so
    something may be owed; until then there is nothing to settle."""

    def __init__(self) -> None:
        self.is_used = False
        self._residuals: dict[str, Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._spare: dict[str, Tensor] = {}  # memory of an earlier e, to be reused

    def begin(self, fragment: int, sequence: int) -> None:
        """A new contribution. An earlier pending one did not count: its steps are in this Δ."""
        self.is_used = True
        self.settle(fragment, None, counted=False)
        self._pending[fragment] = Pending(sequence)

    @torch.no_grad()
    def encode(
        self,
        fragment: int,
        name: str,
        start: int,
        delta: Tensor,
        codec: Codec,
        out: Tensor,
        *,
        numel: int,
        home: torch.device,
        dither: Dither | None = None,
        keeps: bool = True,
    ) -> None:
        """Encode values [start, start + n) of a tensor of `numel` values, plus their residual, on Δ's device. e stays
        on `home`; unless the codec `keeps` what it leaves out, there is none afterwards."""
        left_over = self._pending[fragment].left_over
        if not keeps:
            left_over[name], wanted = torch.empty(0), torch.empty_like(delta)
            compensate(self._residuals[name][start : start + delta.numel()].to(delta.device), delta, 1.0, wanted)
            codec.encode(wanted, out, dither)
            return
        if name not in left_over:
            left_over[name] = self._room(name, numel, home, pinned=delta.is_cuda and home.type == "cpu")
        stop = start + delta.numel()
        e = self._residuals.get(name)
        owed = e[start:stop].to(delta.device, non_blocking=True) if e is not None else None
        kept = left_over[name][start:stop]
        wanted = kept if home == delta.device else torch.empty_like(delta)
        compensate(owed, delta, decay_of(codec), wanted)
        send(codec, wanted, out, dither)
        if wanted is not kept:
            kept.copy_(wanted)

    def settle(self, fragment: int, sequence: int | None, *, counted: bool) -> None:
        """The outcome of a contribution. (Reported twice, it is settled once; None = the pending one.)"""
        pending = self._pending.get(fragment)
        if pending is None or sequence not in (None, pending.sequence):
            return
        del self._pending[fragment]
        for name, left_over in pending.left_over.items():
            unused = left_over
            if counted:
                unused = self._residuals.pop(name, left_over)
                if left_over.numel():
                    self._residuals[name] = left_over
            if left_over.numel() and unused is not self._residuals.get(name):
                self._spare[name] = unused

    def forget(self, fragment: int, names: Iterable[str]) -> None:
        """Drop the fragment's residuals."""
        self._pending.pop(fragment, None)
        for name in names:
            self._residuals.pop(name, None)

    def is_pending(self, fragment: int, sequence: int) -> bool:
        """Is this its contribution whose outcome is not known?"""
        pending = self._pending.get(fragment)
        return pending is not None and pending.sequence == sequence

    def keep(self, sent: Mapping[str, range]) -> None:
        """Of a state that was cut for another shape: of each tensor the values that are sent here (where there are
        others, too), and nothing of those that are not named."""
        for held in (self._residuals, *(pending.left_over for pending in self._pending.values())):
            for name in list(held):
                if name not in sent:
                    del held[name]
                elif held[name].numel() > len(sent[name]):
                    held[name] = held[name][sent[name].start : sent[name].stop].clone()

    def owes(self, name: str) -> bool:
        """Is something left of a tensor that is to be sent?"""
        return name in self._residuals

    def residual(self, name: str) -> Tensor | None:
        """e of a tensor, flat; None while nothing has been left out."""
        return self._residuals.get(name)

    def state_dict(self, in_flight: Collection[int]) -> dict[str, Any]:
        """Plain tensors, numbers and text; the live tensors. `in_flight`: the fragments whose contribution the state
        also holds. (A refused one may still be pending here. It never counted.)"""
        pending = {
            str(fragment): {"sequence": one.sequence, "left_over": dict(one.left_over)}
            for fragment, one in self._pending.items()
            if fragment in in_flight
        }
        return {"residuals": dict(self._residuals), "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything with copies."""
        self.is_used = True
        self._residuals = _copies(state["residuals"])
        self._pending = {
            int(fragment): Pending(one["sequence"], _copies(one["left_over"]))
            for fragment, one in state["pending"].items()
        }

    def _room(self, name: str, numel: int, home: torch.device, *, pinned: bool = False) -> Tensor:
        """`pinned`: for a GPU to read and write."""
        e = self._residuals.get(name)
        if e is not None and e.numel() != numel:
            raise ConfigError(
                f"{name!r} has {numel} values here, its error feedback {e.numel()}; load this worker's own state"
            )
        if e is not None and e.device != home:
            self._residuals[name] = e.to(home)
        spare = self._spare.pop(name, None)
        fits = spare is not None and spare.numel() == numel and spare.device == home
        return spare if spare is not None and fits else torch.empty(numel, device=home, pin_memory=pinned)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().float().reshape(-1).clone() for name, tensor in tensors.items()}
