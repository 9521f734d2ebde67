"""Real servers with data-parallel engines of the tiny model, and their requests by engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.support import reference
from vtoken import wire
from vtoken.demo.server import Server, any_free_port

BUDGET, INTERVAL, NUM_NEW = 48, 8, 96
SEEDS = (0, 1, 2)


def server(model: Path, folder: Path, arguments: Sequence[str]) -> Server:
    """A server that evicts and recomputes every step; its log and state are in `folder`."""
    return Server(
        str(model),
        port=any_free_port(),
        arguments=[
            "--served-model-name=demo",
            "--dtype=float32",
            "--enforce-eager",
            "--max-model-len=1024",
            "--block-size=16",
            "--kv-cache-memory-bytes=16777216",
            "--vtoken-policy=streaming_llm",
            f"--vtoken-budget-tokens={BUDGET}",
            f"--vtoken-interval-tokens={INTERVAL}",
            "--vtoken-evict-when=always",
            "--vtoken-verify-ratio=1.0",
            "--vtoken-check-every-step",
            f"--vtoken-state-dir={folder / 'state'}",
            *arguments,
        ],
        log=folder / "server.log",
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all engines share one core
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            # vLLM 0.33 binds each engine to a memory node of its own: here they share one.
            "VLLM_CPU_SIM_MULTI_NUMA": "0",
        },
        startup_timeout_s=480,
    )


async def fleet(http: httpx.AsyncClient) -> wire.Fleet:
    answer = await http.get("/vtoken/v1/engines")
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=wire.Fleet)


async def complete(http: httpx.AsyncClient, rank: int, seed: int) -> list[int]:
    """The greedy tokens of one prompt, computed by the server's engine `rank`."""
    body = {
        "model": "demo",
        "prompt": prompt(seed),
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"X-data-parallel-rank": str(rank)}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def prompt(seed: int) -> list[int]:
    return reference.random_prompt(70 + 13 * seed, seed)


async def assert_both_engines_are_exact(http: httpx.AsyncClient, hf_model: Any) -> None:
    """Prompts on both of the server's engines give the reference's tokens, under eviction."""
    jobs = [(rank, seed) for rank in (0, 1) for seed in SEEDS]
    found = dict(zip(jobs, await asyncio.gather(*(complete(http, *j) for j in jobs)), strict=True))
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    for seed in SEEDS:
        tokens = found[0, seed]
        assert tokens == found[1, seed]
        expected = reference.generate(hf_model, prompt(seed), NUM_NEW, evict, draft=tokens)
        assert tokens == expected
    for row in (await fleet(http)).engines:
        assert row.status is not None
        assert row.status.tokens.evicted > 0
        assert row.status.requests.finished == len(SEEDS)
        assert row.status.invariants.violations == 0
