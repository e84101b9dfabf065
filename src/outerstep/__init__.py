"""outerstep trains one PyTorch model on machines that are far apart.

    import outerstep
    with outerstep.attach(model, optimizer):
        train()

The names below are loaded when they are first used: a command that needs no tensors imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.fragments import FragmentManager
    from .core.own_outer import OuterOptimizer
    from .core.robust import RobustAggregator
    from .errors import OuterstepError
    from .extending import register_codec, register_rule
    from .model_folder import load_model, save_model
    from .server import DiLoCoServer, HealthMonitor
    from .topology.gossip.gradient_gossip import GradientGossip
    from .topology.server.client import DiLoCoClient
    from .worker import DiLoCoTrainer, DiLoCoWorker, attach

_WHERE = {
    "DiLoCoClient": ".topology.server.client",
    "DiLoCoServer": ".server",
    "DiLoCoTrainer": ".worker",
    "DiLoCoWorker": ".worker",
    "FragmentManager": ".core.fragments",
    "GradientGossip": ".topology.gossip.gradient_gossip",
    "HealthMonitor": ".server",
    "OuterOptimizer": ".core.own_outer",
    "OuterstepError": ".errors",
    "RobustAggregator": ".core.robust",
    "attach": ".worker",
    "load_model": ".model_folder",
    "register_codec": ".extending",
    "register_rule": ".extending",
    "register_topology": ".worker.connect",
    "save_model": ".model_folder",
}

__all__ = [
    "DiLoCoClient",
    "DiLoCoServer",
    "DiLoCoTrainer",
    "DiLoCoWorker",
    "FragmentManager",
    "GradientGossip",
    "HealthMonitor",
    "OuterOptimizer",
    "OuterstepError",
    "RobustAggregator",
    "attach",
    "load_model",
    "register_codec",
    "register_rule",
    "register_topology",
    "save_model",
]


_MODULES = ("accelerate", "data", "hf", "lightning", "torchtitan")  # trainers have an extra of their name each


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'outerstep' has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
