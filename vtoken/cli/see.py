"""The commands that query the server once and print the answer."""

from __future__ import annotations

import time
from functools import partial

from vtoken.cli import every
from vtoken.cli.errors import names_no_engine
from vtoken.cli.remote import Remote, requests_by_engine
from vtoken.cli.show import fleet_parts, status_parts
from vtoken.cli.show_requests import (
    audit_lines,
    block_parts,
    request_detail_parts,
    request_parts,
    token_line,
)
from vtoken.client import ProblemError


def status(remote: Remote, check: bool) -> int:
    """One engine; of a server with several, unless one is named, the table of all. `check`: one
    line on the worst, see `every.check`.
    """
    if check:
        return every.check(remote)
    if remote.every:
        return every.report(remote)
    try:
        remote.out.show(remote.client.status(), status_parts)
    except ProblemError as error:
        if remote.out.as_json or not names_no_engine(error.problem):
            raise
        code = engines(remote)
        remote.out.part("one of them in full: vtoken status --engine N")
        return code
    return 0


def engines(remote: Remote) -> int:
    """A line for each engine, then a sentence on all; 1 if they do not agree."""
    fleet = remote.client.engines()
    remote.out.show(fleet, fleet_parts)
    return 0 if fleet.ok else 1


def requests(remote: Remote, sort: str, output: str | None) -> None:
    """Of a server with several engines, unless one is named, those of all in one table."""
    client = remote.client
    found = {0: client.requests()} if remote.out.as_json else requests_by_engine(client)
    engines = {row.id: rank for rank, rows in found.items() for row in rows}
    wide, now = output == "wide", time.time()
    parts = partial(request_parts, sort=sort, wide=wide, now=now, engines=engines)
    remote.out.show([row for rows in found.values() for row in rows], parts)


def request(remote: Remote, request_id: str, tokens: bool) -> None:
    """One request; with `tokens`, one line or document for each token."""
    if not tokens:
        shown = partial(request_detail_parts, now=time.time())
        remote.out.show(remote.client.request(request_id), shown)
        return
    for page in remote.client.token_pages(request_id):
        for row in page.rows:
            remote.out.show(row, lambda row: [token_line(row)])


def block(remote: Remote, block_id: int) -> None:
    remote.out.show(remote.client.block(block_id), block_parts)


def audit(remote: Remote, limit: int) -> None:
    remote.out.show(remote.client.audit(limit), audit_lines)
