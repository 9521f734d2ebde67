"""The console in a browser: a real page in a real Chromium, and its access control."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import websockets

from tests.support.browser import browsing, find_browser
from tests.support.serving import Served
from tests.support.small_files import limited
from tests.support.waiting import LIMIT_S

pytest.importorskip("textual_serve", reason="the extra `web` is not installed")
pytestmark = pytest.mark.slow  # processes of their own, and a browser


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def web_console(*arguments: str, **env: str) -> AsyncIterator[str]:
    """Runs `vtoken console --web` as a process; yields its URL."""
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
        async with httpx.AsyncClient() as client, asyncio.timeout(LIMIT_S):
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
            await asyncio.wait_for(process.wait(), LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
async def page_url(served: Served) -> AsyncIterator[str]:
    async with web_console("--url", served.url) as url:
        yield url


SECRET = "a-token-nobody-should-see"


@contextlib.asynccontextmanager
async def acting_console(served: Served, folder: Path) -> AsyncIterator[str]:
    """A web console with a token; its key file is in `folder`."""
    env = {"VTOKEN_TOKEN": SECRET, "XDG_RUNTIME_DIR": str(folder)}
    async with web_console("--url", served.url, **env) as url:
        yield url


def page_key(folder: Path) -> str:
    """The key for the next browser, read from the key file."""
    (file,) = folder.glob("vtoken/console-*.key")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    return file.read_text().strip()


BROWSER = find_browser()


@pytest.mark.skipif(
    BROWSER is None,
    reason="no Chromium on this machine: on Debian, apt install chromium-headless-shell",
)
async def test_page_requires_its_key_then_shows_the_console_and_receives_keys(
    served: Served, tmp_path: Path
) -> None:
    assert BROWSER is not None
    async with acting_console(served, tmp_path) as page_url, browsing(BROWSER) as page:
        await page.open(page_url)
        form = "document.activeElement && document.activeElement.name"
        async with asyncio.timeout(LIMIT_S):
            while await page.evaluate(form) != "key":
                await asyncio.sleep(0.05)
        assert page.received == b""
        await page.call("Input.insertText", text=page_key(tmp_path))
        await page.evaluate("document.querySelector('button').click()")
        await page.until("test-llama")
        assert await page.evaluate("document.cookie") == "", "a script can read the cookie"
        assert await page.evaluate("location.pathname + location.search") == "/"
        await asyncio.sleep(1.0)
        assert await page.evaluate("document.querySelectorAll('canvas').length") > 0
        assert await page.evaluate("document.fonts.check('14px \"Roboto Mono\"')")
        picture = await page.picture()
        if folder := os.environ.get("VTOKEN_TEST_PICTURES"):
            Path(folder, "web.png").write_bytes(picture)
        assert len(picture) > 20_000  # a picture of a full screen, not of an empty page
        page.received = b""
        await page.click(300, 400)
        await page.press("H")
        await page.until("Cancel")
        await page.press("ArrowRight")
        await page.press("Enter")
        await page.until("Reclamation paused")
        await page.press("?")
        await page.until("restore the configuration")
        hosts = {address.split("/")[2] for address in page.requested if "//" in address}
        assert hosts == {page_url.removeprefix("http://")}
        assert page.problems == []
    assert served.calls_of("patch_config")[0].patch == {"reclamation": "paused"}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("phone", [(360, 640), (390, 844)])
async def test_a_phone_gets_the_narrow_layout_of_a_linked_request(
    page_url: str, phone: tuple[int, int]
) -> None:
    assert BROWSER is not None
    async with browsing(BROWSER) as page:
        await page.open(f"{page_url}/?request=cmpl-a91f", phone)
        await page.until("token table")
        (address,) = (url for url in page.requested if url.startswith("ws:"))
        path, _, query = address.partition("?")
        assert path.endswith("/ws/cmpl-a91f")
        width, height = (int(part.partition("=")[2]) for part in query.split("&"))
        assert 60 <= width < 80
        assert height >= 18
        assert page.problems == []
        if folder := os.environ.get("VTOKEN_TEST_PICTURES"):
            Path(folder, f"phone-{phone[0]}.png").write_bytes(await page.picture())


async def test_a_link_that_names_no_request_is_refused(page_url: str) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with tab(page_url, "/--read-only%20x"):
            pass
    assert refused.value.response.status_code == 400


async def test_without_a_token_the_page_is_read_only_and_needs_no_key(
    served: Served, page_url: str
) -> None:
    async with tab(page_url) as socket:
        await read_until(socket, b"read-only")
        await socket.send('["stdin", "H"]')
        await read_until(socket, b"started with --read-only")
    assert served.calls_of("patch_config") == []


async def test_a_console_that_can_act_requires_the_key(served: Served, tmp_path: Path) -> None:
    async with acting_console(served, tmp_path) as url, httpx.AsyncClient(base_url=url) as http:
        key = page_key(tmp_path)
        login = await http.get("/?request=cmpl-a91f")
        assert 'name="key"' in login.text
        assert 'action="login?request=cmpl-a91f"' in login.text
        assert "terminal" not in login.text
        for cookie in ({}, {"Cookie": f"vtoken_console_{url.rpartition(':')[2]}=guess"}):
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with tab(url, **cookie):
                    pass
            assert refused.value.response.status_code == 401
            assert (await http.get("/download/x", headers=cookie)).status_code == 401
        for wrong in ("", "x" * 64, key[:-1], "\udcff"):
            data = {"key": wrong.encode(errors="surrogateescape")}
            answer = await http.post("/login", data=data)
            assert (answer.status_code, "Set-Cookie" in answer.headers) == (403, False)
        foreign = await http.post("/login", data={"key": key}, headers={"Origin": "null"})
        assert foreign.status_code == 403
        given = await http.post("/login?request=cmpl-a91f", data={"key": f" {key.upper()} "})
        assert (given.status_code, given.headers["Location"]) == (303, "/?request=cmpl-a91f")
        cookie = given.headers["Set-Cookie"]
        for part in ("HttpOnly", "SameSite=Strict", "Path=/"):
            assert part in cookie
        shown = {"Cookie": cookie.partition(";")[0]}
        assert "terminal" in (await http.get("/", headers=shown)).text
        async with httpx.AsyncClient(base_url=url) as other:
            again = await other.post("/login", data={"key": key})
        assert again.status_code == 403, "a key opens one browser"
        assert page_key(tmp_path) != key
        async with tab(url, **shown) as socket:
            await read_until(socket, b"test-llama")
            await socket.send('["stdin", "H"]')
            await read_until(socket, b"Cancel")
            await socket.send('["stdin", "\\t\\r"]')
            await read_until(socket, b"Reclamation paused")
            shown_to_all = command_lines()
            for secret in (SECRET, key, page_key(tmp_path), shown["Cookie"].partition("=")[2]):
                assert secret.encode() not in shown_to_all
    assert served.calls_of("patch_config")[0].patch == {"reclamation": "paused"}
    assert list(tmp_path.glob("vtoken/*")) == [], "the key outlives the console"


def test_cookies_are_bounded_and_the_oldest_is_dropped_first() -> None:
    from vtoken_console.output.web_login import MAX_BROWSERS, LoginGate

    keys: list[str] = []
    gate = LoginGate(keys.append)
    cookies = [gate.open_with(keys[-1]) or "" for _ in range(MAX_BROWSERS + 1)]
    assert [gate.admits(cookie) for cookie in cookies] == [False] + [True] * MAX_BROWSERS
    assert not gate.admits("")
    assert len(set(keys)) == MAX_BROWSERS + 2
    assert gate.open_with(keys[0]) is None


def command_lines() -> bytes:
    lines = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines += path.read_bytes()
    return lines


@contextlib.asynccontextmanager
async def tab(
    url: str, link: str = "", **headers: str
) -> AsyncIterator[websockets.ClientConnection]:
    """Opens one websocket, as the page's script does."""
    address = url.replace("http", "ws") + f"/ws{link}?width=120&height=36"
    origin = headers.pop("origin", url)
    async with websockets.connect(
        address, max_size=None, proxy=None, origin=origin, additional_headers=headers
    ) as socket:
        yield socket


async def read_until(socket: websockets.ClientConnection, text: bytes) -> bytes:
    """Reads until `text` arrives."""
    got = b""
    async with asyncio.timeout(LIMIT_S):
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


async def test_tabs_are_bounded_and_closing_one_frees_a_slot(page_url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(tab(page_url))
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with tab(page_url):
                pass
        assert refused.value.response.status_code == 503


def test_the_page_is_for_this_machine_only(capsys: pytest.CaptureFixture[str]) -> None:
    from vtoken.cli import main

    assert main(["console", "--web", "--host", "0.0.0.0"]) == 2
    assert "is not loopback" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["file", "full"])
def test_a_key_that_cannot_be_stored_is_said_and_leaves_no_file(
    tmp_path: Path, folder: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "file").write_text("")
    limit = "0" if folder == "full" else "unlimited"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VTOKEN")}
    command = (sys.executable, "-m", "vtoken.cli", "console", "--web", "--port", str(free_port()))
    ran = subprocess.run(
        limited(*command, blocks=limit),
        env=inherited | {"VTOKEN_TOKEN": SECRET, "XDG_RUNTIME_DIR": str(tmp_path / folder)},
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"vtoken: the page key cannot be written to {tmp_path / folder}/")
    assert not list(tmp_path.rglob("console-*"))
