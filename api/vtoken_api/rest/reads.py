"""The calls that read and are more than a question to one engine.

Every one but the audit log asks an engine, so that an answer is the state between two steps and
never a stale copy. What has an id is looked for in all engines.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import numpy as np
from msgspec import structs
from starlette.responses import Response

from vtoken import sentences, wire
from vtoken.wire import commands, routes
from vtoken.wire.fleet import differences
from vtoken_api.auth.check import GRANT
from vtoken_api.problems import ProblemError
from vtoken_api.rest.serving import Asked, Handlers, ask, document


async def engines(asked: Asked, _: routes.Query) -> wire.Fleet:
    """Every engine with its state now, or the newest known if it does not answer."""
    fleet = asked.service.fleet
    status, config = commands.Status(), commands.Config()
    statuses, configs = await asyncio.gather(
        fleet.ask_each(dict.fromkeys(fleet.ranks, status), wire.Status),
        fleet.ask_each(dict.fromkeys(fleet.ranks, config), wire.ConfigDocument),
    )
    rows = []
    known: dict[int, wire.ConfigDocument] = {}
    for rank, engine in asked.service.engines.items():
        row = wire.EngineRow(engine=rank, status=None)
        found, its_config = statuses[rank], configs[rank]
        if isinstance(found, wire.Status) and isinstance(its_config, wire.ConfigDocument):
            engine.complete(found)
            row.status, known[rank] = found, its_config
        else:
            problem = found if isinstance(found, ProblemError) else its_config
            assert isinstance(problem, ProblemError)
            row.problem = problem.problem.detail
            row.silent_s = engine.hub.state_age_s or 0.0
            state = engine.hub.state
            if state is not None and state.config is not None:
                row.status, known[rank] = state.status, state.config
        if rank in known:
            row.revision, row.made = known[rank].revision, known[rank].made
        rows.append(row)
    drifts = differences(known)
    for row in rows:
        row.drift = drifts.get(row.engine, {})
    return wire.Fleet(
        revision=max(row.revision for row in rows),
        engines=rows,
        sentence=sentences.fleet_sentence(rows),
        ok=not any(row.problem or row.drift for row in rows),
    )


async def status(asked: Asked, query: routes.OneEngine) -> wire.Status:
    engine = asked.service.engine(query.engine)
    try:
        found = await asked.service.fleet.one(query.engine).ask(commands.Status(), wire.Status)
    except ProblemError as error:
        age_s = engine.hub.state_age_s
        if error.problem.status == HTTPStatus.SERVICE_UNAVAILABLE and age_s is not None:
            error.problem.detail += f"; its newest frame is {age_s:.0f} s old"
        raise
    engine.complete(found)
    return found


async def operation(asked: Asked, query: routes.AnyEngine) -> wire.Operation:
    return await asked.service.fleet.operation(query.engine, asked.names["id"])


async def change(asked: Asked, query: routes.AnyEngine) -> wire.Change:
    return await asked.service.changes.outcome(query.engine, asked.names["id"])


async def blocks(asked: Asked, query: routes.OneEngine) -> Response:
    found: wire.BlocksDocument = await ask(asked, query)
    live = wire.unpack_array(found.live, "<u2")
    if _prefers_octets(asked.request.headers.get("accept", "")):
        octets = np.minimum(live, 255).astype(np.uint8).tobytes()
        return Response(octets, media_type=routes.OCTETS, headers={"Vary": "Accept"})
    found = structs.replace(
        found,
        live=live.tolist(),
        flags=wire.unpack_array(found.flags, "u1").tolist(),
        owner=wire.unpack_array(found.owner, "<u2").tolist(),
    )
    return document(found, headers={"Vary": "Accept"})


async def text(asked: Asked, query: routes.TokensQuery) -> Response:
    service = asked.service
    service.auth.check_text(asked.request.scope[GRANT])
    engine, name = await service.fleet.holder(
        query.engine, asked.names["request_id"], running=asked.route.running
    )
    call = commands.Text(request_id=name, start=query.start, limit=query.limit)
    source = await engine.ask(call, wire.TextSource)
    page = await asyncio.to_thread(service.texts.decode, source)
    page.engine = engine.rank
    return document(page, headers={"Cache-Control": "no-store"})


async def audit(asked: Asked, query: routes.AuditQuery) -> wire.AuditPage:
    return await asked.service.journal.entries(query.limit)


def _prefers_octets(accept: str) -> bool:
    """Whether `Accept` names octets before JSON."""
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return routes.OCTETS in kinds and routes.JSON not in kinds[: kinds.index(routes.OCTETS)]


HANDLERS: Handlers = {
    routes.ENGINES: engines,
    routes.STATUS: status,
    routes.OPERATION: operation,
    routes.CHANGE: change,
    routes.BLOCKS: blocks,
    routes.TEXT: text,
    routes.AUDIT: audit,
}
