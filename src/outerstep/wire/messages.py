"""How messages travel: which on which path, as what JSON or query string, and how errors do.

JSON as we accept it is UTF-8 with finite numbers, no repeated keys, shallow, and of the shape that the message has.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import ClassVar, Final, TypeVar
from urllib.parse import parse_qsl, urlencode

import msgspec
from msgspec.structs import replace

from ..errors import BY_CODE, BadRequest, Refused, ServerError
from ..statements import Converse
from ..types import (
    Answer,
    AskNonce,
    Commit,
    CommitAnswer,
    CompleteOffer,
    CompleteOfferAnswer,
    Control,
    ControlAnswer,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Lease,
    LeaseAnswer,
    Leave,
    LeaveAnswer,
    NonceAnswer,
    Offer,
    OfferAnswer,
    Plain,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Request,
)
from ..versions import OLDEST_PROTOCOL, PROTOCOL_VERSION, as_spoken, check_spoken, needs
from .peers import (
    AskParts,
    AskSnapshot,
    AskTerms,
    GetHeld,
    HeldAnswer,
    OfferedSnapshot,
    PartList,
    PeerAnswer,
    PeerRequest,
    Terms,
)

STATUS_PATH: Final = "/status"
PROBE_PATH: Final = "/v1/probe"
PAGE_LINK_PATH: Final = "/page/link"
RELAY_PATH: Final = "/v1/relay"
HASH_HEADER: Final = "Outerstep-Hash"
CARRIED_HEADER: Final = "Outerstep-Carried"  # of an answer: so many bytes follow its JSON
PROTOCOL_HEADER: Final = "Outerstep-Protocol"  # of a request: the one that it is written in
PROTOCOLS_HEADER: Final = "Outerstep-Protocols"  # of an answer: all that its sender speaks
_PROTOCOL_KEY: Final = PROTOCOL_HEADER.lower()
_NEWEST: Final = str(PROTOCOL_VERSION)
SESSION_HEADER: Final = "Outerstep-Session"
JSON_TYPE: Final = "application/json"
BYTES_TYPE: Final = "application/octet-stream"

MAX_DEPTH: Final = 16
MAX_MARKS: Final = 2_000_000  # strings and brackets: each costs many times its own size once it is an object
# A string (whose brackets don't count) or a bracket. Possessive, so that a long string costs no memory for going back.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

T = TypeVar("T")

encode_json = msgspec.json.encode

MAX_JSON_BYTES: Final = 1 << 20
MAX_JOIN_BYTES: Final = 32 << 20  # a join carries the manifest: about 100 bytes per parameter tensor
MAX_PART_BYTES: Final = 16 << 20

AnyRequest = Request | PeerRequest | AskNonce
AnyAnswer = Answer | PeerAnswer | NonceAnswer

# request -> (method, path, its answer). Some requests carry bytes, so their facts are in the query string.
PLACES: Final[dict[type[AnyRequest], tuple[str, str, type[AnyAnswer]]]] = {
    AskNonce: ("POST", "/v1/nonce", NonceAnswer),
    Join: ("POST", "/v1/join", JoinAnswer),
    Heartbeat: ("POST", "/v1/heartbeat", HeartbeatAnswer),
    Leave: ("POST", "/v1/leave", LeaveAnswer),
    Lease: ("POST", "/v1/lease", LeaseAnswer),
    Offer: ("POST", "/v1/offer", OfferAnswer),
    CompleteOffer: ("PUT", "/v1/offer", CompleteOfferAnswer),
    PutPart: ("PUT", "/v1/part", PutPartAnswer),
    Commit: ("POST", "/v1/commit", CommitAnswer),
    Poll: ("POST", "/v1/poll", PollAnswer),
    GetPart: ("GET", "/v1/part", GetPartAnswer),
    Control: ("POST", "/v1/control", ControlAnswer),
    AskTerms: ("POST", "/v1/peers/terms", Terms),
    Converse: ("POST", "/v1/peers/converse", Converse),
    AskSnapshot: ("POST", "/v1/peers/whole", OfferedSnapshot),
    AskParts: ("POST", "/v1/peers/parts", PartList),
    GetHeld: ("GET", "/v1/peers/part", HeldAnswer),
}


class ProbeAnswer(Plain, frozen=True):
    received_bytes: int
    time_s: float  # since 1970
    protocol: int


class PageCode(Plain, frozen=True):
    """The answer to `POST /page/link`: what logs one browser in, once. "": the page asks for no login."""

    SINCE: ClassVar[int] = 2

    code: str
    valid_s: float


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
for _kind in (*PLACES, *(answer for _, _, answer in PLACES.values()), ErrorAnswer):
    msgspec.json.Decoder(_kind)


def place_of(kind: type[AnyRequest]) -> tuple[str, str]:
    """Method and path, for a table of routes."""
    return PLACES[kind][:2]


def address_of(request: AnyRequest) -> tuple[str, str, type[AnyAnswer]]:
    """Method, target and answer type of a request. The facts of one with bytes go into the target."""
    method, path, answer = PLACES[type(request)]
    if isinstance(request, CompleteOffer | PutPart | GetPart | GetHeld):
        facts = {name: value for name, value in msgspec.to_builtins(request).items() if value != ()}
        path = f"{path}?{urlencode(facts)}"
    return method, path, answer


# --- in which protocol ---------------------------------------------------------------------------------------------


def written_in(request: AnyRequest, protocol: int) -> AnyRequest:
    """A request as an end is to get it with which this protocol was agreed."""
    if isinstance(request, Join | AskTerms):
        request = replace(request, protocol=protocol)
    return request if protocol == PROTOCOL_VERSION else as_spoken(request, protocol)


def protocol_of(headers: Mapping[str, str]) -> int:
    """The one that a request is written in, and its answer is to be. Release 0.2 does not say, and speaks 1."""
    named = headers.get(_PROTOCOL_KEY)
    if named == _NEWEST:
        return PROTOCOL_VERSION
    if named is None:
        return OLDEST_PROTOCOL
    if not re.fullmatch("[0-9]{1,6}", named):
        raise BadRequest(f"{PROTOCOL_HEADER} must be a number, got {named[:32]!r}")
    check_spoken(int(named), "the sender")
    return int(named)


def check_written(message: object, protocol: int) -> None:
    """To say it in an older protocol than it belongs to is as wrong as an unknown field."""
    if (needed := needs(message)) > protocol:
        raise BadRequest(
            f"this {type(message).__name__} has what belongs to protocol {needed}, and is said in {protocol}",
            hint=f"name the protocol in the header {PROTOCOL_HEADER}",
        )


def parse_query(query: str, kind: type[T]) -> T:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=32, errors="strict")
    except ValueError as error:
        raise BadRequest(f"bad query string: {error}") from error
    facts = dict(pairs)
    if len(facts) != len(pairs):
        raise BadRequest("bad query string: a key appears twice")
    message = convert(facts, kind, from_text=True)
    for name in getattr(kind, "__struct_fields__", ()):
        value = getattr(message, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"bad query string: {name} must be a number, got {value}")
    return message


def encode_error(error: Refused, request_id: str, protocol: int = PROTOCOL_VERSION) -> bytes:
    kind = type(error)
    while getattr(kind, "SINCE", OLDEST_PROTOCOL) > protocol:  # a code that the other end does not know
        kind = kind.__bases__[0]
    body = ErrorBody(
        code=kind.code,
        message=error.message,
        hint=error.hint,
        request_id=request_id,
        retry_after_s=error.retry_after_s,
    )
    return encode_json(ErrorAnswer(error=body))


def decode_error(data: bytes, status: int) -> Refused:
    try:
        body = decode_json(data, ErrorAnswer).error
    except BadRequest:
        shown = data[:80].decode("utf-8", "replace")
        kind = ServerError if status >= 500 else Refused  # a proxy in front may say 502 for a while
        return kind(
            f"HTTP status {status}, and not in the form an outerstep server answers: {shown!r}",
            hint="is this the address of an outerstep server?",
        )
    return BY_CODE.get(body.code, Refused)(body.message, hint=body.hint, retry_after_s=body.retry_after_s)


# --- strict JSON ---------------------------------------------------------------------------------------------------


def decode_json(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Parse and check in one go; whatever is wrong is a BadRequest that says where."""
    text = bytes(data)
    _check_depth(text)
    try:
        parsed = json.loads(
            text.decode("utf-8"), object_pairs_hook=_no_repeats, parse_constant=_no_constants, parse_float=_finite
        )
        if _SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # half a character cannot be written back
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not acceptable JSON: {error}") from error
    return convert(parsed, kind)


def convert(parsed: object, kind: type[T], *, from_text: bool = False) -> T:
    """Plain values into a message. `from_text`: numbers may come as strings (a query string has nothing else)."""
    try:
        return msgspec.convert(parsed, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        raise BadRequest(f"not a {kind.__name__}: {error}") from error


def _check_depth(text: bytes) -> None:
    """A hundred thousand brackets must not reach a recursive parser. Brackets inside strings don't count."""
    depth = 0
    for count, found in enumerate(_STRING_OR_BRACKET.finditer(text)):
        first = text[found.start()]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MAX_DEPTH:
            raise BadRequest(f"JSON is nested deeper than {MAX_DEPTH} levels")
        if count >= MAX_MARKS:
            raise BadRequest(f"JSON has more than {MAX_MARKS} strings and brackets")


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} appears twice")
            seen.add(key)
    return made


def _no_constants(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value
