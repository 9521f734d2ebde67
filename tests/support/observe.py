"""Records an engine in this process for tests: victims, blocks, owners, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def scheduler_of(llm: Any) -> Any:
    return core_of(llm).scheduler


def runtime_of(llm: Any) -> Any:
    return scheduler_of(llm).vtoken


def watch_victims(runtime: Any, note: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Call `note(table, victims)` for every due request before its victims die; victims are None if
    the policy cannot choose yet. Returns a function that ends it.
    """
    choose, ranking = runtime.ranking.choose, runtime.ranking

    def choose_and_note(rows: Any) -> Any:
        chosen, victims = choose(rows)
        found = {row: victims.of(i) for i, row in enumerate(chosen.tolist())}
        for row in rows.tolist():
            note(runtime.tables[runtime.tables.names[row]], found.get(row))
        return chosen, victims

    def restore() -> None:
        ranking.choose = choose

    ranking.choose = choose_and_note
    return restore


def resumed(llm: Any) -> dict[str, list[int]]:
    """Request -> its numbers of output tokens when it was scheduled again after a preemption;
    filled as the engine runs.
    """
    scheduler, seen = scheduler_of(llm), defaultdict(list)
    schedule = scheduler.schedule

    def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        for request in output.scheduled_cached_reqs.resumed_req_ids:
            seen[request].append(scheduler.requests[request].num_output_tokens)
        return output

    scheduler.schedule = schedule_and_note
    return seen


class Observer:
    """Records one runtime's victims, and the tables at each `commit_step`.

    `victims[request][num_tokens]`: the ids that died when the table had that many tokens.
    `held[request]`: blocks held, a step. `owners[block]`: requests that ever held it, in order.
    """

    def __init__(self, llm: Any) -> None:
        self.runtime = runtime_of(llm)
        self.victims: dict[str, dict[int, set[int]]] = defaultdict(dict)
        self.held: dict[str, list[int]] = defaultdict(list)
        self.owners: dict[int, list[str]] = defaultdict(list)
        self.steps_with_holes = 0
        self.prompt_tokens: dict[str, int] = {}
        self._commit = self.runtime.commit_step
        self._unwatch = watch_victims(self.runtime, self._note)
        self.runtime.commit_step = self._commit_step

    def restore(self) -> None:
        """Stop watching."""
        self._unwatch()
        self.runtime.commit_step = self._commit

    def _note(self, table: Any, victims: Any) -> None:
        if victims is not None:
            self.victims[table.request_id][table.num_tokens] = set(victims.tolist())

    def _commit_step(self, grown: Any) -> Any:
        plan = self._commit(grown)
        private: dict[int, str] = {}
        for table in self.runtime.tables:
            request = table.request_id
            self.prompt_tokens[request] = self.runtime.requests.held[request].num_prompt_tokens
            self.held[request].append(len(table.blocks))
            self.steps_with_holes += not table.dense
            for block in table.blocks:
                if not self.runtime.store.is_shared(block):
                    assert private.setdefault(block, request) == request, "owned twice"
                if request not in self.owners[block]:
                    self.owners[block].append(request)
        return plan

    def log_of(self, request: str) -> dict[int, set[int]]:
        """Decode step -> victims, as `reference.replay` takes it."""
        first = self.prompt_tokens[request]
        return {tokens - first: victims for tokens, victims in self.victims[request].items()}

    def logs(self) -> list[dict[int, set[int]]]:
        """The logs of all requests, in the order of submission."""
        return [self.log_of(request) for request in sorted(self.prompt_tokens, key=_number)]


def _number(request_id: str) -> int:
    return int(request_id.split("-")[0])
