"""CPU time of processes, and this process's instructions where the processor counts them.

`Instructions` calls Linux's `perf_event_open` through ctypes. Virtual machines often have no
counter, and a kernel may forbid access (`/proc/sys/kernel/perf_event_paranoid`). Then nothing is
counted and `missing` has the reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

import psutil

SYSCALLS = {"x86_64": 298, "aarch64": 241}
HARDWARE, INSTRUCTIONS = 0, 1
ATTRIBUTE_BYTES = 128
# Bits of perf_event_attr: count threads created later; exclude kernel and hypervisor.
INHERIT, NO_KERNEL, NO_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6


class Instructions:
    """Counts from construction on, including threads that this process starts afterwards."""

    def __init__(self) -> None:
        self.missing: str | None = None  # why nothing is counted
        self._file = -1
        number = SYSCALLS.get(platform.machine())
        if not sys.platform.startswith("linux") or number is None:
            self.missing = f"no perf_event_open on {sys.platform}, {platform.machine()}"
            return
        attribute = bytearray(ATTRIBUTE_BYTES)
        struct.pack_into("IIQ", attribute, 0, HARDWARE, ATTRIBUTE_BYTES, INSTRUCTIONS)
        struct.pack_into("Q", attribute, 40, INHERIT | NO_KERNEL | NO_HYPERVISOR)
        buffer = (ctypes.c_char * ATTRIBUTE_BYTES).from_buffer(attribute)
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.syscall(number, buffer, 0, -1, -1, 0)  # this process, any processor
        if self._file < 0:
            self.missing = f"perf_event_open: {os.strerror(ctypes.get_errno())}"

    def read(self) -> int | None:
        """Instructions so far, None if nothing is counted."""
        if self._file < 0:
            return None
        return int.from_bytes(os.read(self._file, 8), sys.byteorder)


def cpu_s(pid: int) -> float:
    """CPU time of a process and of those below it that run."""
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))
