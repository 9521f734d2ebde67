"""Wraps text token by token and records the position of every token.

Lines break at blanks; a word longer than a line is split. Later tokens never change earlier lines,
except that the last word may move to a new line.
"""

from __future__ import annotations

import re
import unicodedata

from rich.cells import cell_len

Piece = tuple[int, str]  # a token and consecutive characters of it in one line

NEWLINE = "↵"
_PARTS = re.compile(r"\n| +|[^ \n]+")


def printable(text: str) -> str:
    """`text` without characters that a terminal interprets; line breaks stay.

    Control characters become their Unicode control pictures, all blanks become a space, and
    invisible characters (joiners, direction marks) are removed.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char == "\n" else _printable(char) for char in text)


def _printable(char: str) -> str:
    if char == "\t":
        return "    "
    kind = unicodedata.category(char)
    if kind == "Cc":
        return chr(0x2400 + ord(char)) if char < " " else "\ufffd"
    if kind in ("Zs", "Zl", "Zp"):
        return " "
    return "" if kind in ("Cf", "Cs") else char


class Flow:
    """`lines` of at most `width` columns; `line_of[token]`: the line in which a token begins."""

    def __init__(self, width: int) -> None:
        self.width = max(2, width)  # a character may be two columns wide
        self.lines: list[list[Piece]] = [[]]
        self.line_of: list[int] = []
        self._column = 0  # after the last line's last character
        self._word = 0  # number of pieces in the last line before its last word
        self._word_width = 0
        self._begun = False  # whether the newest token has a piece

    def __len__(self) -> int:
        """The number of tokens so far."""
        return len(self.line_of)

    def add(self, text: str) -> None:
        """Appends the next token's text, as returned by `printable`."""
        self.line_of.append(len(self.lines) - 1)
        self._begun = False
        for part in _PARTS.findall(text):
            if part == "\n":
                if self._column < self.width:
                    self._put(NEWLINE, 1)
                self._break()
            elif part[0] == " ":
                room = self.width - self._column
                self._put(part[:room], min(room, len(part)))
                self._word, self._word_width = len(self.lines[-1]), 0
            else:
                self._add_letters(part)

    def _add_letters(self, text: str) -> None:
        width = cell_len(text)
        if self._column + width > self.width and self._word:
            if self._word_width + width <= self.width:
                self._move_word()
            elif not self._word_width:
                self._break()
        while self._column + width > self.width:
            fits = 0
            while self._column + cell_len(text[: fits + 1]) <= self.width:
                fits += 1
            self._put(text[:fits], cell_len(text[:fits]))
            self._break()
            text = text[fits:]
            width = cell_len(text)
        self._put(text, width)

    def _put(self, text: str, width: int) -> None:
        if not text:
            return
        token = len(self.line_of) - 1
        if not self._begun:
            self._begun, self.line_of[token] = True, len(self.lines) - 1
        self.lines[-1].append((token, text))
        self._column += width
        self._word_width += width

    def _break(self) -> None:
        self.lines.append([])
        self._column = self._word = self._word_width = 0

    def _move_word(self) -> None:
        """Moves the last word to a new line."""
        stays, moves = self.lines[-1][: self._word], self.lines[-1][self._word :]
        width = self._word_width
        self.lines[-1] = stays
        self._break()
        self.lines[-1] = moves
        self._column = self._word_width = width
        before = stays[-1][0] if stays else -1
        for token, _ in moves:
            if token != before:
                self.line_of[token] = len(self.lines) - 1

    def token_at(self, line: int, column: int) -> int | None:
        """The token at a position, or the nearest before it in the line; None for an empty line."""
        if not 0 <= line < len(self.lines):
            return None
        found = None
        for token, text in self.lines[line]:
            if column < 0:
                break
            found = token
            column -= cell_len(text)
        return found

    def column_of(self, token: int) -> int:
        """The column in which a token begins."""
        column = 0
        for other, text in self.lines[self.line_of[token]]:
            if other >= token:
                break
            column += cell_len(text)
        return column
