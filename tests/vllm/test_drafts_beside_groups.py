"""Drafts beside layers with a window or a state: tokens equal the reference.

Every scenario of a family runs on one engine. Its live sets are recorded from the plans, and the
reference repeats them: evictions, moves, a preemption, tokens that are parked and come back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import vllm
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from tests.support import models, reference
from tests.support.drafting import MOST, NGRAM, SCRIPTS, replace_drafts, use_drafts
from tests.support.engines import EAGER, engine_args
from tests.support.live_sets import LiveSets, swinging_budget
from tests.support.observe import runtime_of, scheduler_of
from tests.support.reference import Stretch
from tests.support.stepping import add, step
from tests.vllm.test_hybrids import said_and_asked
from vtoken.base.errors import UnsupportedError
from vtoken.vllm.cpu.ahead_places import AheadPlaces
from vtoken.vllm.engine.groups import VLLMGroup

pytestmark = pytest.mark.vllm

ALL = bool(os.environ.get("VTOKEN_ALL_MODELS"))
WINDOWS = [name for name in models.MIXED if name != "llama4"] if ALL else ["gpt_oss"]
STATES = ["qwen3_next"]
ROWS_OF_VLLM_FAIL = vllm.__version__.startswith("0.32.")  # mended in 0.33
NUM_NEW = 48
BUDGET, INTERVAL = 96, 12
NEAR_TIE = 0.2  # of the median distance of the two best logits: bfloat16 may decide it otherwise
FIXED = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": BUDGET,
    "interval_tokens": INTERVAL,
    "evict_when": "always",
    "verify_ratio": 1.0,
}
MOVED = {"recycle": False, "experiment": {"planner": "pack"}, **EAGER}


def pool_of(family: str) -> dict[str, Any]:
    """Blocks for three requests; vLLM fits them to states, if the model has these."""
    if family in models.MIXED:
        return {"num_gpu_blocks_override": 600, "block_size": 16, "enable_prefix_caching": True}
    pool = {"num_gpu_blocks_override": 128, "block_size": None, "enable_prefix_caching": False}
    return pool | {"dtype": models.recipe_of(family).dtype, "kv_cache_memory_bytes": 512 << 20}


def arguments(folder: Path, family: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = {"model": str(folder), "max_model_len": 1024, "skip_tokenizer_init": True}
    base |= {"speculative_config": NGRAM} | pool_of(family) | more
    return base | engine_args(config, check_every_step=True)


class Run(NamedTuple):
    """A request's prompt, its tokens and its live sets."""

    prompt: list[int]
    tokens: list[int]
    stretches: list[Stretch]


def load(folder: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype
    ).eval()


def answers_of(folder: Path, dtype: str, prompts: list[list[int]]) -> list[list[int]]:
    model = load(folder, dtype)
    return [reference.generate(model, prompt, NUM_NEW, reference.full) for prompt in prompts]


def traces_of(folder: Path, dtype: str, runs: list[Run]) -> list[tuple[list[int], list[float]]]:
    """Of each run the reference's tokens, and how far the engine's are below its best logits, in
    units of the median distance of the two best.
    """
    model, found = load(folder, dtype), []
    for prompt, tokens, stretches in runs:
        trace = reference.trace_log(
            *(model, prompt, len(tokens), stretches), draft=tokens, forced=dtype != "float32"
        )
        median = sorted(trace.gaps())[len(tokens) // 2]
        found.append((trace.tokens, [short / median for short in trace.shortfalls()]))
    return found


class Driver:
    """Runs prompts with drafts on one engine and keeps what to compare.

    `answers`: what is drafted from, by `script`. Under eviction the tokens become others; those of
    the last run of a prompt are drafted in its next one, so that some are right.
    """

    def __init__(self, llm: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.llm, self.prompts, self.answers = llm, prompts, answers
        self.runs: list[Run] = []
        self.runtime = runtime_of(llm)

    def run(
        self, script: str, *, preempt_after: int | None = None, num_new: int = NUM_NEW
    ) -> list[int]:
        """The tokens of each prompt that were found in the prefix cache."""
        use_drafts(self.llm, self.prompts, self.answers, SCRIPTS[script])
        watch, tokens = LiveSets(scheduler_of(self.llm)), dict[str, list[int]]()
        cached: dict[str, int] = {}
        names = [f"r{len(self.runs) + number}" for number in range(len(self.prompts))]
        for name, prompt in zip(names, self.prompts, strict=True):
            add(self.llm, name, prompt, num_new, detokenize=False)
        if preempt_after is not None:
            step(self.llm, tokens, preempt_after)
            assert scheduler_of(self.llm).reset_prefix_cache(reset_running_requests=True)
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                cached[output.request_id] = output.num_cached_tokens
        watch.restore()
        self.answers = [tokens[name] for name in names]
        for name, prompt in zip(names, self.prompts, strict=True):
            self.runs.append(Run(prompt, tokens[name], watch.stretches[name]))
        return [cached[name] for name in names]

    def swing(self, script: str) -> None:
        use_drafts(self.llm, self.prompts, self.answers, SCRIPTS[script])
        found, logs = swinging_budget(self.llm, self.prompts, NUM_NEW, (BUDGET, 240), steps=4)
        self.runs += map(Run, self.prompts, found, logs)

    def change(self, patch: dict[str, Any]) -> None:
        scheduler_of(self.llm).vtoken_controller.patch_config(patch)


@pytest.mark.parametrize("family", [*WINDOWS, *STATES])
def test_tokens_equal_the_reference(
    engine: Any, folder_of: Any, in_process: Callable[..., Any], family: str
) -> None:
    folder, dtype = folder_of(family), models.recipe_of(family).dtype
    lengths = (200, 110) if family in WINDOWS else (400, 140)
    prompts = [reference.random_prompt(length, seed) for seed, length in enumerate(lengths)]
    answers = in_process(answers_of, folder, dtype, prompts)
    with engine(**arguments(folder, family, FIXED)) as llm:
        driver = Driver(llm, prompts, answers)
        counters = driver.runtime.counters
        driver.run("mixed")
        recycled = counters.reclamation.recycled_slots
        hits = driver.run("right")
        driver.change(MOVED | {"low_watermark_blocks": pool_of(family)["num_gpu_blocks_override"]})
        driver.run("mixed", preempt_after=9)
        moved, preempted = counters.reclamation.relocations, counters.requests.preempted
        driver.swing("mixed")
        serving = counters.serving
        assert 0 < serving.accepted_draft_tokens < serving.draft_tokens
        assert counters.tokens.evicted > 4 * (sum(lengths) - 2 * BUDGET)
        assert min(recycled, moved, preempted) > 0
        assert counters.invariants.violations == 0
        if family in WINDOWS:
            assert sum(hits) >= sum(length // 16 * 16 for length in lengths) - 2 * 16
        wrong = without_full_rows(driver) if family in STATES and ROWS_OF_VLLM_FAIL else []
    traces = in_process(traces_of, folder, dtype, driver.runs + wrong)
    for run, (tokens, short) in zip(driver.runs, traces, strict=False):
        assert run.tokens == tokens
        assert max(short) <= (0 if dtype == "float32" else NEAR_TIE)
    for _, short in traces[len(driver.runs) :]:
        assert max(short) > 1


def without_full_rows(driver: Driver) -> list[Run]:
    """What vLLM's own layer of GDN answers, whose rows have any number of drafts."""
    first, core = len(driver.runs), gdn_attention._spec_forward
    with patch.object(gdn_attention, "_spec_forward", core.__wrapped__):
        driver.run("mixed")
    found, driver.runs = driver.runs[first:], driver.runs[:first]
    return found


TIGHT = {"gpt_oss": (44, 8, 20), "qwen3_next": (50, 5, 60)}  # blocks, prompts, their length


@pytest.mark.parametrize("family", TIGHT)
def test_a_request_waits_for_the_blocks_of_drafts_in_all_groups(
    engine: Any, folder_of: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With k drafts a window is k tokens longer, and there are k more states."""
    num_blocks, num_prompts, length = TIGHT[family]
    prompts = [reference.random_prompt(length + i, 40 + i) for i in range(num_prompts)]
    pool = {"num_gpu_blocks_override": num_blocks, "max_model_len": 256}
    config = FIXED | {"budget_tokens": 40, "headroom_blocks": 1, "low_watermark_blocks": 1}
    pool["enable_prefix_caching"] = False
    with engine(**arguments(folder_of(family), family, config, **pool)) as llm:
        runtime = runtime_of(llm)
        use_drafts(llm, prompts, [[0]] * num_prompts, SCRIPTS["wrong"])
        asked = said_and_asked(runtime.admission, monkeypatch)
        greedy(llm, prompts, NUM_NEW, detokenize=False)
        assert len(asked) > num_prompts  # some waited
        assert all(said == num_blocks for said, num_blocks in asked), asked
        counters = runtime.counters
        assert (counters.invariants.violations, counters.requests.preempted) == (0, 0)


def test_requests_give_before_one_is_preempted_for_a_window(
    engine: Any, folder_of: Any, in_process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one length take blocks of both groups for their drafts in the same steps. A
    shortage that counts no drafts in the windows preempts one although others could give.
    """
    folder, prompts = folder_of("gpt_oss"), [reference.random_prompt(20, 40 + i) for i in range(8)]
    pool = {"num_gpu_blocks_override": 82, "max_model_len": 256, "enable_prefix_caching": False}
    config = FIXED | {"evict_when": "pressure", "budget_tokens": 40, "headroom_blocks": 1}
    answers = in_process(answers_of, folder, "float32", prompts)
    with engine(**arguments(folder, "gpt_oss", config, **pool)) as llm:
        driver = Driver(llm, prompts, answers)
        driver.run("mixed", num_new=100)
        counters = driver.runtime.counters
        assert counters.pressure.given_tokens == counters.tokens.evicted > 0
        assert (counters.invariants.violations, counters.requests.preempted) == (0, 0)
        with_drafts = VLLMGroup.growth

        def growth(group: VLLMGroup, names: list[str], num_new: Any, steps: int) -> Any:
            return with_drafts(group, names, np.minimum(num_new, steps), steps)

        monkeypatch.setattr(VLLMGroup, "growth", growth)
        Driver(llm, prompts, answers).run("mixed", num_new=100)
        assert counters.pressure.preemptions_above_floor > 0
    traces = in_process(traces_of, folder, "float32", driver.runs)
    assert [run.tokens for run in driver.runs] == [tokens for tokens, _ in traces]


def with_mtp(folder: Path, made: Path) -> Path:
    """The model of `folder` in `made`, whose last layer becomes that of MTP."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    config["num_nextn_predict_layers"] = 1
    config["layer_types"].pop()
    weights, size = load_file(folder / "model.safetensors"), config["hidden_size"]
    last = f"model.layers.{config['num_hidden_layers']}."
    weights = {name.replace(last, "mtp.layers.0."): w for name, w in weights.items()}
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = torch.zeros(size)  # the layer adds 1
    generator = torch.Generator().manual_seed(5)
    weights["mtp.fc.weight"] = torch.randn(size, 2 * size, generator=generator) / size**0.5
    made.mkdir()
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory, in_process: Callable[..., Any]) -> Path:
    made, recipe = tmp_path_factory.mktemp("mtp"), models.recipe_of("qwen3_next")
    types = [*["linear_attention"] * 3, "full_attention", "full_attention"]
    longer = {"num_hidden_layers": 5, "layer_types": types}
    folder = in_process(models.make, replace(recipe, config=recipe.config | longer), made)
    return in_process(with_mtp, folder, made / "model")


MTP = {"method": "mtp", "num_speculative_tokens": MOST}


def test_a_layer_of_mtp_writes_into_no_state(
    engine: Any, mtp_folder: Path, in_process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer of MTP and a layer of GDN have one tensor. A slot that is computed from a position
    is behind the blocks that its request has left, in one that held an earlier request's tokens
    and now holds a state.
    """
    prompts = [reference.random_prompt(length, seed) for seed, length in enumerate((740, 90, 60))]
    earlier = reference.random_prompt(900, 9)
    answers = in_process(answers_of, mtp_folder, "bfloat16", prompts)
    pool = {"num_gpu_blocks_override": 40, "speculative_config": MTP}
    moved = MOVED | {"low_watermark_blocks": 40, "headroom_blocks": 4, "batch_size": 16}
    config = FIXED | moved | {"verify_ratio": 0.0}
    runs: dict[bool, list[Run]] = {}
    with engine(**arguments(mtp_folder, "qwen3_next", config, **pool)) as llm:
        for is_physical in (True, False):
            if not is_physical:
                monkeypatch.setattr(AheadPlaces, "correct", lambda *_: None)
            replace_drafts(llm, [earlier, *prompts], [[0], *answers], SCRIPTS["mixed"])
            watch, tokens = LiveSets(scheduler_of(llm)), dict[str, list[int]]()
            add(llm, "earlier", earlier, 1, detokenize=False)
            step(llm)
            add(llm, "0", prompts[0], 90, detokenize=False)
            step(llm, tokens, 6)
            for number in (1, 2):
                add(llm, str(number), prompts[number], 60, detokenize=False)
            step(llm, tokens)
            watch.restore()
            runs[is_physical] = [
                Run(prompt, tokens[str(i)], watch.stretches[str(i)])
                for i, prompt in enumerate(prompts)
            ]
        counters = runtime_of(llm).counters
        assert counters.serving.accepted_draft_tokens > 20
        assert min(counters.reclamation.relocations, counters.tokens.evicted) > 0
        assert (counters.invariants.violations, counters.requests.preempted) == (0, 0)
    found = in_process(traces_of, mtp_folder, "bfloat16", runs[True] + runs[False])
    worst = [max(short) for _, short in found]
    assert max(worst[:3]) <= NEAR_TIE
    assert max(worst[3:]) > 1


@pytest.mark.parametrize(
    ("family", "cached", "why"),
    [
        ("granitemoehybrid", False, "drafts beside states of Mamba 2"),
        ("qwen3_next", True, r"prefix cache: .* use --no-enable-prefix-caching"),
    ],
)
def test_what_vllm_computes_wrong_is_refused(
    engine: Any, folder_of: Any, family: str, cached: bool, why: str
) -> None:
    more = {"enable_prefix_caching": cached}
    with (
        pytest.raises(UnsupportedError, match=why),
        engine(**arguments(folder_of(family), family, {}, **more)),
    ):
        pass
