"""What to watch in a worker: its loss and gradients, and how its rounds went (docs/concepts/what-to-watch.md).

    inner_loss         running mean of the reported losses          loss_before_sync, loss_after_sync: around the last
    inner_grad_norm    ‖∇‖ at the last step that exchanged          agreement that was adopted
    pseudo_grad_norm, peer_grad_similarity, aggregated_grad_norm, weight_divergence:     core/watch.py

It is always on, because a step that exchanges nothing pays nothing for it: metrics are added up, and gradients read,
only when an agreement arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from msgspec.structs import asdict, replace
from torch import Tensor

from ..coordination.worker.machine import Work
from ..core.watch import whole_model
from ..types import Watched

LOSS_MEMORY = 0.9  # the running mean covers about ten losses


class Watching:
    """The metrics of one worker. `steps`: how many it had taken when this process began."""

    def __init__(self, steps: int = 0) -> None:
        self.inner_loss: float | None = None
        self.inner_grad_norm: float | None = None
        self.loss_before_sync: float | None = None
        self.loss_after_sync: float | None = None
        self.batch_size = 0  # samples per step between the last two exchanges, if the script counts them; 0 = unknown
        self._counted = (0, 0)  # steps and samples at the last exchange
        self._rounds: dict[int, Watched] = {}  # each fragment's last round
        self._began_at = steps
        self._before_step: bool | None = None  # is a loss reported before its optimizer step? None = not known yet
        self._adopted: tuple[int, float | None] | None = (
            None  # the step and the loss, until the next loss is compared with it
        )

    def reported(self, loss: float | None, steps: int) -> None:
        """Take a loss that was reported after so many optimizer steps. A loop that reports after its step reports the
        loss of the weights before that step; a loop does so if it has taken a step before its first report."""
        if self._before_step is None:
            self._before_step = steps == self._began_at
        if loss is None:
            self.inner_loss = None  # it is not finite: the earlier mean would hide that
            return
        if self._adopted is not None and steps >= self._adopted[0] + (not self._before_step):
            self.loss_before_sync, self.loss_after_sync = self._adopted[1], loss
            self._adopted = None
        before = self.inner_loss
        self.inner_loss = loss if before is None else LOSS_MEMORY * before + (1.0 - LOSS_MEMORY) * loss

    def adopted(self, fragment: int, watched: Watched | None, steps: int) -> None:
        """Note an adopted agreement, after so many steps."""
        self._adopted, last = (steps, self.inner_loss), self._rounds.get(fragment)
        if watched is None:
            return
        if watched.pseudo_grad_norm is None and last is not None:  # the round closed without us
            watched = replace(watched, pseudo_grad_norm=last.pseudo_grad_norm)
        self._rounds[fragment] = watched

    def exchanged(
        self,
        optimizer: torch.optim.Optimizer,
        work: Work,
        gather: Callable[[float], list[float]] | None = None,
        sections: int = 1,
        holders: Mapping[int, int] | None = None,
    ) -> None:
        """Read the gradients after a step that exchanged something: they are still there. `gather`, `sections` and
        `holders`: as in `gradient_norm`."""
        self.inner_grad_norm = gradient_norm(optimizer, gather, sections, holders)
        steps, samples = work.steps - self._counted[0], work.samples - self._counted[1]
        if steps > 0:
            self.batch_size, self._counted = round(samples / steps), (work.steps, work.samples)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics of the whole model, by name; None = not known (yet)."""
        return {
            "inner_loss": self.inner_loss,
            "inner_grad_norm": self.inner_grad_norm,
            "loss_before_sync": self.loss_before_sync,
            "loss_after_sync": self.loss_after_sync,
            **asdict(whole_model(self._rounds.values())),
        }


def gradient_norm(
    optimizer: torch.optim.Optimizer,
    gather: Callable[[float], list[float]] | None = None,
    sections: int = 1,
    holders: Mapping[int, int] | None = None,
) -> float | None:
    """‖∇‖ of the gradients that the optimizer has just used. None: they are gone, or not finite.

    `gather` collects one number from every rank of a job. `sections`: into how many parts each tensor is sharded
    (FSDP2); ranks that hold the same rows count their share of the norm each. `holders`: in a job of another shape, how
    many ranks hold the same part of a parameter, by the parameter's id."""
    if holders is not None and gather is not None:
        return _norm_of_all(optimizer, gather, holders)
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    parts = [grad.to_local() for grad in grads if hasattr(grad, "to_local")]
    squares, of_parts = _squares([grad for grad in grads if not hasattr(grad, "to_local")]), _squares(parts)
    if gather is not None:
        said = gather(of_parts)
        of_parts = sum(said) * sections / len(said)
    norm = math.sqrt(squares + of_parts)
    return norm if norm > 0.0 and math.isfinite(norm) else None


def _norm_of_all(
    optimizer: torch.optim.Optimizer, gather: Callable[[float], list[float]], holders: Mapping[int, int]
) -> float | None:
    """√Σ over ranks and parameters of ‖∇‖² / (how many ranks hold the same part)."""
    alike: dict[int, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                alike.setdefault(holders.get(id(p), 1), []).append(grad)
    total = sum(gather(sum(_squares(grads) / count for count, grads in alike.items())))
    norm = math.sqrt(total) if total > 0.0 else 0.0
    return norm if norm > 0.0 and math.isfinite(norm) else None


@torch.no_grad()
def _squares(grads: list[Tensor]) -> float:
    """Σ x² of all gradients; each device is synchronized once."""
    norms: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad
        wide = torch.promote_types(values.dtype, torch.float32)
        norms.setdefault(values.device, []).append(torch.linalg.vector_norm(values, dtype=wide).float())
    return sum(float(torch.linalg.vector_norm(torch.stack(each))) ** 2 for each in norms.values())
