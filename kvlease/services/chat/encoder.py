"""Conversations to prompt tokens, so that a turn's prompt begins with the turn before.

Turn n's prompt and the tokens of its answer are how turn n+1's prompt begins: pieces are tokenised
one by one between control tokens, and answers come from the memory as the model wrote them.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import final

from attrs import frozen

from kvlease.errors import BadInput
from kvlease.services.chat.memory import AnswerMemory, PrefixHash
from kvlease.services.chat.messages import AssistantMessage, Message
from kvlease.services.chat.v4_format import (
    ASSISTANT,
    BOS,
    EOS,
    USER,
    Control,
    Piece,
    ToolsSection,
    answer_pieces,
    forced_call,
    head_pieces,
    marked,
    num_opening,
    system_pieces,
    turn_pieces,
)
from kvlease.services.chat.vocabulary import ByteVocabulary, CheckpointVocabulary, Vocabulary
from kvlease.services.tool_calls.tools import ToolSpec


@frozen
class ToolChoice:
    """That an answer has to call a tool: the named one, or any."""

    name: str | None = None


@frozen
class ChatPrompt:
    """A prompt ready for the engine.

    Attributes:
        tokens: ids, the beginning of the answer that was asked for included.
        forced: that beginning's text, for whoever reads the answer.
        num_forced: its tokens.
        is_thinking: whether the answer begins with its reasoning.
        prefix: the hash under which the answer is remembered.
    """

    tokens: list[int]
    forced: str
    num_forced: int
    is_thinking: bool
    prefix: PrefixHash


class _Writer:
    """Tokens of a prompt, and their hash."""

    def __init__(self, vocabulary: Vocabulary, salt: bytes) -> None:
        self._vocabulary = vocabulary
        self.tokens: list[int] = []
        self.prefix = PrefixHash(salt)

    def add(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.prefix.add(tokens)

    def encoded(self, pieces: Sequence[Piece]) -> list[int]:
        """Tokenise pieces, the text between two control tokens in one go."""
        tokens: list[int] = []
        for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
            if is_text:
                text = "".join(piece for piece in run if isinstance(piece, str))
                tokens += self._vocabulary.encode(text) if text else []
            else:
                for piece in run:
                    assert isinstance(piece, Control), "the run is not text"
                    tokens += self._vocabulary.control(piece.spelling)
        return tokens

    def write(self, pieces: Sequence[Piece]) -> None:
        self.add(self.encoded(pieces))


@final
class ChatEncoder:
    """Writes prompts for one model, and remembers its answers."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        section: ToolsSection | None = None,
        memory: AnswerMemory | None = None,
    ) -> None:
        """Borrows the vocabulary."""
        self.vocabulary = vocabulary
        self._section = section or ToolsSection()
        self._memory = memory or AnswerMemory()
        self._eos = vocabulary.control(EOS)

    @classmethod
    def of_model(cls, model: str | None) -> "ChatEncoder":
        """Make the encoder of a checkpoint folder, or of the embedded model.

        Raises BadInput if the folder has no usable tokenizer, or the package for it is missing.
        """
        if model is None:
            return cls(ByteVocabulary(BOS, EOS, USER, ASSISTANT))
        folder = Path(model)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadInput(f"{model} has no tokenizer.json; chat needs one")
        return cls(CheckpointVocabulary(path), ToolsSection(folder))

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        is_thinking: bool = False,
        choice: ToolChoice | None = None,
        salt: bytes = b"",
    ) -> ChatPrompt:
        """Write the prompt that asks for the answer to a conversation.

        Args:
            messages: the conversation; its last message is not an answer.
            tools: what may be called.
            is_thinking: whether the answer begins with reasoning; not if a call is forced.
            choice: forces a call.
            salt: the tenant's, which keeps remembered answers apart.

        Raises BadInput for a conversation without a question.
        """
        writer = _Writer(self.vocabulary, salt)
        writer.write(system_pieces(messages, tools, self._section))
        turn: list[Message] = []
        before: AssistantMessage | None = None
        for message in messages[num_opening(messages) :]:
            if not isinstance(message, AssistantMessage):
                turn.append(message)
                continue
            if turn:
                writer.write(turn_pieces(turn, before))
            self._write_answer(writer, message)
            turn, before = [], message
        if not turn:
            raise BadInput("the messages end without a question to be answered")
        writer.write(turn_pieces(turn, before))
        writer.write(head_pieces(is_thinking=is_thinking and choice is None))
        prefix = writer.prefix
        if choice is None:
            return ChatPrompt(writer.tokens, "", 0, is_thinking, prefix)
        forced = forced_call(choice.name)
        tokens = writer.encoded(list(marked(forced)))
        return ChatPrompt(writer.tokens + tokens, forced, len(tokens), False, prefix)

    def _write_answer(self, writer: _Writer, message: AssistantMessage) -> None:
        """Write an earlier answer: as it was made, if that is known, or from its text."""
        heads = [writer.encoded(head_pieces(is_thinking=thinking)) for thinking in (False, True)]
        for head in heads:
            known = self._memory.get(writer.prefix.then(head).key(message))
            if known is not None:
                writer.add(head + known)
                return
        writer.add(heads[message.reasoning is not None])
        writer.write(answer_pieces(message))

    def remember(self, prompt: ChatPrompt, message: AssistantMessage, answer: list[int]) -> None:
        """Keep the tokens of a whole answer to a prompt, by what its client was told.

        ``answer`` holds the engine's tokens; the end mark is added where a limit kept it away.
        """
        forced = prompt.tokens[len(prompt.tokens) - prompt.num_forced :]
        ending = [] if answer[-len(self._eos) :] == self._eos else self._eos
        self._memory.put(prompt.prefix.key(message), [*forced, *answer, *ending])
