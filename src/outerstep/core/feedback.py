"""Error feedback: what a codec leaves out is kept and sent later.

    e′ = β·e + Δ;   send C(e′);   e ← e′ − decode(C(e′))                      (β = 1; 0.95 for sparse codecs)

It is what was *sent* that is subtracted, so nothing is lost with β = 1 (Seide et al. 2014; Karimireddy et al. 2019):
over all rounds, Σ applied + e + unsent = Σ local steps. β < 1 lets what has waited for many rounds fade out.

The new e is tentative until the contribution has been counted:

    counted                                             e ← e′ − decode(C(e′))
    not counted, and the local weights keep their steps     e stays: the next Δ contains those steps
    not counted, and the local work is thrown away          e ← e + Δ: here alone it lives on
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from .codecs import Codec

SPARSE_DECAY = 0.95


def compensate(e: Tensor | None, delta: Tensor, decay: float = 1.0) -> Tensor:
    """e′ = β·e + Δ, fp32 and contiguous, on Δ's device; always a new tensor. No e yet: e = 0."""
    delta = delta.detach().float()
    return delta.clone(memory_format=torch.contiguous_format) if e is None else (e * decay).to(delta.device).add_(delta)


@torch.no_grad()
def send(codec: Codec, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(C(e′) as uint8, e′ − decode(C(e′))) of a contiguous fp32 tensor, whose memory the second one takes over."""
    flat = wanted.view(-1)
    data = torch.empty(codec.encoded_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    codec.encode(flat, data)
    codec.decode_add(data, flat, -1.0)
    return data, wanted


@dataclass(frozen=True, eq=False)
class Pending:
    """An exchange whose outcome is not known yet, by parameter name. The deltas must not be changed before it is."""

    deltas: Mapping[str, Tensor]
    left_over: Mapping[str, Tensor]


class ErrorFeedback:
    """e by parameter name, for one worker and one codec.

    Several exchanges may be open at once if they share no parameter: one per fragment.
    """

    def __init__(self, codec: Codec, decay: float | None = None) -> None:
        """`decay` is β; None: 0.95 for a codec that needs feedback, else 1."""
        self.codec = codec
        self.decay = decay if decay is not None else (SPARSE_DECAY if codec.needs_feedback else 1.0)
        if not (math.isfinite(self.decay) and 0.0 <= self.decay <= 1.0):
            raise ConfigError(f"error feedback's decay must be in [0, 1], got {self.decay}; 1 keeps everything")
        self._residuals: dict[str, Tensor] = {}
        self._open: dict[str, Pending] = {}

    @torch.no_grad()
    def begin(self, deltas: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Pending]:
        """(what to send, encoded, by name; the exchange to commit or roll back)."""
        if again := self._open.keys() & deltas.keys():
            raise ConfigError(f"{min(again)!r} is in an exchange already; commit or roll that one back first")
        encoded: dict[str, Tensor] = {}
        left_over: dict[str, Tensor] = {}
        for name, delta in deltas.items():
            e = self._residuals.get(name)
            if e is not None and e.shape != delta.shape:
                raise ConfigError(
                    f"{name!r} has shape {list(delta.shape)}, its error feedback {list(e.shape)}; load another state"
                )
            wanted = compensate(e, delta, self.decay)
            encoded[name], left_over[name] = send(self.codec, wanted)
        pending = Pending(dict(deltas), left_over)
        self._open |= dict.fromkeys(deltas, pending)
        return encoded, pending

    def commit(self, pending: Pending) -> None:
        """It was counted: what was left out is what remains to be sent."""
        self._settle(pending)
        self._residuals.update(pending.left_over)

    @torch.no_grad()
    def rollback(self, pending: Pending, *, discard_local: bool) -> None:
        """It was not counted. `discard_local`: the local weights lose the steps that Δ was made of."""
        self._settle(pending)
        if discard_local:
            for name, delta in pending.deltas.items():
                self._residuals[name] = compensate(self._residuals.get(name), delta)

    def residual(self, name: str) -> Tensor | None:
        """e of a parameter; None while nothing has been left out."""
        return self._residuals.get(name)

    def state_dict(self) -> dict[str, Tensor]:
        """e by name; the live tensors. An open exchange is not in it: after loading, its Δ counts as not sent."""
        return dict(self._residuals)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces every e; there must be no open exchange."""
        if self._open:
            raise ConfigError(f"{min(self._open)!r} is in an exchange; commit or roll it back before loading a state")
        self._residuals = {name: e.detach().float().clone() for name, e in state.items()}

    def _settle(self, pending: Pending) -> None:
        if any(self._open.get(name) is not pending for name in pending.deltas):
            raise ConfigError("this exchange is not open; it is committed or rolled back once")
        for name in pending.deltas:
            del self._open[name]
