"""What is in a kit: bytes and SHA-256 of each part, written here and compared there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

NAME = "manifest.json"


def parts(kit: Path) -> dict[str, dict[str, Any]]:
    """`bytes` and `sha256` by path, of each file or package in `src` and `lib`/PYTHON.

    A package's hash is that of its files in the order of their names, each after its path.
    """
    return {
        path.relative_to(kit).as_posix(): described(path)
        for pattern in ("src/*", "lib/*/*")
        for path in sorted(kit.glob(pattern))
    }


def differences(kit: Path) -> list[str]:
    """The parts of the unpacked `kit` that are not as packed; a sentence each."""
    packed = json.loads((kit / NAME).read_text())["parts"]
    found = parts(kit)
    missing = [f"{name} is missing" for name in packed if name not in found]
    other = [
        f"{name} has {found[name]['bytes']:,} bytes of another content, packed {part['bytes']:,}"
        for name, part in packed.items()
        if name in found and found[name] != part
    ]
    return missing + other


def described(path: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        if "__pycache__" in file.parts:
            continue
        data = file.read_bytes()
        digest.update(f"{file.relative_to(path.parent).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
        size += len(data)
    return {"bytes": size, "sha256": digest.hexdigest()}
