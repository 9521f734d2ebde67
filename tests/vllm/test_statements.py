"""A golden minute: mixed chats on the real engine under the shipped defaults, in a pool that is
short. At every stop, all that the server says is compared with an account of what happened.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import reference
from tests.support.account import (
    Account,
    Moment,
    Said,
    Server,
    contradictions,
    lines_contradictions,
    moment_of,
    screen_contradictions,
    server_contradictions,
)
from tests.support.cli_harness import run
from tests.support.console_harness import running, screen_text
from tests.support.observe import scheduler_of
from tests.support.serving import Served, serve
from vtoken import wire
from vtoken.client import AsyncClient
from vtoken.core.config.values import AUTO_PATCH
from vtoken.vllm import engine_args
from vtoken_api.fanout import hub
from vtoken_api.limits import RateLimits

pytestmark = pytest.mark.vllm

POOL = {"num_gpu_blocks_override": 201, "max_model_len": 1024, "max_num_batched_tokens": 512}
ANSWERS = (8, 60, 160)
CHANGES: list[tuple[str, ...]] = [
    ("config", "set", "budget_ratio=0.4"),
    ("pause",),
    ("resume",),
    ("config", "set", "evict_after_wait_ms=60000"),
    ("undo",),
]


class Engine:
    """One engine in this process behind the real API, and what its clients got."""

    def __init__(self, llm: Any, seed: int) -> None:
        self.llm, self.rng = llm, random.Random(seed)
        self.scheduler = scheduler_of(llm)
        self.account = Account(self.scheduler.vtoken)
        self.output: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def handle(self, command: wire.commands.Command) -> wire.Reply:
        self.scheduler._count_requests()
        reply = self.scheduler.vtoken_controller.handle(command)
        self.publish()
        return reply

    def publish(self) -> None:
        controller = self.scheduler.vtoken_controller
        self.scheduler._publisher.publish(controller.frame, force=True)

    def chat(self) -> None:
        """A request of a length that chats have; some share a system prompt, some ask for more."""
        from vllm import SamplingParams

        rng, number = self.rng, len(self._names)
        prompt = reference.random_prompt(rng.choice([60, 300, 600]), number)
        if rng.random() < 0.4:
            prompt = reference.random_prompt(96, 0) + prompt[1:]
        own = rng.choice([None] * 5 + [{"vtoken_policy": "none"}, {"vtoken_report": 1}])
        params = SamplingParams(
            temperature=0, max_tokens=rng.choice(ANSWERS), ignore_eos=True, extra_args=own
        )
        self._names[f"chat{number}"] = ""
        self.llm.llm_engine.add_request(f"chat{number}", {"prompt_token_ids": prompt}, params)

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.rng.random() < 0.12 and self.llm.llm_engine.get_num_unfinished_requests() < 24:
                self.chat()
            if not self.llm.llm_engine.has_unfinished_requests():
                return
            for answer in self.llm.llm_engine.step():
                self.output[answer.request_id] = len(answer.outputs[0].token_ids)

    def moment(self) -> Moment:
        names = (*self.scheduler.requests, *self.account.ended)
        output = {name: self.output.get(name.rpartition("-")[0], 0) for name in names}
        return moment_of(self.scheduler, output)


async def all_events(client: AsyncClient) -> list[wire.Event]:
    found: list[wire.Event] = []
    while page := (await client.events(found[-1].seq if found else 0, 1000)).events:
        found += page
    return found


async def documents(served: Served, client: AsyncClient, account: Account) -> Said:
    """Everything that the API answers at this moment."""
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as http:
        scraped = (await http.get("/metrics")).text
    names = [*account.ended][-6:]
    series = re.findall(r"^(vllm:vtoken_\S+) (\S+)$", scraped, re.MULTILINE)
    return Said(
        status=await client.status(),
        rows=await client.requests(),
        config=await client.config(),
        blocks=await client.blocks(),
        events=await all_events(client),
        details={name: await client.request(name) for name in names},
        dry_run=await client.patch_config({"budget_tokens": 1024}, validate_only=True),
        metrics={name: float(value) for name, value in series},
    )


async def served_documents(client: AsyncClient, said: Said) -> Server:
    """What the API itself adds at this moment: engines, the audit log, one block with its slots."""
    used = np.flatnonzero(wire.unpack_array(said.blocks.live, "<u2"))
    number = int(used[len(used) // 2]) if len(used) else 1
    engines, audit = await client.engines(), await client.audit()
    return Server(engines.engines, audit.entries, await client.block(number))


@asynccontextmanager
async def serving(engine: Any) -> AsyncIterator[tuple[Engine, Served, AsyncClient]]:
    with engine(block_size=16, **POOL, **engine_args(AUTO_PATCH, check_every_step=True)) as llm:
        mine = Engine(llm, seed=1)
        async with serve(mine.handle) as served, AsyncClient(served.url) as client:
            served.service.auth.limits = RateLimits({})
            yield mine, served, client


async def test_a_minute_of_chats_has_no_two_statements_that_contradict_each_other(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "FRESH_S", 0.0)  # a scrape has the values of its moment
    found: list[str] = []
    heads = set[str]()
    async with serving(engine) as (mine, served, client):
        for _ in range(12):
            mine.chat()
        for stop in range(25):
            mine.steps(12)
            mine.publish()
            said = await documents(served, client, mine.account)
            found += contradictions(said, mine.account, mine.moment())
            found += [*server_contradictions(said, await served_documents(client, said))]
            heads.add(re.split("[ :]", said.status.fragmentation.sentence)[0])
            if stop in (3, 12, 21):
                for command in ("status", "doctor", "requests", "events"):
                    ran = await run(command, "--url", served.url)
                    found += lines_contradictions(command, ran.out, said, mine.account)
                async with running(served.url, size=(180, 45)) as (app, _):
                    found += screen_contradictions(screen_text(app), said)
            if stop % 5 == 4:
                ran = await run(*CHANGES[stop // 5], "--url", served.url)
                assert ran.code == 0, ran.err
        assert found == []
        assert mine.account.given > 0
        assert {"GIVING", "SHORT", "FULL"} & heads
