"""Inject faults of the scheduler's half into the tests' core engine, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.faults.catalogue import Fault, Hit, Noticed, noticed
from tests.support.core.harness import CoreEngine
from vtoken.base.arrays import Ragged
from vtoken.core.config.values import merge_patch
from vtoken.core.planning import round as planning_round
from vtoken.core.runtime.relocation import round_planner

MOST_STEPS = 400
NUM_BLOCKS = 32
SWING_STEPS = 6  # between two changes of the budget, of faults with `budgets`


def run_core_fault(fault: Fault) -> Noticed | None:
    """Inject `fault` under traffic; None if neither a check nor the oracle notices it."""
    for watched in (False, True):
        found = _run(fault, watched=watched)
        if found is not None:
            return found
    return None


def _run(fault: Fault, *, watched: bool) -> Noticed | None:
    options = dict(fault.options)
    num_blocks, budgets = options.pop("num_blocks", NUM_BLOCKS), options.pop("budgets", ())
    config = {
        "policy": {"name": "random", "params": {"recent": 2, "sinks": 1}},
        "budget_tokens": 10,
        "interval_tokens": 4,
        "evict_when": "always",
        "low_watermark_blocks": NUM_BLOCKS,
        "theta_f": 0.0,
        "headroom_blocks": 4,
        "recycle": False,
    } | options.pop("config", {})
    engine = CoreEngine(num_blocks=num_blocks, block_size=4, config=config, **options)
    hit = Hit(lambda: engine.runtime.step)
    if not watched:
        engine.worker.attend = lambda _: None  # type: ignore[method-assign]
    with ExitStack() as stack:
        engine.stack = stack  # type: ignore[attr-defined]
        _feed(engine, 0)
        engine.steps(4)
        fault.inject(engine, hit)
        try:
            for number in range(1, MOST_STEPS):
                if budgets and number % SWING_STEPS == 0:
                    _set_budget(engine, budgets[number // SWING_STEPS % len(budgets)])
                if len(engine.running) + len(engine.waiting) < 4:
                    _feed(engine, number)
                engine.step()
                if watched:
                    engine.check()
        except Exception as error:
            return noticed(error, hit)
    assert hit.times, f"{fault.name}: never injected"
    return None


def _set_budget(engine: CoreEngine, tokens: int) -> None:
    runtime = engine.runtime
    patch, num_blocks = {"budget_tokens": tokens}, runtime.geometry.num_blocks
    runtime.active.config = merge_patch(runtime.config, patch, num_blocks=num_blocks, num_layers=4)


def _feed(engine: CoreEngine, wave: int) -> None:
    for i in range(4):
        engine.add(f"w{wave}-{i}", 19, prefix="p", prefix_tokens=9, max_tokens=40, seed=i)


def each_plan(engine: CoreEngine, change: Callable[[Any], bool], hit: Hit) -> None:
    """Pass every step plan to `change` before the worker; it returns whether it did damage."""
    commit = engine.runtime.commit_step

    def commit_step(grown: Any) -> Any:
        plan = commit(grown)
        if change(plan):
            hit()
        return plan

    engine.runtime.commit_step = commit_step  # type: ignore[method-assign]


def each_relocation(engine: CoreEngine, change: Callable[[Any], Any], hit: Hit) -> None:
    """Pass every relocation plan to `change` before the table; it returns a new one or None."""
    original = planning_round.plan_round

    def plan_round(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        plans = []
        for plan in found.plans:
            changed = change(plan)
            if changed is not None:
                hit()
            plans.append(plan if changed is None else changed)
        return replace(found, plans=tuple(plans))

    engine.stack.enter_context(  # type: ignore[attr-defined]
        patch.object(round_planner, "plan_round", plan_round)
    )


def swapped(array: Any) -> Any:
    out = array.copy()
    out[[0, 1]] = out[[1, 0]]
    return out


def without_firsts(column: Ragged) -> tuple[Ragged, bool]:
    """`column` without the first number of each request, and whether there was any."""
    firsts = column.starts[:-1][column.counts > 0]
    starts = column.starts - np.concatenate([[0], np.cumsum(column.counts > 0)])
    return Ragged(np.delete(column.values, firsts), starts), len(firsts) > 0
