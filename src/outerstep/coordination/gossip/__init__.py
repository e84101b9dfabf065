"""How peers without a server decide, one block after the other, what a round is made of and who belongs to the run.

book.py      what was said under which key, and the proofs that somebody said two things
meaning.py   what must be true of something that was said, beyond its type, before anything is made of it
bounds.py    how much of it is kept and carried, in bytes and by author
refusals.py  how often that was not so, and whose trouble it is
ballot.py    one block: proposed, voted on twice, decided; the same for everybody
chain.py     what the decided blocks have made of the run, and what follows from one more
heard.py     the contributions that were offered, and the peers that were heard of
blocks.py    which block a peer would propose, and which it is for
peer.py      all of it together: one peer's side of every conversation
"""

from .peer import GossipPeer, Keepsake
from .rules import GossipRules

__all__ = ["GossipPeer", "GossipRules", "Keepsake"]
