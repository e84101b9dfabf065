"""Which message travels on which path, and how errors do."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlencode

import msgspec

from ..errors import BY_CODE, BadRequest, MethodNotAllowed, NotFound, ProtocolMismatch, Refused, ServerError
from ..statements import Converse
from ..types import (
    PROTOCOL_VERSION,
    Answer,
    Commit,
    CommitAnswer,
    Control,
    ControlAnswer,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Leave,
    LeaveAnswer,
    Offer,
    OfferAnswer,
    Plain,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Request,
)
from . import probe, strict_json
from .peers import AskParts, AskTerms, AskWhole, GetHeld, HeldAnswer, Parts, PeerAnswer, PeerRequest, Terms, Whole

HASH_HEADER: Final = "Outerstep-Hash"
JSON_TYPE: Final = "application/json"
BYTES_TYPE: Final = "application/octet-stream"

MAX_JSON_BYTES: Final = 1 << 20
MAX_JOIN_BYTES: Final = 32 << 20  # a join carries the manifest: about 100 bytes per parameter tensor
MAX_PART_BYTES: Final = 16 << 20

AnyRequest = Request | PeerRequest
AnyAnswer = Answer | PeerAnswer

# (method, path) -> (request, its answer). Part requests carry bytes, so their facts are in the query string.
ROUTES: Final[dict[tuple[str, str], tuple[type[AnyRequest], type[AnyAnswer]]]] = {
    ("POST", "/v1/join"): (Join, JoinAnswer),
    ("POST", "/v1/heartbeat"): (Heartbeat, HeartbeatAnswer),
    ("POST", "/v1/leave"): (Leave, LeaveAnswer),
    ("POST", "/v1/offer"): (Offer, OfferAnswer),
    ("PUT", "/v1/part"): (PutPart, PutPartAnswer),
    ("POST", "/v1/commit"): (Commit, CommitAnswer),
    ("POST", "/v1/poll"): (Poll, PollAnswer),
    ("GET", "/v1/part"): (GetPart, GetPartAnswer),
    ("POST", "/v1/control"): (Control, ControlAnswer),
    ("POST", "/v1/peers/terms"): (AskTerms, Terms),
    ("POST", "/v1/peers/converse"): (Converse, Converse),
    ("POST", "/v1/peers/whole"): (AskWhole, Whole),
    ("POST", "/v1/peers/parts"): (AskParts, Parts),
    ("GET", "/v1/peers/part"): (GetHeld, HeldAnswer),
}
LARGE: Final = (Join, Converse)  # messages that may have MAX_JOIN_BYTES
PAGES: Final = {"/status": ("GET",), "/healthz": ("GET",), probe.PATH: probe.METHODS}  # paths without a message

_PLACE: Final = {request: (method, path, answer) for (method, path), (request, answer) in ROUTES.items()}


class ErrorBody(Plain, frozen=True):
    code: str
    message: str
    hint: str = ""
    request_id: str = ""
    retry_after_s: float = 0.0


class ErrorAnswer(Plain, frozen=True):
    error: ErrorBody


# msgspec learns a type when it is first used; two threads that are the first at the same moment crash the process
# (0.22: the second finds what the first has half built). So it learns ours now, while there is one thread.
for _kind in (*(kind for pair in ROUTES.values() for kind in pair), ErrorAnswer):
    msgspec.json.Decoder(_kind)


def find_route(method: str, path: str) -> type[AnyRequest]:
    found = ROUTES.get((method, path))
    if found is not None:
        return found[0]
    allowed = [m for m, p in ROUTES if p == path] + [*PAGES.get(path, ())]
    if allowed:
        raise MethodNotAllowed(f"{method} is not allowed on {path}", allow=", ".join(allowed))
    raise NotFound(f"no such path: {path[:128]}", hint="the paths of this protocol begin with /v1/")


def address_of(request: AnyRequest) -> tuple[str, str, type[AnyAnswer]]:
    """Method, target and answer type of a request. A part request's facts go into the target."""
    method, path, answer = _PLACE[type(request)]
    if isinstance(request, PutPart | GetPart | GetHeld):
        path = f"{path}?{urlencode(msgspec.to_builtins(request))}"
    return method, path, answer


def decode_request(data: bytes | bytearray | memoryview, kind: type[AnyRequest]) -> AnyRequest:
    """What a worker of another version says may have fields that we do not know: then the version is what is wrong."""
    try:
        return strict_json.decode(data, kind)
    except BadRequest as error:
        if kind is Join and (spoken := _protocol(data)) not in (None, PROTOCOL_VERSION):
            raise ProtocolMismatch(
                f"this worker speaks protocol {spoken}, the server speaks {PROTOCOL_VERSION}",
                hint="install the same version of outerstep on both",
            ) from error
        raise


def _protocol(data: bytes | bytearray | memoryview) -> int | None:
    try:
        spoken = strict_json.decode(data, dict).get("protocol")
    except BadRequest:
        return None
    return spoken if type(spoken) is int else None


def parse_query(query: str, kind: type[AnyRequest]) -> AnyRequest:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=32, errors="strict")
    except ValueError as error:
        raise BadRequest(f"bad query string: {error}") from error
    facts = dict(pairs)
    if len(facts) != len(pairs):
        raise BadRequest("bad query string: a key appears twice")
    return strict_json.convert(facts, kind, from_text=True)


def encode_error(error: Refused, request_id: str) -> bytes:
    body = ErrorBody(
        code=error.code,
        message=error.message,
        hint=error.hint,
        request_id=request_id,
        retry_after_s=error.retry_after_s,
    )
    return strict_json.encode(ErrorAnswer(error=body))


def decode_error(data: bytes, status: int) -> Refused:
    try:
        body = strict_json.decode(data, ErrorAnswer).error
    except BadRequest:
        shown = data[:80].decode("utf-8", "replace")
        kind = ServerError if status >= 500 else Refused  # a proxy in front may say 502 for a while
        return kind(
            f"HTTP status {status}, and not in the form an outerstep server answers: {shown!r}",
            hint="is this the address of an outerstep server?",
        )
    return BY_CODE.get(body.code, Refused)(body.message, hint=body.hint, retry_after_s=body.retry_after_s)
