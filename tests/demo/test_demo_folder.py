"""The demo's folder: one that cannot be written is named, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtoken.demo.run import main


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_named(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--headless", "--out", str(tmp_path / out)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("vtoken demo: ")
    assert str(tmp_path / out) in said
    assert said.endswith("; the demo writes into a folder, which --out names\n")
