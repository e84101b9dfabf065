"""A peer of a run without a server, up to where tensors begin: bytes, threads, sockets, a disk.

node.py       Node: what a topology uses
settings.py   what a node is told, and what it asks of the topology
shared.py     the lock, and the threads
door.py       where it is reached, and how it reaches others
survey.py     where the run stands
talk.py       the conversations with other members
keeping.py    nothing is said before it is written down (folder.py)
payloads.py   contributions by digest; fetching.py gets those of others
decided.py    the rounds that were decided
snapshots.py  anchors for a peer that joins
service.py    what a node answers; status.py what it says of itself

Who decides what: coordination/gossip. What travels: wire/peers.py, docs/reference/wire.md.
"""

from ....wire.peers import Terms
from .node import Node
from .settings import Callbacks, DecidedRound, NodeSettings

__all__ = ["Callbacks", "DecidedRound", "Node", "NodeSettings", "Terms"]
