"""The basis of `vtoken bench console`: its verdicts, and a real pseudo-terminal."""

from __future__ import annotations

import sys

import pytest

from vtoken_bench.console import FIGURES, KEY, PAGE, SPEED, figures_table
from vtoken_bench.terminal import Terminal


def test_a_goal_is_met_when_every_measurement_meets_it() -> None:
    runs = [
        {name: [1.0] for name in FIGURES} | {KEY: [1.0, 2.0], PAGE: [10.0, pages], SPEED: [400.0]}
        for pages in (20.0, 80.0)
    ]
    rows = {str(row[0]): row for row in figures_table(runs, None).rows}
    assert [rows[name][-1] for name in (KEY, PAGE, SPEED)] == ["met", "undecided", "missed"]
    assert rows[PAGE][1:5] == [15.0, 10.0, 80.0, 80.0]
    assert not any(row[-1] for row in figures_table(runs, 64.0).rows)  # no goals on a slow link


def test_terminal_has_its_size_and_passes_keys_on() -> None:
    code = "import os; print(os.get_terminal_size()); print('got', input())"
    terminal = Terminal([sys.executable, "-c", code], 91, 17)
    try:
        assert terminal.wait_for("columns=91, lines=17") >= terminal.started
        mark = terminal.mark()
        typed = terminal.type(b"key\n")
        assert terminal.wait_for("got key", mark) >= typed
        assert terminal.num_bytes > 0
    finally:
        terminal.close()


def test_a_slow_link_delays_what_is_written() -> None:
    code = "import sys; sys.stdout.write('x' * 3000 + 'end'); sys.stdout.flush(); input()"
    terminal = Terminal([sys.executable, "-c", code], 80, 24, link_bytes_per_s=10_000)
    try:
        first = terminal.wait_for("x")
        assert terminal.wait_for("end") - first >= 0.2  # 3,000 bytes in chunks of 200
    finally:
        terminal.close()


def test_frames_are_counted_once_the_terminal_offers_synchronized_updates() -> None:
    code = (
        "import sys, tty; tty.setraw(0); sys.stdout.write('\\x1b[?2026$p'); sys.stdout.flush(); "
        "reply = sys.stdin.read(11); "
        "sys.stdout.write('\\x1b[?2026hone\\x1b[?2026l\\x1b[?2026htwo\\x1b[?2026l' + repr(reply)); "
        "sys.stdout.flush(); sys.stdin.read(1)"
    )
    terminal = Terminal([sys.executable, "-c", code], 80, 24)
    try:
        terminal.wait_for("?2026;2$y")
        assert terminal.num_frames == 2
    finally:
        terminal.close()


def test_terminal_timeout_reports_the_last_output() -> None:
    terminal = Terminal([sys.executable, "-c", "print('other'); input()"], 80, 24)
    try:
        terminal.wait_for("other")
        with pytest.raises(TimeoutError, match=r"'wanted' was not written in 0\.3 s; last: 'other"):
            terminal.wait_for("wanted", limit_s=0.3)
    finally:
        terminal.close()
