"""User-defined keys: read from a file; errors name the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.binding import Binding

from tests.support.console_harness import running, screen_text, until
from tests.support.core.live import LiveEngine
from tests.support.serving import Served
from vtoken_console.app.app import ConsoleApp
from vtoken_console.app.keyfile import KeyFileError, default_path, listing, load
from vtoken_console.frame.keys import DASHBOARD_KEYS, KEYS
from vtoken_console.screens.control import ControlScreen
from vtoken_console.screens.dashboard import Dashboard
from vtoken_console.screens.fleet import FleetScreen
from vtoken_console.screens.help import HelpScreen, page
from vtoken_console.style import palette


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "console.toml"
    path.write_text(text)
    return path


def test_no_file_leaves_the_table_unchanged(tmp_path: Path) -> None:
    assert load(tmp_path / "absent.toml") == KEYS


def test_path_of_the_file_follows_xdg() -> None:
    assert default_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/vtoken/console.toml")
    assert default_path({}) == Path("~/.config/vtoken/console.toml").expanduser()


async def test_remapped_key_acts_and_is_shown_and_the_old_one_is_free(
    core: LiveEngine, served: Served, tmp_path: Path
) -> None:
    path = written(
        tmp_path, '[keys]\npause = ["f5", "!"]\ncompact = "v"\nhelp = "ctrl+k"\ntrial = "f9"\n'
    )
    async with running(served.url, size=(160, 40), keys=load(path)) as (app, pilot):
        await pilot.press("c")
        await pilot.press("f5", "right", "enter")
        await until(lambda: core.runtime.config.reclamation == "paused", "f5 does not pause")
        assert served.calls_of("compact") == []
        await pilot.press("!", "right", "enter")
        await until(
            lambda: core.runtime.config.reclamation == "auto", "the second key does nothing"
        )
        await pilot.press("v")
        await until(lambda: served.calls_of("compact"), "v does not compact")
        bar = screen_text(app).splitlines()[-1]
        assert "f5 pause" in bar
        assert "v compact" in bar
        await app.dashboard.action_settings("theta_f")
        await pilot.press("left", "f9")
        await until(lambda: not isinstance(app.screen, ControlScreen), "f9 opens no dialog")
        await pilot.press("escape", "escape", "ctrl+k")
        await until(lambda: isinstance(app.screen, HelpScreen), "no help")
        await until(lambda: "f5" in screen_text(app), "help shows the old key")
        await pilot.press("escape")
        app.dashboard.query_one("#requests").focus()
        await pilot.press("enter")
        await until(lambda: "^k help" in screen_text(app).splitlines()[-1], "another page's keys")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('[keys]\npause = "c"\n', 2, "'c' is bound to both compact and pause"),
        ('[keys]\npause = "f5"\n\nundo = "f5"\n', 2, "'f5' is bound to both undo and pause"),
        ('[keys]\n# none\nflush = "f5"\n', 3, "unknown action 'flush'"),
        ('[keys]\npause = "f55"\n', 2, "'f55' is not a key"),
        ('[keys]\npause = "ctrl+nothing"\n', 2, "'nothing' is unknown"),
        ('[keys]\npause = "up"\n', 2, "'up' is reserved"),
        ("[keys]\npause = 5\n", 2, "pause = 5 is not a key"),
        ("[keys]\npause = []\n", 2, "is not a key or a list of keys"),
        ('[colours]\nx = "y"\n', 1, "unknown section 'colours'"),
        ("[keys]\npause = \n", 2, "Invalid value"),
        ("[keys]\npause = " + "[" * 100_000, None, "nests too deep"),
        ('[keys]\napply = "q"\n', 2, "'q' is bound to both quit and apply"),
    ],
)
def test_errors_in_the_file_name_the_line(
    tmp_path: Path, text: str, line: int | None, message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(KeyFileError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert line is None or f"line {line}" in str(caught.value)
    assert message in str(caught.value)


def test_two_actions_can_swap_their_keys(tmp_path: Path) -> None:
    keys = {k.id: k for k in load(written(tmp_path, '[keys]\npause = "c"\ncompact = "H"\n'))}
    assert (keys["pause"].keys, keys["compact"].keys) == ("c", "H")


def test_every_action_has_a_unique_id_and_a_binding_with_it() -> None:
    ids = [key.id for key in KEYS]
    assert len(ids) == len(set(ids))
    screens = (ConsoleApp, Dashboard, ControlScreen, FleetScreen)
    bindings = [binding for screen in screens for binding in screen.BINDINGS]
    bound = {b.id for b in bindings if isinstance(b, Binding)}
    assert set(ids) <= bound
    assert all(name in listing(KEYS) for name in ids)


async def test_a_click_on_a_key_of_the_last_line_presses_it(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        at = screen_text(app).splitlines()[-1].index("freeze")
        await pilot.click("#keys", offset=(at, 0))
        await until(lambda: "frozen at" in screen_text(app), "not pressed")


async def test_keys_that_change_the_server_have_a_colour_of_their_own(served: Served) -> None:
    async with running(served.url, size=(220, 60)) as (app, pilot):
        changes = {key.shown: key.control for key in DASHBOARD_KEYS if key.rank < 9}
        line = app.dashboard.query_one("#keys").build_lines(app.view(), 220, 1)[0]
        styles = {text.strip(): style.color for text, style in line}
        for shown, control in changes.items():
            if shown in styles:
                style = palette.CONTROL_STYLE if control else palette.KEY_STYLE
                assert styles[shown] == style.color, shown
        await pilot.press("question_mark")
        await until(lambda: isinstance(app.screen, HelpScreen), "no help")
        spans = [span for line in page(app.view(), 90) for span in line]
        control = {text.strip() for text, style in spans if style is palette.CONTROL_STYLE}
        assert control >= {"u", "c", "H"}
        assert not control & {"f", "space"}


async def test_j_and_k_move_and_digits_show_a_panel_alone(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        table = app.dashboard.query_one("#requests")
        await pilot.press("j", "j", "k")
        assert table.cursor == 1
        for key, name in (("3", "charts"), ("4", "log"), ("l", ""), ("5", "numbers"), ("5", "")):
            await pilot.press(key)
            await until(lambda name=name: app.dashboard.shown == name, f"{key}: not {name}")
        await pilot.press("1", "escape")
        await until(lambda: app.dashboard.shown == "", "escape does not show all")
        assert table.has_focus
