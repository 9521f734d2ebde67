"""What an operator can do about a status: one clause each, with figures, and the change, command or
key that does it.

A pure function of documents. The figures of remedies are those that the engine's planner found
(`Status.relief`); whoever has an observation of their own adds a rule here. A rule is silent while
nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vtoken.sentences import (
    MANY_WASTED_MOVES,
    accepted_before,
    counted,
    drafts_text,
    kinds_text,
    sessions_text,
    span,
    value_text,
)
from vtoken.sentences.situation import level, missing_blocks, seconds_text, situation, stopped
from vtoken.wire import Advice, ConfigDocument, void_settings
from vtoken.wire.settings import MAX_PARK_BYTES

if TYPE_CHECKING:
    from vtoken.wire import AdviceLevel, Relief, Remedy, Status

LEVELS = ("short", "near", "note")
TRIAL = "--confirm-within 10m"  # what is tried reverts by itself
FLOORS = {"budget_ratio", "budget_floor_tokens", "budget_tokens"}
FORGOTTEN_TRIAL_S = 600
OLD_CHANGE_S = 600  # a setting without effect is told so long after it was made
MANY_CAPPED = 0.05  # of the finished requests
FEW_ACCEPTED = 0.3  # of the drafts
FEWER_ACCEPTED = 0.1  # of the drafts, than before
FEW_HITS = 0.1  # of the tokens that looked into the prefix cache
MANY_PREEMPTED = 0.01  # of the finished requests
MOST_KEPT = 0.9  # of their tokens, by finished requests
MANY_THRASHED = 0.05  # of the restored tokens
FULL = 0.9  # of the host memory for parked tokens
MANY_ENDED = 20  # requests: fewer say little
IDLE_MEMORY = 0.5  # most used share within a day
ENOUGH = 1000  # tokens, or requests: fewer say little


def advise(status: Status, config: ConfigDocument | None = None) -> list[Advice]:
    """What can be done, worst first; [] while nothing is wrong. `config`: of the same engine."""
    found = [*_relieving(status), *_notes(status, config)]
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def put_into_words(status: Status, config: ConfigDocument | None = None) -> None:
    """Fill in the sentence and the advice of a status."""
    status.advice = advise(status, config)
    first = next((one.text for one in status.advice if one.level != "note"), "")
    status.fragmentation.sentence = situation(status)
    status.fragmentation.advice = first
    if status.pressure is not None:
        status.pressure.advice = first


# ---------------------------------------------------------------- memory


def _relieving(status: Status) -> Iterator[Advice]:
    """The ways out of a memory that is short or nearly so, the quickest first."""
    urgency, relief = level(status), status.relief
    if urgency is None or relief is None:
        return
    yield from _compacting(status, urgency)
    remedies = [remedy for remedy in relief.remedies if _still_helps(status, remedy)]
    for remedy in remedies:
        yield _remedy(status, remedy, urgency)
    if urgency == "short" or not remedies:
        yield from _at_hand(status, relief, urgency)


def _still_helps(status: Status, remedy: Remedy) -> bool:
    """Whether a remedy, found up to a second ago, gives more than can be given now."""
    memory, is_floor = status.pressure, remedy.change.keys() <= FLOORS
    return not is_floor or memory is None or remedy.givable_blocks > memory.givable_blocks


def _compacting(status: Status, urgency: AdviceLevel) -> Iterator[Advice]:
    found = status.fragmentation
    if found.cause == "fragmented" and found.reclaimable_blocks:
        missing = missing_blocks(status)
        text = f"compacting now frees {counted(found.reclaimable_blocks, 'block')}"
        text += f" of {missing:,} missing" if missing else ""
        yield Advice("compact", urgency, text, command="vtoken compact", action="compact")


def _remedy(status: Status, remedy: Remedy, urgency: AdviceLevel) -> Advice:
    """A change of the configuration, with what it brings."""
    change, gives = remedy.change, counted(remedy.givable_blocks, "block")
    result = f"{gives} {'come free' if status.evict_when == 'always' else 'can be given'}"
    if first := status.requests.first:  # else nobody waits for blocks
        starts = f"{remedy.startable_requests:,} of {status.requests.waiting:,} can start"
        left_s = first.patience_s
        if left_s > 0 and remedy.startable_requests and "evict_after_wait_ms" not in change:
            starts += f" in {seconds_text(left_s)}"
        result = f"{starts}, {result}"
    if remedy.freed_blocks:
        frees = counted(remedy.freed_blocks, "block")
        text = f"with {_assigned(change)} a compaction frees {frees} by itself"
        return Advice("compaction", urgency, text, change, _set(change))
    if change.keys() <= FLOORS:
        text = f"{_floor_change(status, change)}: {result}"
        return Advice("floor", urgency, text, change, _set(change), "floor")
    if "evict_after_wait_ms" in change:
        return Advice("patience", urgency, f"without patience: {result}", change, _set(change))
    if "evict_per_token_left" in change:
        text = f"with {_assigned(change)} also of those that end soon: {result}"
        return Advice("giving", urgency, text, change, _set(change))
    if "policy" in change:
        text = f"with policy {change['policy']['name']}: {result}"
        return Advice("policy", urgency, text, change, _set(change), "policy")
    return Advice("resume", urgency, f"resumed: {result}", change, "vtoken resume", "pause")


def _floor_change(status: Status, change: Mapping[str, Any]) -> str:
    """`floor 50% → 33%, least 256 → 170`, `floor 256 → 170 tokens`."""
    parts, floor = [], "budget" if status.evict_when == "always" else "floor"
    if "budget_ratio" in change:
        old, new = 100 * status.budget_ratio, 100 * change["budget_ratio"]
        parts.append(f"{floor} {old:g}% → {new:g}%")
    if "budget_floor_tokens" in change:
        parts.append(f"least {status.budget_floor_tokens:,} → {change['budget_floor_tokens']:,}")
    if "budget_tokens" in change:
        parts.append(f"{floor} {status.budget_tokens:,} → {change['budget_tokens']:,} tokens")
    return ", ".join(parts)


def _at_hand(status: Status, relief: Relief, urgency: AdviceLevel) -> Iterator[Advice]:
    """What ends a shortage without a change of the configuration."""
    requests, memory = status.requests, status.pressure
    if requests.sessions:
        hold = sessions_text(requests.sessions, requests.session_blocks, status.blocks.total)
        yield Advice("session", urgency, f"{hold}: end one", command="vtoken end REQUEST")
    others = [group for group in status.groups if not group.managed]
    held, total = (sum(group.blocks for group in of) for of in (others, status.groups))
    if 2 * held > total:
        text = f"{kinds_text(others)} hold {held:,} of {total:,} used blocks, which nobody can give"
        yield Advice("groups", urgency, text)
    if memory is not None and memory.waits_for in ("resume", "patience"):
        return
    if relief.memory_bytes:
        blocks = counted(relief.missing_blocks, "more block")
        size = f"{-(-relief.memory_bytes // 1_000_000):,}M".replace(",", "")
        text = f"start with --kv-cache-memory-bytes {size}: {blocks}, enough for all"
        yield Advice("memory", urgency, text)
    if requests.running:
        more = relief.startable_requests if requests.first else relief.more_requests or 0
        fit = requests.running + more
        text = f"{counted(fit, 'request')} fit at once: with no more nobody waits"
        yield Advice("requests", urgency, text)


def _assigned(change: Mapping[str, Any], prefix: str = "") -> str:
    """`budget_ratio=0.33 policy.name=keydiff`, as `config set` takes it."""
    pairs = []
    for name, value in change.items():
        if isinstance(value, dict):
            pairs.append(_assigned(value, f"{prefix}{name}."))
        else:
            pairs.append(f"{prefix}{name}={value_text(value)}")
    return " ".join(filter(None, pairs))


def _set(change: Mapping[str, Any]) -> str:
    return f"vtoken config set {_assigned(change)} {TRIAL}"


# ---------------------------------------------------------------- notes


def _notes(status: Status, config: ConfigDocument | None) -> Iterator[Advice]:
    """What is worth a look although nobody waits for it."""
    if level(status) is None and (by := stopped(status)):
        holds = "holes stay" if status.pressure is None else "nobody gives if memory gets short"
        text = f"reclamation {by}: {holds}"
        yield Advice("resume", "note", text, {"reclamation": "auto"}, "vtoken resume", "pause")
    if config is not None:
        yield from _of_config(status, config)
    yield from _of_parking(status, config)
    yield from _of_moves(status)
    yield from _of_quality(status)
    yield from _of_traffic(status)


def _of_config(status: Status, config: ConfigDocument) -> Iterator[Advice]:
    """A trial that nobody ends, and a change that has no effect."""
    trial, made = config.trial, config.made
    if trial is not None and status.ts - trial.started_ts >= FORGOTTEN_TRIAL_S:
        ends = ""
        if trial.expires_ts is not None:
            ends = f" and reverts in {span(max(0.0, trial.expires_ts - status.ts))}"
        text = f"revision {trial.revision} is on trial for {span(status.ts - trial.started_ts)}"
        yield Advice("trial", "note", f"{text}{ends}", command="vtoken confirm", action="confirm")
    if made is None or status.ts - made.ts > OLD_CHANGE_S:
        return
    voids = void_settings(config.desired)
    for name in made.fields:
        if name in voids:
            text = f"{name} has {voids[name]} ({made.actor} {span(status.ts - made.ts)} ago)"
            yield Advice("void", "note", text, command="vtoken undo", action="undo")


def _of_parking(status: Status, config: ConfigDocument | None) -> Iterator[Advice]:
    """Tokens that gave way and do not come back, or come back too early."""
    parking, memory = status.parking, status.pressure
    if parking is None:
        given = 0 if memory is None else memory.given_tokens
        if config is not None and not config.desired.park_bytes and given >= ENOUGH:
            text = f"{given:,} tokens gave way for good: parked in host memory they come back"
            yield _host_memory(text, _pool_bytes(status))
        return
    most = parking.capacity_bytes
    if parking.fault:
        text = f"the host refused memory, nothing is parked: {parking.fault}"
        yield _host_memory(text, parking.peak_bytes)
    elif parking.dropped_tokens and FULL * most <= parking.peak_bytes <= most:
        text = f"{parking.dropped_tokens:,} tokens lost for want of host memory: it was full"
        yield _host_memory(text, 2 * most)
    thrashed = parking.thrashed_tokens / max(1, parking.restored_tokens)
    if parking.restored_tokens >= ENOUGH and thrashed > MANY_THRASHED and config is not None:
        change = {"restore_after_ms": 2 * max(500, config.desired.restore_after_ms)}
        text = f"{thrashed:.0%} of the restored tokens gave way again within 5 s: wait longer"
        yield Advice("thrash", "note", text, change, _set(change))


def _host_memory(text: str, num_bytes: int) -> Advice:
    """A note with the host memory for parked tokens that helps; 0: the figure is not known."""
    if not num_bytes:
        return Advice("parking", "note", text, command="vtoken config set park_bytes=N --dry-run")
    change = {"park_bytes": min(num_bytes, MAX_PARK_BYTES)}
    return Advice("parking", "note", text, change, _set(change))


def _pool_bytes(status: Status) -> int:
    """The size of the pool, from what was moved in it; 0 while nothing was."""
    done = status.reclamation
    if not done.moved_tokens:
        return 0
    return status.blocks.total * status.block_size * done.moved_bytes // done.moved_tokens


def _of_moves(status: Status) -> Iterator[Advice]:
    """Tokens that were moved shortly before they died, and preemptions for want of a headroom."""
    done, memory, requests = status.reclamation, status.pressure, status.requests
    wasted = done.moved_then_evicted_tokens / max(1, done.moved_tokens)
    if done.moved_tokens >= ENOUGH and wasted > MANY_WASTED_MOVES:
        text = f"{wasted:.0%} of {done.moved_tokens:,} moved tokens died soon after"
        command = "vtoken config set interval_tokens=N --dry-run"
        yield Advice("moves", "note", f"{text}: raise interval_tokens", {}, command)
    early = 0 if memory is None else memory.preemptions_above_floor
    if early > MANY_PREEMPTED * (requests.finished + requests.preempted):
        headroom = min(2 * max(1, status.blocks.headroom), status.blocks.total // 2)
        change = {"headroom_blocks": headroom}
        text = f"{early:,} preempted while others could give: more reserve than"
        text += f" {counted(status.blocks.headroom, 'block')} helps"
        if headroom > status.blocks.headroom:
            yield Advice("preemptions", "note", text, change, _set(change))


def _of_quality(status: Status) -> Iterator[Advice]:
    """Answers that lose many tokens, unchecked."""
    memory = status.pressure
    ended = 0 if memory is None else sum(memory.kept_shares.values())
    if memory is None or ended < MANY_ENDED or status.canary is not None:
        return
    kept = memory.kept_share_sum / ended
    if kept < MOST_KEPT:
        change = {"canary": {"share": 0.01}}
        text = f"requests keep {kept:.0%} of their tokens, and no canary checks their answers"
        yield Advice("canary", "note", text, change, f"vtoken config set {_assigned(change)}")


def _of_traffic(status: Status) -> Iterator[Advice]:
    """What vLLM knows of its requests."""
    serving, requests = status.serving, status.requests
    peaks = {peak.name: peak.value for peak in status.peaks}
    used = peaks.get("used_share", 1.0)
    if used < IDLE_MEMORY and requests.finished >= ENOUGH:
        text = f"at most {used:.0%} of the pool used in a day"
        yield Advice("idle", "note", f"{text}: more requests fit, or less memory does")
    if serving is None:
        return
    capped = serving.length_capped / max(1, requests.finished)
    if serving.length_capped and capped > MANY_CAPPED:
        text = (
            f"{capped:.0%} of the answers end at the length of the context: raise --max-model-len"
        )
        yield Advice("length", "note", text)
    yield from _of_drafts(status)
    asked, hit = serving.prefix_query_tokens, serving.prefix_hit_tokens
    if asked >= ENOUGH and 0 < hit < FEW_HITS * asked:
        text = f"{hit / asked:.0%} of the prompts' tokens hit the prefix cache"
        yield Advice("prefix", "note", f"{text}: more memory keeps more of them")


def _of_drafts(status: Status) -> Iterator[Advice]:
    """Drafts that are rejected more often since the newest revision, or mostly."""
    newest, before = status.drafts_in_force, accepted_before(status.drafts)
    if newest is None or newest.share is None:
        return
    if before is not None and newest.share < before - FEWER_ACCEPTED:
        text = f"drafts: {drafts_text(status.drafts)}: slower, not wrong"
        yield Advice("drafts", "note", text)
    elif newest.share < FEW_ACCEPTED:
        text = f"{newest.share:.0%} of {newest.proposed_tokens:,} drafts are accepted"
        yield Advice("drafts", "note", f"{text}: draft fewer or none")
