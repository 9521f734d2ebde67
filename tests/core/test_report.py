"""Status, rows, blocks and token pages say what the tables and the pool hold; bad questions are
refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.core.live import LiveEngine, make_engine, make_quiet
from vtoken.base.quantities import time_text
from vtoken.control.waiting import MAX_WAITING_ROWS
from vtoken.core.config.request_rules import RequestRules
from vtoken.core.runtime.losses import answer_report
from vtoken.sentences import budget_text, policy_text
from vtoken.wire import (
    FLAG_HASHED,
    FLAG_IN_FLIGHT,
    FLAG_NULL,
    FLAG_SHARED,
    FLAG_TAIL,
    FLAG_USED,
    RequestDetail,
    RequestRow,
    Status,
)
from vtoken.wire.metrics import METRICS

WAITS = ("arrived_ts", "waiting_since_ts", "waited_s", "needed_blocks")


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    """Shared prefix, holes, relocations; at rest."""
    with make_engine(
        num_blocks=96,
        block_size=4,
        concurrency=4,
        prompt_tokens=30,
        prefix_tokens=9,
        max_tokens=90,
        config={
            "policy": {"name": "h2o", "params": {"sinks": 2}},
            "budget_tokens": 18,
            "evict_when": "always",
            "interval_tokens": 3,
            "theta_f": 0.0,
            "low_watermark_blocks": 96,
        },
    ) as live:
        live.steps(40)
        yield live


def test_the_status_adds_up(engine: LiveEngine) -> None:
    status: Status = engine.call("status")
    runtime, store = engine.core.runtime, engine.core.store
    tables = list(runtime.tables)
    blocks = status.blocks
    assert blocks.total == 95
    assert blocks.used + blocks.free == blocks.total
    assert blocks.used == len({b for t in tables for b in t.blocks})
    assert blocks.shared == sum(n > 1 for n in store.ref_cnt)
    assert blocks.low_utilization <= blocks.used
    assert blocks.partially_live <= blocks.used
    live = {slot for t in tables for slot in t.slots_of(t.live_ids()).tolist()}
    assert status.tokens.live == len(live)
    assert status.fragmentation.f == pytest.approx(1 - len(live) / (4 * blocks.used))
    assert status.tokens.evicted == sum(
        e.data["tokens"] for e in engine.call("events", limit=10_000).events if e.kind == "eviction"
    )
    assert status.reclamation.held_blocks == sum(len(t.blocks) for t in tables)
    assert status.reclamation.packed_bound_blocks == sum(-(-t.num_live // 4) for t in tables)
    assert status.requests.running == 4
    assert status.invariants.violations == 0
    assert status.config_revision == 1


@pytest.mark.parametrize("evict_when", ["always", "pressure"])
@pytest.mark.parametrize("ratio", [0.0, 0.25])
def test_the_status_has_the_budget_that_is_in_force(
    engine: LiveEngine, ratio: float, evict_when: str
) -> None:
    engine.configure(budget_ratio=ratio, budget_floor_tokens=40, evict_when=evict_when)
    status = engine.reporter.status()
    budget = (status.budget_ratio, status.budget_floor_tokens, status.budget_tokens)
    assert budget == ((0.25, 40, 0) if ratio else (0, 0, engine.runtime.config.budget_tokens))
    assert status.evict_when == evict_when
    assert (status.interval_tokens == 0) == (evict_when == "pressure")
    scraped = {
        metric.name: value
        for metric in METRICS
        if metric.name.startswith("budget_")
        for _, value in metric.read(status)
    }
    in_force = ("budget_ratio", "budget_floor_tokens") if ratio else ("budget_tokens",)
    assert scraped == {name: getattr(status, name) for name in in_force}


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (
            {"evict_when": "pressure", "budget_ratio": 0.5},
            "floor 50% of prompt, at least 128 tokens",
        ),
        ({"evict_when": "pressure", "budget_tokens": 2048}, "floor 2,048 tokens"),
        ({"evict_when": "always", "budget_tokens": 2048}, "budget 2,048 (+16) tokens"),
        ({"budget_ratio": 0.125}, "budget 12.5% of prompt (+16), at least 128 tokens"),
    ],
)
def test_floor_and_budget_have_one_text(
    engine: LiveEngine, fields: dict[str, Any], shown: str
) -> None:
    status = engine.reporter.status()
    status = msgspec.structs.replace(
        status,
        **{"interval_tokens": 16, "budget_floor_tokens": 128, "evict_when": None} | fields,
    )
    assert budget_text(status) == shown
    modes = {"pressure": " while memory is short", "always": " always", None: ""}
    assert policy_text(status) == f"{status.policy.name}{modes[status.evict_when]}: {shown}"


def test_prices_are_priors_until_they_are_measured(engine: LiveEngine) -> None:
    before: Status = engine.call("status")
    assert before.prices is not None
    assert (before.prices.hole.us, before.prices.copy.us) == (0, 0)
    assert before.prices.saving_us == 0
    engine.core.worker.hole_us, engine.core.worker.copy_us = 1_000, 7
    engine.call("patch_config", patch={"reclamation": "paused", "recycle": False})
    engine.steps(40)
    status: Status = engine.call("status")
    prices, runtime = status.prices, engine.core.runtime
    assert prices is not None
    assert (prices.hole.us, prices.hole.per, prices.hole.source) == (1_000, "token", "measured")
    assert prices.hole.samples > 15
    assert (prices.plan.per, prices.plan.us) == ("request", round(runtime.prices.plan_us, 4))
    done = status.reclamation
    assert done.pack_us == 1_000 * (done.packed_tokens - before.reclamation.packed_tokens) > 0
    estimate = runtime.round_planner.estimate(runtime.config)
    assert prices.loose_tokens == estimate.loose_tokens > 0
    assert (prices.moved_tokens, prices.requests) == estimate[2:]
    assert prices.saving_us == pytest.approx(1_000 * estimate.packed_tokens)
    (gate,) = [gate for gate in status.fragmentation.gates if gate.name == "price"]
    assert gate.open
    assert f"saves {time_text(prices.saving_us / 1e3)} > costs " in gate.detail


def test_the_rows_add_up(engine: LiveEngine) -> None:
    rows = engine.call("requests")
    assert [row.id for row in rows] == [t.request_id for t in engine.core.runtime.tables]
    for row in rows:
        assert row.live + row.dead == row.prompt_tokens + row.output_tokens - 1
        assert row.prompt_tokens == 30
        assert row.bound_blocks <= row.blocks
        detail = engine.call("request", request_id=row.id)
        assert sum(detail.block_live) == row.live
        assert len(detail.block_table) == len(detail.block_live) == row.blocks
        assert (detail.live, detail.policy) == (row.live, "h2o")


def test_preemptions_are_counted_a_request_until_it_finishes(engine: LiveEngine) -> None:
    name = engine.core.running[-1].id
    for _ in range(2):
        engine.core.preempt_newest()
        engine.steps()
        engine.core.running.sort(key=lambda request: request.id == name)
    row = {row.id: row for row in engine.call("requests")}[name]
    assert row.preemptions == 2
    assert engine.call("status").requests.preempted == 2
    engine.core.remove(name)
    assert name not in engine.core.runtime.requests.announced


def test_waiting_and_preempted_requests_have_rows(engine: LiveEngine) -> None:
    core = engine.core
    preempted = core.running[-1]
    core.preempt_newest()
    core.add("later", 370)
    rows = {row.id: row for row in engine.call("requests")}
    assert [row.state for row in rows.values()] == [*["running"] * 3, "preempted", "waiting"]
    row = rows[preempted.id]
    assert (row.preemptions, row.prompt_tokens, row.policy) == (1, 30, "h2o")
    assert row.output_tokens == preempted.num_known - 30
    row = rows["later"]
    assert (row.prompt_tokens, row.output_tokens) == (core.waiting[1].num_known, 0)
    for row in list(rows.values())[3:]:
        assert row.live == row.dead == row.blocks == row.naive_blocks == row.number == 0
        detail = engine.call("request", request_id=row.id)
        assert (detail.state, detail.block_table) == (row.state, [])
        page = engine.call("tokens", request_id=row.id)
        assert (page.total, page.rows) == (0, [])
    assert engine.call("frame").requests == list(rows.values())
    refused = engine.ask("compact", request_id="later").problem
    assert refused is not None
    assert refused.status == 404  # it holds nothing
    assert engine.ask("request", request_id="nobody").problem is not None


def test_a_row_says_since_when_its_request_waits_and_how_long_it_has_waited() -> None:
    with make_quiet(num_blocks=24) as engine:
        core, admission = engine.core, engine.core.runtime.admission
        engine.admit("first", 300)

        def row(name: str) -> RequestRow:
            detail: RequestDetail = engine.call("request", request_id=name)
            (found,) = (row for row in engine.call("requests") if row.id == name)
            assert [getattr(detail, field) for field in WAITS] == [
                getattr(found, field) for field in WAITS
            ]
            return found

        engine.steps()
        running = row("first")
        assert (running.waiting_since_ts, running.needed_blocks) == (None, 0)
        assert running.waited_s > 0
        core.add("long", 80)
        core.add("longer", 100)
        engine.steps()
        waiting, behind = row("long"), row("longer")
        assert waiting.waiting_since_ts == waiting.arrived_ts > running.arrived_ts
        assert (waiting.waited_s, behind.waited_s) == (0.0, 0.0)
        first = engine.call("status").requests.first
        assert admission.demand is not None
        assert (first.id, first.needed_blocks) == ("long", waiting.needed_blocks)
        assert behind.needed_blocks == -(-100 // 16)
        assert row("long") == waiting  # an age would change it in every frame
        core.preempt_newest()
        again = row("first")
        assert (again.state, again.arrived_ts) == ("preempted", running.arrived_ts)
        assert again.waiting_since_ts > again.arrived_ts
        assert again.waited_s == running.waited_s  # a new wait, which has not ended
        assert again.needed_blocks > 300 // 16
        engine.steps(2)
        assert row("first").waited_s > running.waited_s
        core.remove("first")
        assert engine.call("request", request_id="first").waited_s > running.waited_s


def test_only_the_first_requests_of_a_long_queue_have_rows(engine: LiveEngine) -> None:
    engine.concurrency = 0
    core = engine.core
    for number in range(MAX_WAITING_ROWS + 10):
        core.add(f"w{number}", 90 * 4)
    engine.steps()
    waiting = [row.id for row in engine.call("requests") if row.state == "waiting"]
    assert waiting == [request.id for request in list(core.waiting)[:MAX_WAITING_ROWS]]
    assert engine.call("status").requests.waiting == len(core.waiting) > MAX_WAITING_ROWS
    assert engine.call("request", request_id=core.waiting[-1].id).state == "waiting"


def test_the_block_map_and_the_block_documents_agree(engine: LiveEngine) -> None:
    document = engine.call("blocks")
    live = np.frombuffer(document.live, dtype="<u2")
    flags = np.frombuffer(document.flags, dtype="u1")
    store = engine.core.store
    owner = np.frombuffer(document.owner, dtype="<u2")
    numbers = {row.number: row.id for row in engine.call("requests")}
    assert sorted(numbers) == [1, 2, 3, 4]
    assert len(live) == len(flags) == len(owner) == document.num_blocks == 96
    for block in range(1, 96):
        detail = engine.call("block", id=block)
        assert (detail.live, detail.flags) == (live[block], flags[block])
        assert bool(flags[block] & FLAG_USED) == (store.ref_cnt[block] > 0)
        assert bool(flags[block] & FLAG_SHARED) == (store.ref_cnt[block] > 1)
        held_and_hashed = store.ref_cnt[block] > 0 and store.hash[block] is not None
        assert bool(flags[block] & FLAG_HASHED) == held_and_hashed
        assert detail.ref_cnt == store.ref_cnt[block] == len(detail.owners)
        states = [slot.state for slot in detail.slots]
        assert states.count("live") == detail.live
        assert [slot.offset for slot in detail.slots] == [0, 1, 2, 3]
        for slot in detail.slots:
            assert (slot.token_id is None) == (slot.state == "free")
        newest = detail.owners[-1].request_id if detail.owners else None
        assert numbers.get(int(owner[block])) == newest
        if not detail.owners:
            assert states == ["free"] * 4
            assert flags[block] == 0
    tails = {t.blocks[-1] for t in engine.core.runtime.tables}
    assert {b for b in range(96) if flags[b] & FLAG_TAIL} == tails


def test_the_null_block_is_named_and_is_no_free_block(engine: LiveEngine) -> None:
    engine.steps(20)
    flags = np.frombuffer(engine.call("blocks").flags, dtype="u1")
    assert np.flatnonzero(flags & FLAG_NULL).tolist() == [0]
    status = engine.call("status")
    assert np.count_nonzero(flags == 0) == status.blocks.free
    assert len(flags) - 1 == status.blocks.total
    null = engine.call("block", id=0)
    assert (null.pinned, null.flags, null.ref_cnt, null.slots) == ("null block", FLAG_NULL, 0, [])


def test_blocks_of_the_newest_relocation_are_flagged_in_flight(engine: LiveEngine) -> None:
    for _ in range(60):
        engine.steps()
        data = [
            e.data
            for e in engine.call("events", limit=10_000).events
            if e.kind == "relocation" and e.step == engine.core.runtime.step
        ]
        flags = np.frombuffer(engine.call("blocks").flags, dtype="u1")
        expected = {b for d in data for b in (*d["source_blocks"], *d["destination_blocks"])}
        assert {int(b) for b in np.flatnonzero(flags & FLAG_IN_FLIGHT)} == expected
        if expected:
            block = data[0]["destination_blocks"][0]
            assert engine.call("block", id=block).pinned == "in flight"
            return
    pytest.fail("no relocation in 60 steps")


def test_token_pages_join_into_the_complete_table(engine: LiveEngine) -> None:
    table = next(iter(engine.core.runtime.tables))
    rows = []
    start = 0
    while page := engine.call("tokens", request_id=table.request_id, start=start, limit=7).rows:
        rows += page
        start += 7
    assert [row.token_id for row in rows] == [*range(table.num_tokens)]
    assert [row.token_id for row in rows if row.live] == table.live_ids().tolist()
    places = [(row.block, row.offset) for row in rows if row.live]
    slots = table.slots_of(table.live_ids()).tolist()
    assert places == [(slot // 4, slot % 4) for slot in slots]
    assert any(not row.live and row.block is None for row in rows)
    assert any(row.score is not None for row in rows)


def test_what_was_protected_and_forgotten_is_known_of_a_finished_request() -> None:
    live = make_quiet()
    live.configure(policy={"name": "streaming_llm", "params": {"sinks": 4}})
    live.admit("a", 40, rules=RequestRules(protect=((2, 5), (9, 10))))
    live.steps(2)
    live.call("forget", request_id="a", spans=[(20, 24)])
    running = live.call("request", request_id="a")
    assert (running.protected, running.forgotten) == ([(2, 5), (9, 10)], [(20, 24)])
    live.finish("a")
    ended = live.call("request", request_id="a")
    assert ended.state == "finished"
    for field in ("protected", "protection_cut", "forgotten", "prompt_tokens", "output_tokens"):
        assert getattr(ended, field) == getattr(running, field)
    live.close()


@pytest.mark.parametrize(("asked", "told"), [(1, 1), (7, 7), (8, None), (9, None), (None, None)])
def test_a_budget_that_a_request_asked_for_in_vain_is_told(
    asked: int | None, told: int | None
) -> None:
    live = make_quiet()
    policy = {"name": "streaming_llm", "params": {"sinks": 4}}
    live.configure(policy=policy, budget_tokens=12)
    live.admit("a", 20, rules=RequestRules(budget_tokens=asked, protect=((2, 5),)))

    def both() -> tuple[int, int | None]:
        detail = live.call("request", request_id="a")
        return detail.budget_tokens, detail.asked_budget_tokens

    in_force = 12 if asked is None else max(8, asked)
    assert both() == (in_force, told)
    live.steps(2)
    assert both() == (in_force, told)
    live.configure(policy=policy | {"params": {"sinks": 1}})
    fewest = 5
    assert both() == (12 if asked is None else max(fewest, asked), 1 if asked == 1 else None)
    live.finish("a")
    assert both() == (12 if asked is None else max(fewest, asked), 1 if asked == 1 else None)
    assert ("asked_budget_tokens" in answer_report(live.call("request", request_id="a"))) == (
        asked == 1
    )
    live.close()
