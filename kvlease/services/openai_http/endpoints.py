"""The two endpoints that generate: a request is read, answered and told, streamed or whole."""

from collections.abc import Callable, Sequence
from typing import final

import msgspec
import trio
from attrs import frozen

from kvlease.errors import KVLeaseError
from kvlease.protocols.events import Usage
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.services.chat.answer import AnswerReader
from kvlease.services.chat.stops import StopFinder
from kvlease.services.openai_http import translate
from kvlease.services.openai_http.answering import Answered, Asked, Told, answer
from kvlease.services.openai_http.channel import Channel
from kvlease.services.openai_http.context import Context
from kvlease.services.openai_http.replies import DONE, Reply, TokenDetails, UsageOut, event
from kvlease.services.openai_http.requests import ChatRequest, CompletionRequest, SampledRequest
from kvlease.services.openai_http.shapes import ChatShape, Shape, TextShape, with_usage
from kvlease.services.serving.service import Client
from kvlease.services.sessions import pack
from kvlease.services.tool_calls.parser import ToolCallParser


def _no_more(_answers: list[Answered]) -> None:
    """Nothing is done with answers."""


@frozen
class Job:
    """A request that was understood: the answers that are wanted, and how they are told.

    ``done`` is given the answers before their ends are told: the next turn may come at once.
    """

    request: SampledRequest
    wanted: Sequence[Asked]
    shape: Shape
    reply: Reply
    done: Callable[[list[Answered]], None] = _no_more


@final
class Generation:
    """Answers one job on one channel."""

    def __init__(self, context: Context, client: Client, channel: Channel, job: Job) -> None:
        """Borrows all four."""
        self._context = context
        self._client = client
        self._channel = channel
        self._job = job
        self._opened: set[int] = set()
        self._answers: list[Answered] = []
        self._error: KVLeaseError | None = None

    async def run(self) -> None:
        """Answer. Checkpoints: always. Raises Refused."""
        wanted = self._job.wanted
        if len(wanted) == 1:
            await self._answer(wanted[0])
        else:
            async with open_flat_nursery() as nursery:
                for asked in wanted:
                    nursery.start_soon(self._answer_or_end, asked, nursery.cancel_scope)
            if self._error is not None:
                raise self._error
        self._answers.sort(key=lambda ended: ended.index)
        self._job.done(self._answers)
        await self._finish()

    async def _answer_or_end(self, asked: Asked, scope: trio.CancelScope) -> None:
        """Answer; the first of several that cannot be answered ends them all, and is told."""
        try:
            await self._answer(asked)
        except KVLeaseError as error:
            self._error = self._error or error
            scope.cancel()

    async def _answer(self, asked: Asked) -> None:
        job, context = self._job, self._context
        ended = await answer(
            context.service, self._client, asked, self._tell, context.note_malformed
        )
        self._answers.append(ended)
        if job.request.stream:
            await self._open(asked.index)
            job.shape.close(job.reply, asked.index, ended.finish_reason)
            await self._channel.write(event(job.reply))

    async def _open(self, index: int) -> None:
        """Begin the stream, and an answer's part of it, unless they have begun."""
        if index in self._opened:
            return
        self._opened.add(index)
        await self._channel.begin_events()
        job = self._job
        if job.shape.open(job.reply, index):
            await self._channel.write(event(job.reply))

    async def _tell(self, told: Told) -> None:
        job = self._job
        if not job.request.stream:
            job.shape.piece(job.reply, told)
            return
        await self._open(told.index)
        if job.shape.piece(job.reply, told):
            await self._channel.write(event(job.reply))

    async def _finish(self) -> None:
        job, channel = self._job, self._channel
        usage = _usage(self._answers, is_shared=isinstance(job.request, ChatRequest))
        if job.request.stream:
            options = job.request.stream_options
            if options is not None and options.include_usage:
                await channel.write(event(with_usage(job.reply, usage)))
            await channel.end(DONE)
            return
        job.shape.whole(job.reply, self._answers)
        job.reply.usage = usage
        await channel.reply(msgspec.json.encode(job.reply))


def _usage(answers: list[Answered], *, is_shared: bool) -> UsageOut:
    """Add up; answers that share a prompt count it once, as the first of them found it."""
    counted: list[Usage] = [a.usage for a in (answers[:1] if is_shared else answers)]
    prompt = sum(usage.prompt for usage in counted)
    cached = sum(
        usage.hit_device + usage.hit_host + usage.hit_storage + usage.hit_remote
        for usage in counted
    )
    completion = sum(len(a.tokens) for a in answers)
    return UsageOut(prompt, completion, prompt + completion, TokenDetails(cached))


def chat(context: Context, salt: bytes, body: bytes) -> Job:
    """Understand ``POST /v1/chat/completions``; from any thread. Raises BadInput."""
    request = translate.decode(body, ChatRequest)
    translate.check_sampled(request, context.model)
    translate.check_chat(request)
    messages = translate.messages_of(request)
    listed, tools = translate.tools_of(request)
    prompt = context.encoder.encode(
        messages,
        listed,
        is_thinking=translate.is_thinking(request),
        choice=translate.choice_of(request, tools),
        salt=salt,
    )
    asked_tokens = request.max_completion_tokens or request.max_tokens
    max_tokens = context.room.max_tokens(len(prompt.tokens), asked_tokens, "messages")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    vocabulary, packed = context.encoder.vocabulary, pack(prompt.tokens)
    shape = ChatShape(vocabulary, has_logprobs=logprobs is not None)
    stops = translate.stops_of(request)
    wanted = [
        Asked(
            index,
            packed,
            translate.sampling_of(request, index, max_tokens, logprobs),
            AnswerReader(
                vocabulary,
                StopFinder(stops),
                ToolCallParser(tools),
                is_thinking=prompt.is_thinking,
                forced=prompt.forced,
            ),
            "chat",
            request.parallel_tool_calls is False,
        )
        for index in range(request.n or 1)
    ]
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    reply = context.new_reply("chatcmpl", kind)

    def remember(answers: list[Answered]) -> None:
        for ended in answers:
            if ended.is_whole:
                told = ended.reader.message(shape.call_ids(ended.index))
                context.encoder.remember(prompt, told, ended.tokens)

    return Job(request, wanted, shape, reply, remember)


def completions(context: Context, _salt: bytes, body: bytes) -> Job:
    """Understand ``POST /v1/completions``; from any thread. Raises BadInput."""
    request = translate.decode(body, CompletionRequest)
    translate.check_sampled(request, context.model)
    translate.check_completion(request)
    vocabulary = context.encoder.vocabulary
    shape = TextShape(vocabulary, has_logprobs=request.logprobs is not None)
    wanted: list[Asked] = []
    for prompt in translate.prompts_of(request):
        tokens = vocabulary.encode(prompt) if isinstance(prompt, str) else prompt
        max_tokens = context.room.max_tokens(
            len(tokens), request.max_tokens, "prompt", translate.COMPLETION_TOKENS
        )
        packed = context.packed(tokens)
        for _ in range(request.n or 1):
            params = translate.sampling_of(request, len(wanted), max_tokens, request.logprobs)
            reader = AnswerReader(vocabulary, StopFinder(translate.stops_of(request)), None)
            wanted.append(Asked(len(wanted), packed, params, reader, "completions"))
    reply = context.new_reply("cmpl", "text_completion")
    return Job(request, wanted, shape, reply)
