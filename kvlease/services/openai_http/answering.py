"""One answer from the engine, read batch by batch and told as it comes."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio
from attrs import frozen

from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import Usage
from kvlease.runtime.engine import AnswerStream
from kvlease.runtime.request import TokenEvent
from kvlease.services.chat.answer import AnswerEvent, AnswerReader
from kvlease.services.openai_http.errors import MalformedCall
from kvlease.services.openai_http.replies import FinishReason
from kvlease.services.serving.service import Client, Service


@frozen
class Told:
    """What a batch of tokens adds to an answer."""

    index: int
    events: list[AnswerEvent]
    tokens: list[TokenEvent]


Tell: TypeAlias = Callable[[Told], Awaitable[None]]


@frozen
class Asked:
    """One answer that is wanted."""

    index: int
    prompt: bytes
    params: SamplingParams
    reader: AnswerReader
    method: str
    first_call_only: bool = False


@frozen
class Answered:
    """How an answer ended.

    Attributes:
        tokens: all that were read; those behind a stop string are the engine's alone.
        is_whole: whether the model ended it, or its limit did: nothing was cut off by us.
    """

    index: int
    reader: AnswerReader
    tokens: list[int]
    usage: Usage
    finish_reason: FinishReason
    is_whole: bool
    request: int


async def next_batch(stream: AnswerStream) -> list[TokenEvent] | None:
    """Return the tokens that have come since the last batch; None when there are no more.

    Checkpoints: only if it waits. Raises what ended the request early.
    """
    inbox, batch = stream.request.inbox, list[TokenEvent]()
    try:
        batch.extend(await inbox.receive())
        while True:
            batch.extend(inbox.receive_nowait())
    except trio.WouldBlock:
        return batch
    except trio.EndOfChannel:
        if batch:
            return batch
    error = await stream.ended()
    if error is not None:
        raise error
    return None


async def answer(
    service: Service,
    client: Client,
    asked: Asked,
    tell: Tell,
    failed: Callable[[MalformedCall, int], None],
) -> Answered:
    """Get one answer; what is told was said by then, the last tokens too.

    Leaving early, by a stop string or an error, ends the request and frees its pages.

    Args:
        service: what is asked; counts the answer as a stream of the client.
        client: who asks.
        asked: what for.
        tell: is given the answer piece by piece.
        failed: is told of a malformed call, with the engine's number of the request.

    Checkpoints: always. Raises Refused.
    """
    reader, tokens = asked.reader, list[int]()
    async with service.generate(client, asked.prompt, asked.params, method=asked.method) as (
        stream,
        call,
    ):
        if reader.early:
            await tell(Told(asked.index, reader.early, []))
        is_cut = False
        while not is_cut and (batch := await next_batch(stream)) is not None:
            told = _read(asked, batch)
            tokens += [event.token for event in told.tokens]
            is_cut = reader.has_stopped or (asked.first_call_only and reader.has_calls)
            if told.events or asked.params.logprobs is not None:
                await tell(told)
        last = [] if asked.first_call_only and reader.has_calls else reader.finish()
        if last:
            await tell(Told(asked.index, last, []))
        request = stream.request
        if reader.error is not None:
            error = MalformedCall(reader.error)
            failed(error, request.id)
            raise error
        call.output_tokens = len(tokens)
        is_length = not is_cut and stream.result.finish_reason == "length"
        reason: FinishReason = "length" if is_length else "stop"
        if reader.has_calls:
            reason = "tool_calls"
        return Answered(
            asked.index, reader, tokens, request.usage(), reason, not is_cut, request.id
        )


def _read(asked: Asked, batch: list[TokenEvent]) -> Told:
    """Read a batch up to where the answer is over."""
    reader, events = asked.reader, list[AnswerEvent]()
    for place, token in enumerate(batch, 1):
        events += reader.feed(token.token)
        if reader.has_stopped or (asked.first_call_only and reader.has_calls):
            return Told(asked.index, events, batch[:place])
    return Told(asked.index, events, batch)
