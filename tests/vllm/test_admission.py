"""Admission on the real scheduler: admitted requests are not preempted later."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer, scheduler_of
from vtoken.sentences.situation import situation

pytestmark = pytest.mark.vllm


def sentences_while_waiting(llm: Any) -> list[str]:
    """The diagnosis's sentence after each step with waiting requests; filled as the engine runs."""
    scheduler = scheduler_of(llm)
    note, sentences = scheduler._note_step, []

    def note_and_listen(now: float) -> None:
        note(now)
        status = scheduler.vtoken_controller.reporter.status()
        if status.requests.waiting:
            sentences.append(situation(status))

    scheduler._note_step = note_and_listen
    return sentences


def test_compressed_admission_preempts_nobody_where_vllms_rule_does(
    engine: Any, greedy: Any, hf_model: Any
) -> None:
    prompts = [reference.random_prompt(60 + 3 * i, 30 + i) for i in range(8)]
    preempted, tokens = {}, {}
    for admission in ("stock", "compressed"):
        config = {
            "policy": {"name": "streaming_llm"},
            "budget_tokens": 128,
            "evict_when": "always",
            "interval_tokens": 0,
            "headroom_blocks": 2,
            "experiment": {"admission": admission},
        }
        with engine(
            enable_prefix_caching=False,
            num_gpu_blocks_override=26,
            max_model_len=768,
            max_num_batched_tokens=512,
            **engine_args(config, check_every_step=True),
        ) as llm:
            observer, sentences = Observer(llm), sentences_while_waiting(llm)
            tokens[admission] = greedy(llm, prompts, 200)
            lacking = re.compile(r"needs \d+ blocks? now.*: \d+ missing")
            assert any(map(lacking.search, sentences))
            preempted[admission] = observer.runtime.counters.requests.preempted
    assert preempted["stock"] > 0
    assert preempted["compressed"] == 0
    evict = reference.streaming_llm(4, 128, 0)
    for prompt, found in zip(prompts[::3], tokens["compressed"][::3], strict=True):
        assert found == reference.generate(hf_model, prompt, 200, evict, draft=found)


def test_a_prompt_found_in_the_prefix_cache_waits_for_all_the_blocks_of_its_hit(
    engine: Any,
) -> None:
    from vllm import SamplingParams

    def params(num_new: int, own: dict[str, Any] | None = None) -> Any:
        return SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, extra_args=own)

    long, other = reference.random_prompt(1500, 7), reference.random_prompt(300, 8)
    own = {"vtoken_policy": "streaming_llm", "vtoken_budget_tokens": 64}
    config = {"policy": {"name": "none"}, "evict_when": "always"}
    config |= {"evict_during": "both", "interval_tokens": 0, "headroom_blocks": 0}
    with engine(
        num_gpu_blocks_override=51,
        max_model_len=1600,
        max_num_batched_tokens=512,
        long_prefill_token_threshold=96,
        **engine_args(config, check_every_step=True),
    ) as llm:
        llm.generate([{"prompt_token_ids": long}], params(1), use_tqdm=False)  # fills the cache
        observer = Observer(llm)
        loop, outputs = llm.llm_engine, {}
        loop.add_request("other", {"prompt_token_ids": other}, params(40))
        for _ in range(5):
            loop.step()  # its prompt takes the last blocks of the cached one
        loop.add_request("long", {"prompt_token_ids": long}, params(40, own))
        while loop.has_unfinished_requests():
            outputs |= {output.request_id: output for output in loop.step()}
        assert [len(o.outputs[0].token_ids) for o in outputs.values()] == [40, 40]
        assert 1000 < outputs["long"].num_cached_tokens < 1400
        assert observer.runtime.counters.requests.preempted == 0
        assert observer.runtime.counters.tokens.evicted > 1000


def test_admission_counts_with_the_longest_chunk_of_a_shared_step(engine: Any, greedy: Any) -> None:
    with engine(
        max_num_batched_tokens=256,
        max_num_seqs=8,
        long_prefill_token_threshold=32,
        long_prefill_token_threshold_adaptive=True,
        **engine_args(),
    ) as llm:
        scheduler = scheduler_of(llm)
        schedule, chunks = scheduler.schedule, []

        def schedule_and_look(*args: Any) -> Any:
            is_shared = len(scheduler.requests) > 1
            output = schedule(*args)
            chunks.extend(output.num_scheduled_tokens.values() if is_shared else ())
            return output

        scheduler.schedule = schedule_and_look
        greedy(llm, [reference.random_prompt(300, seed) for seed in (1, 2)], 2)
        assert max(chunks) == scheduler.vtoken.shape.max_chunk_tokens == 128


def test_blocks_that_the_watermark_withholds_are_reported_and_open_the_gate(
    engine: Any, greedy: Any
) -> None:
    """Three requests wait behind one that leaves less than 30% of the pool and their prompt."""
    config = {
        "policy": {"name": "random"},
        "budget_tokens": 256,
        "evict_when": "always",
        "interval_tokens": 0,
        "headroom_blocks": 2,
        "low_watermark_blocks": 2,
        "theta_f": 0.0,
        "recycle": False,
    }
    prompts = [reference.random_prompt(n, n) for n in (640, 320, 321, 322)]
    with engine(
        enable_prefix_caching=False,
        num_gpu_blocks_override=41,
        max_model_len=1024,
        watermark=0.5,
        **engine_args(config, check_every_step=True),
    ) as llm:
        scheduler = scheduler_of(llm)
        note, statuses = scheduler._note_step, []

        def note_and_listen(now: float) -> None:
            note(now)
            statuses.append(scheduler.vtoken_controller.reporter.status())

        scheduler._note_step = note_and_listen
        greedy(llm, prompts, 60)
        first = next(status for status in statuses if status.requests.waiting == 3)
        assert first.blocks.withheld == 20 <= first.blocks.free
        assert re.search(
            r": 3 wait .*, first needs \d+ blocks now \(20 withheld by --watermark\): \d+ missing",
            situation(first),
        )
        opened = [
            gate.open
            for status in statuses
            for gate in status.fragmentation.gates
            if status.requests.waiting and gate.name == "watermark"
        ]
        assert any(opened)
        assert scheduler.vtoken.counters.reclamation.relocations > 0
        assert statuses[-1].blocks.withheld == 0
