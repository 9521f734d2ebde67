"""Forgotten tokens: named by clients, they die before all others and before any score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.core.test_protection import make as make_live
from tests.support.core.harness import CoreEngine
from tests.support.core.live import LiveEngine
from vtoken.base.arrays import Ragged
from vtoken.base.errors import RefusedError
from vtoken.core.config.prompt_parts import PromptParts
from vtoken.core.config.request_rules import FORGET, Prompt, RequestRules, request_rules
from vtoken.core.config.spans import merged
from vtoken.core.config.token_sequences import Spans
from vtoken.core.config.values import merge_patch
from vtoken.core.runtime.ranking import Ranking
from vtoken.core.runtime.requests import Requests
from vtoken.core.tables.token_tables import TokenTables
from vtoken.policies import Policy, View, make_policy, oldest
from vtoken.wire import Forgotten

POLICIES = ["streaming_llm", "random", "h2o", "tova", "keydiff", "snapkv"]
PARAMS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sinks": 2},
    "random": {"sinks": 1, "recent": 2},
    "snapkv": {"window": 4},
    "keydiff": {"recent": 1},
}


def make(policy: str = "streaming_llm", **config: Any) -> CoreEngine:
    return CoreEngine(
        num_blocks=64,
        config={
            "policy": {"name": policy, "params": PARAMS.get(policy, {})},
            "budget_tokens": 24,
            "evict_when": "always",
            "interval_tokens": 0,
            "theta_f": 0.0,
            "low_watermark_blocks": 64,
            **config,
        },
    )


def victims_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[int]]]:
    """What dies from now on: request -> its evictions, in order."""
    found: dict[str, list[list[int]]] = {}
    evict = TokenTables.evict

    def noting(self: TokenTables, rows: Any, victims: Any, *more: Any) -> Any:
        for i, row in enumerate(rows.tolist()):
            found.setdefault(self.names[row], []).append(victims.of(i).tolist())
        return evict(self, rows, victims, *more)

    monkeypatch.setattr(TokenTables, "evict", noting)
    return found


# ---------------------------------------------------------------- arguments


def test_spans_come_in_the_shapes_of_protected_ones() -> None:
    for value in ("[[3, 5], [0, 2]]", "[0, 2, 3, 5]", [0, 2, 3, 5]):
        rules = request_rules({FORGET: value})
        assert rules is not None
        assert rules.forget == ((0, 2), (3, 5))
        rules.prompt = Prompt(4)
        with pytest.raises(RefusedError, match=r"\[3, 5\] leaves the prompt of 4 tokens") as caught:
            rules.check_prompt()
        assert caught.value.field == FORGET
    for bad in ("{}", [1], [2, 2], [0, 4, 3, 5]):
        with pytest.raises(RefusedError) as caught:
            request_rules({FORGET: bad})
        assert caught.value.field == FORGET


@pytest.mark.parametrize(
    ("forget", "protect", "apart"),
    [
        ([4, 9], [6, 7], False),
        ([6, 7], [4, 9], False),
        ([0, 5], [4, 9], False),
        ([8, 12], [4, 9], False),
        ([0, 4, 9, 12], [4, 9], True),
    ],
)
def test_a_token_is_not_both_forgotten_and_protected(
    forget: list[int], protect: list[int], apart: bool
) -> None:
    arguments = {FORGET: forget, "vtoken_protect": protect}
    if apart:
        assert request_rules(arguments) is not None
        return
    with pytest.raises(RefusedError, match=r"overlaps the protected span \[\d, \d\]") as caught:
        request_rules(arguments)
    assert (caught.value.field, caught.value.value) == (FORGET, forget)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ((), ((1, 2),), ((1, 2),)),
        (((1, 4),), ((2, 3),), ((1, 4),)),
        (((1, 4), (8, 9)), ((4, 6),), ((1, 6), (8, 9))),
        (((5, 7),), ((0, 9), (11, 12)), ((0, 9), (11, 12))),
    ],
)
def test_spans_add_up(first: Spans, second: Spans, both: Spans) -> None:
    assert merged(first, second) == both
    assert merged(both, second) == both


# ---------------------------------------------------------------- eviction


@pytest.mark.parametrize("evict_during", ["decode", "both"])
@pytest.mark.parametrize("policy", POLICIES)
def test_forgotten_tokens_die_first_and_oldest_first(
    policy: str, evict_during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks and recent ones too; the others die as many as without, and protected ones never."""
    engine = make(policy, evict_during=evict_during)
    engine.prefill_chunk_tokens = 8
    died = victims_of(monkeypatch)
    spans = ((0, 3), (8, 12), (28, 30))
    engine.add("a", 30, rules=RequestRules(forget=spans, protect=((5, 7),)))
    engine.add("b", 30)
    engine.run(30)
    forgotten = [0, 1, 2, 8, 9, 10, 11, 28, 29]
    order = [token for victims in died["a"] for token in victims]
    assert [token for token in order if token in forgotten] == forgotten
    if policy in ("streaming_llm", "random"):  # have no scores to wait for
        assert [len(v) for v in died["a"]] == [len(v) for v in died["b"]]
    left = [token for token in order if token not in forgotten]
    assert order == sorted(order[: len(forgotten)]) + left or evict_during == "decode"
    tables = engine.runtime.tables
    assert {5, 6} <= set(tables["a"].live_ids().tolist())
    assert [tables[name].num_live for name in "ab"] == [25, 25]
    assert tables["b"].is_live(0) or policy not in ("streaming_llm", "random")


def test_the_newest_token_does_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    died = victims_of(monkeypatch)
    engine.add("a", 30, rules=RequestRules(forget=((24, 30),)))
    engine.run(4)
    assert died["a"] == [[2, *range(24, 29)], [29], [3]]


def one_by_one(choose: Any) -> Any:
    """`Ranking.choose` of one request after the other."""

    def each(self: Ranking, rows: Any) -> Any:
        parts = [choose(self, rows[i : i + 1]) for i in range(len(rows))]
        victims = [found.of(0) for chosen, found in parts if len(chosen)]
        chosen = np.concatenate([rows[:0], *(chosen for chosen, _ in parts)])
        return chosen, Ragged.joined(victims)

    return each


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "tova"])
def test_many_requests_at_once_choose_as_each_alone(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = []
    for together in (True, False):
        with monkeypatch.context() as patched:
            if not together:
                patched.setattr(Ranking, "choose", one_by_one(Ranking.choose))
            found = victims_of(patched)
            engine = make(policy)
            for i in range(5):
                spans = ((3 * i, 3 * i + 4),) if i % 2 else ()
                engine.add(f"r{i}", 30 + i, seed=i, rules=RequestRules(forget=spans))
            engine.run(20)
            died.append(found)
    assert died[0] == died[1]
    assert len(died[0]) == 5


class Watching(Policy):
    """Evicts the oldest and notes what it sees."""

    name, summary = "watching", "-"

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self.views: list[View] = []

    def select_victims(self, view: View) -> Any:
        self.views.append(view)
        return oldest(view, 0)


def test_a_policy_chooses_what_is_missing_and_does_not_see_the_forgotten() -> None:
    policy = Watching()
    engine = make(budget_tokens=20)
    rules = RequestRules(policy=policy, forget=((2, 6), (9, 12)), protect=((0, 2),))
    engine.add("a", 30, rules=rules)
    engine.run(2)
    (view,) = policy.views
    assert view.token_ids.tolist() == [6, 7, 8, *range(12, 30)]
    assert view.budget_tokens == 20 - 2
    assert view.num_victims == 3
    assert engine.runtime.tables["a"].live_ids().tolist() == [0, 1, *range(12, 31)]


def test_a_request_preempted_keeps_its_spans() -> None:
    engine = make()
    engine.add("a", 30, rules=RequestRules(forget=((3, 9),)))
    engine.run(3)
    engine.runtime.requests.forget_tokens("a", ((12, 14),))
    engine.run(2)
    engine.preempt_newest()
    engine.run(3)
    assert engine.runtime.counters.requests.preempted == 1
    live = engine.runtime.tables["a"].live_ids().tolist()
    assert not set(live) & {*range(3, 9), 12, 13}
    assert engine.runtime.requests.forgotten == {"a": ((3, 9), (12, 14))}
    engine.remove("a")
    assert engine.runtime.requests.forgotten == {}


def test_tokens_that_the_configuration_protects_later_stay() -> None:
    engine = make(protect={"template": False, "system": False})
    parts = PromptParts(system=((0, 4),))
    rules = RequestRules(forget=((0, 8),))
    engine.add("a", 22, rules=rules, prompt=Prompt(22, lambda: parts))
    engine.run(1)
    engine.runtime.active.install(
        merge_patch(
            engine.runtime.config, {"protect": {"system": True}}, num_blocks=64, num_layers=4
        )
    )
    engine.run(10)
    assert {0, 1, 2, 3} <= set(engine.runtime.tables["a"].live_ids().tolist())
    assert not {4, 5, 6, 7} & set(engine.runtime.tables["a"].live_ids().tolist())


# ---------------------------------------------------------------- without scores


def blind(engine: CoreEngine) -> None:
    """No score ever arrives."""
    engine.runtime.ranking.receive = lambda _: None  # type: ignore[method-assign]


def test_scores_are_not_needed_for_what_is_forgotten() -> None:
    engine = make("tova")
    blind(engine)
    engine.add("a", 30, rules=RequestRules(forget=((3, 12),)))
    engine.add("b", 30)
    engine.run(4)
    tables = engine.runtime.tables
    assert tables["b"].num_dead == 0
    assert tables["a"].live_ids().tolist()[:4] == [0, 1, 2, 3 + 8]  # 33 tokens, 24 and one new
    engine.run(4)
    assert tables["a"].num_dead == 9  # then it waits for its scores


def under_pressure(policy: str, num_blocks: int) -> CoreEngine:
    """An engine whose requests give only for blocks that are short."""
    engine = CoreEngine(
        num_blocks=num_blocks,
        block_size=4,
        config={
            "policy": {"name": policy},
            "budget_tokens": 16,
            "interval_tokens": 4,
        },
    )
    engine.reserves = True
    return engine


def blind_and_short(forget: Spans) -> CoreEngine:
    """Two requests without scores in a pool that is short for their growth."""
    engine = under_pressure("tova", num_blocks=24)
    blind(engine)
    engine.add("a", 40, max_tokens=30, rules=RequestRules(forget=forget))
    engine.add("b", 40, max_tokens=30)
    return engine


def test_under_pressure_forgotten_tokens_give_without_scores() -> None:
    engine = blind_and_short(((4, 30),))
    engine.run(14)
    tables, counters = engine.runtime.tables, engine.runtime.counters
    assert counters.requests.preempted == 0
    assert counters.pressure.given_tokens == tables["a"].num_dead > 0
    assert tables["b"].num_dead == 0
    dead = set(range(tables["a"].num_tokens)) - set(tables["a"].live_ids().tolist())
    assert dead == set(range(4, 4 + len(dead)))
    assert dead <= set(range(4, 30))


def test_under_pressure_forgotten_tokens_go_before_those_of_others() -> None:
    engine = under_pressure("streaming_llm", num_blocks=40)
    engine.add("obsolete", 60, max_tokens=40, rules=RequestRules(forget=((4, 44),)))
    engine.add("least", 70, max_tokens=40, priority=9)
    engine.run(28)
    tables, counters = engine.runtime.tables, engine.runtime.counters
    assert counters.requests.preempted == 0
    assert tables["least"].num_dead == 0
    assert 0 < counters.pressure.given_tokens == tables["obsolete"].num_dead


def test_control_without_forgotten_tokens_nobody_gives_without_scores() -> None:
    engine = blind_and_short(())
    engine.steps(14)
    assert engine.runtime.counters.pressure.given_tokens == 0
    assert engine.runtime.counters.requests.preempted > 0


def test_a_policy_that_failed_evicts_nothing_even_of_the_forgotten() -> None:
    policy = Watching()
    engine = make()
    engine.runtime.active.suspended.append(policy)
    engine.add("a", 40, rules=RequestRules(policy=policy, forget=((0, 30),)))
    engine.run(4)
    assert engine.runtime.tables["a"].num_dead == 0


# ---------------------------------------------------------------- shadow and dry runs


@pytest.fixture
def started() -> Any:
    """Makes engines and closes them."""
    made: list[LiveEngine] = []

    def start(*args: Any, **config: Any) -> LiveEngine:
        made.append(make_live(*args, **{"budget_tokens": 60} | config))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


Start = Callable[..., LiveEngine]


def test_the_shadow_is_compared_on_what_policies_chose(started: Start) -> None:
    engine = started({FORGET: [10, 40]}, shadow={"name": "sliding_window"})
    engine.steps(2)
    shadow = engine.runtime.shadow.document()
    assert shadow is not None
    assert (shadow.compared, shadow.victims, shadow.agreed) == (1, 10, 6)  # it has no sinks
    compared = engine.runtime.requests.held["a"].compared
    assert compared is not None
    assert len(compared.victims) == len(compared.chosen) == 40
    assert set(range(10, 40)) <= set(compared.chosen.tolist()) & set(compared.victims.tolist())


def test_the_shadow_is_not_compared_when_only_forgotten_tokens_die(started: Start) -> None:
    engine = started({FORGET: [10, 60]}, shadow={"name": "sliding_window"})
    engine.steps(3)
    shadow = engine.runtime.shadow.document()
    assert shadow is not None
    assert (shadow.compared, shadow.waiting, shadow.error) == (0, 0, None)
    assert engine.runtime.tables["a"].num_dead == 41


def test_a_dry_run_counts_forgotten_tokens_and_is_not_kept_over_a_call(started: Start) -> None:
    engine = started(budget_tokens=4096)
    engine.steps(2)
    patch = {"policy": {"name": "tova"}, "budget_tokens": 90}

    def tried() -> tuple[int, int]:
        what_if = engine.call("patch_config", patch=patch, validate_only=True).what_if
        return what_if.evicted_tokens, what_if.waiting_tokens

    assert tried() == (0, 11)  # tova has no scores yet
    engine.call("forget", request_id="a", spans=[[0, 20]])
    assert tried() == (11, 0)


# ---------------------------------------------------------------- the call


def test_a_call_names_tokens_of_prompt_and_output(started: Start) -> None:
    engine = started(budget_tokens=100)
    engine.steps(6)  # 105 tokens
    told: Forgotten = engine.call("forget", request_id="a", spans=[[90, 105], [7, 8]], actor="ann")
    assert told.spans == [(7, 8), (90, 105)]
    assert (told.new_tokens, told.live_tokens, told.notes) == (16, 15, [])
    event = engine.runtime.events.page(0, 100, "eviction").events[-1]
    assert event.summary == "ann lets 16 tokens of a die first"
    again: Forgotten = engine.call("forget", request_id="a", spans=[[100, 103]])
    assert (again.spans, again.new_tokens) == (told.spans, 0)
    assert engine.runtime.events.page(0, 100, "eviction").events[-1] == event
    assert engine.reporter.request("a").forgotten == told.spans
    engine.steps(3)
    rows = engine.reporter.tokens("a", 88, 6).rows
    assert [(row.token_id, row.live) for row in rows if row.forgotten] == [
        (90, False),
        (91, False),
        (92, False),
        (93, True),
    ]


@pytest.mark.parametrize(
    ("spans", "bound"),
    [
        ([[100, 103]], "0 <= start < end <= 102"),
        ([[4, 4]], "0 <= start < end"),
        ([[-1, 4]], "0 <= start < end"),
        ([[3, 6], [5, 7]], "start at least 6"),
        ([[28, 31]], "spans without a protected token"),
        ([[0, 50]], "spans without a protected token"),
    ],
)
def test_bad_spans_are_refused(started: Start, spans: list[list[int]], bound: str) -> None:
    engine = started({"vtoken_protect": [30, 40], FORGET: [50, 52]})
    engine.steps(3)
    problem = engine.ask("forget", request_id="a", spans=spans).problem
    assert problem is not None
    assert (problem.status, problem.field, problem.bound) == (422, "spans", bound)
    assert engine.runtime.requests.forgotten == {"a": ((50, 52),)}


def test_a_request_that_waits_or_was_preempted_is_told_too(started: Start) -> None:
    engine = started()
    assert engine.call("forget", request_id="a", spans=[[98, 100]]).live_tokens == 0
    refused = engine.ask("forget", request_id="a", spans=[[98, 101]]).problem
    assert refused is not None
    assert refused.bound == "0 <= start < end <= 100"
    engine.steps(3)
    engine.core.preempt_newest()
    told = engine.call("forget", request_id="a", spans=[[100, 103]])
    assert told.spans == [(98, 103)]
    assert engine.reporter.request("a").forgotten == [(98, 103)]


def test_an_unknown_request_and_a_finished_one_are_told_apart(started: Start) -> None:
    engine = started()
    engine.steps(2)
    engine.finish("a")
    for name, why in (("a", "has finished"), ("b", "no running request")):
        problem = engine.ask("forget", request_id=name, spans=[[0, 1]]).problem
        assert problem is not None
        assert (problem.status, problem.field) == (404, "request_id")
        assert why in problem.detail


def test_a_note_says_that_nothing_is_evicted(started: Start) -> None:
    engine = started(policy={"name": "none"})
    engine.steps(2)
    told = engine.call("forget", request_id="a", spans=[[0, 50]])
    assert told.new_tokens == 50
    assert told.notes[0].startswith("policy none evicts nothing")
    engine.steps(2)
    assert engine.runtime.tables["a"].num_dead == 0
    engine.configure(policy={"name": "streaming_llm"})
    engine.steps(1)
    assert engine.runtime.tables["a"].live_ids().tolist()[:2] == [43, 44]
    failed = make_policy("tova", {})
    engine.runtime.active.suspended.append(failed)
    engine.configure(policy={"name": "tova"})
    assert "has failed" in engine.call("forget", request_id="a", spans=[[0, 1]]).notes[0]


def test_no_forgotten_tokens_no_work(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without such spans are chosen for without a look at each."""
    engine = started()
    monkeypatch.setattr(Requests, "forgotten_ids", lambda *_: pytest.fail("one by one"))
    engine.steps(3)
    assert engine.runtime.tables["a"].num_live == 61
    assert (
        np.count_nonzero(engine.runtime.requests.are_forgetting(engine.runtime.tables.all_rows))
        == 0
    )
