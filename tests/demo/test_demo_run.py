"""The demo end to end: server, traffic, controls and screenshots on the trained model."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from vtoken import wire
from vtoken.demo.conversations import CHATS, passages
from vtoken.demo.run import main
from vtoken.demo.server import VTOKEN, any_free_port
from vtoken.recording import RecordingReader


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]{2,}", text.lower())


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_named(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--headless", "--out", str(tmp_path / out)]) == 1
    assert f"{tmp_path / out}'; the demo writes into a folder, which --out names" in (
        capsys.readouterr().err
    )


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("trained_model")
def test_a_headless_run_works_every_control_and_the_answers_are_english(tmp_path: Path) -> None:
    command = [*VTOKEN, "demo", "--headless", "--duration=4", "--workers=4", f"--out={tmp_path}"]
    command += [f"--port={any_free_port()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert len(re.findall("^ok ", done.stderr, re.MULTILINE)) > 20
    known = {word for text in passages() for word in words(text)}
    known |= {word for questions in CHATS for question in questions for word in words(question)}
    answers = re.findall("^answer: (.*)$", done.stdout, re.MULTILINE)
    said = [word for answer in answers for word in words(answer)]
    assert len(said) > 5
    assert sum(word in known for word in said) > 0.6 * len(said)  # random text: next to none
    with RecordingReader(tmp_path / "recording.jsonl.gz") as reader:
        assert any(isinstance(entry.line, wire.Snapshot) for entry in iter(reader.next, None))
    screenshots = [path.read_text() for path in (tmp_path / "screenshots").glob("*.svg")]
    assert len(screenshots) == 2
    assert all("vToken" in svg for svg in screenshots)
