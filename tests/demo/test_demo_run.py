"""The demo end to end: server, traffic, controls and screenshots on the trained model."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from vtoken.demo.conversations import CHATS, passages
from vtoken.demo.report import Report
from vtoken.demo.server import VTOKEN, any_free_port
from vtoken.demo.trained_model import TrainedModelError, fetch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]{2,}", text.lower())


def test_a_headless_run_works_every_control_and_the_answers_are_english(tmp_path: Path) -> None:
    try:
        fetch()
    except TrainedModelError as error:
        pytest.skip(str(error))
    command = [*VTOKEN, "demo", "--headless", "--duration=10", "--workers=4", f"--out={tmp_path}"]
    command += [f"--port={any_free_port()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert len(report.controls) > 20
    assert report.traffic.done > 0
    known = {word for _, text in passages() for word in words(text)}
    known |= {word for questions in CHATS for question in questions for word in words(question)}
    said = [word for answer in report.traffic.answers for word in words(answer.text)]
    assert len(said) > 100
    assert sum(word in known for word in said) > 0.6 * len(said)  # random text: next to none
    assert (tmp_path / "recording.jsonl.gz").stat().st_size > 0
    screenshots = [path.read_text() for path in (tmp_path / "screenshots").glob("*.svg")]
    assert len(screenshots) == 2
    assert all("vToken" in svg for svg in screenshots)
    assert "answer:" in done.stdout
