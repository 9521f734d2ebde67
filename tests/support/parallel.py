"""Several workers of one engine in this process: changed live, read, and broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.support.observe import Observer, runtime_of, scheduler_of
from tests.support.reference import Trace
from tests.support.stepping import add, step

Tokens = list[list[int]]
NEAR_TIE = 1e-3  # logits; two ranks differ from one by some 1e-5


def num_sure(trace: Trace) -> int:
    """The number of tokens before the first near tie."""
    for number, logits in enumerate(trace.logits):
        best, second = logits.topk(2).values.tolist()
        if best - second < NEAR_TIE:
            return number
    return len(trace.logits)


def patch(llm: Any, **changes: Any) -> None:
    scheduler_of(llm).vtoken_controller.patch_config(changes)


def preempt_once(llm: Any, after_steps: int) -> None:
    """Let blocks run out for one request in a step, so that the newest one is preempted."""
    manager, left = scheduler_of(llm).kv_cache_manager, after_steps
    allocate = manager.allocate_slots

    def allocate_or_fail(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= request is scheduler_of(llm).running[0] if scheduler_of(llm).running else 0
        if left == 0:
            manager.allocate_slots = allocate
            return None
        return allocate(request, *args, **kwargs)

    manager.allocate_slots = allocate_or_fail


def everywhere(llm: Any, act: Callable[[Any], Any]) -> list[Any]:
    """`act(worker)` in every worker, between two steps."""
    results: list[Any] = llm.llm_engine.engine_core.collective_rpc(act)
    return results


def mirrors_of(worker: Any) -> Any:
    return worker.model_runner.executor.mirrors


def shape_of_cache(worker: Any) -> tuple[int, ...]:
    return tuple(worker.model_runner.kv_caches[0].shape)


def on_rank(rank: int, act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`act` on the worker of this rank, nothing on the others."""
    return partial(_on_rank, rank, act)


def _on_rank(rank: int, act: Callable[[Any], Any], worker: Any) -> Any:
    return act(worker) if worker.rank == rank else None


def move_a_token(worker: Any) -> None:
    """Give the newest token of the first request the slot of its oldest one in the mirror."""
    mirrors = mirrors_of(worker)
    mirror = next(iter(mirrors.values()))
    ids, slots = mirror.live()
    mirrors.columns.slots[mirrors.columns.first_token[mirror.row] + ids[-1]] = slots[0]


def lose_a_copy(worker: Any) -> None:
    """Do not execute the next relocation, and report that it took 10 s."""
    copies = worker.model_runner.vtoken_host.model.copies

    def copy(source: Any, destination: Any) -> int:
        del copies.copy
        return 10_000_000

    copies.copy = copy


def count_wrongly(worker: Any) -> None:
    """Every mirror has a token more than the scheduler has scheduled."""
    mirrors = mirrors_of(worker)
    mirrors.columns.num_tokens[mirrors.rows_of([*mirrors])] += 1


def violations(llm: Any) -> list[str]:
    events = runtime_of(llm).events.page(0, 10_000).events
    return [event.summary for event in events if event.kind == "violation"]


def scored_run(
    llm: Any, greedy: Any, prompts: Tokens, num_new: int
) -> tuple[Tokens, Any, dict[int, list[np.ndarray]]]:
    """Tokens, victims and every report's scores, by the order of submission."""
    observer = Observer(llm)
    finish, scores_of = observer.runtime.finish_step, {}

    def finish_step(report: Any, step: int) -> None:
        for (request, _), scores in (report.scores if report is not None else {}).items():
            scores_of.setdefault(request, []).append(scores)
        finish(report, step)

    observer.runtime.finish_step = finish_step
    tokens = greedy(llm, prompts, num_new)
    observer.runtime.finish_step = finish
    observer.restore()
    ordered = sorted(scores_of, key=lambda request: int(request.split("-")[0]))
    return tokens, observer.logs(), {i: scores_of[request] for i, request in enumerate(ordered)}


def run_and_break(
    llm: Any, prompts: Tokens, act: Callable[[Any], Any], num_steps: int = 6
) -> list[str]:
    """Run until all requests have evicted, break one worker, continue; return the violations."""
    known = len(violations(llm))
    for number, prompt in enumerate(prompts):
        add(llm, f"b{known}-{number}", prompt, 40)
    step(llm, times=num_steps)
    everywhere(llm, act)
    step(llm)
    return violations(llm)[known:]
