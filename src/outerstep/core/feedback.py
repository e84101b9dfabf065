"""Error feedback: what a codec leaves out is kept and sent later.

    e′ = β·e + Δ;   send C(e′);   e ← e′ − decode(C(e′))                      (β = 1; 0.95 for sparse codecs)

It is what was *sent* that is subtracted, so nothing is lost with β = 1 (Seide et al. 2014; Karimireddy et al. 2019):
over all rounds, Σ applied + e + unsent = Σ local steps. β < 1 lets what has waited for many rounds fade out.

The new e is tentative until it is known what became of the contribution:

    counted                                             e ← e′ − decode(C(e′))
    not counted, and the local weights keep their steps     e stays: the next Δ contains those steps
    not counted, and the process was started anew           e ← e + Δ: here alone it lives on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .codecs import Codec, Dither

SPARSE_DECAY = 0.95


def decay_of(codec: Codec) -> float:
    """β: what does not fit into a sparse codec may wait for many rounds, and is worth less with each."""
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
    """What the codec left out of a contribution, by tensor, flat. `deltas` is what the contribution was made of; only
    a pending one of an earlier start of this worker has it."""

    sequence: int
    left_over: dict[str, Tensor] = field(default_factory=dict)
    deltas: dict[str, Tensor] = field(default_factory=dict)


class ErrorFeedback:
    """e by tensor name, flat, for one worker; and per fragment the contribution whose outcome is not known yet."""

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._spare: dict[str, Tensor] = {}  # memory of an earlier e, for the next one

    def begin(self, fragment: int, sequence: int) -> None:
        """A new contribution. One before it whose outcome was never learned did not count: its steps are in this Δ."""
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
    ) -> None:
        """Encode values [start, start + n) of a tensor that has `numel`, with what is owed of them; on Δ's device. e is
        kept at `home`."""
        left_over = self._pending[fragment].left_over
        if name not in left_over:
            left_over[name] = self._room(name, numel, home)
        stop = start + delta.numel()
        e = self._residuals.get(name)
        owed = e[start:stop].to(delta.device) if e is not None else None
        kept = left_over[name][start:stop]
        wanted = kept if home == delta.device else torch.empty_like(delta)
        compensate(owed, delta, decay_of(codec), wanted)
        send(codec, wanted, out, dither)
        if wanted is not kept:
            kept.copy_(wanted)

    def settle(self, fragment: int, sequence: int | None, *, counted: bool) -> None:
        """What became of a contribution. (Heard twice, it is settled once; None = whichever is pending.)"""
        pending = self._pending.get(fragment)
        if pending is None or sequence not in (None, pending.sequence):
            return
        del self._pending[fragment]
        for name, left_over in pending.left_over.items():
            unused = left_over
            if counted:
                unused = self._residuals.get(name, left_over)
                self._residuals[name] = left_over
            if unused is not self._residuals.get(name):
                self._spare[name] = unused

    @torch.no_grad()
    def resume(self, last_sequences: Sequence[int]) -> None:
        """After a restart: what was pending then has counted if the server knows of it. If not, the steps it was made
        of are nowhere else any more."""
        for fragment, pending in list(self._pending.items()):
            counted = fragment < len(last_sequences) and pending.sequence <= last_sequences[fragment]
            self.settle(fragment, pending.sequence, counted=counted)
            for name, delta in pending.deltas.items() if not counted else ():
                e = self._residuals.get(name)
                self._residuals[name] = delta.clone() if e is None else e + delta

    def residual(self, name: str) -> Tensor | None:
        """e of a tensor, flat; None while nothing has been left out."""
        return self._residuals.get(name)

    def state_dict(self, sent: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Any]:
        """Plain tensors, numbers and text; the live tensors. `sent`: of each fragment under way, the Δ."""
        pending = {
            fragment: {
                "sequence": self._pending[fragment].sequence,
                "left_over": dict(self._pending[fragment].left_over),
                "deltas": {name: deltas[name] for name in self._pending[fragment].left_over},
            }
            for fragment, deltas in sent.items()
            if fragment in self._pending
        }
        return {"residuals": dict(self._residuals), "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces everything, by copies. What was pending is settled by `resume`."""
        self._residuals = _copies(state["residuals"])
        self._pending = {
            fragment: Pending(one["sequence"], _copies(one["left_over"]), _copies(one["deltas"]))
            for fragment, one in state["pending"].items()
        }

    def _room(self, name: str, numel: int, home: torch.device) -> Tensor:
        e = self._residuals.get(name)
        if e is not None and e.numel() != numel:
            raise ConfigError(
                f"{name!r} has {numel} values here, its error feedback {e.numel()}; load a state of this very worker"
            )
        if e is not None and e.device != home:
            self._residuals[name] = e.to(home)
        spare = self._spare.pop(name, None)
        fits = spare is not None and spare.numel() == numel and spare.device == home
        return spare if spare is not None and fits else torch.empty(numel, device=home)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().float().reshape(-1).clone() for name, tensor in tensors.items()}
