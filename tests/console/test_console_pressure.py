"""Eviction under pressure in the console: who needs blocks, who gave, what is left to give."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.account import sentence_contradictions
from tests.support.console_harness import (
    applied,
    charts_text,
    make_busy,
    make_short,
    outcome,
    running,
    screen_text,
    until,
)
from tests.support.core.live import LiveEngine
from tests.support.documents import ROW
from tests.support.recorded import record
from tests.support.served_core import serving
from tests.support.serving import Served, serve
from vtoken import wire
from vtoken.base.request_ids import short_id
from vtoken.policies import describe_policies
from vtoken.sentences.request import given_words, live_share, wait_words
from vtoken.sentences.what_if import difference
from vtoken_console.app.app import ConsoleApp
from vtoken_console.changes.fields import make_fields, step_value
from vtoken_console.feed.samples import NAMES, Sampler
from vtoken_console.screens.confirm import ConfirmScreen
from vtoken_console.style import palette, units
from vtoken_console.style.appearance import choose
from vtoken_console.widgets.figures.sections import pressure_section
from vtoken_console.widgets.figures.sentence import Sentence
from vtoken_console.widgets.lines import width_of
from vtoken_console.widgets.requests import BLOCKS, Requests, floor_bar

GAUGE = 3  # the gauge's line where the sentence has two
SMALL = (80, 24)
HEADS = ("can give", "gave up")


@pytest.fixture(scope="module")
def short_core() -> Any:
    """A pool that is short: nobody may step or change it."""
    with make_short() as core:
        yield core


@pytest.fixture
async def short(short_core: LiveEngine) -> AsyncIterator[Served]:
    async with serve(short_core.handle) as served:
        yield served


def gauge(app: ConsoleApp) -> str:
    (line,) = (x for x in screen_text(app).splitlines() if x.startswith(" KV "))
    return line


def pressure_of(app: ConsoleApp) -> wire.MemoryPressure:
    found = app.source.feed.model.status.pressure
    assert found is not None
    return found


def row_of(**fields: Any) -> wire.RequestRow:
    values = {"live": 600, "dead": 1440, "policy": "h2o", "budget_tokens": 256}
    return msgspec.structs.replace(ROW, **values | {"evict_when": "pressure"} | fields)


def amounts(line: str) -> dict[str, str]:
    """The figure at each label of the gauge."""
    words = line.split()
    before = {name: words[words.index(name) - 1] for name in ("of", "tok/s") if name in words}
    names = ("running", "waiting", "missing")
    return before | {name: words[words.index(name) + 1] for name in names if name in words}


async def test_blocks_that_nobody_lacks_are_no_warning() -> None:
    """A request may wait for a step with room, while the blocks that it needs are free."""
    async with serving(make_short()) as served, running(served.url, (120, 40)) as (app, _):
        table, status = app.dashboard.query_one(Requests), app.source.feed.model.status
        (row, *_) = [row for row in table.rows if row.needed_blocks]
        styles = []
        for first in (status.requests.first, None):
            status.requests.first = first
            ((text, style),) = table.painters[BLOCKS](app.view(), row, 8, None)
            assert text == f"needs {row.needed_blocks}".rjust(8)
            styles.append(style)
        assert styles == [palette.WARN_STYLE, palette.TEXT_STYLE]


@pytest.mark.parametrize(("extra", "num_lines"), [(0, 1), (1, 2)])
async def test_advice_beside_the_sentence_ends_before_the_edge(extra: int, num_lines: int) -> None:
    async with serving(make_short()) as served, running(served.url, (120, 40)) as (app, _):
        status = app.source.feed.model.status
        status.fragmentation.sentence = "GIVING."
        text = "x" * (120 - len(" GIVING." + " [f] " + " ") + extra)
        status.advice = [wire.Advice("floor", "near", text, action="floor")]
        lines = app.dashboard.query_one(Sentence).build_lines(app.view(), 120, 2)
        found = ["".join(part for part, _ in line) for line in lines]
        assert len(found) == num_lines
        assert found[-1].endswith(text + (" " if num_lines == 1 else ""))


# ---------------------------------------------------------------- the gauge


async def test_gauge_has_no_pressure_where_nobody_gives_under_it(served: Served) -> None:
    async with running(served.url, (220, 60)) as (app, _):
        assert app.source.feed.model.status.pressure is None
        assert "missing" not in gauge(app)
        assert not any(head in screen_text(app) for head in HEADS)
        header = screen_text(app).splitlines()[0]
        assert "budget 256" in header
        assert "floor" not in header


@pytest.mark.parametrize("size", [SMALL, (120, 40)])
async def test_gauge_sentence_and_rows_of_a_frame_agree(
    short: Served, size: tuple[int, int]
) -> None:
    async with running(short.url, size) as (app, _):
        status, pressure = app.source.feed.model.status, pressure_of(app)
        assert pressure.short_blocks
        lines = screen_text(app).splitlines()
        assert lines[GAUGE] == gauge(app)
        figures = amounts(gauge(app))
        assert figures["of"] == f"{status.blocks.free}"
        assert figures["running"] == f"{status.requests.running}"
        assert figures["waiting"] == f"{status.requests.waiting}"
        assert figures["missing"] == f"{pressure.short_blocks}"
        used = 1 - status.blocks.free / status.blocks.total
        assert f"KV {used:4.0%}" in gauge(app)
        assert " missing" in lines[1]
        assert list(sentence_contradictions(status, lines[1].strip())) == []
        rows = [line for line in lines if " needs " in line and line.startswith("┃")]
        assert rows == lines[6 : 6 + len(rows)], "who waits is not on top"
        assert f" needs {status.requests.first.needed_blocks}" in rows[0]


async def test_wide_gauge_has_both_latencies(short: Served) -> None:
    async with running(short.url, (220, 60)) as (app, _):
        for label in ("░", "tok/s", "between tokens p95", "first p95"):
            assert label in gauge(app)
        assert "floor 128 tokens" in screen_text(app).splitlines()[0]


async def test_gauge_of_an_ample_pool_names_nothing_missing() -> None:
    core = make_busy(400, 2)
    core.configure(evict_when="pressure")
    core.steps()
    async with serving(core) as served, running(served.url, SMALL) as (app, _):
        await until(lambda: "tok/s" in gauge(app), "no gauge")
        assert "missing" not in gauge(app)


@pytest.mark.parametrize(
    ("givable_blocks", "style"), [(5, palette.WARN_STYLE), (4, palette.BAD_STYLE)]
)
async def test_blocks_that_cannot_be_given_are_missing_in_red(
    short: Served, givable_blocks: int, style: object
) -> None:
    async with running(short.url, SMALL) as (app, _):
        widget = app.dashboard.query_one("#gauge")
        found = msgspec.structs.replace(
            pressure_of(app), short_blocks=5, givable_blocks=givable_blocks
        )
        app.source.feed.model.status.pressure = found
        (line,) = widget.build_lines(app.view(), 80, 1)
        assert ("5", style) in line


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("size", [SMALL, (120, 36), (220, 60)])
async def test_table_shows_who_kept_what_and_can_give_at_every_size(
    short_core: LiveEngine, short: Served, size: tuple[int, int]
) -> None:
    async with running(short.url, size) as (app, pilot):
        await pilot.press("s")  # the lowest share first
        lines = await until_text(app, "by kept")
        (head,) = (n for n, line in enumerate(lines) if "can give" in line and "kept" in line)
        row = min(short_core.reporter.rows(), key=lambda r: live_share(r) or 2.0)
        assert row.given_tokens > 0
        line = lines[head + 1]
        assert short_id(row.id) in line
        assert f"{math.floor(100 * live_share(row))}%" in line
        assert "░" in line
        assert (f" {row.given_tokens}" in line) == (size[0] > 200)


async def until_text(app: ConsoleApp, text: str) -> list[str]:
    await until(lambda: text in screen_text(app), f"no {text}")
    return screen_text(app).splitlines()


async def test_every_order_has_its_figure_first(short: Served) -> None:
    async with running(short.url, (220, 60)) as (app, pilot):
        table = app.dashboard.query_one("#requests")
        assert table.order == "wait"
        waiting = [row for row in table.rows if row.state in ("waiting", "preempted")]
        assert table.rows[: len(waiting)] == waiting
        since = [row.waiting_since_ts for row in waiting]
        assert since == sorted(since)
        for order, figure in (
            ("kept", lambda row: live_share(row) if row.live else 2.0),
            ("gave up", lambda row: -row.given_tokens),
        ):
            await pilot.press("s")
            await until(lambda order=order: table.order == order, "another order")
            figures = [figure(row) for row in table.rows]
            assert figures == sorted(figures)


async def test_ascii_table_draws_the_same_bar_in_ascii(short: Served) -> None:
    appearance = choose(depth="truecolor", ascii_only=True)
    async with running(short.url, SMALL, appearance=appearance) as (app, pilot):
        await pilot.press("s")
        lines = await until_text(app, "by kept")
        assert screen_text(app).isascii()
        assert any(re.search(r"\d% [#+]+\.", line) for line in lines)


@given(
    live=st.integers(0, 5000),
    dead=st.integers(0, 5000),
    floor=st.integers(1, 5000),
    width=st.integers(8, 40),
)
def test_bar_is_floor_then_above_then_dead_in_proportion(
    live: int, dead: int, floor: int, width: int
) -> None:
    row = row_of(live=live, dead=dead, budget_tokens=floor)
    bar = floor_bar(row, width, ascii_only=True)
    assert width_of(bar) == width
    text = "".join(part for part, _ in bar)
    if live + dead == 0:
        assert text.strip() == ""
        return
    assert text == "#" * text.count("#") + "+" * text.count("+") + "." * text.count(".")
    assert abs(text.count(".") - width * dead / (live + dead)) <= 0.5
    assert abs(text.count("+") - width * max(0, live - floor) / (live + dead)) <= 1


@pytest.mark.parametrize("fields", [{"evict_when": "always"}, {"policy": "none"}])
def test_bar_of_a_request_that_never_gives_has_no_part_that_it_can(fields: dict[str, str]) -> None:
    bar = floor_bar(row_of(**fields), 17, ascii_only=True)
    assert "".join(text for text, _ in bar) == "#" * 5 + "." * 12


# ---------------------------------------------------------------- a request's page


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "kept 29.4% of 2,040 tokens; 344 above its floor, can give nothing"),
        (
            {"given_tokens": 1440, "givable_tokens": 336},
            "kept 29.4% of 2,040 tokens, gave up 1,440 because memory was short; "
            "can give 336 above its floor",
        ),
        (
            {"live": 256, "dead": 0},
            "kept 100.0% of 256 tokens; at its floor, can give nothing",
        ),
        (
            {"live": 200, "dead": 200},
            "kept 50.0% of 400 tokens; below its floor, can give nothing",
        ),
        (
            {"live": 0, "dead": 0, "state": "waiting"},
            "has nothing to give while it is waiting",
        ),
        ({"evict_when": "always"}, ""),
        ({"policy": "none"}, ""),
        ({"state": "finished", "dead": 0}, "kept all of its 600 tokens"),
        (
            {"state": "finished", "given_tokens": 1440},
            "kept 600 of 2,040 tokens (29.4%); gave up 1,440 because memory was short",
        ),
        (
            {"state": "finished", "given_tokens": 1000},
            "kept 600 of 2,040 tokens (29.4%); gave up 1,000 because memory was short; "
            "lost 440 over budget",
        ),
    ],
)
def test_words_about_a_request(fields: dict[str, Any], words: str) -> None:
    assert given_words(row_of(**fields)) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        ({"arrived_ts": 1000.0}, "41 s old"),
        ({"arrived_ts": 1000.0, "waited_s": 17.2}, "41 s old, waited 17.2 s for memory"),
        (
            {"arrived_ts": 1000.0, "waiting_since_ts": 1038.0, "needed_blocks": 33},
            "41 s old, waits 3 s for 33 blocks",
        ),
        ({"arrived_ts": 1000.0, "state": "finished"}, ""),
    ],
)
def test_words_about_its_waits(fields: dict[str, Any], words: str) -> None:
    row = row_of(**{"arrived_ts": 0.0, "waited_s": 0.0} | fields)
    assert wait_words(row, 1041.0) == words


@pytest.mark.parametrize("state", ["running", "finished"])
def test_words_about_a_large_request_fit_eighty_columns(state: str) -> None:
    row = row_of(state=state, live=42_600, dead=81_440, given_tokens=70_440, givable_tokens=42_336)
    assert "because memory was short" in given_words(row)
    assert "gave up 70,440" in given_words(row, 79)
    assert len(given_words(row, 79)) <= 79


@pytest.mark.parametrize("size", [SMALL, (120, 36)])
async def test_request_page_says_what_it_gave_while_it_runs_and_after_its_end(
    size: tuple[int, int],
) -> None:
    core = make_short(160, 16)
    core.concurrency = 0
    async with serving(core) as served, running(served.url, size) as (app, _):
        row = core.reporter.rows()[0]
        await app.dashboard.open_request(row.id)
        await until(lambda: f", gave up {row.given_tokens:,}" in screen_text(app), "not said")
        assert " above its floor" in screen_text(app)
        assert " old" in screen_text(app)
        await until(lambda: app.screen.query_one("#rows").table is not None, "no tokens")
        core.finish(row.id)
        core.steps()
        kept = f"kept {row.live:,} of {row.live + row.dead:,} tokens"
        await until(lambda: kept in screen_text(app), "the end is not said")
        assert f"gave up {row.given_tokens:,} because memory was short" in screen_text(app)
        assert "This request has finished at " in screen_text(app)
        assert len(app.screen.query_one("#rows").table) > 0


# ---------------------------------------------------------------- charts and metrics


async def test_given_tokens_have_a_chart_up_to_now(served: Served) -> None:
    async with running(served.url, (120, 36)) as (app, _):
        assert "given" not in charts_text(app)
    core = make_short()
    async with serving(core) as served, running(served.url, (120, 36)) as (app, _):
        async with core.stepping():
            newest = lambda: app.source.feed.data.series.newest("given_per_s")  # noqa: E731
            await until(lambda: newest() > 0, "no rate")
        await until(lambda: "given" in charts_text(app), "no chart")
        for label in ("KV used", "waiting", "first token p95"):
            assert label in charts_text(app)


async def test_the_figure_in_a_charts_title_is_never_cut(served: Served) -> None:
    async with running(served.url, (150, 42)) as (app, _):
        latency = app.source.feed.model.status.latency.inter_token.p95_ms
        await until(lambda: "between toke" in charts_text(app), "no chart")
        assert f" {units.latency(latency, 0)}" in charts_text(app)


def test_given_tokens_are_sampled_as_a_rate_and_unknown_where_nobody_gives(
    short_core: LiveEngine,
) -> None:
    status, sampler, at = short_core.reporter.status(), Sampler(), NAMES.index("given_per_s")
    pressure = status.pressure
    assert pressure is not None
    rates = []
    for second in range(4):
        status.ts = 1000.0 + second
        status.pressure = msgspec.structs.replace(pressure, given_tokens=100 * second)
        rates.append(sampler.sample(wire.Point.of(status))[at])
    assert rates == [0.0, 100.0, 100.0, 100.0]
    status.pressure = None
    assert math.isnan(sampler.sample(wire.Point.of(status))[at])


def test_metrics_have_what_a_fixed_budget_would_have_evicted(short_core: LiveEngine) -> None:
    status = short_core.reporter.status()
    pressure = status.pressure
    assert pressure is not None
    pressure.spared_tokens, pressure.kept_shares, pressure.kept_share_sum = 321, {"1": 4}, 3.0
    rows = ["".join(text for text, _ in line).split() for line in pressure_section(status)]
    assert ["kept,", "as", "free", "321", "tokens"] in rows
    assert ["gave", "up", f"{pressure.given_tokens:,}", "tokens", "so", "far"] in rows
    assert ["kept", "at", "the", "end", "75.0%", "of", "4", "ended"] in rows
    assert not any("early" in row for row in rows)
    pressure.preemptions_above_floor = 2
    rows = ["".join(text for text, _ in line).split() for line in pressure_section(status)]
    assert ["preempted", "2", "too", "early"] in rows
    status.pressure = None
    assert pressure_section(status) == []


async def test_metrics_fit_80x24_without_a_title_alone(short: Served) -> None:
    async with running(short.url, SMALL) as (app, _):
        app.dashboard.show_panel("numbers")
        await until(lambda: "kept at the end" in screen_text(app), "cut off")
        for part in ("memory", "compaction  holes ", "latency"):
            assert part in screen_text(app)


# ---------------------------------------------------------------- settings


async def test_evict_when_is_three_rows_below_the_budget_and_always_is_confirmed() -> None:
    core = make_busy(400, 3)
    core.configure(evict_when="pressure", park_bytes=0)  # what is parked is no loss
    core.steps()
    async with serving(core) as served, running(served.url, (120, 40)) as (app, pilot):
        await app.dashboard.action_settings("budget_tokens")
        await pilot.press("down", "down", "down")
        await until(lambda: "down to the budget at most" in screen_text(app), "no help")
        assert "pressure | always" in screen_text(app)
        assert "evict_after_wait_ms" in screen_text(app)
        await pilot.press("right", "enter")
        await until(lambda: isinstance(app.screen, ConfirmScreen), "not asked")
        await until(lambda: "evict_when pressure → always" in screen_text(app), "not named")
        await pilot.press("right", "enter")
        await until(lambda: core.runtime.config.evict_when == "always", "not applied")
        assert applied(served) == [{"evict_when": "always"}]


async def test_what_if_of_a_lower_floor_has_what_could_be_given_and_who_would_fit(
    short_core: LiveEngine, short: Served
) -> None:
    async with running(short.url, (120, 40)) as (app, pilot):
        await app.dashboard.action_settings("budget_tokens")
        await pilot.press(*"64")
        await until(lambda: "128 → 64" in outcome(app), "no what-if, or that of the first digit")
        now = short_core.call("patch_config", patch={"budget_tokens": 64}, validate_only=True)
        effect, without = now.what_if, now.what_if.without_change
        assert effect.givable_tokens > short_core.reporter.status().pressure.givable_tokens
        given = f"can give {without.givable_blocks} → {effect.givable_blocks} blocks"
        started = f"{without.startable_requests} → {effect.startable_requests} of"
        assert [line.text for line in difference(now)] == outcome(app).split("\n")[1:]
        assert given in outcome(app)
        assert f"{started} {effect.waiting_requests} waiting can start" in outcome(app)


def test_wait_is_a_bounded_number_that_steps_up_from_zero() -> None:
    core = make_busy(60, 0)
    core.close()
    fields = make_fields(core.controller.revisions.document(), describe_policies(), "h2o")
    names = [field.path[0] for field in fields]
    at = names.index("budget_tokens")
    below = ["evict_after_wait_ms", "evict_per_token_left", "evict_when"]
    assert names[at : at + 4] == ["budget_tokens", *below]
    wait = fields[at + 1]
    value: Any = 0
    for _ in range(30):
        value = step_value(wait, value, 1, coarse=True)
    assert value == wait.maximum == 3_600_000


# ---------------------------------------------------------------- servers without it


FIELDS = ("pressure", "evict_when", "evict_after_wait_ms", "given_tokens", "givable_tokens")


def without_pressure(document: Any) -> Any:
    """A JSON document as servers wrote it before there was eviction under pressure."""
    if isinstance(document, dict):
        kept = {k: without_pressure(v) for k, v in document.items() if k not in FIELDS}
        return kept | ({"interval_tokens": 16} if kept.get("interval_tokens") == 0 else {})
    if isinstance(document, list):
        return [without_pressure(value) for value in document]
    return document


async def test_recording_of_an_older_server_shows_budgets_as_before(tmp_path: Path) -> None:
    path, old = tmp_path / "new.jsonl.gz", tmp_path / "old.jsonl.gz"
    record(path, 4.0)
    lines = gzip.decompress(path.read_bytes()).splitlines()
    assert any(b"evict_when" in line for line in lines)
    decoded = [without_pressure(msgspec.json.decode(line)) for line in lines]
    old.write_bytes(gzip.compress(b"".join(msgspec.json.encode(d) + b"\n" for d in decoded)))
    app = ConsoleApp(old.name, recording=old, moment="3", read_only=True)
    async with app.run_test(size=(220, 60)):
        await until(lambda: app.source is not None and app.dashboard.synced, "no data")
        await until(lambda: "budget 96 (+16)" in screen_text(app), "not a budget")
        for word in ("floor", "missing", "gave", "given"):
            assert word not in screen_text(app)
        config = app.source.feed.model.config
        assert config.effective.evict_when == "always"
        names = {field.path[0] for field in make_fields(config, [], "random")}
        assert not names & set(FIELDS)
