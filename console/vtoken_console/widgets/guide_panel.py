"""One step of the guided first minute, in a panel that covers nothing."""

from __future__ import annotations

import re
import textwrap

from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, LinesWidget

GUIDE_LINES = 4  # including the border


class GuidePanel(LinesWidget):
    """Hidden while no guide is running."""

    def show(self, view: View) -> None:
        self.display = view.guide is not None
        super().show(view)

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        step = view.guide
        if step is None:
            return []
        title = f"first minute · {step.number} of {step.count}"
        self.set_titles(title, f"{view.key('skip-guide')} skip")
        text = re.sub("{key:([^}]*)}", lambda match: view.key(match[1]), step.text)
        lines = textwrap.wrap(text, max(10, width - 2))
        return [((f" {line}", palette.TEXT_STYLE),) for line in lines]
