"""`vtoken serve`: token files are checked before the model loads, and only their names travel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vtoken.vllm.serve import server_command

TOKEN = "the-control-token-0123"


def test_only_the_names_of_token_files_are_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").write_text(TOKEN)
    monkeypatch.chdir(tmp_path)
    flags = ["--vtoken-control-token-file", "control", "--vtoken-state-dir", "state"]
    command = server_command(["m", *flags])
    assert TOKEN not in " ".join(command)
    config = json.loads(command[command.index("--additional-config") + 1])
    assert config["vtoken"]["api"] == {
        "control_token_file": str(tmp_path / "control"),
        "state_dir": str(tmp_path / "state"),
    }


@pytest.mark.parametrize("content", [None, "", "short", "no spaces in it, please!"])
def test_bad_token_file_ends_with_2_and_names_the_file(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "read"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        server_command(["m", "--vtoken-read-token-file", str(path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert not content or content not in said
