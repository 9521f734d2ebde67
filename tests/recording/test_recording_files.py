"""Recordings on disk: everything written is readable, even if the writer failed."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.small_files import NO_BYTECODE
from tests.support.stream_messages import START_TS, stream
from vtoken import wire
from vtoken.recording import (
    Index,
    RecordingError,
    RecordingExistsError,
    RecordingReader,
    RecordingWriter,
    scan,
)
from vtoken.recording.pieces import CHUNK_BYTES

NAMES = ("run.jsonl", "run.jsonl.gz")
ENTRY = wire.AuditEntry(
    ts=START_TS - 60, actor="ana@127.0.0.1", action="undo", changes={}, revision=3, dry_run=False
)

ENTRY_OF = """
import pathlib, random
from vtoken import wire
def entry(n):
    name = random.randbytes(20).hex()
    return wire.AuditEntry(
        ts=n, actor=name, action="undo", changes={}, revision=n, dry_run=False
    )
"""


def record(path: Path, num_messages: int = 200, **options: int) -> list[wire.StreamMessage]:
    """Write a recording with a key frame every 4 s; returns the stream's messages."""
    messages = []
    with RecordingWriter(path, source="http://127.0.0.1:8000", keyframe_s=4.0) as writer:
        writer.audit([ENTRY])
        for message, _ in stream(num_messages, **options):
            messages.append(
                msgspec.json.decode(msgspec.json.encode(message), type=wire.StreamMessage)
            )
            text = msgspec.json.encode(message)
            writer.take(text, msgspec.json.decode(text, type=wire.StreamMessage))
    return messages


def read(path: Path) -> list[wire.RecordingLine]:
    with RecordingReader(path) as reader:
        return [entry.line for entry in iter(reader.next, None)]


def indexed(path: Path) -> Index:
    with RecordingReader(path) as reader:
        *_, index = scan(reader, Index())
        return index


@pytest.mark.parametrize("name", NAMES)
def test_messages_are_read_in_the_order_of_the_stream(tmp_path: Path, name: str) -> None:
    messages = record(tmp_path / name)
    header, audit, *rest = read(tmp_path / name)
    assert isinstance(header, wire.RecordingHeader)
    assert (header.schema, header.source) == (1, "http://127.0.0.1:8000")
    assert audit == wire.AuditLine(entry=ENTRY)
    left = iter(rest)
    assert all(any(line == message for line in left) for message in messages)
    assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")


def test_compressed_recording_is_read_by_gzip_itself(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    record(file)
    lines = gzip.decompress(file.read_bytes()).splitlines()
    assert [msgspec.json.decode(line, type=wire.RecordingLine) for line in lines] == read(file)


def test_two_concatenated_recordings_are_one(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    record(first, 50)
    record(second, 60)
    both = tmp_path / "c.jsonl.gz"
    both.write_bytes(first.read_bytes() + second.read_bytes())
    assert read(both) == read(first) + read(second)
    assert indexed(both).keyframes


@given(cut=st.floats(0, 1), name=st.sampled_from(NAMES))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_file_is_read_up_to_the_cut(tmp_path: Path, cut: float, name: str) -> None:
    complete, torn = tmp_path / name, tmp_path / f"torn-{name}"
    if not complete.exists():
        record(complete, 60)
    lines = read(complete)
    data = complete.read_bytes()
    torn.write_bytes(data[: int(cut * len(data))])
    try:
        reader = RecordingReader(torn)
    except RecordingError as error:
        assert "holds no complete line" in error.reason  # noqa: PT017 - it depends on the cut
        return
    with reader:
        left = [entry.line for entry in iter(reader.next, None)]
        assert left == lines[: len(left)]
        before, after = data[: int(cut * len(data))], data[int(cut * len(data)) :]
        at_boundary = before.endswith(b"\n") or after.startswith(b"\x1f\x8b")  # of a gzip member
        assert reader.truncated or left == lines or at_boundary


def test_killed_writer_leaves_what_was_flushed(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl.gz"
    code = f"""{ENTRY_OF}
from vtoken.recording import RecordingWriter
writer = RecordingWriter(pathlib.Path({str(file)!r}), source="test")
for n in range(100):
    writer.audit([entry(n)])
writer.flush()
print("flushed", flush=True)
while True:
    writer.write(b"0")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"flushed\n"
        os.kill(writer.pid, signal.SIGKILL)
    with RecordingReader(file) as reader:
        lines = [reader.next() for _ in range(101)]
    assert [line.line.entry.revision for line in lines[1:]] == list(range(100))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", NAMES)
def test_full_disk_is_an_error_and_leaves_a_readable_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    code = f"""{NO_BYTECODE}{ENTRY_OF}
import resource
from vtoken.recording import RecordingError, RecordingWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    with RecordingWriter(pathlib.Path({str(file)!r}), source="test") as writer:
        for n in range(10_000):
            writer.audit([entry(n)])
except RecordingError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"{file}: cannot be written: File too large; the " in done.stdout
    with RecordingReader(file) as reader:
        revisions = [entry.line.entry.revision for entry in list(iter(reader.next, None))[1:]]  # type: ignore[union-attr]
        assert reader.truncated
    assert revisions == list(range(len(revisions)))
    assert len(revisions) > 50


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text("precious")
    with pytest.raises(RecordingExistsError, match=r"run\.jsonl: exists already"):
        RecordingWriter(file, source="test")
    assert file.read_text() == "precious"


def test_recordings_without_a_header_are_read(tmp_path: Path) -> None:
    file = tmp_path / "old.ndjson"
    messages = [message for message, _ in stream(30)]
    file.write_bytes(b"".join(msgspec.json.encode(message) + b"\n" for message in messages))
    with RecordingReader(file) as reader:
        assert len(list(iter(reader.next, None))) == 30
    assert [frame.ts for frame in indexed(file).keyframes] == [START_TS]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"hello\n", r"line 1: not a recording: JSON is malformed"),
        (b'{"type":"heartbeat","epoch":"e","seq":1,"step":1,"ts":1}\n', r"line 1: expected a"),
        (b"", r"holds no complete line"),
        (b"\x1f\x8b garbage that is long enough", r"line 1: damaged"),
        (
            b'{"type":"recording","schema":3,"vtoken_version":"9","created_ts":1,"source":"x"}\n',
            r"line 1: schema 3 is of a newer vToken; this one reads up to 2",
        ),
    ],
)
def test_a_file_that_is_not_a_recording_is_refused_by_name(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    file = tmp_path / "what.jsonl"
    file.write_bytes(content)
    with pytest.raises(RecordingError, match=rf"what\.jsonl.*{expected}"):
        RecordingReader(file)


def test_small_damage_costs_only_the_lines_that_it_hits(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl.gz"
    record(file, 20)
    complete, data = read(file), bytearray(file.read_bytes())
    assert len(data) < CHUNK_BYTES
    data[-6] ^= 1  # the check value of the last part
    file.write_bytes(data)
    with RecordingReader(file) as reader:
        assert [entry.line for entry in iter(reader.next, None)] == complete
        assert "incorrect data check" in str(reader.damage)
    data[len(data) // 2] ^= 0x55
    file.write_bytes(data)
    with RecordingReader(file) as reader:
        left = [entry.line for entry in iter(reader.next, None)]
        assert left[:3] == complete[:3]
        assert reader.damage is not None


DEEP = b"[" * 100_000 + b"]" * 100_000


def test_damaged_lines_are_named_and_all_others_are_read(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    record(file)
    lines, complete = file.read_bytes().splitlines(keepends=True), read(file)
    lines[100] = b'{"type":"delta","seq":"seven"}\n'
    lines[120] = b'{"type":"event","event":{"data":{"a":%s}}}\n' % DEEP
    lines[150] = b"\x00\xff\n"
    file.write_bytes(b"".join(lines))
    with RecordingReader(file) as reader:
        left = [entry.line for entry in iter(reader.next, None)]
        assert left == complete[:100] + complete[101:120] + complete[121:150] + complete[151:]
        assert "run.jsonl, line 101: damaged: " in str(reader.damage)
        assert str(reader.damage).endswith("; and 2 more damaged places")
    index = indexed(file)
    assert "line 121: damaged: it nests too deep" in str(index.error)
    assert index.keyframes
    assert index.num_lines == len(lines)


@pytest.mark.parametrize("way", ["a byte", "a gap", "the end of a part"])
def test_damaged_part_of_a_compressed_file_is_named_and_the_others_are_read(
    tmp_path: Path, way: str
) -> None:
    file = tmp_path / "run.jsonl.gz"
    record(file, 400)
    complete, data = read(file), bytearray(file.read_bytes())
    starts = [match.start() for match in re.finditer(rb"\x1f\x8b\x08", data)]
    start, end = starts[3], starts[4]
    if way == "a byte":
        data[(start + end) // 2] ^= 0x55
    else:
        del data[(start + end) // 2 : end - 20 if way == "a gap" else end]
    file.write_bytes(data)
    with RecordingReader(file) as reader:
        left = [entry.line for entry in iter(reader.next, None)]
        assert re.search(r"run\.jsonl\.gz, line \d+: damaged", str(reader.damage))
    ours = iter(complete)
    assert all(line in ours for line in left)
    assert left[-1] == complete[-1]
    index = indexed(file)
    assert index.last_ts == complete[-1].ts
    assert index.error is not None
    assert len(index.keyframes) >= len(starts) - 3
    with RecordingReader(file) as reader:
        reader.seek(index.keyframes[-1].place)
        assert isinstance(next(iter(reader.next, None)).line, wire.Hello)


@pytest.mark.parametrize("name", NAMES)
def test_reading_may_begin_at_every_key_frame(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    record(file)
    lines = read(file)
    index = indexed(file)
    assert len(index.keyframes) == 10
    assert index.duration_s == pytest.approx(199 / 5)
    with RecordingReader(file) as reader:
        for frame in reversed(index.keyframes):
            reader.seek(frame.place)
            rest = [entry.line for entry in iter(reader.next, None)]
            assert rest == lines[frame.place.number - 1 :]
            assert isinstance(rest[0], wire.Hello)
            assert isinstance(rest[1], wire.Snapshot)


@given(seed=st.integers(0, 1000), num_messages=st.integers(2, 80))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_key_frames_are_the_state_of_the_stream_there(
    tmp_path: Path, seed: int, num_messages: int
) -> None:
    file = tmp_path / f"{seed}-{num_messages}.jsonl"
    if file.exists():
        return
    record(file, num_messages, seed=seed)
    frames = {message.seq: view for message, view in stream(num_messages, seed=seed)}
    snapshots = [line for line in read(file) if isinstance(line, wire.Snapshot)]
    for snapshot in snapshots:
        view = frames[snapshot.seq]
        assert snapshot.live == view.blocks["live"].tolist()
        assert snapshot.flags == view.blocks["flags"].tolist()
        assert snapshot.requests is not None
        assert {row.id: row for row in snapshot.requests} == view.requests
        assert snapshot.status is not None
        assert snapshot.status.step == view.status.step


def test_no_key_frame_is_written_while_the_state_is_unknown(tmp_path: Path) -> None:
    file, messages = tmp_path / "run.jsonl", [message for message, _ in stream(60)]
    wrong = next(m for m in messages[30:] if isinstance(m, wire.Delta))
    wrong.block_ids, wrong.block_live, wrong.block_flags = [1 << 20], [1], [1]
    with RecordingWriter(file, source="test", keyframe_s=1.0) as writer:
        for message in messages:
            writer.take(msgspec.json.encode(message), message)
    lines = read(file)
    snapshots = [line.seq for line in lines if isinstance(line, wire.Snapshot)]
    assert len(snapshots) > 3
    assert max(snapshots) < wrong.seq
    assert [line.seq for line in lines if isinstance(line, wire.Message)][-1] == messages[-1].seq


def test_changes_of_configuration_are_marked(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl")
    marks = indexed(tmp_path / "run.jsonl").marks
    assert [mark.text for mark in marks] == [f"event {n}" for n in range(7, 200, 14)]
    assert marks[0].ts == START_TS + 7 / 5


def test_the_index_time_stays_constant_after_a_clock_jumps_back(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with RecordingWriter(file, source="test", keyframe_s=1.0) as writer:
        for message, _ in stream(60):
            if message.seq > 30:
                message.ts -= 3600
            writer.take(msgspec.json.encode(message), message)
    index = indexed(file)
    times = [frame.ts for frame in index.keyframes]
    assert times == sorted(times)
    assert index.last_ts == START_TS + 29 / 5
    assert len(times) > 8


def test_a_growing_file_is_read_further(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl.gz"
    messages = [message for message, _ in stream(40)]
    with RecordingWriter(file, source="test") as writer, RecordingReader(file) as reader:
        assert isinstance(reader.next().line, wire.RecordingHeader)  # type: ignore[union-attr]
        for message in messages:
            assert reader.next() is None
            writer.write(msgspec.json.encode(message))
            if message.seq == 20:
                writer.begin_member()
            writer.flush()
            assert reader.next().line.seq == message.seq  # type: ignore[union-attr]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl.gz"
    record(file, 1500, num_blocks=2000)
    tracemalloc.start()
    with RecordingReader(file) as reader:
        list(scan(reader, Index()))
        reader.rewind()
        size = sum(len(found[1]) for found in iter(reader.raw, None))
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 3_000_000
    assert peak < size / 3


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_unknown_types_are_skipped(tmp_path: Path, name: str) -> None:
    """As the `text` lines of 0.3.0 are."""
    file, messages = tmp_path / name, [message for message, _ in stream(60)]
    with RecordingWriter(file, source="test", keyframe_s=4.0) as writer:
        for message in messages:
            writer.take(msgspec.json.encode(message), message)
            writer.write(b'{"type":"later","ts":99999999999,"page":7,"epoch":[]}')
    lines = read(file)
    assert len(lines) > 60
    assert [line.seq for line in lines if isinstance(line, wire.Message)][-1] == messages[-1].seq
    index = indexed(file)
    assert index.error is None
    assert index.last_ts == messages[-1].ts
    assert index.keyframes
