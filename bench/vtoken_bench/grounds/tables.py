"""Tables and charts of answers, from one row a setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vtoken_bench.charts import Chart, Line, Panel
from vtoken_bench.grounds.paired import LEVEL, Interval, Pairs, holm, share, verdicts
from vtoken_bench.grounds.settings import ARMS
from vtoken_bench.output import Table

FULL_CACHE = "full cache"
TITLES = {
    "chat": "The question follows the text",
    "prefix": "The question follows the text, and the answer is begun",
    "before": "The question precedes the text",
    "turns": "The text comes in two turns, the question in a third",
    "later": "The text is evicted before the question comes",
    "long": "The question follows 544 tokens of output; the fact is in the prompt or in the output",
    "tools": "The third call of one of ten tools: the names of its parameters, from its schema",
}
NOTES = (
    "found: share of samples whose answer has every string of the fact [exact 95% interval]",
    "difference: points to the full cache on the same samples [Tango's 95% interval]",
    "better, worse: McNemar's exact test; as good: less than 5 points below the full cache. All at "
    "5%, corrected (Holm) for all policies with the same share kept",
)


@dataclass(frozen=True)
class Row:
    """Answers of one setting. `found`: a character a sample, `1`, `0`, or `-` if it cannot run.

    `tools`: whether those of a prompt are protected.
    """

    case: str
    policy: str
    keep: float
    found: str
    tools: str = ""

    @property
    def name(self) -> str:
        return f"{self.policy}; {self.tools}" if self.tools else self.policy

    @property
    def flags(self) -> list[bool]:
        return [character == "1" for character in self.found]

    @property
    def ran(self) -> bool:
        return bool(self.found) and "-" not in self.found


def tables(rows: Sequence[Row]) -> list[Table]:
    """Of each case one table of all policies and shares kept."""
    found = []
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case]
        full = next(row for row in of_case if row.policy == FULL_CACHE)
        if full.found:
            evicting = [row for row in of_case if row is not full]
            found.append(_table(case, full, evicting))
    if found:
        found[-1].notes += NOTES
    return found + _of_tools([row for row in rows if row.tools])


def _of_tools(rows: Sequence[Row]) -> list[Table]:
    """What protected tools gain over unprotected ones."""
    whole = {(row.policy, row.keep): row for row in rows if row.tools == ARMS[0]}
    others = [row for row in rows if row.tools != ARMS[0]]
    if not others:
        return []
    table = Table(
        "The same samples with tools protected and without",
        ["policy, kept", "without", "without [%]", "with [%]", "difference", "gained", "lost"],
        [],
    )
    for row in others:
        protected = whole[row.policy, row.keep]
        pair = Pairs.of(protected.flags, row.flags)
        table.rows.append(
            [
                f"{row.policy}, {_share(row.keep)}",
                row.tools,
                _percent(share(row.flags)),
                _percent(share(protected.flags)),
                _percent(pair.difference(), signed=True),
                pair.gained,
                pair.lost,
            ]
        )
    return [table]


def _table(case: str, full: Row, rows: Sequence[Row]) -> Table:
    """By falling share found, over all shares kept."""
    keeps = sorted({row.keep for row in rows}, reverse=True)
    cells: dict[str, list[str]] = {row.name: [] for row in rows}
    hits: Counter[str] = Counter()
    for keep in keeps:
        able = [row for row in rows if row.keep == keep and row.ran]
        pairs = [Pairs.of(row.flags, full.flags) for row in able]
        shown = {}
        for row, pair, word in zip(able, pairs, verdicts(pairs), strict=True):
            difference = _percent(pair.difference(), signed=True)
            shown[row.name] = [_percent(share(row.flags)), f"{difference} {word}"]
            hits[row.name] += sum(row.flags)
        for policy, line in cells.items():
            line += shown.get(policy, ["", "needs a larger budget"])
    columns = [f"{_share(keep)}: {what}" for keep in keeps for what in ("found", "difference")]
    table = Table(
        f"{TITLES[case]}: facts found [%] by share of the prompt kept, {len(full.found)} samples",
        ["policy", *columns],
        [[FULL_CACHE, *([_percent(share(full.flags)), ""] * len(keeps))]],
    )
    for policy in sorted(cells, key=lambda policy: (-hits[policy], policy)):
        table.rows.append([policy, *cells[policy]])
    return table


def against(rows: Sequence[Row], others: Sequence[Row]) -> Table:
    """The rows that both runs have, each paired with the same policy of the other run."""
    known = {(row.case, row.policy, round(row.keep, 3)): row for row in others}
    table = Table(
        "The same policies, paired with the other run",
        [
            "policy, kept",
            "other run [%]",
            "this run [%]",
            "difference",
            "gained",
            "lost",
            "verdict",
        ],
        [],
    )
    both = []
    for row in rows:
        other = known.get((row.case, row.policy, round(row.keep, 3)))
        if other is not None and row.policy != FULL_CACHE and row.ran and other.ran:
            count = min(len(row.found), len(other.found))
            both.append((row, row.flags[:count], other.flags[:count]))
    pairs = [Pairs.of(own, other) for _, own, other in both]
    corrected = holm([pair.p_equal() for pair in pairs])
    for (row, own, before), pair, p_value in zip(both, pairs, corrected, strict=True):
        word = "undecided"
        if p_value <= 1 - LEVEL:
            word = "better" if pair.gained > pair.lost else "worse"
        shares = [_percent(share(before)), _percent(share(own))]
        difference = _percent(pair.difference(), signed=True)
        name = f"{row.policy}, {_share(row.keep)}"
        table.rows.append([name, *shares, difference, pair.gained, pair.lost, word])
    return table


def charts(rows: Sequence[Row]) -> list[Chart]:
    """Share found against share kept, a panel a case; none for less than three shares kept."""
    if len({row.keep for row in rows if row.policy != FULL_CACHE}) < 3:
        return []
    panels = []
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case and row.ran]
        panel = Panel(TITLES[case], "share of the prompt kept", "facts found [%]")
        for policy in dict.fromkeys(row.policy for row in of_case):
            own = sorted((r for r in of_case if r.policy == policy), key=lambda row: row.keep)
            x, shares = [row.keep for row in own], [share(row.flags) for row in own]
            value = [100 * s.value for s in shares]
            if policy == FULL_CACHE:
                panel.lines.append(Line(policy, x[:1], value[:1], reference=True))
            else:
                low, high = [100 * s.low for s in shares], [100 * s.high for s in shares]
                panel.lines.append(Line(policy, x, value, low, high))
        if len(panel.lines) > 1:
            panels.append(panel)
    return [Chart("Facts found against the share of the prompt kept", panels)] if panels else []


def _share(keep: float) -> str:
    names = {2: "half", 3: "a third", 4: "a quarter", 6: "a sixth", 12: "a twelfth"}
    return names.get(round(1 / keep), f"{keep:.3g}") if keep < 1 else "all"


def _percent(found: Interval, *, signed: bool = False) -> str:
    form = "{:+.1f} [{:+.1f} .. {:+.1f}]" if signed else "{:.1f} [{:.1f} .. {:.1f}]"
    return form.format(100 * found.value, 100 * found.low, 100 * found.high)
