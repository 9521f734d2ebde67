"""An argument parser that says what was meant, and whose first page groups the commands.

Knows argparse, not the commands.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

_CHOICE = re.compile(r"invalid choice: '(?P<given>.*)' \(choose from (?P<known>.*)\)")


class Parser(argparse.ArgumentParser):
    """Examples stay as they are written; errors are one line, what was meant, and where help is."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)  # a script must not break when a flag is added
        super().__init__(**options)
        self.set_defaults(parser=self)  # the one whose command was given: the last that parses

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever, but what is unknown is told by the command that was given."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parsed.parser.refuse_unknown(unknown)
        return parsed

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        option = unknown[0].partition("=")[0]
        if option in known:
            self.error(f"{option} stands behind the command: {self.prog} {option} …")
        message = f"unrecognized arguments: {' '.join(unknown)}"
        self.error(message + _meant(option, known))

    def error(self, message: str) -> NoReturn:
        """Ends the process with 2."""
        match = _CHOICE.search(message)
        if match is not None:
            known = re.findall(r"[\w.-]+", match["known"])
            message = f"no {match['given']!r} here{_meant(match['given'], known)}"
            if not message.endswith("?"):
                message += f"; there are: {', '.join(known)}"
        self.exit(2, f"{self.prog}: {message}\n  see: {self.prog} --help\n")


class FrontPage(Parser):
    """The parser of the program itself; `groups`: heading -> command -> what it does."""

    def __init__(self, groups: Mapping[str, Mapping[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self._groups = groups

    def format_help(self) -> str:
        lines = [f"usage: {self.prog} COMMAND …", "", self.description or ""]
        width = max(len(name) for group in self._groups.values() for name in group)
        for heading, group in self._groups.items():
            lines += ["", f"{heading}:"]
            lines += [f"  {name:<{width}}  {text}" for name, text in group.items()]
        return "\n".join([*lines, "", self.epilog or ""])


def _meant(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
