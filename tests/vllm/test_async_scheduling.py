"""Asynchronous scheduling forced on: step n + 1 is planned and sent before step n's report.

Tokens must equal the independent reference for every event during a step in flight.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support import reference
from tests.support.engines import EAGER, engine_args
from tests.support.latency import num_tracked
from tests.support.observe import Observer, core_of, resumed, runtime_of, watch_victims
from tests.support.stepping import Outputs, add, step
from vtoken.base.errors import UnsupportedError
from vtoken.vllm.cpu.copy_engine import CPUCopyEngine
from vtoken.vllm.serve import server_command
from vtoken.wire.commands import Compact
from vtoken_bench.vllm.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

NUM_NEW = 90
BUDGET, INTERVAL = 64, 24
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((150, 70, 101))]

Tokens = list[list[int]]


@pytest.fixture(autouse=True)
def overlapping_steps() -> Iterator[None]:
    with async_scheduling():
        yield


@pytest.fixture(scope="module")
def expected(hf_model: Any) -> Tokens:
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    return [reference.generate(hf_model, prompt, NUM_NEW, evict) for prompt in PROMPTS]


def args(
    policy: str = "streaming_llm", params: dict[str, Any] | None = None, **config: Any
) -> dict[str, Any]:
    config = {
        "policy": {"name": policy, "params": params or {}},
        "budget_tokens": BUDGET,
        "evict_when": "always",
        "interval_tokens": INTERVAL,
        "verify_ratio": 1.0,
        **config,
    }
    more = engine_args(config, check_every_step=True)
    return {"enable_prefix_caching": False, **more}


def submit(llm: Any, prompts: Tokens, num_new: int = NUM_NEW, **sampling: Any) -> None:
    known = len(llm.llm_engine.output_processor.request_states)
    for number, prompt in enumerate(prompts):
        add(llm, f"{known + number}", prompt, num_new, **sampling)


VARIANTS: dict[str, dict[str, Any]] = {
    "recycling": {"experiment": {"round_rule": "paper"}},
    "plug": {"recycle": False, **EAGER},
    "pack": {"recycle": False, "experiment": {"planner": "pack"}, **EAGER},
    "off (naive-evict)": {"reclamation": "off"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_equal_the_reference(name: str, engine: Any, greedy: Any, expected: Tokens) -> None:
    chunked = {"max_num_batched_tokens": 64, "max_num_seqs": 8} if name == "recycling" else {}
    with engine(**chunked, **args(**VARIANTS[name])) as llm:
        core, observer = core_of(llm), Observer(llm)
        assert core.batch_queue_size == 2
        assert core.scheduler.vtoken.shape.report_lag_steps == 1
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        counters = observer.runtime.counters
        assert counters.invariants.violations == 0
        assert counters.tokens.evicted > 200
        assert counters.tokens.generated == len(PROMPTS) * NUM_NEW
        waited = observer.runtime.latency.document(time.monotonic())
        assert waited.ttft.count == len(PROMPTS)
        assert waited.inter_token.count == len(PROMPTS) * (NUM_NEW - 1)
        assert num_tracked(observer.runtime.latency) == 0
        assert (counters.reclamation.recycled_slots > 0) == (name == "recycling")
        assert (counters.reclamation.relocations > 0) == (name in ("plug", "pack"))
    assert tokens == expected


def test_control_copies_of_a_step_that_come_a_step_late_change_tokens(
    engine: Any, greedy: Any, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, waiting = CPUCopyEngine.copy, []

    def copy_late(self: CPUCopyEngine, *slots: Any) -> int:
        waiting.append(slots)
        return copy(self, *waiting.pop(0)) if len(waiting) > 1 else 0

    unchecked = args(**VARIANTS["plug"], verify_ratio=0.0)
    with engine(**unchecked) as llm:
        monkeypatch.setattr(CPUCopyEngine, "copy", copy_late)  # the self-test has passed
        assert greedy(llm, PROMPTS, NUM_NEW) != expected


def test_h2o_acts_on_scores_that_are_exactly_one_step_old(
    engine: Any, greedy: Any, hf_model: Any
) -> None:
    """At T tokens the newest report is that of T - 1; the token since then counts as heavy."""
    reported: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    moments: dict[str, list[int]] = defaultdict(list)
    params = {"recent_ratio": 0.5, "pool_radius": 0}
    with engine(**args("h2o", params, interval_tokens=16)) as llm:
        runtime = runtime_of(llm)
        finish = runtime.finish_step

        def finish_step(report: Any, step: int) -> None:
            for (request, _), scores in (report.scores if report is not None else {}).items():
                reported[request][len(scores)] = scores
            finish(report, step)

        def note(table: Any, victims: Any) -> None:
            if victims is not None:
                request, live = table.request_id, table.live_ids()
                scores = np.append(reported[request][table.num_tokens - 1], np.inf)[live]
                assert table.num_tokens not in reported[request]  # no report has it yet
                recent = len(live) - BUDGET // 2
                candidates = live[:recent]
                lowest = np.argsort(scores[:recent], kind="stable")[: len(live) - BUDGET]
                assert sorted(victims.tolist()) == sorted(candidates[lowest].tolist())
                moments[request].append(table.num_tokens)

        runtime.finish_step = finish_step
        watch_victims(runtime, note)
        observer = Observer(llm)
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        logs = observer.logs()
    by_number = {int(request.split("-")[0]): at for request, at in moments.items()}
    # Two long prompts are due at once, but their first report comes one token later.
    assert [by_number[0][0], by_number[2][0]] == [len(PROMPTS[0]) + 1, len(PROMPTS[2]) + 1]
    assert all(b - a == 17 for at in moments.values() for a, b in pairwise(at))
    for prompt, log, answer in zip(PROMPTS, logs, tokens, strict=True):
        assert len(log) > 2
        assert answer == reference.generate(
            hf_model, prompt, NUM_NEW, reference.replay(log), draft=answer
        )


def in_lives(hf_model: Any, prompt: list[int], cuts: list[int], answer: list[int]) -> list[int]:
    """The reference for a request that was preempted after `cuts` tokens and has given `answer`:
    each life is a prompt.
    """
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    tokens: list[int] = []
    for end in [*cuts, len(answer)]:
        begin = len(tokens)
        tokens += reference.generate(
            hf_model, prompt + tokens, end - begin, evict, draft=answer[begin:end]
        )
    return tokens


def test_a_reset_with_a_step_in_flight_resumes_after_the_tokens_already_output(
    engine: Any, hf_model: Any
) -> None:
    tokens: Outputs = {}
    with engine(**args(**VARIANTS["plug"])) as llm:
        core, cuts = core_of(llm), resumed(llm)
        submit(llm, PROMPTS)
        step(llm, tokens, 45)
        assert len(core.batch_queue) == 1  # a step is with the worker
        assert core.scheduler.vtoken.counters.reclamation.relocations > 0
        assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert len(core.scheduler.vtoken.tables) == 0
        step(llm, tokens)
        counters = core.scheduler.vtoken.counters
        assert (counters.requests.preempted, counters.invariants.violations) == (len(PROMPTS), 0)
    for number, prompt in enumerate(PROMPTS):
        (answer,) = (ids for name, ids in tokens.items() if name.split("-")[0] == str(number))
        (cut,) = (c for name, c in cuts.items() if name.split("-")[0] == str(number))
        assert (len(cut), len(answer)) == (1, NUM_NEW)
        assert answer == in_lives(hf_model, prompt, cut, answer)


def test_blocks_freed_under_a_step_in_flight_are_reused_without_harm(
    engine: Any, hf_model: Any
) -> None:
    """A small pool: preemptions, an abort and a stop token, all while the next step runs."""
    num_new = 80
    prompts = [reference.random_prompt(40 + 5 * i, 20 + i) for i in range(5)]  # soon 3 blocks each
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    plain = reference.generate(hf_model, prompts[0], num_new, evict)
    stop = next(token for i, token in enumerate(plain) if i > 30 and token not in plain[:i])
    tokens: Outputs = {}
    small = {"theta_f": 0.0, "low_watermark_blocks": 12, "headroom_blocks": 2, "batch_size": 8}
    stock = {"admission": "stock"}  # the other one avoids preemptions
    config = args(recycle=False, experiment=stock, **small)
    pool = {"num_gpu_blocks_override": 13, "max_model_len": 160, "max_num_batched_tokens": 640}
    with engine(**pool, **config) as llm:
        core, cuts, observer = core_of(llm), resumed(llm), Observer(llm)
        runtime = runtime_of(llm)
        submit(llm, prompts[:1], num_new, stop_token_ids=[stop])
        submit(llm, prompts[1:], num_new)
        step(llm, tokens, 30)
        aborted = core.scheduler.running[1].request_id
        llm.llm_engine.abort_request([aborted], internal=True)
        assert len(core.batch_queue) == 1
        step(llm, tokens)
        assert runtime.counters.requests.preempted > 0
        assert runtime.counters.tokens.evicted > 0
        assert runtime.counters.invariants.violations == 0
        assert runtime.store.num_free_blocks() == 12
        assert sum(len(owners) > 1 for owners in observer.owners.values()) > 5
        runtime.check()
    for name, answer in tokens.items():
        number = int(name.split("-")[0])
        life = next((c for full, c in cuts.items() if full.split("-")[0] == str(number)), [])
        cut = [c for c in life if c < len(answer)]
        assert answer == in_lives(hf_model, prompts[number], cut, answer), name
        if number == 0:
            assert answer[-1] == stop
        elif not aborted.startswith(f"{number}-"):
            assert len(answer) == num_new


def test_switches_and_compactions_between_overlapping_steps(engine: Any, hf_model: Any) -> None:
    tokens: Outputs = {}
    policies = ["h2o", "random", "sliding_window", "h2o", "streaming_llm"]
    calm = args(interval_tokens=8, reclamation="paused", recycle=False)
    with engine(**calm) as llm:
        observer, control = Observer(llm), core_of(llm).scheduler.vtoken_controller
        runtime = observer.runtime
        submit(llm, PROMPTS)
        operations = []
        for number, policy in enumerate(policies):
            step(llm, tokens, 15)
            control.patch_config({"policy": {"name": policy}, "recycle": number % 2 == 1})
            held = [a for state in runtime.requests.held.values() for a in state.signals.values()]
            assert all(signal.scores is None for signal in held)
            operations += [control.compact(Compact(), "") for _ in range(2)]
        step(llm, tokens)
        assert [operation.state for operation in operations] == ["done"] * len(operations)
        assert sum(operation.result.freed_blocks for operation in operations) > 0
        assert runtime.counters.invariants.violations == 0
        logs = observer.logs()
    for number, (prompt, log) in enumerate(zip(PROMPTS, logs, strict=True)):
        (answer,) = (ids for name, ids in tokens.items() if name.split("-")[0] == str(number))
        assert len(log) > 5
        assert answer == reference.generate(
            hf_model, prompt, NUM_NEW, reference.replay(log), draft=answer
        )


def test_a_class_that_does_not_fit_the_flag_is_refused(engine: Any) -> None:
    wrong = args() | {"scheduler_cls": "vtoken.vllm.engine.scheduler.VTokenScheduler"}
    with pytest.raises(UnsupportedError, match=r"async_scheduling is True.*make_scheduler"):  # noqa: SIM117
        with engine(**wrong):
            pass


@pytest.mark.parametrize("flag", [[], ["--async-scheduling"], ["--no-async-scheduling"]])
def test_serve_leaves_the_choice_of_the_scheduler_to_the_flag(flag: list[str]) -> None:
    command = server_command(["model", *flag])
    assert (
        command[command.index("--scheduler-cls") + 1]
        == "vtoken.vllm.engine.scheduler.make_scheduler"
    )
    assert all(name in command for name in flag)
