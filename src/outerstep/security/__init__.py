"""Authentication: tokens, certificates, join strings, and the files that hold them. No torch in here.

identity = Credentials().server_identity()         # the server's certificate and tokens, created at its first start
access   = parse_join_string("outerstep://run-…@192.168.1.100:8512#sha256=…")
Credentials().remember(access)                     # `outerstep join`
Credentials().find("192.168.1.100:8512")           # what a worker does: address -> token and fingerprint

What this protects, and what it does not: docs/operating/security.md.
"""

from .access import (
    DEFAULT_PORT,
    Access,
    is_join_string,
    is_loopback,
    mended,
    parse_address,
    parse_join_string,
    redact,
    shown_address,
)
from .credentials import JOIN_VARIABLE, Credentials
from .guard import Caller, Guard, TokenGuard
from .identity import ServerIdentity
from .tokens import TokenFile, Tokens

__all__ = [
    "DEFAULT_PORT",
    "JOIN_VARIABLE",
    "Access",
    "Caller",
    "Credentials",
    "Guard",
    "ServerIdentity",
    "TokenFile",
    "TokenGuard",
    "Tokens",
    "is_join_string",
    "is_loopback",
    "mended",
    "parse_address",
    "parse_join_string",
    "redact",
    "shown_address",
]
