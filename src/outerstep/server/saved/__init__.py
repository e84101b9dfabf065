"""A server's state on disk: what is in it, how one state is laid out, a folder of states, and an older layout."""

from .old import import_old
from .saves import load_state, save_state
from .state import Acceptance, OptimizerState, SavedState, WorkerRecord, ledger_of, members_of

__all__ = [
    "Acceptance",
    "OptimizerState",
    "SavedState",
    "WorkerRecord",
    "import_old",
    "ledger_of",
    "load_state",
    "members_of",
    "save_state",
]
