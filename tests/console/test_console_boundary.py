"""Which modules the console imports and when; screenshots without a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.console_harness import make_busy
from tests.support.served_core import serving
from vtoken_console.output import screenshot

FORBIDDEN = ("vllm", "torch", "fastapi", "zmq", "vtoken_api", "transformers")
LATE = ("numpy", "httpx", "websockets", "msgspec")


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_console_imports_the_wire_only() -> None:
    loaded = modules_after(
        "import pkgutil, importlib, vtoken_console as c\n"
        "for m in pkgutil.walk_packages(c.__path__, 'vtoken_console.'):\n"
        "    importlib.import_module(m.name)"
    )
    assert not loaded & set(FORBIDDEN)
    ours = {m for m in loaded if m.startswith("vtoken.")}
    ours -= {m for m in ours if m.split(".")[1] in ("client", "recording")}
    wire = {"vtoken.wire", "vtoken.bounds", "vtoken.errors"}
    assert ours == wire | {"vtoken.stream", "vtoken.stream.reducer"}


def test_first_frame_waits_for_neither_numpy_nor_the_network_libraries() -> None:
    assert not modules_after("import vtoken_console.app.app") & set(LATE)


@pytest.mark.slow
async def test_screenshots_are_written_for_each_view(tmp_path: Path) -> None:
    async with serving(make_busy(100, 3)) as served:
        written = await screenshot.take(
            served.url, tmp_path, size=(100, 30), views=["pool", "request"], settle_s=0.2
        )
    names = {p.name for p in written if p.suffix == ".svg"}
    assert names == {"console-pool.svg", "console-request.svg"}
    assert "100" in (tmp_path / "console-pool.svg").read_text(encoding="utf-8")


def test_screenshot_of_no_server_fails_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screenshot, "TIMEOUT_S", 0.5)
    assert screenshot.main(["--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 1
    assert "no data from http://127.0.0.1:9" in capsys.readouterr().err


def test_screenshot_size_must_be_a_size(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as usage:
        screenshot.main(["--out", str(tmp_path), "--size", "wide"])
    assert usage.value.code == 2
