"""Processes that cannot write large files, as on a disk that is full.

They write no bytecode: Python 3.11 keeps a module that the limit has cut short, and every later
process that imports it fails.
"""

from __future__ import annotations

NO_BYTECODE = "import sys; sys.dont_write_bytecode = True\n"  # before a limit that code sets itself


def limited(*command: str, blocks: int | str = 1) -> list[str]:
    """`command` with files of at most `blocks` of 512 or 1,024 bytes, by the shell."""
    script = f'ulimit -f {blocks}; PYTHONDONTWRITEBYTECODE=1 exec "$@"'
    return ["/bin/sh", "-c", script, "sh", *command]
