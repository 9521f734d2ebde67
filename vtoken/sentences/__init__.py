"""Documents as sentences: the words that command line, console and events have in common.

Whoever shows them adds colours, columns and line breaks of its own.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vtoken.base.quantities import time_text
from vtoken.base.request_ids import short_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from vtoken import wire

MANY_WASTED_MOVES = 0.25  # of the moved tokens


def counted(number: int, noun: str) -> str:
    """`1 block`, `1,024 blocks`."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    """The form of `noun` behind `number`."""
    return noun + "s" * (number != 1)


def sessions_text(number: int, blocks: int, total: int) -> str:
    """`3 sessions hold 30 of 32 blocks and give nothing`; "" without sessions."""
    if number == 0:
        return ""
    hold, give = ("holds", "gives") if number == 1 else ("hold", "give")
    return f"{counted(number, 'session')} {hold} {blocks:,} of {total:,} blocks and {give} nothing"


def state_text(row: wire.RequestRow) -> str:
    """`running`, `idle session`."""
    return f"{row.state} session" if row.session else row.state


def flag_words(flags: int) -> list[str]:
    """What the flags of a block say beside that it is used, what pins it first."""
    from vtoken import wire  # here, to keep the console's first frame fast

    names = (
        (wire.FLAG_SHARED, "shared"),
        (wire.FLAG_HASHED, "in prefix cache"),
        (wire.FLAG_IN_FLIGHT, "moving"),
        (wire.FLAG_TAIL, "being filled"),
        (wire.FLAG_OTHER, "of another group of layers"),
        (wire.FLAG_NULL, "vLLM's null block"),
    )
    return [word for bit, word in names if flags & bit]


KINDS: dict[wire.GroupKind, str] = {
    "full": "full attention",
    "window": "windows",
    "chunked": "chunks",
    "state": "states",
}


def kinds_text(groups: Iterable[wire.CacheGroup]) -> str:
    """The kinds of `groups`, each once: `windows and states`."""
    return " and ".join(dict.fromkeys(KINDS[group.kind] for group in groups))


def group_text(group: wire.CacheGroup) -> str:
    """`windows: 320 blocks of 16 slots in 40 layers (5.2 MB)`."""
    return (
        f"{KINDS[group.kind]}: {counted(group.blocks, 'block')} of {group.block_size:,} slots in "
        f"{counted(group.layers, 'layer')} ({data_size(group.bytes)})"
    )


def data_size(num_bytes: float) -> str:
    """Bytes in decimal units: `512 B`, `1.9 MB`."""
    number = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 999.5:
            digits = 0 if unit == "B" or number >= 99.95 else 1
            return f"{number:.{digits}f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def clock(ts: float) -> str:
    """The local time of day of a Unix time: `14:02:11`."""
    return time.strftime("%H:%M:%S", time.localtime(ts))


def when(ts: float) -> str:
    """The time of day, with the date unless it is today."""
    then = time.localtime(ts)
    today = then[:3] == time.localtime()[:3]
    return clock(ts) if today else time.strftime("%Y-%m-%d %H:%M:%S", then)


def span(seconds: float) -> str:
    """A duration in its largest unit: `40 s`, `12 min`, `3 h`, `2 d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def duration_text(seconds: float) -> str:
    """An age or a wait: `0.4 s`, `17.3 s`, `3 min`."""
    return f"{max(0.0, seconds):.1f} s" if seconds < 120 else span(seconds)


# ---------------------------------------------------------------- changes


def change_text(changes: Mapping[str, list[Any]], arrow: str = "->") -> str:
    """Field -> [old, new] as `theta_f 0.4 -> 0.25, planner pack -> plug`."""
    return ", ".join(
        f"{name} {value_text(old)} {arrow} {value_text(new)}"
        for name, (old, new) in changes.items()
    )


def audit_text(entry: wire.AuditEntry, arrow: str = "->") -> str:
    """What a call that is entered changed, that it changed nothing, or what it was about."""
    if entry.action in ("config", "undo", "sync"):
        return change_text(entry.changes, arrow) or "nothing to change"
    if entry.action not in ("compact", "forget", "end", "restore"):
        return change_text(entry.changes, arrow)
    about = {name: new for name, (_, new) in entry.changes.items()}
    if "request_id" in about:
        about = {"request": short_id(about.pop("request_id")), **about}
    return ", ".join(f"{name} {value_text(value)}" for name, value in about.items())


def value_text(value: Any) -> str:
    """A configuration value as short text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict) and "name" in value:
        params = ", ".join(f"{k}={value_text(v)}" for k, v in value.get("params", {}).items())
        return f"{value['name']}({params})" if params else str(value["name"])
    if isinstance(value, dict):
        return ", ".join(f"{k}={value_text(v)}" for k, v in value.items())
    return str(value)


def since_text(result: wire.PatchResult) -> str:
    """`revision 3, in force from step 120 on`: since when a change that was made is in force."""
    since = "in force"
    if result.outcome != "in_force":
        since = f"in force from step {result.applied_at_step:,} on"
    return f"revision {result.revision}, {since}"


# ---------------------------------------------------------------- compactions


def operation_text(operation: wire.Operation) -> str:
    """The outcome of a compaction, or the plan of a dry run."""
    scope = f"request {short_id(operation.request_id)}" if operation.request_id else "all requests"
    plan, result = operation.plan, operation.result
    deferred = f"; deferred: {plan.deferred_reason}" if plan and plan.deferred_reason else ""
    if operation.dry_run and plan is not None:
        if not (plan.moved_tokens or plan.freed_blocks):
            return f"Dry run over {scope}: nothing would be moved{deferred}."
        return (
            f"Dry run over {scope}: would move {counted(plan.moved_tokens, 'token')} "
            f"({data_size(plan.moved_bytes)}) of {counted(plan.requests, 'request')} out of "
            f"{counted(plan.source_blocks, 'block')} and free {plan.freed_blocks:,}{deferred}."
        )
    if operation.state == "done" and result is not None:
        if not (result.moved_tokens or result.freed_blocks):
            return f"Compacted {scope}: there was nothing to move{deferred}."
        return (
            f"Compacted {scope}: moved {counted(result.moved_tokens, 'token')} "
            f"({data_size(result.moved_bytes)}), freed {counted(result.freed_blocks, 'block')} "
            f"in {time_text(result.duration_ms)}{deferred}."
        )
    reason = operation.error or (plan.deferred_reason if plan else None)
    text = f"Compaction {operation.id} over {scope} is {operation.state}"
    return f"{text}: {reason}" if reason else f"{text}."


# ---------------------------------------------------------------- parts of a status


def policy_text(status: wire.Status) -> str:
    """The policy, when it evicts, and what a request keeps."""
    if status.policy.name == "none":
        return "none, evicts nothing"
    modes = {"pressure": " while memory is short", "always": " always", None: ""}
    mode = modes[status.evict_when]
    return f"{status.policy.name}{mode}: {budget_text(status)}"


def budget_text(status: wire.Status) -> str:
    """What a request without rules of its own keeps: `floor 50% of prompt, at least 128 tokens`, or
    `budget 2,048 (+128) tokens`, which evicts above 2,176. Only its first part is needed.
    """
    if status.evict_when == "pressure":
        word, interval = "floor", ""
    else:
        word, interval = "budget", f" (+{status.interval_tokens:,})"
    if not status.budget_ratio:
        return f"{word} {status.budget_tokens:,}{interval} tokens"
    share = f"{status.budget_ratio * 100:g}% of prompt{interval}"
    return f"{word} {share}, at least {status.budget_floor_tokens:,} tokens"


def slo_text(slo: wire.Slo) -> str:
    """`93% of 120 requests met ttft<2s (last 60 s)`."""
    if slo.share is None:
        return f"{slo.text}: no request has ended in the last {slo.window_s:g} s"
    requests = counted(slo.count, "request")
    return f"{slo.share:.0%} of {requests} met {slo.text} (last {slo.window_s:g} s)"


PEAKS: dict[wire.PeakName, Callable[[float], str]] = {
    "waiting": lambda value: f"{value:,.0f} waiting",
    "short_blocks": lambda value: f"{counted(round(value), 'block')} missing",
    "used_share": lambda value: f"{value:.0%} used",
    "ttft_p95_ms": lambda value: f"first token p95 {time_text(value)}",
    "inter_token_p95_ms": lambda value: f"between tokens p95 {time_text(value)}",
}


def peaks_text(peaks: Sequence[wire.Peak]) -> str:
    """`14 waiting at 03:12:11, 98% used at 03:12:40`."""
    return ", ".join(f"{PEAKS[peak.name](peak.value)} at {when(peak.ts)}" for peak in peaks)


def prices_text(prices: wire.RoundPrices) -> str:
    """The prices with their sources, and what a round would save and cost now."""
    named = {"hole": prices.hole, "copy": prices.copy, "plan": prices.plan}
    host = {"park": prices.park, "restore": prices.restore}
    named |= {name: p for name, p in host.items() if p is not None and p.source == "measured"}
    if all(price.source == "prior" for price in named.values()):
        return "nothing measured yet"
    found = ", ".join(f"{name} {_price(price)}" for name, price in named.items())
    if prices.hole.source == "prior":
        return found
    if not prices.hole.us:
        return f"{found}; holes cost nothing here"
    if not prices.saving_us:
        return f"{found}; a round now would save nothing"
    saving, cost = time_text(prices.saving_us / 1e3), time_text(prices.cost_us / 1e3)
    return f"{found}; a round now would save {saving} and cost {cost}"


def _price(price: wire.Price) -> str:
    if price.source == "prior" and not price.us:
        return "not measured"
    source = "assumed" if price.source == "prior" else f"{price.samples:,} samples"
    return f"{time_text(price.us / 1e3)} a {price.per} ({source})"


def drafts_text(drafts: Sequence[wire.DraftFigures]) -> str:
    """`61% accepted since revision 7, 74% before`; `drafts` are not empty."""
    newest, before = drafts[0], accepted_before(drafts)
    share = f"{newest.accepted_tokens:,} of {newest.proposed_tokens:,}"
    if newest.share is not None:
        share = f"{newest.share:.0%}"
    text = f"{share} accepted since revision {newest.revision}"
    return text if before is None else f"{text}, {before:.0%} before"


def accepted_before(drafts: Sequence[wire.DraftFigures]) -> float | None:
    """The share of the newest earlier revision with enough drafts to say."""
    return next((one.share for one in drafts[1:] if one.share is not None), None)


def signal_text(found: wire.SignalLayers) -> str:
    """`key_difference from layer 14 (default depth)`; "" if the policy has no signal."""
    if found.signal is None:
        return ""
    layers, heads = ", ".join(map(str, found.layers)), ", ".join(map(str, found.heads))
    where = f"layer{'s' * (len(found.layers) > 1)} {layers}"
    if heads:
        where += f", head{'s' * (len(found.heads) > 1)} {heads}"
    return f"{found.signal} from {where} ({found.source})"


# ---------------------------------------------------------------- several engines

MANY_WAITING = 8  # fewer on one engine are no imbalance
MANY_SAMPLES = 20  # of a latency; fewer say little
IMBALANCE = 3.0  # times the mean of the others

Fault = Literal["silent", "version", "drift", "waiting", "memory", "latency"]


class Finding(NamedTuple):
    """What is wrong with some engines of a fleet; `members`: their places among its rows.

    `changed`: the places of those that have the change which `text` names, where one server's
    engines drift apart by it.
    """

    fault: Fault
    members: tuple[int, ...]
    text: str
    changed: tuple[int, ...] = ()


def fleet_sentence(rows: Sequence[wire.EngineRow], names: Sequence[str] = ()) -> str:
    """What is wrong with several engines as a whole, the worst first; else that they agree.

    `names` [len(rows)]: what the sentence calls them; by default `engine 0` and so on.
    """
    found = fleet_findings(rows, names)
    if found:
        return found[0].text + _remedy(rows, found[0].changed)
    return f"{counted(len(rows), 'engine')}, all answer and run the same configuration"


def _remedy(rows: Sequence[wire.EngineRow], changed: Sequence[int]) -> str:
    """The commands that give a change to all engines, or take it back."""
    if not changed:
        return ""
    engine = rows[changed[0]].engine
    undo = f", or vtoken undo --engine {engine}" if len(changed) == 1 else ""
    return f": vtoken sync --engine {engine}{undo}"


def fleet_findings(rows: Sequence[wire.EngineRow], names: Sequence[str] = ()) -> list[Finding]:
    """Everything that is wrong with several engines as a whole, the worst first."""
    fleet = _Fleet(rows, names or [f"engine {row.engine}" for row in rows])
    return [
        *fleet.silent(),
        *fleet.other_versions(),
        *fleet.drifted(),
        *fleet.waiting(),
        *fleet.short_of_memory(),
        *fleet.slow(),
    ]


class _Fleet:
    """The rules; those that compare engines do so with the mean of the others that answer."""

    def __init__(self, rows: Sequence[wire.EngineRow], names: Sequence[str]) -> None:
        self._rows = rows
        self._names = names
        self._live = {
            n: row.status
            for n, row in enumerate(rows)
            if row.status is not None and not row.problem
        }
        self._others = "the other" if len(self._live) == 2 else "the others"

    def silent(self) -> Iterator[Finding]:
        unknown: defaultdict[str, list[int]] = defaultdict(list)
        known = []
        for n, row in enumerate(self._rows):
            if row.problem and row.status is None:
                unknown[row.problem].append(n)
            elif row.problem:
                known.append(n)
        if known:
            age_s = max(self._rows[n].silent_s for n in known)
            text = f"{self._do(known)} not answer, the newest state is {age_s:,.0f} s old"
            yield Finding("silent", tuple(known), text)
        for problem, members in unknown.items():
            yield Finding("silent", tuple(members), f"{self._do(members)} not answer: {problem}")

    def other_versions(self) -> Iterator[Finding]:
        for what, versions in (
            ("vToken", {n: status.vtoken_version for n, status in self._live.items()}),
            ("vLLM", {n: status.vllm_version for n, status in self._live.items()}),
        ):
            if len(set(versions.values())) < 2:
                continue
            (usual, _), *_ = Counter(versions.values()).most_common(1)
            members = [n for n, version in versions.items() if version != usual]
            mine = ", ".join(dict.fromkeys(versions[n] for n in members))
            verb = "runs" if len(members) == 1 else "run"
            text = f"{self._called(members)} {verb} {what} {mine}, all others {usual}"
            yield Finding("version", tuple(members), text)

    def drifted(self) -> Iterator[Finding]:
        members = [n for n, row in enumerate(self._rows) if row.drift]
        if not members:
            return
        newest = max(row.revision for row in self._rows)
        new = [n for n, row in enumerate(self._rows) if row.revision == newest]
        old = [n for n, row in enumerate(self._rows) if row.revision != newest]
        one_server = all(name.startswith("engine ") for name in self._names)
        drift = self._rows[members[0]].drift
        changed: tuple[int, ...] = ()
        if one_server and old and members in (new, old, [*range(len(self._rows))]):
            text, changed = self._sides(new, old), tuple(new)
        elif len(members) == len(self._rows):
            text = f"{self._called(members)} differ: {change_text(drift, arrow='and')}"
        else:
            verb = "differs" if len(members) == 1 else "differ"
            what = change_text(drift, arrow="where the others have")
            text = f"{self._called(members)} {verb} from the others: {what}"
        yield Finding("drift", tuple(members), text, changed)

    def _sides(self, new: Sequence[int], old: Sequence[int]) -> str:
        """The change that `new` have and `old` do not: `root changed theta_f on engine 1 only, 40 s
        ago`; of an older server, which does not name it, both revisions.
        """
        row = self._rows[new[0]]
        if row.made is not None and row.status is not None:
            ago = f"{span(max(0.0, row.status.ts - row.made.ts))} ago"
            change = f"{row.made.actor} changed {', '.join(row.made.fields)}"
            if len(new) > len(old):
                return f"{change} {ago}, not on {self._called(old)}"
            return f"{change} on {self._called(new)} only, {ago}"
        before = ", ".join(f"{number}" for number in sorted({self._rows[n].revision for n in old}))
        verb = "runs" if len(new) == 1 else "run"
        others = "all others" if len(old) > 1 else self._called(old)
        return f"{self._called(new)} {verb} revision {row.revision}, {others} {before}"

    def waiting(self) -> Iterator[Finding]:
        values = {n: float(status.requests.waiting) for n, status in self._live.items()}
        if (found := self._highest(values)) is None or found.value < MANY_WAITING:
            return
        name, times = self._names[found.member], found.times
        if found.mean < 1:
            text = f"{name} has {found.value:,.0f} waiting requests, {self._others} none or few"
        else:
            text = f"{name} holds {times:.0f} times the waiting requests of {self._others}"
        yield Finding("waiting", (found.member,), text)

    def short_of_memory(self) -> Iterator[Finding]:
        """One engine is at its low watermark, and the others have far more free blocks."""
        used = {n: s.blocks.free / max(1, s.blocks.total) for n, s in self._live.items()}
        if len(used) < 2:
            return
        least = min(used, key=lambda n: used[n])
        mean = _mean_of_others(used, least)
        status = self._live[least]
        if status.blocks.free > status.fragmentation.low_watermark_blocks:
            return
        if used[least] * IMBALANCE > mean:
            return
        text = (
            f"{self._names[least]} has {used[least]:.0%} of its blocks free, {self._others} "
            f"{mean:.0%}"
        )
        yield Finding("memory", (least,), text)

    def slow(self) -> Iterator[Finding]:
        values = {}
        for n, status in self._live.items():
            found = status.latency.inter_token if status.latency is not None else None
            if found is not None and found.count >= MANY_SAMPLES and found.p95_ms is not None:
                values[n] = found.p95_ms
        if (slowest := self._highest(values)) is None:
            return
        text = (
            f"{self._names[slowest.member]} is {slowest.times:.0f} times as slow as "
            f"{self._others}: p95 {time_text(slowest.value)} between tokens"
        )
        yield Finding("latency", (slowest.member,), text)

    # ------------------------------------------------------------ words

    def _highest(self, values: Mapping[int, float]) -> _Outlier | None:
        """The highest of `values`, if it is IMBALANCE times the mean of the others."""
        if len(values) < 2:
            return None
        most = max(values, key=lambda n: values[n])
        mean = _mean_of_others(values, most)
        return _Outlier(most, values[most], mean) if values[most] >= IMBALANCE * mean else None

    def _do(self, members: Sequence[int]) -> str:
        return f"{self._called(members)} {'does' if len(members) == 1 else 'do'}"

    def _called(self, members: Sequence[int]) -> str:
        """`engine 1`, `engines 1, 2`, `gpu7, gpu8`."""
        names = [self._names[n] for n in members]
        words = {name.partition(" ")[0] for name in names}
        if len(names) > 1 and words == {"engine"}:
            return "engines " + ", ".join(name.partition(" ")[2] for name in names)
        return ", ".join(names)


class _Outlier(NamedTuple):
    member: int
    value: float
    mean: float  # of the others

    @property
    def times(self) -> float:
        return self.value / max(self.mean, 1e-9)


def _mean_of_others(values: Mapping[int, float], member: int) -> float:
    others = [value for n, value in values.items() if n != member]
    return sum(others) / len(others)
