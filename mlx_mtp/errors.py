"""The hierarchy of errors, each with its HTTP status, type and code, which subclasses inherit.

`RequestError` is the client's fault (4xx), `EngineError` the server's (5xx); the other errors end a
command.
"""

UNEXPECTED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors raised while reading foreign JSON if a value is missing, huge or of another type."""
UNKNOWN_RETRY_SECONDS = 2
"""`retry_after` of an error that can end at any time."""


def is_fault(error: BaseException) -> bool:
    """Returns True for an `Exception`, or for a library's Rust panic, which isn't one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class MlxMtpError(Exception):
    """An error raised on purpose; `param` is the field at fault, `retry_after` is in seconds."""

    # Fields of the HTTP response.
    status: int = 500
    type: str = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self, message: str = "", *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        # Messages of templates and libraries can have a lone surrogate, which can't be encoded.
        super().__init__(message.encode(errors="backslashreplace").decode())
        self.param, self.retry_after = param, retry_after

    def __init_subclass__(cls, **values: int | str | None) -> None:
        for name, value in values.items():
            setattr(cls, name, value)


class UsageError(MlxMtpError):
    """The command line, an environment variable or a setting is wrong."""


class BenchError(MlxMtpError):
    """A measured server can't be reached, refuses a request, or deviates from the API."""


class BackendError(MlxMtpError):
    """mlx has no backend, or the backend can't run what was requested."""


class ServiceError(MlxMtpError):
    """launchd or systemd is missing, refuses a command, or has a job that is not ours."""


class RankError(MlxMtpError):
    """A rank can't be reached, or was lost."""


class ModelError(MlxMtpError):
    """A model can't be used."""


class UnsupportedModelError(ModelError):
    """No family in the registry serves this model_type."""


class MissingHeadError(ModelError):
    """MTP was requested, but the model has no head."""


class CheckpointError(ModelError):
    """A checkpoint's file or tensor is missing, misshapen or damaged."""


class ConvertError(ModelError):
    """A conversion isn't possible; nothing was changed."""


class RequestError(MlxMtpError, status=400, type="invalid_request_error", code=None):
    """The client's request can't be served as it is."""


class InvalidRequestError(RequestError, code="invalid_value"):
    """A field's value is of the wrong type or out of range."""


class PreviousResponseError(InvalidRequestError, code="previous_response_not_found"):
    """The response that a request continues is not stored."""


class GrammarError(InvalidRequestError, code="invalid_grammar"):
    """A schema, expression or grammar can't be compiled, or can't be followed to its end."""


class UnsupportedParameterError(RequestError, code="unsupported_parameter"):
    """This server does not support a field, or a value of it."""


class UnsupportedRouteError(RequestError, code="unsupported_route"):
    """This server does not support a part of the API."""


class ContextLengthError(RequestError, code="context_length_exceeded"):
    """Prompt and answer do not fit the context."""


class AuthenticationError(
    RequestError, status=401, type="authentication_error", code="invalid_api_key"
):
    """The request has no API key, or a wrong one."""


class ForbiddenError(RequestError, status=403, type="permission_error", code="forbidden"):
    """The request is understood and refused."""


class NotFoundError(RequestError, status=404, type="not_found_error", code="not_found"):
    """There is no such route or model."""


class ModelNotFoundError(NotFoundError, code="model_not_found"):
    """The request names a model that is not served here."""


class BodyTimeoutError(RequestError, status=408, type="timeout_error", code="body_timeout"):
    """The body did not arrive in time."""


class PayloadTooLargeError(RequestError, status=413, code="payload_too_large"):
    """The body is larger than the server reads."""


class UnsupportedMediaTypeError(RequestError, status=415, code="unsupported_media_type"):
    """The headers say that the body is not plain JSON."""


class QueueFullError(RequestError, status=429, type="rate_limit_error", code="rate_limit_exceeded"):
    """The queue is full."""


class HeadersTooLargeError(RequestError, status=431, code="headers_too_large"):
    """The request line or the headers are too long, or there are too many headers."""


class EngineError(MlxMtpError):
    """The server failed, not the client."""


class StepError(EngineError, code="step_failed"):
    """A step failed, and with it the requests in it."""


class StepMemoryError(StepError, code="out_of_memory"):
    """A step ran out of memory, and with it the requests in it failed."""


class RequestTimeoutError(EngineError, status=504, type="timeout_error", code="request_timeout"):
    """A request took longer than this server allows, waiting included."""


class RequestCancelledError(EngineError, status=503, code="request_cancelled"):
    """An operator of the server cancelled the request."""


class EngineStoppedError(EngineError, status=503, code="engine_stopped"):
    """The engine accepts no requests, as it is shutting down or its thread died."""


class DrainingError(EngineStoppedError, code="shutting_down"):
    """The server accepts no new requests, and ends when the running ones are done."""


class EngineHungError(EngineStoppedError, code="engine_hung"):
    """The engine accepts no new requests while a step hangs."""


class UnavailableError(EngineError, status=503, code="unavailable"):
    """A process that the request needs can't be started, or was killed."""


class BytesLimitError(EngineError, status=503, code="too_many_bytes"):
    """The memory for requests' bodies and unread answers is used up."""


class ConnectionLimitError(EngineStoppedError, code="too_many_connections"):
    """The limit of connections is reached, and all of them are busy."""
