"""The state directory: permissions, default path, its owner, and one that 0.2.0 left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from tests.support.core.live import LiveEngine
from tests.support.serving import serve
from tests.support.waiting import until
from vtoken import __version__, wire
from vtoken.client import AsyncClient, Server
from vtoken.recording import Index, RecordingReader, scan
from vtoken_api.settings import ApiSettings, api_settings
from vtoken_api.state.statedir import StateDir, default_path


def test_directory_is_for_its_user_alone(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "a" / "b")
    state.acquire()
    assert state.path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in state.path.iterdir()} == {0o600}
    state.close()


def test_one_process_owns_the_directory_until_it_dies(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from vtoken_api.state.statedir import StateDir\n"
        "StateDir(Path(sys.argv[1])).acquire(); print('owned', flush=True); sys.stdin.read()"
    )
    mine = StateDir(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "owned\n"
        with pytest.raises(OSError, match="another server uses"):
            mine.acquire()
        other.kill()
    mine.acquire()
    mine.acquire()
    with pytest.raises(OSError, match="--vtoken-state-dir"):
        StateDir(tmp_path).acquire()
    mine.close()


def test_directory_that_cannot_be_made_now_may_be_acquired_later(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = StateDir(tmp_path / "file" / "state")
    with pytest.raises(OSError, match="file"):
        state.acquire()
    (tmp_path / "file").unlink()
    state.acquire()
    state.close()


def test_every_server_has_a_directory_of_its_own() -> None:
    there = {"XDG_STATE_HOME": "/state", "HOME": "/home/ana"}
    assert default_path(8001, None, there) == Path("/state/vtoken/8001")
    assert default_path(8001, "/run/a b.sock", there) == Path("/state/vtoken/run_a_b.sock")
    for unset in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        path = default_path(8000, None, {"HOME": "/home/ana", **unset})
        assert path == Path("/home/ana/.local/state/vtoken/8000")


def left_by_0_2_0(folder: Path) -> Path:
    """`folder` as a server of 0.2.0 left it a minute ago, when it was killed while it recorded.

    Its audit log has rotated: of seven entries four are in the older file.
    """
    shutil.copytree(Path(__file__).with_name("state-0.2.0"), folder)
    (folder / "leader.lock").touch()
    now = time.time()
    for age_s, path in zip((120, 60), sorted((folder / "flight").iterdir()), strict=True):
        _, _, rest = path.name.split("-")
        path = path.rename(path.with_name(f"flight-{(now - age_s) * 1000:013.0f}-{rest}"))
        os.utime(path, (now - age_s + 60, now - age_s + 60))
    return folder


async def test_directory_of_0_2_0_is_read_and_continued(core: LiveEngine, tmp_path: Path) -> None:
    folder = left_by_0_2_0(tmp_path / "state")
    async with (
        serve(core.handle, state_dir=str(folder)) as served,
        AsyncClient(Server(served.url, actor="ana")) as client,
    ):
        await until(lambda: served.engine.flight.recording, "not recording")
        await client.patch_config({"theta_f": 0.35})
        page = await client.audit(1000)
        names = [entry.actor.partition("@")[0] for entry in page.entries]
        assert names == ["n0", "n1", "n2", "n3", "n4", "guard", "last", "ana"]
        assert (page.dropped, page.storage_error, page.entries[5].event_seq) == (0, "", 8)
        path = tmp_path / "all.jsonl.gz"
        path.write_bytes(await client.recording(3600))
    with RecordingReader(path) as reader:
        lines = [entry.line for entry in iter(reader.next, None)]
        *_, index = scan(reader, Index())
        assert (reader.damage, index.error, len(index.keyframes)) == (None, None, 3)
    headers = [line for line in lines if isinstance(line, wire.RecordingHeader)]
    assert [header.vtoken_version for header in headers] == ["0.2.0", "0.2.0", __version__]
    audited = [line.entry for line in lines if isinstance(line, wire.AuditLine)]
    assert [entry.actor.partition("@")[0] for entry in audited] == names


def test_settings_of_the_api_server_name_what_is_wrong() -> None:
    assert api_settings(Namespace()) == ApiSettings()
    known = Namespace(additional_config={"vtoken": {"api": {"state_dir": "/x"}}})
    assert api_settings(known).state_dir == "/x"
    with pytest.raises(ValueError, match="tokn"):
        api_settings(Namespace(additional_config={"vtoken": {"api": {"tokn": "x"}}}))
