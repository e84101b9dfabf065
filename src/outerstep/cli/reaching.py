"""Is a server there, is it the right one, and does it let this machine in? Asked before a training script is started.

A mistake that no waiting can mend is raised, as one line: no join string, another certificate, a token that is not
valid, a port of something else. A server that is not there *yet* is none: workers may be started first.
"""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import suppress

from ..errors import (
    Busy,
    Closing,
    ConfigError,
    Forbidden,
    NoCredentials,
    NotFound,
    OuterstepError,
    ProtocolMismatch,
    Refused,
    ServerError,
    TlsRequired,
    TransportError,
    Unauthorized,
    UntrustedServer,
)
from ..security import DEFAULT_PORT, Access, Credentials, is_join_string, parse_address, parse_join_string
from ..wire.http_transport import HttpTransport
from ..wire.messages import PROBE_PATH, STATUS_PATH

PATIENCE_S = 5.0
SOMEBODY = "outerstep-worker"  # a worker whose id the script makes
MOST_BYTES = 1 << 20  # of a status that somebody else's server answers with


def check_server(server: str, credentials: str | None, worker_id: str | None = None) -> str:
    """Why nobody answers yet, in one line, or "". Raises what waiting does not mend. `worker_id`: the script's, if it
    is known already; a token may be one worker's own."""
    named = parse_join_string(server) if is_join_string(server) else Access(*parse_address(server))
    try:
        line = HttpTransport(server, timeout_s=PATIENCE_S, credentials=credentials)
    except NoCredentials as error:
        raise NoCredentials(f"{error}{_neighbours(named, credentials)}") from error
    if Credentials(credentials).find(server) is None and _takes_calls(named):
        raise NoCredentials(
            f"{named.address} answers, and is no server of this user: give the join string that it printed to "
            f"`outerstep join -`. (If it was started with --insecure, and you trust the network: http://{named.address})"
        )
    try:
        return _look(line, worker_id or SOMEBODY)
    finally:
        line.close()


def way_to(server: str, credentials: str | None) -> str:
    """The one of a server's addresses that answers."""
    line = HttpTransport(server, timeout_s=PATIENCE_S, credentials=credentials)
    try:
        with suppress(Refused, TransportError):
            line.ask_nonce(SOMEBODY)
        return line.address
    finally:
        line.close()


def is_old_port(server: str) -> bool:
    """Is it a port of the older protocol: a server's compatibility port, or a server of that time?"""
    if is_join_string(server):
        return False
    named = Access(*parse_address(server))
    return _says_in_plain(named, "GET", STATUS_PATH, "sync_round") and not _is_ours(named)


def _takes_calls(named: Access) -> bool:
    try:
        socket.create_connection((named.host, named.port), timeout=PATIENCE_S).close()
    except OSError:
        return False
    return True


def _look(line: HttpTransport, worker_id: str) -> str:
    try:
        with suppress(ProtocolMismatch):  # a server of release 0.2, or one that the script will hear of
            line.ask_nonce(worker_id)
    except (Unauthorized, Forbidden, TlsRequired):
        raise
    except (Busy, Closing, ServerError) as error:  # of ours, or of what stands in front of it: for a while
        return _unless_somebody_else(line, error)
    except (UntrustedServer, Refused) as error:
        raise _not_a_server(line, error) from error
    except TransportError as error:
        return str(error)
    return ""


def _unless_somebody_else(line: HttpTransport, error: Refused) -> str:
    try:
        line.status()
    except (Busy, Closing, ServerError, Unauthorized, Forbidden, ProtocolMismatch, TransportError):
        pass
    except Refused as other:
        raise _not_a_server(line, other) from error
    return str(error)


def _not_a_server(line: HttpTransport, error: OuterstepError) -> OuterstepError:
    """What answers there instead: a peer; or who else, as far as it says so without being shown a token."""
    named = Access(*parse_address(line.address))
    if isinstance(error, NotFound) and _is_peer(line):
        return ConfigError(
            f"{named.address} is a peer of a run without a server: start the script with `outerstep peer --join "
            f"{named.address} -- …`"
        )
    if _says_in_plain(named, "GET", STATUS_PATH, "sync_round"):
        if _is_ours(named):
            return error  # a server without TLS: the error says how to write that
        return ConfigError(
            f"{named.address} is a port of the older protocol (--compat-port), for clients of that: give the server's "
            f"own port, which it printed when it started ({DEFAULT_PORT} unless told otherwise)"
        )
    if isinstance(error, UntrustedServer):
        return error
    return ConfigError(
        f"{named.address} is not the port of an outerstep server, it answered: {error}. Give the port that the server "
        f"printed when it started ({DEFAULT_PORT} unless told otherwise)"
    )


def _is_ours(named: Access) -> bool:
    return _says_in_plain(named, "PUT", PROBE_PATH, "time_s")


def _is_peer(line: HttpTransport) -> bool:
    try:
        return line.status().get("mode") == "gossip"
    except (Refused, TransportError):
        return False


def _says_in_plain(named: Access, method: str, path: str, word: str) -> bool:
    """Does it answer plain HTTP with a JSON object that has this key?"""
    connection = http.client.HTTPConnection(named.host, named.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        said = json.loads(connection.getresponse().read(MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return False  # nobody who speaks HTTP
    finally:
        connection.close()
    return isinstance(said, dict) and word in said


def _neighbours(named: Access, credentials: str | None) -> str:
    """A port is easily mistyped: which ones of that host are known?"""
    known = [address for address in Credentials(credentials).known() if parse_address(address)[0] == named.host]
    return f". Known on that host: {', '.join(sorted(known))}" if known else ""
