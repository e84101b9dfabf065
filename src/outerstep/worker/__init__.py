"""The worker: hooks into the user's optimizer and exchanges what was learned."""

from .attach import attach
from .trainer import DiLoCoTrainer
from .worker import DiLoCoWorker

__all__ = ["DiLoCoTrainer", "DiLoCoWorker", "attach"]
