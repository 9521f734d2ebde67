"""`GET /recording`: the last seconds of the flight recorder as one recording."""

from __future__ import annotations

import time
from itertools import chain

from starlette.responses import Response, StreamingResponse

from vtoken.sentences import clock
from vtoken.wire import routes
from vtoken_api.problems import ProblemError, refuse
from vtoken_api.rest.serving import Asked, Handlers
from vtoken_api.state.segments import chunks


async def recording(asked: Asked, query: routes.RecordingQuery) -> Response:
    flight = asked.service.engine(query.engine).flight
    if flight.problem:
        raise _not_recording(
            f"the flight recorder stopped at {clock(flight.stopped_ts)}: {flight.problem}; earlier "
            f"recordings are in {flight.segments.directory} on the server"
        )
    try:
        segments = await flight.recent(query.seconds)
    except OSError as error:
        raise _not_recording(f"the recorded segments cannot be read: {error}") from error
    if not segments:
        raise _not_recording("the flight recorder has no data for that time")
    name = time.strftime("vtoken-%Y%m%d-%H%M%S.jsonl.gz")
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    content = chain.from_iterable(map(chunks, segments))  # read in threads
    return StreamingResponse(content, media_type=routes.GZIP, headers=headers)


def _not_recording(detail: str) -> ProblemError:
    return refuse(503, detail, title="Not recording", headers={"Retry-After": "5"})


HANDLERS: Handlers = {routes.RECORDING: recording}
