"""Standard output that cannot be written, told apart from other errors of the system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OutputError(Exception):
    """Standard output cannot be written: a full disk, for instance. A closed pipe is none."""


@contextmanager
def writing_output() -> Iterator[None]:
    """Raise OutputError where a write to standard output fails."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the output cannot be written: {error.strerror}") from error
