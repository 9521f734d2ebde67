"""The console in a browser: a real page in a real Chromium, and who may open it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import websockets
from browser import browsing, find_browser
from fake_server import FakeServer

pytest.importorskip("textual_serve", reason="the extra `web` is not installed")


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def web_console(*arguments: str, **env: str) -> AsyncIterator[str]:
    """`vtoken console --web` as a process; yields its address."""
    port = free_port()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VTOKEN")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "vtoken.cli", "console", "--web", "--port", str(port), *arguments),
        stdout=asyncio.subprocess.PIPE,
        env=inherited | env,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient() as client, asyncio.timeout(30):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    await client.get(url)
                    break
                await asyncio.sleep(0.1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
async def page_url(server: FakeServer) -> AsyncIterator[str]:
    async with web_console("--url", server.url) as url:
        yield url


async def test_page_shows_the_console_and_keys_reach_it(server: FakeServer, page_url: str) -> None:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium-headless-shell)")
    async with browsing(executable) as page:
        await page.open(page_url)
        await page.until("test-llama")
        await page.until("read-only")
        await asyncio.sleep(1.0)
        assert await page.evaluate("document.querySelectorAll('canvas').length") > 0
        assert await page.evaluate("document.fonts.check('14px \"Roboto Mono\"')")
        picture = await page.picture()
        if folder := os.environ.get("VTOKEN_TEST_PICTURES"):
            Path(folder, "web.png").write_bytes(picture)
        assert len(picture) > 20_000  # a picture of a full screen, not of an empty page
        page.received = b""
        await page.click(300, 400)
        await page.press("?")
        await page.until("restore the configuration")
        page.received = b""
        await page.press("p")
        await asyncio.sleep(0.5)
        hosts = {address.split("/")[2] for address in page.requested if "//" in address}
        assert hosts == {page_url.removeprefix("http://")}
        assert page.problems == []
    assert server.patches == []


async def test_read_only_without_a_token_and_acting_with_one(server: FakeServer) -> None:
    async with web_console("--url", server.url) as url, tab(url) as socket:
        text = await said(socket, b"read-only")
        assert b"read-only" in text
        await socket.send('["stdin", "p"]')
        await said(socket, b"started with --read-only")
    assert server.patches == []
    secret = "a-token-nobody-should-see"
    async with web_console("--url", server.url, VTOKEN_TOKEN=secret) as url, tab(url) as socket:
        await said(socket, b"test-llama")
        await socket.send('["stdin", "p"]')
        await said(socket, b"Reclamation paused")
        assert secret.encode() not in command_lines()
    assert server.patches[0][0] == {"reclamation": "paused"}


def command_lines() -> bytes:
    lines = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines += path.read_bytes()
    return lines


@contextlib.asynccontextmanager
async def tab(url: str, **headers: str) -> AsyncIterator[websockets.ClientConnection]:
    """What the page's script does: one websocket."""
    address = url.replace("http", "ws") + "/ws?width=120&height=36"
    origin = headers.pop("origin", url)
    async with websockets.connect(
        address, max_size=None, proxy=None, origin=origin, additional_headers=headers
    ) as socket:
        yield socket


async def said(socket: websockets.ClientConnection, text: bytes) -> bytes:
    """Everything up to `text`."""
    got = b""
    async with asyncio.timeout(60):
        while text not in got:
            data = await socket.recv()
            got += data if isinstance(data, bytes) else data.encode()
    return got


async def test_foreign_pages_and_foreign_names_are_refused(page_url: str) -> None:
    for origin in ("http://evil.example", "http://127.0.0.1:1", "null"):
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with tab(page_url, origin=origin):
                pass
        assert refused.value.response.status_code == 403
    async with httpx.AsyncClient(base_url=page_url) as client:
        assert (await client.get("/", headers={"Host": "evil.example"})).status_code == 403
        page = await client.get("/")
        assert page.status_code == 200
        assert "https://" not in page.text
        assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]


async def test_tabs_are_bounded_and_a_closed_one_makes_room(page_url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(tab(page_url))
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with tab(page_url):
                pass
        assert refused.value.response.status_code == 503


def test_the_page_is_for_this_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from vtoken.cli import main

    assert main(["console", "--web", "--host", "0.0.0.0"]) == 2
    assert "has no login" in capsys.readouterr().err
