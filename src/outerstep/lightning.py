"""Lightning's Trainer as a worker: `Trainer(…, callbacks=[outerstep.lightning.OuterstepCallback()])`."""

from .integrations.lightning import LightningCallback as OuterstepCallback

__all__ = ["OuterstepCallback"]
