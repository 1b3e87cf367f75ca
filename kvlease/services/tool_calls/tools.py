"""The tools a request offers, and whether arguments fit a tool's JSON schema.

Schemas and arguments both come from outside: nothing is fetched for a schema, patterns have a
bounded cost, and what would take too long to check is refused.
"""

import importlib
from collections.abc import Iterable, Iterator
from typing import Protocol, cast, final

from attrs import frozen

from kvlease.errors import BadInput
from kvlease.services.tool_calls.schema_cost import CostCounter, check_schema
from kvlease.services.tool_calls.strict_json import MAX_DEPTH

MAX_COST = 2_000
"""How often one value may be looked at; schemas without recursion need a few dozen."""
MAX_WORK = 1_000_000
"""How many looks all values of a call's arguments may take together; a second or so."""
MAX_BACKTRACKING = 10_000
"""Steps back that one pattern may take on one string."""
_MAX_MESSAGE = 300


@frozen
class ToolSpec:
    """A tool as a client offers it; ``parameters`` is a JSON schema, None or empty for any."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None


class _Failure(Protocol):
    """The part used of a validation error."""

    message: str
    instance_path: list[str | int]


class _Validator(Protocol):
    """The part used of a validator."""

    def iter_errors(self, instance: object) -> Iterator[_Failure]:
        """Yield what is wrong with a value."""
        ...


def _refuse(uri: str) -> object:
    raise ValueError(f"{uri} is not fetched: schemas of tools have to be whole")


def _compile(tool: ToolSpec) -> _Validator:
    """Make a tool's validator; raises BadInput."""
    try:
        schemas = importlib.import_module("jsonschema_rs")
    except ImportError as error:
        raise BadInput(
            "checking tool calls needs the package jsonschema-rs (extra `serve`); install it"
        ) from error
    try:
        options = schemas.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKING)
        made = schemas.validator_for(tool.parameters, retriever=_refuse, pattern_options=options)
    except (ValueError, RecursionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:_MAX_MESSAGE]
        raise BadInput(
            f"the parameters of tool {tool.name!r} are no usable JSON schema: {reason}"
        ) from error
    return cast("_Validator", made)


@final
class _Checker:
    """Checks the arguments of one tool."""

    def __init__(self, tool: ToolSpec) -> None:
        schema = tool.parameters or {}
        try:
            check_schema(schema)
        except BadInput as error:
            raise BadInput(f"the parameters of tool {tool.name!r}: {error}") from error
        self._costs = CostCounter(schema, MAX_COST)
        self._validator = _compile(tool) if schema else None

    def complaint(self, arguments: dict[str, object]) -> str | None:
        """Return what is wrong with arguments, or None."""
        if self._validator is None:
            return None
        depth, count = _size(arguments)
        cost = self._costs.cost(depth)
        if cost > MAX_COST or cost * count > MAX_WORK:
            return "they nest too deeply, or are too many, to be checked against this schema"
        failure = next(self._validator.iter_errors(arguments), None)
        if failure is None:
            return None
        where = "".join(f"[{part!r}]" for part in failure.instance_path)
        return f"{where + ': ' if where else ''}{failure.message[:_MAX_MESSAGE]}"


def _size(value: object) -> tuple[int, int]:
    """Return how deep a value nests, and how many values it has; parsers have bounded the depth."""
    if isinstance(value, dict):
        inner: Iterable[object] = cast("dict[str, object]", value).values()
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return 0, 1
    depth, count = 0, 1
    for item in inner:
        its_depth, its_count = _size(item)
        depth, count = max(depth, its_depth), count + its_count
    return depth + 1, count


@final
class Toolbox:
    """The tools of one request, ready to check calls."""

    def __init__(self, tools: Iterable[ToolSpec] = ()) -> None:
        """Compile the schemas; raises BadInput naming the tool whose definition cannot work."""
        self.tools = tuple(tools)
        self._checkers: dict[str, _Checker] = {}
        for tool in self.tools:
            if not tool.name or '"' in tool.name:
                raise BadInput(f"a tool is called {tool.name!r}; give it a name without quotes")
            if tool.name in self._checkers:
                raise BadInput(f"two tools are called {tool.name!r}; names have to differ")
            self._checkers[tool.name] = _Checker(tool)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tool of that name."""
        return name in self._checkers

    def complaint(self, name: str, arguments: dict[str, object]) -> str | None:
        """Return in a few words why a tool would not take these arguments, or None."""
        return self._checkers[name].complaint(arguments)


NO_TOOLS = Toolbox()
"""What a request without tools offers: every call is a call of an unknown tool."""

__all__ = ["MAX_DEPTH", "NO_TOOLS", "ToolSpec", "Toolbox"]
