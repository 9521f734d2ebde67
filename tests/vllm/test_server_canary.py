"""A trial under load on a trained model: a policy that costs quality is reverted."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.waiting import LIMIT_S, until
from tests.vllm.test_server import all_events, free_port
from vtoken import wire
from vtoken.demo.server import Server
from vtoken.demo.trained_model import TrainedModelError, fetch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_STREAMS = 4
PROMPT_WORDS = 110  # about 160 tokens
BUDGET_TOKENS = 16  # a tenth of the prompt
NUM_NEW = 24
LEAST_AGREEMENT = 0.9


@pytest.fixture(scope="module")
def trained_model() -> Path:
    try:
        return fetch()
    except TrainedModelError as error:
        pytest.skip(f"no trained model: {error}")


async def keep_asking(http: httpx.AsyncClient, number: int) -> None:
    """One completion after another, each of another passage of reference prose."""
    prose = " ".join(topics[name] for name in sorted(topics)).split()
    for turn in itertools.count():
        start = (number + turn * NUM_STREAMS) * PROMPT_WORDS
        body = {
            "model": "trained",
            "prompt": " ".join(prose[start : start + PROMPT_WORDS]),
            "max_tokens": NUM_NEW,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


async def test_a_policy_that_costs_quality_is_taken_back_with_its_figures(
    trained_model: Path, tmp_path: Path
) -> None:
    arguments = [
        "--served-model-name=trained",
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=1024",
        "--block-size=16",
        "--kv-cache-memory-bytes=276480000",
        f"--vtoken-state-dir={tmp_path / 'state'}",
    ]
    change: dict[str, Any] = {
        "policy": {"name": "streaming_llm"},
        "evict_when": "always",
        "budget_tokens": BUDGET_TOKENS,
        "interval_tokens": 0,
        "canary": {"share": 1.0, "control_share": 0.0},
    }
    query = f"guard_canary_agreement={LEAST_AGREEMENT}&guard_for_s=400"
    server = Server(
        str(trained_model),
        port=free_port(),
        arguments=arguments,
        log=tmp_path / "server.log",
        environment={"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        startup_timeout_s=240,
    )
    with server as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as http:
            asking = [asyncio.create_task(keep_asking(http, n)) for n in range(NUM_STREAMS)]
            answer = await http.patch(f"/vtoken/v1/config?{query}", json=change)
            assert answer.status_code == 200, answer.text

            async def after_the_trial() -> wire.ConfigDocument | None:
                assert not any(task.done() for task in asking)
                answer = await http.get("/vtoken/v1/config")
                if answer.status_code == 503:  # a busy machine leaves the engine no time to answer
                    return None
                found = msgspec.json.decode(answer.content, type=wire.ConfigDocument)
                return found if found.trial is None else None

            config = await until(after_the_trial, "the trial ends", limit_s=200, every_s=0.5)
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
            assert config.desired.policy.name == "none"
            (event,) = [e for e in await all_events(http) if "reverted" in e.data]
            status = msgspec.json.decode(
                (await http.get("/vtoken/v1/status")).content, type=wire.Status
            )
    assert event.data["actor"] == "guard"
    found = re.fullmatch(
        r"agreement (0\.\d+) ± 0\.\d+ < 0\.9 over (\d+) canaries", event.data["reason"]
    )
    assert found is not None, event.data["reason"]
    assert float(found[1]) < LEAST_AGREEMENT
    assert int(found[2]) >= wire.GUARD_COUNT
    assert status.canary is not None
    assert (status.canary.groups[0].policy, status.canary.failed) == ("streaming_llm", 0)
