"""The older HTTP protocol, served on a port of its own: seven endpoints, `torch.save` bodies, submits held open.

    compat = CompatServer(server, port=8513).start()

A translator and not a second server: every client that registers here joins the same run as the workers that speak the
wire of today, and its contributions pass the same coordinator and the same ledger.

    limits.py     how much and how long
    archive.py    torch.save's bytes, described without unpickling them
    tensors.py    and compared with the run's model
    names.py      worker ids, and how a client introduces itself
    answers.py    status, heartbeats and errors as old clients read them
    client.py     one registered worker: what it holds, what it has under way, what is a repeat
    heard.py      which answers have arrived, for the server after a restart
    endpoints.py  the seven endpoints
    server.py     their port, on the HTTP server of wire/
"""

from .limits import CompatLimits
from .server import CompatServer

__all__ = ["CompatLimits", "CompatServer"]
