"""The process around the coordinator: it carries out what the coordinator decides."""

from .server import DiLoCoServer
from .service import HealthMonitor

__all__ = ["DiLoCoServer", "HealthMonitor"]
