"""A loop of Accelerate as a worker: `with outerstep.accelerate.OuterStep(accelerator, model) as outer: …`."""

from .integrations.accelerate import OuterStep

__all__ = ["OuterStep"]
