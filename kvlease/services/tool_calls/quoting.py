"""Whether markup that comes next in a text would be quoted, and so be ordinary text.

It is quoted inside a fenced code block, inside an inline code span, and from a quotation mark that
stands directly before it to the end of the line. Everything else is meant. This module looks at
text in any split and knows no tags.
"""

import re
from typing import final

_PIECES = re.compile(r"`+|~+|\n|[^`~\n]+")
_MARKS = frozenset("\"'\u201c\u2018\u00ab\u300c\u300e")
_FENCE_LENGTH = 3


@final
class QuoteTracker:
    """Follows fences, code spans and quotation marks through a text."""

    def __init__(self) -> None:
        """Start at the beginning of a line, with nothing open."""
        self._fence: tuple[str, int] | None = None
        self._run_char, self._run_length, self._run_is_first = "", 0, False
        self.new_line()

    def new_line(self) -> None:
        """Forget what holds for one line only."""
        self._span_length = 0
        self._is_quoted = False
        self._is_blank = True
        self._last = "\n"

    def feed(self, text: str) -> None:
        """Go on through ``text``, in time linear in its length."""
        for match in _PIECES.finditer(text):
            piece = match.group()
            char = piece[0]
            if char == self._run_char:
                self._run_length += len(piece)
                continue
            self._end_run()
            if char in "`~":
                self._run_char, self._run_length = char, len(piece)
                self._run_is_first = self._is_blank
            elif char == "\n":
                self.new_line()
                continue
            elif not piece.isspace():
                self._is_blank = False
            self._last = piece[-1]

    def _end_run(self) -> None:
        """Decide what a run of backticks or tildes was, now that it is whole."""
        char, length = self._run_char, self._run_length
        if not char:
            return
        self._run_char = ""
        self._last = char
        if self._run_is_first and length >= _FENCE_LENGTH:
            if self._fence is None:
                self._fence = (char, length)
            elif self._fence[0] == char and length >= self._fence[1]:
                self._fence = None
        elif char == "`" and self._fence is None:
            if self._span_length == 0:
                self._span_length = length
            elif self._span_length == length:
                self._span_length = 0
        self._is_blank = False

    def quotes_next(self) -> bool:
        """Return whether a tag right here is quoted; a quotation mark before it is remembered."""
        self._end_run()
        self._is_quoted = self._is_quoted or self._last in _MARKS
        return self._is_quoted or self._fence is not None or self._span_length > 0
