"""The state directory: permissions, default path and its owner."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

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


def test_settings_of_the_api_server_name_what_is_wrong() -> None:
    assert api_settings(Namespace()) == ApiSettings()
    known = Namespace(additional_config={"vtoken": {"api": {"state_dir": "/x"}}})
    assert api_settings(known).state_dir == "/x"
    with pytest.raises(ValueError, match="tokn"):
        api_settings(Namespace(additional_config={"vtoken": {"api": {"tokn": "x"}}}))
