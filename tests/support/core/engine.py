"""A complete engine core without vLLM: requests, a block store, the runtime, a simulated worker.

It schedules like vLLM's V1 scheduler: running requests first and in order, the newest preempted
when blocks run out, then admissions with prefix-cache hits; blocks are hashed at schedule time.
Token contents are keys: a token computed in full context has the same key in every run of the
request, one computed after an eviction has a key unique to that run. With drafts, a step computes
more tokens than are known, and takes back those behind the first wrong one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Self

from tests.support.core.store import SimpleStore
from tests.support.core.windows import Windows
from tests.support.core.worker import Content, SimulatedWorker, StepMessage
from tests.support.shipped import PARK_BYTES, shipped
from vtoken.core.config.request_rules import Prompt, RequestRules
from vtoken.core.config.values import VTokenConfig, default_config, merge_patch
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.protocol.step import StepPlan, WorkerReport
from vtoken.core.runtime.admission import NO_REQUIREMENT
from vtoken.core.runtime.growth import Scheduled
from vtoken.core.runtime.held_request import HeldRequest
from vtoken.core.runtime.other_groups import OtherGroup
from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import Geometry


@dataclass
class Request:
    """`num_known`: prompt and sampled tokens; `num_computed` of them have K and V."""

    id: str
    num_prompt_tokens: int
    num_known: int
    max_tokens: int | None
    prefix: str | None
    prefix_tokens: int
    seed: int
    num_computed: int = 0
    admissions: int = 0
    written: list[Content] = field(default_factory=list)  # of the computed tokens

    def content(self, token: int, *, truncated: bool = False) -> Content:
        if truncated:
            return (self.id, token, "truncated context", self.admissions)
        if token < self.prefix_tokens:
            return ("prefix", self.prefix, token)
        return (self.id, token)

    def block_hash(self, index: int, block_size: int) -> Hashable:
        """Identifies the contents of a full block and of everything before it."""
        return tuple(self.content(t) for t in range(index * block_size, (index + 1) * block_size))


class CoreEngine:
    """Owns all parts; `step()` runs one engine step. Tests inject all faults.

    `window`: a second group of layers has windows of so many tokens; without a prefix cache.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_layers: int = 4,
        config: VTokenConfig | dict[str, Any] | None = None,
        prefill_chunk_tokens: int = 1 << 20,
        worker_lag_steps: int = 0,
        prefix_caching: bool = True,
        strict: bool = True,
        check_every_step: bool = True,
        worker: SimulatedWorker | None = None,
        window: int | None = None,
        max_drafts: int = 0,
        lookahead: int = 0,
    ) -> None:
        self.block_size = block_size
        self.store = SimpleStore(num_blocks)
        self.worker = worker or SimulatedWorker(num_blocks, block_size)
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.worker_lag_steps = worker_lag_steps
        self.windows = Windows(self.store, window, block_size) if window else None
        self.prefix_caching = prefix_caching and self.windows is None
        self.caches_after_eviction = False  # violates rule 4, for a control
        self.reserves = False  # admission as in vLLM's block manager; else by the first chunk alone
        # Like vLLM's --watermark: withheld from waiting requests while others run.
        self.watermark_blocks = 0
        self.other_groups: list[OtherGroup] = [] if self.windows is None else [self.windows]
        geometry = Geometry(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=num_layers,
            num_kv_heads=2,
            head_size=8,
            bytes_per_token=num_layers * 2 * 2 * 8 * 4,
            num_heads=4,
        )
        if not isinstance(config, VTokenConfig):
            config = merge_patch(
                default_config(num_blocks),
                {"verify_ratio": 1.0} | shipped(config, PARK_BYTES),
                num_blocks=num_blocks,
                num_layers=num_layers,
                num_heads=geometry.num_heads,
            )
        self.runtime = Runtime(
            EngineShape(geometry, max_drafts=max_drafts, lookahead=lookahead),
            self.store,
            config,
            strict=strict,
            check_every_step=check_every_step,
            other_groups=self.other_groups,
            num_sampled=self._num_sampled,
        )
        # How many drafts a request gets next, up to `max_drafts`, and how many of them are right.
        self.draft: Callable[[Request], tuple[int, int]] = lambda _: (max_drafts, max_drafts)
        self._drafts: dict[str, tuple[int, int]] = {}  # of the step being planned
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0
        self.clock: Callable[[], float] = time.monotonic  # of arrivals and tokens
        self.newest_plan = StepPlan(0)
        self._removed: list[str] = []
        self._queue: deque[StepMessage] = deque()

    # ------------------------------------------------------------ requests

    def add(
        self,
        request_id: str,
        prompt_tokens: int,
        *,
        max_tokens: int | None = None,
        prefix: str | None = None,
        prefix_tokens: int = 0,
        seed: int = 0,
        priority: int = 0,
        rules: RequestRules | None = None,
        prompt: Prompt | None = None,
    ) -> None:
        """Queue a request; it shares its first `prefix_tokens` with every request of `prefix`."""
        most = (self.store.num_blocks - 1) * self.block_size
        if not 0 < prompt_tokens <= most:
            raise ValueError(f"a prompt of {prompt_tokens} tokens does not fit {most} slots")
        if not 0 <= prefix_tokens <= prompt_tokens:
            raise ValueError(f"{prefix_tokens} prefix tokens in a prompt of {prompt_tokens}")
        if request_id not in self.runtime.requests.announced:
            self.runtime.announce(
                request_id,
                rules,
                num_prompt_tokens=prompt_tokens,
                max_tokens=0 if max_tokens is None else prompt_tokens + max_tokens,
                priority=priority,
                prompt=prompt,
            )
        self.runtime.latency.arrived(request_id, self.clock())
        self.waiting.append(
            Request(
                request_id,
                prompt_tokens,
                prompt_tokens,
                max_tokens,
                prefix,
                prefix_tokens if prefix is not None else 0,
                seed,
            )
        )

    def remove(self, request_id: str) -> None:
        """Finish or abort a request, running or waiting."""
        for request in self.running:
            if request.id == request_id:
                self._release(request, preempted=False)
                self.running.remove(request)
                return
        self.waiting = deque(r for r in self.waiting if r.id != request_id)
        self.runtime.discard(request_id)

    def _num_sampled(self, request_id: str) -> int:
        (request,) = (r for r in self.running if r.id == request_id)
        return request.num_known - request.num_prompt_tokens

    def preempt_newest(self) -> None:
        """Preempt between two steps, like a priority scheduler or a reset."""
        if self.running:
            self.preempt(self.running[-1])

    def _release(self, request: Request, *, preempted: bool) -> None:
        in_flight = self.worker_lag_steps and self.runtime.shape.max_drafts
        settled = not in_flight and request.num_known - request.num_computed == 1
        self.runtime.release(request.id, preempted=preempted, settled=settled)
        self.store.release(request.id)
        if self.windows is not None:
            self.windows.release(request.id)
        self._removed.append(request.id)

    def preempt(self, request: Request) -> None:
        self._release(request, preempted=True)
        self.running.remove(request)
        request.num_computed = 0
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    # ------------------------------------------------------------ one step

    def due_requests(self) -> list[str]:
        """The requests in the middle of their prompt and those that append one token next."""
        ends = {name: state.prefill_end for name, state in self.runtime.requests.held.items()}
        return [
            r.id
            for r in self.running
            if r.num_computed < ends.get(r.id, 0) or r.num_known - r.num_computed == 1
        ]

    def step(self) -> StepPlan:
        self.runtime.shape.report_lag_steps = self.worker_lag_steps
        self._drafts = self._draft()
        drafting = [(name, 1 + num) for name, (num, _) in self._drafts.items()]
        self.runtime.begin_step(self.due_requests(), **({"drafting": drafting} if drafting else {}))
        message = StepMessage(StepPlan(0))
        grown = Scheduled()
        preempted = self.num_preemptions
        for request in list(self.running):
            if request in self.running:  # not preempted by an earlier one
                self.schedule_running(request, grown, message)
        if preempted == self.num_preemptions:
            self._admit(grown, message)
        message.gone, self._removed = self._removed, []
        message.plan = self.newest_plan = self.runtime.commit_step(grown)
        self._check_lookahead(grown)
        self._queue.append(message)
        while len(self._queue) > self.worker_lag_steps:
            self._execute()
        self._sample()
        return message.plan

    def _check_lookahead(self, grown: Scheduled) -> None:
        """A drafter may write behind the last token of every request of the step."""
        tables = self.runtime.tables
        for table in (tables[name] for name in grown.request_ids):
            spare = table.num_blocks * self.block_size - table.extent
            assert spare >= self.runtime.shape.lookahead, f"{table.request_id} has {spare} places"

    def steps(self, num_steps: int) -> Self:
        for _ in range(num_steps):
            self.step()
        return self

    def run(self, num_steps: int) -> Self:
        """Run steps, and check everything after each."""
        for _ in range(num_steps):
            self.step()
            self.check()
        return self

    def _draft(self) -> dict[str, tuple[int, int]]:
        """Drafts for the requests that compute their newest token next."""
        found = {}
        most = (self.store.num_blocks - 1) * self.block_size
        for request in self.running:
            if self.runtime.shape.max_drafts and request.num_known - request.num_computed == 1:
                num, right = self.draft(request)
                num = min(num, most - request.num_known)
                if num > 0:
                    found[request.id] = num, min(num, right)
        return found

    def schedule_running(self, request: Request, grown: Scheduled, message: StepMessage) -> None:
        num_new = min(request.num_known - request.num_computed, self.prefill_chunk_tokens)
        num_drafts, num_right = self._drafts.get(request.id, (0, 0))
        num_new += num_drafts
        beside = 0
        if self.windows is not None:
            self.windows.give_back(request.id, request.num_computed)
            beside = self.windows.missing(request.id, request.num_computed + num_new)
        free = self.store.free
        while (missing := self._num_missing_blocks(request, num_new)) + beside > len(free):
            last = self.running[-1]
            self.preempt(last)
            if last is request:
                return
        if missing > 0:
            message.appended[request.id] = self.store.extend(request.id, missing)
        if num_drafts > num_right:
            message.rejected[request.id] = num_drafts - num_right
        self._grow(request, num_new, grown, message, num_drafts)

    def _admit(self, grown: Scheduled, message: StepMessage) -> None:
        while self.waiting:
            request = self.waiting[0]
            s = self.block_size
            computed = self.runtime.swapper.num_computed(request.id)
            if computed is None:
                return  # its copies are not reported
            if computed:
                if not self._resume(request, computed, grown, message):
                    return
                continue
            hashes = [request.block_hash(i, s) for i in range((request.num_known - 1) // s)]
            hit = self.store.longest_hit(hashes)
            hit_free = sum(self.store.ref_cnt[b] == 0 for b in hit)
            num_new = min(request.num_known - len(hit) * s, self.prefill_chunk_tokens)
            ahead = self.runtime.shape.lookahead
            missing = -(-(len(hit) * s + num_new + ahead) // s) - len(hit)
            beside = 0 if self.windows is None else self.windows.missing(request.id, num_new)
            withheld = self.watermark_blocks if self.running else 0
            admission, requirement, takes = self.runtime.admission, NO_REQUIREMENT, missing + beside
            if self.reserves:
                requirement = admission.requirement(request.id, request.num_known, beside)
                takes = -(-(request.num_known + ahead) // s) - len(hit) + beside
            needed = takes + requirement.extra_blocks + withheld
            if needed > len(self.store.free) - hit_free:
                admission.record_demand(
                    request.id, takes + hit_free, requirement, withheld_blocks=withheld
                )
                return
            self.waiting.popleft()
            self.running.append(request)
            request.admissions += 1
            request.num_computed = len(hit) * s
            self.store.admit(request.id, hit)
            self.store.extend(request.id, missing)
            cached = [request.content(t) for t in range(request.num_computed)]
            request.written = list(cached)
            admission.admitted(request.id, len(self.store.tables[request.id]) + beside)
            message.new[request.id] = (list(self.store.tables[request.id]), cached)
            self._grow(request, num_new, grown, message)

    def _resume(
        self, request: Request, computed: int, grown: Scheduled, message: StepMessage
    ) -> bool:
        """Schedule a swapped request of which `computed` tokens are, if its blocks are free."""
        assert len(request.written) == computed == request.num_known - 1
        ahead = self.runtime.shape.lookahead
        places = self.runtime.required_extent(request.id, request.num_known + ahead)
        missing, admission = -(-places // self.block_size), self.runtime.admission
        requirement = NO_REQUIREMENT
        if self.reserves:
            requirement = admission.requirement(request.id, places)
        withheld = self.watermark_blocks if self.running else 0
        if missing + requirement.extra_blocks + withheld > len(self.store.free):
            admission.record_demand(request.id, missing, requirement, withheld_blocks=withheld)
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.num_computed = computed
        self.store.admit(request.id, [])
        self.store.extend(request.id, missing)
        admission.admitted(request.id, missing)
        message.new[request.id] = (list(self.store.tables[request.id]), list(request.written))
        self._grow(request, 1, grown, message)
        return True

    def _num_missing_blocks(self, request: Request, num_new: int) -> int:
        num_tokens = request.num_computed + num_new + self.runtime.shape.lookahead
        extent = self.runtime.required_extent(request.id, num_tokens)
        places = num_tokens if extent is None else extent
        return -(-places // self.block_size) - len(self.store.tables[request.id])

    def _grow(
        self,
        request: Request,
        num_new: int,
        grown: Scheduled,
        message: StepMessage,
        num_drafts: int = 0,
    ) -> None:
        """Register the tokens and hash the blocks that known ones fill (at schedule time)."""
        first = request.num_computed
        request.num_computed += num_new
        if self.windows is not None:
            self.windows.grow(request.id, request.num_computed)
        table = self.runtime.tables.get(request.id)
        truncated = self.runtime.swapper.has_evicted(request.id)
        truncated |= table is not None and table.virtual
        message.writes[request.id] = [
            request.content(t, truncated=truncated) for t in range(first, request.num_computed)
        ]
        wrong = message.rejected.get(request.id, 0)
        if wrong:
            contents = message.writes[request.id]
            contents[-wrong:] = [("wrong", key, self.runtime.step) for key in contents[-wrong:]]
        del request.written[first:]
        request.written += message.writes[request.id][: num_new - wrong]
        blocks = self.store.tables[request.id]
        grown.request_ids.append(request.id)
        grown.num_tokens.append(request.num_computed)
        grown.num_blocks.append(len(blocks))
        if table is None:
            prefill_end = max(request.num_prompt_tokens, request.num_known)
            grown.new[request.id] = HeldRequest(
                request.id, request.num_prompt_tokens, prefill_end, request.seed
            )
        if self.prefix_caching and (not truncated or self.caches_after_eviction):
            num_known = request.num_computed - num_drafts
            for index in range(min(num_known // self.block_size, len(blocks))):
                self.store.cache(blocks[index], request.block_hash(index, self.block_size))

    def _execute(self) -> None:
        message = self._queue.popleft()
        report: WorkerReport | None = self.worker.execute(message)
        if message.plan.step:
            self.runtime.finish_step(report, message.plan.step)
        self.runtime.truncate(message.rejected)
        for request in self.running:
            num_drafts, num_right = self._drafts.pop(request.id, (0, 0))
            if request.id in message.writes:
                self.runtime.drafts.add(num_drafts, num_drafts - num_right)
                request.num_computed -= num_drafts - num_right
                request.num_known += num_right
        self.runtime.check_lengths(
            {r.id: r.num_computed for r in self.running if r.id in message.rejected}
        )

    def _sample(self) -> None:
        served = []
        for request in list(self.running):
            if request.num_computed == request.num_known:
                served.append(request.id)
                request.num_known += 1
                limit = request.max_tokens
                full = request.num_known > (self.store.num_blocks - 1) * self.block_size
                if full or (
                    limit is not None and request.num_known - request.num_prompt_tokens > limit
                ):
                    self.remove(request.id)
        self.runtime.sampled(served, len(served), self.clock())

    # ------------------------------------------------------------ checking

    def drain(self) -> None:
        """Execute all outstanding steps."""
        while self._queue:
            self._execute()

    def check(self) -> None:
        """Runtime, store and worker agree, and cached blocks hold the contents of their hashes."""
        self.runtime.check()
        self.store.check()
        for table in self.runtime.tables:
            assert table.blocks == self.store.tables[table.request_id]
            for block in table.blocks:
                assert self.runtime.tables.pool.holders[block] == self.store.ref_cnt[block]
        if self._queue:
            return
        s = self.block_size
        for key, blocks in self.store.cached.items():
            for block in blocks:
                assert tuple(self.worker.memory[block * s : (block + 1) * s]) == key, (
                    f"cached block {block} does not hold the contents of its hash"
                )
        for table in self.runtime.tables:
            if table.request_id not in self._removed:
                mirror = self.worker.mirrors[table.request_id]
                ids = table.live_ids()
                found = self.worker.live_slots(mirror)
                assert dict(zip(ids.tolist(), table.slots_of(ids).tolist(), strict=True)) == found
