"""What the client raises, and the failure of one item."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.errors import EncoderError

if TYPE_CHECKING:
    from encoder.client.results import EncodeResult

_NAMED_IN_MESSAGE = 3


def one_line(text: str) -> str:
    """`text` with every run of white space, line ends included, made one space."""
    return " ".join(text.split())


@dataclass(frozen=True)
class ItemError:
    """Why one item got no vector.

    index: place of the item in the caller's input. source: its path, or what it is (`bytes`, `array`, `PIL image`,
    `text`); never its content. code: name of a gRPC status code; INVALID_ARGUMENT for what the client itself refused.
    """

    index: int
    source: str
    code: str
    message: str

    def __str__(self) -> str:
        return f"#{self.index} ({self.source}): {self.code}: {self.message}"


class EncodeError(EncoderError):
    """Some items got no vector. Nothing good is lost: `result` holds the others.

    result: the EncodeResult that `on_error="mask"` would have returned. errors: all failed items, by index.
    code: the failures' common status code, or UNKNOWN when they differ.
    """

    code: str  # type: ignore[misc]

    def __init__(self, result: EncodeResult) -> None:
        self.result = result
        self.errors: tuple[ItemError, ...] = tuple(result.errors[index] for index in sorted(result.errors))
        codes = {error.code for error in self.errors}
        self.code = codes.pop() if len(codes) == 1 else "UNKNOWN"
        super().__init__(_failed_items(self.errors, len(result.ok)))

    def __reduce__(self) -> tuple[type[EncodeError], tuple[EncodeResult]]:
        return EncodeError, (self.result,)


def _failed_items(errors: tuple[ItemError, ...], total: int) -> str:
    named = "; ".join(str(error) for error in errors[:_NAMED_IN_MESSAGE])
    more = len(errors) - _NAMED_IN_MESSAGE
    rest = f"; and {more} more" if more > 0 else ""
    return one_line(f"{len(errors)} of {total} items failed: {named}{rest}; .errors lists all, .result has the others")


class ServiceError(EncoderError):
    """A whole call failed: no service, not allowed, too late, or an answer that breaks the contract.

    code: name of the gRPC status code. message: one line with the reason and the next step. result: what an encode
    call had collected until then (the items without an answer carry this error's code), else None.
    """

    code: str  # type: ignore[misc]

    def __init__(self, code: str, message: str, result: EncodeResult | None = None) -> None:
        self.code = code
        self.message = one_line(message)
        self.result = result
        super().__init__(f"{code}: {self.message}")

    def __reduce__(self) -> tuple[type[ServiceError], tuple[str, str, EncodeResult | None]]:
        return ServiceError, (self.code, self.message, self.result)


def service_error(code: str, details: str, *, address: str, timeout: float, has_token: bool) -> ServiceError:
    """The ServiceError for a call that ended with `code`, with a next step where the service cannot have named one."""
    return ServiceError(code, _explain(code, details, address, timeout, has_token))


def _explain(code: str, details: str, address: str, timeout: float, has_token: bool) -> str:
    if code == "UNAVAILABLE":
        return _explain_unavailable(details, address)
    if code == "DEADLINE_EXCEEDED":
        return f"no answer from {address} within {timeout:g} s: raise timeout=, or send less at once with batch_size="
    if code == "RESOURCE_EXHAUSTED" and is_message_too_large(details):
        return f"{details}: make max_message_bytes= no larger than what {address} takes"
    if code == "UNAUTHENTICATED" and not has_token:
        return f"{details or 'no token was sent'}: pass token= to the client"
    if code == "UNIMPLEMENTED":
        return f"the service at {address} lacks this call ({details}): is it a vitfleet of this version?"
    if code == "NOT_FOUND" and not details:
        return f"{address} has nothing of that name: leave the name out, or look at what `vitfleet models` lists"
    return details or f"{address} gave no reason: see the log of the service"


def _explain_unavailable(details: str, address: str) -> str:
    if _mentions(details, ("handshake", "certificate")):
        return f"no TLS connection to {address}: check root_certificates= and server_name= ({details})"
    if _mentions(details, ("errors resolving", "dns resolution", "name resolution")):
        return f"the name in {address} does not resolve: check the address ({details})"
    if _mentions(details, ("failed to connect", "connection refused")):
        return f"no service at {address}: start one with `vitfleet serve`"
    return f"{address} does not answer now ({details or 'no reason given'}): try again later"


def is_message_too_large(details: str) -> bool:
    """Whether RESOURCE_EXHAUSTED speaks of gRPC's message limit (grpc core's wording) and not of a full queue."""
    return _mentions(details, ("message larger than max",))


def _mentions(details: str, phrases: Iterable[str]) -> bool:
    lowered = details.lower()
    return any(phrase in lowered for phrase in phrases)
