"""Traffic for the demo: closed-loop clients that hold conversations through the OpenAI API.

`openai` is imported inside functions.

1. A seed determines the sequence of conversations of each client.
2. Every request sent is counted once: done, failed or cancelled (only at the end of the run).
3. A request is done when its stream has ended with a finish reason and its usage.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from vtoken.demo.conversations import Conversation, make_conversation

MAX_ANSWERS_KEPT = 100
MAX_PASSAGE_CHARS = 3600
THINK_S = (0.5, 5.0)  # before each question
BUSY_S, QUIET_S = 30.0, 20.0  # the load swings: memory is short, then ample
QUIET_SHARE = 0.125  # of the clients send while it is quiet; their answers are long
TEMPLATE_TOKENS = 64  # an upper bound of the tokens that the chat template adds


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request, for the report."""

    kind: str  # "chat" or "passage"
    question: str
    text: str


@dataclass(slots=True)
class TrafficReport:
    """Counts and results of all requests."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    failure: str = ""  # the first
    answers: list[Answer] = field(default_factory=list)  # the first ones


class IncompleteError(RuntimeError):
    """The server ended a stream early."""


def quiet_left_s(elapsed_s: float) -> float:
    """Seconds until the next busy phase, `elapsed_s` after the start; 0 in a busy one."""
    phase = elapsed_s % (BUSY_S + QUIET_S)
    return 0.0 if phase < BUSY_S else BUSY_S + QUIET_S - phase


class Traffic:
    """`num_workers` clients, each with at most one request in flight.

    Most of them rest in quiet phases, between two questions. The others get long answers, so
    that tokens which were given while it was busy come back before the answers end.
    """

    def __init__(self, url: str, *, num_workers: int, seed: int) -> None:
        self.report = TrafficReport()
        self._url = url
        self._num_workers = num_workers
        self._seed = seed
        self._stop = asyncio.Event()
        self._client: Any  # openai.AsyncOpenAI
        self._model: str
        self._started: float
        self._max_model_len: int

    def stop(self) -> None:
        """Stop sending requests."""
        self._stop.set()

    async def run(self, *, drain_s: float) -> TrafficReport:
        """Send requests until `stop`; then requests in flight have `drain_s` to finish."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        start = self._started = time.monotonic()
        self._client = AsyncOpenAI(
            base_url=f"{self._url}/v1",
            api_key="none",
            max_retries=0,
            timeout=300.0,
            http_client=DefaultAsyncHttpxClient(trust_env=False),  # no proxy for loopback
            # Client and server both close idle connections after 5 s; after a pause of that
            # length, a request could be sent on a closed one.
            default_headers={"Connection": "close"},
        )
        async with self._client:
            served = (await self._client.models.list()).data[0]
            self._model = served.id
            self._max_model_len = int((served.model_extra or {}).get("max_model_len") or 4096)
            workers = [
                asyncio.create_task(self._work(number)) for number in range(self._num_workers)
            ]
            await self._stop.wait()
            _, unfinished = await asyncio.wait(workers, timeout=drain_s)
            for worker in unfinished:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        self.report.duration_s = time.monotonic() - start
        return self.report

    async def _work(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        rests = number >= QUIET_SHARE * self._num_workers
        while not self._stop.is_set():
            # Characters are an upper bound on tokens for any tokenizer.
            max_chars = min(MAX_PASSAGE_CHARS, self._max_model_len * 3 // 4)
            talk = make_conversation(rng, max_chars, is_long=not rests)
            await self._converse(talk, rests=rests)

    async def _converse(self, talk: Conversation, *, rests: bool) -> None:
        """Every turn of `talk`, until one fails or the context is full. `rests`: when quiet."""
        messages = [{"role": "system", "content": talk.system}]
        max_tokens = min(talk.max_tokens, self._max_model_len // 4)
        for question in talk.questions:
            await self._pause(random.uniform(*THINK_S))
            if rests:
                await self._pause(quiet_left_s(time.monotonic() - self._started))
            if self._stop.is_set():
                return
            first = talk.passage and len(messages) == 1
            text = f"{talk.passage}\n\n{question}" if first else question
            messages.append({"role": "user", "content": text})
            used = sum(len(message["content"]) for message in messages)
            if used + max_tokens + TEMPLATE_TOKENS > self._max_model_len:
                return
            answer = await self._send(messages, max_tokens, min(talk.min_tokens, max_tokens))
            if answer is None:
                return
            if len(self.report.answers) < MAX_ANSWERS_KEPT:
                self.report.answers.append(Answer(talk.kind, question, answer))
            messages.append({"role": "assistant", "content": answer})

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return

    async def _send(
        self, messages: list[dict[str, str]], max_tokens: int, min_tokens: int
    ) -> str | None:
        """Send one request and count it; returns the answer's text, None if it failed."""
        try:
            answer = await self._stream(messages, max_tokens, min_tokens)
        except asyncio.CancelledError:
            self.report.cancelled += 1
            raise
        except Exception as error:  # from openai, or from httpx in mid-stream
            self.report.failed += 1
            self.report.failure = self.report.failure or f"{type(error).__name__}: {error}"
            await self._pause(1.0)  # do not flood a failing server
            return None
        self.report.done += 1
        return answer

    async def _stream(
        self, messages: list[dict[str, str]], max_tokens: int, min_tokens: int
    ) -> str:
        """Run one request to its end. Raises IncompleteError if the stream ends early."""
        usage = reason = None
        pieces: list[str] = []
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=0.0,  # a sampling seed kills vLLM 0.32 on CPU when a prompt is chunked
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"min_tokens": min_tokens},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                pieces.append(choice.delta.content or "")
            usage = chunk.usage or usage
        if usage is None or reason is None:
            raise IncompleteError("the stream ended without a finish reason or usage")
        self.report.output_tokens += usage.completion_tokens
        return "".join(pieces).strip()
