"""The end of a request: terminal for its caller and told to the log, exactly once, in one call.

Every way out comes here: a complete answer, a cancel, a deadline, an engine that goes away (R9).
"""

from kvlease.errors import KVLeaseError
from kvlease.protocols.events import RequestFailed, RequestFinished
from kvlease.runtime.core import EngineCore
from kvlease.runtime.request import Request


def end_request(
    core: EngineCore, request: Request, reason: str, error: KVLeaseError | None
) -> None:
    """Make a request terminal and write that; only the first end counts."""
    if request.ended.is_set():
        return
    request.hand_over(core.clock.now())
    request.end(reason, error)
    core.figures.note_end(request, reason)
    if not core.sink.normal:
        return
    usage = request.usage()
    if error is not None:
        core.sink.emit(RequestFailed(request=request.id, reason=str(error), usage=usage))
        return
    first = request.first_token_s
    core.sink.emit(
        RequestFinished(
            request=request.id,
            reason=reason,
            usage=usage,
            ttft_us=0 if first is None else round((first - request.submitted_s) * 1e6),
            answer=request.answer_hash(),
        )
    )
