"""The one tree of errors, and what each becomes in HTTP; a class without a value has its parent's.

`RequestError` is the client's fault (4xx), `EngineError` the server's (5xx); others end commands.
"""

UNEXPECTED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading another program's JSON raises where a value is missing, of another type or huge."""
UNKNOWN_RETRY_SECONDS = 2
"""`retry_after` of an error that may be over at any time."""


UNKNOWN_RETRY_SECONDS = 2
"""After which a client may try again where nothing tells when the server will be able to answer."""


def is_fault(error: BaseException) -> bool:
    """Whether a library failed, by an exception or a panic of Rust's, which is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class MlxMtpError(Exception):
    """An error raised on purpose; `param` is the field at fault, `retry_after` are seconds."""

    # Of the HTTP response.
    status: int = 500
    type: str = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self, message: str = "", *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        # A template's or a library's words may have half of a surrogate pair, which no body can.
        super().__init__(message.encode(errors="backslashreplace").decode())
        self.param, self.retry_after = param, retry_after

    def __init_subclass__(cls, **values: int | str | None) -> None:
        for name, value in values.items():
            setattr(cls, name, value)


class UsageError(MlxMtpError):
    """The command line, an environment variable or a setting is wrong."""


class BenchError(MlxMtpError):
    """A server that is measured can't be reached, refuses, or doesn't answer as the API has it."""


class BackendError(MlxMtpError):
    """mlx is missing its backend, or the backend can't run what was asked."""


class RankError(MlxMtpError):
    """Of the ranks that compute a model together one can't be reached, or is lost."""


class ModelError(MlxMtpError):
    """A model can't be used."""


class UnsupportedModelError(ModelError):
    """No family in the registry serves this model_type."""


class MissingHeadError(ModelError):
    """MTP was asked for and the model has no head."""


class CheckpointError(ModelError):
    """A checkpoint's file or tensor is missing, misshapen or damaged."""


class ConvertError(ModelError):
    """The converter can't make what was asked, and has left everything as it was."""


class RequestError(MlxMtpError, status=400, type="invalid_request_error", code=None):
    """The client's request can't be served as it is."""


class InvalidRequestError(RequestError, code="invalid_value"):
    """A field's value is of the wrong type or out of range."""


class PreviousResponseError(InvalidRequestError, code="previous_response_not_found"):
    """The response that a request continues is not stored."""


class GrammarError(InvalidRequestError, code="invalid_grammar"):
    """A schema, expression or grammar that can't be compiled, or can't be followed to its end."""


class UnsupportedParameterError(RequestError, code="unsupported_parameter"):
    """A field, or a value of it, that this server does not offer."""


class UnsupportedRouteError(RequestError, code="unsupported_route"):
    """A part of the API that this server does not offer."""


class ContextLengthError(RequestError, code="context_length_exceeded"):
    """Prompt and answer do not fit the context."""


class AuthenticationError(
    RequestError, status=401, type="authentication_error", code="invalid_api_key"
):
    """No key, or a wrong one."""


class ForbiddenError(RequestError, status=403, type="permission_error", code="forbidden"):
    """The request is understood and refused."""


class NotFoundError(RequestError, status=404, type="not_found_error", code="not_found"):
    """No such route or model."""


class ModelNotFoundError(NotFoundError, code="model_not_found"):
    """The request names a model that is not served here."""


class BodyTimeoutError(RequestError, status=408, type="timeout_error", code="body_timeout"):
    """The body did not arrive in time."""


class PayloadTooLargeError(RequestError, status=413, code="payload_too_large"):
    """The body is larger than the server reads."""


class UnsupportedMediaTypeError(RequestError, status=415, code="unsupported_media_type"):
    """The body is not plain JSON, by what its headers say."""


class QueueFullError(RequestError, status=429, type="rate_limit_error", code="rate_limit_exceeded"):
    """As many sequences wait as may."""


class HeadersTooLargeError(RequestError, status=431, code="headers_too_large"):
    """The request line and headers are longer, or more, than the server reads."""


class EngineError(MlxMtpError):
    """The server failed, not the client."""


class StepError(EngineError, code="step_failed"):
    """A step failed; the requests that were in it end with this."""


class StepMemoryError(StepError, code="out_of_memory"):
    """A step ran out of memory; the requests that were in it end with this."""


class RequestTimeoutError(EngineError, status=504, type="timeout_error", code="request_timeout"):
    """A request has waited and run for longer than this server allows."""


class RequestCancelledError(EngineError, status=503, code="request_cancelled"):
    """Somebody who looks after the server has ended the request."""


class EngineStoppedError(EngineError, status=503, code="engine_stopped"):
    """The engine takes no requests: it is shutting down, or its thread died."""


class DrainingError(EngineStoppedError, code="shutting_down"):
    """The server takes no new requests: it ends when those that it has are done."""


class EngineHungError(EngineStoppedError, code="engine_hung"):
    """The engine takes no new requests while a step doesn't end."""


class UnavailableError(EngineError, status=503, code="unavailable"):
    """A process that the request needs can't be started, or was ended from outside."""


class BytesLimitError(EngineError, status=503, code="too_many_bytes"):
    """Other requests' bodies and unread answers take the memory that there is for them."""


class ConnectionLimitError(EngineStoppedError, code="too_many_connections"):
    """As many clients are connected, and busy, as may."""
