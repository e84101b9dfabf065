"""The process around the coordinator: it carries out what the coordinator decides."""

from .health import HealthMonitor
from .server import DiLoCoServer

__all__ = ["DiLoCoServer", "HealthMonitor"]
