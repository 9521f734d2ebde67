"""The diagnosis matches the planner: fragmented if a round helps, full if not; its advice works.

With a fixed budget; under pressure: `test_advice.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.core.harness import LiveEngine, make_engine
from tests.support.core.windows import Windows
from vtoken.core.runtime.admission import DEMAND_VALID_STEPS
from vtoken.sentences.advice import put_into_words
from vtoken.sentences.situation import MAX_LENGTH
from vtoken.wire import Advice, Fragmentation, Operation, PatchResult, Status

BASE: dict[str, Any] = {
    "num_blocks": 96,
    "block_size": 4,
    "concurrency": 4,
    "prompt_tokens": 30,
    "max_tokens": 200,
    "prefix_tokens": 0,
}
EVICTING = {
    "policy": {"name": "random", "params": {"sinks": 1, "recent": 2}},
    "budget_tokens": 16,
    "evict_when": "always",
    "interval_tokens": 4,
    "recycle": False,
    "headroom_blocks": 48,
}


@contextmanager
def running(steps: int = 60, **options: Any) -> Iterator[LiveEngine]:
    """An engine with holes after some steps, at rest."""
    config = EVICTING | options.pop("config", {})
    with make_engine(**BASE | options, config=config) as engine:
        engine.steps(steps)
        yield engine


def told(engine: LiveEngine) -> Status:
    """The status in words; its figures are those of a compaction, and the sentence is short."""
    status: Status = engine.call("status")
    put_into_words(status)
    found = status.fragmentation
    assert len(found.sentence) <= MAX_LENGTH
    assert found.sentence.lower().startswith(("idle", found.cause))
    assert [gate.name for gate in found.gates] == [
        "reclamation",
        "theta_f",
        "watermark",
        "pause",
        "low_utilization",
        "headroom",
    ]
    operation: Operation = engine.call("compact", dry_run=True)
    assert operation.plan is not None
    assert found.reclaimable_blocks == operation.plan.freed_blocks
    assert found.reclaim_moved_tokens == operation.plan.moved_tokens
    return status


def diagnose(engine: LiveEngine) -> Fragmentation:
    return told(engine).fragmentation


def advised(engine: LiveEngine, code: str) -> Advice:
    """The advice about `code`."""
    status = told(engine)
    (found,) = (one for one in status.advice if one.code == code)
    return found


def patch(engine: LiveEngine, **changes: Any) -> None:
    answer: PatchResult = engine.call("patch_config", patch=changes)
    assert answer.changes


def closed(found: Fragmentation) -> list[str]:
    return [gate.name for gate in found.gates if not gate.open]


def wait_for_blocks(engine: LiveEngine, blocks: int) -> None:
    """Add a request that waits for more blocks than are free."""
    core = engine.core
    engine.concurrency = 0
    core.add("big", 4 * (core.store.num_free_blocks() + blocks))
    engine.steps(1)
    assert core.runtime.admission.demand.missing_blocks > 0


# ---------------------------------------------------------------- idle, and nothing to do


def test_an_idle_engine_is_reported_as_idle() -> None:
    with running(0, concurrency=0) as engine:
        found = diagnose(engine)
        assert found.sentence == "IDLE: the whole pool is free."
        assert found.reclaimable_blocks == 0
        engine.facts.waiting = 2
        assert diagnose(engine).sentence == "IDLE: 2 wait for a first step."


@pytest.mark.parametrize(("watermark", "headroom"), [(6, 20), (20, 6)])
@pytest.mark.parametrize("planner", ["plug", "pack"])
@pytest.mark.parametrize("policy", [EVICTING["policy"], {"name": "none"}])
def test_cause_and_sentence_agree_for_every_number_of_free_blocks(
    watermark: int, headroom: int, planner: str, policy: dict[str, Any]
) -> None:
    """Below, between and above low watermark and headroom; with holes and without."""
    config = {"reclamation": "paused", "experiment": {"planner": planner}, "policy": policy}
    limits = {"low_watermark_blocks": watermark, "headroom_blocks": headroom}
    with running(20, config=config | limits) as engine:
        for free in (30, 21, 20, 13, 7, 6, 0):
            engine.core.store.take(engine.core.store.num_free_blocks() - free)
            found = diagnose(engine)
            gain = found.reclaimable_blocks
            if gain:
                assert found.cause == ("fragmented" if free <= watermark else "ok")
            else:
                assert found.cause == ("full" if free <= headroom else "ok")
            used = f"{(95 - free) / 95:.0%} of the pool in use; nobody waits."
            assert found.sentence == f"{found.cause.upper()}: {used}"


def test_the_advice_names_the_groups_that_fill_the_pool() -> None:
    config = {"policy": {"name": "none"}, "reclamation": "paused", "headroom_blocks": 48}
    with running(20, config=config, concurrency=2) as engine:
        used = engine.runtime.tables.pool.num_used
        group = Windows(engine.store, window=64)
        engine.runtime.other_groups = [group]
        group.hold("x", used)
        assert "groups" not in [one.code for one in told(engine).advice]  # no more than half
        group.hold("x", 1)
        wait_for_blocks(engine, 4)
        held = len(set(group.block_ids()))
        text = advised(engine, "groups").text
        assert text.startswith(f"windows hold {held} of {held + used} used blocks, which ")


def test_free_blocks_are_ok_whoever_waits_for_something_else() -> None:
    with running(config={"policy": {"name": "none"}, "low_watermark_blocks": 0}, steps=3) as engine:
        engine.facts.waiting = 7
        sentence = diagnose(engine).sentence
        assert sentence.endswith("of the pool in use; 7 wait, not for want of blocks.")


@pytest.mark.parametrize("seed", range(12))
def test_the_diagnosis_matches_the_planner_under_any_configuration(seed: int) -> None:
    rng = random.Random(seed)
    config = {
        "policy": rng.choice([EVICTING["policy"], {"name": "streaming_llm"}]),
        "budget_tokens": rng.choice([14, 20]),
        "interval_tokens": rng.choice([0, 3]),
        "recycle": rng.random() < 0.5,
        "reclamation": rng.choice(["paused", "auto"]),
        "experiment": {"planner": rng.choice(["plug", "pack"])},
        "headroom_blocks": rng.choice([2, 20]),
        "batch_size": rng.choice([4, 60]),
        "prefix_sharing": rng.choice(["skip", "index", "copy"]),
        "theta_f": 0.0,
    }
    with running(0, config=config, prefix_tokens=16, max_tokens=40) as engine:
        for _ in range(60):
            engine.steps(1)
            diagnose(engine)


def test_frames_do_without_the_planner_for_a_while_and_have_the_numbers_of_their_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(config={"reclamation": "paused", "batch_size": 2}) as engine:
        planner = engine.runtime.round_planner
        rounds, preview = [], planner.preview

        def counted(*args: Any, **kwargs: Any) -> Any:
            rounds.append(preview(*args, **kwargs))
            return rounds[-1]

        monkeypatch.setattr(planner, "preview", counted)
        for _ in range(20):
            engine.steps(1)
            status = engine.controller.frame(max_age_s=float("inf")).status
            assert status is not None
            assert status.blocks.free == engine.store.num_free_blocks()
            assert status.fragmentation.f == engine.runtime.tables.pool.fragmentation
            assert status.fragmentation.reclaimable_blocks == 2
        assert len(rounds) == 1
        patch(engine, batch_size=3)  # what was found under another configuration counts no more
        assert engine.controller.frame().status.fragmentation.reclaimable_blocks == 3
        engine.steps(1)
        engine.call("status")
        engine.call("status")  # nothing has changed since
        assert len(rounds) == 3


# ---------------------------------------------------------------- fragmented: the advice works


def follow(engine: LiveEngine, advice: Advice) -> None:
    """Apply the advice: the next step relocates, and frees what was promised."""
    relocator, pool = engine.runtime.relocator, engine.runtime.tables.pool
    before, used = relocator.num_rounds, pool.num_used
    frees = number_in(advice.text, r"a compaction frees (\d+) block")
    patch(engine, **advice.change)
    assert closed(diagnose(engine)) == []
    engine.runtime.begin_step([])
    assert relocator.num_rounds == before + 1
    assert used - pool.num_used == frees > 0


def number_in(text: str, pattern: str) -> float:
    match = re.search(pattern, text)
    assert match is not None, text
    return float(match[1])


@pytest.mark.parametrize("mode", ["paused", "off"])
def test_fragmented_while_reclamation_is_off(mode: str) -> None:
    config = {"reclamation": mode, "low_watermark_blocks": 95}
    with running(config=config) as engine:
        found = diagnose(engine)
        assert found.sentence.startswith("FRAGMENTED: ")
        assert closed(found) == ["reclamation"]
        advice = advised(engine, "compaction")
        assert advice.change == {"reclamation": "auto"}
        follow(engine, advice)


def test_fragmented_below_theta_f() -> None:
    with running(config={"theta_f": 0.9, "low_watermark_blocks": 95}) as engine:
        found, advice = diagnose(engine), advised(engine, "compaction")
        assert found.f - 0.01 <= advice.change["theta_f"] < found.f
        assert closed(found) == ["theta_f"]
        follow(engine, advice)


def test_fragmented_above_the_watermark_while_a_request_waits() -> None:
    with running(config={"low_watermark_blocks": 0, "theta_f": 0.0}) as engine:
        wait_for_blocks(engine, 4)
        found, advice = diagnose(engine), advised(engine, "compaction")
        lacking = engine.core.runtime.admission.demand.missing_blocks
        assert found.sentence.startswith("FRAGMENTED: 1 waits (")
        assert found.sentence.endswith(f": {lacking} missing.")
        assert closed(found) == ["watermark"]
        assert [*advice.change] == ["low_watermark_blocks"]
        follow(engine, advice)


def test_fragmented_and_a_round_is_due() -> None:
    with running(config={"reclamation": "off", "low_watermark_blocks": 95}) as engine:
        patch(engine, reclamation="auto")
        status = told(engine)
        assert closed(status.fragmentation) == []
        assert [one.code for one in status.advice] == ["compact", "floor"]


def test_fragmented_during_the_pause_after_an_empty_round() -> None:
    """A round finds nothing for lack of headroom; then headroom is free and the pause continues."""
    config = {
        "experiment": {"planner": "pack"},
        "headroom_blocks": 0,
        "low_watermark_blocks": 95,
        "policy": {"name": "none"},
    }
    with running(config={"low_watermark_blocks": 95, "reclamation": "off"}) as engine:
        patch(engine, **config, reclamation="auto")
        engine.steps(3)
        assert closed(diagnose(engine)) == ["pause", "headroom"]
        patch(engine, headroom_blocks=40)
        found = diagnose(engine)
        assert closed(found) == ["pause"]
        assert "compaction" not in [one.code for one in told(engine).advice]


def test_fragmented_with_too_few_half_empty_blocks_for_a_round() -> None:
    """Few holes in each block, such as blocks of eight with six live tokens."""
    config = {
        "policy": {"name": "random", "params": {"sinks": 1, "recent": 2}},
        "budget_tokens": 100,
        "evict_when": "always",
        "theta_f": 0.0,
        "low_watermark_blocks": 95,
    }
    with running(8, config=config, block_size=8, prompt_tokens=150, concurrency=1) as engine:
        for _ in range(40):
            found = diagnose(engine)
            if closed(found) == ["low_utilization"] and found.reclaimable_blocks:
                codes = [one.code for one in told(engine).advice]
                assert "compaction" not in codes
                assert advised(engine, "compact").command == "vtoken compact"
                operation = engine.core.runtime.operations.add("me", None, 95, False)
                engine.steps(1)
                assert operation.result is not None
                assert operation.result.freed_blocks >= found.reclaimable_blocks
                return
            engine.steps(1)
        pytest.fail("never fragmented without two half-empty blocks")


# ---------------------------------------------------------------- full: what helps


def test_a_pool_full_of_live_tokens_is_full_and_a_policy_that_evicts_helps() -> None:
    config = {"policy": {"name": "none"}, "budget_floor_tokens": 40}
    with running(config=config, concurrency=2) as engine:
        wait_for_blocks(engine, 8)
        found = diagnose(engine)
        assert found.cause == "full"
        advice = advised(engine, "policy")
        assert advice.change["policy"]["name"] == "keydiff"
        assert advice.command.startswith("vtoken config set policy.name=keydiff budget_ratio=0.5 ")


def test_full_for_the_queue_and_a_smaller_budget_frees_what_it_promises() -> None:
    config = {"theta_f": 0.0, "low_watermark_blocks": 95, "recycle": True}
    with running(config=config, concurrency=2) as engine:
        wait_for_blocks(engine, 3)
        found = diagnose(engine)
        lacking = engine.core.runtime.admission.demand.missing_blocks
        assert found.sentence.startswith("FULL: 1 waits (0.0 s), needs ")
        assert found.sentence.endswith(f" blocks now: {lacking} missing.")
        advice = advised(engine, "floor")
        promised = number_in(advice.text, r"budget 16 → 7 tokens: 1 of .* (\d+) blocks? come free")
        used = engine.runtime.tables.pool.num_used
        patch(engine, **advice.change)
        engine.runtime.begin_step(list(engine.runtime.tables.rows))
        assert used - engine.runtime.tables.pool.num_used >= promised > 0


def test_the_sentence_says_what_a_preempted_request_reads_again() -> None:
    with running(concurrency=2) as engine:
        engine.concurrency = 0
        core = engine.core
        core.preempt_newest()
        told = core.runtime.events.page(0, 1 << 20, "preemption").events[-1].data
        core.store.take(core.store.num_free_blocks() - 2)
        engine.steps(1)
        again = f" to read {told['recomputed_tokens']} tokens again: "
        assert again in diagnose(engine).sentence


def test_lacking_blocks_persist_while_the_engine_does_not_admit() -> None:
    """As in a step that preempts, which admits no request."""
    with running(config={"recycle": True}, concurrency=1) as engine:
        wait_for_blocks(engine, 3)
        lacking = engine.core.runtime.admission.demand.missing_blocks
        engine.core.waiting.clear()
        engine.concurrency = 1
        engine.steps(1)
        engine.facts.waiting = 1
        assert f": {lacking} missing" in diagnose(engine).sentence
        engine.steps(DEMAND_VALID_STEPS)
        engine.facts.waiting = 1
        assert "missing" not in diagnose(engine).sentence


def test_blocks_that_vllms_watermark_withholds_are_lacking_and_open_the_gate() -> None:
    """A request waits although more blocks are free than its prompt takes."""
    config = {"theta_f": 0.0, "low_watermark_blocks": 2, "reclamation": "auto"}
    with running(config=config | {"headroom_blocks": 8}) as engine:
        core = engine.core
        free = core.store.num_free_blocks()
        core.watermark_blocks = free
        engine.concurrency = 0
        core.add("kept out", 8)
        engine.steps(1)
        assert [request.id for request in core.waiting] == ["kept out"]
        found = diagnose(engine)
        lacking = core.runtime.admission.demand.missing_blocks
        assert lacking == 2 + core.watermark_blocks - core.store.num_free_blocks() > 0
        assert found.cause != "ok"
        assert f" now ({free} withheld by --watermark): {lacking} missing" in found.sentence
        assert core.runtime.current.wanted_blocks == lacking + core.watermark_blocks
        assert "watermark" not in closed(found)


def test_full_for_lack_of_headroom() -> None:
    with running(
        config={"reclamation": "off", "experiment": {"planner": "pack"}, "headroom_blocks": 0}
    ) as engine:
        wait_for_blocks(engine, 4)
        patch(engine, reclamation="auto", low_watermark_blocks=95)
        found = diagnose(engine)
        assert "headroom" in closed(found)
        follow(engine, advised(engine, "compaction"))
        engine.core.store.take(engine.core.store.num_free_blocks())
        patch(engine, headroom_blocks=48)
        assert "compaction" not in [one.code for one in told(engine).advice]  # no block is fresh


@pytest.mark.parametrize(
    ("tier", "policy", "better"),
    [
        ("index", {"name": "random", "params": {"sinks": 1, "recent": 6}}, "copy"),
        ("skip", {"name": "random", "params": {"sinks": 1, "recent": 6}}, "copy"),
        ("skip", {"name": "streaming_llm", "params": {"sinks": 4}}, "index"),
    ],
)
def test_full_of_shared_blocks_that_may_not_move(
    tier: str, policy: dict[str, Any], better: str
) -> None:
    """All requests share a prefix in which each has holes of its own, or which is all dead."""
    config = {"prefix_sharing": tier, "theta_f": 0.0, "low_watermark_blocks": 95, "policy": policy}
    config |= {"budget_tokens": 10} if better == "copy" else {}
    with running(3, config=config, prompt_tokens=37, prefix_tokens=36, concurrency=3) as engine:
        core = engine.core
        engine.concurrency = 0
        core.store.take(core.store.num_free_blocks() - 10)
        found = diagnose(engine)
        assert found.cause == "full"
        advice = advised(engine, "compaction")
        gain = number_in(advice.text, rf"prefix_sharing={better} a compaction frees (\d+) block")
        used = core.runtime.tables.pool.num_used
        patch(engine, **advice.change, batch_size=90)
        core.runtime.operations.add("me", None, 90, False)
        core.runtime.begin_step([])
        assert used - core.runtime.tables.pool.num_used == gain > 0
