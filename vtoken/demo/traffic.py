"""Traffic for the demo: workers in a closed loop that send streaming chats through the OpenAI API.

Knows the OpenAI API only, nothing of vToken. `openai` is imported inside functions. Runs as a
process of its own, so that neither the console nor the exercise shares its time.

1. One seed gives one sequence of prompts and lengths for each worker.
2. A request that was sent is counted once: done, failed or cancelled (only by the end of the run).
3. A request is done when its stream ended and held exactly the number of tokens asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

MAX_FAILURES_SHOWN = 20
VOCABULARY = (
    "block token cache slot table live dead hole sink window budget victim planner copy memory "
    "river lantern copper meadow harbor winter orchard thunder velvet compass granite whisper"
)
WORDS = VOCABULARY.split()


class Shape(msgspec.Struct, frozen=True):
    """A kind of request. Lengths are characters: an upper bound on tokens for any tokenizer."""

    name: str
    weight: int  # share of the requests
    prompt_chars: tuple[int, int]
    output_tokens: tuple[int, int]
    think_s: float  # longest pause before the next request of the same worker


SHAPES = (
    Shape("short chat", 5, (60, 300), (48, 160), 0.4),
    Shape("long answer", 2, (100, 400), (250, 500), 0.2),
    Shape("long context", 3, (900, 2400), (96, 320), 0.2),
)
SYSTEM_CHARS = 400  # one of a few system prompts opens each chat, so that prefixes are shared
NUM_SYSTEM_PROMPTS = 3
TEMPLATE_TOKENS = 64  # room for what the chat template adds


class TrafficReport(msgspec.Struct):
    """What was sent and what came of it. Latencies are seconds, one a finished request."""

    requests: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    ttft_s: list[float] = []
    latency_s: list[float] = []
    failures: list[str] = []


def make_text(rng: random.Random, num_chars: int) -> str:
    """Words of a small vocabulary, exactly `num_chars` characters."""
    words: list[str] = []
    length = 0
    while length <= num_chars:
        words.append(rng.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:num_chars]


class Traffic:
    """`num_workers` clients, each with one request in flight at most."""

    def __init__(self, url: str, *, num_workers: int, seed: int) -> None:
        self.report = TrafficReport()
        self._url = url
        self._num_workers = num_workers
        self._seed = seed
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Send no further request."""
        self._stop.set()

    async def run(self, *, drain_s: float) -> TrafficReport:
        """Serve until `stop`; then requests in flight have `drain_s` to finish."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        start = time.monotonic()
        async with AsyncOpenAI(
            base_url=f"{self._url}/v1",
            api_key="none",
            max_retries=0,
            timeout=300.0,
            http_client=DefaultAsyncHttpxClient(trust_env=False),  # no proxy to this machine
        ) as client:
            served = (await client.models.list()).data[0]
            limit = int((served.model_extra or {}).get("max_model_len") or 4096)
            workers = [
                asyncio.create_task(self._work(client, served.id, limit, number))
                for number in range(self._num_workers)
            ]
            await self._stop.wait()
            _, unfinished = await asyncio.wait(workers, timeout=drain_s)
            for worker in unfinished:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        self.report.duration_s = time.monotonic() - start
        return self.report

    async def _work(self, client: Any, model: str, limit: int, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        weights = [shape.weight for shape in SHAPES]
        await self._pause(rng.uniform(0, 1.5))  # do not start in step
        while not self._stop.is_set():
            shape = rng.choices(SHAPES, weights)[0]
            system = make_text(random.Random(rng.randrange(NUM_SYSTEM_PROMPTS)), SYSTEM_CHARS)
            num_tokens = min(rng.randint(*shape.output_tokens), limit // 4)
            room = limit - num_tokens - SYSTEM_CHARS - TEMPLATE_TOKENS
            num_chars = max(1, min(rng.randint(*shape.prompt_chars), room))
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": make_text(rng, num_chars)},
            ]
            await self._send(client, model, messages, num_tokens, shape.name)
            await self._pause(rng.uniform(0, shape.think_s))

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return

    async def _send(
        self, client: Any, model: str, messages: list[dict[str, str]], num_tokens: int, kind: str
    ) -> None:
        self.report.requests += 1
        try:
            problem = await self._stream(client, model, messages, num_tokens)
        except asyncio.CancelledError:
            self.report.cancelled += 1
            raise
        except Exception as error:  # of openai, or of httpx in mid-stream: a failure either way
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            self.report.done += 1
            return
        self.report.failed += 1
        print(f"{kind}: {problem}", file=sys.stderr, flush=True)
        if len(self.report.failures) < MAX_FAILURES_SHOWN:
            self.report.failures.append(f"{kind}: {problem}")
        await self._pause(1.0)  # no storm against a server that refuses

    async def _stream(
        self, client: Any, model: str, messages: list[dict[str, str]], num_tokens: int
    ) -> str | None:
        """Run one chat to its end; what is wrong with it, if anything."""
        start = time.monotonic()
        first: float | None = None
        usage = None
        stream = await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=num_tokens,
            temperature=0.0,  # a sampling seed kills vLLM 0.32 on CPU when a prompt is chunked
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if first is None and chunk.choices and chunk.choices[0].delta.content:
                first = time.monotonic()
            usage = chunk.usage or usage
        if usage is None:
            return "the stream ended without its usage"
        if usage.completion_tokens != num_tokens:
            return f"{usage.completion_tokens} tokens instead of {num_tokens}"
        end = time.monotonic()
        self.report.prompt_tokens += usage.prompt_tokens
        self.report.output_tokens += usage.completion_tokens
        self.report.ttft_s.append((first or end) - start)
        self.report.latency_s.append(end - start)
        return None


async def _run(arguments: argparse.Namespace) -> TrafficReport:
    traffic = Traffic(arguments.url, num_workers=arguments.workers, seed=arguments.seed)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, traffic.stop)
    return await traffic.run(drain_s=arguments.drain)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m vtoken.demo.traffic`: run until SIGINT or SIGTERM, then write the report."""
    parser = argparse.ArgumentParser(prog="python -m vtoken.demo.traffic")
    parser.add_argument("--url", required=True)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drain", type=float, default=0.0, help="seconds")
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args(argv)
    report = asyncio.run(_run(arguments))
    arguments.report.write_bytes(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
