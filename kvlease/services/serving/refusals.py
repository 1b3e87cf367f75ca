"""What a door answers in an error's stead: one code, one sentence, and advice when to come again.

The codes are those of docs/rpc.md; a door that speaks another protocol maps them to its own.
"""

from typing import Final

from kvlease.errors import (
    BadInput,
    DeadlineExceeded,
    EngineFull,
    KVLeaseError,
    PagesUnavailable,
    Refused,
    RequestFailed,
)

HTTP_STATUS: Final = {
    "bad_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "too_large": 413,
    "too_many": 429,
    "busy": 429,
    "draining": 503,
    "unavailable": 503,
    "deadline": 504,
    "failed": 500,
    "internal": 500,
}
"""The status of each code that can reach a client of an HTTP door."""


def refusal_of(error: KVLeaseError) -> Refused:
    """Say an error of ours in the words that clients are told."""
    match error:
        case Refused():
            return error
        case EngineFull():
            return Refused("busy", str(error), error.retry_after_s)
        case PagesUnavailable():
            return Refused("busy", str(error), 1.0)
        case BadInput():
            return Refused("bad_request", str(error))
        case DeadlineExceeded():
            return Refused("deadline", str(error))
        case RequestFailed():
            return Refused("failed", str(error))
        case _:
            return Refused("unavailable", f"the engine cannot serve now: {error}")
