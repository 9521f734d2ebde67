"""How much host memory parked tokens may take: flags, sizes, and what `auto` finds on a host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support.cli_harness import Url, run
from tests.support.core.live import LiveEngine
from vtoken.base.errors import UnsupportedError
from vtoken.base.quantities import size_bytes
from vtoken.vllm import serve
from vtoken.vllm.serve import server_command
from vtoken.vllm.startup import host_memory
from vtoken.vllm.startup.settings import initial_config, read_settings
from vtoken.wire import Geometry

GIB = 1 << 30
POOL = Geometry(
    num_blocks=1024,
    block_size=16,
    num_layers=4,
    num_kv_heads=2,
    head_size=64,
    bytes_per_token=1 << 16,  # a pool of 1 GiB
)


def patch(*words: str) -> dict[str, Any]:
    return serve.initial_patch(serve.build_parser().parse_args(words))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4294967296", 4 * GIB),
        ("4GiB", 4 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("512MiB", GIB // 2),
        ("4GB", 4_000_000_000),
        ("4G", 4 * GIB),  # as for vLLM's flags
        ("4g", 4_000_000_000),
        ("100B", 100),
    ],
)
def test_a_size_is_bytes_with_a_unit(text: str, num_bytes: int) -> None:
    assert size_bytes(text) == num_bytes
    assert patch("--vtoken-park-bytes", text) == {"park_bytes": num_bytes}


@pytest.mark.parametrize("text", ["", "-1", "4iB", "4 gigs", "GiB", "1e9", "0x10", "4Gi", "Auto"])
def test_what_is_no_size_is_refused_by_the_flag(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        server_command(["m", f"--vtoken-park-bytes={text}"])
    assert f"{text!r} is not a size; expected bytes, or a size" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match=r"park_bytes: .* is not a size.*, or auto"):
        initial_config(read_settings({"vtoken": {"config": {"park_bytes": text}}}), POOL)


def test_auto_parks_unless_the_flag_says_otherwise() -> None:
    auto = ("--vtoken-policy", "auto")
    assert patch(*auto)["park_bytes"] == "auto"
    assert patch(*auto, "--vtoken-park-bytes", "0")["park_bytes"] == 0
    assert patch(*auto, "--vtoken-park-bytes", "1GiB")["park_bytes"] == GIB
    assert "park_bytes" not in patch("--vtoken-policy", "keydiff")
    assert patch("--vtoken-park-bytes", "auto") == {"park_bytes": "auto"}


@pytest.mark.parametrize(
    ("free", "engines", "parked", "said"),
    [
        (
            3 * GIB,
            1,
            3 * GIB // 4,
            "805 MB of host memory: a quarter of the 3.2 GB of free host memory",
        ),
        (64 * GIB, 1, 2 * GIB, "2.1 GB of host memory: twice the cache of 1.1 GB"),
        (
            3 * GIB,
            2,
            3 * GIB // 8,
            "403 MB of host memory: a quarter of the 3.2 GB of free host memory, for 2 engines",
        ),
        (0, 1, 0, "0 B of host memory: a quarter of the 0 B of free host memory"),
    ],
)
def test_auto_is_a_share_of_what_is_free_and_says_which(
    free: int, engines: int, parked: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(host_memory, "free_bytes", lambda: free)
    monkeypatch.setattr(host_memory.log, "info", lambda text, *of: lines.append(text % of))
    told = {"vtoken": {"config": {"park_bytes": "auto"}, "local_engines": engines}}
    assert initial_config(read_settings(told), POOL).park_bytes == parked
    assert lines == [f"vToken: tokens that give way may take {said}"]


LIMITS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@pytest.mark.parametrize("controllers", ["", "memory", "cpu,memory"])
@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({}, 100),
        ({"": "max"}, 100),
        ({"": "90"}, 90 - 20),  # pages of files are given up before a process is
        ({"pod/job": "90", "pod": "60"}, 60 - 20),  # of the group above it
        ({"pod/job": "15"}, 0),
        ({"elsewhere": "1"}, 100),
    ],
)
def test_what_is_free_is_within_the_limits_of_all_its_control_groups(
    controllers: str,
    limits: dict[str, str],
    free: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, limit, usage, cached = LIMITS["memory" if controllers else ""]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    groups, proc = tmp_path / "groups", tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(f"3:cpuset:/\n0:{controllers}:/pod/job\n")
    for name, most in limits.items():
        folder = groups / root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{most}\n")
        (folder / usage).write_text("50\n")
        (folder / "memory.stat").write_text(f"anon 20\n{cached} 30\n")
    assert host_memory.free_bytes(proc, groups) == free
    assert host_memory.free_bytes(tmp_path / "none", groups) == 100


async def test_a_live_change_takes_a_size_on_the_command_line_and_bytes_on_the_wire(
    url: Url, core: LiveEngine
) -> None:
    ran = await run("config", "set", "park_bytes=4GiB", *url)
    assert (ran.code, core.runtime.config.park_bytes) == (0, 4 * GIB)
    for text in ("auto", "4 gigs"):
        ran = await run("config", "set", f"park_bytes={text}", *url)
        assert (ran.code, f"park_bytes: {text!r} is not a size" in ran.err) == (2, True)
