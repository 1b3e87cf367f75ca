"""Errors in the form that OpenAI's clients parse: status, body and headers."""

import math
import re

import msgspec
from attrs import frozen

from kvlease.errors import BadInput, KVLeaseError, Refused
from kvlease.services.openai_http.replies import ErrorBody, ErrorReply
from kvlease.services.serving.refusals import HTTP_STATUS, refusal_of
from kvlease.services.tool_calls.events import CallError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PLACE = re.compile(r" - at `\$\.?(?P<place>[^`]*)`$")


class ParameterError(BadInput):
    """A request cannot be served as it is; ``param`` names the field, where there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        """Keep field and code beside the sentence."""
        super().__init__(message)
        self.param = param
        self.code = code

    @classmethod
    def of_body(
        cls, error: msgspec.MsgspecError | UnicodeError | RecursionError
    ) -> "ParameterError":
        """Say what a decoder found wrong with a body."""
        text = str(error)
        place = _PLACE.search(text)
        if isinstance(error, RecursionError):
            return cls("the body nests too deep")
        if place is None:
            is_json = isinstance(error, msgspec.ValidationError)
            return cls(f"the body is no {'request' if is_json else 'JSON'}: {text}")
        return cls(_PLACE.sub("", text), place["place"] or None)


class MalformedCall(Refused):
    """The model wrote a tool call that is none; its text is in the event log."""

    def __init__(self, error: CallError) -> None:
        """Say what was wrong, without the text."""
        super().__init__(
            "failed",
            f"the model's tool call is malformed ({error.reason}): {error.message}",
        )
        self.error = error


@frozen
class HttpError:
    """An error ready to be sent."""

    status: int
    body: ErrorReply
    headers: list[tuple[bytes, bytes]]


def http_error(error: KVLeaseError) -> HttpError:
    """Put an error into the words of the protocol."""
    refusal = refusal_of(error)
    status = HTTP_STATUS.get(refusal.code, 503)
    param, code = None, refusal.code
    headers: list[tuple[bytes, bytes]] = []
    # What was refused because of the request may be the cause of the refusal.
    cause = error if isinstance(error, ParameterError) else error.__cause__
    if isinstance(cause, ParameterError):
        param, code = cause.param, cause.code or "bad_request"
        status = {"model_not_found": 404, "too_slow": 408}.get(code, status)
    if isinstance(error, MalformedCall):
        code = f"malformed_tool_call_{error.error.reason}"
        headers.append((b"x-should-retry", b"false"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.retry_after_s is not None:
        seconds = max(1, math.ceil(refusal.retry_after_s))
        headers.append((b"retry-after", b"%d" % seconds))
    default = "server_error" if status >= 500 else "invalid_request_error"
    body = ErrorBody(str(refusal), _TYPES.get(status, default), param, code)
    return HttpError(status, ErrorReply(body), headers)
