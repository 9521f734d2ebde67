"""Records which tokens of an engine were live when, as `reference.trace_log` takes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from tests.support import reference
from tests.support.core.request_step import parts_of
from tests.support.observe import scheduler_of
from tests.support.reference import Change, Stretch
from tests.support.stepping import add, step


class LiveSets:
    """A stretch of every admission of a request that computes it from its first token on, from the
    plans that the worker gets. A request that was swapped goes on in its stretch.

    `stretches[name]`: by the request's own name. `num_evicted`, `num_restored`: tokens in all.
    """

    def __init__(self, scheduler: Any) -> None:
        self.stretches: dict[str, list[Stretch]] = {}
        self.num_evicted = self.num_restored = self.num_resumed = 0
        self._scheduler = scheduler
        self._runtime = scheduler.vtoken
        self._commit = self._runtime.commit_step
        self._runtime.commit_step = self._commit_step

    def restore(self) -> None:
        """Stop recording."""
        self._runtime.commit_step = self._commit

    def _commit_step(self, grown: Any) -> Any:
        known = {name: self._scheduler.requests[name].num_tokens for name in grown.new}
        plan = self._commit(grown)
        parts, resumed = parts_of(plan.requests), plan.requests.resumed
        for request_id, num_tokens in known.items():
            if request_id not in resumed:
                self._of(request_id).append(Stretch(num_tokens))
        for request_id, part in parts.items():
            stretch = self._of(request_id)[-1]
            evicted, restored = part.evicted.tolist(), part.restored_ids.tolist()
            if request_id in resumed:  # what is restored is all that is live
                before = dead_of(stretch)
                now = {*range(part.num_tokens)}.difference(restored)
                evicted, restored = sorted(now - before), sorted(before - now)
            if evicted or restored:
                stretch.changes.append(Change(part.num_tokens, evicted, restored))
            self.num_evicted += len(evicted)
            self.num_restored += len(restored)
            self.num_resumed += request_id in resumed
        return plan

    def _of(self, request_id: str) -> list[Stretch]:
        return self.stretches.setdefault(own_name(request_id), [])


def own_name(request_id: str) -> str:
    """The name that a test gave: vLLM appends a random part."""
    return request_id.rsplit("-", 1)[0]


def dead_of(stretch: Stretch) -> set[int]:
    """The tokens that are dead after all changes."""
    dead: set[int] = set()
    for _, evicted, restored in stretch.changes:
        dead = (dead | {*evicted}) - {*restored}
    return dead


def num_returns(stretches: list[Stretch]) -> int:
    """How many tokens came back."""
    return sum(len(change.restored) for stretch in stretches for change in stretch.changes)


def expected_tokens(
    model: Any, prompt: list[int], tokens: list[int], stretches: list[Stretch]
) -> list[int]:
    """The reference's greedy tokens under the recorded live sets; `tokens`: the engine's."""
    return reference.trace_log(model, prompt, len(tokens), stretches, draft=tokens).tokens


def swinging_budget(
    llm: Any, prompts: list[list[int]], num_new: int, budgets: Sequence[int], *, steps: int = 10
) -> tuple[list[list[int]], list[list[Stretch]]]:
    """Greedy tokens and live sets, a prompt each, while the budget changes every `steps` steps.

    Tokens are parked when it falls and come back when it rises; at least one does of each request.
    The configuration is then the one before.
    """
    scheduler, tokens = scheduler_of(llm), dict[str, list[int]]()
    park = {"evict_when": "always", "park_bytes": 1 << 26, "restore_after_ms": 0}
    ample = {"reclamation": "auto", "low_watermark_blocks": 0, "headroom_blocks": 1}
    patch = park | ample | {"budget_tokens": budgets[0], "budget_ratio": 0.0}
    before = {name: getattr(scheduler.vtoken.config, name) for name in patch}
    scheduler.vtoken_controller.patch_config(patch)
    watch = LiveSets(scheduler)
    names = [f"s{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        add(llm, name, prompt, num_new)
    for budget in cycle(budgets):
        step(llm, tokens, steps)
        if not llm.llm_engine.has_unfinished_requests():
            break
        scheduler.vtoken_controller.patch_config({"budget_tokens": budget})
    watch.restore()
    scheduler.vtoken_controller.patch_config(before)
    counters = scheduler.vtoken.counters
    assert counters.invariants.violations == 0
    stretches = [watch.stretches[name] for name in names]
    assert all(num_returns(each) > 0 for each in stretches)
    return [tokens[name] for name in names], stretches
