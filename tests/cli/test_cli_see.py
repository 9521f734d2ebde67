"""The read-only commands, against a real server on the real core."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support.cli_harness import Url, run, spawn
from tests.support.core.live import LiveEngine, make_pressed
from tests.support.served_core import serving
from tests.support.serving import Served
from vtoken import wire
from vtoken.base.quantities import time_text
from vtoken.cli.commands import SORTS
from vtoken.cli.options import duration_s
from vtoken.cli.printing import Printer
from vtoken.cli.show import status_parts
from vtoken.cli.show_requests import ORDERS, request_detail_parts, request_parts
from vtoken.core.config.request_rules import RequestRules
from vtoken.core.runtime.canary import Check
from vtoken.policies import policy_names
from vtoken.sentences import prices_text
from vtoken.sentences.request import given_words
from vtoken.sentences.situation import situation


async def test_status_begins_with_its_sentence(served: Served, core: LiveEngine) -> None:
    text = await run("status", VTOKEN_URL=served.url)
    assert (text.code, text.err) == (0, "")
    assert text.out.splitlines()[0] == situation(core.reporter.status())
    assert "random always: budget 64 (+16) tokens, revision 1" in text.out
    assert "\x1b" not in text.out


def make_dear(core: LiveEngine) -> None:
    """Set a high measured price of packing."""
    core.core.worker.hole_us, core.core.worker.copy_us = 500, 3
    core.steps(4)


async def test_status_says_what_holes_and_copies_cost(served: Served, core: LiveEngine) -> None:
    text = (await run("status", VTOKEN_URL=served.url)).out
    assert "nothing measured yet" in text
    make_dear(core)
    text = (await run("status", VTOKEN_URL=served.url)).out
    prices = core.reporter.status().prices
    assert prices is not None
    assert "hole 500 µs a token (" in text
    assert "copy 500 µs a token (assumed)" in text
    assert prices.saving_us > 0
    saving, cost = time_text(prices.saving_us / 1e3), time_text(prices.cost_us / 1e3)
    assert f"a round now would save {saving} and cost {cost}" in text
    assert "park" not in prices_text(prices)
    parks = wire.Price(us=20, per="token", source="measured", samples=4)
    found = prices_text(msgspec.structs.replace(prices, park=parks))
    assert ", park 20 µs a token (4 samples);" in found
    idle = msgspec.structs.replace(prices, saving_us=0.0)
    assert prices_text(idle).endswith("; a round now would save nothing")


async def test_policies_are_listed_with_their_parameters(served: Served) -> None:
    url = ("--url", served.url)
    about = (await run("policy", "list", "h2o", *url)).out
    assert row_of(about, "pool").split()[:2] == ["mean", "max|mean"]
    assert row_of(about, "sinks").split()[:2] == ["4", "0..1024"]
    lines = (await run("policy", "list", *url)).out.splitlines()
    assert len(lines) == len(policy_names()) + 2
    assert max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["random"]
    unknown = await run("policy", "list", "h20", *url)
    assert (unknown.code, "did you mean h2o?" in unknown.err) == (2, True)


async def test_status_says_where_the_policys_signal_comes_from(
    served: Served, core: LiveEngine
) -> None:
    async def line() -> list[str]:
        text = (await run("status", VTOKEN_URL=served.url)).out
        return [line.split(maxsplit=1)[1] for line in text.splitlines() if line[:7] == "signal "]

    assert await line() == []  # the policy reads none
    core.configure(policy={"name": "h2o", "params": {}})
    assert await line() == ["attention_sum from layer 1 (default depth)"]
    core.configure(probe={"layers": [0], "heads": [1]})
    assert await line() == ["attention_sum from layer 0, head 1 (configured)"]


async def test_status_says_what_the_canary_found(served: Served, core: LiveEngine) -> None:
    assert "canary" not in (await run("status", VTOKEN_URL=served.url)).out
    core.configure(canary={"share": 0.5})
    core.runtime.canary.add(Check("random", 1, 100, 90, 12.5, -80.0), evicted=True)
    core.runtime.canary.add(Check("random", 1, 100, 80, 17.5, -80.0), evicted=True)
    core.runtime.canary.skip("LoRA")
    text = (await run("status", VTOKEN_URL=served.url)).out
    assert "agreement 85 % ± 5 %, log-probability lost 0.15 ± 0.03 (2 checked)" in text
    assert "control none checked; 1 skipped" in text


async def test_config_get_answers_one_value_as_config_set_takes_it(url: Url) -> None:
    assert (await run("config", "get", "budget_tokens", *url)).out == "64\n"
    assert (await run("config", "get", "policy.name", *url)).out == "random\n"
    assert (await run("config", "get", "probe", "--json", *url)).json(dict) == {
        "layers": [],
        "heads": [],
        "every_steps": 1,
    }
    unknown = await run("config", "get", "policy.nam", *url)
    assert (unknown.code, unknown.out) == (2, "")
    assert "did you mean name?" in unknown.err


async def test_requests_are_listed_and_shown(url: Url, core: LiveEngine) -> None:
    listed = (await run("requests", *url)).out.splitlines()
    assert sorted(line.split()[0] for line in listed[1:-1]) == ["a", "b"]
    assert listed[-1].startswith("none of 2 requests waits; ")
    shown = await run("request", "a", *url)
    assert "random, budget 64 tokens" in shown.out
    first = core.store.tables["a"][0]
    assert row_of(shown.out, "block:live").startswith(f"{first}:")
    detail = (await run("request", "a", "--json", *url)).json(wire.RequestDetail)
    assert detail.block_table == core.store.tables["a"]


async def test_tokens_of_a_request_come_a_line_each(url: Url) -> None:
    lines = (await run("request", "a", "--tokens", *url)).out.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(102))
    assert {line.split()[1] for line in lines} == {"live", "dead"}
    rows = (await run("request", "a", "--tokens", "--json", *url)).out.splitlines()
    assert len([msgspec.json.decode(row, type=wire.TokenRow) for row in rows]) == 102


async def test_block_shows_its_owner_and_a_mark_a_slot(served: Served, core: LiveEngine) -> None:
    block = str(core.store.tables["a"][0])
    shown = await run("block", block, "--url", served.url)
    detail = (await run("block", block, "--json", "--url", served.url)).json(wire.BlockDetail)
    (slots,) = [line.split()[1] for line in shown.out.splitlines() if line.startswith("slots")]
    assert (slots.count("#"), len(slots)) == (detail.live, 16)
    assert "a: " in shown.out
    assert (await run("block", "0", "--url", served.url)).out == "block  0, vLLM's null block\n"


async def test_audit_names_who_changed_what(url: Url) -> None:
    assert (await run("audit", *url)).out == "no changes so far\n"
    await run("config", "set", "theta_f=0.5", *url)
    await run("config", "set", "theta_f=0.6", "--dry-run", *url)
    first, second = (await run("audit", *url)).out.splitlines()
    assert first.endswith("revision 2: theta_f 0.25 -> 0.5")
    assert "(dry run)" in second
    assert len((await run("audit", "-n", "1", "--json", *url)).json(wire.AuditPage).entries) == 1


async def test_audit_says_that_nothing_changed_and_names_no_value_that_is_none(
    url: Url,
) -> None:
    await run("pause", *url)  # it is paused
    await run("pause", "--dry-run", *url)
    planned = await run("compact", "--request", "a", "--dry-run", "--json", *url)
    operation = planned.json(wire.Operation)
    unchanged, dry, compacted = (await run("audit", *url)).out.splitlines()
    assert unchanged.endswith("  config  revision 1: nothing to change")
    assert dry.endswith("  config (dry run)  revision 1: nothing to change")
    about = f"request a, operation {operation.id}, batch_size {operation.batch_size}"
    assert compacted.endswith(f"compact (dry run)  revision 1: {about}")


async def test_a_process_prints_what_main_does(served: Served) -> None:
    ran = await spawn("config", "get", "theta_f", VTOKEN_URL=served.url)
    assert (ran.code, ran.out, ran.err) == (0, "0.25\n", "")


@pytest.mark.parametrize("command", ["request nobody", "block 99999"])
async def test_what_is_not_there_is_refused(served: Served, command: str) -> None:
    ran = await run(*command.split(), "--url", served.url)
    assert (ran.code, ran.out) == (1, "")
    assert len(ran.err.splitlines()) == 1


async def test_bounds_of_config_get_are_whole_numbers_in_full(served: Served) -> None:
    ran = await run("config", "get", "--url", served.url)
    assert "1..16777216" in ran.out
    policy = next(x for x in ran.out.splitlines() if x.startswith("policy"))
    others = [x for x in ran.out.splitlines() if "reclaim when F exceeds this" in x]
    assert max(map(len, others)) < 80 < len(policy)


# ---------------------------------------------------------------- under pressure


@pytest.fixture
async def short() -> AsyncIterator[tuple[Served, LiveEngine]]:
    """Twelve requests in a pool for four, in a step in which a block is short."""
    core = make_pressed()
    core.steps(20)
    while not core.reporter.status().pressure.short_blocks:  # type: ignore[union-attr]
        core.steps(1)
    async with serving(core) as served:
        yield served, core


def table_of(text: str) -> list[dict[str, str]]:
    """The rows of a table by their heads, without the sum of all."""
    head, *lines = [re.split("  +", line) for line in text.splitlines()[:-1]]
    return [dict(zip(head, line, strict=True)) for line in lines]


NOW = 1e9
ROWS = [
    wire.RequestRow(
        *("chatcmpl-8ea2640e91c84f0f-0a1b2c3d", "running", 76, 24, 442, 95, 5, 5, 7, "h2o", 64),
        dense=False,
        evict_when="pressure",
        given_tokens=24,
        givable_tokens=12,
        arrived_ts=NOW - 41,
        waited_s=0.42,
    ),
    wire.RequestRow(
        *("old", "running", 90, 10, 80, 20, 9, 9, 9, "h2o", 64),
        dense=False,
        evict_when="pressure",
        givable_tokens=30,
        arrived_ts=NOW - 400,
        waited_s=3.0,
    ),
    wire.RequestRow(
        *("new", "waiting", 0, 0, 512, 0, 0, 0, 0, "h2o", 64),
        dense=True,
        evict_when="pressure",
        arrived_ts=NOW - 17.24,
        waiting_since_ts=NOW - 17.24,
        needed_blocks=33,
    ),
    wire.RequestRow(
        *("back", "preempted", 0, 0, 30, 3, 0, 0, 0, "h2o", 64),
        dense=True,
        evict_when="pressure",
        arrived_ts=NOW - 90,
        waiting_since_ts=NOW - 5,
        waited_s=20.0,
        needed_blocks=3,
        preemptions=1,
    ),
]


def requests_text(sort: str = "wait", *, wide: bool = False) -> str:
    parts = request_parts(ROWS, sort=sort, wide=wide, now=NOW, engines={})
    return "\n".join(line for part in parts for line in Printer().rendered(part))


def test_a_row_says_who_waits_how_long_and_who_paid() -> None:
    text = requests_text()
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert [[*row.values()] for row in table_of(text)] == [
        ["back", "preempted", "90 s", "25.0 s", "30+3", "-", "-", "0", "need 3"],
        ["new", "waiting", "17 s", "17.2 s", "512+0", "-", "-", "0", "need 33"],
        ["old", "running", "7 min", "3.0 s", "80+20", "90%", "30", "0", "9"],
        ["8ea2640e", "running", "41 s", "0.4 s", "442+95", "76%", "12", "24", "5"],
    ]
    assert text.splitlines()[-1] == (
        "2 of 4 requests wait, the longest for 25.0 s, for 36 blocks in all; 14 blocks held; "
        "24 tokens given up, 42 more can be"
    )
    assert {"ID": ROWS[0].id, "DEAD": "24"}.items() <= table_of(requests_text(wide=True))[
        -1
    ].items()


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        *(("age", "old"), ("length", "8ea2640e"), ("kept", "8ea2640e"), ("give", "old")),
        *(("gave", "8ea2640e"), ("blocks", "old"), ("wait", "back")),
    ],
)
def test_requests_are_sorted_by_what_is_asked_for(sort: str, first: str) -> None:
    assert [*ORDERS] == [*SORTS]
    assert table_of(requests_text(sort))[0]["REQUEST"] == first


@pytest.mark.parametrize(
    ("number", "waited"),
    [
        (0, "running, 41 s old, waited 0.4 s for memory"),
        (2, "waiting, 17 s old, waits 17 s for 33 blocks"),
        (3, "preempted, 90 s old, waits 5 s for 3 blocks, waited 20.0 s for memory"),
    ],
)
def test_a_request_says_how_long_it_waited(number: int, waited: str) -> None:
    detail = wire.RequestDetail(**msgspec.structs.asdict(ROWS[number]))
    (shown,) = request_detail_parts(detail, NOW)
    assert row_of("\n".join(Printer().rendered(shown)), "request") == f"{detail.id}, {waited}"


def row_of(text: str, name: str) -> str:
    (found,) = (line for line in text.splitlines() if line.split()[0] == name)
    return found.removeprefix(name).strip()


async def test_status_says_who_waits_who_gave_and_who_can_give(
    short: tuple[Served, LiveEngine],
) -> None:
    served, core = short
    pressure = core.reporter.status().pressure
    assert pressure is not None
    line = row_of((await run("status", VTOKEN_URL=served.url)).out, "pressure")
    assert line.startswith(f"{pressure.short_blocks} block") is (pressure.short_blocks > 0)
    assert f"gave {pressure.recent_tokens} tokens in the last 10 s" in line
    can_give = f"{pressure.givable_blocks} blocks ({pressure.givable_tokens} tokens)"
    assert f"{pressure.givers} requests can give {can_give}" in line
    assert f"{pressure.spared_tokens} tokens kept thanks to free memory" in line


async def test_status_is_silent_about_pressure_where_no_request_gives(served: Served) -> None:
    text = (await run("status", VTOKEN_URL=served.url)).out
    assert not any(line.startswith("pressure") for line in text.splitlines())
    assert "CAN GIVE" not in (await run("requests", VTOKEN_URL=served.url)).out


async def test_a_row_says_what_a_request_gave_and_can_give(
    short: tuple[Served, LiveEngine],
) -> None:
    served, core = short
    core.admit("fixed", 20, rules=RequestRules(evict_when="always"))
    url = ("--url", served.url)
    shown = table_of((await run("requests", *url)).out)
    rows = {row.id: row for row in core.reporter.rows()}
    assert [*shown[0]][-3:] == ["CAN GIVE", "GAVE UP", "BLOCKS"]
    assert {row["REQUEST"]: (row["CAN GIVE"], row["GAVE UP"]) for row in shown} == {
        name: (
            f"{row.givable_tokens}" if row.blocks and name != "fixed" else "-",
            "-" if name == "fixed" else f"{row.given_tokens}",
        )
        for name, row in rows.items()
    }
    assert any(row.given_tokens for row in rows.values())
    one = max(rows.values(), key=lambda row: row.givable_tokens)
    assert one.givable_tokens > 0
    line = row_of((await run("request", one.id, *url)).out, "pressure")
    assert line == given_words(one)


async def test_a_finished_request_says_what_it_kept_and_why_it_lost_the_rest(
    short: tuple[Served, LiveEngine],
) -> None:
    served, core = short
    url = ("--url", served.url)
    core.steps(400)
    core.admit("calm", 20, max_tokens=4)
    core.admit("fixed", 60, max_tokens=40, rules=RequestRules(evict_when="always"))
    core.steps(60)
    detail = (await run("request", "r0", "--json", *url)).json(wire.RequestDetail)
    assert (detail.state, detail.live + detail.dead) == ("finished", 80)
    assert detail.dead == detail.given_tokens > 0
    text = (await run("request", "r0", *url)).out
    assert row_of(text, "request").startswith("r0, finished at ")
    assert row_of(text, "pressure") == given_words(detail)
    assert f"kept {detail.live} of 80 tokens" in text
    assert row_of(text, "policy") == "streaming_llm, floor 24 tokens"
    assert "block:live" not in text
    calm = (await run("request", "calm", *url)).out
    assert row_of(calm, "pressure") == "kept all of its 24 tokens"
    fixed = (await run("request", "fixed", *url)).out
    assert row_of(fixed, "pressure").endswith(" over budget")
    unknown = await run("request", "r99", *url)
    assert (unknown.code, unknown.out) == (1, "")
    assert "none of the newest 1,024 that finished" in unknown.err


async def test_a_dry_run_says_what_is_short_what_could_be_given_and_who_would_fit(
    short: tuple[Served, LiveEngine],
) -> None:
    served, core = short
    patch = {"budget_tokens": 12}
    for _ in range(40):
        found = core.call("patch_config", patch=patch, validate_only=True).what_if
        if found.short_blocks > 1:
            break
        core.steps(1)
    text = (await run("config", "set", "budget_tokens=12", "--dry-run", "--url", served.url)).out
    without = found.without_change
    assert found.givable_blocks > without.givable_blocks
    assert f"can give {without.givable_blocks} -> {found.givable_blocks} blocks" in text
    assert f" of {found.waiting_requests} waiting can start" in text
    void = await run("config", "set", "budget_floor_tokens=12", "--dry-run", "--url", served.url)
    told = "dry run: nothing was changed\nno effect: budget_ratio is 0\n"
    assert void.out == f"budget_floor_tokens: 256 -> 12\n{told}"


async def test_status_gives_long_times_in_seconds_and_has_goodput_and_peaks(
    core: LiveEngine,
) -> None:
    status = core.reporter.status()
    status.slo = wire.Slo(text="ttft<2s", window_s=60.0, count=120, met=112, share=112 / 120)
    noon = time.mktime((2026, 1, 2, 12, 0, 0, 0, 0, -1))
    status.peaks = [
        wire.Peak(name="waiting", value=14.0, ts=noon),
        wire.Peak(name="ttft_p95_ms", value=24_405.1, ts=noon),
    ]
    assert status.latency is not None
    status.latency.ttft = wire.Percentiles(count=3, p50_ms=17_257.0, p95_ms=24_405.1, p99_ms=3e4)
    status.step_ms = 6101.3
    text = "\n".join(line for part in status_parts(status) for line in Printer().rendered(part))
    assert "first token p50 17.3 s, p95 24.4 s; " in text
    assert f"{status.step:,} (6.1 s)\n" in text
    assert row_of(text, "goodput") == "93% of 120 requests met ttft<2s (last 60 s)"
    at = "at 2026-01-02 12:00:00"
    assert f"  14 waiting {at}, first token p95 24.4 s {at}\n" in text
    status.slo = wire.Slo(text="ttft<2s", window_s=60.0)
    assert "no request has ended in the last 60 s" in str(status_parts(status))


def test_a_duration_is_the_number_that_was_typed() -> None:
    assert duration_s("236ms") == 0.236
