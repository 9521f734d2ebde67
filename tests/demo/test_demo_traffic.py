"""The demo's clients against a small OpenAI server: turns in order, all requests counted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vtoken.demo import traffic as demo_traffic
from vtoken.demo.traffic import BUSY_S, QUIET_S, Traffic, TrafficReport, quiet_left_s

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


def chunk(delta: dict[str, str], reason: str | None = None, **others: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return head | {"choices": [choice]} | others


GOOD = [
    chunk({"content": "Par"}),
    chunk({"content": "is."}, "stop"),
    chunk({}) | {"choices": [], "usage": USAGE},
]


class OpenAIServer(ThreadingHTTPServer):
    """Answers every chat with `chunks`, or with `status`; `bodies` are the requests received."""

    daemon_threads = True

    def __init__(self, chunks: list[dict[str, Any]], status: int, model_len: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.chunks, self.status, self.model_len = chunks, status, model_len
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def do_GET(self) -> None:
        model = {"id": "m", "object": "model", "created": 0, "owned_by": "t"}
        model["max_model_len"] = self.server.model_len
        self._answer(200, "application/json", json.dumps({"object": "list", "data": [model]}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body))
        lines = [f"data: {json.dumps(piece)}\n\n" for piece in self.server.chunks]
        self._answer(self.server.status, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]))

    def _answer(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Nothing: the suite's output is for its results."""


@contextmanager
def serving(
    chunks: list[dict[str, Any]], *, status: int = 200, model_len: int = 4096
) -> Iterator[OpenAIServer]:
    with OpenAIServer(chunks, status, model_len) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_traffic, "THINK_S", (0.0, 0.0))


async def drive(server: OpenAIServer, num_requests: int) -> TrafficReport:
    """Run one client until it has sent `num_requests`."""
    traffic = Traffic(server.url, num_workers=1, seed=0)
    running = asyncio.create_task(traffic.run(drain_s=5.0))
    while len(server.bodies) < num_requests:
        await asyncio.sleep(0.01)
    traffic.stop()
    return await running


async def test_a_turn_carries_the_answers_before_it() -> None:
    with serving(GOOD) as server:
        report = await drive(server, 6)
    later = [body["messages"] for body in server.bodies if len(body["messages"]) > 2]
    assert later
    for messages in later:
        assert [message["role"] for message in messages[:4]] == [
            "system",
            "user",
            "assistant",
            "user",
        ]
        assert messages[2]["content"] == "Paris."
    assert report.answers[0].text == "Paris."


async def test_each_request_is_counted_once_with_its_tokens() -> None:
    with serving(GOOD) as server:
        report = await drive(server, 6)
    assert report.done == len(server.bodies)
    assert (report.output_tokens, report.failed, report.cancelled) == (2 * report.done, 0, 0)


@pytest.mark.parametrize(
    ("chunks", "status", "says"),
    [
        (GOOD[:1], 200, "without a finish reason"),
        (GOOD[:2], 200, "or usage"),
        ([], 500, "InternalServerError"),
    ],
)
async def test_a_stream_that_is_cut_short_is_a_failure(
    chunks: list[dict[str, Any]], status: int, says: str
) -> None:
    with serving(chunks, status=status) as server:
        report = await drive(server, 1)
    assert (report.done, report.failed) == (0, 1)
    assert says in report.failure


@pytest.mark.parametrize("model_len", [600, 2400, 4096])
async def test_no_request_can_exceed_the_context(model_len: int) -> None:
    with serving(GOOD, model_len=model_len) as server:
        await drive(server, 20)
    for body in server.bodies:
        used = sum(len(message["content"]) for message in body["messages"])
        assert used + body["max_tokens"] <= model_len  # a token is a character at least


def test_the_load_swings() -> None:
    assert quiet_left_s(0.0) == 0.0
    assert quiet_left_s(BUSY_S - 0.1) == 0.0
    assert quiet_left_s(BUSY_S) == QUIET_S
    assert quiet_left_s(BUSY_S + QUIET_S - 1.0) == pytest.approx(1.0)
    assert quiet_left_s(2 * (BUSY_S + QUIET_S) + 1.0) == 0.0
