"""A progress line on stderr that counts seconds."""

from __future__ import annotations

import sys
import time


class Progress:
    """A line rewritten every second; without a terminal, a line every ten seconds."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._shown_s = -1

    def tick(self) -> None:
        """Show the elapsed seconds. Cheap to call often."""
        seconds = int(time.monotonic() - self._start)
        step = 1 if self._terminal else 10
        if seconds // step != self._shown_s:
            self._shown_s = seconds // step
            start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
            print(f"{start}{self._text}: {seconds} s", end=end, file=sys.stderr, flush=True)

    def done(self, text: str) -> None:
        start = "\r\033[K" if self._terminal else ""
        seconds = time.monotonic() - self._start
        print(f"{start}{text} after {seconds:.1f} s", file=sys.stderr, flush=True)
