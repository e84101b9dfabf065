"""A peer of a run without a server, up to where tensors begin: bytes, threads, sockets, a disk.

node.py           Node: what a topology uses
settings.py       what a node is told, and what it asks of the topology
shared.py         the lock
watchdog.py       the threads, and whose fault it was if one ends
listener.py       where it is reached, and how it reaches others
conversations.py  what it says to other members, and asks of them
hearing.py        what others say, and whose trouble it is if that cannot be
calls.py          what it asks of others, and the same of their answers
records.py        nothing is said before it is written down
repair.py         a folder that holds what cannot be carried out
contributions.py  contributions by digest: held, decided on, fetched
snapshots.py      anchors for a peer that joins
speeds.py         how fast other peers were, and how long each is waited for
housekeeping.py   what is to be done now and then
service.py        what a node answers, and says of itself

The decisions: coordination/gossip. What travels: wire/peers.py, docs/reference/wire.md.
"""

from ....wire.peers import Terms
from .node import Node
from .settings import Callbacks, DecidedRound, NodeSettings

__all__ = ["Callbacks", "DecidedRound", "Node", "NodeSettings", "Terms"]
