"""Stop strings over the borders of pieces: nothing of one is said before it is clear that it is."""

from collections.abc import Iterable
from typing import final

from kvlease.errors import BadInput

MAX_STOPS = 16
MAX_STOP_LENGTH = 256


@final
class StopFinder:
    """Passes text on up to the first stop string, which is left out."""

    def __init__(self, stops: Iterable[str]) -> None:
        """Take the strings; raises BadInput for an empty one, or too many."""
        self._stops = tuple(stops)
        if len(self._stops) > MAX_STOPS:
            raise BadInput(f"{len(self._stops)} stop strings are given; {MAX_STOPS} may be")
        for stop in self._stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise BadInput(
                    f"a stop string has {len(stop)} characters; give 1 to {MAX_STOP_LENGTH}"
                )
        self._held: str = ""
        self.found: str | None = None
        self.rest: str = ""
        """What stood behind the stop string in the piece that completed it."""

    def feed(self, text: str) -> str:
        """Return what can be said; ``found`` is set once a stop string is complete."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # The one that is complete first, however the text was cut; of several then, the longest.
        ends = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if ends:
            end, _, self.found = min(ends)
            self._held, self.rest = "", text[end:]
            return text[: end - len(self.found)]
        end = len(text) - max(self._partial_length(text, stop) for stop in self._stops)
        self._held = text[end:]
        return text[:end]

    def _partial_length(self, text: str, stop: str) -> int:
        start = max(0, len(text) - len(stop) + 1)
        while (start := text.find(stop[0], start)) >= 0:
            if stop.startswith(text[start:]):
                return len(text) - start
            start += 1
        return 0

    def finish(self) -> str:
        """Return what was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held
