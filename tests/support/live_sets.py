"""Records which tokens of an engine were live when, as `reference.trace_log` takes it."""

from __future__ import annotations

from typing import Any

from tests.support import reference
from tests.support.core.request_step import parts_of
from tests.support.reference import Change, Stretch


class LiveSets:
    """A stretch an admission of every request, from the plans that the worker gets.

    `stretches[name]`: by the request's own name. `num_evicted`, `num_restored`: tokens in all.
    """

    def __init__(self, scheduler: Any) -> None:
        self.stretches: dict[str, list[Stretch]] = {}
        self.num_evicted = self.num_restored = 0
        self._scheduler = scheduler
        self._runtime = scheduler.vtoken
        self._commit = self._runtime.commit_step
        self._runtime.commit_step = self._commit_step

    def restore(self) -> None:
        """Stop recording."""
        self._runtime.commit_step = self._commit

    def _commit_step(self, grown: Any) -> Any:
        for request_id in grown.new:
            known = self._scheduler.requests[request_id].num_tokens
            self._of(request_id).append(Stretch(known))
        plan = self._commit(grown)
        for request_id, part in parts_of(plan.requests).items():
            evicted, restored = part.evicted.tolist(), part.restored_ids.tolist()
            if evicted or restored:
                change = Change(part.num_tokens, evicted, restored)
                self._of(request_id)[-1].changes.append(change)
            self.num_evicted += len(evicted)
            self.num_restored += len(restored)
        return plan

    def _of(self, request_id: str) -> list[Stretch]:
        return self.stretches.setdefault(own_name(request_id), [])


def own_name(request_id: str) -> str:
    """The name that a test gave: vLLM appends a random part."""
    return request_id.rsplit("-", 1)[0]


def num_returns(stretches: list[Stretch]) -> int:
    """How many tokens came back."""
    return sum(len(change.restored) for stretch in stretches for change in stretch.changes)


def expected_tokens(
    model: Any, prompt: list[int], tokens: list[int], stretches: list[Stretch]
) -> list[int]:
    """The reference's greedy tokens under the recorded live sets; `tokens`: the engine's."""
    return reference.trace_log(model, prompt, len(tokens), stretches, draft=tokens).tokens
