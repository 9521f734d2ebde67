"""Uses every control of a running server once through REST, and checks the results.

A failed check is recorded in its row and not raised, so that one broken control does not hide the
others. An unreachable server raises.

A change is effective when the answer has a step, GET /config shows the value as desired and
effective, and the stream shows its revision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from vtoken import wire
from vtoken.client import Client, ProblemError, Unreachable
from vtoken.demo.recorder import Recorder
from vtoken.demo.server import DemoError
from vtoken.sentences import value_text

OPERATION_S = 30.0


class Row(msgspec.Struct):
    """The result of one control, with F before it and after its settling time."""

    control: str
    outcome: str = ""
    ok: bool = True
    step: int | None = None  # the first engine step after the change
    reply_ms: float | None = None  # from sending the change to the engine's answer
    seen_ms: float | None = None  # from sending the change to its revision on the stream
    f_before: float | None = None
    f_after: float | None = None


class MismatchError(DemoError):
    """The server's response or state is not as expected."""


class Exercise:
    """`plan` lists the controls; `run` uses them one after another."""

    def __init__(
        self, client: Client, recorder: Recorder, *, on_row: Callable[[Row], None]
    ) -> None:
        self.rows: list[Row] = []
        self.switches = 0
        self._client = client
        self._recorder = recorder
        self._on_row = on_row

    def plan(self) -> list[Callable[[], None]]:
        """Every control, in an order that restores the initial configuration."""
        start = self._client.config().effective
        limits = self._client.config().bounds
        policies = [info.name for info in self._client.policies() if info.error is None]
        others = [name for name in policies if name != start.policy.name]
        choice = msgspec.to_builtins(start.policy)
        planner = start.experiment.planner
        another = "pack" if planner == "plug" else "plug"
        budget = max(int(limits["budget_tokens"].minimum or 1), start.budget_tokens * 3 // 4)

        def change(label: str, **patch: Any) -> Callable[[], None]:
            return lambda: self.change(label, patch)

        return [
            self.check_dry_run,
            self.check_refusal,
            *(change(f"policy {name}", policy={"name": name}) for name in others),
            change(f"policy {start.policy.name}", policy=choice),
            change("theta_f 0.05", theta_f=0.05),
            change("batch_size 8", batch_size=8),
            change(f"planner {another}", experiment={"planner": another}),
            change(f"planner {planner}", experiment={"planner": planner}),
            change(f"budget_tokens {budget}", budget_tokens=budget),
            change(f"budget_tokens {start.budget_tokens}", budget_tokens=start.budget_tokens),
            change("recycle off", recycle=False),
            change("shadow tova", shadow={"name": "tova"}),
            change("no shadow", shadow=None),
            change("pause", reclamation="paused"),
            self.compact,
            change("resume", reclamation="auto"),
            change("reclamation off", reclamation="off"),
            change("reclamation auto", reclamation="auto"),
            change("recycle on", recycle=True),
            self.undo,
            change(
                "initial values",
                theta_f=start.theta_f,
                batch_size=start.batch_size,
                recycle=start.recycle,
                reclamation=start.reclamation,
            ),
        ]

    def run(self, actions: Sequence[Callable[[], None]], *, until: float) -> None:
        """Run all `actions`, spread over the time to `until` on the monotonic clock."""
        for left, action in zip(range(len(actions), 0, -1), actions, strict=True):
            due = time.monotonic() + max(0.0, until - time.monotonic()) / left
            action()
            time.sleep(max(0.0, due - time.monotonic()))
            self._recorder.check()
            row = self.rows[-1]
            if row.f_after is None:
                row.f_after = self._f()
            self._on_row(row)

    # ------------------------------------------------------------ controls

    def change(self, control: str, patch: dict[str, Any]) -> None:
        with self._row(control) as row:
            result = self._change(row, lambda: self._client.patch_config(patch))
            self._expect(result.desired, patch)

    def undo(self) -> None:
        """Undo the last change and check that the previous configuration is effective again."""
        with self._row("undo") as row:
            before = self._client.config()
            marker = {"theta_f": 0.9 if before.effective.theta_f < 0.5 else 0.1}
            self._client.patch_config(marker)
            result = self._change(row, self._client.undo)
            if result.desired != before.desired:
                raise MismatchError("undo did not restore the configuration before the last change")

    def check_dry_run(self) -> None:
        """Check that validate_only returns a what-if and changes nothing."""
        with self._row("validate_only") as row:
            before = self._client.config()
            result = self._client.patch_config({"theta_f": 0.0}, validate_only=True)
            if result.what_if is None or result.applied_at_step is not None:
                raise MismatchError("validate_only returned no what-if, or a step")
            self._expect_unchanged(before)
            what_if = result.what_if
            row.outcome = f"would free {what_if.freed_blocks}, move {what_if.moved_tokens} tokens"

    def check_refusal(self) -> None:
        """Check that one bad value refuses the entire patch, with a problem that names it."""
        with self._row("refused change") as row:
            before = self._client.config()
            try:
                self._client.patch_config({"batch_size": 3, "theta_f": 1.5})
            except Unreachable:
                raise
            except ProblemError as refusal:
                problem = refusal.problem
            else:
                raise MismatchError("theta_f 1.5 was not refused")
            if problem.status != 422:
                raise MismatchError(f"theta_f 1.5 was refused with {problem.status}, not 422")
            if problem.field != "theta_f" or problem.value != 1.5 or not problem.bound:
                raise MismatchError(f"the problem does not name field, value and bound: {problem}")
            self._expect_unchanged(before)
            row.outcome = f"422: {problem.detail}"

    def compact(self) -> None:
        """Compact all requests by hand while automatic reclamation is paused.

        `f_after` is read at once, because F rises again afterwards.
        """
        with self._row("compact") as row:
            bound = self._client.config().bounds["batch_size"].maximum
            row.f_before = self._f()
            sent = time.monotonic()
            operation = self._client.compact(batch_size=int(bound or 1))
            operation = self._client.wait_operation(operation.id, timeout_s=OPERATION_S)
            row.reply_ms = (time.monotonic() - sent) * 1e3
            row.f_after = self._f()
            if operation.state != "done" or operation.result is None:
                raise MismatchError(f"the operation is {operation.state}: {operation.error}")
            result = operation.result
            row.outcome = f"freed {result.freed_blocks}, moved {result.moved_tokens} tokens"

    # ------------------------------------------------------------ checks

    @contextmanager
    def _row(self, control: str) -> Iterator[Row]:
        row = Row(control, f_before=self._f())
        self.rows.append(row)
        try:
            yield row
        except Unreachable as error:
            raise DemoError(f"{control}: {error}") from error
        except (DemoError, ProblemError) as error:
            row.ok, row.outcome = False, str(error)

    def _change(self, row: Row, send: Callable[[], wire.PatchResult]) -> wire.PatchResult:
        """Send a change, wait for it on the stream and check that GET /config agrees."""
        sent = time.monotonic()
        result = send()
        row.reply_ms = (time.monotonic() - sent) * 1e3
        if result.applied_at_step is None:
            raise MismatchError("the answer has no step")
        row.step = result.applied_at_step
        on_stream = self._recorder.wait_for_revision(result.revision)
        row.seen_ms = (time.monotonic() - sent) * 1e3
        config = self._client.config()
        for where, document in (("GET /config", config), ("the stream", on_stream)):
            if document.revision != result.revision:
                found = document.revision
                raise MismatchError(f"{where} shows revision {found}, not {result.revision}")
            if not document.desired == document.effective == result.desired:
                raise MismatchError(f"{where} does not show the configuration of the answer")
        self.switches += 1
        row.outcome = ", ".join(
            f"{name} {_short(old)} → {_short(new)}" for name, (old, new) in result.changes.items()
        )
        return result

    def _expect(self, desired: wire.ConfigValues | None, patch: dict[str, Any]) -> None:
        values = msgspec.to_builtins(desired) or {}
        for name, wanted in patch.items():
            found = values.get(name)
            if isinstance(wanted, dict) and isinstance(found, dict):
                found = {part: found.get(part) for part in wanted}
            if found != wanted:
                raise MismatchError(f"{name} is {found}, not {wanted}")

    def _expect_unchanged(self, before: wire.ConfigDocument) -> None:
        after = self._client.config()
        if after != before:
            raise MismatchError(f"the configuration changed: revision {after.revision}")

    def _f(self) -> float:
        return self._client.status().fragmentation.f


def _short(value: Any) -> str:
    return value_text(value["name"] if isinstance(value, dict) and "name" in value else value)
