"""What `--vtoken-park-bytes` means on this host: bytes, a size, or a share of its free memory.

The share is taken once, when the engine has its weights and its cache. It takes no memory: the
workers take it as tokens are parked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import psutil

from vtoken.base.errors import UnsupportedError
from vtoken.base.quantities import size_bytes
from vtoken.sentences import data_size
from vtoken.wire import Geometry

AUTO = "auto"
SHARE = 4  # of the free memory: one part in so many, for all engines of the server
MOST_POOLS = 2  # so many times the pool at most
log = logging.getLogger("vllm.vtoken")


def park_bytes(choice: str, geometry: Geometry, num_engines: int) -> int:
    """The bytes that `choice`, a size or `auto`, means for one of `num_engines` engines here.

    Raises UnsupportedError for anything else.
    """
    if choice != AUTO:
        try:
            return size_bytes(choice)
        except ValueError as error:
            raise UnsupportedError(f"park_bytes: {error}, or {AUTO}") from None
    pool = geometry.num_blocks * geometry.block_size * geometry.bytes_per_token
    free = free_bytes()
    found = min(free // SHARE // num_engines, MOST_POOLS * pool)
    shared = f", for {num_engines} engines" if num_engines > 1 else ""
    why = f"a quarter of the {data_size(free)} of free host memory{shared}"
    if found == MOST_POOLS * pool:
        why = f"twice the cache of {data_size(pool)}"
    log.info("vToken: tokens that give way may take %s of host memory: %s", data_size(found), why)
    return found


def free_bytes(proc: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory that this process may still take: what the host has, within the limits of its
    control groups.
    """
    return max(0, min([int(psutil.virtual_memory().available), *_within_groups(proc, groups)]))


def _within_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What each control group of the process still allows. A container sees its own group as the
    root; the path of a group outside of it does not exist there.
    """
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (most := _number(folder / limit)) is not None:
                used = (_number(folder / usage) or 0) - _cached(folder, cache)
                yield most - used


def _number(file: Path) -> int | None:
    """The number in a file; None without one, and for `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _cached(folder: Path, name: str) -> int:
    """The pages of files that the kernel gives up before a process: not used for good."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
