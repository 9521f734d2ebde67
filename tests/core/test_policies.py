"""Eviction policies: hand-worked cases, and the invariants of every policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core.harness import CoreEngine
from tests.support.core.request_step import parts_of
from vtoken import policies
from vtoken.base.errors import RefusedError
from vtoken.policies import View, describe_policies, make_policy, policy_names
from vtoken.policies.signals import Signal

EVICTING = [name for name in policy_names() if name != "none"]


def view(ids: list[int], budget: int, scores: list[float] | None = None, **more: Any) -> View:
    for kind in ("special", "punctuation"):
        more[kind] = np.isin(ids, more.pop(kind, []))
    return View(
        token_ids=np.array(ids, dtype=np.int64),
        num_tokens=more.pop("num_tokens", ids[-1] + 1),
        num_prompt_tokens=1,
        budget_tokens=budget,
        scores=np.array([] if scores is None else scores, dtype=np.float32),
        **more,
    )


def victims(name: str, seen: View, **params: Any) -> list[int]:
    out: list[int] = make_policy(name, params).select_victims(seen).tolist()
    return out


# ---------------------------------------------------------------- hand-worked


def test_streaming_llm_counts_positions_not_ranks_as_sinks() -> None:
    """Positions 0 and 1 died under another policy: 2 and 3 are not promoted to sinks."""
    assert victims("streaming_llm", view([2, 3, 7, 8, 9], 3), sinks=2) == [2, 3]


def test_sliding_window_keeps_the_most_recent_only() -> None:
    assert victims("sliding_window", view([*range(6)], 4)) == [0, 1]


def test_h2o_keeps_heavy_hitters_sinks_and_the_recent_half() -> None:
    scores = [0.1, 5.0, 0.3, 4.0, 0.2, 9.0, 0.0, 0.0]
    seen = view([*range(8)], 4, scores)
    assert victims("h2o", seen, sinks=0, recent_ratio=0.5) == [0, 2, 3, 4]
    assert victims("h2o", seen, sinks=1, recent_ratio=0.5) == [1, 2, 3, 4]


def test_h2o_divides_by_the_queries_that_saw_the_token_when_asked() -> None:
    """Of 4 tokens, id 0 was seen by 4 queries and id 2 by 2."""
    scores = [4.0, 9.0, 2.1, 0.0]
    assert victims("h2o", view([*range(4)], 3, scores), sinks=0, recent_ratio=0.3) == [2]
    normalized = {"sinks": 0, "recent_ratio": 0.3, "normalize": True}
    assert victims("h2o", view([*range(4)], 3, scores), **normalized) == [0]


READING = [name for name in EVICTING if make_policy(name, {}).reads and name != "fastgen"]


@pytest.mark.parametrize("policy", [*READING, "h2o by the mean"])
def test_a_token_that_came_back_outlives_those_that_have_a_number(policy: str) -> None:
    """`fastgen` also ranks by kinds of tokens and by their age."""
    params = {"normalize": True} if policy == "h2o by the mean" else {}
    scores, back = np.random.default_rng(0).random(120), [*range(30, 50)]
    scores[back] = np.inf
    seen = view([*range(120)], 80, [*scores])
    dead = make_policy(policy.split()[0], params).select_victims(seen)
    assert not set(back) & set(dead.tolist())


def test_random_depends_on_seed_prompt_and_length_alone() -> None:
    seen = view([*range(60)], 30, seed=5)
    first = victims("random", seen)
    assert victims("random", seen) == first
    assert victims("random", seen, seed=1) != first
    assert victims("random", view([*range(60)], 30, seed=6)) != first


def test_random_is_uniform_over_the_evictable_tokens() -> None:
    counts = np.zeros(20)
    for seed in range(2000):
        dead = victims("random", view([*range(20)], 10, seed=seed), sinks=2, recent=3)
        counts[dead] += 1
    assert counts[:2].sum() == counts[17:].sum() == 0
    expected = 2000 * 10 / 15
    assert np.abs(counts[2:17] - expected).max() < 5 * np.sqrt(expected / 3)


def test_tova_evicts_what_the_last_query_attends_to_least() -> None:
    scores = [0.3, 0.05, 0.2, 0.0, 0.25, 0.2]
    assert victims("tova", view([*range(6)], 4, scores)) == [1, 3]
    assert victims("tova", view([*range(6)], 4, scores[::-1], num_tokens=6), recent=3) == [0, 2]


def test_peak_attention_evicts_what_is_far_from_every_peak() -> None:
    scores = [0.0, 0.2, 0.4, 0.1, 0.3, 0.0, 0.0]
    seen = view([*range(7)], 5, scores)
    assert victims("peak_attention", seen, sinks=1, recent=2) == [1, 3]
    reads = Signal("attention_max", 16, pool="mean", pool_radius=3)
    assert make_policy("peak_attention", {}).reads == reads


def test_scissorhands_evicts_the_least_persistent_and_spares_the_recent() -> None:
    hits = [7.0, 2.0, 9.0, 2.0, 5.0, 0.0, 0.0]
    assert victims("scissorhands", view([*range(7)], 5, hits), recent=2) == [1, 3]
    assert victims("scissorhands", view([*range(7)], 5, hits), recent=1) == [1, 5]


def test_snapkv_evicts_the_lowest_and_keeps_sinks_and_window() -> None:
    scores = [0.0, 3.0, 9.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    seen = view([0, 1, 2, 3, 7, 8, 20, 21], 5, scores)
    assert victims("snapkv", seen, window=2) == [0, 7, 8]
    assert victims("snapkv", seen, window=2, sinks=1) == [1, 7, 8]


@pytest.mark.parametrize("name", ["tova", "knorm", "keydiff", "snapkv"])
def test_parameters_choose_the_aggregates_of_a_signal(name: str) -> None:
    """Names are equal in all policies; defaults are means, but TOVA's and KeyDiff's over heads."""
    maxima = {"heads": "max", "layers": "max", "pool": "max", "pool_radius": 3}
    found = make_policy(name, maxima).reads
    assert found is not None
    assert (found.over_heads, found.over_layers) == ("max", "max")
    assert (found.pool, found.pool_radius) == ("max", 3)
    default = make_policy(name, {}).reads
    assert default is not None
    assert default.over_heads == ("max" if name in ("tova", "keydiff") else "mean")
    assert {default.over_layers, default.pool} == {"mean"}


def test_snapkv_reads_the_maximum_over_its_window_when_told_to() -> None:
    params = {"window": 8, "queries": "max", "pool_radius": 2}
    assert make_policy("snapkv", params).reads == Signal("attention_max", 8, pool_radius=2)


def test_r_kv_evicts_the_lowest_and_keeps_its_window() -> None:
    scores = [-0.1, -0.3, 0.2, -0.2, -0.4, -0.5, -0.5]
    seen = view([0, 1, 2, 3, 7, 8, 9], 5, scores)
    assert victims("r_kv", seen, window=2) == [1, 7]
    assert victims("r_kv", seen, window=2, sinks=2) == [3, 7]
    assert make_policy("r_kv", {}).reads == Signal(
        "attention_window", 16, pool_radius=2, mix_lambda=0.5
    )


def test_key_policies_evict_the_lowest_signal() -> None:
    scores = [-3.0, -9.0, -1.0, -4.0, -9.5]
    assert victims("knorm", view([*range(5)], 3, scores), recent=1) == [1, 3]
    assert victims("keydiff", view([*range(5)], 3, scores), sinks=2, recent=1) == [2, 3]


FASTGEN_SCORES = [0.5, 0.0, 0.1, 0.05, 0.05, 0.05, 0.05, 0.0, 0.1, 0.1]


@pytest.mark.parametrize(
    ("recovery", "parts"),
    [(0.5, 1), (0.6, 2), (0.8, 3), (0.81, 4), (0.95, 5)],
    ids=["special", "and punctuation", "and heavy", "and window", "everything"],
)
def test_fastgen_takes_the_smallest_structure_that_recovers_enough(
    recovery: float, parts: int
) -> None:
    """Special 0 holds 0.5; punctuation 2 adds 0.1; the two heaviest others, 8 and 9, add 0.2;
    the window 6..9 adds 0.05."""
    policy = make_policy(
        "fastgen", {"recovery": recovery - 1e-6, "heavy": 0.4, "window": 0.4, "queries": 4}
    )
    seen = view([*range(10)], 6, FASTGEN_SCORES, special=[0], punctuation=[2, 7])
    assert policy.profile(seen) == parts


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (1, [1, 2, 3, 4]),  # special 0, then the most recent
        (2, [1, 3, 4, 5]),  # punctuation 2 and 7 outrank the recent
        (3, [1, 3, 4, 5]),  # heavy 0, 8, 9
        (5, [1, 3, 4, 7]),  # window 8, 9 and heavy; the rest by attention: 5 and 6 tie with 3, 4
    ],
)
def test_fastgen_fills_the_budget_by_what_its_structure_keeps(
    parts: int, expected: list[int]
) -> None:
    seen = view([*range(10)], 6, FASTGEN_SCORES, special=[0], punctuation=[2] if parts < 5 else [])
    seen.profile = parts
    assert sorted(victims("fastgen", seen, heavy=0.5, window=0.34)) == expected


def test_none_evicts_nothing() -> None:
    assert victims("none", view([0, 1, 2], 1)) == []


# ---------------------------------------------------------------- invariants of every policy

SPARED = {"sinks": st.integers(0, 8), "recent": st.integers(1, 8)}
PARAMS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "streaming_llm": st.fixed_dictionaries({"sinks": st.integers(0, 8)}),
    "sliding_window": st.just({}),
    "random": st.fixed_dictionaries({"sinks": st.integers(0, 8), "recent": st.integers(1, 8)}),
    "h2o": st.fixed_dictionaries(
        {
            "sinks": st.integers(0, 8),
            "recent_ratio": st.floats(0, 1),
            "normalize": st.booleans(),
        }
    ),
    "scissorhands": st.fixed_dictionaries(SPARED),
    "tova": st.fixed_dictionaries(SPARED),
    "knorm": st.fixed_dictionaries(SPARED),
    "keydiff": st.fixed_dictionaries(SPARED),
    "peak_attention": st.fixed_dictionaries(SPARED),
    "snapkv": st.fixed_dictionaries(
        {"sinks": st.integers(0, 8), "window": st.integers(1, 8), "pool_radius": st.integers(0, 6)}
    ),
    "r_kv": st.fixed_dictionaries({"sinks": st.integers(0, 8), "window": st.integers(1, 8)}),
    "fastgen": st.fixed_dictionaries(
        {name: st.floats(0, 1) for name in ("recovery", "heavy", "window")}
    ),
}
SCORES = st.floats(width=32, allow_nan=True, allow_infinity=True)


def test_every_evicting_policy_is_in_the_matrix() -> None:
    assert sorted(PARAMS) == sorted(EVICTING)


@pytest.mark.parametrize("name", EVICTING)
@given(data=st.data())
@settings(max_examples=60)
def test_victims_are_live_distinct_and_never_protected(name: str, data: st.DataObject) -> None:
    """For any scores, NaN and infinities too."""
    params = data.draw(PARAMS[name])
    policy = make_policy(name, params)
    budget = data.draw(st.integers(policy.min_budget_tokens(), 40))
    length = data.draw(st.integers(budget + 1, budget + 30))
    drawn = data.draw(st.lists(st.integers(0, 200), unique=True, min_size=length, max_size=length))
    ids = sorted(drawn)
    scores = data.draw(st.lists(SCORES, min_size=length, max_size=length))
    kinds = {
        kind: data.draw(st.lists(st.sampled_from(ids), max_size=30))
        for kind in ("special", "punctuation")
    }
    seen = view(ids, budget, scores, **kinds)
    if policy.profiles:
        seen.profile = policy.profile(seen)
    dead = policy.select_victims(seen)
    assert dead.dtype == np.int64
    assert len(dead) == seen.num_victims == length - budget
    assert len(set(dead.tolist())) == len(dead)
    assert set(dead.tolist()) <= set(ids)
    assert ids[-1] not in dead
    assert all(victim >= params.get("sinks", 0) for victim in dead.tolist())
    own_window = name in ("snapkv", "r_kv")
    recent = params.get("window", 1) if own_window else params.get("recent", 1)
    assert not set(ids[-recent:]) & set(dead.tolist())


@given(length=st.integers(2, 60), sinks=st.integers(0, 6), extra=st.integers(1, 20))
@settings(max_examples=200)
def test_streaming_llm_keeps_exactly_sinks_and_window(length: int, sinks: int, extra: int) -> None:
    budget = sinks + extra
    if length <= budget:
        return
    dead = set(victims("streaming_llm", view([*range(length)], budget), sinks=sinks))
    kept = [t for t in range(length) if t not in dead]
    assert kept == [*range(sinks), *range(length - extra, length)]


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("name", "params", "field"),
    [
        ("streaming_llm", {"sinks": -1}, "policy.params.sinks"),
        ("streaming_llm", {"sinks": 1025}, "policy.params.sinks"),
        ("streaming_llm", {"sinks": 1.5}, "policy.params.sinks"),
        ("streaming_llm", {"sinks": True}, "policy.params.sinks"),
        ("streaming_llm", {"sinks": "4"}, "policy.params.sinks"),
        ("streaming_llm", {"sink": 4}, "policy.params.sink"),
        ("random", {"recent": 0}, "policy.params.recent"),
        ("random", {"seed": 2**31}, "policy.params.seed"),
        ("h2o", {"recent_ratio": 1.01}, "policy.params.recent_ratio"),
        ("h2o", {"recent_ratio": float("nan")}, "policy.params.recent_ratio"),
        ("h2o", {"recent_ratio": float("inf")}, "policy.params.recent_ratio"),
        ("h2o", {"normalize": 1}, "policy.params.normalize"),
        ("sliding_window", {"sinks": 4}, "policy.params.sinks"),
        ("scissorhands", {"history_queries": 0}, "policy.params.history_queries"),
        ("scissorhands", {"history_queries": 4097}, "policy.params.history_queries"),
        ("snapkv", {"window": 513}, "policy.params.window"),
        ("snapkv", {"pool_radius": 33}, "policy.params.pool_radius"),
        ("tova", {"heads": "median"}, "policy.params.heads"),
        ("h2o", {"layers": "max"}, "policy.params.layers"),
        ("tova", {"recent": 0}, "policy.params.recent"),
        ("fastgen", {"recovery": 1.1}, "policy.params.recovery"),
        ("fastgen", {"queries": 0}, "policy.params.queries"),
        ("none", {"x": 1}, "policy.params.x"),
        ("streaming_llm", [], "policy.params"),
        ("streaming_llm", None, "policy.params"),
        ("lru", {}, "policy.name"),
        (None, {}, "policy.name"),
        (["h2o"], {}, "policy.name"),
    ],
)
def test_bad_parameters_are_refused_by_name(name: Any, params: Any, field: str) -> None:
    with pytest.raises(RefusedError) as caught:
        make_policy(name, params)
    assert caught.value.field == field
    assert caught.value.bound


def test_every_policy_describes_itself() -> None:
    infos = {info.name: info for info in describe_policies()}
    assert list(infos) == policy_names()
    for name, info in infos.items():
        assert info.summary
        assert info.source
        assert info.params_schema["type"] == "object"
        for schema in info.params_schema["properties"].values():
            assert schema["description"]
            assert "default" in schema
            bounded = {"minimum", "maximum"} <= set(schema) or "enum" in schema
            bounded |= schema.get("type") == "boolean"
            assert bounded, f"{name}: {schema}"
        assert info.error is None


def test_two_policies_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="h2o"):
        policies.register(type(make_policy("h2o", {})))


# ---------------------------------------------------------------- the same in all variants


def eviction_log(reclamation: str, policy: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Victims of every request, in order, under one variant."""
    engine = CoreEngine(
        num_blocks=128,
        block_size=4,
        config={
            "policy": policy,
            "budget_tokens": 12,
            "evict_when": "always",
            "interval_tokens": 2,
            "reclamation": reclamation,
            "recycle": reclamation != "off",
            "theta_f": 0.0,
            "low_watermark_blocks": 128,
        },
    )
    for i in range(4):
        engine.add(f"r{i}", 15 + 3 * i, prefix="p", prefix_tokens=9, max_tokens=60, seed=i)
    log: dict[str, list[list[int]]] = {}
    for _ in range(60):
        plan = engine.step()
        for name, part in parts_of(plan.requests).items():
            if len(part.evicted):
                log.setdefault(name, []).append(part.evicted.tolist())
    assert engine.num_preemptions == 0
    counters = engine.runtime.counters
    assert (counters.reclamation.moved_tokens + counters.reclamation.recycled_slots > 0) == (
        reclamation == "auto"
    )
    return log


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "streaming_llm"},
        {"name": "sliding_window"},
        {"name": "random", "params": {"recent": 2, "sinks": 1}},
        {"name": "h2o"},
        {"name": "h2o", "params": {"normalize": True, "recent_ratio": 0.2, "sinks": 1}},
        {"name": "snapkv", "params": {"window": 4}},
        {"name": "scissorhands"},
        {"name": "knorm", "params": {"recent": 1}},
    ],
    ids=lambda policy: policy["name"],
)
def test_naive_evict_and_vtoken_choose_the_same_victims(policy: dict[str, Any]) -> None:
    naive = eviction_log("off", policy)
    assert naive == eviction_log("auto", policy)
    assert len(naive) == 4
