"""A device that runs what is launched on it late, in a random order that its streams permit.

Its tensors are torch's `meta` tensors. They have shapes, strides and storages but no contents, so
that nothing reads them by mistake, and product code takes its ways for a device. `LateDevice`
queues every operation on the current stream. A queue runs in its order. Between the queues, only
recorded events and waits of the host decide, and a random number generator where these do not.

Memory behaves as torch's caching allocator makes it behave: new memory holds garbage, and memory
whose last tensor is gone is overwritten in the order of the stream that allocated it, unless
`Streams.keep` holds it for another stream.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vtoken.vllm.cuda.copies.streams import Stream

GARBAGE = 0xFF  # of every byte: NaN in floats, -1 in integers
READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
DEVICE = torch.device("meta")


Dropped = str | Stream | tuple[Stream, Stream]


class Event(NamedTuple):
    """Complete when the first `number` items of `stream` have run."""

    stream: Stream
    number: int


class Memory(NamedTuple):
    """The contents of one storage, allocated on `stream`; `kept` for these streams."""

    owner: StorageWeakRef
    contents: torch.Tensor
    stream: Stream
    kept: list[Stream]


class LateDevice(TorchDispatchMode):
    """Use it as a context: operations on its tensors are queued.

    `faults`: operations that failed when they ran, because their inputs were garbage.
    `host_waits`: how often a copy made the host wait; `synchronize` is not counted. `dropped`: what
    does nothing, for controls: `keep`, `synchronize`, streams that wait for no event, and pairs of
    a stream and one for whose events it does not wait.
    `haste`: the share of possible progress that streams make at once; None: random.
    """

    def __init__(
        self,
        seed: int,
        dropped: Container[Dropped] = (),
        haste: float | Mapping[Stream, float] | None = None,
    ) -> None:
        super().__init__()
        self._dropped = dropped
        self._random = random.Random(seed)
        self._queues: dict[Stream, deque[Callable[[], None] | Event]] = {s: deque() for s in Stream}
        self._launched = dict.fromkeys(Stream, 0)
        self._done = dict.fromkeys(Stream, 0)
        paces = self._random.sample((0.0, 0.5, 0.9, 0.97), len(Stream))
        self._haste = dict(zip(Stream, paces, strict=True))
        if isinstance(haste, float):
            self._haste = dict.fromkeys(Stream, haste)
        elif haste is not None:
            self._haste = dict(haste)
        self._current = Stream.MAIN
        self._memory: dict[int, Memory] = {}
        self._freed: list[tuple[Memory, list[Event]]] = []
        self.faults: list[str] = []
        self.host_waits = 0

    # ------------------------------------------------------------ streams

    def record(self, stream: Stream, *, timed: bool = False) -> Event:  # noqa: ARG002
        return Event(stream, self._launched[stream])

    def elapsed_us(self, start: Event, end: Event) -> float | None:
        return float(end.number - start.number) if self.is_done(end) else None

    def wait(self, stream: Stream, event: Event) -> None:
        if stream not in self._dropped and (stream, event.stream) not in self._dropped:
            self._launch(stream, event)

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        with self._on(stream):
            work()

    def synchronize(self, event: Event) -> None:
        if "synchronize" not in self._dropped:
            self._complete(event)

    def is_done(self, event: Event) -> bool:
        return self._done[event.stream] >= event.number

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        if "keep" not in self._dropped:
            self._memory[tensor.untyped_storage()._cdata].kept.append(stream)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def compute(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Launch `kernel`, which gets the contents of the tensors among `arguments`."""
        given = self._in_memory(arguments)
        self._launch(self._current, lambda: kernel(*given))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the contents of `tensor` once everything on the main stream has run."""
        self._complete(self.record(Stream.MAIN))
        return self._real(tensor).clone()

    # ------------------------------------------------------------ queues

    def _launch(self, stream: Stream, item: Callable[[], None] | Event) -> None:
        self._queues[stream].append(item)
        self._launched[stream] += 1
        self._reuse_memory()
        for other in self._random.sample(list(Stream), len(Stream)):
            while self._may_run(other) and self._random.random() < self._haste[other]:
                self._run(other)

    def _may_run(self, stream: Stream) -> bool:
        queue = self._queues[stream]
        return bool(queue) and (not isinstance(queue[0], Event) or self.is_done(queue[0]))

    def _complete(self, event: Event) -> None:
        """Run what `event` needs, and nothing that it does not need."""
        while not self.is_done(event):
            head = self._queues[event.stream][0]
            if isinstance(head, Event):
                self._complete(head)
            self._run(event.stream)

    def _run(self, stream: Stream) -> None:
        item = self._queues[stream].popleft()
        if not isinstance(item, Event):
            try:
                item()
            except (IndexError, RuntimeError) as error:
                self.faults.append(str(error))
        self._done[stream] += 1

    # ------------------------------------------------------------ memory

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The contents of `tensor`, over the same memory as those of its views."""
        storage = tensor.untyped_storage()
        found = self._memory.get(storage._cdata)
        if found is None:
            contents = torch.full((storage.nbytes(),), GARBAGE, dtype=torch.uint8)
            found = Memory(StorageWeakRef(storage), contents, self._current, [])
            self._memory[storage._cdata] = found
        return torch.empty(0, dtype=tensor.dtype).set_(
            found.contents.untyped_storage(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )

    def _reuse_memory(self) -> None:
        for key, memory in [*self._memory.items()]:
            if memory.owner.expired():
                del self._memory[key]
                self._freed.append((memory, [self.record(stream) for stream in memory.kept]))
        waiting = []
        for memory, events in self._freed:
            if all(map(self.is_done, events)):
                self._queues[memory.stream].append(lambda m=memory: m.contents.fill_(GARBAGE))
                self._launched[memory.stream] += 1
            else:
                waiting.append((memory, events))
        self._freed = waiting

    # ------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", None)
        tensors = _tensors((args, *kwargs.values()))
        to, name = kwargs.get("device"), func.overloadpacket.__name__
        if name == "_pin_memory":
            return args[0].clone()
        if all(t.device != DEVICE for t in tensors) and to != DEVICE:
            result = func(*args, **kwargs)
            if pinned:
                result.view(torch.uint8).fill_(GARBAGE)
            return result
        if name in READS:
            raise AssertionError(f"{name} reads the device's memory")
        if name == "_to_copy" and to is not None and to.type == "cpu":
            out = torch.empty(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
            return self._transfer(out, self._real(tensors[0]), out, kwargs.get("non_blocking"))
        if name == "_to_copy" and tensors[0].device.type == "cpu":
            out = func(*args, **kwargs)
            return self._transfer(self._real(out), tensors[0], out, kwargs.get("non_blocking"))
        if name == "copy_" and tensors[0].device != tensors[1].device:
            ends = [t if t.device.type == "cpu" else self._real(t) for t in tensors]
            return self._transfer(*ends, tensors[0], args[2] if len(args) > 2 else False)
        if any(t.device.type == "cpu" and t.dim() for t in tensors):
            raise AssertionError(f"{name} mixes host and device, which makes the host wait")
        return self._queued(func, args, kwargs)

    def _transfer(
        self, target: torch.Tensor, source: torch.Tensor, out: torch.Tensor, asynchronous: Any
    ) -> torch.Tensor:
        self._launch(self._current, lambda: target.copy_(source))
        if not asynchronous:
            self.host_waits += 1
            self._complete(self.record(self._current))
        return out

    def _in_memory(self, value: Any) -> Any:
        """An argument for the host: contents in place of the device's tensors."""
        if isinstance(value, torch.Tensor):
            return self._real(value) if value.device == DEVICE else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return type(value)(map(self._in_memory, value)) if type(value) in (list, tuple) else value

    def _queued(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        inputs = self._in_memory(args), {k: self._in_memory(v) for k, v in kwargs.items()}
        shaped = func(*args, **kwargs)
        outputs = _tensors((shaped,))
        new = [t.untyped_storage()._cdata not in self._memory for t in outputs]
        targets = [self._real(t) for t in outputs]
        if any(new) or func._schema.is_mutable:

            def run() -> None:
                made = func(*inputs[0], **inputs[1])
                for is_new, target, result in zip(new, targets, _tensors((made,)), strict=True):
                    if is_new:
                        target.copy_(result)

            self._launch(self._current, run)
        return shaped


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among `values` and in lists and tuples among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
