"""What two peers show each other in a turn, and the step that each takes from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.gossip import NoLoCo, average_step, noloco_step
from ...errors import BadFrame
from ..forms import Form
from ..stepped import Momentum, OwnStep
from ..update import anchor_hash
from .contents import Contents
from .snapshot import Standing, read_standing, write_standing


@dataclass(frozen=True)
class Shown:
    """What a peer publishes of a fragment in a turn: φ whole, Δ encoded."""

    turn: int
    anchor: Mapping[str, Tensor]
    delta: memoryview

    def write(self, form: Form) -> memoryview:
        whole = write_standing(form, Standing(self.turn, anchor_hash(self.anchor.values()), self.anchor, {}, (), {}))
        return memoryview(bytearray(len(self.delta).to_bytes(8, "little") + bytes(self.delta) + bytes(whole)))

    @classmethod
    def read(cls, form: Form, data: memoryview) -> Shown:
        size = int.from_bytes(data[:8], "little")
        if size != form.up.size_bytes:
            raise BadFrame(f"a contribution to this fragment has {form.up.size_bytes} bytes, got {size}")
        whole = read_standing(form, memoryview(bytearray(data[8 + size :])), {})
        return cls(whole.version, whole.anchor, memoryview(bytearray(data[8 : 8 + size])))


class PairStep(OwnStep):
    """The step of one turn. `shown`: one's own and the partner's (its own again, if there is none)."""

    def __init__(
        self,
        form: Form,
        contents: Contents,
        shown: tuple[Shown, Shown],
        rule: NoLoCo | None,
        momentum: Momentum,
        homes: Mapping[str, torch.device],
        roles: Mapping[str, str],
    ) -> None:
        super().__init__(form, momentum, homes, roles)
        self._deltas = [contents.reader(one.delta).tensors() for one in shown]
        self._partner, self._rule = shown[1].anchor, rule

    def _move(self, name: str, start: int, stop: int, theta: Tensor) -> None:
        own, partners = (deltas[name][start:stop].to(theta.device) for deltas in self._deltas)
        partner_phi = self._partner[name].reshape(-1)[start:stop].to(theta.device)
        if self._rule is None or self._roles[name] != "parameter":
            average_step(theta, own, partner_phi, partners)
        else:
            with self._buf(name, start, stop, theta.device) as m:
                noloco_step(theta, m, own, partner_phi, partners, self._rule)


__all__ = ["PairStep", "Shown"]
