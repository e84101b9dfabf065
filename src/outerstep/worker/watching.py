"""What to watch in a worker: its loss and gradients, and how its rounds went (docs/concepts/what-to-watch.md).

    inner_loss         running mean of the reported losses          loss_before_sync, loss_after_sync: around the last
    inner_grad_norm    ‖∇‖ at the last step that exchanged          agreement that was adopted
    pseudo_grad_norm, peer_grad_similarity, aggregated_grad_norm, weight_divergence:     core/watch.py

Always on, because nothing here costs a step that exchanges nothing anything: what a topology knows is added up when an
agreement comes in, and the gradients are looked at only then.
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

LOSS_MEMORY = 0.9  # of the running mean: the last ten losses or so


class Watching:
    """`steps`: how many the worker has taken when this process begins."""

    def __init__(self, steps: int = 0) -> None:
        self.inner_loss: float | None = None
        self.inner_grad_norm: float | None = None
        self.loss_before_sync: float | None = None
        self.loss_after_sync: float | None = None
        self.batch_size = 0  # samples of a step between the last two exchanges, as the script counts them; 0 = unsaid
        self._counted = (0, 0)  # steps and samples, at the last of them
        self._rounds: dict[int, Watched] = {}  # by fragment, the last
        self._began_at = steps
        self._before_step: bool | None = None  # is a loss reported before its optimizer step? None = not known yet
        self._adopted: tuple[int, float | None] | None = None  # at which step, and the loss then; until it is compared

    def reported(self, loss: float | None, steps: int) -> None:
        """A loss, after so many optimizer steps. It is of the weights before the last of them, if the user's loop
        reports after its step; which it does if it has taken one before its first report."""
        if self._before_step is None:
            self._before_step = steps == self._began_at
        if loss is None:
            self.inner_loss = None  # it is not finite: a mean of what was before would hide that
            return
        if self._adopted is not None and steps >= self._adopted[0] + (not self._before_step):
            self.loss_before_sync, self.loss_after_sync = self._adopted[1], loss
            self._adopted = None
        before = self.inner_loss
        self.inner_loss = loss if before is None else LOSS_MEMORY * before + (1.0 - LOSS_MEMORY) * loss

    def adopted(self, fragment: int, watched: Watched | None, steps: int) -> None:
        """An agreement is adopted, after so many steps."""
        self._adopted, last = (steps, self.inner_loss), self._rounds.get(fragment)
        if watched is None:
            return
        if watched.pseudo_grad_norm is None and last is not None:  # a round without us
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
        """After a step that exchanged something: its gradients are still there. `gather`, `sections` and `holders`: as
        in `gradient_norm`."""
        self.inner_grad_norm = gradient_norm(optimizer, gather, sections, holders)
        steps, samples = work.steps - self._counted[0], work.samples - self._counted[1]
        if steps > 0:
            self.batch_size, self._counted = round(samples / steps), (work.steps, work.samples)

    @property
    def metrics(self) -> dict[str, float | None]:
        """By name, of the whole model; None = not known (yet)."""
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
    """‖∇‖ of the gradients that the optimizer has just used. None: there are none any more, or they are not finite.

    `gather`: tells every rank of a job what all say; where `sections` of each tensor are spread over them (FSDP2), of
    the ranks that hold the same rows each counts its share. `holders`: of a job of another shape, how many ranks hold
    the same of a parameter (by its id)."""
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
    """Σ over ranks and parameters of ‖∇‖² / how many ranks hold the same."""
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
    """Σ x² of all; a GPU is asked once."""
    norms: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad
        wide = torch.promote_types(values.dtype, torch.float32)
        norms.setdefault(values.device, []).append(torch.linalg.vector_norm(values, dtype=wide).float())
    return sum(float(torch.linalg.vector_norm(torch.stack(each))) ** 2 for each in norms.values())
