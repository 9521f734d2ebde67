"""Engines that answer the prompts of a ground under many settings at once.

Each engine is a process. Requests of one prompt differ in policy and budget alone.
They share the prefix that no signal of theirs is computed from, and each computes the newest
queries that its policy ranks by. Outputs are those without a prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from vtoken.core.config.spans import num_tokens
from vtoken_bench import forcing
from vtoken_bench.engines import Engine
from vtoken_bench.grounds.prompts import Prompt
from vtoken_bench.grounds.settings import Setting
from vtoken_bench.target import Target

BLOCK_SIZE = 16
MAX_SEQS = 64
BATCHED_TOKENS = 4096
NUM_BLOCKS = 4000  # usable, an engine


class Engines:
    """`count` engines with one configuration; `answers` may be called by as many threads."""

    def __init__(
        self,
        model: Path,
        target: Target,
        *,
        count: int,
        num_tokens: int,
        config: dict[str, Any],
        chat_template: str = "",
    ) -> None:
        """`num_tokens`: of the longest request, output included. `chat_template`: if not the
        tokenizer's.
        """
        arguments = target.engine_args(
            model,
            block_size=BLOCK_SIZE,
            max_model_len=num_tokens,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=BATCHED_TOKENS,
            enable_prefix_caching=True,
            logits_processors=[forcing.PROCESSOR],
        )
        settings = target.settings() | {"chat_template": chat_template}

        def start(number: int) -> Engine:
            name = f"engine {number}"
            return Engine(name, config, arguments, threads=target.threads, settings=settings)

        with ThreadPoolExecutor(count) as pool:
            self._engines = list(pool.map(start, range(count)))
        self._idle: SimpleQueue[Engine] = SimpleQueue()
        for engine in self._engines:
            self._idle.put(engine)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def answers(self, questions: Sequence[tuple[Prompt, Setting]], num_new: int) -> list[list[int]]:
        """Greedy tokens of each answer under its setting. Raises EngineError."""
        found: dict[int, list[int]] = {}
        engine = self._idle.get()
        try:
            for protects in (True, False):
                own = {n: q for n, q in enumerate(questions) if q[1].protects_tools is protects}
                if own:
                    load = {
                        "requests": _requests([*own.values()], num_new),
                        "keep_tokens": True,
                        "keep_prefixes": True,
                        "config": {"protect": {"tools": protects}},
                    }
                    found |= zip(own, engine.ask(load)["output_ids"], strict=True)
        finally:
            self._idle.put(engine)
        return [_answer(prompt, found[n]) for n, (prompt, _) in enumerate(questions)]


def _requests(questions: Sequence[tuple[Prompt, Setting]], num_new: int) -> list[dict[str, Any]]:
    requests = []
    for prompt, setting in questions:
        arguments = setting.arguments(len(prompt.ids), num_tokens(prompt.parts.tools))
        if prompt.forced:
            arguments = arguments | {forcing.ARGUMENT: prompt.forced}
        requests.append(
            {
                "prompt": prompt.ids,
                "num_new": len(prompt.forced) + (0 if prompt.free else num_new),
                "arguments": arguments,
                "computed": computed_tokens(setting, len(prompt.ids)),
                "natural_end": not prompt.forced,  # forced turns contain tokens that end one
            }
        )
    return requests


def _answer(prompt: Prompt, output: list[int]) -> list[int]:
    """What the model answers in its `output`."""
    return [output[at] for at in prompt.free] if prompt.free else output[len(prompt.forced) :]


def computed_tokens(setting: Setting, num_prompt: int) -> int:
    """How many of the prompt's newest tokens have to be queries of the policy's signal."""
    reads = setting.policy.reads
    if reads is None or reads.of_keys:
        return 1
    return reads.num_rows(num_prompt)
