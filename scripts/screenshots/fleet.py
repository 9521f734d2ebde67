"""The demo's server with several engines: one differs from the others, and one does not answer.

The silent engine's process is stopped while a picture is taken, and goes on afterwards.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from vtoken.client import Client, Server
from vtoken.demo import run as demo
from vtoken.demo.server import DemoError

NUM_ENGINES = 4
NUM_CLIENTS = "8"
DIFFERS, SILENT = 1, 3
TRAFFIC_S = 20.0
STARTUP_S = "1800"


Silence = Callable[[], AbstractContextManager[None]]


@contextmanager
def fleet_server() -> Iterator[tuple[str, Silence]]:
    """The server's URL, and what stops one engine within a block, long enough to be seen."""
    with tempfile.TemporaryDirectory(prefix="vtoken-screenshots-") as folder:
        words = ["--headless", "--out", folder, "--workers", NUM_CLIENTS]
        words += ["--engines", f"{NUM_ENGINES}", "--startup-timeout", STARTUP_S]
        options = demo.parse(words)
        server = demo.make_server(options)
        with server:
            with Client(Server(server.url, engine=DIFFERS), timeout_s=60.0) as client:
                client.patch_config({"theta_f": 0.4})
            process = _engine_process(server.pid, SILENT)

            @contextmanager
            def silence() -> Iterator[None]:
                os.kill(process, signal.SIGSTOP)
                try:
                    yield
                finally:
                    os.kill(process, signal.SIGCONT)

            with demo.traffic(server, options, drain_s=0.0):
                time.sleep(TRAFFIC_S)
                yield server.url, silence


def _engine_process(group: int, rank: int) -> int:
    """The process of engine `rank` in a process group, by its title `VLLM::EngineCore_DP<rank>`.

    Raises DemoError if there is none.
    """
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        try:
            title = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if os.getpgid(pid) == group and f"EngineCore_DP{rank}" in title:
                return pid
        except OSError:  # it has ended
            continue
    raise DemoError(f"the process of engine {rank} is not found in /proc")
