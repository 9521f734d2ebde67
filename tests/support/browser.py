"""A headless Chromium, driven through its DevTools protocol.

Supports only the calls that tests need: open a page, type, click, take a screenshot.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.support.waiting import LIMIT_S

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no other host can be reached
    "--remote-debugging-port=0",
    "--window-size=1200,800",
)
KEY_CODES = {"ArrowRight": 39, "Enter": 13}  # of keys that are no characters
_LISTENING = re.compile(rb"DevTools listening on (ws://\S+)")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab; `received`: all messages to its websockets; `problems`: its errors."""

    def __init__(self, socket: ClientConnection) -> None:
        self.received = b""
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._socket = socket
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> Any:
        number = len(self._calls) + 1
        self._calls[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._socket.send(json.dumps(message))
        return await asyncio.wait_for(self._calls[number], LIMIT_S)

    async def open(self, url: str, phone: tuple[int, int] | None = None) -> None:
        """`phone`: width and height of its screen, in CSS pixels."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        if phone is not None:
            size = dict(zip(("width", "height"), phone, strict=True))
            await self.call(
                "Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=True
            )
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def click(self, x: int, y: int) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def press(self, key: str) -> None:
        """`key`: a character, or one of KEY_CODES."""
        code = {"windowsVirtualKeyCode": KEY_CODES[key]} if key in KEY_CODES else {}
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and not code else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **text, **code)

    async def picture(self) -> bytes:
        """PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    async def until(self, text: str) -> None:
        """Wait for `text` in the messages of the websocket."""
        async with asyncio.timeout(LIMIT_S):
            while text.encode() not in self.received:
                await asyncio.sleep(0.05)

    def close(self) -> None:
        self._reader.cancel()

    async def _read(self) -> None:
        async for raw in self._socket:
            message = json.loads(raw)
            if "id" in message:
                future = self._calls[message["id"]]
                if "error" in message:
                    future.set_exception(RuntimeError(str(message["error"])))
                else:
                    future.set_result(message["result"])
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.webSocketFrameReceived":
            frame = params["response"]
            data = frame["payloadData"]
            self.received += base64.b64decode(data) if frame["opcode"] == 2 else data.encode()
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requested.append(params["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])


@contextlib.asynccontextmanager
async def browsing(executable: str) -> AsyncIterator[Page]:
    """A fresh browser with one page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            executable,
            *FLAGS,
            f"--user-data-dir={profile}",
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(LIMIT_S):
                while (match := _LISTENING.search(line := await process.stderr.readline())) is None:
                    assert line, "the browser has ended"
            async with connect(match[1].decode(), max_size=None, proxy=None) as socket:
                page = Page(socket)
                try:
                    yield page
                finally:
                    page.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
