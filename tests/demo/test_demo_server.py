"""The demo's server: it stops all its processes, and reports why a server exits."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from vtoken.demo import server as demo_server
from vtoken.demo.server import HOST, DemoError, ProcessGroup, Server, pick_port

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def make_server(
    monkeypatch: pytest.MonkeyPatch,
    log: Path,
    program: str,
    *,
    startup_timeout_s: float = 60.0,
    stock: bool = False,
) -> Server:
    """A Server that runs the given Python program instead of `vtoken`."""
    monkeypatch.setattr(demo_server, "VTOKEN", [sys.executable, "-c", program])
    return Server(
        "model",
        port=pick_port(None),
        arguments=[],
        log=log,
        environment={},
        startup_timeout_s=startup_timeout_s,
        stock=stock,
    )


def is_running(pid: int) -> bool:
    """Whether the process `pid` is running; False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stop_ends_the_children_of_the_first_process_too(tmp_path: Path) -> None:
    group = ProcessGroup([sys.executable, "-c", PARENT], tmp_path / "log")
    while not (text := (tmp_path / "log").read_text()).endswith("\n"):
        time.sleep(0.01)
    assert is_running(int(text))
    assert group.stop() == -signal.SIGTERM
    while is_running(int(text)):  # SIGKILL was sent; the suite's time limit is the bound
        time.sleep(0.01)


def test_stop_kills_what_ignores_the_request(tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(600)"
    group = ProcessGroup([sys.executable, "-u", "-c", program], tmp_path / "log")
    while not (tmp_path / "log").read_text():
        time.sleep(0.01)
    assert group.stop(wait_s=0.1) == -signal.SIGKILL


def test_a_server_that_dies_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "print('WARNING OSError: harmless'); raise ValueError('no such flag')"
    server = make_server(monkeypatch, tmp_path / "log", program)
    with (
        pytest.raises(DemoError, match=r"exited with status 1(?s:.*)ValueError: no such flag"),
        server,
    ):
        pass
    assert server.first_error() == "ValueError: no such flag"


def test_a_server_that_is_not_ready_in_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    server = make_server(monkeypatch, tmp_path / "log", program, startup_timeout_s=2.0)
    with pytest.raises(DemoError, match="not ready after 2 s"), server:
        pass
    assert not is_running(int((tmp_path / "log").read_text()))


ONLY_HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_server_without_vtoken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(monkeypatch, tmp_path / "log", ONLY_HEALTHY)
    with pytest.raises(DemoError, match="does not answer /vtoken/v1/engines"), server:
        pass


def test_a_stock_server_is_ready_without_vtokens_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_server, "VLLM", [sys.executable, "-c", ONLY_HEALTHY])
    server = make_server(monkeypatch, tmp_path / "log", "", stock=True)
    with server:
        server.check_alive()


def test_a_taken_port_is_refused_by_name_and_avoided_by_default() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DemoError, match=f"port {port} on {HOST} is taken"):
            pick_port(port)
        assert pick_port(None) != port


def test_children_are_in_a_session_of_their_own(tmp_path: Path) -> None:
    group = ProcessGroup([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    assert os.getsid(group.process.pid) == group.process.pid != os.getsid(0)
    group.stop()
