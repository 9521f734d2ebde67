"""A folder that is made once: it is complete under its name, or absent.

1. The folder gets its name in one rename, with a manifest of what it was made from.
2. One process at a time makes it. The others wait, and take what it has made.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def make_once(
    path: Path, manifest_name: str, manifest: Mapping[str, Any], make: Callable[[Path], None]
) -> Path:
    """`path`, with what `make` writes into the folder that it is given.

    A folder that has this `manifest` already is taken as it is. Raises FileExistsError if `path`
    has files and no manifest, and OSError if it cannot be written.
    """
    if _is_made(path / manifest_name, manifest):
        return path
    from filelock import FileLock  # comes with transformers

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if _is_made(path / manifest_name, manifest):  # another process made it meanwhile
            return path
        if path.exists() and any(path.iterdir()) and not (path / manifest_name).is_file():
            raise FileExistsError(
                f"{path} is not empty and has no {manifest_name}; remove it, or choose another "
                "folder"
            )
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            make(made)
            (made / manifest_name).write_text(json.dumps(manifest, indent=2) + "\n")
            shutil.rmtree(path, ignore_errors=True)
            made.rename(path)
    return path


def _is_made(manifest_file: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether the file has every value of `manifest`."""
    try:
        found = json.loads(manifest_file.read_text())
        return bool(manifest.items() <= found.items())
    except (OSError, ValueError, AttributeError):
        return False
