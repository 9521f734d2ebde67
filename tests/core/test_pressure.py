"""Eviction under pressure: nobody loses a token before somebody needs the memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.core.engine import CoreEngine
from tests.support.core.windows import Windows
from vtoken.base.arrays import Ints
from vtoken.base.errors import RefusedError
from vtoken.control.outlook import Outlook
from vtoken.control.relief import relief
from vtoken.core.config.request_rules import RequestRules, request_rules
from vtoken.core.config.values import merge_patch
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.planning.giving import Givers, share_out
from vtoken.core.runtime.demand import DemandBook
from vtoken.core.runtime.output_lengths import OutputLengths
from vtoken.core.runtime.shortage import Shortage, ShortageMonitor
from vtoken.wire import MAX_TOKENS, Geometry, MemoryPressure

POLICIES: list[dict[str, Any]] = [
    {"name": "streaming_llm", "params": {"sinks": 2}},
    {"name": "random"},
    {"name": "tova"},
    {"name": "snapkv"},
    {"name": "keydiff"},
    {"name": "h2o"},
]
IDS = [policy["name"] for policy in POLICIES]


def make(
    policy: dict[str, Any] | None = None,
    *,
    lag: int = 0,
    window: int | None = None,
    **config: Any,
) -> CoreEngine:
    engine = CoreEngine(
        num_blocks=65,
        block_size=4,
        worker_lag_steps=lag,
        window=window,
        config={
            "policy": policy or POLICIES[0],
            "budget_tokens": 24,
            "interval_tokens": 8,
            "evict_when": "pressure",
            **config,
        },
    )
    engine.reserves = True
    return engine


def finish(engine: CoreEngine, most_steps: int = 2000) -> int:
    """Run until no request is left; returns the most that ran at once."""
    most = 0
    for _ in range(most_steps):
        if not engine.running and not engine.waiting:
            return most
        engine.step()
        engine.check()
        most = max(most, len(engine.running))
    raise AssertionError("the engine does not finish")


def pressure_of(engine: CoreEngine) -> MemoryPressure | None:
    return Outlook(engine.runtime, engine.runtime.config).pressure()


def load(engine: CoreEngine, num_requests: int = 12, output: int = 60) -> None:
    for i in range(num_requests):
        engine.add(f"r{i}", 20 + i, max_tokens=output, seed=i)


# ---------------------------------------------------------------- ample memory


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_nothing_is_given_while_memory_is_ample(policy: dict[str, Any]) -> None:
    engine = make(policy)
    engine.add("a", 30, max_tokens=100)
    while engine.running or engine.waiting:
        plan = engine.step()
        if len(engine.store.free) > 40:
            assert engine.runtime.idle
            assert not plan.probed
            assert not plan.signals
    assert engine.runtime.counters.tokens.evicted == 0


def test_the_same_requests_lose_tokens_under_always() -> None:
    engine = make(evict_when="always")
    engine.add("a", 30, max_tokens=100)
    finish(engine)
    assert engine.runtime.counters.tokens.evicted > 0


def test_control_a_shortage_that_ignores_free_blocks_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ShortageMonitor, "is_near", lambda _: True)
    monkeypatch.setattr(Shortage, "blocks", property(lambda _: 4))
    monkeypatch.setattr(Shortage, "to_give", lambda *_: 4)
    engine = make()
    engine.add("a", 30, max_tokens=100)
    finish(engine)
    assert engine.runtime.counters.tokens.evicted > 0


# ---------------------------------------------------------------- short memory


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_nobody_is_preempted_who_or_beside_whom_somebody_could_give(
    policy: dict[str, Any], lag: int
) -> None:
    engine = make(policy, lag=lag)
    load(engine)
    most = finish(engine)
    counters = engine.runtime.counters
    assert counters.invariants.violations == 0
    assert counters.pressure.given_tokens == counters.tokens.evicted > 0
    assert counters.pressure.preemptions_above_floor == 0
    assert most > 4  # as many whole requests fit the pool


def test_control_without_growth_in_the_shortage_requests_are_preempted_above_their_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DemandBook, "of_decoding", lambda *_: 0)
    engine = make()
    load(engine)
    finish(engine)
    assert engine.runtime.counters.pressure.preemptions_above_floor > 0


# ---------------------------------------------------------------- windows beside full attention


def load_windows(policy: dict[str, Any] | None = None, lag: int = 0) -> CoreEngine:
    """Requests whose windows grow with them, as long as they are shorter."""
    engine = make(
        policy, lag=lag, window=40, budget_tokens=12, interval_tokens=4, headroom_blocks=1
    )
    for i in range(8):
        engine.add(f"r{i}", 6 + i, max_tokens=50, seed=i)
    return engine


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("policy", ["streaming_llm", "tova", "h2o"])
def test_requests_give_before_one_is_preempted_for_a_window(policy: str, lag: int) -> None:
    engine = load_windows({"name": policy}, lag)
    finish(engine)
    counters = engine.runtime.counters
    assert counters.invariants.violations == 0
    assert counters.pressure.given_tokens == counters.tokens.evicted > 0
    assert counters.requests.preempted == 0


def test_control_without_the_growth_of_windows_requests_are_preempted_above_their_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Windows, "growth", lambda _, names, *__: np.zeros(len(names), np.int64))
    engine = load_windows()
    finish(engine)
    assert engine.runtime.counters.pressure.preemptions_above_floor > 0


@pytest.mark.parametrize(
    ("window", "requests", "near"), [(40, 3, False), (40, 4, True), (None, 4, False)]
)
def test_a_shortage_is_near_when_windows_may_take_the_last_blocks(
    window: int | None, requests: int, near: bool
) -> None:
    """In 34 steps each takes at most 9 blocks of full attention, and 9 of its window."""
    engine = make(window=window, headroom_blocks=0)
    for i in range(requests):
        engine.add(f"r{i}", 4, max_tokens=60)
    engine.step()
    assert engine.runtime.shortages.is_near() == near


def test_what_a_window_gives_back_serves_its_own_request_first() -> None:
    engine = make(window=8, headroom_blocks=0)
    for name in ("a", "b"):
        engine.add(name, 40, max_tokens=20)
    engine.step()  # each window holds the 10 blocks of its prompt, and gives back 8 in the next
    assert engine.windows is not None
    assert engine.windows.growth(["a", "b"], np.array([1, 1]), 1).tolist() == [-7, -7]
    assert engine.runtime.demand.growth_of_all() == (0, 0)
    engine.step()
    assert [engine.windows.held_blocks(name) for name in ("a", "b")] == [3, 3]


def test_others_give_for_the_window_of_a_waiting_request() -> None:
    engine = make(window=40, budget_tokens=16)
    for i in range(2):
        engine.add(f"r{i}", 60, max_tokens=8)
    engine.step()
    engine.add("late", 32, max_tokens=8)  # 8 blocks, and 8 of its window
    engine.steps(8)
    assert engine.runtime.counters.pressure.given_tokens > 0
    assert any(request.id == "late" for request in engine.running)
    finish(engine)
    assert engine.runtime.counters.requests.preempted == 0


def test_no_request_is_cut_below_its_floor() -> None:
    engine = make()
    load(engine)
    while engine.running or engine.waiting:
        before = {t.request_id: t.num_live for t in engine.runtime.tables}
        engine.step()
        for table in engine.runtime.tables:
            if table.num_live < before.get(table.request_id, 0):
                assert table.num_live >= 24


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
def test_requests_keep_more_than_under_a_fixed_budget(policy: dict[str, Any]) -> None:
    evicted = []
    for when in ("always", "pressure"):
        engine = make(policy, evict_when=when)
        load(engine)
        finish(engine)
        evicted.append(engine.runtime.counters.tokens.evicted)
    assert evicted[1] < evicted[0]


def test_nobody_gives_for_a_request_that_does_not_fit_even_then() -> None:
    engine = make(budget_tokens=28)
    for i in range(4):
        engine.add(f"r{i}", 36, max_tokens=16)
    engine.step()
    engine.add("large", 150, max_tokens=100)  # 38 of 64 blocks; the others keep at least 8 each
    engine.steps(4)
    demand = engine.runtime.admission.demand
    assert demand is not None
    memory = pressure_of(engine)
    assert memory is not None
    assert memory.waits_for == "end"
    assert memory.short_blocks > 0
    assert engine.runtime.counters.pressure.given_tokens == 0
    finish(engine)


def test_others_give_for_a_waiting_request_after_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    engine = make(evict_after_wait_ms=2000)
    for i in range(2):
        engine.add(f"r{i}", 80, max_tokens=60)
    engine.step()
    engine.add("late", 60, max_tokens=20)
    engine.steps(6)
    assert engine.runtime.counters.pressure.given_tokens == 0
    now += 2.5
    engine.steps(6)
    assert engine.runtime.counters.pressure.given_tokens > 0
    assert any(request.id == "late" for request in engine.running)
    finish(engine)


# ---------------------------------------------------------------- blocks that come by themselves


def with_a_late_one(output: int, steps: int = 8, **config: Any) -> CoreEngine:
    """Two requests with `output` tokens each, and one that waits for their blocks."""
    engine = make(**config)
    for i in range(2):
        engine.add(f"r{i}", 100, max_tokens=output)
    engine.step()
    engine.add("late", 120, max_tokens=20)
    engine.steps(steps)
    return engine


@pytest.mark.parametrize(
    ("output", "per_token", "gives"), [(12, 2, False), (12, 64, True), (60, 2, True)]
)
def test_nobody_gives_who_returns_all_its_blocks_soon(
    output: int, per_token: int, gives: bool
) -> None:
    engine = with_a_late_one(output, evict_per_token_left=per_token)
    assert (engine.runtime.counters.pressure.given_tokens > 0) is gives
    assert any(request.id == "late" for request in engine.running) is gives
    memory = pressure_of(engine)
    assert memory is not None
    assert memory.waits_for == ("" if gives else "end")
    finish(engine)
    assert engine.runtime.counters.requests.finished == 3
    assert (engine.runtime.counters.pressure.given_tokens > 0) is gives


@pytest.mark.parametrize("lag", [0, 1])
def test_what_a_request_gives_at_least_is_enough_for_its_own_growth(lag: int) -> None:
    engine = make(lag=lag, evict_per_token_left=1)
    load(engine)
    finish(engine)
    counters = engine.runtime.counters
    assert counters.tokens.evicted > 0
    assert (counters.pressure.preemptions_above_floor, counters.requests.preempted) == (0, 0)


def test_a_dry_run_says_what_those_would_give_that_end_soon() -> None:
    engine = with_a_late_one(12, steps=1, evict_per_token_left=2)
    now = Outlook(engine.runtime, engine.runtime.config)
    then = now.under({"evict_per_token_left": 64})
    assert then is not None
    assert (now.givable_blocks, then.givable_blocks) == (12, 38)
    assert (now.startable_requests, then.startable_requests) == (0, 1)
    remedies = relief(now, [], 0).remedies
    assert [remedy.change for remedy in remedies] == [{"evict_per_token_left": 8}]


def test_forgotten_tokens_are_given_whatever_is_left_to_generate() -> None:
    engine = with_a_late_one(12, steps=1, evict_per_token_left=2)
    engine.runtime.requests.forget_tokens("r0", [(10, 60)])
    givers = engine.runtime.demand.givers(engine.runtime.requests.giving_rows())
    assert givers.most_blocks().tolist() == [13, 6]


def test_what_is_left_is_as_much_as_outputs_that_became_longer_got() -> None:
    lengths = OutputLengths()
    sampled = np.array([-5, 0, 10, 11, 30, 99, 100])
    unknown = [MAX_TOKENS] * len(sampled)
    for i in range(32):
        assert lengths.expected_left(sampled).tolist() == unknown
        lengths.add(10 if i % 2 else 100)
    assert lengths.expected_left(sampled).tolist() == [60, 55, 90, 89, 70, 1, MAX_TOKENS]
    for _ in range(300):
        lengths.add(20)
    assert lengths.expected_left(sampled).tolist() == [25, 20, 10, 9] + [MAX_TOKENS] * 3


def test_a_request_without_a_bound_gives_by_the_lengths_of_others() -> None:
    engine = make(evict_per_token_left=2)
    for i in range(32):
        engine.add(f"r{i}", 8, max_tokens=12)
    finish(engine)
    engine.add("open", 100, max_tokens=100)
    engine.step()
    row = engine.runtime.tables["open"].row
    assert engine.runtime.requests.expected_left(np.array([row])).tolist() == [13]


def test_what_is_given_for_an_admission_in_one_step_is_bounded() -> None:
    asked = Shortage(0, 0, asked_blocks=50, headroom_blocks=2, free_blocks=10)
    assert asked.to_give(8) == 8
    assert Shortage(9, 30, 0, 2, 10).to_give(8) == 22  # growth is not
    assert Shortage(0, 0, 0, 2, 1).blocks == 0  # nobody needs anything


@pytest.mark.parametrize(
    ("copy_us", "blocks", "parked_blocks"),
    [(0.0, 32, 32), (100.0, 32, 12), (500.0, 10, 2), (1e6, 1, 1)],
    ids=str,
)
def test_an_admission_gives_no_more_in_a_step_than_can_be_copied_in_time(
    copy_us: float, blocks: int, parked_blocks: int
) -> None:
    """Beside each relocated token one is copied to the host, here at three times the price."""
    engine = make(batch_size=32)
    prices = engine.runtime.prices
    for _ in range(3):
        prices.copies.add(copy_us * 10, 10)
        prices.parks.add(3 * copy_us * 10, 10)
    shortages, config = engine.runtime.shortages, engine.runtime.config
    assert shortages.to_give(Shortage(0, 0, 50, 0, 10), config) == blocks
    parking = msgspec.structs.replace(config, park_bytes=1 << 20)
    assert shortages.to_give(Shortage(0, 0, 50, 0, 10), parking) == parked_blocks
    assert shortages.to_give(Shortage(9, 40, 0, 0, 10), config) == 30  # growth is not bounded


def test_a_request_may_choose_the_other_mode() -> None:
    engine = make()
    engine.add("fixed", 40, max_tokens=40, rules=RequestRules(evict_when="always"))
    engine.add("kept", 40, max_tokens=40)
    engine.steps(20)
    tables = engine.runtime.tables
    assert tables["fixed"].num_live <= 24 + 8
    assert tables["kept"].num_dead == 0


def test_the_mode_of_a_request_is_checked() -> None:
    rules = request_rules({"vtoken_evict_when": "pressure"})
    assert rules is not None
    assert rules.evict_when == "pressure"
    with pytest.raises(RefusedError, match="vtoken_evict_when"):
        request_rules({"vtoken_evict_when": "never"})


def test_less_important_requests_give_first() -> None:
    engine = make(budget_tokens=16)
    engine.add("important", 80, max_tokens=60, priority=0)
    engine.add("other", 80, max_tokens=60, priority=5)
    engine.step()
    engine.add("late", 96, max_tokens=10)
    engine.steps(8)
    tables = engine.runtime.tables
    assert tables["important"].num_dead == 0
    assert tables["other"].num_dead > 0


def test_a_switch_of_the_mode_takes_effect_at_once() -> None:
    engine = make()
    engine.add("a", 80, max_tokens=100)
    engine.steps(5)
    assert engine.runtime.counters.tokens.evicted == 0
    active = engine.runtime.active
    active.install(_with(engine, evict_when="always"))
    engine.step()
    assert engine.runtime.tables["a"].num_live <= 25
    active.install(_with(engine, evict_when="pressure"))
    engine.steps(30)
    assert engine.runtime.tables["a"].num_live > 50
    engine.check()


@pytest.mark.parametrize("reclamation", ["paused", "off"])
def test_without_reclamation_nobody_gives(reclamation: str) -> None:
    engine = make(reclamation=reclamation)
    load(engine)
    finish(engine)
    assert engine.runtime.counters.pressure.given_tokens == 0
    assert engine.runtime.counters.requests.preempted > 0


def test_paused_requests_give_again_when_reclamation_resumes() -> None:
    engine = make(reclamation="paused")
    load(engine)
    engine.steps(10)
    engine.runtime.active.install(_with(engine, reclamation="auto"))
    finish(engine)
    assert engine.runtime.counters.pressure.given_tokens > 0


def test_a_dry_run_of_patience_says_who_waits_longer() -> None:
    engine = make()
    for i in range(9):
        engine.add(f"r{i}", 60, max_tokens=40)
    engine.step()
    assert engine.runtime.admission.demand is not None
    patient = _with(engine, evict_after_wait_ms=60_000)
    note = Outlook(engine.runtime, patient).patience_note()
    assert note is not None
    assert "others would give for it in " in note
    assert note.endswith(" s, not now")
    assert Outlook(engine.runtime, patient).shortage.asked_blocks == 0
    assert Outlook(make().runtime, patient).patience_note() is None


def _with(engine: CoreEngine, **patch: Any) -> Any:
    return merge_patch(engine.runtime.config, patch, num_blocks=65, num_layers=4)


def test_a_request_that_is_relocated_for_others_evicts_in_a_later_step() -> None:
    """One with a fixed budget has holes and is due in the step in which blocks are short."""
    engine = make({"name": "random"}, recycle=False, theta_f=1.0, budget_tokens=24)
    fixed = RequestRules(evict_when="always", interval_tokens=0)
    for i in range(6):
        engine.add(f"fixed{i}", 40, max_tokens=60, rules=fixed, seed=i)
    for i in range(6):
        engine.add(f"r{i}", 30 + i, max_tokens=60, seed=9 + i)
    relocated = 0
    while engine.running or engine.waiting:
        engine.step()
        engine.check()
        relocated = engine.runtime.counters.reclamation.relocations
    counters = engine.runtime.counters
    assert relocated > 0
    assert counters.invariants.violations == 0
    assert 0 < counters.pressure.given_tokens < counters.tokens.evicted


def test_an_eviction_names_its_policy_and_the_requests_that_lost_most() -> None:
    engine = make()
    load(engine)
    engine.add("own", 60, max_tokens=60, rules=request_rules({"vtoken_policy": "random"}))
    events, tables = engine.runtime.events, engine.runtime.tables
    policies, most, seen = set[str](), 0, 0
    while engine.running or engine.waiting:
        before = {table.request_id: table.num_dead for table in tables}
        engine.step()
        lost = {
            table.request_id: table.num_dead - before[table.request_id]
            for table in tables
            if table.num_dead > before.get(table.request_id, table.num_dead)
        }
        for event in events.page(seen, 1000, "eviction").events:
            if not lost.keys() >= event.data["largest"].keys():
                continue  # one of them was preempted in this step
            own = {"random" if name == "own" else "streaming_llm" for name in lost}
            policies.add(event.data["policy"])
            most = max(most, event.data["requests"])
            assert event.data["policy"] == ", ".join(sorted(own))
            assert event.data["requests"] == len(lost)
            assert event.data["given"] == event.data["tokens"] == sum(lost.values())
            ranked = sorted(lost.values(), reverse=True)
            assert [*event.data["largest"].values()] == ranked[:3]
            assert event.data["largest"].items() <= lost.items()
        seen = events.last_seq
    assert {"random", "streaming_llm"} <= policies
    assert most > 3


def test_the_sentence_of_an_eviction() -> None:
    engine = make({"name": "random"}, evict_when="always")
    engine.add("a", 60, max_tokens=10)
    engine.steps(2)
    (event,) = engine.runtime.events.page(0, 10, "eviction").events
    assert event.summary == "a lost 36 tokens"


# ---------------------------------------------------------------- sharing out


SIZES = st.integers(1, 200)


def shape_of(block_size: int, max_drafts: int = 0, lookahead: int = 0) -> EngineShape:
    geometry = Geometry(64, block_size, 1, 1, 1, 1)
    return EngineShape(geometry, max_drafts=max_drafts, lookahead=lookahead)


@st.composite
def some_givers(draw: st.DrawFn) -> Givers:
    """Requests that give."""
    size, drafts = draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([0, 0, 3, 5]))
    lookahead = draw(st.sampled_from([0, drafts]))
    k = draw(st.integers(1, 6))

    def some(numbers: st.SearchStrategy[int]) -> Ints:
        return np.array([draw(numbers) for _ in range(k)])

    live = some(SIZES)
    forgotten = np.array([draw(st.integers(0, tokens - 1)) for tokens in live.tolist()])
    private = np.minimum((live + drafts + lookahead) // size + 1, some(st.integers(0, 40)))
    tokens, priority = live + some(st.integers(0, 100)), some(st.integers(0, 1))
    steps, shape = some(st.integers(1, 8)), shape_of(size, drafts, lookahead)
    return Givers(live, tokens, some(SIZES), private, priority, steps, forgotten, shape)


def plain_shares(givers: Givers, blocks: int) -> list[int]:
    """`share_out`, turn by turn."""
    size, others = givers.shape.block_size, givers.shape.max_drafts + givers.shape.lookahead

    def needed(live: int) -> int:
        return (live + others) // size + 1

    live, floor, private = (part.tolist() for part in (givers.live, givers.floor, givers[3]))
    most = [
        max(0, min(needed(a) - needed(b), p)) for a, b, p in zip(live, floor, private, strict=True)
    ]
    given = [0] * len(live)
    obsolete = [needed(a) - needed(a - int(f)) for a, f in zip(live, givers.forgotten, strict=True)]

    def turn(i: int) -> tuple[bool, int, bool, float, int]:
        share = (needed(live[i]) - given[i]) / int(givers.tokens[i])
        is_last = most[i] - given[i] < givers.step_blocks[i]
        return given[i] >= obsolete[i], -int(givers.priority[i]), is_last, -share, i

    while blocks > 0 and any(given[i] < most[i] for i in range(len(live))):
        i = min(turn(i) for i in range(len(live)) if given[i] < most[i])[-1]
        left = most[i] - given[i]
        if given[i] < obsolete[i]:
            left = min(left, obsolete[i] - given[i])
        given[i] += min(left, int(givers.step_blocks[i]))
        blocks -= min(left, int(givers.step_blocks[i]))
    return [
        (needed(a) - g) * size - 1 - others if g else a for a, g in zip(live, given, strict=True)
    ]


@given(givers=some_givers(), blocks=st.integers(0, 60))
def test_shares_are_whole_blocks_down_to_the_floor(givers: Givers, blocks: int) -> None:
    live, shape, needed_blocks = givers.live, givers.shape, givers.shape.needed_blocks
    kept = share_out(givers, blocks)
    assert kept.tolist() == plain_shares(givers, blocks)
    given = needed_blocks(live) - needed_blocks(kept)
    assert (given <= givers.most_blocks()).all()
    assert (kept[given == 0] == live[given == 0]).all()
    assert (kept[given > 0] >= givers.floor[given > 0]).all()
    assert (
        (kept[given > 0] + 1 + shape.max_drafts + shape.lookahead) % shape.block_size == 0
    ).all()
    most = int(givers.most_blocks().sum())
    assert min(blocks, most) <= given.sum() <= min(most, blocks + 8)
    obsolete = needed_blocks(live) - needed_blocks(live - givers.forgotten)
    obsolete = np.minimum(obsolete, givers.most_blocks())
    if (given > obsolete).any():
        assert (given >= obsolete).all()
    important = givers.priority == 0
    if (given > obsolete)[important].any():
        assert (given == givers.most_blocks())[~important].all()


@given(givers=some_givers(), blocks=st.integers(0, 60), data=st.data())
def test_who_gives_nothing_changes_no_others_turn(
    givers: Givers, blocks: int, data: st.DataObject
) -> None:
    """So only those whose turn it is are asked for the fewest tokens that they can keep now."""
    kept = share_out(givers, blocks)
    floor = givers.floor.copy()
    for i in np.flatnonzero(kept == givers.live).tolist():
        floor[i] += data.draw(SIZES)
    assert (share_out(givers._replace(floor=floor), blocks) == kept).all()


def test_whoever_keeps_the_largest_share_gives_first() -> None:
    live = np.array([160, 160, 64])
    ones = np.ones(3, dtype=np.int64)
    tokens, shape = np.array([160, 320, 64]), shape_of(16)
    givers = Givers(live, tokens, 16 * ones, 100 * ones, 0 * ones, ones, 0 * ones, shape)
    kept = share_out(givers, 5)
    assert kept[1] == 160  # it has lost half
    assert kept[0] < 160
    assert kept[2] < 64


# ---------------------------------------------------------------- documents


def test_a_shortage_that_is_over_is_not_reported() -> None:
    engine = make()
    load(engine)
    seen = []
    while engine.running or engine.waiting:
        engine.step()
        found = pressure_of(engine)
        assert found is not None
        seen.append(found.short_blocks)
    assert max(seen) > 0
    assert seen[-1] == 0
    over = pressure_of(engine)
    assert over is not None
    assert (over.near, over.short_blocks, over.givers) == (False, 0, 0)
    engine.add("alone", 20, max_tokens=4)
    engine.step()
    later = pressure_of(engine)
    assert later is not None
    assert (later.near, later.short_blocks) == (False, 0)


def test_what_is_given_for_a_waiting_request_comes_on_top_of_growth() -> None:
    """Requests at the ends of their blocks avert their growth by what they give first. With no more
    than that the waiting one never starts.
    """
    short = Shortage(4, 4, asked_blocks=8, headroom_blocks=4, free_blocks=8)
    assert short.blocks == 8
    assert [short.to_give(most) for most in (1, 3, 4, 9)] == [5, 7, 8, 8]
    assert Shortage(0, 0, asked_blocks=8, headroom_blocks=4, free_blocks=8).to_give(3) == 3
    assert Shortage(6, 6, headroom_blocks=4, free_blocks=8).to_give(1) == 2
