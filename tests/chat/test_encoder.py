"""Prompts in V4's format: what they look like, and that turn n begins turn n+1."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import BadInput
from kvlease.services.chat.answer import AnswerReader
from kvlease.services.chat.encoder import ChatEncoder, ChatPrompt, ToolChoice
from kvlease.services.chat.memory import AnswerMemory, PrefixHash
from kvlease.services.chat.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from kvlease.services.chat.stops import StopFinder
from kvlease.services.chat.v4_format import (
    ASSISTANT,
    BOS,
    EOS,
    THINK,
    THINK_END,
    USER,
    ToolsSection,
)
from kvlease.services.chat.vocabulary import ByteVocabulary, Vocabulary
from kvlease.services.tool_calls.markup import SEPARATOR, Call, write_block
from kvlease.services.tool_calls.parser import ToolCallParser
from kvlease.services.tool_calls.tools import Toolbox, ToolSpec
from tests.chat import bpe

SEARCH = ToolSpec("search", "Finds.", {"type": "object", "properties": {"q": {"type": "string"}}})
TOOLS = Toolbox([SEARCH])


def byte_encoder() -> ChatEncoder:
    return ChatEncoder.of_model(None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    bpe.write_tokenizer(made)
    return made


def words(section: ToolsSection, tool: ToolSpec = SEARCH) -> str:
    """A section as text."""
    return "".join(p if isinstance(p, str) else p.spelling for p in section.write([tool]))


def spelled(prompt: ChatPrompt) -> str:
    """A prompt as the package that reads the file spells it, control tokens included."""
    return bpe.full_tokenizer().decode(prompt.tokens, skip_special_tokens=False)


def test_a_conversation_with_calls_is_spelled_as_the_model_was_trained(folder: Path) -> None:
    encoder = ChatEncoder.of_model(str(folder))
    calls = (Call("search", '{"q": "x"}'), Call("search", '{"q": "y"}'))
    prompt = encoder.encode(
        [
            SystemMessage("Be brief."),
            UserMessage("Find x and y."),
            AssistantMessage("Sure.", calls, ("one", "two")),
            ToolMessage("it is y", "two"),
            ToolMessage("it is x", "one"),
            UserMessage("And?"),
        ],
        [SEARCH],
    )
    assert spelled(prompt) == (
        f"{BOS}Be brief.\n\n{words(ToolsSection())}{USER}Find x and y.{ASSISTANT}{THINK_END}Sure."
        f"{SEPARATOR}{write_block(calls)}{EOS}{USER}<tool_result>it is x</tool_result>\n\n"
        f"<tool_result>it is y</tool_result>\n\nAnd?{ASSISTANT}{THINK_END}"
    )
    whole = bpe.full_tokenizer().encode(spelled(prompt), add_special_tokens=False).ids
    assert prompt.tokens == whole, "cut at control tokens, pieces are what the whole text gives"


def test_reasoning_stays_where_it_was(folder: Path) -> None:
    encoder = ChatEncoder.of_model(str(folder))
    answer = AssistantMessage("4", reasoning="2 and 2")
    prompt = encoder.encode([UserMessage("2+2?"), answer, UserMessage("?")], is_thinking=True)
    assert spelled(prompt) == (
        f"{BOS}{USER}2+2?{ASSISTANT}{THINK}2 and 2{THINK_END}4{EOS}{USER}?{ASSISTANT}{THINK}"
    )


def test_later_instructions_are_part_of_a_turn(folder: Path) -> None:
    encoder = ChatEncoder.of_model(str(folder))
    prompt = encoder.encode(
        [SystemMessage("a"), SystemMessage("b"), UserMessage("c"), SystemMessage("d")]
    )
    assert spelled(prompt) == f"{BOS}a\n\nb{USER}c\n\nd{ASSISTANT}{THINK_END}"


@pytest.mark.parametrize(
    "messages", [[], [SystemMessage("a")], [UserMessage("a"), AssistantMessage("b")]]
)
def test_there_has_to_be_a_question(messages: list[Message]) -> None:
    with pytest.raises(BadInput, match="without a question"):
        byte_encoder().encode(messages)


@pytest.mark.parametrize("choice", [ToolChoice(), ToolChoice("search")])
def test_a_forced_call_is_begun_for_the_model(choice: ToolChoice) -> None:
    encoder = byte_encoder()
    prompt = encoder.encode([UserMessage("x")], [SEARCH], choice=choice, is_thinking=True)
    assert bytes(prompt.tokens[-prompt.num_forced :]).decode() == prompt.forced
    rest = (
        ("" if choice.name else 'search">\n') + '{"q": "x"}\n' + write_block([]).partition("\n")[2]
    )
    rest = rest.replace("\n</", "\n</\uff5cDSML\uff5cinvoke>\n</")
    reader = AnswerReader(
        encoder.vocabulary, StopFinder([]), ToolCallParser(TOOLS), forced=prompt.forced
    )
    for token in encoder.vocabulary.encode(rest):
        reader.feed(token)
    reader.finish()
    assert reader.error is None
    assert reader.message().calls == (Call("search", '{"q": "x"}'),)


CHARACTERS = st.text(max_size=8)
CALLS = st.builds(
    lambda q: Call("search", q), st.sampled_from(['{"q": "x"}', '{"q":"a\\nb"}', "{}"])
)
ANSWER_TEXTS = st.builds(
    lambda text, calls: text.replace("`", "") + (SEPARATOR + write_block(calls) if calls else ""),
    CHARACTERS,
    st.lists(CALLS, max_size=2),
)


@st.composite
def answers(draw: st.DrawFn, vocabulary: Vocabulary, vocab_size: int) -> list[int]:
    """Tokens as a tokenizer would choose them, or as it never would; with EOS or cut."""
    text = draw(ANSWER_TEXTS)
    tokens = draw(
        st.one_of(
            st.just(vocabulary.encode(text)),
            st.just([t for c in text for t in vocabulary.encode(c)]),
            st.lists(st.integers(0, vocab_size - 1), max_size=8),
        )
    )
    eos = vocabulary.control(EOS)
    return [t for t in tokens if t not in eos] + (eos if draw(st.booleans()) else [])


@settings(max_examples=60)
@given(st.data(), st.booleans(), st.booleans())
def test_a_turns_prompt_and_answer_begin_the_next_prompt(
    folder: Path, data: st.DataObject, is_bpe: bool, forgets_reasoning: bool
) -> None:
    """Otherwise the prefix cache is useless: every turn would compute its conversation again."""
    encoder = ChatEncoder.of_model(str(folder) if is_bpe else None)
    size = bpe.full_tokenizer().get_vocab_size() if is_bpe else 256
    messages: list[Message] = [
        SystemMessage(data.draw(CHARACTERS)),
        UserMessage(data.draw(CHARACTERS)),
    ]
    for turn in range(3):
        is_thinking = data.draw(st.booleans())
        choice = data.draw(st.sampled_from([None, None, ToolChoice()]))
        prompt = encoder.encode(
            messages, [SEARCH], is_thinking=is_thinking, choice=choice, salt=b"s"
        )
        answer = data.draw(answers(encoder.vocabulary, size))
        reader = AnswerReader(
            encoder.vocabulary,
            StopFinder([]),
            ToolCallParser(TOOLS),
            is_thinking=prompt.is_thinking,
            forced=prompt.forced,
        )
        for token in answer:
            reader.feed(token)
        reader.finish()
        told = reader.message(tuple(f"call{turn}{n}" for n in range(9)))
        encoder.remember(prompt, told, answer)
        if forgets_reasoning:
            told = AssistantMessage(told.text, told.calls, told.call_ids)
        messages += [told, UserMessage(data.draw(CHARACTERS))]
        following = encoder.encode(messages, [SEARCH], salt=b"s")
        assert following.tokens[: len(prompt.tokens) + len(answer)] == prompt.tokens + answer


@given(st.data(), st.text(max_size=8))
def test_without_memory_the_prompt_before_is_still_the_beginning(
    folder: Path, data: st.DataObject, text: str
) -> None:
    """After a restart, or with an answer from elsewhere, at least the questions are found."""
    encoder = ChatEncoder.of_model(str(folder) if data.draw(st.booleans()) else None)
    messages: list[Message] = [UserMessage("a"), AssistantMessage(text), UserMessage("b")]
    first = encoder.encode(messages[:1])
    second = encoder.encode(messages)
    assert second.tokens[: len(first.tokens)] == first.tokens
    longer = encoder.encode([*messages, AssistantMessage(text), UserMessage("c")])
    assert longer.tokens[: len(second.tokens)] == second.tokens


def test_tenants_share_no_remembered_answers() -> None:
    encoder = byte_encoder()
    question = UserMessage("q")
    told = AssistantMessage("\ufffd")
    encoder.remember(encoder.encode([question], salt=b"a"), told, [255])
    of_a = encoder.encode([question, told, question], salt=b"a").tokens
    of_b = encoder.encode([question, told, question], salt=b"b").tokens
    assert 255 in of_a
    assert 255 not in of_b


def test_a_memory_has_a_bound_and_keeps_what_is_used() -> None:
    memory = AnswerMemory(max_bytes=1000)
    for key in (b"a", b"b", b"c"):
        memory.put(key, [1])
        assert memory.get(b"a") == [1]
    memory.put(b"d", [2] * 50)
    assert memory.get(b"a") == [1]
    assert memory.get(b"b") is None
    memory.put(b"a", [3])
    assert memory.get(b"a") == [3]
    memory.put(b"e", [1] * 1000)
    assert memory.get(b"e") is None, "what is larger than all of it is not kept"
    assert PrefixHash(b"").key(AssistantMessage("x")) != PrefixHash(b"s").key(AssistantMessage("x"))


def test_a_checkpoints_own_words_for_tools_are_used(folder: Path, tmp_path: Path) -> None:
    """The model was trained on them; they stand in a file of its release."""
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv4.py").write_text(
        'import evil\nTOOLS_TEMPLATE = """$5 <{dsml_token}tool_calls> {thinking_start_token}\n'
        '{tool_schemas}\n"""\n',
        encoding="utf-8",
    )
    written = words(ToolsSection(tmp_path), ToolSpec("f"))
    assert written == '$5 <\uff5cDSML\uff5ctool_calls> <think>\n{"name": "f"}\n'
    assert ToolsSection(folder).write([SEARCH]) == ToolsSection().write([SEARCH])


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        ChatEncoder.of_model(str(tmp_path))
    assert isinstance(byte_encoder().vocabulary, ByteVocabulary)
