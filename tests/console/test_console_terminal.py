"""The console in a real terminal: started in tmux, driven by keys, checked on its screen."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.support.core.live import LiveEngine
from tests.support.serving import Served

SIZE = (120, 36)


class Tmux:
    """A session of a private tmux server."""

    def __init__(self) -> None:
        self.socket = f"vtoken-{uuid.uuid4().hex[:8]}"

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self.socket, "-f", "/dev/null", *arguments],
            capture_output=True,
            text=True,
            check=True,
            env=dict(os.environ),  # without COLUMNS and LINES, which readline sets beside it
        )
        return done.stdout

    def screen(self) -> str:
        return self("capture-pane", "-p", "-t", "console")

    async def shows(self, wanted: Callable[[str], bool], what: str, limit_s: float = 60.0) -> str:
        """Waits until the screen matches, and returns it."""
        for _ in range(int(limit_s / 0.1)):
            if wanted(text := await asyncio.to_thread(self.screen)):
                return text
            await asyncio.sleep(0.1)
        raise AssertionError(f"{what}\n{self.screen()}")


@pytest.fixture
def tmux() -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    session = Tmux()
    yield session
    subprocess.run(["tmux", "-L", session.socket, "kill-server"], capture_output=True, check=False)


async def test_console_is_started_driven_and_left_in_a_real_terminal(
    tmux: Tmux, core: LiveEngine, served: Served
) -> None:
    width, height = SIZE
    path = os.pathsep.join(sys.path)
    command = f"{sys.executable} -m vtoken.cli console --url {served.url} --colors 256; cat"
    size = ("-x", str(width), "-y", str(height))
    tmux("new-session", "-d", "-s", "console", *size, "-e", f"PYTHONPATH={path}", command)
    text = await tmux.shows(lambda t: "pool · 399 blocks" in t, "no first frame")
    assert "● live" in text.splitlines()[0]
    assert "q quit" in text.rstrip().splitlines()[-1]
    tmux("send-keys", "-t", "console", "o")
    await tmux.shows(lambda t: "Map by request" in t, "the colours do not change")
    tmux("send-keys", "-t", "console", "/")
    await tmux.shows(lambda t: "part of an id" in t, "no field for the filter")
    tmux("send-keys", "-t", "console", "-l", "state:free")
    free = int((core.reporter.flags() == 0).sum())
    found = f"{free} of 399 blocks match"
    await tmux.shows(lambda t: found in t, "the filter does not count")
    tmux("send-keys", "-t", "console", "Escape")
    await tmux.shows(lambda t: found not in t, "the filter is not cleared")
    tmux("send-keys", "-t", "console", "H")
    await tmux.shows(lambda t: "Pause reclamation on 127.0.0.1" in t, "it does not ask")
    tmux("send-keys", "-t", "console", "Right", "Enter")
    await tmux.shows(lambda _: core.runtime.config.reclamation == "paused", "pause was not sent")
    tmux("send-keys", "-t", "console", ":")
    await tmux.shows(lambda t: "key  " in t, "no palette")
    tmux("send-keys", "-t", "console", "-l", "theta_f")
    await tmux.shows(lambda t: "setting  theta_f" in t, "not found")
    tmux("send-keys", "-t", "console", "Enter")
    await tmux.shows(lambda t: "settings ·" in t, "no settings")
    tmux("send-keys", "-t", "console", "0.1")
    await tmux.shows(lambda t: "theta_f 0.25 → 0.1" in t, "no what-if of the typed value")
    tmux("send-keys", "-t", "console", "Enter")
    await tmux.shows(lambda t: "Accepted: revision 3" in t, "not applied")
    tmux("send-keys", "-t", "console", "Escape")
    await tmux.shows(lambda t: "settings ·" not in t, "page not closed")
    tmux("send-keys", "-t", "console", "u")
    await tmux.shows(lambda _: core.runtime.config.theta_f == 0.25, "not undone")
    small = ("-x", "80", "-y", "24")
    tmux("resize-window", "-t", "console", *small)
    text = await tmux.shows(lambda t: "log ─" not in t, "not laid out anew")
    assert "requests ·" in text
    assert max(map(len, text.splitlines())) <= 80
    tmux("send-keys", "-t", "console", "q")
    await tmux.shows(lambda t: "pool ·" not in t, "page not closed")
