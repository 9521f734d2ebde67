"""The fleet page: a row an engine, of one server or several; it opens the dashboard of one."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.console_harness import messages, running, screen_text, until
from tests.support.routes import CONTROL, token_files
from tests.support.served_core import THETA_F, several
from tests.support.serving import Served
from vtoken.client import Server
from vtoken_console.app.app import ConsoleApp
from vtoken_console.export.files import ExportedFleet
from vtoken_console.frame import silence
from vtoken_console.frame.fleet import ORDERS, FleetReader
from vtoken_console.frame.keys import KEYS
from vtoken_console.output.export_run import run as export

CURSOR = "\u203a> "  # before the row under the cursor


@contextlib.asynccontextmanager
async def on_fleet_page(
    url: str = "", size: tuple[int, int] = (120, 36), **options: Any
) -> AsyncIterator[Any]:
    """The real app, headless; yields (app, pilot) once every engine has been read or has failed."""
    app = ConsoleApp(url, **options)
    app.dashboard.HELD_S = 0.0
    async with app.run_test(size=size, notifications=True) as pilot:
        drawn = lambda: app.fleet.page.table.rows  # noqa: E731
        await until(lambda: app.fleet.is_shown and drawn(), "no fleet page")
        await until(lambda: all(r.condition != "starting" for r in drawn()), "not all are read")
        yield app, pilot


def rows(app: ConsoleApp) -> dict[str, str]:
    """The lines of the table by their labels."""
    lines = screen_text(app).splitlines()
    first = next(n for n, line in enumerate(lines) if " state " in line)
    inside = [line for line in lines[first + 1 :] if line[:1] in ("│", "┃", "#")]
    found = [line.strip("│┃# ").lstrip(CURSOR) for line in inside]
    return {line.split()[0]: line for line in found if line.split()[1:2]}


async def opened(app: Any, engine: str) -> None:
    await until(lambda: app.screen is app.dashboard, "the dashboard is not opened")
    await until(lambda: engine in screen_text(app).splitlines()[0], f"{engine} is not shown")
    # A dashboard without a connection refuses changes.
    await until(lambda: app.dashboard.view.connection.is_live, f"{engine} is not connected")


# ---------------------------------------------------------------- one server


async def test_start_page_has_a_row_an_engine_and_opens_dashboards() -> None:
    async with several(3) as (served, cores), on_fleet_page(served.url) as (app, pilot):
        await until(lambda: rows(app).keys() >= {"0", "1", "2"}, "not three engines")
        assert "3 engines, all answer and run the same configuration" in screen_text(app)
        assert all("● live" in rows(app)[rank] for rank in "012")
        assert rows(app)["sum"].split()[1] == str(
            sum(c.reporter.status().blocks.free for c in cores)
        )
        await pilot.press("down", "enter")
        await opened(app, "engine 1 of 3")
        assert "r1" in screen_text(app)
        await pilot.press("right_square_bracket")
        await opened(app, "engine 2 of 3")
        await pilot.press("right_square_bracket")
        await opened(app, "engine 0 of 3")
        await pilot.press("left_square_bracket", "F")
        await until(lambda: app.screen is app.fleet.page, "F does not go back")
        await pilot.press("F")
        await until(lambda: app.screen is app.dashboard, "F does not return to the engine")


async def test_changes_on_a_dashboard_are_made_on_all_engines_of_its_server() -> None:
    async with several(2) as (served, cores), on_fleet_page(served.url) as (app, pilot):
        await pilot.press("enter")
        await opened(app, "engine 0 of 2")
        await pilot.press("H", "right", "enter")
        for core in cores:
            await until(lambda core=core: core.runtime.config.reclamation == "auto", "not resumed")


async def test_a_named_engine_is_the_start_page_and_is_changed_alone() -> None:
    async with several(2) as (served, cores), running(Server(served.url, engine=1)) as (app, pilot):
        await until(lambda: "engine 1 of 2" in screen_text(app), "no engine in the header")
        await pilot.press("H", "right", "enter")
        await until(lambda: cores[1].runtime.config.reclamation == "auto", "not resumed")
        assert cores[0].runtime.config.reclamation == "paused"
        await until(lambda: app.fleet.settled, "no fleet")
        await pilot.press("right_square_bracket")
        await opened(app, "engine 0 of 2")


async def test_a_server_with_one_engine_has_no_fleet_page() -> None:
    async with several(1) as (served, _), running(served.url) as (app, pilot):
        await until(lambda: "r0" in screen_text(app), "no request")
        await pilot.press("right_square_bracket", "F")
        await until(lambda: "One engine is watched" in messages(app), "F says nothing")
        assert "engine 0" not in screen_text(app)
        assert app.screen is app.dashboard
        assert " f fleet" not in screen_text(app)


async def test_drift_and_imbalance_are_marked_in_the_row_and_named_in_the_sentence() -> None:
    wide = (160, 40)
    async with several(3) as (served, cores), on_fleet_page(served.url, wide) as (app, _):
        cores[0].call("patch_config", patch={"theta_f": 0.5})
        sentence = "local changed theta_f on engine 0 only, "
        await until(lambda: sentence in screen_text(app), "drift is not named")
        assert "y sync all u undo" in " ".join(screen_text(app).split())
        assert "2≠" in rows(app)["0"]
        assert "≠" not in rows(app)["1"]
        cores[2].facts.waiting = 40  # the engine's own count of waiting requests
        cores[2].publish()
        await until(
            lambda: "Engine 2 has 40 waiting requests, the others none or few." in screen_text(app),
            "the imbalance is not named",
        )
        assert "40▲" in rows(app)["2"]


@pytest.mark.parametrize(("keys", "theta_f"), [(("y", "right", "enter"), 0.5), (("u",), THETA_F)])
async def test_a_change_of_one_engine_is_given_to_all_or_taken_back(
    keys: tuple[str, ...], theta_f: float
) -> None:
    async with several(3) as (served, cores), on_fleet_page(served.url, (120, 36)) as (app, pilot):
        await pilot.press(keys[0])
        await until(lambda: "No change is on one engine alone" in messages(app), "not refused")
        cores[1].call("patch_config", patch={"theta_f": 0.5})
        await until(lambda: "on engine 1 only" in screen_text(app), "drift is not named")
        await pilot.press(keys[0])
        if len(keys) > 1:
            await until(lambda: "theta_f 0.25 → 0.5" in screen_text(app), "not asked")
            await pilot.press(*keys[1:])
        await until(lambda: "run the same configuration" in screen_text(app), "they still differ")
        assert {core.runtime.config.theta_f for core in cores} == {theta_f}


async def test_a_hanging_engine_is_a_row_that_says_since_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "SILENT_S", 3.0)
    async with several(2) as (served, _), on_fleet_page(served.url) as (app, pilot):
        served.client.engines[1].hangs = True
        try:
            await until(lambda: "silent" in rows(app)["1"], "not silent")
            sentence = "Engine 1 does not answer, the newest state is"
            await until(lambda: sentence in screen_text(app), "silence is not named")
            assert "1 silent" in screen_text(app).splitlines()[0]
            assert "● live" in rows(app)["0"]
            await pilot.press("down")
            await until(lambda: "the engine makes no step" in screen_text(app), "no reason")
            await pilot.press("up", "enter")
            await opened(app, "engine 0 of 2")
            assert "1 silent" in screen_text(app).splitlines()[0]
        finally:
            served.client.engines[1].hangs = False


async def test_a_server_that_ends_is_rows_that_say_so_and_they_return() -> None:
    async with contextlib.AsyncExitStack() as stack:
        served, _ = await stack.enter_async_context(several(2))
        async with on_fleet_page(served.url) as (app, pilot):
            await stack.aclose()
            await until(lambda: "lost" in rows(app)["1"], "the loss is not shown")
            assert "2 silent" in screen_text(app).splitlines()[0]
            async with several(2, port=served.port):
                await pilot.press("r")
                await until(lambda: "● live" in rows(app)["1"], "it does not return")


async def test_silence_of_the_link_is_by_the_local_clock() -> None:
    async with several(2) as (served, _), on_fleet_page(served.url) as (app, _):
        reader: FleetReader = app.fleet.reader
        now = app.view()
        late = reader.view(now.now + 60, now.monotonic + 60)
        assert [row.condition for row in late.rows] == ["silent", "silent"]
        assert late.rows[0].problem == "no message from the server"
        assert late.findings[0].text.startswith(
            "engines 0, 1 do not answer, the newest state is 60"
        )


# ---------------------------------------------------------------- several servers


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[tuple[list[Server], list[Served]]]:
    """Two engines, one engine behind tokens, the same with a wrong token, and no server."""
    tokens = token_files(tmp_path, read=True, control=True)
    async with several(2) as (gpu7, _), several(1, **tokens) as (gpu8, _), several(1) as (gpu9, _):
        app9 = gpu9.url
        named = [
            Server(gpu7.url, name="gpu7"),
            Server(gpu8.url, CONTROL, name="gpu8"),
            Server(gpu8.url + "/", "another-token-1234", name="wrong"),
            Server("http://127.0.0.1:9", name="gone"),
            Server(app9, name="gpu9"),
        ]
        yield named, [gpu7, gpu8, gpu9]


async def test_servers_are_rows_of_one_table_and_a_failing_one_says_why(
    servers: tuple[list[Server], list[Served]],
) -> None:
    named, _ = servers
    async with on_fleet_page(servers=named, size=(160, 40)) as (app, pilot):
        await until(lambda: "gpu7/1" in rows(app), "not all engines")
        await until(lambda: "refused 401" in rows(app)["wrong"], "401 is not shown")
        await until(lambda: "cannot reach http://127.0.0.1:9" in rows(app)["gone"], "no reason")
        for label in ("gpu7/0", "gpu7/1", "gpu8", "gpu9"):
            await until(lambda label=label: "● live" in rows(app)[label], f"{label} is not live")
        assert "6 engines on 5 servers" in screen_text(app).splitlines()[0]
        assert "do not answer" in screen_text(app) or "does not answer" in screen_text(app)
        await pilot.press("down", "down", "down", "enter")  # `wrong`
        await until(lambda: "wrong cannot be opened: 401" in messages(app), "not refused")
        await pilot.press("up", "enter")
        await until(lambda: app.screen is app.dashboard, "gpu8 is not opened")
        await until(lambda: "r0" in screen_text(app), "no request of gpu8")
        assert app.session.server is not None
        assert app.session.server.label == "gpu8"
        await pilot.press("left_square_bracket")
        await opened(app, "engine 1 of 2")
        assert app.session.server.label == "gpu7"


async def test_a_change_uses_the_token_of_the_server_on_the_screen(
    servers: tuple[list[Server], list[Served]],
) -> None:
    named, (_, gpu8, gpu9) = servers
    async with on_fleet_page(servers=[named[1], named[4]]) as (app, pilot):
        await pilot.press("enter")
        await opened(app, "gpu8")
        await pilot.press("H", "right", "enter")
        await until(lambda: gpu8.calls_of("patch_config"), "gpu8 is not changed")
        assert gpu9.calls_of("patch_config") == []


# ---------------------------------------------------------------- the table


async def test_sort_and_filter_keep_the_cursor_on_its_engine() -> None:
    async with several(3) as (served, cores), on_fleet_page(served.url) as (app, pilot):
        cores[2].facts.waiting = 5
        cores[2].publish()
        table = app.fleet.page.table
        await until(lambda: table.rows[2].status.requests.waiting == 5, "not seen")
        await pilot.press("down")
        assert table.chosen.rank == 1
        while table.order != "waiting":
            await pilot.press("s")
        await until(lambda: [row.rank for row in table.rows] == [2, 0, 1], "not sorted")
        assert table.chosen.rank == 1
        assert "by waiting" in screen_text(app)
        await pilot.press("slash", *"engine", "space", "2", "enter")
        assert [row.rank for row in table.rows] == [2]
        assert "1 of 3 match “engine 2”" in screen_text(app)
        await pilot.press("slash", *"nothing", "enter")
        assert "No engine matches" in screen_text(app)
        await pilot.press("escape")
        assert len(table.rows) == 3


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (220, 60)])
async def test_columns_stand_where_their_heads_stand_at_every_size(size: tuple[int, int]) -> None:
    async with several(3) as (served, cores), on_fleet_page(served.url, size) as (app, _):
        for core, tokens in zip(cores, (0, 812, 98_765), strict=True):
            core.facts.waiting = tokens // 100
            core.publish()
        await until(lambda: "987" in rows(app)["2"], "not drawn")
        lines = screen_text(app).splitlines()
        (head,) = (line for line in lines if " state " in line)
        drawn = [line for line in lines if "● live" in line and line.startswith("┃")]
        assert len(drawn) == 3
        for name in ("free", "run", "wait", "tok/s", "ITL p95", "rev"):
            end = head.index(f" {name} ") + 1 + len(name)
            assert all(line[end - 1] != " " for line in drawn), name
        for name in ("state", "policy", "pool"):
            start = head.index(f" {name}") + 1
            assert all(line[start - 1] == " " for line in drawn), name
        assert all(len(line) <= size[0] for line in lines)
        assert "? help" in lines[-1]
        assert "q quit" in lines[-1]


async def test_every_order_sorts_rows_without_a_state_last() -> None:
    async with several(2) as (served, _):
        named = [Server("http://127.0.0.1:9", name="gone"), Server(served.url, name="here")]
        async with on_fleet_page(servers=named) as (app, pilot):
            await until(lambda: "here/1" in rows(app), "not all engines")
            for _ in ORDERS[1:]:
                await pilot.press("s")
                first = app.fleet.page.table.rows[0].label
                by_state = app.fleet.page.table.order == "state"
                assert (first == "gone") == by_state


async def test_help_on_the_page_lists_its_keys() -> None:
    async with several(2) as (served, _), on_fleet_page(served.url, (120, 60)) as (app, pilot):
        await pilot.press("question_mark")
        await until(lambda: "help: esc" in screen_text(app), "no help")
        wanted = [key.help for key in KEYS if key.page == "fleet" or key.id == "fleet"]
        await until(lambda: all(text in screen_text(app) for text in wanted), "keys are missing")
        await pilot.press("escape")
        assert app.screen is app.fleet.page


async def test_ascii_has_no_other_characters() -> None:
    from vtoken_console.style.appearance import choose

    look = choose("dark", "16", ascii_only=True)
    async with several(2) as (served, _), on_fleet_page(served.url, appearance=look) as (app, _):
        await until(lambda: "1" in rows(app), "no rows")
        assert screen_text(app).isascii()


# ---------------------------------------------------------------- export


async def test_the_page_is_exported_as_picture_table_and_document(tmp_path: Path) -> None:
    async with several(2) as (served, _):
        await export_to(tmp_path, served.url)
    text = (tmp_path / "fleet.svg").read_text(encoding="utf-8")
    assert "2&#160;engines" in text
    table = list(csv.DictReader(io.StringIO((tmp_path / "fleet.csv").read_text())))
    assert [row["name"] for row in table] == ["engine 0", "engine 1"]
    assert {row["condition"] for row in table} == {"live"}
    document = msgspec.json.decode((tmp_path / "fleet.json").read_bytes(), type=ExportedFleet)
    assert [row.engine.engine for row in document.engines] == [0, 1]
    assert document.sentences == []


async def export_to(folder: Path, url: str) -> None:
    import asyncio

    for kind in ("svg", "csv", "json"):
        app = ConsoleApp(url, read_only=True)
        await asyncio.to_thread(export, app, folder / f"fleet.{kind}", (120, 36))
