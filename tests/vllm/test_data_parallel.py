"""A real server with two engines (`--data-parallel-size 2`): exact on both, changed together.

The last test ends an engine, so the server with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from tests.support import reference
from tests.support.waiting import until
from vtoken import wire
from vtoken.demo.server import Server, any_free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BUDGET, INTERVAL, NUM_NEW = 48, 8, 96


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two-engines")
    arguments = [
        "--served-model-name=demo",
        "--data-parallel-size=2",
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
    ]
    with Server(
        str(demo_model),
        port=any_free_port(),
        arguments=arguments,
        log=folder / "server.log",
        environment={
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else both engines share one core
            "OMP_NUM_THREADS": "1",
        },
        startup_timeout_s=240,
    ) as running:
        yield running


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


async def fleet(http: httpx.AsyncClient) -> wire.Fleet:
    answer = await http.get("/vtoken/v1/engines")
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=wire.Fleet)


async def complete(http: httpx.AsyncClient, rank: int, seed: int) -> list[int]:
    """The greedy tokens of one prompt, computed by the engine `rank`."""
    body = {
        "model": "demo",
        "prompt": reference.random_prompt(70 + 13 * seed, seed),
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


async def test_both_engines_compute_what_the_reference_does(
    http: httpx.AsyncClient, hf_model: Any
) -> None:
    seeds = (0, 1, 2)
    found = await asyncio.gather(*(complete(http, rank, seed) for rank in (0, 1) for seed in seeds))
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    for seed, zero, one in zip(seeds, found[:3], found[3:], strict=True):
        prompt = reference.random_prompt(70 + 13 * seed, seed)
        assert zero == one == reference.generate(hf_model, prompt, NUM_NEW, evict)
    for row in (await fleet(http)).engines:
        assert row.status is not None
        assert row.status.tokens.evicted > 0
        assert row.status.requests.finished == len(seeds)
        assert row.status.invariants.violations == 0


async def test_a_change_under_load_is_made_on_both_and_audited_once(
    http: httpx.AsyncClient,
) -> None:
    running = [asyncio.create_task(complete(http, rank, 7 + rank)) for rank in (0, 1)]
    before = await fleet(http)
    answer = await http.patch("/vtoken/v1/config", json={"theta_f": 0.5})
    result = msgspec.json.decode(answer.content, type=wire.PatchResult)
    assert [part.engine for part in result.engines] == [0, 1]
    started = await http.post("/vtoken/v1/compactions", json={})
    assert started.status_code == 202
    await asyncio.gather(*running)

    async def ended() -> bool:
        found = (await http.get(started.headers["location"])).content
        return msgspec.json.decode(found, type=wire.Operation).state == "done"

    await until(ended, "the compaction does not end")
    after = await fleet(http)
    assert after.ok
    assert after.revision == before.revision + 1
    page = msgspec.json.decode((await http.get("/vtoken/v1/audit")).content, type=wire.AuditPage)
    assert [(e.action, e.engine) for e in page.entries] == [("config", None), ("compact", None)]


async def test_one_engine_drifts_and_is_given_the_common_configuration(
    http: httpx.AsyncClient,
) -> None:
    await http.patch("/vtoken/v1/config?engine=1", json={"theta_f": 0.75})
    found = await fleet(http)
    assert not found.ok
    assert "theta_f" in found.sentence
    answer = await http.post("/vtoken/v1/sync?engine=0")
    assert answer.status_code == 200, answer.text
    found = await fleet(http)
    assert found.ok, found.sentence


async def test_an_engine_that_dies_is_told_before_the_server_ends(
    http: httpx.AsyncClient,
) -> None:
    """vLLM ends a server when one of its engines dies; nothing hangs until then."""
    children = psutil.Process().children(recursive=True)
    (engine,) = [child for child in children if "EngineCore_DP1" in " ".join(child.cmdline())]
    os.kill(engine.pid, signal.SIGKILL)

    async def told() -> bool:
        try:
            found = await fleet(http)
        except httpx.HTTPError:
            return True
        return all(row.problem for row in found.engines)

    await until(told, "an engine that died seems to answer")
