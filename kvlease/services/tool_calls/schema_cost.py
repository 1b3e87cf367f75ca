"""How much work a JSON schema may cause, counted before anything is checked with it.

Schemas come from clients. Local references make short ones that take for ever: 24 definitions that
each name the next one twice are 16 million checks of one value. This module only counts.
"""

import re
from collections.abc import Iterator
from typing import TypeAlias, cast, final

from kvlease.errors import BadInput

Json: TypeAlias = object

_SAME_VALUE = frozenset(
    ["allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"]
)
"""Keywords whose schemas are applied to the value itself; all others go to values inside it."""
_FOREIGN = frozenset(["$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$vocabulary"])
_VERBATIM = frozenset(["const", "enum", "default", "examples", "required", "title"])
_MAX_SCHEMA_DEPTH = 64
MAX_PARTS = 5_000
"""Schemas, keywords and names of one tool; large ones have a few hundred."""


def _children(schema: dict[str, Json]) -> Iterator[tuple[str, list[dict[str, Json]]]]:
    """Yield each keyword with the schemas it holds."""
    for keyword, held in schema.items():
        if keyword in _VERBATIM or keyword in ("$defs", "definitions"):
            continue
        if isinstance(held, list):
            items = cast("list[Json]", held)
        elif isinstance(held, dict):
            inner = cast("dict[str, Json]", held)
            named = keyword in ("properties", "patternProperties", "dependentSchemas")
            items = list(inner.values()) if named else [inner]
        else:
            continue
        yield keyword, [cast("dict[str, Json]", i) for i in items if isinstance(i, dict)]


def check_schema(schema: Json, depth: int = 0) -> int:
    """Count a schema's parts; raises BadInput for too many, and references that are not local."""
    if depth > _MAX_SCHEMA_DEPTH:
        raise BadInput(f"it nests deeper than {_MAX_SCHEMA_DEPTH}")
    count = 1
    if isinstance(schema, list):
        count += sum(check_schema(item, depth + 1) for item in cast("list[Json]", schema))
    elif isinstance(schema, dict):
        inner = cast("dict[str, Json]", schema)
        target = inner.get("$ref")
        if isinstance(target, str) and not re.fullmatch(r"#(/.*)?", target, re.DOTALL):
            raise BadInput(f"the reference {target!r} is not local (#/...)")
        for keyword, held in inner.items():
            if keyword in _FOREIGN or (keyword == "$id" and depth):
                raise BadInput(f"the keyword {keyword} is not supported")
            if keyword not in _VERBATIM:
                count += check_schema(held, depth + 1)
    if count > MAX_PARTS:
        raise BadInput(f"it has more than {MAX_PARTS} parts")
    return count


def _resolve(root: dict[str, Json], reference: str) -> dict[str, Json]:
    place = cast("Json", root)
    for part in reference[2:].split("/") if len(reference) > 1 else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = cast("dict[str, Json]", place).get(name)
        elif isinstance(place, list):
            items = cast("list[Json]", place)
            place = items[int(name)] if name.isdecimal() and int(name) < len(items) else None
        else:
            place = None
    return cast("dict[str, Json]", place) if isinstance(place, dict) else {}


@final
class CostCounter:
    """Counts how often one value inside arguments may be looked at, at worst."""

    def __init__(self, schema: dict[str, Json], limit: int) -> None:
        """Borrows the schema; counting stops soon above ``limit``."""
        self._root = schema
        self._limit = limit
        self._known: dict[tuple[int, int], int] = {}

    def cost(self, depth: int) -> int:
        """Return the count for values that nest ``depth`` deep; above the limit it is a bound."""
        return self._cost(self._root, depth)

    def _cost(self, schema: dict[str, Json], depth: int) -> int:
        key = (id(schema), depth)
        if key in self._known:
            return self._known[key]
        self._known[key] = 1  # what refers to itself without going inward is looked at once
        total = 1
        reference = schema.get("$ref")
        if isinstance(reference, str):
            total += self._cost(_resolve(self._root, reference), depth)
        for keyword, held in _children(schema):
            if keyword in _SAME_VALUE:
                total += sum(self._cost(s, depth) for s in held)
            elif depth > 0:
                inner = [self._cost(s, depth - 1) for s in held]
                # Each property is another value; all other keywords may meet in one.
                total += max(inner, default=0) if keyword == "properties" else sum(inner)
            if total > self._limit:
                break
        self._known[key] = total
        return total
