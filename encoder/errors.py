"""The project's errors. Each carries the canonical gRPC status name it is answered with; none imports grpc."""

from typing import ClassVar, TypeVar

AnyError = TypeVar("AnyError", bound=BaseException)


class EncoderError(Exception):
    """Base of all errors of the project; the message is one line: the thing, the reason, the next step."""

    code: ClassVar[str] = "INTERNAL"


class InvalidInput(EncoderError):
    """The caller's item or argument is wrong."""

    code = "INVALID_ARGUMENT"


class InvalidImage(InvalidInput):
    """An image that cannot be decoded, or is outside the limits."""


class InvalidText(InvalidInput):
    """A text that cannot be tokenised, or is outside the limits."""


class DecoderLost(EncoderError):
    """The process that decoded the picture ended, through no fault of the picture."""


class UnknownModel(EncoderError):
    """A model, or a pool, that is not served here."""

    code = "NOT_FOUND"


class Unsupported(EncoderError):
    """The request is well formed, but this model or device cannot do it."""

    code = "FAILED_PRECONDITION"


class CheckpointError(Unsupported):
    """A checkpoint that cannot be loaded."""


class BackendUnavailable(Unsupported):
    """An attention backend that was asked for by name and cannot run here."""


class Overloaded(EncoderError):
    """Too much is waiting; try again later."""

    code = "RESOURCE_EXHAUSTED"


class DeadlinePassed(EncoderError):
    """The caller's deadline went by before the item was computed."""

    code = "DEADLINE_EXCEEDED"


class NotReady(EncoderError):
    """Starting, draining, or unhealthy; another replica may answer."""

    code = "UNAVAILABLE"


class SelfCheckFailed(EncoderError):
    """No backend of this replica computes the right vectors."""


def without_traceback(error: AnyError) -> AnyError:
    """The error alone, to be kept or answered with.

    The frames of its traceback hold the bytes of the request, and lead in a circle to what holds the error: they would
    stay until Python looks for such circles, hundreds of failures later.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
