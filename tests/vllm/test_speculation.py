"""Speculative decoding: tokens under eviction equal the reference, whatever is drafted.

Where a step begins depends on how many drafts are right, and so does the moment of eviction. With
drafts by a script the moments are known beforehand, and the reference evicts at them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import reference
from tests.support.drafting import MOST, NGRAM, SCRIPTS, at, moments, runner_of, use_drafts
from tests.support.engines import EAGER, engine_args
from tests.support.live_sets import LiveSets, expected_tokens, swinging_budget
from tests.support.observe import Observer, runtime_of, scheduler_of
from tests.support.stepping import add, step
from vtoken.base.errors import MirrorMismatchError
from vtoken.wire import Serving

pytestmark = pytest.mark.vllm

NUM_NEW = 112
NUM_DRAFTED = 160  # by drafters that look up
BUDGET, INTERVAL = 96, 24
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((200, 70, 133))]

Tokens = list[list[int]]


@pytest.fixture(scope="module")
def expected(hf_model: Any) -> Callable[..., Tokens]:
    """Reference tokens under streaming_llm where steps begin as a script says."""
    cache: dict[Any, Tokens] = {}

    def tokens(script: str, prompts: Tokens = PROMPTS) -> Tokens:
        key = script, tuple(map(tuple, prompts))
        if key not in cache:
            evict = reference.streaming_llm(4, BUDGET, INTERVAL)
            evict = at(moments(NUM_NEW, SCRIPTS[script]), evict)
            cache[key] = [reference.generate(hf_model, p, NUM_NEW, evict) for p in prompts]
        return cache[key]

    return tokens


def args(**config: Any) -> dict[str, Any]:
    settings = {
        "policy": {"name": "streaming_llm"},
        "budget_tokens": BUDGET,
        "evict_when": "always",
        "interval_tokens": INTERVAL,
        "verify_ratio": 1.0,
        **config,
    }
    return {"speculative_config": NGRAM, **engine_args(settings, check_every_step=True)}


VARIANTS: dict[str, dict[str, Any]] = {
    "recycling": {"experiment": {"round_rule": "paper"}},
    "priced": {},
    "plug without recycling": {"recycle": False, "experiment": {"planner": "plug"}, **EAGER},
    "pack with recycling": {"experiment": {"planner": "pack"}, **EAGER},
    "off (naive-evict)": {"reclamation": "off"},
}
CASES = [
    *[("mixed", name) for name in VARIANTS],
    ("wrong", "recycling"),
    ("wrong", "plug without recycling"),
    ("right", "priced"),
    ("right", "pack with recycling"),
]


@pytest.mark.parametrize(("script", "name"), CASES)
def test_tokens_equal_the_reference(
    script: str, name: str, engine: Any, greedy: Any, expected: Callable[..., Tokens]
) -> None:
    with engine(enable_prefix_caching=False, **args(**VARIANTS[name])) as llm:
        use_drafts(llm, PROMPTS, expected(script), SCRIPTS[script])
        observer = Observer(llm)
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        counters = observer.runtime.counters
        assert counters.invariants.violations == 0
        assert counters.tokens.evicted > 300
        steps = {len(held) for held in observer.held.values()}
        assert steps == {1 + len(moments(NUM_NEW, SCRIPTS[script]))}
        moves = name.startswith(("plug", "pack"))
        assert (counters.reclamation.relocations > 0) or not moves
        assert (counters.reclamation.recycled_slots > 0) == (
            script == "mixed" and name in ("recycling", "priced", "pack with recycling")
        )
        if not moves and name != "priced":
            assert observer.steps_with_holes > 20
    assert tokens == expected(script)


def test_parked_tokens_come_back_beside_drafts(
    engine: Any, greedy: Any, hf_model: Any, expected: Callable[..., Tokens]
) -> None:
    with engine(enable_prefix_caching=False, **args()) as llm:
        use_drafts(llm, PROMPTS, expected("mixed"), SCRIPTS["mixed"])
        found, logs = swinging_budget(llm, PROMPTS, NUM_NEW, (BUDGET, 200), steps=6)
    for prompt, tokens, log in zip(PROMPTS, found, logs, strict=True):
        assert tokens == expected_tokens(hf_model, prompt, tokens, log)


@pytest.mark.parametrize("planner", ["plug", "pack"])
def test_a_cached_prefix_is_read_by_all_and_written_by_none(
    planner: str,
    engine: Any,
    greedy: Any,
    expected: Callable[..., Tokens],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vToken counts drafts and hits as vLLM does, which is told of each."""
    prefix = PROMPTS[0][:128]
    prompts = [prefix + PROMPTS[0][128:129], prefix + PROMPTS[1], prefix + PROMPTS[2][:33]]
    answers = expected("mixed", prompts)
    with engine(
        enable_prefix_caching=True, **args(experiment={"planner": planner}, **EAGER)
    ) as llm:
        use_drafts(llm, prompts, answers, SCRIPTS["mixed"])
        counted = Serving()
        scheduler = scheduler_of(llm)

        def note_drafts(
            *_: Any, num_draft_tokens: int, num_accepted_tokens: int, **__: Any
        ) -> None:
            counted.draft_tokens += num_draft_tokens
            counted.accepted_draft_tokens += num_accepted_tokens

        def note_hits(request: Any, num_hits: int) -> None:
            counted.prefix_query_tokens += request.num_tokens
            counted.prefix_hit_tokens += num_hits

        monkeypatch.setattr(scheduler, "make_spec_decoding_stats", note_drafts)
        manager = scheduler.kv_cache_manager
        monkeypatch.setattr(manager, "record_prefix_cache_stats", note_hits)
        greedy(llm, prompts[1:2], 1)  # fills the prefix cache
        observer = Observer(llm)
        tokens = greedy(llm, prompts, NUM_NEW)
        # All but one token of a prompt is cached: vLLM fills that step with drafts of no token.
        again = greedy(llm, prompts[:1], NUM_NEW)
        counters = observer.runtime.counters
        assert sum(len(requests) >= 4 for requests in observer.owners.values()) >= 3
        assert counters.serving == counted
        (drafts,) = observer.runtime.drafts.document()
        assert (drafts.proposed_tokens, drafts.accepted_tokens) == (
            counted.draft_tokens,
            counted.accepted_draft_tokens,
        )
        assert 0 < counted.accepted_draft_tokens < counted.draft_tokens
        assert counted.prefix_hit_tokens > 3 * 128
        assert counters.reclamation.relocations > 0
        assert counters.invariants.violations == 0
    assert tokens == answers
    assert again == answers[:1]


def test_a_preempted_request_continues_as_if_its_answer_were_its_prompt(
    engine: Any, hf_model: Any
) -> None:
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    script, prompt, cut = SCRIPTS["right"], PROMPTS[0], 1 + 10 * (1 + MOST)
    first = reference.generate(hf_model, prompt, cut, at(moments(cut, script), evict))
    left = NUM_NEW - cut
    rest = reference.generate(hf_model, prompt + first, left, at(moments(left, script), evict))
    with engine(enable_prefix_caching=False, **args(recycle=False, **EAGER)) as llm:
        use_drafts(llm, [prompt], [first + rest], script)
        add(llm, "0", prompt, NUM_NEW)
        step(llm, times=11)
        scheduler = scheduler_of(llm)
        assert [r.num_output_tokens for r in scheduler.running] == [cut]
        assert scheduler.vtoken.counters.reclamation.relocations > 0
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        answer = step(llm)
        counters = runtime_of(llm).counters
        assert (counters.requests.preempted, counters.invariants.violations) == (1, 0)
    assert list(answer.outputs[0].token_ids) == first + rest


def test_a_small_pool_preempts_and_still_answers_as_without_eviction(
    engine: Any, greedy: Any, hf_model: Any
) -> None:
    """Nobody is due: rejected drafts of many requests come and go where blocks are short."""
    prompts = [reference.random_prompt(60 + 7 * i, 30 + i) for i in range(6)]
    answers = [reference.generate(hf_model, prompt, 60, reference.full) for prompt in prompts]
    settings = args(budget_tokens=512, experiment={"admission": "stock"})
    with engine(num_gpu_blocks_override=22, max_model_len=512, **settings) as llm:
        use_drafts(llm, prompts, answers, SCRIPTS["mixed"])
        assert greedy(llm, prompts, 60) == answers
        counters = runtime_of(llm).counters
        assert counters.requests.preempted > 0
        assert counters.invariants.violations == 0


SHORT = {"num_gpu_blocks_override": 31, "max_model_len": 768}


def repetitive(length: int, seed: int) -> list[int]:
    """A short text over and over: what drafters look up."""
    part = reference.random_prompt(24, seed)[1:]
    return [256, *(part * (length // 23 + 1))[: length - 1]]


@pytest.mark.filterwarnings(  # numba, of a list that vLLM gives its drafter's kernel
    r"ignore:\s*Encountered the use of a type that is scheduled for deprecation"
)
@pytest.mark.parametrize(
    ("method", "policy"), [("ngram", "auto"), ("ngram", "h2o"), ("suffix", "tova")]
)
def test_drafts_of_vllm_are_rejected_and_accepted_and_the_victims_replay(
    method: str, policy: str, engine: Any, greedy: Any, hf_model: Any
) -> None:
    settings, lengths = args(policy={"name": policy}, interval_tokens=8), (180, 90)
    if policy == "auto":  # what ships, in a pool where the second gives for the first
        shipped = engine_args({"verify_ratio": 1.0}, check_every_step=True)
        settings = {"speculative_config": NGRAM, **shipped, **SHORT}
        lengths = (400, 350)
    if method == "suffix":
        pytest.importorskip("arctic_inference", reason="needs the package arctic-inference")
        settings["speculative_config"] = {"method": "suffix", "num_speculative_tokens": 6}
    prompts = [repetitive(length, seed) for seed, length in enumerate(lengths)]
    with engine(enable_prefix_caching=False, **settings) as llm:
        observer, watch, rejected = Observer(llm), LiveSets(scheduler_of(llm)), []
        truncate = observer.runtime.truncate

        def count_and_truncate(counts: dict[str, int]) -> None:
            rejected.extend(counts.values())
            truncate(counts)

        observer.runtime.truncate = count_and_truncate
        tokens = greedy(llm, prompts, NUM_DRAFTED)
        stretches = [watch.stretches[f"{i}"] for i in range(len(prompts))]
        counters = observer.runtime.counters
        assert counters.invariants.violations == 0
        assert sum(rejected) > 50
        (drafts,) = scheduler_of(llm).vtoken_controller.status().drafts
        assert drafts.proposed_tokens - drafts.accepted_tokens == sum(rejected)
        assert drafts.accepted_tokens > 0
        assert min(len(held) for held in observer.held.values()) < NUM_DRAFTED  # some were right
        assert (counters.pressure.given_tokens > 0) == (policy == "auto")
    changes = [len(log[0].changes) for log in stretches]
    assert any(changes) if policy == "auto" else min(changes) > 4
    for prompt, got, log in zip(prompts, tokens, stretches, strict=True):
        assert got == expected_tokens(hf_model, prompt, got, log)


def test_a_worker_that_keeps_rejected_drafts_is_found_before_the_next_forward(
    engine: Any, greedy: Any, expected: Callable[..., Tokens]
) -> None:
    with engine(enable_prefix_caching=False, **args()) as llm:
        use_drafts(llm, PROMPTS, expected("wrong"), SCRIPTS["wrong"])
        runner_of(llm).executor.reject = lambda _: None
        with pytest.raises(MirrorMismatchError, match=r"tokens, the mirror has"):
            greedy(llm, PROMPTS, NUM_NEW)
