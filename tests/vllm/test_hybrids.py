"""Models with windows, chunks or states beside full attention, on the real engine.

Prefix hits, preemption, pressure, every policy and setting of placement, several samples of one
prompt, and the rule on prefix hashes. A few families run in the suite; `make test-models`
(VTOKEN_ALL_MODELS=1) runs all, and some of `test_models.py` without such layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support import models, reference
from tests.support.engines import engine_args
from tests.support.live_sets import expected_tokens, swinging_budget
from tests.support.observe import Observer, core_of, runtime_of, scheduler_of
from tests.support.stepping import Outputs, add, step
from tests.vllm.test_policies_exact import generate_under
from vtoken.base.errors import SelfTestError
from vtoken.core.runtime.demand import DemandBook
from vtoken.policies import policy_names
from vtoken.vllm.engine.groups import VLLMGroup
from vtoken.wire import FLAG_OTHER, FLAG_USED
from vtoken.wire.commands import Command, PatchConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("any_architecture")]

ALL = bool(os.environ.get("VTOKEN_ALL_MODELS"))
FAMILIES = models.MIXED | models.HYBRID | {name: models.SERVED[name] for name in models.NAMED}
CACHED = list(FAMILIES) if ALL else ["gemma4", "falcon_h1"]
PREEMPTED = list(FAMILIES) if ALL else ["gpt_oss", "granitemoehybrid"]
# Chunks of attention seldom hold their peaks, so a pool of peaks is not tight.
PRESSED = [name for name in FAMILIES if name != "llama4"] if ALL else ["gemma4", "falcon_h1"]
SEVERAL_STATES = ("granitemoehybrid", "nemotron_h")
BUDGET, INTERVAL, SINKS = 40, 12, 4
NUM_NEW = 48
POLICY = {"name": "streaming_llm", "params": {"sinks": SINKS}}
EVICT = reference.streaming_llm(SINKS, BUDGET, INTERVAL)
RELOCATING = {"recycle": False, "theta_f": 0.0, "low_watermark_blocks": 15, "batch_size": 15}


@pytest.fixture(scope="module")
def gpt_oss(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("gpt_oss")


class Job(NamedTuple):
    """A greedy generation of the reference. `log`: what dies when, None: as `EVICT` says; `chunk`:
    of the prompt, None: as a whole.
    """

    prompt: list[int]
    num_new: int = NUM_NEW
    log: dict[int, set[int]] | None = None
    chunk: int | None = None


def traces_of(
    folder: Path, dtype: str, jobs: list[Job], follow: list[list[int]] | None = None
) -> list[tuple[list[int], float]]:
    """The reference's tokens of each job; or those of `follow`, and the most that one of them is
    behind the reference's choice.
    """
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    model = load(folder, attn_implementation="eager", dtype=dtype).eval()
    found = []
    for (prompt, num_new, log, chunk), tokens in zip(jobs, follow or [[]] * len(jobs), strict=True):
        evict = EVICT if log is None else reference.replay(log)
        between = reference.full if log is None else evict
        trace = reference.trace(
            model, prompt, num_new, evict, chunk=chunk, evict_prompt=between, follow=tokens
        )
        found.append((trace.tokens, max(trace.behind())))
    return found


@pytest.fixture
def expected(in_process: Callable[..., Any]) -> Callable[..., list[list[int]]]:
    """`expected(folder, jobs)`: the reference's tokens of each job, in float32."""

    def tokens(folder: Path, jobs: list[Job]) -> list[list[int]]:
        return [found for found, _ in in_process(traces_of, folder, "float32", jobs)]

    return tokens


@pytest.fixture
def assert_same(in_process: Callable[..., Any]) -> Callable[..., None]:
    """`assert_same(folder, family, jobs, found)`: what was found is what the reference chooses."""

    def check(folder: Path, family: str, jobs: list[Job], found: list[list[int]]) -> None:
        dtype = FAMILIES[family].dtype
        pairs = zip(jobs, found, strict=True)
        apart = {(*job.prompt, *tokens): (job, tokens) for job, tokens in pairs}
        jobs, found = map(list, zip(*apart.values(), strict=True))
        traces = in_process(traces_of, folder, dtype, jobs, found)
        assert [tokens for tokens, _ in traces] == found
        assert max(behind for _, behind in traces) <= models.NEAR_TIE[dtype]

    return check


FIXED = {
    "policy": POLICY,
    "budget_tokens": BUDGET,
    "interval_tokens": INTERVAL,
    "evict_when": "always",
}


def settings(
    folder: Path, config: dict[str, Any], *, base: dict[str, Any] = FIXED, **overrides: Any
) -> dict[str, Any]:
    return {
        "model": str(folder),
        "max_model_len": 1024,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        **overrides,
        **engine_args(base | config | {"verify_ratio": 1.0}, check_every_step=True),
    }


def cached_tokens(llm: Any, prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], int]:
    """The greedy outputs, and the prompts' tokens that were found in the prefix cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = llm.generate(inputs, params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in found], sum(o.num_cached_tokens for o in found)


def cached_pool(family: str) -> dict[str, Any]:
    """A large pool with a prefix cache; vLLM fits blocks to states, if the model has these."""
    if family in models.HYBRID:
        pool = {"num_gpu_blocks_override": 64, "block_size": None}
        return pool | {"dtype": FAMILIES[family].dtype, "kv_cache_memory_bytes": 256 << 20}
    return {"num_gpu_blocks_override": 600, "block_size": 16}


UNIT = 16  # tokens a prefix hash: blocks of a model with states have hundreds of slots


@pytest.mark.parametrize("family", CACHED)
def test_prompts_found_in_the_cache_are_pruned_exactly(
    engine: Any, folder_of: Any, assert_same: Callable[..., None], family: str
) -> None:
    """Recycled, then relocated, with the same prompts: the end of each is found too, though it
    fills no block. Beside a state vLLM copies the block in which a hit ends.
    """
    folder, pool = folder_of(family), cached_pool(family) | {"max_num_seqs": 2}
    if family in models.HYBRID:
        pool |= {"prefix_match_unit": UNIT}
    with engine(**settings(folder, {}, **pool)) as llm:
        size, found = runtime_of(llm).geometry.block_size, []
        shared = reference.random_prompt(128 if size <= 32 else 2 * size + 10, 1)
        prompts = [shared + reference.random_prompt(25 + 32 * i, 20 + i)[1:] for i in range(3)]
        unit = UNIT if family in models.HYBRID else size
        ends = [(len(prompt) - 1) // unit * unit for prompt in prompts]
        assert family not in models.HYBRID or all(end % size for end in ends)
        counters = runtime_of(llm).counters
        for config in ({}, RELOCATING):
            change(llm, config)
            first, _ = cached_tokens(llm, prompts, NUM_NEW)
            again, hits = cached_tokens(llm, prompts, NUM_NEW)
            assert hits == sum(ends)
            found += first + again
        assert counters.invariants.violations == 0
        assert counters.tokens.evicted > 12 * len(shared)
        assert counters.reclamation.recycled_slots > 0
        assert counters.reclamation.relocations > 0
    assert_same(folder, family, 4 * [Job(prompt) for prompt in prompts], found)


@pytest.mark.parametrize("family", PREEMPTED)
def test_a_preempted_request_is_computed_again_in_all_groups(
    engine: Any, folder_of: Any, assert_same: Callable[..., None], family: str
) -> None:
    folder = folder_of(family)
    prompts = [reference.random_prompt(70 + 17 * i, 20 + i) for i in range(4)]
    answers: Outputs = {}
    with engine(**settings(folder, RELOCATING, **cached_pool(family))) as llm:
        scheduler = scheduler_of(llm)
        for number, prompt in enumerate(prompts):
            add(llm, str(number), prompt, NUM_NEW)
        step(llm, times=25)
        assert scheduler.vtoken.counters.tokens.evicted > 0
        cuts = [r.num_output_tokens for r in sorted(scheduler.running, key=_number)]
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        step(llm, answers)
        counters = runtime_of(llm).counters
        assert (counters.requests.preempted, counters.invariants.violations) == (len(prompts), 0)
    jobs, found = [], []
    for number, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True)):
        tokens = answers[str(number)]
        jobs += [Job(prompt, cut), Job(prompt + tokens[:cut], NUM_NEW - cut)]
        found += [tokens[:cut], tokens[cut:]]
    assert_same(folder, family, jobs, found)


def _number(request: Any) -> int:
    return int(request.request_id.split("-")[0])


POLICIES = policy_names()
PARAMS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 16},
    "scissorhands": {"history_queries": 60},
}
EAGER = {"theta_f": 0.0, "batch_size": 64, "headroom_blocks": 32}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "naive-evict": {"reclamation": "off", "recycle": False},
    "recycling": {"reclamation": "auto", "recycle": True, "experiment": {"round_rule": "paper"}},
    "plug": {"recycle": False, "experiment": {"planner": "plug"}, **EAGER},
    "pack": {"recycle": False, "experiment": {"planner": "pack"}, **EAGER},
}
CHUNK = 64


def change(llm: Any, patch: dict[str, Any]) -> None:
    controller = scheduler_of(llm).vtoken_controller
    assert controller.handle(Command(call=PatchConfig(patch=patch))).problem is None


@pytest.mark.parametrize("during", ["decode", "both"] if ALL else ["both"])
@pytest.mark.parametrize("family", ["gpt_oss", "granitemoehybrid"] if ALL else ["gpt_oss"])
def test_every_policy_is_exact_under_every_placement(
    engine: Any, folder_of: Any, expected: Any, demo_model: Path, family: str, during: str
) -> None:
    """Every policy in a request of its own, side by side; placements one after the other on the
    same engine. Prompts are computed in chunks, between which `both` evicts.
    """
    folder = folder_of(family)
    prompts = [reference.random_prompt(length, seed) for seed, length in enumerate((170, 90))]
    policies = [(name, PARAMS.get(name, {})) for name in POLICIES]
    pool: dict[str, Any] = {"num_gpu_blocks_override": 1600, "block_size": 16}
    if family in models.HYBRID:
        pool = {"num_gpu_blocks_override": 256, "block_size": None}
    pool |= {"skip_tokenizer_init": False, "tokenizer": str(demo_model)}  # for policies that read
    pool |= {"enable_prefix_caching": False, "long_prefill_token_threshold": CHUNK}
    pool |= {"kv_cache_memory_bytes": 512 << 20}
    with engine(**settings(folder, {"evict_during": during}, **pool)) as llm:
        observer = Observer(llm)
        counters, start = observer.runtime.counters, 0
        runs: dict[str, Any] = {}
        for placement, patch in PLACEMENTS.items():
            watermark = pool["num_gpu_blocks_override"] - 1 if "theta_f" in patch else 1
            change(llm, patch | {"low_watermark_blocks": watermark})
            moved, recycled = counters.reclamation.relocations, counters.reclamation.recycled_slots
            tokens = generate_under(llm, policies, prompts, NUM_NEW)
            logs = observer.logs()
            runs[placement], start = (tokens, logs[start:]), len(logs)
            moved = counters.reclamation.relocations - moved
            recycled = counters.reclamation.recycled_slots - recycled
            has_small_blocks = observer.runtime.geometry.block_size < len(prompts[0])
            assert (moved > 0) == (placement in ("plug", "pack") and has_small_blocks)
            assert (recycled > 0) == (placement == "recycling")
        assert (counters.invariants.violations, counters.requests.preempted) == (0, 0)
    tokens, logs = runs["naive-evict"]
    for placement in PLACEMENTS:
        assert runs[placement] == (tokens, logs), placement
    assert sum(map(bool, logs)) == len(prompts) * (len(POLICIES) - 1)  # all but "none" evict
    assert any(step < 0 for log in logs for step in log) == (during == "both")
    # A model with states takes its prompt as a whole, or token by token.
    size = None if during == "decode" else 1 if family in models.HYBRID else CHUNK
    jobs = [
        Job(prompts[number % len(prompts)], NUM_NEW, log, size) for number, log in enumerate(logs)
    ]
    assert tokens == expected(folder, jobs)


def replayed(folder: Path, prompts: list[Any], found: list[Any], logs: list[Any]) -> list[Any]:
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    model = load(folder, attn_implementation="eager", dtype="float32").eval()
    return [expected_tokens(model, *each) for each in zip(prompts, found, logs, strict=True)]


@pytest.mark.parametrize("family", [name for name in CACHED if FAMILIES[name].dtype == "float32"])
def test_parked_tokens_come_back_beside_other_groups(
    engine: Any, folder_of: Any, in_process: Callable[..., Any], family: str
) -> None:
    folder = folder_of(family)
    prompts = [reference.random_prompt(90 + 17 * i, 20 + i) for i in range(2)]
    pool = cached_pool(family) | {"enable_prefix_caching": False}
    with engine(**settings(folder, {}, **pool)) as llm:
        found, logs = swinging_budget(llm, prompts, 60, (BUDGET, 140))
    assert found == in_process(replayed, folder, prompts, found, logs)


SHIPPED = {"budget_floor_tokens": BUDGET}  # these requests are shorter than the floor that ships


def tight_pool(llm: Any, prompts: list[list[int]], num_new: int) -> int:
    """Blocks for the peaks of other groups, and for half of that of full attention."""
    runtime = runtime_of(llm)
    lengths = [len(prompt) + num_new for prompt in prompts]
    others = sum(runtime.demand.most_of_others(length, 1) for length in lengths)
    full = sum(-(-length // runtime.geometry.block_size) for length in lengths)
    return 3 + others + full // 2


@pytest.mark.parametrize("family", PRESSED)
def test_requests_that_give_for_others_are_exact_beside_other_groups(
    engine: Any,
    folder_of: Callable[[str], Path],
    assert_same: Callable[..., None],
    greedy: Any,
    family: str,
) -> None:
    """As shipped, parking included."""
    # Beside several states a short output has too few blocks of full attention to give any.
    folder, num_new = folder_of(family), 300 if family in SEVERAL_STATES else 130
    pool = cached_pool(family) | {"enable_prefix_caching": False, "base": SHIPPED}
    with engine(**settings(folder, {}, **pool)) as llm:
        size = runtime_of(llm).geometry.block_size
        shortest = size - 50 if family in models.HYBRID else 40  # prompts that wait for no block
        lengths = [shortest + 7 * i for i in range(4)]
        prompts = [reference.random_prompt(length, 60 + i) for i, length in enumerate(lengths)]
        num_blocks = tight_pool(llm, prompts, num_new)
    pool |= {"num_gpu_blocks_override": num_blocks, "max_model_len": lengths[-1] + num_new}
    with engine(**settings(folder, {"headroom_blocks": 2}, **pool)) as llm:
        observer = Observer(llm)
        tokens = greedy(llm, prompts, num_new)
        counters, logs = observer.runtime.counters, observer.logs()
        assert counters.pressure.given_tokens == counters.tokens.evicted > 0
        assert counters.parking.copied_tokens > 0
        assert (counters.invariants.violations, counters.requests.preempted) == (0, 0)
    jobs = [Job(prompt, num_new, log) for prompt, log in zip(prompts, logs, strict=True)]
    assert_same(folder, family, jobs, tokens)


def test_requests_give_before_one_is_preempted_for_a_window(
    engine: Any, gpt_oss: Path, expected: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one length take blocks of full attention and of windows in the same steps. A
    shortage that counts the managed group alone preempts one although others could give.
    """
    prompts = [reference.random_prompt(20, 40 + i) for i in range(8)]
    values = {"headroom_blocks": 1}
    pool = {"num_gpu_blocks_override": 70, "block_size": 16, "max_model_len": 256}
    pool |= {"enable_prefix_caching": False, "base": FIXED | {"evict_when": "pressure"}}
    with engine(**settings(gpt_oss, values, **pool)) as llm:
        observer = Observer(llm)
        tokens = greedy(llm, prompts, 100)
        counters, logs = observer.runtime.counters, observer.logs()
        assert counters.pressure.given_tokens == counters.tokens.evicted > 0
        assert (counters.invariants.violations, counters.requests.preempted) == (0, 0)
    jobs = [Job(prompt, 100, log) for prompt, log in zip(prompts, logs, strict=True)]
    assert tokens == expected(gpt_oss, jobs)

    nothing = np.zeros(len(prompts), dtype=np.int64)
    monkeypatch.setattr(VLLMGroup, "growth", lambda _, names, *__: nothing[: len(names)])
    with engine(**settings(gpt_oss, values, **pool)) as llm:
        greedy(llm, prompts, 100)
        assert runtime_of(llm).counters.pressure.preemptions_above_floor > 0


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoehybrid"] if ALL else ["gpt_oss"])
def test_several_samples_of_one_prompt_are_exact(
    engine: Any, folder_of: Any, expected: Any, family: str
) -> None:
    from vllm import SamplingParams

    folder, prompt = folder_of(family), reference.random_prompt(150, 5)
    pool: dict[str, Any] = {"num_gpu_blocks_override": 600, "block_size": 16}
    if family in models.HYBRID:
        pool = {"num_gpu_blocks_override": 64, "block_size": None, "enable_prefix_caching": False}
    params = SamplingParams(n=3, top_k=1, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    with engine(**settings(folder, RELOCATING, **pool)) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        runtime = runtime_of(llm)
        assert runtime.counters.invariants.violations == 0
        assert runtime.counters.tokens.evicted > 3 * len(prompt) // 2
    found = [list(sample.token_ids) for sample in answer.outputs]
    assert found == 3 * expected(folder, [Job(prompt)])


def test_a_probe_without_the_models_sinks_does_not_start(
    engine: Any, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtoken.vllm.cpu.compiled_probe import StepProbe

    add = StepProbe.add
    monkeypatch.setattr(StepProbe, "add", lambda *a, **k: add(*a, **k | {"sinks": None}))
    with (
        pytest.raises(SelfTestError, match=r"attention_.*differs from plain torch"),
        engine(**settings(gpt_oss, {}, block_size=16, num_gpu_blocks_override=600)),
    ):
        pass


PLACES = {"gpt_oss": 1, "granitemoehybrid": 3}  # of the managed group among the groups


def stores_of(llm: Any) -> list[Any]:
    """The memory of the KV cache of each layer."""
    context = core_of(llm).vllm_config.compilation_config.static_forward_context
    caches = [layer.kv_cache for layer in context.values() if hasattr(layer, "kv_cache")]
    states = [cache if isinstance(cache, torch.Tensor) else cache[0] for cache in caches]
    return [cache.untyped_storage() for cache in states]


@pytest.mark.parametrize("family", PLACES)
def test_the_status_says_what_each_group_holds(
    engine: Any, folder_of: Callable[[str], Path], family: str
) -> None:
    pool: dict[str, Any] = {"num_gpu_blocks_override": 600, "block_size": 16}
    if family in models.HYBRID:
        pool = {"num_gpu_blocks_override": 64, "block_size": None, "enable_prefix_caching": False}
    with engine(**settings(folder_of(family), {}, **pool)) as llm:
        for number in range(3):
            add(llm, str(number), reference.random_prompt(100, number), NUM_NEW)
        step(llm, times=10)
        scheduler = scheduler_of(llm)
        reporter = scheduler.vtoken_controller.reporter
        status, flags = reporter.status(), reporter.flags()
        free, held = status.blocks.free, {group.index: group for group in status.groups}
        assert free + sum(group.blocks for group in status.groups) == status.blocks.total
        managed, *others = sorted(status.groups, key=lambda group: not group.managed)
        assert managed.blocks == status.blocks.used == (flags & FLAG_USED != 0).sum()
        assert (flags == FLAG_OTHER).sum() == sum(group.blocks for group in others)
        assert [*held] == [*range(len(status.groups))]
        assert managed.index == PLACES[family]
        if family == "gpt_oss":
            assert [(group.kind, group.layers) for group in others] == [("window", 2)]
            assert others[0].blocks == 3 * -(-(64 + 16) // 16)  # a window may begin in a block
            assert managed.block_size == others[0].block_size == 16
        else:
            assert [(group.kind, group.layers) for group in others] == [("state", 1)] * 3
            assert [group.blocks for group in others] == [3, 3, 3]
        assert len({group.bytes / group.blocks for group in status.groups}) == 1
        caches = {store.data_ptr(): store.nbytes() for store in stores_of(llm)}
        assert reporter.facts.block_bytes * (status.blocks.total + 1) == sum(caches.values())
        step(llm)
        assert [group.blocks for group in reporter.status().groups] == [0] * len(status.groups)


def said_and_asked(admission: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The blocks that a row says its request needs, and that the engine then asks for."""
    found: list[tuple[int, int]] = []
    record = admission.record_demand

    def note(name: str, num_blocks: int, *more: Any, withheld_blocks: int) -> None:
        admission.discard(name)  # what was asked before
        found.append((admission.needed_blocks(name, withheld_blocks), num_blocks))
        record(name, num_blocks, *more, withheld_blocks=withheld_blocks)

    monkeypatch.setattr(admission, "record_demand", note)
    return found


def test_a_request_waits_for_the_windows_of_those_that_run(
    engine: Any, gpt_oss: Path, expected: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool fits all peaks of full attention and not all windows: counting the managed group
    alone admits a request too many, which is preempted. A row says what each needs before the
    engine asks.
    """
    prompts = [reference.random_prompt(20 + i, 40 + i) for i in range(8)]
    pool = {"num_gpu_blocks_override": 44, "block_size": 16, "max_model_len": 256}
    values = {"headroom_blocks": 1, "low_watermark_blocks": 1}
    preempted, tokens = {}, {}
    for counted in ("all groups", "the managed group"):
        if counted == "the managed group":
            monkeypatch.setattr(DemandBook, "most_of_others", lambda *_: 0)
        with engine(**settings(gpt_oss, values, enable_prefix_caching=False, **pool)) as llm:
            asked = said_and_asked(runtime_of(llm).admission, monkeypatch)
            tokens[counted] = greedy(llm, prompts, 100)
            if counted == "all groups":
                assert len(asked) > len(prompts)
                assert all(said == num_blocks for said, num_blocks in asked), asked
            counters = runtime_of(llm).counters
            preempted[counted] = counters.requests.preempted
            assert counters.invariants.violations == 0
    assert preempted["all groups"] == 0
    assert preempted["the managed group"] > 0
    jobs = [Job(prompt, 100) for prompt in prompts[::4]]
    assert tokens["all groups"][::4] == expected(gpt_oss, jobs)


SMALL = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 32, "num_attention_heads": 1}
SMALL |= {"num_key_value_heads": 1, "max_position_embeddings": 40_960}
LONG = {  # layers and windows of the published models; blocks of other groups at 32,768 tokens
    "gpt_oss": ({"num_hidden_layers": 24, "sliding_window": 128}, [9]),
    "gemma3": ({"num_hidden_layers": 48, "sliding_window": 1024}, [65] * 5),
}


@pytest.mark.skipif(not ALL, reason="two prompts of 32,768 tokens; needs VTOKEN_ALL_MODELS")
@pytest.mark.parametrize("family", LONG)
def test_full_attention_holds_most_blocks_of_a_long_context(
    engine: Any, in_process: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    from dataclasses import replace

    recipe, (layers, windows) = FAMILIES[family], LONG[family]
    recipe = replace(recipe, config=recipe.config | SMALL | layers)
    folder = in_process(models.make, recipe, tmp_path)
    pool = {"num_gpu_blocks_override": 3200, "block_size": 16, "max_model_len": 33_000}
    pool |= {"max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 1 << 30}
    values = settings(folder, {"policy": {"name": "none"}}, enable_prefix_caching=False, **pool)
    with engine(**values) as llm:
        add(llm, "0", reference.random_prompt(32_760, 1), 9, detokenize=False)
        controller = scheduler_of(llm).vtoken_controller
        held: list[Any] = []
        while llm.llm_engine.has_unfinished_requests():
            held.append(controller.reporter.status().groups)
            llm.llm_engine.step()
    last = held[-1]  # after 32,768 tokens
    assert [group.blocks for group in last if group.managed] == [2048]
    assert [group.blocks for group in last if not group.managed] == windows
    peak = max(sum(g.blocks for g in groups if not g.managed) for groups in held)
    assert peak == len(windows) * -(-(layers["sliding_window"] - 1 + 2048) // 16)


NUM_TRUNCATED = 107  # sampled after an eviction; with the prompt one token more than two blocks


@pytest.fixture
def combined(engine: Any, folder_of: Callable[[str], Path], family: str) -> Iterator[Any]:
    """`combined(llm)`: see `test_no_group_is_hashed_after_an_eviction`."""
    prompt = reference.random_prompt(150, 7)
    kept = cached_pool(family) | {"prefix_cache_retention_interval": None}
    with engine(**settings(folder_of(family), {"policy": {"name": "none"}}, **kept)) as llm:

        def run() -> tuple[list[int], list[int], list[float], int]:
            from vllm import SamplingParams

            own = {"vtoken_policy": "streaming_llm", "vtoken_budget_tokens": BUDGET}
            params = SamplingParams(
                temperature=0,
                max_tokens=NUM_TRUNCATED,
                ignore_eos=True,
                detokenize=False,
                extra_args=own,
            )
            (out,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            longer = prompt + list(out.outputs[0].token_ids)
            cached_tokens(llm, [longer], 1)  # clean blocks of the managed group
            params = SamplingParams(
                temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False, logprobs=0
            )
            (out,) = llm.generate([{"prompt_token_ids": longer}], params, use_tqdm=False)
            sampled = out.outputs[0]
            pairs = zip(sampled.token_ids, sampled.logprobs, strict=True)
            probable = [logprobs[token].logprob for token, logprobs in pairs]
            return longer, list(sampled.token_ids), probable, out.num_cached_tokens

        yield llm, run


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoehybrid"])
def test_no_group_is_hashed_after_an_eviction(
    combined: Any,
    folder_of: Callable[[str], Path],
    expected: Any,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request evicts and writes tokens; a second computes the same tokens with full attention;
    a third finds them in the cache. Its windows or states must be those of the second.
    """
    llm, run = combined
    prompt, answer, clean, hits = run()
    assert hits >= 240
    (wanted,) = expected(folder_of(family), [Job(prompt, log={})])
    assert answer == wanted

    coordinator = scheduler_of(llm).kv_cache_manager.coordinator
    stock, managed = type(coordinator).__mro__[2].cache_blocks, coordinator.managed
    hash_own = managed.cache_blocks

    def hash_others(request: Any, num_computed_tokens: int) -> None:
        """The rule for the managed group alone."""
        truncated = managed.is_truncated(request.request_id)
        managed.cache_blocks = (lambda *_, **__: None) if truncated else hash_own
        stock(coordinator, request, num_computed_tokens)

    assert llm.reset_prefix_cache()
    monkeypatch.setattr(coordinator, "cache_blocks", hash_others)
    again, _, polluted, hits = run()
    assert again == prompt
    assert hits >= 240
    assert max(abs(one - other) for one, other in zip(clean, polluted, strict=True)) > 0.01
