"""Drafters with layers: their K and V lie in the slots of the model's tokens, evicted or moved.

No token depends on a drafter. A wrong slot shows in what is accepted: a reference whose drafter
has a cache of its own, pruned at the same moments, predicts that step by step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import reference
from tests.support.drafting import MOST, speculate
from tests.support.engines import EAGER, engine_args
from tests.support.observe import Observer, scheduler_of

pytestmark = pytest.mark.vllm

NUM_NEW = 112
BUDGET, INTERVAL = 96, 24
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((200, 70, 133))]


def args(drafter: Path, method: str = "draft_model", **config: Any) -> dict[str, Any]:
    settings = {
        "policy": {"name": "streaming_llm"},
        "budget_tokens": BUDGET,
        "evict_when": "always",
        "interval_tokens": INTERVAL,
        "verify_ratio": 1.0,
        **config,
    }
    memory = {"kv_cache_memory_bytes": 128 << 20}  # of both models together
    drafts = {"method": method, "model": str(drafter), "num_speculative_tokens": MOST}
    return {"speculative_config": drafts, **memory, **engine_args(settings, check_every_step=True)}


VARIANTS: dict[str, dict[str, Any]] = {
    "recycling": {"experiment": {"round_rule": "paper"}},
    "plug without recycling": {"recycle": False, "experiment": {"planner": "plug"}, **EAGER},
    "pack with recycling": {"experiment": {"planner": "pack"}, **EAGER},
    "off (naive-evict)": {"reclamation": "off"},
}


def note_accepted(llm: Any) -> dict[str, list[int]]:
    """Request -> how many drafts were accepted, by step; filled as the engine runs."""
    scheduler, found = scheduler_of(llm), dict[str, list[int]]()
    take_back = scheduler._take_back

    def note(drafts: Any, rejected: Any) -> None:
        for name, count in rejected.items():
            found.setdefault(name, []).append(drafts[name] - count)
        take_back(drafts, rejected)

    scheduler._take_back = note
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_copy_of_the_model_drafts_is_accepted_as_the_reference_predicts(
    name: str, engine: Any, greedy: Any, hf_model: Any, demo_model: Path
) -> None:
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    expected = [speculate(hf_model, hf_model, prompt, NUM_NEW, evict) for prompt in PROMPTS]
    with engine(enable_prefix_caching=False, **args(demo_model, **VARIANTS[name])) as llm:
        observer, accepted = Observer(llm), note_accepted(llm)
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        counters = observer.runtime.counters
        assert counters.invariants.violations == 0
        assert counters.tokens.evicted > 300
        assert (counters.reclamation.relocations > 0) == name.startswith(("plug", "pack"))
        assert observer.steps_with_holes > (0 if "without" in name else 20)
        assert counters.reclamation.recycled_slots == 0
    assert tokens == [own for own, _ in expected]
    for (_, predicted), found in zip(expected, accepted.values(), strict=True):
        assert found[:-1] == predicted[:-1]
        assert min(predicted) < MOST == predicted[1]  # right after an eviction, and elsewhere
