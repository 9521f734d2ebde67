"""Victims of many requests at once equal those of each request's own view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.core.harness import CoreEngine
from tests.support.core.tables import evict_tokens, sync_new_tokens
from vtoken.base.arrays import Ragged
from vtoken.core.runtime.batch import TableBatch
from vtoken.core.tables.token_tables import TokenTables
from vtoken.policies import Batch, Policy, View, lowest, oldest
from vtoken.policies.streaming_llm import StreamingLLM

NONE = {"name": "none"}  # until a test puts in its own
FIXED = {"policy": NONE, "budget_tokens": 8, "interval_tokens": 0, "evict_when": "always"}
SCORES = [0.0, -0.0, 1.5, -2.5, 1e-40, float("inf"), float("-inf"), float("nan"), 3.0, 7.25]


@st.composite
def tables(draw: Any) -> TokenTables:
    """One to four requests of up to 40 tokens, of which each keeps the newest and some others."""
    made = TokenTables(64, 4)
    next_block = 1
    for number in range(draw(st.integers(1, 4))):
        name, num_tokens = f"r{number}", draw(st.integers(3, 40))
        blocks = list(range(next_block, next_block + -(-num_tokens // 4)))
        next_block += len(blocks)
        sync_new_tokens(made, name, blocks, num_tokens)
        dead = draw(st.sets(st.integers(0, num_tokens - 2), max_size=num_tokens - 3))
        evict_tokens(made, name, np.array(sorted(dead), dtype=np.int64))
    return made


def draw_spans(made: TokenTables, data: Any) -> list[set[int]]:
    """Protected tokens of each request, some of them dead or not computed yet."""
    return [
        data.draw(st.sets(st.integers(0, table.num_tokens + 2), max_size=table.num_tokens // 2))
        for table in made
    ]


def batch_of(
    made: TokenTables, data: Any, scores: Sequence[Any] = ()
) -> tuple[TableBatch, list[View]]:
    """Budgets and spans of all requests, and the view of each one's policy."""
    spans, kept, views = draw_spans(made, data), [], []
    for table, covered in zip(made, spans, strict=True):
        ids = table.live_ids()
        seen = ids[~np.isin(ids, list(covered))]
        num_protected = len(ids) - len(seen)
        kept.append(data.draw(st.integers(min(num_protected + 1, len(ids)), len(ids))))
        views.append(View(seen, table.num_tokens, table.num_tokens, kept[-1] - num_protected))
    pairs = Ragged.joined([[end for t in sorted(one) for end in (t, t + 1)] for one in spans])
    return TableBatch(made, made.all_rows, np.array(kept), scores, pairs, views.__getitem__), views


def no_view(i: int) -> View:
    raise AssertionError(f"the view of request {i} is not needed")


def plain_lowest(view: View, scores: Any, sinks: int, recent: int) -> list[int]:
    """The victims by sorting: NaN last, of equal scores the older first."""
    order = [
        (math.isnan(score), 0 if math.isnan(score) else score, token)
        for token, score in zip(view.token_ids.tolist(), scores.tolist(), strict=True)
    ]
    evictable = order[: max(0, len(order) - max(recent, 1))]
    window = [key for key in evictable if key[2] >= sinks]
    return sorted(token for *_, token in sorted(window)[: view.num_victims])


@given(tables(), st.data())
def test_the_oldest_of_a_batch_are_those_of_each_view(made: TokenTables, data: Any) -> None:
    sinks = data.draw(st.integers(0, 6))
    batch, views = batch_of(made, data)
    assert batch.budget.tolist() == [view.budget_tokens for view in views]
    found = batch.oldest(sinks)
    for i, view in enumerate(views):
        assert found.of(i).tolist() == oldest(view, sinks).tolist()


@given(tables(), st.data())
def test_the_lowest_of_a_batch_are_those_of_each_view(made: TokenTables, data: Any) -> None:
    """Ties, zeros of both signs, infinities, NaN, and tokens newer than the scores."""
    sinks = data.draw(st.integers(0, 6))
    recent = [data.draw(st.integers(0, 9)) for _ in made]
    scores = [
        np.array(
            data.draw(st.lists(st.sampled_from(SCORES), min_size=n, max_size=n)), dtype=np.float32
        )
        for n in [data.draw(st.integers(table.num_tokens - 2, table.num_tokens)) for table in made]
    ]
    batch, views = batch_of(made, data, scores)
    found = batch.lowest(sinks, np.array(recent))
    for i, view in enumerate(views):
        known = np.full(view.num_tokens, np.inf, dtype=np.float32)
        known[: len(scores[i])] = scores[i]
        scores_of_view = known[view.token_ids]
        expected = plain_lowest(view, scores_of_view, sinks, recent[i])
        assert found.of(i).tolist() == expected
        assert lowest(view, scores_of_view, sinks, recent[i]).tolist() == expected
        assert lowest(view, scores_of_view.astype(float), sinks, recent[i]).tolist() == expected


@given(st.integers(0, 2**32 - 1))
def test_the_lowest_of_many_random_scores(seed: int) -> None:
    """More tokens than one pass of the radix selection distinguishes."""
    rng = np.random.default_rng(seed)
    made = TokenTables(200, 16)
    sync_new_tokens(made, "r", list(range(1, 190)), 3000)
    scores = rng.normal(size=3000).astype(np.float32) ** rng.integers(1, 4)
    budget = int(rng.integers(1, 3000))
    batch = TableBatch(made, made.all_rows, np.array([budget]), [scores], Ragged.empty(1), no_view)
    found = batch.lowest(4, 16)
    view = View(np.arange(3000), 3000, 3000, budget)
    assert found.of(0).tolist() == plain_lowest(view, scores, 4, 16)


def test_a_subclass_with_another_choice_does_not_inherit_that_of_a_batch() -> None:

    class Newest(StreamingLLM):
        def select_victims(self, view: View) -> Any:
            return view.token_ids[-1 - view.num_victims : -1]

    engine = CoreEngine(config=FIXED)
    engine.runtime.active.config = replace(engine.runtime.config, policy=Newest())
    engine.add("a", 12)
    engine.step()
    engine.step()
    assert engine.runtime.tables["a"].live_ids().tolist() == [*range(7), 11, 12]


class Oldest(Policy):
    """Names victims of a batch only."""

    name, summary = "oldest", "-"

    def select_many(self, batch: Batch) -> Ragged:
        return batch.oldest(2)


def test_a_policy_of_batches_names_the_victims_of_one_view() -> None:
    view = View(np.arange(10), 10, 10, 6)
    assert Oldest().select_victims(view).tolist() == [2, 3, 4, 5]


class Greedy(Policy):
    """Names invalid victims for all requests at once."""

    name, summary = "greedy", "-"

    def select_many(self, batch: Batch) -> Ragged:
        found = batch.oldest(0)
        return Ragged(found.values[:-1], np.minimum(found.starts, len(found.values) - 1))


class Confused(Policy):
    """Names victims as floats."""

    name, summary = "confused", "-"

    def select_many(self, batch: Batch) -> Ragged:
        found = batch.oldest(0)
        return Ragged(found.values.astype(float), found.starts)  # type: ignore[arg-type]


class Forgetful(Policy):
    """Names victims of the first request only."""

    name, summary = "forgetful", "-"

    def select_many(self, batch: Batch) -> Ragged:
        return Ragged.joined([batch.oldest(0).of(0)])


@pytest.mark.parametrize(
    ("policy", "why"),
    [(Confused(), "of type float64, not int64"), (Forgetful(), "victims of 1 requests, not 2")],
)
def test_an_answer_of_another_form_suspends_its_policy(policy: Policy, why: str) -> None:
    engine = CoreEngine(config=FIXED, strict=True)
    engine.runtime.active.config = replace(engine.runtime.config, policy=policy)
    for name in ("a", "b"):
        engine.add(name, 12)
    engine.steps(3)
    assert engine.runtime.counters.tokens.evicted == 0
    (event,) = [e for e in engine.runtime.events.page(0, 100).events if e.kind == "violation"]
    assert why in event.summary
    engine.check()


def test_a_batch_that_names_too_few_is_refused_and_its_policy_suspended() -> None:
    engine = CoreEngine(config=FIXED, strict=True)
    policy = Greedy()
    engine.runtime.active.config = replace(engine.runtime.config, policy=policy)
    for name in ("a", "b"):
        engine.add(name, 12)
    engine.steps(3)
    assert engine.runtime.ranking.is_suspended(policy)
    assert engine.runtime.tables["b"].num_dead == 0  # its answer was short
    assert engine.runtime.counters.invariants.violations == 1
    engine.check()
