"""An argument parser with suggestions for misspelt words and a help page with command groups."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

_CHOICE = re.compile(r"invalid choice: '(?P<given>.*)' \(choose from (?P<known>.*)\)")


class Parser(argparse.ArgumentParser):
    """Keeps the layout of examples; prints errors as one line with a suggestion."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)  # a script must not break when a flag is added
        super().__init__(**options)
        self.set_defaults(parser=self)  # subparsers override it: ends as the given command's parser

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; the given command's parser reports unknown arguments."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parsed.parser.refuse_unknown(unknown)
        return parsed

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        option = unknown[0].partition("=")[0]
        if option in known:
            self.error(f"put {option} after the command: {self.prog} {option} …")
        message = f"unrecognized arguments: {' '.join(unknown)}"
        meant = did_you_mean(option, known)
        self.error(f"{message}; {meant}" if meant else message)

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit with 2."""
        match = _CHOICE.search(message)
        if match is not None:
            known = re.findall(r"[\w.-]+", match["known"])
            meant = did_you_mean(match["given"], known) or f"choose from: {', '.join(known)}"
            message = f"invalid choice: {match['given']!r}; {meant}"
        self.exit(2, f"{self.prog}: {message}\n  see: {self.prog} --help\n")


class FrontPage(Parser):
    """The top-level parser; `groups`: heading -> command -> help text."""

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


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`did you mean X?`, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""
