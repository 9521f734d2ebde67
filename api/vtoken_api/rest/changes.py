"""The calls that change something: configuration, confirm, undo, and what acts on requests.

A call that is refused, here or by the engine, changes nothing.
"""

from __future__ import annotations

from msgspec import structs
from starlette.responses import Response

from vtoken import wire
from vtoken.wire import commands, routes
from vtoken_api.problems import refuse
from vtoken_api.rest.serving import Asked, Handlers, document


async def patch_config(asked: Asked, query: routes.PatchQuery) -> wire.PatchResult:
    changes, caller, dry_run = asked.service.changes, asked.caller(), query.validate_only
    first = query.canary_engine
    call = commands.PatchConfig(
        patch=asked.body,
        if_match=asked.if_match,
        confirm_within_s=query.confirm_within_s,
        guards=list(query.guards),
        guard_for_s=query.guard_for_s,
    )
    if first is None:
        return await changes.configure(call, query.engine, caller, dry_run=dry_run)
    if query.engine is None:
        return await changes.roll_out(call, first, caller, dry_run=dry_run)
    raise refuse(
        422,
        "a change goes to one engine, or to one first and then to all",
        field="canary_engine",
        value=first,
        bound="engine or canary_engine",
    )


async def settle(asked: Asked, query: routes.ChangeQuery) -> wire.PatchResult:
    """Confirm the newest change, or undo it."""
    settles = commands.Confirm if asked.route is routes.CONFIRM else commands.Undo
    call = settles(if_match=asked.if_match)
    return await asked.service.changes.configure(
        call, query.engine, asked.caller(), dry_run=query.validate_only
    )


async def sync(asked: Asked, query: routes.SyncQuery) -> wire.PatchResult:
    return await asked.service.changes.sync(
        query.engine, asked.caller(), dry_run=query.validate_only
    )


async def compact(asked: Asked, query: routes.AllEngines) -> Response:
    call = commands.Compact(**structs.asdict(asked.body))
    operation = await asked.service.changes.compact(call, query.engine, asked.caller())
    root = asked.request.scope.get("root_path", "")
    location = {"Location": f"{root}/operations/{operation.id}"}
    return document(operation, asked.route.status, location)


async def forget(asked: Asked, query: routes.AnyEngine) -> wire.Forgotten:
    call, changes = commands.Forget(spans=asked.body.spans, **asked.names), asked.service.changes
    return await changes.of_request(call, query.engine, asked.caller(), wire.Forgotten)


async def end(asked: Asked, query: routes.AnyEngine) -> wire.Ended:
    call, changes = commands.End(**asked.names), asked.service.changes
    return await changes.of_request(call, query.engine, asked.caller(), wire.Ended)


async def restore(asked: Asked, query: routes.RestoreQuery) -> wire.Restored:
    call = commands.Restore(**asked.names, dry_run=query.validate_only)
    changes, caller = asked.service.changes, asked.caller()
    return await changes.of_request(call, query.engine, caller, wire.Restored)


HANDLERS: Handlers = {
    routes.PATCH_CONFIG: patch_config,
    routes.CONFIRM: settle,
    routes.UNDO: settle,
    routes.SYNC: sync,
    routes.COMPACT: compact,
    routes.FORGET: forget,
    routes.END: end,
    routes.RESTORE: restore,
}
