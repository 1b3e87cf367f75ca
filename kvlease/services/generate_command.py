"""`kvlease generate`: answer prompts once, all at the same time, and print them in input order."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from kvlease.errors import BadInput, PromptError
from kvlease.protocols.config import SamplingParams
from kvlease.runtime.event_log import EventLog
from kvlease.services.driver import ask
from kvlease.services.options import GenerateOptions
from kvlease.services.sessions import Tokens, pack
from kvlease.services.text import Tokenizer, tokenizer_for

if TYPE_CHECKING:
    from kvlease.runtime.engine import Engine

_INT32 = range(-(1 << 31), 1 << 31)


class Generated(msgspec.Struct, frozen=True):
    """What ``--json`` writes: the answers in input order, an EOS that ended one included."""

    outputs: list[list[int]]


def read_prompts(path: str) -> list[Tokens]:
    """Read a JSON list of lists of token ids.

    Raises:
        BadInput: the file cannot be read or is not of that form; the sentence says where.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    try:
        prompts = msgspec.json.decode(raw, type=list[list[int]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"{path} is no JSON list of lists of token ids: {reason}") from error
    if not prompts:
        raise BadInput(f"{path} holds no prompt")
    for number, prompt in enumerate(prompts, 1):
        for token in prompt:
            if token not in _INT32:
                raise BadInput(f"{path}: prompt {number}: {token} is no token id")
    return [pack(prompt) for prompt in prompts]


async def generate(options: GenerateOptions, log: EventLog) -> list[list[int]]:
    """Answer all prompts and return their tokens in input order.

    Ownership: borrows the log.
    Checkpoints: always; cancelled, it calls the open requests off.

    Raises:
        BadInput: a prompt cannot be served; the sentence says which.
        RequestFailed: an answer could not be finished.
    """
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        ignore_eos=options.ignore_eos,
    )
    if options.tokens_file is not None:
        prompts = read_prompts(options.tokens_file)
    else:
        prompts = [pack(_tokenizer(options).encode(options.text or ""))]
    from kvlease.runtime.engine import open_engine  # loads torch: wrong files are told of before

    where = options.tokens_file or "--text"
    answers: list[list[int]] = [[] for _ in prompts]
    limit = trio.Semaphore(options.common.sessions)

    async def answer(engine: "Engine", place: int) -> None:
        async with limit:
            try:
                got, _ = await ask(engine, prompts[place], sampling)
            except PromptError as error:
                raise PromptError(f"{where}: prompt {place + 1}: {error}") from error
        answers[place] = got.tokens

    config = options.config()
    async with (
        open_engine(options.common.model, config, log=log) as engine,
        trio.open_nursery() as nursery,
    ):
        for place in range(len(prompts)):
            nursery.start_soon(answer, engine, place)
    return answers


def _tokenizer(options: GenerateOptions) -> Tokenizer:
    return tokenizer_for(options.common.model)


def lines_of(options: GenerateOptions, answers: list[list[int]]) -> list[str]:
    """Return what is printed: text for a text prompt, else one JSON list of tokens a line."""
    if options.text is not None:
        return [_tokenizer(options).decode(answer) for answer in answers]
    return [json.dumps(answer) for answer in answers]
