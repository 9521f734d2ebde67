"""Admission by the blocks that a request holds after eviction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.support.core.live import LiveEngine, make_quiet
from tests.support.core.windows import Windows
from vtoken.core.config.request_rules import Prompt
from vtoken.core.runtime.admission import Requirement
from vtoken.policies import make_policy

CHUNK = 64
RESERVED = Requirement(extra_blocks=1)


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    with make_quiet(num_blocks=65) as made:
        made.runtime.shape.max_chunk_tokens = CHUNK
        made.configure(
            policy={"name": "streaming_llm"},
            budget_tokens=96,
            evict_when="always",
            interval_tokens=32,
            headroom_blocks=2,
            low_watermark_blocks=8,
        )
        yield made


def running(engine: LiveEngine, request_id: str, prompt: int, max_tokens: int) -> None:
    engine.runtime.announce(request_id, None, num_prompt_tokens=prompt, max_tokens=max_tokens)
    engine.admit(request_id, prompt)
    engine.steps()


def asks(engine: LiveEngine, prompt: int, max_tokens: int) -> int:
    """The free blocks that a request requires to be admitted now."""
    admission = engine.runtime.admission
    engine.runtime.announce("new", None, num_prompt_tokens=prompt, max_tokens=max_tokens)
    peak = admission.peak_tokens("new", prompt)
    return -(-peak // 16) + admission.requirement("new", peak).extra_blocks


def test_an_idle_pool_asks_for_the_prompt_alone(engine: LiveEngine) -> None:
    assert asks(engine, 200, 1000) == 13


def test_a_request_is_counted_by_its_peak_under_eviction(engine: LiveEngine) -> None:
    running(engine, "a", 160, 160)  # at its peak: it grows no more
    headroom = 2
    assert asks(engine, 200, 1000) == 13 + headroom  # the prompt is the peak
    assert asks(engine, 32, 1000) == 9 + headroom  # budget + interval + 1 = 129 tokens
    assert asks(engine, 32, 64) == 4 + headroom
    engine.configure(evict_during="both")
    assert asks(engine, 1000, 2000) == 12 + headroom  # budget + interval + chunk = 192 tokens
    engine.configure(evict_during="prefill")
    assert asks(engine, 1000, 1100) == 13 + headroom  # the budget, then 100 more


def test_what_a_failed_policy_would_have_evicted_is_counted(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.configure(evict_during="both")
    policy = engine.runtime.config.policy
    running(engine, "a", 100, 100)
    assert asks(engine, 1000, 2000) == 12 + 2
    monkeypatch.setattr(type(policy), "select_many", lambda *_: 1 / 0)
    running(engine, "b", 160, 160)  # longer than budget + interval
    engine.steps()
    assert engine.runtime.ranking.is_suspended(policy)
    assert asks(engine, 500, 2000) == 32 + 2


def test_a_policy_that_profiles_the_whole_prompt_is_counted_with_all_of_it(
    engine: LiveEngine,
) -> None:
    engine.configure(evict_during="both")
    admission, runtime = engine.runtime.admission, engine.runtime
    assert admission.peak_tokens("new", 1000) == 96 + 32 + CHUNK
    runtime.active.config = replace(runtime.config, policy=make_policy("fastgen", {}))
    assert admission.peak_tokens("new", 1000) == 1000


def test_a_prompt_whose_logprobs_are_asked_for_is_counted_with_all_of_it(
    engine: LiveEngine,
) -> None:
    engine.configure(evict_during="both")
    admission, runtime = engine.runtime.admission, engine.runtime
    runtime.announce("new", None, prompt=Prompt(1000, is_scored=True))
    assert admission.peak_tokens("new", 1000) == 1000
    assert runtime.requests.rules("new").evict_during == "decode"
    assert admission.peak_tokens("other", 1000) == 96 + 32 + CHUNK


def test_a_cached_prefix_is_held_until_the_first_chunk_is_computed(engine: LiveEngine) -> None:
    engine.configure(evict_during="both")
    engine.runtime.announce("new", None, num_prompt_tokens=1000, max_tokens=2000)
    admission = engine.runtime.admission
    assert admission.peak_tokens("new", 1000, 0) == 96 + 32 + CHUNK
    assert admission.peak_tokens("new", 1000, 640) == 640 + CHUNK
    assert admission.peak_tokens("new", 1000, 960) == 1000


def test_a_chunk_that_comes_before_the_scores_of_the_last_one_is_counted_too(
    engine: LiveEngine,
) -> None:
    engine.configure(evict_during="both", policy={"name": "h2o"})
    admission, runtime = engine.runtime.admission, engine.runtime
    assert admission.peak_tokens("new", 1000, 128) == 96 + 32 + CHUNK
    runtime.shape.report_lag_steps = 1
    assert admission.peak_tokens("new", 1000, 128) == 96 + 32 + 2 * CHUNK
    engine.configure(policy={"name": "streaming_llm"})
    assert admission.peak_tokens("new", 1000, 128) == 96 + 32 + CHUNK


def test_what_running_requests_may_still_take_stays_free(engine: LiveEngine) -> None:
    running(engine, "a", 16, 1000)  # holds 1 of the 9 blocks of 129 tokens
    assert asks(engine, 32, 64) == 4 + 8 + 2
    engine.steps(16)
    assert asks(engine, 32, 64) == 4 + 7 + 2


def test_what_is_needed_in_other_groups_is_added_at_the_peak_of_the_sum(
    engine: LiveEngine,
) -> None:
    headroom, beside = 2, Windows(engine.store, window=48)
    running(engine, "a", 160, 160)
    admission = engine.runtime.admission
    engine.core.other_groups.append(beside)
    beside.hold("a", 3)  # its window is full

    def required(prompt: int, max_tokens: int, taken: int, other: int = 0) -> int:
        engine.runtime.announce("new", None, num_prompt_tokens=prompt, max_tokens=max_tokens)
        return admission.requirement("new", taken, other).extra_blocks

    # The prompt is the peak: 13 blocks, and 7 of a window beside a chunk.
    assert required(200, 1000, taken=200, other=7) == headroom
    assert required(200, 1000, taken=64, other=4) == (13 - 4) + (7 - 4) + headroom
    # The output is: 9 blocks of 129 tokens, and 4 of a window beside a token.
    assert required(32, 1000, taken=32, other=2) == (9 - 2) + (4 - 2) + headroom
    # Prompts in chunks: 12 + 7 blocks, more than 9 + 4 later.
    engine.configure(evict_during="both")
    assert required(1000, 2000, taken=64, other=4) == (12 - 4) + (7 - 4) + headroom
    assert engine.runtime.demand.peaks_of("new", engine.runtime.config) == (19, 13)


def test_what_running_requests_may_still_take_in_other_groups_stays_free(
    engine: LiveEngine,
) -> None:
    beside, alone = Windows(engine.store, window=48), 4 + 8 + 2  # as above
    engine.core.other_groups.append(beside)
    running(engine, "a", 16, 1000)
    assert asks(engine, 32, 64) == alone + 4 + 4  # its own window, and that of "a"
    beside.hold("a", 3)
    engine.runtime.current.number += 1
    engine.runtime.admission.begin_step()
    assert asks(engine, 32, 64) == alone + 4 + 1


def test_requests_admitted_in_one_step_count_for_each_other(engine: LiveEngine) -> None:
    engine.steps()
    engine.runtime.announce("first", None, num_prompt_tokens=16, max_tokens=1000)
    engine.runtime.admission.admitted("first", 1)
    assert asks(engine, 32, 64) == 4 + 8 + 2


def test_nothing_is_added_where_nothing_is_evicted_or_reclaimed(engine: LiveEngine) -> None:
    running(engine, "a", 16, 1000)
    for patch in (
        {"experiment": {"admission": "stock"}},
        {"experiment": {"admission": "compressed"}, "reclamation": "off"},
        {"reclamation": "paused"},
        {"reclamation": "auto", "policy": {"name": "none"}},
    ):
        engine.configure(**patch)
        assert asks(engine, 200, 1000) == 13


def test_a_waiting_request_opens_the_gates(engine: LiveEngine) -> None:
    running(engine, "a", 400, 400)
    engine.configure(policy={"name": "random"}, interval_tokens=0, recycle=False)
    engine.steps(4)
    assert engine.runtime.counters.reclamation.relocations == 0  # enough blocks are free
    engine.runtime.admission.record_demand("new", engine.store.num_free_blocks() - 5, RESERVED)
    engine.steps()
    # It would fit and leave more than it needs.
    assert engine.runtime.counters.reclamation.relocations == 0
    engine.runtime.admission.record_demand("new", engine.store.num_free_blocks() + 39, RESERVED)
    engine.steps()
    assert engine.runtime.counters.reclamation.relocations > 0


def test_what_the_engine_withholds_is_lacking_too(engine: LiveEngine) -> None:
    running(engine, "a", 400, 400)
    admission, free = engine.runtime.admission, engine.store.num_free_blocks()
    admission.record_demand("new", 4, withheld_blocks=free - 4)
    assert (admission.demand, engine.runtime.current.wanted_blocks) == (None, 0)
    admission.record_demand("new", 4, withheld_blocks=free + 3)
    assert admission.demand is not None
    assert (admission.demand.missing_blocks, admission.demand.withheld_blocks) == (7, free + 3)
    # None of the withheld blocks is free for it, whatever the rule of admission.
    assert engine.runtime.current.wanted_blocks == 7 + free + 3
