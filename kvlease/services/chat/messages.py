"""A conversation as the doors have it: who said what, and which calls were made and answered."""

from typing import TypeAlias

from attrs import frozen

from kvlease.services.tool_calls.markup import Call


@frozen
class SystemMessage:
    """Instructions of whoever runs the application."""

    text: str


@frozen
class UserMessage:
    """What a person says."""

    text: str


@frozen
class AssistantMessage:
    """An earlier answer as its client keeps it; ``reasoning`` None where it has none of it."""

    text: str
    calls: tuple[Call, ...] = ()
    call_ids: tuple[str, ...] = ()
    reasoning: str | None = None


@frozen
class ToolMessage:
    """A tool's result; ``call_id`` names the call it answers."""

    text: str
    call_id: str = ""


Message: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolMessage
