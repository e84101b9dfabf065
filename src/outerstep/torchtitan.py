"""torchtitan's fault-tolerance settings as ours: `outerstep.torchtitan.settings_from(config.fault_tolerance)`."""

from .integrations.torchtitan import attach_trainer, settings_from

__all__ = ["attach_trainer", "settings_from"]
