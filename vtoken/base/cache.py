"""The user's cache folder, for files that can be regenerated."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/vtoken`, or `~/.cache/vtoken`; the folder may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "vtoken"
