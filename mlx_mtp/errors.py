"""The one tree of errors.

    MlxMtpError
    |-- UsageError              the command line or a setting is wrong (exit status 2)
    |-- ModelError              a model can't be used
    |   |-- UnsupportedModelError   no family for its model_type
    |   |-- MissingHeadError        --enable-mtp, and there is no MTP head
    |   |-- CheckpointError         a tensor or a file is missing, misshapen or damaged
    |   `-- ConvertError            the converter can't make what was asked; nothing was changed
    |-- RequestError            the client's fault (HTTP 4xx), with the field at fault in `param`
    |   |-- InvalidRequestError     400
    |   |   `-- GrammarError            400, code invalid_grammar
    |   |-- UnsupportedParameterError   400
    |   |-- ContextLengthError      400
    |   |-- AuthenticationError     401
    |   |-- ForbiddenError          403
    |   |-- NotFoundError           404
    |   |   `-- ModelNotFoundError      404, code model_not_found
    |   |-- PayloadTooLargeError    413
    |   |-- BodyTimeoutError        408
    |   |-- UnsupportedMediaTypeError   415
    |   |-- QueueFullError          429
    |   `-- HeadersTooLargeError    431
    |-- EngineError             the server's fault (HTTP 5xx)
    |   |-- StepError               a step failed: the requests in it end with this (500)
    |   |   `-- StepMemoryError         out of memory (500, code out_of_memory)
    |   |-- RequestTimeoutError     a request waited or ran for too long (504)
    |   `-- EngineStoppedError      the engine is shutting down or dead (503)
    |       |-- DrainingError           no new requests: the server is shutting down
    |       |-- EngineHungError         no new requests: a step doesn't end
    |       `-- ConnectionLimitError    too many clients are connected
    |-- BenchError              a server that is measured failed or gave no answer (exit status 1)
    `-- BackendError            mlx has no backend here, or the one it has can't do this

Every message says what was wrong and what would be right. `server/http_errors.py` is the one place
that turns these into HTTP answers.
"""

from __future__ import annotations


class MlxMtpError(Exception):
    """Base of all errors raised on purpose by this package."""


class UsageError(MlxMtpError):
    """The command line, an environment variable or a setting is wrong."""


class BenchError(MlxMtpError):
    """A server that is measured can't be reached, refuses, or doesn't answer as the API has it."""


class BackendError(MlxMtpError):
    """mlx is missing its backend, or the backend can't run what was asked."""


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


class RequestError(MlxMtpError):
    """The client's request can't be served as it is.

    Args:
        message: what was wrong and what would be right.
        param: the request's field at fault, if there is one.
        retry_after: seconds after which another try makes sense, if it is only a matter of time.
    """

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after = retry_after


class InvalidRequestError(RequestError):
    """A field's value is of the wrong type or out of range."""

    code = "invalid_value"


class GrammarError(InvalidRequestError):
    """A schema, expression or grammar that can't be compiled, or can't be followed to its end."""

    code = "invalid_grammar"


class UnsupportedParameterError(RequestError):
    """A field, or a value of it, that this server does not offer."""

    code = "unsupported_parameter"


class ContextLengthError(RequestError):
    """Prompt and answer do not fit the context."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The request is understood and refused."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFoundError(RequestError):
    """No such route or model."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class PayloadTooLargeError(RequestError):
    """The body is larger than the server reads."""

    status = 413
    code = "payload_too_large"


class UnsupportedMediaTypeError(RequestError):
    """The body is not plain JSON, by what its headers say."""

    status = 415
    code = "unsupported_media_type"


class HeadersTooLargeError(RequestError):
    """The request line and headers are longer, or more, than the server reads."""

    status = 431
    code = "headers_too_large"


class BodyTimeoutError(RequestError):
    """The body did not come in time."""

    status = 408
    type = "timeout_error"
    code = "body_timeout"


class QueueFullError(RequestError):
    """As many requests wait as may."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class EngineError(MlxMtpError):
    """The server failed, not the client.

    Args:
        message: what happened.
        retry_after: seconds after which another try makes sense, if it is only a matter of time.
    """

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StepError(EngineError):
    """A step failed; the requests that were in it end with this."""

    code = "step_failed"


class StepMemoryError(StepError):
    """A step ran out of memory; the requests that were in it end with this."""

    code = "out_of_memory"


class RequestTimeoutError(EngineError):
    """A request has waited and run for longer than this server allows."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"


class EngineStoppedError(EngineError):
    """The engine takes no requests: it is shutting down, or its thread died."""

    status = 503
    code = "engine_stopped"


class DrainingError(EngineStoppedError):
    """The server takes no new requests: it ends when those that it has are done."""

    code = "shutting_down"


class EngineHungError(EngineStoppedError):
    """The engine takes no new requests while a step doesn't end."""

    code = "engine_hung"


class ConnectionLimitError(EngineStoppedError):
    """As many clients are connected, and busy, as may."""

    code = "too_many_connections"
