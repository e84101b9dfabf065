"""Hugging Face's Trainer as a worker: `Trainer(…, callbacks=[outerstep.hf.OuterstepCallback()])`."""

from .integrations.hugging_face import OuterstepCallback

__all__ = ["OuterstepCallback"]
