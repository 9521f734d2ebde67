"""One engine in this process under one phase of the soak; the other end of `tests.soak.run`.

Reads a `Phase` as one JSON line on stdin. Writes JSON lines on the descriptor named in the first
argument: the tally so far every second, and `{"done": tally}` at the end. All actions depend on the
seed and the engine's state alone; time only ends the phase.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import msgspec

from tests.soak.engine import abort_during_step, is_busy, make_engine, sampling_params
from tests.soak.oracle import Oracle
from tests.soak.phases import Phase
from tests.soak.tally import Tally
from tests.soak.traffic_generator import NEEDS_BUDGET, Chance, RequestDraw
from tests.support.account import Account, Said, contradictions, moment_of
from tests.support.live_sets import LiveSets
from vtoken.sentences.advice import put_into_words
from vtoken.wire import (
    BlocksDocument,
    ConfigDocument,
    Describe,
    Operation,
    PatchResult,
    Reply,
    RequestRow,
    Restored,
    Status,
)

REPORT_EVERY_S = 1.0
MAX_IN_FLIGHT = 14
DRAIN_ROUNDS = 20_000
NUM_COMPARED = 24  # requests compared with the oracle
COMPARED_EVERY = 5  # rounds between two comparisons of all documents
READING = {"blocks", "config", "describe", "requests", "status"}  # not worth a line of the log


class Soak:
    """Drives one engine; `tally` has the counts so far."""

    def __init__(self, phase: Phase, log: TextIO, reports: TextIO) -> None:
        self.phase = phase
        self.tally = Tally()
        self._max_model_len = phase.engine.arguments["max_model_len"]
        self.chance = Chance(phase.seed, max_model_len=self._max_model_len)
        self.sent: dict[str, RequestDraw] = {}
        self.outputs: dict[str, list[int]] = {}
        self.in_flight: list[str] = []
        self._has_priorities = phase.engine.arguments.get("scheduling_policy") == "priority"
        self._log, self._reports = log, reports
        self._round = 0
        self._target = 6
        self._last_report = 0.0
        self.engine = make_engine(phase)
        self.core = self.engine.engine_core.engine_core
        self.runtime = self.core.scheduler.vtoken
        self.watch = LiveSets(self.core.scheduler)
        self.account = Account(self.runtime)
        self.policies = self._call("describe", Describe).policies

    def run(self) -> None:
        """Run traffic until the time or the rounds are over; then drain and compare outputs."""
        started = time.monotonic()
        while self._continues(started):
            self._round += 1
            self._act()
            self._step()
            if self._round % COMPARED_EVERY == 0:
                self._compare_statements()
        self._drain()
        self._compare()
        self._collect()
        self.tally.seconds = time.monotonic() - started

    def _continues(self, started: float) -> bool:
        if self.phase.steps is not None:
            return self._round < self.phase.steps
        return time.monotonic() - started < self.phase.seconds

    # ------------------------------------------------------------ one round

    def _act(self) -> None:
        chance = self.chance
        if chance.happens(0.02):
            self._target = chance.rng.choice((0, 1, 3, 6, 10, MAX_IN_FLIGHT))
        while len(self.in_flight) < self._target and chance.happens(0.5):
            self._add(chance.unusual(chance.request(self.policies)))
        if self.in_flight and chance.happens(0.01):
            self._abort(chance.rng.choice(self.in_flight), during_step=chance.happens(0.5))
        if chance.happens(0.04):
            self._patch(self._draw_patch(), refused=None)
        if chance.happens(0.005):
            self._patch(chance.bad_patch(), refused=True)
        if chance.happens(0.005):
            self._call("undo", PatchResult, may_refuse=True)
        if chance.happens(0.02):
            self._compact()
        if chance.happens(0.02):
            self._restore()
        if chance.happens(0.002):
            running = chance.happens(0.5)
            self._note("reset", running=running)
            self.core.scheduler.reset_prefix_cache(reset_running_requests=running)
        if chance.happens(0.002):
            steps, clear_cache = chance.rng.randint(1, 4), chance.happens(0.5)
            self._note("pause", steps=steps, clear_cache=clear_cache)
            self.core.pause_scheduler("keep", clear_cache=clear_cache)
            for _ in range(steps):
                self._step()
            self.core.resume_scheduler()
        if chance.happens(0.002):
            self._drain()

    def _abort(self, victim: str, *, during_step: bool) -> None:
        """Abort a request, between two steps or between a step's schedule and its output."""
        self.in_flight.remove(victim)
        self._note("abort", id=victim, during_step=during_step)
        if during_step:
            abort_during_step(self.engine, victim)
        else:
            self.engine.abort_request([victim])
        self.tally.aborted += 1

    def _add(self, draw: RequestDraw) -> None:
        name = f"r{len(self.sent)}"
        self.sent[name] = draw
        self._note("add", id=name, prompt_tokens=len(draw.prompt), sampling=draw.sampling)
        params = sampling_params(draw.sampling)
        priority = self.chance.rng.randint(0, 2) if self._has_priorities else 0
        self.engine.add_request(name, {"prompt_token_ids": draw.prompt}, params, priority=priority)
        self.in_flight.append(name)
        self.tally.requests += 1

    def _step(self) -> None:
        if not is_busy(self.engine):
            self._report()
            return
        self.tally.steps += self.core.scheduler.has_requests()  # a paused engine schedules no step
        for output in self.engine.step():
            if not output.finished:
                continue
            name, draw = output.request_id, self.sent[output.request_id]
            self.in_flight.remove(name)
            for completion in output.outputs:
                if not draw.may_end(
                    completion.finish_reason, len(completion.token_ids), self._max_model_len
                ):
                    ended = f"{name} ended ({completion.finish_reason})"
                    self._fail(f"{ended} after {len(completion.token_ids)} tokens: {draw.sampling}")
                    self.tally.failed += 1
                self.tally.tokens += len(completion.token_ids)
            self.tally.finished += 1
            self.outputs[name] = list(output.outputs[0].token_ids)
        self._report()

    def _drain(self) -> None:
        """Finish all requests and check that no table or block is left."""
        self._note("drain")
        for _ in range(DRAIN_ROUNDS):
            if not is_busy(self.engine):
                break
            self._step()
        else:
            self._fail(f"{self.in_flight} did not finish in {DRAIN_ROUNDS} steps")
            self.tally.failed += len(self.in_flight)
        self.runtime.check()
        pool = self.runtime.tables.pool
        free = self.runtime.store.num_free_blocks()
        usable = self.runtime.geometry.num_blocks - 1
        if len(self.runtime.tables) or pool.num_used or free != usable:
            self._fail(
                f"idle, but {len(self.runtime.tables)} tables, {pool.num_used} used blocks, "
                f"{free} of {usable} free"
            )

    # ------------------------------------------------------------ commands

    def _compare_statements(self) -> None:
        """Compare what the engine says now with what happened, and with itself."""
        status = self._call("status", Status)
        put_into_words(status)  # as the API process does
        said = Said(
            status=status,
            rows=self._call("requests", list[RequestRow]),
            config=self._call("config", ConfigDocument),
            blocks=self._call("blocks", BlocksDocument),
        )
        found = contradictions(said, self.account, moment_of(self.core.scheduler))
        self.tally.statements += 1
        self.tally.contradictions += len(found)
        for text in found:
            self._fail(text)

    def _draw_patch(self) -> dict[str, Any]:
        config = self._call("config", ConfigDocument)
        return self.chance.patch(config, self.policies, keeps=self.phase.engine.keeps)

    def _patch(self, patch: dict[str, Any], *, refused: bool | None) -> None:
        """`refused`: whether it must be refused; None: only if its values do not fit each other."""
        before = self._call("config", ConfigDocument).revision
        op, args = "patch_config", {"patch": patch}
        if self.chance.happens(0.1):
            op, args = "preview", {"change": {"op": op, **args}}
        result = self._call(op, PatchResult, may_refuse=True, **args)
        if result is None:
            self.tally.refused += 1
            if refused is None and not NEEDS_BUDGET & patch.keys():
                self._fail(f"{patch} was refused")
            if self._call("config", ConfigDocument).revision != before:
                self._fail(f"{patch} was refused but changed the configuration")
        elif refused:
            self._fail(f"{patch} was accepted")
        elif result.applied_at_step is not None:
            self.tally.switches += 1

    def _compact(self) -> None:
        args: dict[str, Any] = {"dry_run": self.chance.happens(0.2)}
        names = [table.request_id for table in self.runtime.tables]
        if names and self.chance.happens(0.5):
            args["request_id"] = self.chance.rng.choice(names)
        if self.chance.happens(0.5):
            args["batch_size"] = self.chance.rng.randint(1, 8)
        self._call("compact", Operation, **args)
        self.tally.compactions += 1

    def _restore(self) -> None:
        """Ask for the parked tokens of a request, or only what would come back."""
        names = [table.request_id for table in self.runtime.tables]
        if names:
            name, dry_run = self.chance.rng.choice(names), self.chance.happens(0.3)
            self._call("restore", Restored, request_id=name, dry_run=dry_run)

    def _call(self, op: str, kind: Any, *, may_refuse: bool = False, **args: Any) -> Any:
        """Send one encoded command to the engine; None if it was refused."""
        if op not in READING:
            self._note(op, **args)
        payload = msgspec.msgpack.encode({"call": {"op": op, **args}})
        reply = msgspec.msgpack.decode(self.core.scheduler.vtoken_command(payload), type=Reply)
        if reply.problem is not None:
            if not may_refuse or reply.problem.status not in (409, 422):
                self._fail(f"{op} {args}: {reply.problem.detail}")
            return None
        return msgspec.convert(reply.value, kind)

    # ------------------------------------------------------------ results

    def _compare(self) -> None:
        greedy = [name for name in self.outputs if self.sent[name].greedy]
        preempted = [name for name in greedy if len(self.watch.stretches[name]) > 1]
        evicted = [n for n in greedy if any(s.changes for s in self.watch.stretches[n])]
        share = NUM_COMPARED // 3
        chosen: dict[str, None] = {}
        for names in (preempted, evicted, greedy):
            chosen |= dict.fromkeys(self.chance.rng.sample(names, k=min(share, len(names))))
        oracle = Oracle(Path(self.phase.model)) if chosen else None
        for name in chosen:
            assert oracle is not None
            verdict = oracle.compare(
                self.sent[name].prompt, self.outputs[name], self.watch.stretches[name]
            )
            self.tally.compared += 1
            self.tally.compared_tokens += len(verdict.gaps)
            if len(verdict.gaps) != len(self.outputs[name]):
                self._fail(
                    f"{name}: {len(verdict.gaps)} of {len(self.outputs[name])} tokens compared"
                )
            self.tally.largest_gap = max(self.tally.largest_gap, *verdict.gaps.tolist(), 0.0)
            if wrong := verdict.num_worse_than(self.phase.tolerance):
                self.tally.wrong_tokens += wrong
                self._fail(
                    f"{name}: {wrong} of {len(verdict.gaps)} tokens differ from the reference, the "
                    f"worst at {int(verdict.gaps.argmax())}"
                )
            self._report()

    def _collect(self) -> None:
        counters = self.runtime.counters
        self.tally.evictions = counters.tokens.evicted
        self.tally.relocations = counters.reclamation.relocations
        self.tally.recycled = counters.reclamation.recycled_slots
        self.tally.parked = counters.parking.copied_tokens
        self.tally.restored = counters.parking.restored_tokens
        self.tally.swapped = counters.parking.swapped_requests
        self.tally.dropped = counters.parking.dropped_tokens
        self.tally.preemptions = counters.requests.preempted
        self.tally.checks = counters.invariants.checked
        self.tally.violations = counters.invariants.violations
        self.tally.verified = counters.invariants.verified_relocations
        self.tally.verify_us = counters.invariants.verify_us

    def _note(self, action: str, **data: Any) -> None:
        line = {"round": self._round, "step": self.runtime.step, "do": action, **data}
        self._log.write(msgspec.json.encode(line).decode() + "\n")

    def _fail(self, text: str) -> None:
        self.tally.failures.append(f"{self.phase.name}, round {self._round}: {text}")

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._last_report > REPORT_EVERY_S:
            self._last_report = now
            self._collect()
            self._log.flush()
            send(self._reports, "tally", self.tally)

    def died(self, text: str) -> None:
        """Record that the engine raised: all requests in flight have failed."""
        self._fail(text)
        self.tally.failed += len(self.in_flight)
        self._collect()


def send(reports: TextIO, kind: str, tally: Tally) -> None:
    reports.write(msgspec.json.encode({kind: tally}).decode() + "\n")
    reports.flush()


def main() -> None:
    reports = os.fdopen(int(sys.argv[1]), "w")
    phase = msgspec.json.decode(sys.stdin.readline(), type=Phase)
    with ExitStack() as stack:
        log = stack.enter_context(Path(phase.log).open("w"))
        if phase.engine.overlap:
            from vtoken_bench.vllm.steps_overlap import async_scheduling

            stack.enter_context(async_scheduling())
        soak = Soak(phase, log, reports)
        try:
            soak.run()
        except Exception:
            traceback.print_exc()
            soak.died(traceback.format_exc(limit=-3).strip().replace("\n", " | "))
        send(reports, "done", soak.tally)
        soak.core.shutdown()


if __name__ == "__main__":
    main()
