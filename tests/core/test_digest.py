"""The fingerprints by which ranks compare their steps: any change shows, equals are equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vtoken.policies.signals import Signal
from vtoken.protocol import digest
from vtoken.protocol.mirror import Mirror
from vtoken.protocol.step import RequestStep, Retained, StepPlan

HITS, LAST = Signal("attention_hits", 9), Signal("attention_last")


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def plan() -> StepPlan:
    one = RequestStep(
        num_tokens=9,
        evicted=ints(2, 3),
        moved_ids=ints(7, 8),
        moved_slots=ints(40, 41),
        retained=Retained(ints(7, 8), ints(40, 41)),
        blocks=[3, 10],
        new_slots=ints(42),
        num_live=8,
        scratch=[5],
        full_blocks=ints(3),
        loose_slots=ints(40, 41, 42),
    )
    other = RequestStep(num_tokens=5, new_slots=ints(70), num_live=6)
    return StepPlan(
        7,
        ints(12, 13),
        ints(40, 41),
        {"a": one, "b": other},
        want_scores=(("a", HITS),),
        signals={"a": (HITS,)},
    )


CHANGES: dict[str, Callable[[StepPlan], Any]] = {
    "step": lambda p: setattr(p, "step", 8),
    "source": lambda p: p.source_slots.__setitem__(1, 14),
    "destination": lambda p: p.destination_slots.__setitem__(0, 42),
    "order of copies": lambda p: setattr(p, "source_slots", p.source_slots[::-1].copy()),
    "victim": lambda p: p.requests["a"].evicted.__setitem__(0, 1),
    "victim moved over": lambda p: (
        setattr(p.requests["a"], "evicted", ints(2)),
        setattr(p.requests["a"], "moved_ids", ints(3, 7, 8)),
    ),
    "moved id": lambda p: p.requests["a"].moved_ids.__setitem__(1, 6),
    "moved slot": lambda p: p.requests["a"].moved_slots.__setitem__(1, 43),
    "block table": lambda p: p.requests["a"].blocks.reverse(),
    "no block table": lambda p: setattr(p.requests["a"], "blocks", None),
    "an empty one": lambda p: setattr(p.requests["b"], "blocks", []),
    "new slot": lambda p: p.requests["b"].new_slots.__setitem__(0, 71),
    "live tokens": lambda p: setattr(p.requests["b"], "num_live", 5),
    "dense": lambda p: setattr(p.requests["b"], "dense", False),
    "scratch": lambda p: p.requests["a"].scratch.__setitem__(0, 6),
    "full block": lambda p: p.requests["a"].full_blocks.__setitem__(0, 4),
    "loose slot": lambda p: p.requests["a"].loose_slots.__setitem__(2, 43),
    "request": lambda p: setattr(p, "requests", {"a": p.requests["a"], "c": p.requests["b"]}),
    "order of requests": lambda p: setattr(
        p, "requests", {"b": p.requests["b"], "a": p.requests["a"]}
    ),
    "wanted scores": lambda p: setattr(p, "want_scores", (("b", HITS),)),
    "probed layers": lambda p: setattr(p, "probe_layers", (1,)),
    "probing": lambda p: setattr(p, "probing", True),
    "kept signal": lambda p: setattr(p, "signals", {"a": (LAST,)}),
    "second signal": lambda p: setattr(p, "signals", {"a": (HITS, LAST)}),
    "wanted signal": lambda p: setattr(p, "want_scores", (("a", LAST),)),
    "window": lambda p: setattr(p, "signals", {"a": (Signal("attention_hits", 8),)}),
    "probed request": lambda p: setattr(p, "probed", frozenset({"a"})),
    "layers of signals": lambda p: setattr(p, "signal_layers", (2,)),
    "retained slot": lambda p: p.requests["a"].retained.slots.__setitem__(0, 45),
    "nothing retained": lambda p: setattr(p.requests["a"], "retained", None),
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
    """A field that is added must be covered by the digest, and by this file."""
    assert set(StepPlan.__slots__) == {
        *("step", "source_slots", "destination_slots", "requests"),
        *("probing", "probe_layers", "want_scores", "signals", "probed", "signal_layers"),
    }
    assert set(RequestStep.__struct_fields__) == {
        *("num_tokens", "evicted", "moved_ids", "moved_slots", "blocks", "new_slots"),
        *("num_live", "dense", "scratch", "full_blocks", "loose_slots", "retained"),
    }


def test_a_drifted_mirror_shows_when_its_turn_comes_at_the_latest() -> None:
    num = 3 * digest.MIRRORS_A_STEP - 1
    names = [f"r{i}" for i in range(num)]
    mirrors = {name: Mirror.positional([i + 1], 3, 4) for i, name in enumerate(names)}
    drifted = {name: Mirror.positional([i + 1], 3, 4) for i, name in enumerate(names)}
    drifted["r6"].apply(RequestStep(3, moved_ids=ints(1), moved_slots=ints(31), num_live=3))
    requests = {name: RequestStep(3) for name in names}
    seen = [
        digest.of_mirrors(StepPlan(step, requests=requests), mirrors)
        != digest.of_mirrors(StepPlan(step, requests=requests), drifted)
        for step in range(2, 2 + 3)
    ]
    assert any(seen)
    assert not all(seen)
