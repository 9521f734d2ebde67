"""What an engine says of one moment, against an independent account and against itself.

`Account` counts what happened without the counters and documents of the product; `contradictions`
names every pair of statements that cannot both be true. The documents must be of one moment.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tests.support.observe import watch_victims
from vtoken import wire
from vtoken.base.request_ids import short_id
from vtoken.sentences.situation import situation
from vtoken.wire.metrics import METRICS

WINDOWED = {"latency_seconds", "step_seconds", "cause"}  # they change while nothing happens


class Ended(NamedTuple):
    """A request at its end. `dead`: victims since its last admission; `given`: of these, under
    pressure."""

    prompt: int
    dead: int
    given: int


@dataclass
class Account:
    """Victims, preemptions and ends of one runtime, as they pass its interfaces."""

    runtime: Any
    evicted: int = 0
    given: int = 0
    preempted: Counter[str] = field(default_factory=Counter)
    ended: dict[str, Ended] = field(default_factory=dict)
    dead: dict[str, set[int]] = field(default_factory=dict)  # of requests with blocks
    gave: dict[str, int] = field(default_factory=dict)
    restored: int = 0
    back: Counter[str] = field(default_factory=Counter)  # restored, of requests with blocks

    def __post_init__(self) -> None:
        watch_victims(self.runtime, self._victims)
        parking = self.runtime.parking
        self._restore, parking.restore = parking.restore, self._restored
        self._release, self.runtime.release = self.runtime.release, self._released
        swapper = self.runtime.swapper
        self._discard, swapper.discard = swapper.discard, self._discarded

    def _victims(self, table: Any, victims: Any) -> None:
        if victims is None:
            return
        name, rules = table.request_id, self.runtime.requests.rules(table.request_id)
        dead = self.dead.setdefault(name, set())
        assert dead.isdisjoint(victims.tolist())
        dead.update(victims.tolist())
        self.evicted += len(victims)
        if rules.evict_when == "pressure" and rules.reclamation == "auto":
            self.given += len(victims)
            self.gave[name] = self.gave.get(name, 0) + len(victims)

    def _restored(self, table: Any, ids: Any, slots: Any, *, resumed: bool = False) -> None:
        if resumed:  # they were not dead
            self._restore(table, ids, slots, resumed=True)
            return
        dead = self.dead[table.request_id]
        assert dead.issuperset(ids.tolist())
        dead.difference_update(ids.tolist())
        self.restored += len(ids)
        self.back[table.request_id] += len(ids)
        self._restore(table, ids, slots)

    def _discarded(self, request_id: str) -> None:
        if request_id in self.runtime.swapper.requests:  # it is computed again, or has ended
            self._forget(request_id)
        self._discard(request_id)

    def _forget(self, request_id: str) -> tuple[int, int]:
        """Returns how many tokens of the request are dead, and how many of them were given."""
        self.back.pop(request_id, None)
        return len(self.dead.pop(request_id, ())), self.gave.pop(request_id, 0)

    def _released(self, request_id: str, *, preempted: bool = False, settled: bool = False) -> None:
        request = self.runtime.requests.held.get(request_id)
        self._release(request_id, preempted=preempted, settled=settled)
        if request is None:
            return
        self.preempted[request_id] += preempted
        if request_id in self.runtime.swapper.requests:
            return  # it goes on as it is
        dead, given = self._forget(request_id)
        if not preempted and request_id != self.runtime.canary.request_id:
            self.ended[request_id] = Ended(request.num_prompt_tokens, dead, given)


@dataclass
class Moment:
    """The engine's own facts: `tokens`: computed ones, of each request with blocks; `output`:
    sampled ones, of each request that runs or has ended, as its client got them, if known.
    """

    total_blocks: int
    free_blocks: int
    running: int
    waiting: int
    tokens: Mapping[str, int]
    output: Mapping[str, int] | None = None


def moment_of(scheduler: Any, output: Mapping[str, int] | None = None) -> Moment:
    """The facts of vLLM's `scheduler`, from its own queues and block pool."""
    pool, running = scheduler.kv_cache_manager.block_pool, scheduler.running
    check = scheduler.vtoken.canary.request_id  # nobody's request, and not counted
    return Moment(
        total_blocks=len(pool.blocks) - 1,
        free_blocks=sum(block.ref_cnt == 0 for block in pool.blocks[1:]),
        running=len([r for r in running if r.request_id != check]),
        waiting=len({*scheduler.requests} - {r.request_id for r in running} - {check}),
        tokens={request.request_id: request.num_computed_tokens for request in running},
        output=output,
    )


@dataclass
class Said:
    """The documents of one moment. `metrics`: `name{label="value"}` -> value, as scraped."""

    status: wire.Status
    rows: Sequence[wire.RequestRow]
    config: wire.ConfigDocument
    blocks: wire.BlocksDocument
    events: Sequence[wire.Event] = ()
    details: Mapping[str, wire.RequestDetail] = field(default_factory=dict)
    dry_run: wire.PatchResult | None = None  # of a change that makes no difference
    metrics: Mapping[str, float] = field(default_factory=dict)


def contradictions(said: Said, account: Account, moment: Moment) -> list[str]:
    """Every pair of statements that cannot both be true, as `label: both`."""
    return [
        *_books(said, account, moment),
        *_requests(said, account, moment),
        *pressure_contradictions(said.status, said.rows),
        *_configuration(said),
        *_events(said, account),
        *_dry_run(said),
        *_scraped(said),
    ]


def _differ(label: str, *pairs: tuple[Any, Any]) -> Iterator[str]:
    for mine, theirs in pairs:
        if mine != theirs:
            yield f"{label}: {mine} and {theirs}"


def _books(said: Said, account: Account, moment: Moment) -> Iterator[str]:
    status = said.status
    blocks, pool = status.blocks, wire.unpack_array(said.blocks.live, "<u2")
    flags = wire.unpack_array(said.blocks.flags, "u1")
    others = sum(group.blocks for group in status.groups if not group.managed)
    yield from _differ("blocks", (blocks.total, moment.total_blocks))
    yield from _differ("free blocks", (blocks.free, moment.free_blocks))
    yield from _differ("free + used", (blocks.free + blocks.used + others, blocks.total))
    yield from _differ("used blocks", (blocks.used, int(np.count_nonzero(flags & wire.FLAG_USED))))
    yield from _differ("live tokens", (status.tokens.live, int(pool.sum())))
    yield from _differ("running", (status.requests.running, moment.running))
    yield from _differ("waiting", (status.requests.waiting, moment.waiting))
    yield from _differ("evicted", (status.tokens.evicted, account.evicted))
    yield from _differ("preempted", (status.requests.preempted, account.preempted.total()))
    yield from _differ("finished", (status.requests.finished, len(account.ended)))
    if status.pressure is not None:
        kept = status.pressure.kept_shares
        yield from _differ("given", (status.pressure.given_tokens, account.given))
        yield from _differ("kept shares", (sum(kept.values()), len(account.ended)))
    if (parking := status.parking) is not None:
        yield from _differ("parked", (parking.tokens, sum(row.parked_tokens for row in said.rows)))
        if parking.restored_tokens > account.restored:  # less: the newest are not reported yet
            yield f"restored: {parking.restored_tokens} and {account.restored}"
        if parking.used_bytes > min(parking.peak_bytes, parking.capacity_bytes):
            yield f"bytes of copies: {parking}"


def _requests(said: Said, account: Account, moment: Moment) -> Iterator[str]:
    rows = {row.id: row for row in said.rows}
    held = {name for name, row in rows.items() if row.blocks}
    yield from _differ("rows of requests with blocks", (held, set(moment.tokens)))
    for name, row in rows.items():
        dead = len(account.dead.get(name, ()))
        if name in held:
            yield from _differ(f"tokens of {name}", (row.live + row.dead, moment.tokens.get(name)))
            yield from _differ(f"dead of {name}", (row.dead, dead))
            yield from _differ(f"given of {name}", (row.given_tokens, account.gave.get(name, 0)))
            yield from _differ(f"restored of {name}", (row.restored_tokens, account.back[name]))
        yield from _differ(f"preemptions of {name}", (row.preemptions, account.preempted[name]))
        if moment.output is not None:
            output = moment.output.get(name, 0)
            yield from _differ(f"output of {name}", (row.output_tokens, output))
        if row.given_tokens > row.dead + row.restored_tokens:
            facts = row.given_tokens, row.dead, row.restored_tokens
            yield f"given beyond dead and restored of {name}: {facts}"
        if row.parked_tokens > row.dead:
            yield f"parked beyond dead of {name}: {row.parked_tokens} and {row.dead}"
        waits = row.state in ("waiting", "preempted")
        yield from _differ(f"wait of {name}", (row.waiting_since_ts is not None, waits))
        if name not in held:
            yield from _differ(f"blocks that {name} needs", (row.needed_blocks > 0, waits))
    first = said.status.requests.first
    if first is not None and first.id in rows:
        needed = rows[first.id].needed_blocks
        yield from _differ(f"blocks that {first.id} needs", (first.needed_blocks, needed))
    for name, detail in said.details.items():
        if detail.state != "finished":
            continue
        end = account.ended[name]
        facts = detail.prompt_tokens, detail.dead, detail.given_tokens
        yield from _differ(f"end of {name}", (facts, tuple(end)))
        if moment.output is not None:
            yield from _differ(f"output of {name}", (detail.output_tokens, moment.output[name]))


def pressure_contradictions(
    status: wire.Status, rows: Sequence[wire.RequestRow] = ()
) -> Iterator[str]:
    """Those within one status, and with the `rows` of its moment, if given."""
    found, memory = status.fragmentation, status.pressure
    for text in (found.sentence, situation(status, 79)):
        yield from sentence_contradictions(status, text)
    yield from advice_contradictions(status)
    if memory is None:
        return
    short, cause = memory.short_blocks, found.cause
    terms = memory.growth_blocks + memory.asked_blocks
    needed = terms + memory.headroom_blocks if terms else 0
    if memory.asked_blocks:
        later = memory.asked_blocks + memory.future_blocks - memory.givable_blocks
        needed = max(needed, later)
    yield from _differ("short and its terms", (short, max(0, needed - status.blocks.free)))
    yield from _differ("short and what ends it", (bool(short), bool(memory.waits_for)))
    if short and cause == "ok":
        yield f"cause and short: ok and {short}"
    if cause == "fragmented" and found.reclaimable_blocks < short:
        yield f"fragmented and reclaimable: {found.reclaimable_blocks} of {short}"
    if memory.waits_for == "giving" and memory.givable_blocks < short:
        yield f"giving and givable: {memory.givable_blocks} of {short}"
    if memory.waits_for == "end":
        free = status.blocks.free + memory.givable_blocks
        enough = memory.asked_blocks + memory.future_blocks <= free
        if enough and memory.givable_blocks >= short:
            yield f"waits for an end, although enough can be given: {memory}"
    if memory.waits_for == "resume" and status.reclamation.state == "auto":
        yield "waits for resume while reclamation is auto"
    if memory.givable_tokens > memory.spared_tokens:
        yield f"givable and above the floors: {memory.givable_tokens} and {memory.spared_tokens}"
    if rows:
        give = [row for row in rows if row.givable_tokens]
        yield from _differ("givers", (memory.givers, len(give)))
        tokens = sum(row.givable_tokens for row in give)
        yield from _differ("givable tokens", (memory.givable_tokens, tokens))
        for row in give:
            if row.givable_tokens > row.live - row.budget_tokens:
                facts = row.givable_tokens, row.live, row.budget_tokens
                yield f"givable, live and floor of {row.id}: {facts}"


NUMBER = r"([\d,]+)"


def _numbers(where: str, text: str, expected: Mapping[str, Any]) -> Iterator[str]:
    """The numbers of `text` that differ; `expected`: pattern with one group -> number."""
    for pattern, number in expected.items():
        match = re.search(pattern, text)
        if match is not None and int(match[1].replace(",", "")) != number:
            yield f"{where}, {pattern}: {text!r} and {number}"


def sentence_contradictions(status: wire.Status, text: str) -> Iterator[str]:
    """Numbers and words of the sentence `text` against the fields beside it."""
    memory, blocks = status.pressure, status.blocks
    cause, requests, first = status.fragmentation.cause, status.requests, status.requests.first
    used = round(100 * (1 - blocks.free / max(1, blocks.total)))
    named: dict[str, Any] = {
        rf"{NUMBER}% of the pool in use": used,
        rf"{NUMBER} free[,:]": blocks.free,
        rf"{NUMBER} waits?\b": requests.waiting,
        rf"needs {NUMBER} block": 0 if first is None else first.needed_blocks,
    }
    if memory is not None:
        enough = blocks.free + memory.givable_blocks
        lasting = memory.waits_for == "end" and memory.asked_blocks + memory.future_blocks > enough
        others = memory.future_blocks if lasting else memory.growth_blocks
        named |= {
            rf"{NUMBER}(?: blocks?)? missing": memory.short_blocks,
            rf"needs {NUMBER} block": memory.asked_blocks,
            rf"{NUMBER} for running ones": others,
            rf"running ones need {NUMBER} block": memory.growth_blocks,
            rf"need {NUMBER} in all": memory.asked_blocks + memory.future_blocks,
            rf"{NUMBER} reserve": memory.headroom_blocks,
            rf"{NUMBER} can be given": memory.givable_blocks,
            rf"{NUMBER} gave": memory.recent_givers,
            rf"gave {NUMBER} token": memory.recent_tokens,
        }
    parking = status.parking
    parked, back = (0, 0) if parking is None else (parking.tokens, parking.back_tokens)
    named |= {
        rf"{NUMBER} tokens? parked": parked,
        rf"{NUMBER} of [\d,]+ parked": back,
        rf"of {NUMBER} parked": back + parked,
    }
    yield from _numbers("sentence", text, named)
    head = text.split(":")[0].split(" ")[0]
    heads = {"ok": {"OK", "IDLE", "Memory"}, "fragmented": {"FRAGMENTED", "GIVING", "SHORT"}}
    if head not in ("PAUSED", "OFF") and head not in heads.get(
        cause, {"FULL", "SHORT", "GIVING", "IDLE"}
    ):
        yield f"head and cause: {text!r} and {cause}"
    paused = status.reclamation.state != "auto"
    running = status.scheduling == "running" and head != "IDLE"
    is_free = parking is not None and back > 0 and parking.waits_for != "memory"
    if (head == "Memory") != (is_free and cause == "ok" and running and not paused):
        yield f"head and what is back: {text!r} and {back}"
    if len(text) > 180:
        yield f"length of the sentence: {len(text)}"
    if memory is None:
        return
    if "not for want of blocks" in text and memory.asked_blocks:
        yield f"what is waited for: {text!r} and {memory.asked_blocks}"
    if head == "FULL" and memory.givers:
        yield f"full and givers: {text!r} and {memory.givers}"
    if "missing" in text and not memory.short_blocks:
        yield f"missing and short: {text!r} and 0"
    if head == "GIVING" and "missing" in text and memory.waits_for != "giving":
        yield f"head and what ends it: {text!r} and {memory.waits_for}"
    if running and ("nobody gives" in text) != paused:
        yield f"pause: {text!r} and {status.reclamation.state}"


def advice_contradictions(status: wire.Status) -> Iterator[str]:
    """Advice against the sentence and the fields beside it."""
    text, relief = status.fragmentation.sentence, status.relief
    levels = [one.level for one in status.advice]
    worst = levels[0] if levels else "note"
    head = text.split(":")[0].split(" ")[0]
    is_short = head in ("SHORT", "FULL", "FRAGMENTED") or "missing" in text
    if levels != sorted(levels, key=("short", "near", "note").index):
        yield f"order of the advice: {levels}"
    if is_short and status.pressure is not None and worst == "note" and relief is not None:
        yield f"no remedy: {text!r}"
    if head in ("OK", "IDLE", "Memory") and worst == "short":
        yield f"remedies for nothing: {text!r} and {status.advice}"
    for one in status.advice:
        if one.level == "note":
            continue
        missing = re.search(rf"of {NUMBER} missing", one.text)
        if missing is not None and int(missing[1].replace(",", "")) > _freed(one.text):
            yield f"compaction and missing: {one.text!r}"
        if one.code == "floor" and status.pressure is not None:
            (then,) = re.findall(rf"{NUMBER} blocks? can be given", one.text)
            if int(then.replace(",", "")) <= status.pressure.givable_blocks:
                yield f"floor and givable: {one.text!r} and {status.pressure.givable_blocks}"
        if one.code == "resume" and status.reclamation.state == "auto":
            yield f"resume: {one.text!r} and auto"
        waiting = re.search(rf"{NUMBER} of {NUMBER} can start", one.text)
        if waiting is not None and not (
            0 <= int(waiting[1]) <= int(waiting[2]) == status.requests.waiting
        ):
            yield f"waiting: {one.text!r} and {status.requests.waiting}"
        if waiting is not None and "not for want of blocks" in text:
            yield f"who can start: {one.text!r} and {text!r}"


def _freed(text: str) -> int:
    (freed,) = re.findall(rf"frees {NUMBER} block", text)
    return int(freed.replace(",", ""))


def _configuration(said: Said) -> Iterator[str]:
    status, values = said.status, said.config.desired
    yield from _differ("policy", (status.policy, values.policy))
    yield from _differ("budget ratio", (status.budget_ratio, values.budget_ratio))
    interval = 0 if values.evict_when == "pressure" else values.interval_tokens
    yield from _differ("interval", (status.interval_tokens, interval))
    yield from _differ("theta_F", (status.fragmentation.theta_f, values.theta_f))
    yield from _differ("reclamation", (status.reclamation.state, values.reclamation))
    yield from _differ("revision", (status.config_revision, said.config.revision))
    under_pressure = values.evict_when == "pressure" and values.policy.name != "none"
    if under_pressure and status.pressure is None:
        yield "mode: evict_when is pressure, and the status has no pressure"


def _events(said: Said, account: Account) -> Iterator[str]:
    if not said.events:
        return
    status, by_kind = said.status, Counter(event.kind for event in said.events)
    evictions = [event for event in said.events if event.kind == "eviction"]
    tokens = sum(event.data["tokens"] for event in evictions)
    given = sum(event.data.get("given", 0) for event in evictions)
    yield from _differ("events of evictions", (tokens, account.evicted), (given, account.given))
    yield from _differ("events of preemptions", (by_kind["preemption"], account.preempted.total()))
    changes = sum(event.kind == "config" and bool(event.data["changes"]) for event in said.events)
    yield from _differ("events of changes", (changes, status.config_revision - 1))
    policies = {status.policy.name, "streaming_llm"}  # the second: of requests with their own
    for event in evictions:
        if not set(event.data["policy"].split(", ")) <= policies:
            yield f"policy of an eviction: {event.data['policy']} and {policies}"
    moved = sum(e.data["moved_tokens"] for e in said.events if e.kind == "relocation")
    yield from _differ("events of relocations", (moved, status.reclamation.moved_tokens))


def _dry_run(said: Said) -> Iterator[str]:
    if said.dry_run is None:
        return
    what_if, memory = said.dry_run.what_if, said.status.pressure
    assert what_if is not None
    if memory is not None:
        mine = what_if.short_blocks, what_if.givable_blocks, what_if.givable_tokens
        theirs = memory.short_blocks, memory.givable_blocks, memory.givable_tokens
        yield from _differ("dry run and pressure", (mine, theirs))
    without = getattr(what_if, "without_change", None)
    if without is None:
        yield "dry run: it does not say what happens without the change"
        return
    names = "evicted_tokens", "freed_blocks", "givable_blocks", "restored_tokens", "dropped_tokens"
    mine, theirs = ([getattr(of, name) for name in names] for of in (what_if, without))
    yield from _differ("dry run without a difference", (mine, theirs))


def _scraped(said: Said) -> Iterator[str]:
    if not said.metrics:
        return
    for metric in METRICS:
        if metric.kind == "histogram" or metric.name in WINDOWED or "seconds" in metric.name:
            continue
        name = f"vllm:vtoken_{metric.name}" + ("_total" if metric.kind == "counter" else "")
        for labels, value in metric.read(said.status):
            assert not hasattr(value, "cumulative")
            series = [key for key in said.metrics if key.startswith(f"{name}{{")]
            found = [
                said.metrics[key] for key in series if all(f'"{label}"' in key for label in labels)
            ]
            yield from _differ(f"metric {metric.name} {labels}", (found, [value]))


class Server(NamedTuple):
    """What an API process adds to the documents of its engine."""

    engines: Sequence[wire.EngineRow]
    audit: Sequence[wire.AuditEntry]
    block: wire.BlockDetail


def server_contradictions(said: Said, server: Server) -> Iterator[str]:
    """Engines, audit log and one block against the engine's documents of the same moment."""
    status, block = said.status, server.block
    (row,) = server.engines
    assert row.status is not None
    yield from _differ("engines, revision", (row.revision, status.config_revision))
    yield from _differ("engines, blocks", (row.status.blocks, status.blocks))
    yield from _differ("engines, tokens", (row.status.tokens, status.tokens))
    changes = [entry for entry in server.audit if entry.changes and not entry.dry_run]
    yield from _differ("audit, changes", (len(changes), status.config_revision - 1))
    live = int(wire.unpack_array(said.blocks.live, "<u2")[block.id])
    states = Counter(slot.state for slot in block.slots)
    yield from _differ(f"block {block.id}", (block.live, live), (states["live"], live))
    rows = {row.id for row in said.rows}
    if not {owner.request_id for owner in block.owners} <= rows:
        yield f"owners of block {block.id}: {block.owners} and {rows}"
    flags = int(wire.unpack_array(said.blocks.flags, "u1")[block.id])
    yield from _differ(f"flags of block {block.id}", (block.flags, flags))


def lines_contradictions(command: str, text: str, said: Said, account: Account) -> Iterator[str]:
    """The output of a command against the documents of its moment."""
    status, memory = said.status, said.status.pressure
    expected: dict[str, Any] = {}
    if command == "status":
        expected = {
            rf"{NUMBER} free of": status.blocks.free,
            rf"free of {NUMBER}": status.blocks.total,
            rf"{NUMBER} running": status.requests.running,
            rf"{NUMBER} waiting": status.requests.waiting,
            rf"{NUMBER} preempted,": account.preempted.total(),
            rf"{NUMBER} finished": len(account.ended),
            rf"{NUMBER} evicted": account.evicted,
        }
        if memory is not None:
            expected |= {
                rf"pressure +{NUMBER} blocks? short": memory.short_blocks,
                rf"{NUMBER} requests? can give": memory.givers,
                rf"can give {NUMBER} block": memory.givable_blocks,
                rf"{NUMBER} given since the start": account.given,
            }
            if "no block is short" in text and memory.short_blocks:
                yield f"status, no block is short: {memory.short_blocks}"
            if "no request can give" in text and memory.givers:
                yield f"status, no request can give: {memory.givers}"
    elif command == "doctor":
        expected = {rf"{NUMBER} tokens evicted": account.evicted}
        exceeds = [row.id for row in said.rows if row.live > row.budget_tokens]
        if "no request exceeds" in text and exceeds:
            yield f"doctor, no request exceeds its budget: {exceeds}"
        if "✖" in text.replace("✖ memory: ", ""):
            yield f"doctor: {text}"
    elif command == "requests":
        for row in said.rows:
            if short_id(row.id) not in text:
                yield f"requests: {row.id} has no line"
    yield from _numbers(command, text, expected)


def screen_contradictions(text: str, said: Said) -> Iterator[str]:
    """The first frame of the console against the documents of its moment."""
    status, memory = said.status, said.status.pressure
    expected = {
        rf"free +{NUMBER}/": status.blocks.free,
        rf"free +[\d,]+/{NUMBER}": status.blocks.total,
        rf"run +{NUMBER}": status.requests.running,
        rf"wait +{NUMBER}": status.requests.waiting,
    }
    if memory is not None:
        expected |= {
            rf"(?i)short +{NUMBER} growth": memory.short_blocks,
            rf"growth +{NUMBER}": memory.growth_blocks,
            rf"asked +{NUMBER}": memory.asked_blocks,
        }
    yield from _numbers("console", text, expected)
    if "no configuration change" in text and status.config_revision > 1:
        yield f"console, no configuration change: revision {status.config_revision}"
