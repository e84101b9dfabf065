"""A server's state on disk: what is in it, how one state is laid out, a folder of states, and an older layout."""

from .old import import_old
from .saves import has_states, load_state, save_copy, save_state
from .state import Acceptance, OptimizerState, ServerState, WorkerRecord

__all__ = [
    "Acceptance",
    "OptimizerState",
    "ServerState",
    "WorkerRecord",
    "has_states",
    "import_old",
    "load_state",
    "save_copy",
    "save_state",
]
