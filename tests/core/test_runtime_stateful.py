"""The whole runtime in pools of 4 to 24 blocks: any order of admissions, steps, configuration
changes, compactions, restores, preemptions and aborts keeps every live token's contents.

A token is live, dead, parked, or live with a copy. The worker compares the contents of every live
token with those that it was written with, so a token that comes back is compared, too.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple
from unittest.mock import patch as replaced

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.support.core.harness import CoreEngine, Request
from vtoken.core.config.prompt_parts import PromptParts
from vtoken.core.config.request_rules import Prompt, RequestRules
from vtoken.core.config.values import merge_patch
from vtoken.core.protocol.step import NO_IDS
from vtoken.core.runtime import shortage
from vtoken.wire import Operation

POLICIES = st.sampled_from(
    [
        {"name": "none"},
        {"name": "streaming_llm", "params": {"sinks": 1}},
        {"name": "sliding_window"},
        {"name": "random", "params": {"sinks": 1, "recent": 1}},
        {"name": "h2o", "params": {"sinks": 1, "recent_ratio": 0.3}},
        {"name": "h2o", "params": {"sinks": 0, "recent_ratio": 1.0, "normalize": True}},
    ]
)
TOKEN_BYTES = 512  # of the core engine's four layers
PARK_BYTES = st.sampled_from([0, 3 * TOKEN_BYTES, 9 * TOKEN_BYTES, 1 << 20, 1 << 20])
PATCHES = st.fixed_dictionaries(
    {},
    optional={
        "policy": POLICIES,
        "theta_f": st.sampled_from([0.0, 0.25, 1.0]),
        "batch_size": st.integers(1, 4),
        "low_watermark_blocks": st.integers(0, 4),
        "headroom_blocks": st.integers(0, 2),
        "experiment": st.fixed_dictionaries(
            {},
            optional={
                "planner": st.sampled_from(["pack", "plug"]),
                "round_rule": st.sampled_from(["price", "paper"]),
            },
        ),
        "reclamation": st.sampled_from(["auto", "auto", "auto", "paused", "off"]),
        "recycle": st.booleans(),
        "prefix_sharing": st.sampled_from(["skip", "index", "copy", "copy"]),
        "budget_tokens": st.integers(2, 10),
        "budget_ratio": st.sampled_from([0.0, 0.0, 0.4, 1.0]),
        "budget_floor_tokens": st.integers(2, 6),
        "interval_tokens": st.integers(0, 3),
        "evict_when": st.sampled_from(["pressure", "always"]),
        "evict_during": st.sampled_from(["decode", "both"]),
        "park_bytes": PARK_BYTES,
        "restore_after_ms": st.sampled_from([0, 0, 3_600_000]),
        "protect": st.fixed_dictionaries({"template": st.booleans(), "last_user": st.booleans()}),
        "probe": st.fixed_dictionaries({"every_steps": st.integers(1, 3)}),
    },
)


class Tokens(NamedTuple):
    """One request's tokens, of those that exist: `parked` ones are dead and have a copy."""

    admissions: int
    num_tokens: int
    live: set[int]
    parked: set[int]


class Engine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.one_of(st.integers(4, 8), st.integers(12, 24)),
        block_size=st.integers(2, 4),
        chunk=st.sampled_from([2, 5, 100, 100]),
        lag=st.integers(0, 1),
        max_drafts=st.sampled_from([0, 2, 5]),
        has_drafter=st.booleans(),
        policy=POLICIES,
        budget=st.integers(2, 6),
        when=st.sampled_from(["pressure", "always"]),
        window=st.sampled_from([None, None, 3, 8]),
        park_bytes=PARK_BYTES,
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        chunk: int,
        lag: int,
        max_drafts: int,
        has_drafter: bool,
        policy: Any,
        budget: int,
        when: str,
        window: int | None,
        park_bytes: int,
    ) -> None:
        # A shortage is near for 32 tokens of growth, more than such pools have when it is quiet.
        self.near = replaced.object(shortage, "WARM_QUERIES", 2)
        self.near.start()
        self.engine = CoreEngine(
            num_blocks=num_blocks,
            block_size=block_size,
            prefill_chunk_tokens=chunk,
            window=None if max_drafts else window,
            worker_lag_steps=0 if max_drafts else lag,
            max_drafts=max_drafts,
            lookahead=max_drafts if has_drafter else 0,
            config={
                "policy": policy,
                "budget_tokens": budget,
                "interval_tokens": 0,
                "evict_when": when,
                "theta_f": 0.0,
                "low_watermark_blocks": num_blocks,
                "park_bytes": park_bytes,
                "restore_after_ms": 0,
            },
        )
        self.engine.worker.hole_us, self.engine.worker.copy_us = 3, 1
        for _ in range(3):
            self.engine.runtime.prices.prefills.add(1000, 1)  # so that requests are swapped
        self.operations: list[Operation] = []
        self.engine.draft = self._draft
        self.count = self.num_back = 0

    @rule(
        data=st.data(),
        prefix=st.sampled_from([None, "p", "p", "q"]),
        max_tokens=st.integers(5, 40),
        pair=st.booleans(),
    )
    def add(self, data: st.DataObject, prefix: str | None, max_tokens: int, pair: bool) -> None:
        """One request, or two in the same step that share a prefix to be hashed in that step."""
        most = (self.engine.store.num_blocks - 1) * self.engine.block_size - 1
        if len(self.engine.waiting) > 3:
            return
        for _ in range(1 + pair):
            prompt = data.draw(st.integers(min(5, most), min(12, most)))
            prefix_tokens = data.draw(st.integers(prompt // 2, prompt))
            head = data.draw(st.integers(0, prompt // 2))
            tail = data.draw(st.integers(head, prompt))
            parts = PromptParts(((0, head),) if head else (), last_user=((tail, prompt),))
            named = data.draw(st.sampled_from([(), (), ((1, 2),), ((0, 1), (3, 5))]))
            forget = data.draw(st.sampled_from([(), (), ((2, 3),), ((2, 3), (5, 9))]))
            self.engine.add(
                f"r{self.count}",
                prompt,
                max_tokens=max_tokens,
                prefix=prefix,
                prefix_tokens=prefix_tokens,
                seed=self.count,
                rules=RequestRules(
                    protect=named if named and named[-1][1] <= prompt else (), forget=forget
                ),
                prompt=Prompt(prompt, lambda parts=parts: parts),
            )
            self.count += 1

    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps: int) -> None:
        self.step(num_steps)

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            before = {
                r.id: (r.admissions, *self._split(r.id))
                for r in self.engine.running
                if r.id in self.engine.runtime.tables
            }
            earlier = self._tokens()
            self.engine.step()
            self.engine.check()
            self._check_returns(earlier)
            for request in self.engine.running:
                admissions, first, others = before.get(request.id, (0, set(), set()))
                if admissions == request.admissions:
                    live = set(self.engine.runtime.tables[request.id].live_ids().tolist())
                    assert not others - live or not first & live

    def _tokens(self) -> dict[str, Tokens]:
        tables = self.engine.runtime.tables
        return {
            r.id: Tokens(
                r.admissions,
                tables[r.id].num_tokens,
                set(tables[r.id].live_ids().tolist()),
                set(tables[r.id].parked_ids().tolist()),
            )
            for r in self.engine.running
            if r.id in tables
        }

    def _check_returns(self, earlier: dict[str, Tokens]) -> None:
        """Only parked tokens come back, and in no step in which their request evicts."""
        for name, now in self._tokens().items():
            before = earlier.get(name)
            if before is None or before.admissions != now.admissions:
                continue
            back = {t for t in now.live - before.live if t < before.num_tokens}
            gone = {t for t in before.live - now.live if t < now.num_tokens}
            assert back <= before.parked
            assert not back or not gone
            assert now.parked <= before.parked | gone
            self.num_back += len(back)

    def _draft(self, request: Request) -> tuple[int, int]:
        """Any number of drafts, of which any are right."""
        rng = random.Random(f"{request.id} {request.num_known}")
        num = rng.randint(0, self.engine.runtime.shape.max_drafts)
        return num, rng.choice([0, num, rng.randint(0, num)])

    def _split(self, request_id: str) -> tuple[set[int], set[int]]:
        """The live tokens that die first, and the others that may die."""
        requests, table = self.engine.runtime.requests, self.engine.runtime.tables[request_id]
        ids = table.live_ids()[:-1]
        named = np.zeros(table.num_tokens, dtype=np.bool_)
        for start, end in requests.forgotten.get(request_id, ()):
            named[start:end] = True
        spared = requests.protection(request_id).covers(ids)
        forgotten = named[ids] & ~spared
        return set(ids[forgotten].tolist()), set(ids[~forgotten].tolist())

    @rule(patch=PATCHES)
    def configure(self, patch: dict[str, Any]) -> None:
        self._configure(patch)

    @rule(budget=st.integers(2, 6), num_steps=st.integers(1, 8))
    def shortage_that_ends(self, budget: int, num_steps: int) -> None:
        """Tokens are parked; then all requests but the first end, and its tokens may come back."""
        ample = {"low_watermark_blocks": 0, "headroom_blocks": 0, "restore_after_ms": 0}
        quiet = {"evict_when": "pressure", "reclamation": "auto"} | ample
        self._configure({"evict_when": "always", "budget_tokens": budget, "park_bytes": 1 << 20})
        self.step(num_steps)
        for request in [*self.engine.running[1:], *self.engine.waiting]:
            self.engine.remove(request.id)
        self._configure(quiet)
        self.step(num_steps)

    def _configure(self, patch: dict[str, Any]) -> None:
        runtime = self.engine.runtime
        runtime.active.config = merge_patch(
            runtime.config, patch, num_blocks=runtime.geometry.num_blocks, num_layers=4
        )

    @rule(data=st.data(), batch_size=st.integers(1, 8))
    def compact(self, data: st.DataObject, batch_size: int) -> None:
        ids = [None, *[t.request_id for t in self.engine.runtime.tables]]
        request_id = data.draw(st.sampled_from(ids))
        operation = self.engine.runtime.operations.add("test", request_id, batch_size, False)
        self.operations.append(operation)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        tables = [table.request_id for table in self.engine.runtime.tables]
        self.engine.runtime.restorer.ask(data.draw(st.sampled_from(tables)))

    @rule(refuses=st.booleans())
    def host_memory(self, refuses: bool) -> None:
        self.engine.worker.refuses_memory = refuses

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Any tokens but those that the client protects, as the engine's commands ensure."""
        requests = self.engine.runtime.requests
        table = data.draw(st.sampled_from([*self.engine.runtime.tables]))
        start = data.draw(st.integers(0, table.num_tokens - 1))
        end = data.draw(st.integers(start + 1, table.num_tokens))
        named = requests.own_rules(table.request_id).protect
        if all(end <= first or last <= start for first, last in named):
            requests.forget_tokens(table.request_id, ((start, end),))

    @rule()
    def preempt(self) -> None:
        self.engine.preempt_newest()

    @precondition(lambda self: self.engine.running or self.engine.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        requests = [*self.engine.running, *self.engine.waiting]
        self.engine.remove(data.draw(st.sampled_from([r.id for r in requests])))

    @invariant()
    def what_a_client_names_stays(self) -> None:
        """Whatever the policy, the budget and the placement."""
        if not hasattr(self, "engine"):
            return
        runtime = self.engine.runtime
        for table in runtime.tables:
            for start, end in runtime.requests.own_rules(table.request_id).protect:
                assert all(table.is_live(t) for t in range(start, min(end, table.num_tokens)))

    @invariant()
    def counters_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        runtime = self.engine.runtime
        assert runtime.counters.invariants.violations == 0
        assert not runtime.current.decisions.other_rows(NO_IDS)
        assert all(runtime.requests.in_flight_step(name) >= 0 for name in runtime.requests.held)
        dead = sum(table.num_dead for table in runtime.tables)
        returns = int(runtime.tables.columns.num_restored[runtime.tables.all_rows].sum())
        assert dead + returns <= runtime.counters.tokens.evicted

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.near.stop()
        engine = self.engine
        for request in [*engine.running, *engine.waiting]:
            engine.remove(request.id)
        engine.step()
        engine.drain()
        engine.check()
        pool = engine.runtime.tables.pool
        assert (pool.num_used, pool.num_live) == (0, 0)
        assert len(engine.store.free) == engine.store.num_blocks - 1
        assert all(op.state in ("done", "failed") for op in self.operations)
        assert engine.runtime.relocator.num_in_flight_tokens == 0
        assert engine.runtime.parking.slots.num_used == 0
        assert engine.runtime.counters.parking.restored_tokens >= self.num_back


Engine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestEngine = Engine.TestCase
