"""Errors as OpenAI's API shows them, and how the core's refusals become them."""

from __future__ import annotations

from math import ceil
from typing import TypeVar

import msgspec

from services.ingress.calls.messages import RefusalKind

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")

INVALID_REQUEST = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """An error that ends a request with an HTTP status and an OpenAI-shaped body.

    Attributes:
        param: The request field to change; None where no field is at fault.
        code: Short machine-readable name; None for none.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return _encode({"error": error})


def bad_value(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    """400: a parameter's value cannot be used."""
    return ApiError(400, message, param=param, code=code)


def missing(param: str) -> ApiError:
    """400: a parameter has to be there."""
    return bad_value(param, f"Missing parameter: `{param}`.", "missing_parameter")


def required(value: T | None, param: str) -> T:
    """The value of a parameter.

    Raises:
        ApiError: 400 where it is not there, or empty.
    """
    if not value:
        raise missing(param)
    return value


def unsupported(param: str, message: str) -> ApiError:
    """400: a parameter, or this value of it, is not supported here."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unknown_model(name: str) -> ApiError:
    """404 as OpenAI words it."""
    return ApiError(404, f"The model `{name}` does not exist.", param="model", code="model_not_found")


#: Refusal kind -> (HTTP status, OpenAI error type, code).
REFUSALS: dict[RefusalKind, tuple[int, str, str]] = {
    RefusalKind.RATE_LIMITED: (429, "rate_limit_error", "rate_limit_exceeded"),
    RefusalKind.CONCURRENCY: (429, "rate_limit_error", "concurrency_limit_exceeded"),
    RefusalKind.QUEUE_FULL: (503, SERVER, "queue_full"),
    RefusalKind.NO_INSTANCE: (503, SERVER, "no_instance"),
    RefusalKind.UNKNOWN_MODEL: (404, INVALID_REQUEST, "model_not_found"),
    RefusalKind.TOO_LONG: (400, INVALID_REQUEST, "context_length_exceeded"),
    RefusalKind.INVALID: (400, INVALID_REQUEST, "invalid_value"),
    RefusalKind.AT_FAULT: (400, INVALID_REQUEST, "engine_failed_on_request"),
    RefusalKind.TIMEOUT: (504, SERVER, "timeout"),
    RefusalKind.CONTINUATION_FAILED: (503, SERVER, "continuation_failed"),
    RefusalKind.STOPPING: (503, SERVER, "stopping"),
}


def refusal(kind: RefusalKind, detail: str, param: str = "", retry_after_s: float = 0.0) -> ApiError:
    """The client's error for the core's RefuseCall or FailCall."""
    status, error_type, code = REFUSALS[kind]
    headers = ((b"retry-after", b"%d" % max(1, ceil(retry_after_s))),) if retry_after_s > 0 else ()
    return ApiError(status, detail, kind=error_type, param=param or None, code=code, headers=headers)
