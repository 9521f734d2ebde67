"""A request's text: the flags of its tokens, and the shadow's newest choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.core.live import LiveEngine, make_quiet
from vtoken import wire
from vtoken.core.config.request_rules import request_rules

POLICY = {"name": "random", "params": {"sinks": 2, "recent": 1}}
SHADOW = {"name": "streaming_llm", "params": {"sinks": 2}}


@pytest.fixture
def core() -> Iterator[LiveEngine]:
    """A request of 40 tokens that waits, a policy and a shadow."""
    with make_quiet(block_size=4) as core:
        core.configure(
            policy=POLICY,
            shadow=SHADOW,
            budget_tokens=20,
            evict_when="always",
            interval_tokens=5,
            recycle=False,
            reclamation="paused",
        )
        core.runtime.announce("a", request_rules({"vtoken_protect": [0, 2]}))
        core.admit("a", 40)
        yield core


def text_of(core: LiveEngine, request_id: str = "a") -> wire.TextPage:
    return core.reporter.text(request_id, 0, 4096).page


def test_the_shadow_is_compared_on_what_was_live_at_the_newest_eviction(core: LiveEngine) -> None:
    """Compared with a dictionary that follows the table step by step."""
    before: list[int] = []
    compared = 0
    for _ in range(60):
        core.steps()
        table = core.runtime.tables["a"]
        live = table.live_ids().tolist()
        died = sorted(set(before) - set(live))
        page = text_of(core)
        if died:
            # streaming_llm keeps two sinks and the newest: the oldest others would have died.
            would_die = before[2 : 2 + len(died)]
            assert page.shadow == wire.TextShadow(
                policy=wire.PolicyChoice(name="streaming_llm", params={"sinks": 2}),
                step=core.runtime.step,
                num_tokens=before[-1] + 1,
                evicted=len(died),
                agreed=len(set(died) & set(would_die)),
            )
            expected = {n: n not in would_die for n in before}
            compared += 1
        if page.shadow is not None:
            shadow_live = {row.token_id: row.shadow_live for row in page.rows}
            assert {n: kept for n, kept in shadow_live.items() if kept is not None} == expected
        assert [row.token_id for row in page.rows if row.live] == live
        assert [row.token_id for row in page.rows if row.protected] == [0, 1]
        before = live
    assert compared > 5


@pytest.mark.parametrize("then", [{"shadow": None}, {"shadow": {"name": "none"}}])
def test_the_choice_of_a_removed_shadow_is_not_shown(
    core: LiveEngine, then: dict[str, Any]
) -> None:
    core.steps(3)
    assert text_of(core).shadow is not None
    core.call("patch_config", patch=then)
    core.steps()
    assert text_of(core).shadow is None


def test_a_choice_is_not_shown_after_an_eviction_that_was_not_compared(
    core: LiveEngine,
) -> None:
    """The same shadow comes back, after an eviction without one."""
    core.steps(3)
    assert text_of(core).shadow is not None
    shadowed, table = core.runtime.config, core.runtime.tables["a"]
    core.call("patch_config", patch={"shadow": None})
    dead = table.num_dead
    while table.num_dead == dead:
        core.steps()
    core.runtime.active.install(shadowed)
    core.steps()
    assert core.runtime.shadow.active_policy is shadowed.shadow
    assert text_of(core).shadow is None
    assert all(row.shadow_live is None for row in text_of(core).rows)


def test_words_include_the_decoders_context_before_the_page(core: LiveEngine) -> None:
    core.configure(budget_tokens=400)
    core.admit("long", 150)
    core.steps(2)
    source = core.reporter.text("long", 100, 10)
    assert [row.token_id for row in source.page.rows] == list(range(100, 110))
    first = 100 - wire.TEXT_CONTEXT_TOKENS
    assert source.words == [n % 97 for n in range(first, 110)]
    assert core.reporter.text("long", 500, 10).words == []


def test_a_request_that_waits_has_no_text_yet(core: LiveEngine) -> None:
    assert core.call("text", request_id="a").page.total == 0
    assert core.ask("text", request_id="nobody").problem.status == 404  # type: ignore[union-attr]


def test_an_engine_without_a_tokenizer_refuses_text(core: LiveEngine) -> None:
    core.steps(2)
    core.runtime.ranking.vocabulary = None
    problem = core.ask("text", request_id="a").problem
    assert problem is not None
    assert (problem.status, problem.title) == (409, "No text")


def test_a_choice_is_not_shown_of_as_many_dead_tokens_when_some_have_come_back_between(
    core: LiveEngine,
) -> None:
    core.call("patch_config", patch={"park_bytes": 1 << 20, "restore_after_ms": 0})
    core.steps(8)
    shadowed, table = core.runtime.config, core.runtime.tables["a"]
    num_dead = table.num_dead
    assert text_of(core).shadow is not None
    wide = {"shadow": None, "reclamation": "auto", "budget_tokens": 48}
    core.call("patch_config", patch=wide)
    while table.num_live < 48:
        assert core.runtime.step < 60
        core.steps()
    narrow = {"budget_tokens": table.num_tokens - num_dead, "interval_tokens": 0}
    core.call("patch_config", patch=narrow)
    core.steps()
    core.runtime.shadow.set_policy(shadowed.shadow)
    assert table.num_dead == num_dead
    assert text_of(core).shadow is None


def test_a_token_without_a_number_shows_none(core: LiveEngine) -> None:
    def score(request_id: str, num_tokens: int) -> Any:
        del request_id
        return np.where(np.arange(num_tokens) % 2, np.inf, 0.5).astype(np.float32)

    core.core.worker.score = score
    core.call("patch_config", patch={"policy": {"name": "h2o"}})
    core.steps(3)
    page = core.reporter.tokens("a", 0, 40)
    assert [row.score for row in page.rows] == [0.5, None] * 20
