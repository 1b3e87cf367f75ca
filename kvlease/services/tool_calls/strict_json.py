"""JSON as it stands inside markup: where it ends, and whether it is valid without doubt.

Strict means: no name twice in an object, no NaN, no nesting that only an attack would have.
"""

import json
import re
from typing import NoReturn, final

MAX_DEPTH = 64
"""Arrays and objects inside each other; arguments of tools need a few."""

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


class JsonError(ValueError):
    """The text is no acceptable JSON; the text of the error says why."""


class DuplicateName(JsonError):
    """An object has one name twice, so what it says depends on who reads it."""


@final
class JsonScanner:
    """Finds where JSON may end, through text in any split; does not check it."""

    def __init__(self) -> None:
        """Start before the first character."""
        self.depth = 0
        self._in_text = False
        self._is_escaped = False

    def scan(self, text: str, start: int) -> int:
        """Go on from ``start`` and return where to stop, or the text's length.

        Stops at ``<`` outside of strings, which no JSON has, behind the bracket that closes the
        outermost object or array, and at the bracket that nests deeper than MAX_DEPTH.
        """
        place = start
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            match = (_INSIDE if self._in_text else _OUTSIDE).search(text, place)
            if match is None:
                return len(text)
            char, place = match.group(), match.end()
            if char == '"':
                self._in_text = not self._in_text
            elif char == "\\":
                self._is_escaped = True
            elif char == "<":
                return match.start()
            elif char in "{[":
                if self.depth == MAX_DEPTH:
                    return match.start()
                self.depth += 1
            else:
                self.depth -= 1
                if self.depth <= 0:
                    return place
        return place


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise DuplicateName(f"the name {name!r} appears twice")
            seen.add(name)
    return made


def _constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is no JSON")


def parse(text: str) -> object:
    """Return the value of a JSON text; raises JsonError."""
    try:
        value: object = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except JsonError:
        raise
    except UnicodeEncodeError as error:
        raise JsonError("it has half of a surrogate pair") from error
    except (ValueError, RecursionError) as error:
        raise JsonError(str(error)) from error
    return value
