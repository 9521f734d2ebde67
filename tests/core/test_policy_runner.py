"""Victims of policies are validated; a policy that fails stops evicting, not the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.support.core.harness import CoreEngine
from tests.support.core.live import controller_of
from vtoken.base.errors import RefusedError
from vtoken.core.config.values import VTokenConfig
from vtoken.policies import Policy, View, make_policy, oldest
from vtoken.policies.base import needs_of, validate
from vtoken.policies.signals import Signal
from vtoken.wire.commands import PatchConfig


class Answering(Policy):
    """Returns what the test provides."""

    name = "answering"
    summary = "-"
    answer: ClassVar[Callable[[View], Any]]

    def select_victims(self, view: View) -> Any:
        return type(self).answer(view)


def engine_with(policy: Policy, **more: Any) -> CoreEngine:
    config = VTokenConfig(
        policy=policy, budget_tokens=8, interval_tokens=2, evict_when="always", **more
    )
    engine = CoreEngine(num_blocks=32, block_size=4, config=config)
    engine.add("a", 12)
    engine.add("b", 15)
    return engine


def nothing(view: View) -> None:
    return None


def boom(view: View) -> Any:
    raise ZeroDivisionError("nobody is worth anything")


def with_a_smaller_budget(view: View) -> Any:
    view.budget_tokens -= 3
    return oldest(view, 0)


def newest_first(view: View) -> Any:
    view.token_ids[:] = view.token_ids[::-1].copy()
    return oldest(view, 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda view: view.token_ids[: view.num_victims - 1], "different victims of"),
        (lambda view: np.repeat(view.token_ids[:1], view.num_victims), "1 different victims of"),
        (lambda view: view.token_ids[-view.num_victims :], "newest token"),
        (lambda view: view.token_ids[: view.num_victims] - 1, "not live"),
        (nothing, "policy answering failed"),
        (boom, "nobody is worth anything"),
        (lambda view: oldest(view, 0).astype(np.float64), "of type float64"),
        (lambda view: oldest(view, 0).astype(object), "of type object"),
        (lambda view: np.arange(len(view.token_ids)) < view.num_victims, "2 different victims"),
        (lambda view: {int(token) for token in oldest(view, 0)}, "1 different victims of 1"),
        (with_a_smaller_budget, "7 different victims of 7, not 4"),
        (newest_first, "read-only"),
    ],
    ids=[
        *("too few", "twice", "the newest", "unknown_ids", "nothing", "raises"),
        *("floats", "objects", "a mask", "a set", "a smaller budget", "reordered"),
    ],
)
def test_wrong_victims_evict_nothing_and_are_reported_once(
    answer: Callable[[View], Any], message: str
) -> None:
    Answering.answer = answer
    engine = engine_with(Answering())
    engine.run(12)
    counters = engine.runtime.counters
    assert (counters.tokens.evicted, counters.invariants.violations) == (0, 1)
    (event,) = [e for e in engine.runtime.events.page(0, 100).events if e.kind == "violation"]
    assert event.data["invariant"] == "policy"
    assert message in event.summary


def test_a_right_answer_is_followed_in_any_order() -> None:
    Answering.answer = lambda view: oldest(view, 0)[::-1]
    engine = engine_with(Answering())
    engine.run(12)
    assert engine.runtime.counters.tokens.evicted > 0
    assert engine.runtime.counters.invariants.violations == 0
    assert engine.runtime.tables["a"].live_ids()[0] > 0


def test_victims_may_be_a_list_or_small_integers() -> None:
    for answer in (
        lambda view: oldest(view, 0).tolist(),
        lambda view: oldest(view, 0).astype(np.uint8),
    ):
        Answering.answer = answer
        engine = engine_with(Answering())
        engine.run(12)
        assert engine.runtime.counters.tokens.evicted > 0
        assert engine.runtime.counters.invariants.violations == 0


def test_another_policy_evicts_after_one_has_failed() -> None:
    Answering.answer = boom
    engine = engine_with(Answering())
    engine.run(4)
    engine.runtime.active.config = VTokenConfig(
        policy=make_policy("sliding_window", {}),
        budget_tokens=8,
        interval_tokens=2,
        evict_when="always",
    )
    engine.run(4)
    assert engine.runtime.counters.tokens.evicted > 0


# ---------------------------------------------------------------- declarations


def test_what_a_policy_needs_follows_from_its_signal() -> None:
    class Reading(Answering):
        def signal(self) -> Signal:
            return Signal("key_norm")

    class Declaring(Reading):
        needs = frozenset({"keys", "token_ids"})

    class Idle(Answering):
        needs = frozenset({"attention"})

    validate(Reading)
    assert needs_of(Reading()) == ["keys"]
    validate(Declaring)  # as policies of other packages may
    assert needs_of(Declaring()) == ["keys", "token_ids"]
    with pytest.raises(ValueError, match="declares that it needs"):
        validate(Idle)


# ---------------------------------------------------------------- words


class Words:
    """Of the first twelve tokens every third is special and every third punctuation."""

    def __init__(self, why_not: str | None = None) -> None:
        self.why_not = why_not

    def refusal(self) -> str | None:
        return self.why_not

    def words(self, request_id: str, ids: Any) -> Any:  # noqa: ARG002
        return np.where(ids < 12, ids % 3, 2)

    def special(self, words: Any) -> Any:
        return words == 0

    def punctuation(self, words: Any) -> Any:
        return words == 1


FASTGEN = {"policy": {"name": "fastgen"}}


@pytest.mark.parametrize(
    ("words", "message"),
    [(None, "no tokenizer"), (Words("skip_tokenizer_init"), "skip_tokenizer_init")],
)
def test_a_policy_that_looks_at_words_is_refused_without_any(words: Any, message: str) -> None:
    engine = engine_with(make_policy("none", {}))
    engine.runtime.ranking.vocabulary = words
    controller = controller_of(engine)
    revisions, call = controller.revisions, PatchConfig(patch=FASTGEN)
    for refuse in (revisions.validate, revisions.preview, partial(revisions.make, actor="ann")):
        with pytest.raises(RefusedError, match=message) as caught:
            refuse(call)
        assert caught.value.field == "policy.name"
    assert (controller.runtime.revision, engine.runtime.config.policy.name) == (1, "none")


def test_fastgen_profiles_a_request_once_when_its_prompt_is_computed() -> None:
    engine = engine_with(make_policy("fastgen", {"recovery": 0.2}))
    engine.runtime.ranking.vocabulary = Words()
    seen: list[View] = []
    profile = type(engine.runtime.config.policy).profile
    engine.runtime.config.policy.profile = lambda view: (  # type: ignore[method-assign]
        seen.append(view) or profile(engine.runtime.config.policy, view)
    )
    engine.run(20)
    assert [view.num_tokens for view in seen] == [12, 15]
    assert [len(view.token_ids) for view in seen] == [12, 15]
    assert seen[0].vocabulary_ids.tolist() == [0, 1, 2] * 4
    assert engine.runtime.counters.tokens.evicted > 0
    assert engine.runtime.counters.invariants.violations == 0
    live = engine.runtime.tables["a"].live_ids()
    assert live[live < 12].tolist() == [0, 3, 6, 9]  # the special ones outlive all others


def test_fastgen_profiles_below_the_budget_too() -> None:
    """So the profile is the prompt's, however late the first eviction is."""
    config = VTokenConfig(
        policy=make_policy("fastgen", {}), budget_tokens=30, interval_tokens=2, evict_when="always"
    )
    engine = CoreEngine(num_blocks=32, block_size=4, config=config)
    engine.runtime.ranking.vocabulary = Words()
    engine.add("a", 9)
    engine.run(2)
    assert engine.runtime.requests.held["a"].profiles
    plan = engine.step()
    assert plan.want_scores == ()


def test_fastgen_waits_for_the_end_of_the_prompt() -> None:
    config = VTokenConfig(
        policy=make_policy("fastgen", {}),
        budget_tokens=8,
        interval_tokens=0,
        evict_during="both",
        evict_when="always",
    )
    engine = CoreEngine(num_blocks=32, block_size=4, config=config)
    engine.runtime.ranking.vocabulary = Words()
    engine.add("a", 12)
    engine.step()
    engine.runtime.requests.held["a"].prefill_end = 30  # as if more chunks were to come
    engine.run(10)
    assert engine.runtime.counters.tokens.evicted == 0
    assert engine.runtime.counters.invariants.violations == 0
    engine.runtime.requests.held["a"].prefill_end = engine.runtime.tables["a"].num_tokens
    engine.run(4)
    assert engine.runtime.counters.tokens.evicted > 0


def test_a_policy_that_fails_in_a_what_if_goes_on_evicting() -> None:
    def answer(view: View) -> Any:
        return boom(view) if view.budget_tokens < 6 else oldest(view, 0)

    Answering.answer = answer
    engine = engine_with(Answering())
    controller = controller_of(engine)
    engine.run(4)
    with pytest.raises(RefusedError, match="policy answering fails on a: Zero") as caught:
        controller.revisions.preview(PatchConfig(patch={"budget_tokens": 5}))
    assert caught.value.field == "policy.name"
    before = engine.runtime.counters.tokens.evicted
    engine.run(8)
    assert engine.runtime.counters.tokens.evicted > before
    assert engine.runtime.counters.invariants.violations == 0
