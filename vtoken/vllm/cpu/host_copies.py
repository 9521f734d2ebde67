"""Copies of token slots in host memory beside the cache, and back: parking on the CPU.

Works on slots and host slots, not on requests. Host memory is taken in slabs as host slots are
used, so a worker that parks nothing holds none.
"""

from __future__ import annotations

import time

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.base.compiled import kernel
from vtoken.vllm.cpu.copy_engine import KEY, VALUE
from vtoken.vllm.cpu.layout import Bits, Memory

SLAB_BYTES = 4 << 20  # the host takes some ms to map so much
PAGE_BYTES = 4096


class CPUHostCopies:
    """K and V of tokens by host slot. `layers`: the caches, as their copy engine has them.

    Host slot h is row h % n of slab h // n, each [n, layers, 2, H, D].
    """

    def __init__(self, layers: list[Memory]) -> None:
        self._layers = layers
        _, heads, _, dim = layers[0].shape[:4].tolist()
        self._row = (len(layers), 2, heads, dim)
        token_bytes = int(np.prod(self._row)) * layers[0].bits.itemsize
        self._slab_slots = max(1, SLAB_BYTES // token_bytes)
        self._slabs: list[Bits] = []

    @property
    def num_bytes(self) -> int:
        """The host memory that is held."""
        return sum(slab.nbytes for slab in self._slabs)

    def limit(self, capacity: int) -> None:
        """Free the memory of host slots from `capacity` on."""
        del self._slabs[-(-capacity // self._slab_slots) :]

    def park(self, slots: Ints, hosts: Ints) -> int:
        """Copy cache slots `slots` [k] to host slots `hosts` [k]; return the time taken in µs,
        without that of memory which is used for the first time: it is paid once.

        Raises MemoryError, before anything is copied, if the host refuses memory, and IndexError
        for a slot outside the cache.
        """
        self._layers[0].check(slots)
        self._take(int(hosts.max(initial=-1)) + 1)
        started = time.perf_counter_ns()
        self._copy(slots, hosts, to_host=True)
        return (time.perf_counter_ns() - started) // 1000

    def restore(self, hosts: Ints, slots: Ints) -> int:
        """Copy host slots `hosts` [m] to cache slots `slots` [m]; return the time taken in µs.

        Raises IndexError for a host slot that nothing was copied to, or a slot outside the cache.
        """
        started = time.perf_counter_ns()
        self._layers[0].check(slots)
        if int(hosts.max(initial=-1)) >= len(self._slabs) * self._slab_slots:
            raise IndexError(f"host slot {hosts.max()} has no memory")
        self._copy(slots, hosts, to_host=False)
        return (time.perf_counter_ns() - started) // 1000

    def _take(self, num_slots: int) -> None:
        while len(self._slabs) * self._slab_slots < num_slots:
            slab = np.empty((self._slab_slots, *self._row), self._layers[0].bits.dtype)
            slab.reshape(-1)[:: PAGE_BYTES // slab.itemsize] = 0  # maps every page
            self._slabs.append(slab)

    def _copy(self, slots: Ints, hosts: Ints, *, to_host: bool) -> None:
        """Copy between `slots` [k] and `hosts` [k], slab by slab."""
        slabs, rows = np.divmod(hosts, self._slab_slots)
        for number in np.unique(slabs).tolist():
            own = slabs == number
            slab, own_slots, own_rows = self._slabs[number], slots[own], rows[own]
            for i, layer in enumerate(self._layers):
                _copy(layer.bits, layer.shape, own_slots, slab, own_rows, i, to_host)


# ---------------------------------------------------------------- kernels


@kernel
def _copy(
    bits: Bits, shape: Ints, slots: Ints, slab: Bits, rows: Ints, layer: int, to_host: bool
) -> None:
    """slab[rows[i], layer] = K and V of the token in slots[i], for every i; the opposite way unless
    `to_host`. `shape`: `Memory`'s.
    """
    for i in range(len(slots)):
        block, offset = slots[i] // shape[2] * shape[4], slots[i] % shape[2]
        for part in range(2):
            place = KEY + (VALUE - KEY) * part
            at = block + shape[place] + offset * shape[place + 1]
            for h in range(shape[1]):
                token = bits[at + h * shape[5] :]
                for d in range(shape[3]):
                    if to_host:
                        slab[rows[i], layer, part, h, d] = token[d * shape[place + 2]]
                    else:
                        token[d * shape[place + 2]] = slab[rows[i], layer, part, h, d]
