"""Every error kvlease raises on purpose, in one tree.

The branch says what the caller can do: `BadInput` is wrong data from outside (the command line
prints its one sentence and exits 2), `UsageError` is wrong code, `OperatingError` is expected in
operation and is handled by callers and supervisors, `InternalError` means an invariant is false
and is never swallowed. This module imports nothing of kvlease.
"""

from collections.abc import Iterator
from typing import cast


class KVLeaseError(Exception):
    """Root of the tree; its text is one sentence that says what, where and what to do.

    Attributes:
        rule: which of the rules (R1 to R14) a guard kept by raising this; empty if none. The event
            log names it where the error ends a step or an actor.
    """

    rule: str = ""


class BadInput(KVLeaseError):
    """Data from outside is not acceptable: a flag, a file, a prompt."""


class ConfigError(BadInput):
    """A configuration value, or a combination of values, cannot work."""


class ModelLoadError(BadInput):
    """A checkpoint folder is missing, damaged, or not of a supported kind."""


class PromptError(BadInput):
    """A prompt or its sampling parameters cannot be served by this model and these pools."""


class TraceError(BadInput):
    """A workload trace holds a line that is not of its format."""


class UsageError(KVLeaseError):
    """The caller broke a contract; the code that called has to change."""

    def __init__(self, message: str, rule: str = "") -> None:
        """Keep the rule that would have been broken beside the sentence."""
        super().__init__(message)
        self.rule = rule or self.rule


class LeaseMoved(UsageError):
    """A lease was used after it was closed, frozen, or sent away."""

    rule = "R8"


class LayoutMismatch(UsageError):
    """Shape, dtype or stride of rows disagree with the pool's."""


class SealedPage(UsageError):
    """A write was aimed at a row below the open page; sealed pages never change."""

    rule = "R4"


class OperatingError(KVLeaseError):
    """Expected in operation; a supervisor restarts on it, a caller handles it."""


class NotReady(OperatingError):
    """The layer's bytes have not arrived (the answer of the `_nowait` forms)."""

    rule = "R2"


class PagesUnavailable(OperatingError):
    """The pool has too few pages now; waiting or evicting may free some."""


class EngineFull(OperatingError):
    """The engine takes no more requests now.

    Attributes:
        retry_after_s: seconds after which trying again is sensible.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        """Keep the advice beside the sentence."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StaleEpoch(OperatingError):
    """A reference is older than the thing it names; somebody else may hold the page now."""

    rule = "R8"


class TransferFailed(OperatingError):
    """A movement of pages failed, came short, was revoked, or was too late.

    Attributes:
        reason: one word for counters and logs: ``failed``, ``short``, ``late``, ``revoked``.
    """

    def __init__(self, message: str, reason: str = "failed") -> None:
        """Keep the one-word reason beside the sentence."""
        super().__init__(message)
        self.reason = reason


class PageMismatch(OperatingError):
    """A page's bytes are not those that it was sealed with; nothing may be computed from them."""


class DeadlineExceeded(OperatingError):
    """A wait with an owner and a name outlived its deadline."""


class ActorClosed(OperatingError):
    """The actor was closed on purpose; its mailbox takes no more messages."""


class ActorBroken(OperatingError):
    """The actor failed; the cause is attached."""


class RequestFailed(OperatingError):
    """A request ended without an answer; the sentence says why."""


class Refused(OperatingError):
    """A server did not take a call, or did not finish it.

    Attributes:
        code: one word, of those in docs/rpc.md; the same at every door.
        retry_after_s: seconds after which trying again is sensible; None where it is not.
    """

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        """Keep code and advice beside the sentence."""
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class ConnectionLost(OperatingError):
    """A connection broke under a call: whether the server carried it out cannot be known."""


class InternalError(KVLeaseError):
    """An invariant is false; never restarted, never swallowed."""

    def __init__(self, message: str, rule: str = "") -> None:
        """Keep the rule that would have been broken beside the sentence."""
        super().__init__(message)
        self.rule = rule or self.rule


class IllegalTransition(InternalError):
    """A state machine was asked for a step that its table does not have."""


class LedgerImbalance(InternalError):
    """The pages of a pool do not add up to its total, or one page is counted twice."""

    rule = "R11"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside nested groups, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        # isinstance cannot name the type argument.
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(inner)
    else:
        yield error


def kept_rule(error: BaseException) -> str:
    """Return the rule that a guard kept by raising this error, or one that led to it; or nothing.

    In groups and along causes the first that names one is taken.
    """
    for leaf in leaves(error):
        cause: BaseException | None = leaf
        while cause is not None:
            if isinstance(cause, KVLeaseError) and cause.rule:
                return cause.rule
            cause = cause.__cause__
    return ""
