"""`GET /recording`: the last seconds of the flight recorder as one recording."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response, StreamingResponse

from vtoken.sentences import clock
from vtoken_api.problems import ProblemError, refuse
from vtoken_api.rest.inputs import RecordingQuery, query
from vtoken_api.rest.openapi import answers, parameters
from vtoken_api.rest.routes import Served
from vtoken_api.state.journal import Flight
from vtoken_api.state.recorder import STATE_S, Recorder
from vtoken_api.state.segments import Segment, chunks

GZIP = "application/gzip"

router = APIRouter(tags=["vToken"])


def _answers() -> dict[int | str, dict[str, Any]]:
    found = answers({}, "A recording of the stream, gzip; `vtoken console --replay` shows it")
    found[200]["content"] = {GZIP: {"schema": {"type": "string", "format": "binary"}}}
    return found


@router.get(
    "/recording",
    summary="The last seconds of the flight recorder",
    operation_id="vtoken_recording",
    description="A recording has one JSON document a line: a header, then stream messages "
    f"({1 / STATE_S:g} state a second, every event) and audit entries. It begins at the key frame "
    "before the requested time. 503 while nothing is recorded, with the reason.",
    openapi_extra=parameters(RecordingQuery),
    responses=_answers(),
)
async def get_recording(
    service: Served, options: Annotated[RecordingQuery, Depends(query(RecordingQuery))]
) -> Response:
    engine = service.fleet.one(options.engine)
    flight = service.journal.flights[engine.rank]
    _check_recorder(engine.recorder, flight)
    try:
        segments = await flight.recent(options.seconds)
    except OSError as error:
        raise _not_recording(f"the recorded segments cannot be read: {error}") from error
    if not segments:
        raise _not_recording("the flight recorder has no data for that time")
    name = time.strftime("vtoken-%Y%m%d-%H%M%S.jsonl.gz")
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return StreamingResponse(_read(segments), media_type=GZIP, headers=headers)


def _check_recorder(recorder: Recorder, flight: Flight) -> None:
    if recorder.problem:
        stopped = clock(recorder.stopped_ts)
        raise _not_recording(
            f"the flight recorder stopped at {stopped}: {recorder.problem}; earlier recordings are "
            f"in {flight.segments.directory} on the server"
        )


def _not_recording(detail: str) -> ProblemError:
    return refuse(503, detail, title="Not recording", headers={"Retry-After": "5"})


async def _read(segments: list[Segment]) -> AsyncIterator[bytes]:
    for segment in segments:
        pieces = chunks(segment)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
