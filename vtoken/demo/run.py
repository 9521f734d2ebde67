"""`vtoken demo`: starts model, server, traffic and console, or the headless exercise.

Every process started here is stopped here, also on Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import click
from anyio.from_thread import start_blocking_portal
from click import FloatRange, IntRange, Option

from vtoken.client import Client, ProblemError
from vtoken.client import Server as Address
from vtoken.demo.choice import choose
from vtoken.demo.exercise import Row, exercise
from vtoken.demo.server import VTOKEN, DemoError, ProcessGroup, Server, pick_port
from vtoken.demo.traffic import Traffic, TrafficReport
from vtoken.demo.trained_model import DEFAULT, MODELS, TrainedModelError

DEFAULT_DURATION_S = 60.0
STARTUP_S = 300.0  # time limit for an engine; those of one machine start side by side
WARM_UP_SHARE = 0.2  # of the duration: traffic alone, before the first control
SCREENSHOTS = {"console.svg": "120x36", "console-large.svg": "200x50"}  # file -> size
SCREENSHOT_S = 60.0  # time limit of one
DRAIN_S = 8.0  # for requests in flight at the end of a headless run
RECORDING = "recording.jsonl.gz"  # of a headless run


COMMAND = click.Command(
    "demo",
    help="Start a vToken-enabled vLLM server, send it traffic, open the console on it.",
    epilog="Arguments after -- are passed to `vtoken serve`, after the demo's own flags.",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[
        Option(["--model"], help=f"{', '.join(MODELS)}, a folder or a hub id ({DEFAULT})"),
        Option(["--port"], type=int, help="(8000, or a free one if it is taken)"),
        Option(["--headless"], is_flag=True, help="without a terminal: exercise and report"),
        Option(
            ["--duration"],
            metavar="SECONDS",
            type=FloatRange(min=0, min_open=True),
            help=f"of a headless run ({DEFAULT_DURATION_S:g})",
        ),
        Option(["--engines"], type=IntRange(min=1), default=1, help="data-parallel engines (1)"),
        Option(["--workers"], type=IntRange(min=1), default=16, help="concurrent clients (16)"),
        Option(["--seed"], type=int, default=0, help="of the traffic (0)"),
        Option(["--out"], metavar="DIR", type=Path, default=Path(".demo"), help="(.demo)"),
        Option(["--guide"], is_flag=True, help="show the guide even if it was seen before"),
        Option(
            ["--startup-timeout"],
            metavar="SECONDS",
            type=float,
            help=f"({STARTUP_S:g} an engine)",
        ),
        click.Argument(["server_flags"], nargs=-1, type=click.UNPROCESSED),
    ],
)


@dataclass(frozen=True, slots=True)
class Options:
    """The demo's options; `server_flags` follow the demo's own for the server, and win."""

    model: str | None
    port: int | None
    headless: bool
    duration: float
    engines: int
    workers: int
    seed: int
    out: Path
    guide: bool
    startup_timeout: float
    server_flags: tuple[str, ...]


def parse(argv: Sequence[str]) -> Options:
    """Raises click.ClickException."""
    values = COMMAND.make_context("vtoken demo", [*argv]).params
    if values["duration"] is not None and not values["headless"]:
        raise click.UsageError("--duration needs --headless; the console runs until you quit")
    values["duration"] = values["duration"] or DEFAULT_DURATION_S
    values["startup_timeout"] = values["startup_timeout"] or STARTUP_S * values["engines"]
    return Options(**values)


def main(argv: Sequence[str]) -> int:
    """0: done; 1: failed; 2: no terminal; 130: interrupted. Raises click.ClickException."""
    options = parse(argv)
    if not options.headless and not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("vtoken demo: no terminal; use --headless (make demo HEADLESS=1)", file=sys.stderr)
        return 2
    # Processes started here inherit an ignored SIGINT, as a shell's background jobs have it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _exit)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        return run(options)
    except (DemoError, TrainedModelError) as error:
        print(f"vtoken demo: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, for instance
        place = "the demo writes into a folder, which --out names"
        print(f"vtoken demo: {error}; {place}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vtoken demo: interrupted", file=sys.stderr)
        return 130


def _exit(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def run(options: Options) -> int:
    """Run the demo. Raises TrainedModelError, and DemoError, with the server's first error if there
    is one.
    """
    server = make_server(options)
    try:
        with server:
            return (run_headless if options.headless else run_console)(server, options)
    except (DemoError, ProblemError) as error:
        cause = server.first_error()
        if cause is None:
            raise DemoError(str(error)) from error
        raise DemoError(f"{error}\n\nfirst error in {server.log}:\n{cause}") from error


def make_server(options: Options) -> Server:
    """The demo's server, not started yet. Raises DemoError, TrainedModelError."""
    port = pick_port(options.port)
    choice = choose(options.model, options.out, options.engines)
    usage = os.environ.get("VLLM_NO_USAGE_STATS", "1")
    state = f"--vtoken-state-dir={options.out / 'state'}"
    return Server(
        choice.model,
        port=port,
        arguments=[state, *choice.flags, *options.server_flags],
        log=options.out / "server.log",
        environment={"VLLM_NO_USAGE_STATS": usage, **choice.environment},
        startup_timeout_s=options.startup_timeout,
    )


@contextmanager
def traffic(server: Server, options: Options, *, drain_s: float) -> Iterator[TrafficReport]:
    """Run clients on `server` within the block; their report is complete afterwards.

    Raises DemoError if they did not run.
    """
    clients = Traffic(server.url, num_workers=options.workers, seed=options.seed)
    with start_blocking_portal() as portal:  # an error in the block cancels what runs in it
        running = portal.start_task_soon(partial(clients.run, drain_s=drain_s))
        yield clients.report
        portal.call(clients.stop)
        try:
            running.result()
        except Exception as error:  # from openai
            raise DemoError(f"the clients failed: {error}") from error


def run_console(server: Server, options: Options) -> int:
    """Run the console in the foreground until the user quits."""
    with traffic(server, options, drain_s=0.0):
        guide = "always" if options.guide else "once"
        command = [*VTOKEN, "console", "--url", server.url, f"--guide={guide}"]
        console = subprocess.Popen(command)
        try:
            status = console.wait()
        finally:
            console.terminate()  # no effect if it has ended
            console.wait()
    server.check_alive()
    return status


def run_headless(server: Server, options: Options) -> int:
    """Use every control while clients send; then print the status and what the clients got."""
    start = time.monotonic()
    failures: list[str] = []

    def on_row(row: Row) -> None:
        say(f"{'ok  ' if row.ok else 'FAIL'} {row.control}: {row.outcome}")
        if not row.ok:
            failures.append(f"{row.control}: {row.outcome}")

    with first_engine(server) as client, record(server, options.out) as recording:
        with traffic(server, options, drain_s=DRAIN_S) as report:
            warm_up_s = options.duration * WARM_UP_SHARE
            say(f"traffic alone for {warm_up_s:.0f} s")
            time.sleep(warm_up_s)
            exercise(client, start + options.duration, on_row)
            take_screenshots(server, options.out / "screenshots")
            subprocess.run([*VTOKEN, "status", "--url", server.url], check=False)
            say("waiting for requests in flight")
        server.check_alive()
        if recording.stop(signal.SIGINT) != 0:
            failures.append(f"the recording: {recording.log_tail()}")
        if violations := client.status().invariants.violations:
            failures.append(f"{violations} invariant violations")
        fleet = client.engines()
    if report.failed or not report.done:
        failures.append(f"requests: {report.failed} failed, {report.done} done: {report.failure}")
    if not fleet.ok:
        failures.append(fleet.sentence)
    show_traffic(report)
    for failure in failures:
        print(f"failed: {failure}")
    print(f"{'FAILED' if failures else 'passed'} after {time.monotonic() - start:.0f} s")
    print(f"recording {options.out / RECORDING}, screenshots {options.out / 'screenshots'}")
    return 1 if failures else 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def first_engine(server: Server) -> Client:
    """A client that reads the first engine and changes all."""
    return Client(Address(server.url, shown=0), timeout_s=30.0)


@contextmanager
def record(server: Server, out: Path) -> Iterator[ProcessGroup]:
    """`vtoken record` of the first engine's stream within the block."""
    path = out / RECORDING
    path.unlink(missing_ok=True)  # of the previous run
    command = [*VTOKEN, "record", str(path), "--url", server.url, "--engine", "0"]
    recording = ProcessGroup(command, out / "record.log")
    try:
        yield recording
    finally:
        recording.stop(signal.SIGINT)


def take_screenshots(server: Server, folder: Path) -> None:
    """Export the console's dashboard into `folder`. A failure is reported, and the run goes on."""
    folder.mkdir(exist_ok=True)
    for name, size in SCREENSHOTS.items():
        path = folder / name
        path.unlink(missing_ok=True)  # of the previous run
        command = [*VTOKEN, "console", "--url", server.url, "--export", str(path), "--size", size]
        try:
            subprocess.run(command, stdout=subprocess.DEVNULL, timeout=SCREENSHOT_S, check=True)
        except subprocess.SubprocessError as error:
            say(f"no screenshot {path}: {error}")


def show_traffic(report: TrafficReport) -> None:
    """Print what the clients got: counts, and the first answer of each kind."""
    rate = report.output_tokens / (report.duration_s or 1.0)
    counts = f"{report.done:,} done, {report.failed:,} failed, {report.cancelled:,} cut off"
    print(f"requests: {counts}; {report.output_tokens:,} tokens, {rate:,.0f} a second")
    for kind in ("chat", "passage"):
        for answer in [answer for answer in report.answers if answer.kind == kind][:1]:
            print(f"question ({kind}): {answer.question}\nanswer: {answer.text}\n")
