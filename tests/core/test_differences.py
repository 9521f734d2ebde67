"""A dry run as a difference: at most three lines, each of something that the change alters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.core.live import make_pressed
from vtoken.sentences.what_if import Line, difference, notes_beside
from vtoken.wire import Gate, PatchResult, WhatIf

CLOSED = [Gate(name="theta_f", open=False, detail="F 0.02 <= theta_F 0.24")]
NOTHING = WhatIf(freed_blocks=0, moved_tokens=0, moved_bytes=0)


@pytest.fixture(scope="module")
def dry_run() -> PatchResult:
    """A dry run whose effect a test replaces."""
    live = make_pressed(1, park_bytes=0)
    live.steps(1)
    found: PatchResult = live.call("patch_config", patch={"budget_tokens": 8}, validate_only=True)
    live.close()
    return found


def told(dry_run: PatchResult, found: WhatIf, less: WhatIf | None, *changed: str) -> list[Line]:
    found = msgspec.structs.replace(found, without_change=less)
    changes = {name: [0, 1] for name in changed} or dry_run.changes
    return difference(msgspec.structs.replace(dry_run, what_if=found, changes=changes))


def make(**figures: Any) -> WhatIf:
    return msgspec.structs.replace(NOTHING, **figures)


@pytest.mark.parametrize(
    ("less", "found", "lines"),
    [
        ({}, {}, ["no difference now"]),
        (
            {"givable_blocks": 34, "short_blocks": 24, "waiting_requests": 2},
            {
                "givable_blocks": 52,
                "short_blocks": 8,
                "waiting_requests": 2,
                "startable_requests": 2,
            },
            ["can give 34 → 52 blocks · missing 24 → 8 blocks", "0 → 2 of 2 waiting can start"],
        ),
        (
            {"more_requests": 0},
            {"more_requests": 1},
            ["room for 0 → 1 more request like the running ones"],
        ),
        (
            {"evicted_tokens": 363, "freed_blocks": 18},  # what happens anyway
            {"evicted_tokens": 363, "freed_blocks": 18},
            ["no difference now"],
        ),
        (
            {"evicted_tokens": 3, "freed_blocks": 1},
            {"evicted_tokens": 9, "freed_blocks": 4},
            ["evicts 3 → 9 tokens, which cannot come back · frees 1 → 4 blocks"],
        ),
        ({}, {"waiting_tokens": 5}, ["evicts 0 → 5 tokens once scored, which cannot come back"]),
        ({}, {"restored_tokens": 1240}, ["brings back 0 → 1,240 parked tokens"]),
        ({}, {"dropped_tokens": 7}, ["loses 0 → 7 parked tokens, which cannot come back"]),
        (
            {"gates": CLOSED, "moved_tokens": 64, "freed_blocks": 4},
            {"moved_tokens": 64, "moved_bytes": 2000, "freed_blocks": 4},
            ["moves 64 tokens (2.0 kB) · frees 4 blocks"],  # a compaction that does not run now
        ),
        (
            {"moved_tokens": 64, "freed_blocks": 4},
            {"gates": CLOSED, "moved_tokens": 64, "freed_blocks": 6},
            ["frees 4 → 6 blocks if compacted by hand · no compaction: F 0.02 <= theta_F 0.24"],
        ),
    ],
)
def test_a_line_is_of_what_the_change_alters(
    dry_run: PatchResult, less: dict[str, Any], found: dict[str, Any], lines: list[str]
) -> None:
    shown = told(dry_run, make(**found), make(**less))
    assert [line.text for line in shown] == lines
    assert any(line.is_loss for line in shown) == any("come back" in line for line in lines)


def test_tokens_that_are_parked_are_no_loss(dry_run: PatchResult) -> None:
    assert dry_run.desired is not None
    desired = msgspec.structs.replace(dry_run.desired, park_bytes=1 << 20)
    parks = msgspec.structs.replace(dry_run, desired=desired)
    (line,) = told(parks, make(evicted_tokens=9), make(evicted_tokens=3))
    assert line == Line("evicts 3 → 9 tokens, into host memory", is_loss=False)
    patch = {"park_bytes": [1 << 20, 0]}
    off = msgspec.structs.replace(parks, what_if=make(evicted_tokens=9), changes=patch)
    assert difference(off) == [Line("evicts 9 tokens, which cannot come back", is_loss=True)]


def test_a_setting_of_compactions_says_why_none_runs_also_if_none_ran_before(
    dry_run: PatchResult,
) -> None:
    same = make(gates=CLOSED)
    (line,) = told(dry_run, same, same, "theta_f")
    assert line.text == "no compaction: F 0.02 <= theta_F 0.24"
    assert [line.text for line in told(dry_run, same, same)] == ["no difference now"]


def test_without_the_figures_of_now_those_of_then_stand_alone(dry_run: PatchResult) -> None:
    shown = told(dry_run, make(givable_blocks=52, freed_blocks=1), None)
    assert [line.text for line in shown] == ["can give 52 blocks", "frees 1 block"]


def test_a_void_setting_is_called_that_and_no_figure_is_attributed_to_it() -> None:
    live = make_pressed(4, budget_ratio=0.5, budget_floor_tokens=16)
    live.steps(30)
    patch = {"budget_tokens": 9}
    only: PatchResult = live.call("patch_config", patch=patch, validate_only=True)
    both: PatchResult = live.call(
        "patch_config", patch=patch | {"headroom_blocks": 0}, validate_only=True
    )
    live.close()
    reason = "no effect: budget_ratio 0.5 decides the floor"
    assert difference(only) == [Line(reason)]
    assert notes_beside(only) == []
    assert reason not in [line.text for line in difference(both)]
    assert notes_beside(both) == [f"budget_tokens: {reason}"]


@pytest.mark.parametrize("floor", [8, 16, 24])
@pytest.mark.parametrize("prompt", [20, 45])
def test_those_who_can_start_at_a_floor_start_before_anybody_ends(prompt: int, floor: int) -> None:
    live = make_pressed(0, budget_tokens=40)
    for i in range(10):
        live.admit(f"r{i}", prompt, max_tokens=200)
    live.steps(6)
    waited = [request.id for request in live.core.waiting]
    found = live.call("patch_config", patch={"budget_tokens": floor}, validate_only=True).what_if
    assert found.waiting_requests == len(waited) > found.without_change.startable_requests
    live.call("patch_config", patch={"budget_tokens": floor})
    live.steps(60)
    started = len(waited) - len(live.core.waiting)
    counters = live.runtime.counters
    live.close()
    assert counters.requests.finished == counters.requests.preempted == 0
    assert 0 < found.startable_requests <= started <= found.startable_requests + 2
