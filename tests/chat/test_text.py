"""Tokens to text in pieces: never broken UTF-8, and stop strings over any border."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import BadInput
from kvlease.services.chat.detokenizer import Detokenizer
from kvlease.services.chat.stops import MAX_STOPS, StopFinder
from kvlease.services.chat.v4_format import ASSISTANT, BOS, EOS, USER
from kvlease.services.chat.vocabulary import ByteVocabulary, CheckpointVocabulary, Vocabulary
from kvlease.services.tool_calls.markup import DSML
from tests.chat import bpe

BYTES = ByteVocabulary(BOS, EOS, USER, ASSISTANT)


@pytest.fixture(scope="module")
def bpe_words(tmp_path_factory: pytest.TempPathFactory) -> CheckpointVocabulary:
    return bpe.bpe_vocabulary(tmp_path_factory.mktemp("bpe"))


def streamed(vocabulary: Vocabulary, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(vocabulary)
    return [*map(detokenizer.feed, tokens), detokenizer.finish()]


@given(st.text())
def test_text_comes_back_piece_by_piece(bpe_words: CheckpointVocabulary, text: str) -> None:
    """A client that joins the pieces has the text, and no piece holds half a character."""
    for vocabulary in (BYTES, bpe_words):
        pieces = streamed(vocabulary, vocabulary.encode(text))
        assert "".join(pieces) == text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 300)))
def test_what_is_no_text_is_replaced_as_a_whole_decode_would(tokens: list[int]) -> None:
    whole = b"".join(map(BYTES.token_bytes, tokens)).decode(errors="replace")
    assert "".join(streamed(BYTES, tokens)) == whole


@given(st.data())
def test_any_tokens_read_like_the_package_reads_them(
    bpe_words: CheckpointVocabulary, data: st.DataObject
) -> None:
    """The byte table is ours; the package's own decoder is the oracle."""
    full = bpe.full_tokenizer()
    tokens = data.draw(st.lists(st.integers(0, full.get_vocab_size() - len(bpe.PLAIN) - 3)))
    assert "".join(streamed(bpe_words, tokens)) == full.decode(tokens)


def test_clients_cannot_write_control_tokens(bpe_words: CheckpointVocabulary) -> None:
    """A user who could end the user's turn could speak for the model."""
    full = bpe.full_tokenizer()
    for spelling in [*bpe.SPECIAL, *bpe.PLAIN]:
        assert full.encode(spelling, add_special_tokens=False).ids == [full.token_to_id(spelling)]
        assert bpe_words.control(spelling) == [full.token_to_id(spelling)]
        assert full.token_to_id(spelling) not in bpe_words.encode(f"a{spelling}b")
    assert BYTES.control(EOS) not in [[t] for t in BYTES.encode(EOS)]


def test_markers_are_silent_and_markup_is_not(bpe_words: CheckpointVocabulary) -> None:
    assert [bpe_words.token_bytes(*bpe_words.control(s)) for s in (BOS, EOS, USER)] == [b""] * 3
    assert bpe_words.token_bytes(*bpe_words.control(DSML)) == DSML.encode()
    assert bpe_words.token_bytes(10**9) == b""
    assert BYTES.token_bytes(10**9) == b" 1000000000", "a model without text speaks in numbers"


def test_files_that_cannot_work_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b"", b"{}", b'{"model": {}}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(BadInput, match="cannot read"):
            CheckpointVocabulary(path)
    with pytest.raises(BadInput, match="no byte-level"):
        CheckpointVocabulary(bpe.write_tokenizer(tmp_path, decoder=None))


SMALL = st.text(alphabet="ab\n", max_size=30)


@given(SMALL, st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_do_not_depend_on_borders(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    def told(pieces: list[str]) -> tuple[str, str | None]:
        finder = StopFinder(stops)
        said = "".join(map(finder.feed, pieces)) + finder.finish()
        return said, finder.found

    cut = data.draw(st.integers(0, len(text)))
    whole = told([text])
    assert told(list(text)) == told([text[:cut], text[cut:]]) == whole
    said, found = whole
    if found is None:
        assert said == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(said + found)
        assert not any(stop in (said + found)[:-1] for stop in stops)


def test_text_passes_as_soon_as_it_cannot_be_a_stop_string() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert [finder.feed(p) for p in ("Hi", "\n", "\n", "Use", "!")] == [
        "Hi",
        "",
        "",
        "",
        "\n\nUse!",
    ]


@pytest.mark.parametrize("stops", [[""], ["a"] * (MAX_STOPS + 1), ["a" * 300]])
def test_stop_strings_have_bounds(stops: list[str]) -> None:
    with pytest.raises(BadInput, match="stop string"):
        StopFinder(stops)
