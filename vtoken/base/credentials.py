"""Bearer tokens in files, never on a command line, which every user of the machine can read."""

from __future__ import annotations

import stat
from pathlib import Path

from vtoken.base.errors import VTokenError

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 1024


class CredentialError(VTokenError):
    """A token file that cannot be used; the message names the file, never its content."""


def read_token_file(path: str | Path) -> str:
    """The token in `path`, without the white space around it; raises CredentialError."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(2 * MAX_TOKEN_CHARS).decode("ascii").strip()
    except OSError as error:
        raise CredentialError(f"cannot read the token file: {error}") from error
    except UnicodeDecodeError:
        raise CredentialError(_malformed(path)) from None  # the cause would show the bytes
    if not text:
        raise CredentialError(f"the token file {path} is empty")
    if not text.isprintable() or " " in text:
        raise CredentialError(_malformed(path))
    if not MIN_TOKEN_CHARS <= len(text) <= MAX_TOKEN_CHARS:
        raise CredentialError(
            f"the token in {path} has {len(text)} characters, allowed are {MIN_TOKEN_CHARS} to "
            f"{MAX_TOKEN_CHARS}; make one with: openssl rand -hex 32"
        )
    return text


def _malformed(path: str | Path) -> str:
    return (
        f"the token in {path} has characters that a header cannot carry; use one line of "
        "printable ASCII without spaces"
    )


def readable_by_others(path: str | Path) -> bool:
    """Whether the file's mode lets more than its owner read it."""
    return bool(Path(path).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
