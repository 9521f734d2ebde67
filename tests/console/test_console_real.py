"""The console on the real API in front of the real core, headless and in a real terminal."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.console_harness import messages, running, screen_text, until
from tests.support.core.live import LiveEngine, make_quiet
from tests.support.serving import Served, serve
from tests.support.waiting import LIMIT_S
from vtoken_console.frame import silence
from vtoken_console.screens.confirm import ConfirmScreen
from vtoken_console.screens.trial import TrialScreen
from vtoken_console.widgets.form import Form
from vtoken_console.widgets.outcome import Outcome


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    """A stepping engine with two requests, random eviction and no compaction."""
    core = make_quiet(num_blocks=512)
    core.configure(
        policy={"name": "random"},
        budget_tokens=64,
        evict_when="always",
        interval_tokens=16,
        recycle=False,
        low_watermark_blocks=0,
        theta_f=0.5,
    )
    core.admit("a", 300)
    core.admit("b", 280)
    core.steps(3)

    async with core.stepping(pause_s=0.1):
        yield core
    core.close()


@pytest.fixture
async def served(core: LiveEngine) -> AsyncIterator[Served]:
    async with serve(core.handle) as served:
        yield served


@pytest.mark.slow
async def test_what_if_apply_trial_revert_guard_and_undo(core: LiveEngine, served: Served) -> None:
    runtime = core.runtime
    async with running(served.url, size=(140, 40)) as (app, pilot):
        await pilot.press("t", *"0.01")
        outcome = app.screen.query_one(Outcome)
        await until(lambda: "theta_f 0.5 → 0.01" in outcome.text, "no what-if")
        for part in ("makes no difference now", "stays closed: watermark ("):
            assert part in outcome.text
        assert runtime.config.theta_f == 0.5
        await pilot.press("enter")
        await until(lambda: runtime.config.theta_f == 0.01, "not applied")
        await until(lambda: "Accepted: revision 2" in outcome.text, "not shown")
        await until(lambda: app.source.feed.model.config.effective_revision == 2, "not effective")

        await pilot.press(*"0.2", "ctrl+t")
        await until(lambda: isinstance(app.screen, TrialScreen), "no terms")
        await pilot.press("backspace", *"0.02", "enter")
        await until(lambda: runtime.revision == 4, "not tried, or not reverted by the engine")
        assert runtime.config.theta_f == 0.01
        await until(lambda: "Reverted: revision 3, not confirmed within 1 s" in messages(app), "?")

        await pilot.press(*"0.3", "ctrl+t")
        await until(lambda: isinstance(app.screen, TrialScreen), "no terms")
        await pilot.press("tab", *"0.001", "enter")
        await until(lambda: runtime.revision == 6, "not tried, or not reverted by the engine")
        await until(lambda: "Reverted: revision 5, p95 inter-token" in messages(app), "no guard")
        assert runtime.config.theta_f == 0.01

        await pilot.press("escape", "escape")
        assert messages(app) == ""
        await pilot.press("t", *"0.4", "ctrl+t")
        await until(lambda: isinstance(app.screen, TrialScreen), "no terms")
        await pilot.press("enter")
        await until(lambda: runtime.config.theta_f == 0.4, "not tried")
        await pilot.press("escape", "y")
        await until(lambda: "Kept: revision 7 stays" in messages(app), "not kept")
        await pilot.press("u")
        await until(lambda: runtime.config.theta_f == 0.01, "not undone")


async def test_lower_budget_on_a_real_core_is_confirmed_then_evicts(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, pilot):
        await pilot.press("m", *"32", "enter")
        await until(lambda: isinstance(app.screen, ConfirmScreen), "not asked")
        await until(lambda: served.url.removeprefix("http://") in screen_text(app), "no host")
        assert core.runtime.config.budget_tokens == 64
        await pilot.press("right", "enter")
        await until(lambda: core.runtime.config.budget_tokens == 32, "not applied")
        rows = lambda: app.source.feed.model.requests.values()  # noqa: E731
        await until(lambda: all(row.live <= 32 + 16 + 1 for row in rows()), "not evicted")


async def test_shadow_is_chosen_in_the_settings_and_its_disagreement_shown(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(200, 60)) as (app, pilot):
        await pilot.press("m")
        form = app.screen.query_one(Form)
        place = next(i for i, f in enumerate(form.rows) if f.path[0] == "shadow")
        form.action_jump(place)
        await pilot.press("right", "enter")
        await until(lambda: core.runtime.config.values().shadow is not None, "no shadow")
        await pilot.press("escape")
        await until(lambda: "of the victims" in screen_text(app), "not shown")


async def test_read_only_server_gives_the_reason_and_enforces_it(core: LiveEngine) -> None:
    async with (
        serve(core.handle, host="0.0.0.0") as served,
        running(served.url) as (app, pilot),
    ):
        for key in ("p", "c", "u", "y"):
            await pilot.press(key)
            await until(lambda: "bound to more than loopback" in messages(app), "no reason")
            await pilot.press("escape")
        app.source.feed.model.hello.can_control = True  # a console that does not care
        await pilot.press("p")
        await until(lambda: "403" in messages(app), "the server does not enforce it")
        assert core.runtime.config.reclamation == "auto"


async def test_observer_sees_what_a_change_would_do_and_cannot_make_it(core: LiveEngine) -> None:
    async with (
        serve(core.handle, host="0.0.0.0") as served,
        running(served.url) as (app, pilot),
    ):
        await pilot.press("m", *"32")
        outcome = app.screen.query_one(Outcome)
        await until(lambda: "budget_tokens 64 → 32" in outcome.text, "no what-if")
        await until(lambda: "evicts now" in outcome.text, "no consequences")
        await until(lambda: "apply is off: read-only" in screen_text(app), "not shown as off")
        for key in ("enter", "ctrl+t", "ctrl+y"):
            await pilot.press(key)
            await until(lambda: "Not applied: this server is read-only" in outcome.text, "unsaid")
            assert outcome.text.count("Not applied") == 1
            assert "evicts now" in outcome.text, "the what-if was removed"
        await pilot.press("escape", "U")
        await until(lambda: "there is no earlier configuration" in messages(app), "not asked")
        await pilot.press("escape", "C")
        await until(lambda: "Dry run over all requests" in messages(app), "not tried out")
        assert core.runtime.revision == 1
        assert (await served.service.journal.entries(10)).entries == []


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
async def test_real_terminal_shows_the_what_if_and_applies(
    core: LiveEngine, served: Served, tmp_path: Path
) -> None:
    socket = str(tmp_path / "tmux")
    environment = {**os.environ, "TERM": "xterm-256color", "XDG_CONFIG_HOME": str(tmp_path)}

    async def tmux(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            "tmux", "-S", socket, *arguments, stdout=asyncio.subprocess.PIPE, env=environment
        )
        out, _ = await process.communicate()
        return out.decode()

    async def shows(text: str, pane: str = "vtoken") -> str:
        async with asyncio.timeout(LIMIT_S):
            while text not in (screen := await tmux("capture-pane", "-p", "-t", pane)):
                await asyncio.sleep(0.1)
        return screen

    console = f"{sys.executable} -m vtoken.cli console --url {served.url}"
    await tmux("new-session", "-d", "-s", "vtoken", "-x", "80", "-y", "24", console)
    try:
        screen = await shows("● live")
        assert len(screen.splitlines()) == 24
        await tmux("send-keys", "-t", "vtoken", "t")
        await shows("settings · desired revision 1")
        await tmux("send-keys", "-t", "vtoken", "0.25")
        await shows("theta_f 0.5 → 0.25")
        await tmux("send-keys", "-t", "vtoken", "Enter")
        await shows("Accepted: revision 2")
        assert core.runtime.config.theta_f == 0.25
        await tmux("send-keys", "-t", "vtoken", "Escape")
        await shows("θ 0.25")
        await tmux("send-keys", "-t", "vtoken", "u")
        await shows("Undone: revision 3")
        assert core.runtime.config.theta_f == 0.5
    finally:
        await tmux("kill-server")


async def test_paused_engine_is_shown_as_paused_and_waiting_requests_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A paused engine takes no steps; the console must not report a hang."""
    monkeypatch.setattr(silence, "SILENT_S", 0.5)
    with closing(make_quiet(num_blocks=512)) as core:
        core.admit("runs", 300)
        core.steps(3)
        core.admit("waits", 280)
        async with serve(core.handle) as served, running(served.url, size=(140, 40)) as (app, _):
            served.line.hangs = True  # it answers nobody either
            await until(lambda: "No step for" in screen_text(app), "a hung engine looks alive")
            served.line.hangs = False
            core.reporter.scheduling.changed("paused", time.monotonic())
            expected = (
                "Paused: vLLM schedules nothing until it is resumed; 1 request is suspended, "
                "1 waits."
            )
            await until(lambda: expected in screen_text(app), "not shown")
            assert "No step for" not in screen_text(app)
            assert "● live" in screen_text(app).splitlines()[0]
            assert re.search(r"~waits .* 0 ", screen_text(app))
            core.reporter.scheduling.changed("running", time.monotonic())
            core.steps(1)
            core.publish()
            await until(
                lambda: "Paused" not in app.source.feed.model.status.fragmentation.sentence, "?"
            )
