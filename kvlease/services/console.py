"""The event log for people: the same objects as in the file, one readable line each on stderr.

Only events of level ``normal`` are shown; an audit log is for programs. This module formats; it
does not know what the events mean.
"""

from collections.abc import Callable
from typing import final

import msgspec
import structlog

from kvlease.protocols.events import Event, LogClose

_TROUBLE = ("fail", "failed", "late", "revoke", "refuse", "discarded", "died", "gap")


@final
class _SayLogger:
    """What structlog hands finished lines to."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.info = say
        self.warning = say


def people_log(say: Callable[[str], None], *, colors: bool) -> Callable[[Event], None]:
    """Return a subscriber that renders events with structlog and says the lines.

    Args:
        say: is given one line an event, without its end.
        colors: whether lines carry terminal colours.
    """
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        _SayLogger(say),
        wrapper_class=structlog.make_filtering_bound_logger(0),
        processors=[
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=18),
        ],
    )
    first_ns: list[int] = []

    def show(event: Event) -> None:
        if event.audit or (not first_ns and isinstance(event, LogClose)):
            return  # a log that is closed before anything was told tells nobody anything
        if not first_ns:
            first_ns.append(event.t_ns)
        fields: dict[str, object] = msgspec.to_builtins(event)
        name = str(fields.pop("event"))
        del fields["seq"], fields["t_ns"]
        fields.pop("components", None)  # for checkers, and longer than any terminal is wide
        fields["at_s"] = round((event.t_ns - first_ns[0]) / 1e9, 3)
        write = logger.warning if name.rpartition(".")[2] in _TROUBLE else logger.info
        write(name, **fields)

    return show
