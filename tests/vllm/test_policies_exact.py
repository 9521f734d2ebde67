"""Every policy on the real engine: placement never changes tokens, and logged victims replay.

All policies run side by side in one batch, each request under its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support import reference
from tests.support.engines import EAGER, engine_args
from tests.support.observe import Observer, scheduler_of
from vtoken.policies import policy_names
from vtoken.wire.commands import Command, PatchConfig

pytestmark = pytest.mark.vllm

NUM_NEW = 96
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((300, 90))]
VARIANTS: dict[str, dict[str, Any]] = {
    "naive-evict": {"reclamation": "off"},
    "recycling": {"experiment": {"round_rule": "paper"}},
    "plug": {"recycle": False, **EAGER},
}
PARAMS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 16},
    "scissorhands": {"history_queries": 60},
    "h2o": {"normalize": True},
}
EVICTING = [name for name in policy_names() if name != "none"]
VOCABULARY: list[Any] = []  # the engine's, once fastgen has run

Run = tuple[list[list[int]], list[dict[int, set[int]]]]  # tokens and victims, a prompt each


def generate_under(
    llm: Any,
    policies: Sequence[tuple[str, dict[str, Any]]],
    prompts: list[list[int]],
    num_new: int,
) -> list[list[int]]:
    """Greedy tokens of every prompt under every policy, policy by policy, in one batch."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=num_new,
            ignore_eos=True,
            extra_args={"vtoken_policy": name, "vtoken_policy_params": json.dumps(params)},
        )
        for name, params in policies
        for _ in prompts
    ]
    inputs = [{"prompt_token_ids": prompt} for _ in policies for prompt in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def runs(engine: Any) -> dict[str, dict[str, Run]]:
    """Variant -> policy -> run; one engine a variant."""
    found: dict[str, dict[str, Run]] = {}
    policies = [(name, PARAMS.get(name, {})) for name in EVICTING]
    for variant, config in VARIANTS.items():
        settings = {"budget_tokens": 64, "interval_tokens": 16, "evict_when": "always", **config}
        args = engine_args(settings | {"verify_ratio": 1.0}, check_every_step=True)
        with engine(enable_prefix_caching=False, **args) as llm:
            observer = Observer(llm)
            tokens = generate_under(llm, policies, PROMPTS, NUM_NEW)
            logs = observer.logs()
            counters = observer.runtime.counters
            assert (counters.invariants.violations, counters.requests.preempted) == (0, 0)
            assert (counters.reclamation.relocations > 0) == (variant == "plug")
            assert (counters.reclamation.recycled_slots > 0) == (variant == "recycling")
            VOCABULARY[:] = [observer.runtime.ranking.vocabulary]
        found[variant] = {
            name: (tokens[i : i + len(PROMPTS)], logs[i : i + len(PROMPTS)])
            for i, name in zip(range(0, len(tokens), len(PROMPTS)), EVICTING, strict=True)
        }
    return found


@pytest.mark.parametrize("policy", EVICTING)
def test_variants_agree_and_the_victims_replay(
    policy: str, runs: dict[str, dict[str, Run]], hf_model: Any
) -> None:
    tokens, logs = runs["naive-evict"][policy]
    assert all(len(log) > 4 for log in logs)
    for variant in VARIANTS:
        assert runs[variant][policy] == (tokens, logs)
    for prompt, got, log in zip(PROMPTS, tokens, logs, strict=True):
        assert got == reference.generate(
            hf_model, prompt, NUM_NEW, reference.replay(log), draft=got
        )


def test_no_two_policies_choose_alike(runs: dict[str, dict[str, Run]]) -> None:
    logs = [run[1] for run in runs["naive-evict"].values()]
    assert all(logs[i] != logs[j] for i in range(len(logs)) for j in range(i))


def test_eviction_by_every_policy_changes_the_output(
    runs: dict[str, dict[str, Run]], hf_model: Any
) -> None:
    full = [reference.generate(hf_model, p, NUM_NEW, reference.full) for p in PROMPTS]
    for policy, (tokens, _) in runs["naive-evict"].items():
        assert tokens != full, policy


@pytest.mark.usefixtures("runs")
def test_the_vocabulary_finds_special_tokens_and_punctuation_of_the_demo_model() -> None:
    words = np.arange(258)
    special, punctuation = (
        getattr(VOCABULARY[0], kind)(words) for kind in ("special", "punctuation")
    )
    assert words[special].tolist() == [256, 257]
    ascii_punctuation = [ord(c) for c in "!\"#%&'()*,-./:;?@[\\]_{}"]  # Unicode P*, symbols are not
    assert words[punctuation].tolist() == ascii_punctuation


def test_a_policy_that_reads_words_is_refused_without_a_tokenizer(engine: Any) -> None:
    with engine(skip_tokenizer_init=True, **engine_args({})) as llm:
        controller = scheduler_of(llm).vtoken_controller
        patch = {"policy": {"name": "fastgen"}}
        problem = controller.handle(Command(call=PatchConfig(patch=patch))).problem
        assert (problem.status, problem.field) == (422, "policy.name")
        assert "skip_tokenizer_init" in problem.detail
