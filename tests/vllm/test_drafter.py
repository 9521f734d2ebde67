"""Drafters with layers: their K and V lie in the slots of the model's tokens, evicted or moved.

No token depends on a drafter. A wrong slot shows in what is accepted: a reference whose drafter
has a cache of its own, pruned at the same moments, predicts that step by step. A copy of the model
as drafter is accepted entirely, except right after its live set has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from tests.support import drafters, reference
from tests.support.drafting import MOST, runner_of, speculate
from tests.support.engines import EAGER, engine_args
from tests.support.live_sets import LiveSets, expected_tokens, own_name, swinging_budget
from tests.support.observe import Observer, runtime_of, scheduler_of
from tests.support.stepping import add, step
from vtoken.vllm.cpu.ahead_places import AheadPlaces
from vtoken.vllm.cpu.backend import VTokenCPUMetadataBuilder
from vtoken.vllm.cpu.host_executor import HostExecutor
from vtoken_bench.drafters import first_layers

pytestmark = pytest.mark.vllm

NUM_NEW = 112
BUDGET, INTERVAL = 96, 24
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((200, 70, 133))]
EVICT = reference.streaming_llm(4, BUDGET, INTERVAL)


def args(drafter: Path, method: str = "draft_model", **config: Any) -> dict[str, Any]:
    settings = {
        "policy": {"name": "streaming_llm"},
        "budget_tokens": BUDGET,
        "evict_when": "always",
        "interval_tokens": INTERVAL,
        "verify_ratio": 1.0,
        **config,
    }
    drafts = {"method": method, "model": str(drafter), "num_speculative_tokens": MOST}
    memory = {"kv_cache_memory_bytes": 192 << 20}  # of both models together
    return {"speculative_config": drafts, **memory, **engine_args(settings, check_every_step=True)}


def note_accepted(llm: Any) -> dict[str, list[tuple[int, int]]]:
    """Request -> a step's tokens before it, and how many drafts it accepted; filled as it runs."""
    scheduler, found = scheduler_of(llm), dict[str, list[tuple[int, int]]]()
    take_back = scheduler._take_back

    def note(drafts: Any, rejected: Any) -> None:
        for name, count in rejected.items():
            num_before = scheduler.requests[name].num_computed_tokens - drafts[name] - 1
            found.setdefault(own_name(name), []).append((num_before, drafts[name] - count))
        take_back(drafts, rejected)

    scheduler._take_back = note
    return found


def counts(accepted: list[tuple[int, int]]) -> list[int]:
    """Without the last step, whose drafts may be more than the answer has tokens left."""
    return [count for _, count in accepted[:-1]]


VARIANTS: dict[str, dict[str, Any]] = {
    "recycling": {"experiment": {"round_rule": "paper"}},
    "plug without recycling": {"recycle": False, "experiment": {"planner": "plug"}, **EAGER},
    "pack with recycling": {"experiment": {"planner": "pack"}, **EAGER},
    "off (naive-evict)": {"reclamation": "off"},
}
CASES = [("copy", "recycling"), ("copy", "plug without recycling")]
CASES += [("copy with more KV heads", "pack with recycling"), ("one layer", "off (naive-evict)")]


@pytest.mark.parametrize(("drafter", "name"), CASES)
def test_what_is_accepted_of_another_models_drafts_is_what_the_reference_predicts(
    drafter: str,
    name: str,
    engine: Any,
    greedy: Any,
    hf_model: Any,
    demo_model: Path,
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    drafts, folder = hf_model, demo_model
    if drafter == "copy with more KV heads":
        folder = drafters.more_kv_heads(demo_model, tmp_path / "drafter")
    if drafter == "one layer":
        folder = first_layers(demo_model, tmp_path / "drafter", 1)
        drafts = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = [speculate(hf_model, drafts, prompt, NUM_NEW, EVICT) for prompt in PROMPTS]
    with engine(enable_prefix_caching=False, **args(folder, **VARIANTS[name])) as llm:
        observer, accepted = Observer(llm), note_accepted(llm)
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        counters = observer.runtime.counters
        assert counters.invariants.violations == 0
        assert counters.tokens.evicted > 300
        assert (counters.reclamation.relocations > 0) == name.startswith(("plug", "pack"))
        assert observer.steps_with_holes > (0 if "without" in name else 20)
        assert counters.reclamation.recycled_slots == 0
        assert counters.serving.accepted_draft_tokens > 30
    assert tokens == [own for own, _ in expected]
    for (_, predicted), found in zip(expected, accepted.values(), strict=True):
        assert counts(found) == predicted[:-1]
        assert min(predicted) < max(predicted)


def test_a_copy_is_accepted_after_hits_a_preemption_and_the_return_of_parked_tokens(
    engine: Any, greedy: Any, hf_model: Any, demo_model: Path
) -> None:
    prefix = PROMPTS[0][:128]
    prompts = [prefix + PROMPTS[1], prefix + PROMPTS[2][:33]]
    expected = [speculate(hf_model, hf_model, prompt, NUM_NEW, EVICT) for prompt in prompts]
    cut = 1 + 11 * (1 + MOST)
    with engine(enable_prefix_caching=True, **args(demo_model, **EAGER)) as llm:
        accepted, counters = note_accepted(llm), runtime_of(llm).counters
        greedy(llm, [prefix + PROMPTS[1][:1]], 1)  # fills the prefix cache
        assert greedy(llm, prompts, NUM_NEW) == [own for own, _ in expected]
        for (_, predicted), found in zip(expected, [*accepted.values()][-2:], strict=True):
            assert counts(found) == predicted[:-1]
        assert counters.serving.prefix_hit_tokens >= 2 * 128
        assert counters.reclamation.relocations > 0

        add(llm, "cut", PROMPTS[0], NUM_NEW)
        scheduler = scheduler_of(llm)
        while not scheduler.running or scheduler.running[0].num_output_tokens < cut:
            step(llm, times=1)
        first = list(scheduler.running[0].output_token_ids)
        done = len(accepted["cut"])
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        (answer,) = step(llm).outputs
        _, before = speculate(hf_model, hf_model, PROMPTS[0], NUM_NEW, EVICT)
        rest, after = speculate(hf_model, hf_model, PROMPTS[0] + first, NUM_NEW - len(first), EVICT)
        assert list(answer.token_ids) == first + rest
        assert counts(accepted["cut"]) == before[:done] + after[:-1]
        assert counters.requests.preempted == 1

        found, logs = swinging_budget(llm, PROMPTS, NUM_NEW, (BUDGET, 200), steps=3)
        assert counters.invariants.violations == 0
        for number, (prompt, tokens, log) in enumerate(zip(PROMPTS, found, logs, strict=True)):
            assert tokens == expected_tokens(hf_model, prompt, tokens, log)
            _accepts_all_but_after_changes(accepted[f"s{number}"], log)


def _accepts_all_but_after_changes(accepted: list[tuple[int, int]], log: Any) -> None:
    changed = {change.num_tokens for stretch in log for change in stretch.changes}
    others = [count for before, count in accepted[:-1] if before not in changed]
    assert len(others) > 10
    assert others == [MOST] * len(others)


def test_under_the_shipped_policy_a_copy_is_accepted_but_right_after_requests_gave(
    engine: Any, greedy: Any, hf_model: Any, demo_model: Path
) -> None:
    prompts = [reference.random_prompt(length, 40 + length) for length in (400, 350)]
    shipped = engine_args({"verify_ratio": 1.0}, check_every_step=True)
    small = {"num_gpu_blocks_override": 31, "max_model_len": 768}
    with engine(enable_prefix_caching=False, **{**args(demo_model), **shipped, **small}) as llm:
        accepted, watch = note_accepted(llm), LiveSets(scheduler_of(llm))
        found = greedy(llm, prompts, 160)
        counters = runtime_of(llm).counters
        assert (counters.pressure.given_tokens > 0, counters.invariants.violations) == (True, 0)
    logs = [watch.stretches[name] for name in sorted(watch.stretches)]
    for prompt, tokens, name, log in zip(prompts, found, sorted(accepted), logs, strict=True):
        assert tokens == expected_tokens(hf_model, prompt, tokens, log)
        _accepts_all_but_after_changes(accepted[name], log)


def write_where_vllm_says(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AheadPlaces, "correct", lambda *_: None)


def read_as_many_as_vllm_says(patch: pytest.MonkeyPatch) -> None:
    def build(builder: Any, common: Any, draft_index: int) -> Any:
        return CPUAttentionMetadataBuilder.build(builder, 0, common)

    patch.setattr(VTokenCPUMetadataBuilder, "build_for_drafting", build)


def move_the_models_tokens_alone(patch: pytest.MonkeyPatch) -> None:
    relocate = HostExecutor.relocate

    def relocate_less(executor: Any, plan: Any) -> None:
        drafter, executor.drafter = executor.drafter, None
        relocate(executor, plan)
        executor.drafter = drafter

    patch.setattr(HostExecutor, "relocate", relocate_less)


CONTROLS = [write_where_vllm_says, read_as_many_as_vllm_says, move_the_models_tokens_alone]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: str(control.__name__))
def test_without_a_rule_the_copy_is_accepted_less(
    control: Any,
    engine: Any,
    greedy: Any,
    hf_model: Any,
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control(monkeypatch)
    settings = args(demo_model, **VARIANTS["plug without recycling"], verify_ratio=0.0)
    with engine(enable_prefix_caching=False, **settings) as llm:
        observer, accepted = Observer(llm), note_accepted(llm)
        (tokens,) = greedy(llm, PROMPTS[:1], 64)
        (log,) = observer.logs()
    # No token depends on a drafter.
    assert tokens == reference.generate(
        hf_model, PROMPTS[0], 64, reference.replay(log), draft=tokens
    )
    (found,) = accepted.values()
    assert sum(counts(found)) < 0.7 * MOST * len(counts(found))


HEADS = ("eagle", "eagle3", "mtp")


@contextmanager
def proposed(llm: Any) -> Iterator[list[list[list[int]]]]:
    """The drafts of each step, by row of the batch; filled as the engine runs."""
    runner, found = runner_of(llm), list[list[list[int]]]()
    propose = runner.propose_draft_token_ids

    def note(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        found.append(torch.as_tensor(drafts).tolist())
        return drafts

    runner.propose_draft_token_ids = note
    yield found


@pytest.mark.parametrize("method", HEADS)
def test_tokens_equal_the_reference_and_drafts_do_not_depend_on_where_tokens_lie(
    method: str, engine: Any, greedy: Any, hf_model: Any, demo_model: Path, tmp_path: Path
) -> None:
    """Random heads are hardly ever right: the drafts themselves are compared, over two layouts."""
    from transformers import AutoModelForCausalLM

    model, target = hf_model, demo_model
    if method == "mtp":
        target = drafter = drafters.mtp_model(tmp_path / "mtp")
        model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    else:
        drafter = drafters.eagle_head(demo_model, tmp_path / method, method)
    layouts: list[Any] = []
    for name in ("pack with recycling", "off (naive-evict)"):
        settings = args(drafter, method, **VARIANTS[name])
        if method == "mtp":
            settings |= {"max_model_len": 1024, "skip_tokenizer_init": True}
        with engine(enable_prefix_caching=False, model=str(target), **settings) as llm:
            observer = Observer(llm)
            with proposed(llm) as drafts:
                tokens = greedy(llm, PROMPTS, 64)
            counters, logs = observer.runtime.counters, observer.logs()
            assert counters.invariants.violations == 0
            assert counters.tokens.evicted > 200
            assert (counters.reclamation.relocations > 0) == name.startswith("pack")
        layouts.append(drafts)
        for prompt, got, log in zip(PROMPTS, tokens, logs, strict=True):
            replay = reference.replay(log)
            assert got == reference.generate(model, prompt, 64, replay, draft=got)
    assert len(layouts[0]) > 12
    assert layouts[0] == layouts[1]
    assert len({str(row) for rows in layouts[0] for row in rows}) > 30
