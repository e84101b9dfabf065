"""Everything outerstep raises.

    OuterstepError
    ├── ConfigError              a setting is out of range, of the wrong type or contradicts another
    │   └── NoCredentials            nothing is known here about that server: join it first
    ├── ModelError               this model or optimizer cannot be trained as it is
    ├── WorkerError              the worker cannot continue
    │   ├── ServerUnreachable        no answer for longer than the limit
    │   ├── RoundStuck               too few workers are alive for the round to close
    │   ├── PeerLost                 a rank of a run without a server died, hangs, failed or has left
    │   ├── OutOfStep                the ranks of such a run do not exchange the same thing at the same step
    │   ├── AnchorsDiffer            they should hold the same bits, and do not
    │   └── ExchangeFailed           an exchange failed in a way that retries cannot fix; its cause says why
    ├── TransportError           a request got no answer (refused connection, reset, timeout); it may be retried
    ├── UntrustedServer          not the server known here: another certificate, or no encryption; nothing was sent
    └── Refused                  the server answered "no"; `code`, `message` and `hint` travel over the wire
        ├── BadRequest               400  not a message of this protocol
        │   └── BadFrame             400  the payload's header is broken
        ├── TlsRequired              400  plain HTTP was sent to a TLS port
        ├── Unauthorized             401  no token, or not one of this server's
        ├── Forbidden                403  not with this token, or not from this machine
        │   ├── NotOwner                 403  the worker id belongs to another key
        │   └── NoIdentity               403  this server takes workers with a key only
        ├── Kicked                   403  an operator removed this worker
        ├── Quarantined              403  it offended too often: the server accepts nothing from it for a while
        ├── NotFound                 404  unknown path
        ├── UnknownWorker            404  not joined, or declared dead: join (again)
        │   └── NoSession                403  the request does not carry its worker's session: join (again)
        ├── MethodNotAllowed         405
        ├── Fenced                   409  a newer process has replaced this worker
        ├── IdInUse                  409  a live worker on another machine has this id
        ├── StaleRound               409  the round closed without this contribution: rebase
        ├── TooOld                   409  older than max_staleness: discard
        ├── FutureRound              409  computed from a version that does not exist
        ├── Conflict                 409  same key, other bytes
        ├── MissingParts             409  commit before all parts were in
        ├── Superseded               409  that agreement or sequence has been replaced by a newer one
        ├── OtherRun                 409  this server holds another run
        ├── RunFull                  409  the run of peers has as many members as it may have
        ├── PlanMismatch             409  the run has another H, codec or number of fragments
        │   └── OtherCodec               409  encoded with a codec of no plan of this run: send it again
        ├── ManifestMismatch         409  the run has another model
        ├── LengthRequired           411
        ├── TooLarge                 413  over a limit, named in the message
        ├── UnsupportedMedia         415  compressed, pickled or otherwise not what is expected here
        ├── BadTensors               422  missing, extra or wrong-shaped tensors
        ├── NotFinite                422  NaN or Inf, with the tensor's name
        ├── Absurd                   422  many times as large as other contributions
        ├── HashMismatch             422  a part was corrupted in transit
        ├── ProtocolMismatch         426
        ├── ServerError              500  a bug or a full machine, at the server; may be retried
        │   └── ServerFailed         500  the server cannot continue
        ├── Busy                     503  retry after `retry_after_s`
        │   ├── QuotaExceeded            429  this token or worker costs too much: retry after `retry_after_s`
        │   └── NotBegun                 503  the run waits for its first worker to bring the weights
        └── Closing                  503  the run is ending: no worker may join

A message says the rule and the value that broke it; the hint says what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class OuterstepError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(OuterstepError, ValueError):
    """A setting is out of range, of the wrong type, or contradicts another."""


class NoCredentials(ConfigError):
    """Nothing is known here about that server."""


class ModelError(OuterstepError, ValueError):
    """This model or optimizer cannot be trained as it is."""


class WorkerError(OuterstepError):
    """The worker cannot continue."""


class ServerUnreachable(WorkerError):
    """No answer for longer than the limit."""


class RoundStuck(WorkerError):
    """Too few workers are alive for the round to close, and this one stops waiting."""


class PeerLost(WorkerError):
    """A rank of a run without a server is gone."""


class OutOfStep(WorkerError):
    """The ranks of a run without a server do not exchange the same thing at the same step."""


class AnchorsDiffer(WorkerError):
    """The ranks of a run without a server should hold the same bits, and do not."""


class ExchangeFailed(WorkerError):
    """An exchange failed in a way that retries cannot fix."""


class TransportError(OuterstepError):
    """A request got no answer. Whether the server executed it is unknown, so it is retried under the same key."""


class UntrustedServer(OuterstepError):
    """The server that answers is not the one known here. Nothing was sent to it."""


class Refused(OuterstepError):
    """The server answered "no"."""

    code: ClassVar[str] = "refused"
    status: ClassVar[int] = 400

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(f"{message}. {hint}" if hint else message)
        self.message = message
        self.hint = hint
        self.retry_after_s = retry_after_s


class BadRequest(Refused):
    code, status = "bad_request", 400


class BadFrame(BadRequest):
    code, status = "bad_frame", 400


class TlsRequired(Refused):
    code, status = "tls_required", 400


class Unauthorized(Refused):
    code, status = "unauthorized", 401


class Forbidden(Refused):
    code, status = "forbidden", 403


class NotOwner(Forbidden):
    code, status = "not_owner", 403


class NoIdentity(Forbidden):
    code, status = "no_identity", 403


class Kicked(Refused):
    code, status = "kicked", 403


class Quarantined(Refused):
    code, status = "quarantined", 403


class NotFound(Refused):
    code, status = "not_found", 404


class UnknownWorker(Refused):
    code, status = "unknown_worker", 404


class NoSession(UnknownWorker):
    code, status = "no_session", 403


class MethodNotAllowed(Refused):
    code, status = "method_not_allowed", 405

    def __init__(self, message: str, *, allow: str = "", hint: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, hint=hint, retry_after_s=retry_after_s)
        self.allow = allow


class Fenced(Refused):
    code, status = "fenced", 409


class IdInUse(Refused):
    code, status = "id_in_use", 409


class StaleRound(Refused):
    code, status = "stale_round", 409


class TooOld(Refused):
    code, status = "too_old", 409


class FutureRound(Refused):
    code, status = "future_round", 409


class Conflict(Refused):
    code, status = "conflict", 409


class MissingParts(Refused):
    code, status = "missing_parts", 409


class Superseded(Refused):
    code, status = "superseded", 409


class OtherRun(Refused):
    code, status = "other_run", 409


class RunFull(Refused):
    code, status = "run_full", 409


class PlanMismatch(Refused):
    code, status = "plan_mismatch", 409


class OtherCodec(PlanMismatch):
    SINCE: ClassVar[int] = 2  # ends that speak an older protocol are told its parent's code

    code, status = "other_codec", 409


class ManifestMismatch(Refused):
    code, status = "manifest_mismatch", 409


class LengthRequired(Refused):
    code, status = "length_required", 411


class TooLarge(Refused):
    code, status = "too_large", 413


class UnsupportedMedia(Refused):
    code, status = "unsupported_media", 415


class BadTensors(Refused):
    code, status = "bad_tensors", 422


class NotFinite(Refused):
    code, status = "not_finite", 422


class Absurd(Refused):
    code, status = "absurd", 422


class HashMismatch(Refused):
    code, status = "hash_mismatch", 422


class ProtocolMismatch(Refused):
    code, status = "protocol_mismatch", 426


class ServerError(Refused):
    code, status = "server_error", 500


class ServerFailed(ServerError):
    code, status = "server_failed", 500


class Busy(Refused):
    code, status = "busy", 503


class QuotaExceeded(Busy):
    SINCE: ClassVar[int] = 2  # ends that speak an older protocol are told its parent's code

    code, status = "quota", 429


class NotBegun(Busy):
    SINCE: ClassVar[int] = 2

    code, status = "not_begun", 503


class Closing(Refused):
    code, status = "closing", 503


def _leaves(of: type[Refused]) -> list[type[Refused]]:
    return [of, *(leaf for child in of.__subclasses__() for leaf in _leaves(child))]


BY_CODE: dict[str, type[Refused]] = {kind.code: kind for kind in _leaves(Refused)}
"""Maps the code of a refusal to its class on the receiving side."""
