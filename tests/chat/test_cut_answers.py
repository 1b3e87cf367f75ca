"""An answer that a limit cuts at any byte: text stays whole, and markup is never text."""

import pytest

from kvlease.services.chat.answer import AnswerReader
from kvlease.services.chat.encoder import ChatEncoder
from kvlease.services.chat.stops import StopFinder
from kvlease.services.tool_calls.events import Text
from kvlease.services.tool_calls.markup import BLOCK_END, DSML, OPEN, SEPARATOR, Call, write_block
from kvlease.services.tool_calls.parser import ToolCallParser
from kvlease.services.tool_calls.tools import Toolbox, ToolSpec

TEXT = f"Grüße 🙂, 3 < 4, `{OPEN}` is markup:\n```\n\n\n{OPEN}x\n```\nand so on"
CALLS = [
    Call("find", '{"was": "Straße 🙂 <b>", "wie": [1, {"x": "</y>"}]}'),
    Call("find", "{}"),
]
ANSWER = (TEXT + SEPARATOR + write_block(CALLS)).encode()
MARKUP = len((TEXT + SEPARATOR + OPEN).encode()) - len("DSML\uff5c".encode()) + 1
"""From here on it is a call that the model writes: the first letter of the mark is there."""


def read(answer: bytes) -> tuple[AnswerReader, str]:
    """Read an answer byte by byte; returns the reader and the text that a client was told."""
    vocabulary = ChatEncoder.of_model(None).vocabulary
    parser = ToolCallParser(Toolbox([ToolSpec("find")]))
    reader = AnswerReader(vocabulary, StopFinder([]), parser)
    events = [event for byte in answer for event in reader.feed(byte)]
    events += reader.finish()
    return reader, "".join(event.text for event in events if isinstance(event, Text))


@pytest.mark.parametrize("begin", range(8))
def test_an_answer_may_be_cut_at_every_byte(begin: int) -> None:
    for end in range(begin, len(ANSWER), 8):
        reader, text = read(ANSWER[:end])
        if end < MARKUP:
            assert reader.error is None
            assert text == ANSWER[:end].decode(errors="replace")
        else:
            assert reader.error is not None
            assert reader.error.reason == "truncated"
            assert text == TEXT
            assert reader.error.raw == ANSWER[len(TEXT.encode()) : end].decode(errors="ignore")


def test_the_whole_answer_is_text_and_calls() -> None:
    reader, text = read(ANSWER)
    assert (reader.error, text) == (None, TEXT)
    assert list(reader.message().calls) == CALLS
    assert ANSWER.endswith(BLOCK_END.encode())
    assert DSML in text, "where it is quoted"
