"""Uses every control of a running server once through REST, and checks the results.

A change is effective when the answer has a step and GET /config shows the value as desired and
effective. A failed check does not hide the other controls. An unreachable server raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from vtoken import wire
from vtoken.client import Client, ProblemError, Unreachable
from vtoken.sentences import value_text

OPERATION_S = 30.0
EFFECTIVE_S = 60.0  # a busy machine takes a while
POLL_S = 0.02

Control = Callable[[Client], str]  # its outcome; raises MismatchError, ProblemError


class MismatchError(Exception):
    """The server's response or state is not as expected."""


class Row(NamedTuple):
    """The result of one control."""

    control: str
    outcome: str
    ok: bool


def exercise(client: Client, until: float, on_row: Callable[[Row], None]) -> None:
    """Use all controls, spread over the time to `until` on the monotonic clock.

    Each result is passed to `on_row`. Raises Unreachable.
    """
    left = controls(client)
    while left:
        due = time.monotonic() + max(0.0, until - time.monotonic()) / len(left)
        name, control = left.pop(0)
        try:
            on_row(Row(name, control(client), ok=True))
        except Unreachable:
            raise
        except (MismatchError, ProblemError) as error:
            on_row(Row(name, str(error), ok=False))
        time.sleep(max(0.0, due - time.monotonic()))


def controls(client: Client) -> list[tuple[str, Control]]:
    """Every control, in an order that restores the initial configuration."""
    before = client.config()
    start = before.effective
    policies = [info.name for info in client.policies() if info.error is None]
    planner = start.experiment.planner
    another = "pack" if planner == "plug" else "plug"
    least = int(before.bounds["budget_tokens"].minimum or 1)
    return [
        ("validate_only", dry_run),
        ("a refused change", refusal),
        *(change(policy={"name": name}) for name in policies if name != start.policy.name),
        change(policy=msgspec.to_builtins(start.policy)),
        change(theta_f=0.05),
        change(batch_size=8),
        change(experiment={"planner": another}),
        change(experiment={"planner": planner}),
        change(budget_tokens=max(least, start.budget_tokens * 3 // 4)),
        change(budget_tokens=start.budget_tokens),
        change(recycle=False),
        change(shadow={"name": "tova"}),
        change(shadow=None),
        change(reclamation="paused"),
        ("compact", compact),
        change(reclamation="auto"),
        change(reclamation="off"),
        change(reclamation="auto"),
        change(recycle=True),
        ("undo", undo),
        change(
            theta_f=start.theta_f,
            batch_size=start.batch_size,
            recycle=start.recycle,
            reclamation=start.reclamation,
        ),
    ]


def change(**patch: Any) -> tuple[str, Control]:
    """The change `patch`, by its values."""

    def make(client: Client) -> str:
        result = client.patch_config(patch)
        _expect_effective(client, result)
        desired = msgspec.to_builtins(result.desired)
        for name, wanted in patch.items():
            found = desired[name]
            if isinstance(wanted, dict) and isinstance(found, dict):
                found = {part: found.get(part) for part in wanted}
            if found != wanted:
                raise MismatchError(f"{name} is {found}, not {wanted}")
        return _said(result)

    return ", ".join(f"{name} {value_text(value)}" for name, value in patch.items()), make


def dry_run(client: Client) -> str:
    """Check that validate_only returns a what-if and changes nothing."""
    before = client.config()
    result = client.patch_config({"theta_f": 0.0}, validate_only=True)
    if result.what_if is None or result.applied_at_step is not None:
        raise MismatchError("validate_only returned no what-if, or a step")
    _expect_unchanged(client, before)
    what_if = result.what_if
    return f"would free {what_if.freed_blocks}, move {what_if.moved_tokens} tokens"


def refusal(client: Client) -> str:
    """Check that one bad value refuses the entire patch, with a problem that names it."""
    before = client.config()
    try:
        client.patch_config({"batch_size": 3, "theta_f": 1.5})
    except Unreachable:
        raise
    except ProblemError as refused:
        problem = refused.problem
    else:
        raise MismatchError("theta_f 1.5 was not refused")
    if (problem.status, problem.field, problem.value) != (422, "theta_f", 1.5) or not problem.bound:
        raise MismatchError(f"the problem does not name field, value and bound: {problem}")
    _expect_unchanged(client, before)
    return f"422: {problem.detail}"


def compact(client: Client) -> str:
    """Compact all requests by hand."""
    bound = client.config().bounds["batch_size"].maximum
    operation = client.compact(batch_size=int(bound or 1))
    operation = client.wait_operation(operation.id, timeout_s=OPERATION_S)
    if operation.state != "done" or operation.result is None:
        raise MismatchError(f"the operation is {operation.state}: {operation.error}")
    result = operation.result
    return f"freed {result.freed_blocks}, moved {result.moved_tokens} tokens"


def undo(client: Client) -> str:
    """Undo a change and check that the configuration before it is effective again."""
    before = client.config()
    client.patch_config({"theta_f": 0.9 if before.effective.theta_f < 0.5 else 0.1})
    result = client.undo()
    _expect_effective(client, result)
    if result.desired != before.desired:
        raise MismatchError("undo did not restore the configuration before the last change")
    return _said(result)


def _expect_effective(client: Client, result: wire.PatchResult) -> None:
    if result.applied_at_step is None:
        raise MismatchError("the answer has no step")
    deadline = time.monotonic() + EFFECTIVE_S
    while (config := client.config()).effective_revision < result.revision:
        if time.monotonic() > deadline:
            raise MismatchError(f"the change is not effective after {EFFECTIVE_S:g} s")
        time.sleep(POLL_S)
    if config.revision != result.revision:
        raise MismatchError(f"GET /config shows revision {config.revision}, not {result.revision}")
    if not config.desired == config.effective == result.desired:
        raise MismatchError("GET /config does not show the configuration of the answer")


def _expect_unchanged(client: Client, before: wire.ConfigDocument) -> None:
    after = client.config()
    if after != before:
        raise MismatchError(f"the configuration changed: revision {after.revision}")


def _said(result: wire.PatchResult) -> str:
    return ", ".join(
        f"{name} {value_text(old)} → {value_text(new)}"
        for name, (old, new) in result.changes.items()
    )
