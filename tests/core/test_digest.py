"""Fingerprints by which ranks compare steps: they differ after any change, else are equal."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.core.request_step import RequestStep, part_of, parts_of, steps_of
from tests.support.mirrors import mirrors_of
from vtoken.base.arrays import Ragged
from vtoken.core.protocol import digest
from vtoken.core.protocol.step import Parked, RequestSteps, Retained, StepPlan
from vtoken.policies.signals import Signal

HITS, LAST = Signal("attention_hits", 9), Signal("attention_last")


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def plan() -> StepPlan:
    one = RequestStep(
        num_tokens=9,
        evicted=ints(2, 3),
        moved_ids=ints(7, 8),
        moved_slots=ints(40, 41),
        restored_ids=ints(0, 1),
        restored_slots=ints(90, 91),
        retained=Retained(ints(7, 8), ints(40, 41)),
        blocks=[3, 10],
        new_slots=ints(42),
        num_live=8,
        scratch=[5],
    )
    other = RequestStep(num_tokens=5, new_slots=ints(70), num_live=6)
    return StepPlan(
        7,
        ints(12, 13),
        ints(40, 41),
        park_slots=ints(8, 9),
        park_hosts=ints(3, 4),
        restore_hosts=ints(0, 1),
        restore_slots=ints(90, 91),
        checked_parks={"a": Parked(ints(0), ints(3))},
        park_capacity=6,
        requests=steps_of({"a": one, "b": other}),
        want_scores=(("a", HITS),),
        signals={"a": (HITS,)},
    )


def column(name: str, place: int, value: int) -> Callable[[StepPlan], Any]:
    """Change one number of a column of the plan's requests."""

    def change(changed: StepPlan) -> None:
        values = getattr(changed.requests, name)
        (values.values if isinstance(values, Ragged) else values)[place] = value

    return change


def later(name: str) -> Callable[[StepPlan], Any]:
    """Move the last number of request `a` to the front of request `b`."""

    def change(changed: StepPlan) -> None:
        values = getattr(changed.requests, name)
        setattr(changed.requests, name, Ragged(values.values, values.starts - ints(0, 1, 0)))

    return change


CHANGES: dict[str, Callable[[StepPlan], Any]] = {
    "step": lambda p: setattr(p, "step", 8),
    "source": lambda p: p.source_slots.__setitem__(1, 14),
    "destination": lambda p: p.destination_slots.__setitem__(0, 42),
    "order of copies": lambda p: setattr(p, "source_slots", p.source_slots[::-1].copy()),
    "a copy that is another's": lambda p: (
        setattr(p, "source_slots", ints(12)),
        setattr(p, "destination_slots", ints(13, 40, 41)),
    ),
    **{
        name: lambda p, name=name: getattr(p, name).__setitem__(0, 7)
        for name in ("park_slots", "park_hosts", "restore_hosts", "restore_slots")
    },
    "checked id": lambda p: p.checked_parks["a"].ids.__setitem__(0, 1),
    "checked host slot": lambda p: p.checked_parks["a"].hosts.__setitem__(0, 4),
    "park capacity": lambda p: setattr(p, "park_capacity", 7),
    "restored id": column("restored_ids", 1, 2),
    "restored slot": column("restored_slots", 1, 92),
    "tokens": column("num_tokens", 1, 6),
    "live tokens": column("num_live", 1, 5),
    "dense": column("dense", 1, 0),
    "victim": column("evicted", 0, 1),
    "moved id": column("moved_ids", 1, 6),
    "moved slot": column("moved_slots", 1, 43),
    "new slot": column("new_slots", 1, 71),
    "scratch": column("scratch", 0, 6),
    **{
        f"{name} of another request": later(name)
        for name in ("evicted", "moved_ids", "restored_ids", "new_slots", "scratch")
    },
    "victim moved over": lambda p: (
        setattr(p.requests, "evicted", Ragged.joined([[2], []])),
        setattr(p.requests, "moved_ids", Ragged.joined([[3, 7, 8], []])),
    ),
    "block table": lambda p: p.requests.blocks.__setitem__("a", ints(10, 3)),
    "no block table": lambda p: p.requests.blocks.clear(),
    "an empty one": lambda p: p.requests.blocks.__setitem__("b", ints()),
    "another's block table": lambda p: setattr(p.requests, "blocks", {"b": ints(3, 10)}),
    "request": lambda p: setattr(p.requests, "names", ["a", "c"]),
    "order of requests": lambda p: setattr(p.requests, "names", ["b", "a"]),
    "wanted scores": lambda p: setattr(p, "want_scores", (("b", HITS),)),
    "kept signal": lambda p: setattr(p, "signals", {"a": (LAST,)}),
    "second signal": lambda p: setattr(p, "signals", {"a": (HITS, LAST)}),
    "wanted signal": lambda p: setattr(p, "want_scores", (("a", LAST),)),
    "window": lambda p: setattr(p, "signals", {"a": (Signal("attention_hits", 8),)}),
    "probed request": lambda p: setattr(p, "probed", frozenset({"a"})),
    "layers of a signal": lambda p: setattr(
        p, "signals", {"a": (Signal("attention_hits", 9, layers=(2,)),)}
    ),
    "retained id": lambda p: p.requests.retained["a"].ids.__setitem__(0, 6),
    "retained slot": lambda p: p.requests.retained["a"].slots.__setitem__(0, 45),
    "resumed request": lambda p: setattr(p.requests, "resumed", frozenset({"a"})),
    "nothing retained": lambda p: p.requests.retained.clear(),
    "another retained": lambda p: setattr(p.requests, "retained", {"b": p.requests.retained["a"]}),
}


def test_equal_plans_have_equal_digests() -> None:
    assert digest.of_plan(plan()) == digest.of_plan(plan())
    assert digest.of_plan(StepPlan(1)) == digest.of_plan(StepPlan(1))


@pytest.mark.parametrize("what", CHANGES)
def test_any_change_of_a_plan_shows(what: str) -> None:
    changed = copy.deepcopy(plan())
    CHANGES[what](changed)
    assert digest.of_plan(changed) != digest.of_plan(plan())


def test_every_field_of_a_plan_has_a_change_above() -> None:
    """A new field must be covered by the digest and by this file."""
    assert set(StepPlan.__slots__) == {
        *("step", "source_slots", "destination_slots", "requests"),
        *("park_slots", "park_hosts", "restore_hosts", "restore_slots", "checked_parks"),
        *("park_capacity", "want_scores", "signals", "probed"),
    }
    assert set(RequestSteps.__slots__) == {
        *("names", "num_tokens", "num_live", "dense", "evicted", "moved_ids", "moved_slots"),
        *("restored_ids", "restored_slots", "new_slots", "scratch", "blocks", "retained"),
        "resumed",
    }


def test_a_plan_is_the_same_after_its_way_to_the_worker() -> None:
    sent = pickle.loads(pickle.dumps(plan()))
    assert digest.of_plan(sent) == digest.of_plan(plan())
    assert parts_of(sent.requests).keys() == {"a", "b"}
    assert part_of(sent.requests, "a").blocks == [3, 10]


def test_a_drifted_mirror_shows_when_its_turn_comes_at_the_latest() -> None:
    num = 3 * digest.MIRRORS_A_STEP - 1
    names = [f"r{i}" for i in range(num)]
    slots = {name: 4 * (i + 1) + np.arange(3) for i, name in enumerate(names)}
    mirrors, drifted = mirrors_of(slots), mirrors_of(slots)
    move = RequestStep(3, moved_ids=ints(1), moved_slots=ints(31), num_live=3)
    drifted.apply(steps_of({"r6": move}))
    requests = steps_of({name: RequestStep(3) for name in names})
    seen = [
        digest.of_mirrors(StepPlan(step, requests=requests), mirrors)
        != digest.of_mirrors(StepPlan(step, requests=requests), drifted)
        for step in range(2, 2 + 3)
    ]
    assert any(seen)
    assert not all(seen)
