"""The commands that read or change the configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from vtoken import wire
from vtoken.base.quantities import size_bytes
from vtoken.cli.errors import UsageError, did_you_mean
from vtoken.cli.every import change
from vtoken.cli.printing import plain
from vtoken.cli.remote import Remote
from vtoken.cli.show import config_parts, patch_lines, policy_detail_parts, policy_parts
from vtoken.client import calls


def config_get(remote: Remote, key: str | None) -> None:
    """Every field with its bound; with KEY, only its effective value, as `config set` takes it."""
    document = remote.client.config()
    if key is None:
        remote.out.show(document, config_parts)
    else:
        value = _value_at(msgspec.to_builtins(document.effective), key)
        remote.out.show(value, lambda value: [plain(value)])


def _value_at(values: dict[str, Any], key: str) -> Any:
    """The value at a dotted key; raises UsageError."""
    found: Any = values
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            known = list(found) if isinstance(found, dict) else []
            meant = did_you_mean(name, known)
            raise UsageError(f"no field {key!r}", meant or f"fields: {', '.join(known)}")
        found = found[name]
    return found


def config_set(remote: Remote, pairs: Sequence[str], **flags: Any) -> int:
    return _patch(remote, _tree(pairs), **flags)


def policy_list(remote: Remote, name: str | None) -> None:
    """A line for each policy; with NAME, all about one."""
    client = remote.client
    policies = client.policies()
    if name is None:
        engines = client.engines().engines
        in_force = {row.status.policy.name for row in engines if row.status is not None}
        remote.out.show(policies, partial(policy_parts, in_force=in_force))
        return
    named = [policy for policy in policies if policy.name == name]
    if not named:
        known = [policy.name for policy in policies]
        hint = did_you_mean(name, known) or f"policies: {', '.join(known)}"
        raise UsageError(f"no policy {name!r}", hint)
    remote.out.show(named, policy_detail_parts)


def policy_use(remote: Remote, name: str, pairs: Sequence[str], **flags: Any) -> int:
    params = {"params": _tree(pairs)} if pairs else {}
    return _patch(remote, {"policy": {"name": name, **params}}, **flags)


def pause(remote: Remote, **flags: Any) -> int:
    return _patch(remote, {"reclamation": "paused"}, **flags)


def resume(remote: Remote, **flags: Any) -> int:
    return _patch(remote, {"reclamation": "auto"}, **flags)


def _patch(
    remote: Remote,
    patch: dict[str, Any],
    *,
    dry_run: bool,
    guards: Sequence[wire.Guard],
    p95_guards: Sequence[wire.Guard],
    **trial: Any,
) -> int:
    call = calls.patch_config(
        patch,
        validate_only=dry_run,
        guards=[*guards, *p95_guards],
        **trial,
    )
    return change(remote, call)


def undo(remote: Remote, dry_run: bool, revision: int | None) -> int:
    call = calls.undo(revision=revision, validate_only=dry_run)
    return change(remote, call)


def confirm(remote: Remote, dry_run: bool, revision: int | None) -> int:
    call = calls.confirm(revision=revision, validate_only=dry_run)
    return change(remote, call)


def sync(remote: Remote, dry_run: bool) -> None:
    remote.out.show(remote.client.sync(validate_only=dry_run), patch_lines)


def _tree(pairs: Sequence[str]) -> dict[str, Any]:
    """`a.b=1 c=text` as {"a": {"b": 1}, "c": "text"}: a value is JSON, else text. Bytes may be
    given as a size: `park_bytes=4GiB`.

    Raises UsageError for a pair that is not KEY=VALUE or repeats a key.
    """
    tree: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            raise UsageError(f"{pair!r} is not KEY=VALUE")
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise UsageError(f"{key!r} is given twice")
        if path[-1] in node:
            raise UsageError(f"{key!r} is given twice")
        try:
            node[path[-1]] = json.loads(text)
        except ValueError:
            node[path[-1]] = _bytes(key, text) if key.endswith("_bytes") else text
        except RecursionError:
            raise UsageError(f"{key}: the value nests too deep") from None
    return tree


def _bytes(key: str, text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise UsageError(f"{key}: {error}") from None
