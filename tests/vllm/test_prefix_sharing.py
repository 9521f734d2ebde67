"""Shared prefix blocks on the real engine: every tier gives the reference's tokens, to sharers and
to later requests that hit the prefix; float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import pytest

from tests.support import reference, stepping
from tests.support.engines import engine_args
from tests.support.observe import Observer, runtime_of, scheduler_of
from vtoken.control.dry_runs import DryRuns
from vtoken.core.config.values import merge_patch

pytestmark = pytest.mark.vllm

BUDGET, INTERVAL, NUM_NEW = 40, 12, 48
PREFIX = reference.random_prompt(512, 1)  # 16 blocks
PROMPTS = [PREFIX + reference.random_prompt(9 + 8 * i, 20 + i)[1:] for i in range(8)]
EAGER = {"theta_f": 0.0, "low_watermark_blocks": 512, "batch_size": 512, "headroom_blocks": 64}
POLICIES: dict[str, dict[str, Any]] = {
    "random": {"name": "random"},
    "h2o": {"name": "h2o"},
    "streaming_llm": {"name": "streaming_llm"},
}
TIERS = ["skip", "index", "copy"]

Tokens = list[list[int]]


@pytest.fixture(scope="module")
def llm(engine: Any) -> Iterator[Any]:
    """One engine for the module; a test resets what it needs."""
    args = engine_args(EAGER | {"verify_ratio": 1.0}, check_every_step=True)
    with engine(enable_prefix_caching=True, **args) as it:
        yield it


def configure(llm: Any, **patch: Any) -> None:
    """Change the configuration from the next step on; fields not in the patch are as in `EAGER`."""
    runtime = runtime_of(llm)
    values = {
        **EAGER,
        "policy": POLICIES["random"],
        "budget_ratio": 0.0,
        "budget_tokens": BUDGET,
        "evict_when": "always",
        "interval_tokens": INTERVAL,
        "recycle": False,
        "experiment": {"planner": "plug"},
        "reclamation": "auto",
        "prefix_sharing": "index",
        **patch,
    }
    runtime.active.config = merge_patch(
        runtime.config, values, num_blocks=runtime.geometry.num_blocks, num_layers=4
    )


@dataclass
class Session:
    """Requests r0, r1, … on the shared engine; the prefix is in the cache when it begins."""

    llm: Any
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert scheduler_of(self.llm).reset_prefix_cache()
        self.add("fill", [*PREFIX, 65], 1)
        self.step()
        self.observer = Observer(self.llm)
        self.runtime = self.observer.runtime
        self.before = {name: attrgetter(name)(self.runtime.counters) for name in COUNTERS}

    def add(self, name: str, prompt: list[int], num_new: int = NUM_NEW) -> None:
        stepping.add(self.llm, name, prompt, num_new)

    def step(self, times: int | None = None) -> None:
        """`times` steps, or until nothing is left."""
        if (last := stepping.step(self.llm, self.tokens, times)) is not None:
            self.hits = last.num_cached_tokens

    def counted(self, name: str) -> int:
        return int(attrgetter(name)(self.runtime.counters)) - self.before[name]

    def id_of(self, name: str) -> str:
        """The engine's id of the request `name`."""
        (found,) = [i for i in self.observer.prompt_tokens if i.startswith(f"{name}-")]
        return found

    def log_of(self, name: str) -> dict[int, set[int]]:
        return self.observer.log_of(self.id_of(name))

    def restore(self) -> None:
        self.observer.restore()


COUNTERS = (
    "tokens.evicted",
    "reclamation.relocations",
    "reclamation.reclaimed_blocks",
    "reclamation.shared_skipped_blocks",
    "reclamation.shared_released_blocks",
    "reclamation.shared_copied_blocks",
    "reclamation.shared_freed_blocks",
    "invariants.violations",
)


@pytest.fixture
def session(llm: Any) -> Iterator[Any]:
    sessions: list[Session] = []

    def start() -> Session:
        if sessions:
            sessions[-1].restore()
        sessions.append(Session(llm))
        return sessions[-1]

    yield start
    for left in list(scheduler_of(llm).requests):
        llm.llm_engine.abort_request([left], internal=True)
    sessions[-1].restore()


class Replayed:
    """Reference tokens for a prompt and a log of victims, each computed once; `draft`: the engine's
    tokens, which are verified.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.known: dict[Any, list[int]] = {}

    def tokens(self, number: int, log: dict[int, set[int]], draft: list[int]) -> list[int]:
        key = number, tuple((step, frozenset(ids)) for step, ids in sorted(log.items()))
        if key not in self.known:
            self.known[key] = reference.generate(
                self.model, PROMPTS[number], NUM_NEW, reference.replay(log), draft=draft
            )
        return self.known[key]


@pytest.fixture(scope="module")
def replayed(hf_model: Any) -> Replayed:
    return Replayed(hf_model)


# ---------------------------------------------------------------- exactness

CASES = [
    *((policy, 8, tier, planner) for policy in POLICIES for tier in TIERS for planner in ("plug",)),
    *((policy, 8, "copy", "pack") for policy in POLICIES),
    ("random", 2, "copy", "plug"),
    ("random", 4, "copy", "pack"),
    ("streaming_llm", 4, "copy", "plug"),
    ("random", 8, "skip", "pack"),
    ("random", 8, "index", "pack"),
]


@pytest.mark.parametrize(("policy", "num_sharers", "tier", "planner"), CASES)
def test_sharers_and_later_hits_get_the_references_tokens(
    policy: str, num_sharers: int, tier: str, planner: str, llm: Any, session: Any, replayed: Any
) -> None:
    configure(llm, policy=POLICIES[policy], prefix_sharing=tier, experiment={"planner": planner})
    run = session()
    for number in range(num_sharers):
        run.add(f"r{number}", PROMPTS[number])
    run.step()
    for number in range(num_sharers):
        log = run.log_of(f"r{number}")
        assert len(log) >= 2  # after a hit, h2o waits for 32 queries
        found = run.tokens[f"r{number}"]
        assert found == replayed.tokens(number, log, found)
    assert run.counted("invariants.violations") == 0
    assert run.counted("reclamation.shared_skipped_blocks") > 0 or tier == "copy"
    assert (run.counted("reclamation.shared_copied_blocks") > 0) == (
        tier == "copy" and (planner, policy) != ("pack", "streaming_llm")
    )
    assert (run.counted("reclamation.shared_released_blocks") > 0) == (tier != "skip")
    run.add("later", PROMPTS[0])
    run.step()
    assert run.hits >= len(PREFIX)
    found = run.tokens["later"]
    assert found == replayed.tokens(0, run.log_of("later"), found)


# ---------------------------------------------------------------- the step of a group


def until_all_have_evicted(run: Session, num_sharers: int) -> None:
    for number in range(num_sharers):
        run.add(f"r{number}", PROMPTS[number])
    while not run.runtime.requests.held or not all(t.virtual for t in run.runtime.tables):
        run.step(1)


def compact(run: Session) -> Any:
    return run.runtime.operations.add("test", None, 512, False)


def test_a_newcomer_hits_in_the_same_step_what_a_group_has_just_emptied(
    llm: Any, session: Any, replayed: Any
) -> None:
    """Plans are made before the step's admissions: the emptied blocks are free and still cached."""
    configure(llm, prefix_sharing="copy", reclamation="paused")
    run = session()
    until_all_have_evicted(run, 2)
    shared = {b for table in run.runtime.tables for b in table.blocks}
    shared = {b for b in shared if run.runtime.store.is_shared(b)}
    operation = compact(run)
    run.add("r3", PROMPTS[3])
    taken: list[int] = []
    borrowed: list[int] = []
    store = run.runtime.store
    take, borrow = store.take, store.borrow
    store.take = lambda n: (taken.extend(new := take(n)), new)[1]
    store.borrow = lambda n: (borrowed.extend(new := borrow(n)), new)[1]
    run.step(1)
    store.take, store.borrow = take, borrow
    assert operation.state == "done"
    moved = [e.data for e in run.runtime.events.page(0, 10_000).events if e.kind == "relocation"]
    emptied = {b for data in moved[-2:] for b in data["source_blocks"]} & shared
    assert len(emptied) > 4
    assert not emptied & {*taken, *borrowed}
    newcomer = run.runtime.tables[run.id_of("r3")]
    assert emptied <= set(newcomer.blocks[:16])
    assert not any(store.is_writable(block) for block in emptied)
    run.step()
    for number in (0, 1, 3):
        found = run.tokens[f"r{number}"]
        assert found == replayed.tokens(number, run.log_of(f"r{number}"), found)


def test_a_preempted_sharer_takes_its_plan_out_of_the_group(
    llm: Any, session: Any, replayed: Any
) -> None:
    configure(llm, prefix_sharing="copy", reclamation="paused")
    run = session()
    until_all_have_evicted(run, 3)
    scheduler = scheduler_of(llm)
    operation = compact(run)
    begin = run.runtime.begin_step
    planned = run.runtime.relocator.planned

    def begin_then_preempt(*upcoming: Any) -> None:
        begin(*upcoming)
        assert len(planned) == 3
        assert all(moving.plan.shared_blocks for moving in planned.values())
        victim = scheduler.running.pop()
        scheduler._preempt_request(victim, 0.0)
        assert len(planned) == 2

    run.runtime.begin_step = begin_then_preempt
    so_far = list(run.tokens["r2"])
    run.step(1)
    run.runtime.begin_step = begin
    assert operation.state == "done"
    assert operation.result.freed_blocks == operation.plan.freed_blocks > 0
    run.step()
    assert run.counted("invariants.violations") == 0
    for number in (0, 1):
        found = run.tokens[f"r{number}"]
        assert found == replayed.tokens(number, run.log_of(f"r{number}"), found)
    assert run.tokens["r2"][: len(so_far)] == so_far
    assert len(run.tokens["r2"]) == NUM_NEW


def test_a_sharer_may_finish_in_the_step_after_its_group(
    llm: Any, session: Any, replayed: Any
) -> None:
    configure(llm, prefix_sharing="copy", reclamation="paused")
    run = session()
    until_all_have_evicted(run, 4)
    operation = compact(run)
    run.step(1)
    assert operation.state == "done"
    assert run.counted("reclamation.shared_copied_blocks") > 0
    llm.llm_engine.abort_request([run.id_of("r1")], internal=True)
    run.step()
    for number in (0, 2, 3):
        found = run.tokens[f"r{number}"]
        assert found == replayed.tokens(number, run.log_of(f"r{number}"), found)


@pytest.mark.parametrize("tier", TIERS)
def test_a_dry_run_predicts_the_compaction(tier: str, llm: Any, session: Any) -> None:
    configure(llm, reclamation="paused", prefix_sharing="skip")
    run = session()
    until_all_have_evicted(run, 4)
    runtime = run.runtime
    answer_to = merge_patch(
        runtime.config,
        {"reclamation": "auto", "prefix_sharing": tier, "budget_tokens": 24, "interval_tokens": 0},
        num_blocks=runtime.geometry.num_blocks,
        num_layers=4,
    )
    predicted = DryRuns(runtime).what_if(answer_to)
    runtime.active.config = answer_to
    free = runtime.store.num_free_blocks()
    scheduler = scheduler_of(llm)
    begin, freed = runtime.begin_step, []

    def measured(*upcoming: Any) -> None:
        begin(*upcoming)
        freed.append(runtime.store.num_free_blocks() - free)
        moved = [moving.plan.num_moved_tokens for moving in runtime.relocator.planned.values()]
        assert predicted.moved_tokens == sum(moved)

    runtime.begin_step = measured
    run.step(1)
    runtime.begin_step = begin
    assert predicted.freed_blocks == freed[0] > 0
    assert scheduler.running


# ---------------------------------------------------------------- the prefix cache is not poisoned


def poisoned(llm: Any, run: Session) -> list[int]:
    """Tokens of a request that hits the entire prompt of one that has recycled meanwhile."""
    run.add("r0", PROMPTS[0], 90)
    run.step()
    assert run.counted("tokens.evicted") > 400
    run.add("later", PROMPTS[0], 12)
    run.step()
    assert run.hits >= len(PREFIX)
    return run.tokens["later"]


def test_control_a_store_that_calls_hashed_blocks_writable_poisons_later_hits(
    llm: Any, session: Any, hf_model: Any
) -> None:
    """With the rule the second request gets the reference's tokens, without it others."""
    configure(llm, recycle=True, reclamation="paused", policy={"name": "streaming_llm"})
    evict = reference.streaming_llm(4, BUDGET, INTERVAL)
    expected = reference.generate(hf_model, PROMPTS[0], 12, evict)
    assert poisoned(llm, session()) == expected
    store = runtime_of(llm).store
    honest = store.is_writable, store.first_not_writable
    store.is_writable = lambda block: store._pool.blocks[block].ref_cnt == 1
    store.first_not_writable = lambda _: None
    try:
        run = session()
        assert poisoned(llm, run) != expected
        assert run.counted("invariants.violations") == 0
    finally:
        store.is_writable, store.first_not_writable = honest


def test_reclaiming_a_hashed_block_keeps_nine_blocks_and_the_prefix_in_the_cache(
    llm: Any, session: Any
) -> None:
    """Recycling cannot use the prompt's blocks, because they are cached. A round copies their last
    tokens out; the blocks keep their hashes, and the next request hits them.
    """
    prompt = reference.random_prompt(700, 5)
    configure(
        llm, recycle=True, budget_tokens=256, interval_tokens=0, policy={"name": "streaming_llm"}
    )
    run = session()
    run.add("r0", prompt, 200)
    run.step()
    held = run.observer.held[run.id_of("r0")]
    assert held[0] == 22
    assert sorted(set(held[1:])) == [9, 10]
    assert held.count(10) <= 2  # the step that allocates; the next one relocates
    run.add("later", prompt, 1)
    run.step()
    assert run.hits == 21 * 32
