"""The end of a test run says what did not run and how to run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("tests/cli/test_wheel.py", "tests/console/test_console_web.py")
CHOSEN = "test_it_completes or test_page_requires_its_key or test_cookies_are_bounded"


@pytest.mark.parametrize("processes", ["0", "2"])
def test_the_line_before_the_last_one_says_what_did_not_run_and_how_to_run_it(
    processes: str, tmp_path: Path
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "VTOKEN_WHEEL"}
    env["PATH"] = str(tmp_path)  # no browser
    command = [sys.executable, "-m", "pytest", *FILES, "-k", CHOSEN, "-n", processes]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider"], env=env, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *_, said, last = ran.stdout.splitlines()
    assert "1 passed, 2 skipped" in last
    assert said == (
        "did not run: "
        "1 of tests/cli/test_wheel.py (no VTOKEN_WHEEL: `make wheel` runs them); "
        "1 of tests/console/test_console_web.py "
        "(no Chromium on this machine: on Debian, apt install chromium-headless-shell)"
    )


def test_nothing_is_said_when_all_tests_ran(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", *FILES, "-k", "test_cookies_are_bounded"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider"], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "did not run" not in ran.stdout
