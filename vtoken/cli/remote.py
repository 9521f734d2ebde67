"""The commands that ask servers: which servers a command line names, and what a command gets.

1. `--url`, else VTOKEN_URL, names one server. URLs after `vtoken console` and the lines of
   `--fleet` name several; they are not combined with `--url`, and VTOKEN_URL is not read.
2. A token comes from a server's line in the fleet file, else from `--token-file`, else from
   VTOKEN_TOKEN. `--cafile`, else VTOKEN_CAFILE, is for all servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from vtoken.cli.errors import CommandError, UsageError, failure_of
from vtoken.cli.printing import Printer

if TYPE_CHECKING:
    from vtoken.client import AsyncClient, Client, OutcomeUnknown, Server
    from vtoken.wire import RequestRow

LOOKUP_S = 300.0  # how long the outcome of a change is looked up if its answer is lost


@dataclass(frozen=True, slots=True)
class Address:
    """What a command line says about servers: the values of the options of these names."""

    url: str | None = None
    urls: Sequence[str] = ()
    fleet: str | None = None
    token_file: str | None = None
    cafile: str | None = None
    engine: int | None = None

    def servers(self) -> list[Server]:
        """At least one. Raises UsageError, and RefusedError for an invalid address or file."""
        from vtoken.client import Server, read_fleet
        from vtoken.client.fleet_file import check_distinct

        more: dict[str, Any] = {
            "token_file": self.token_file,
            "cafile": self.cafile,
            "engine": self.engine,
        }
        if not self.urls and self.fleet is None:
            return [Server.from_environment(self.url, **more)]
        if self.url is not None:
            raise UsageError(
                "--url names one server, and others are named too",
                "name all of them in one way: URL …, or --fleet FILE",
            )
        servers = [Server.from_environment(url, **more) for url in self.urls]
        if self.fleet is not None:
            servers += read_fleet(self.fleet, **more)
        check_distinct(servers)
        return servers


class Remote:
    """The servers that are named, a client of the first of them, and the printer of its answers.

    `every`: the command is about all of them. `verbose`: it is to show everything.
    """

    def __init__(
        self, address: Address, *, every: bool, as_json: bool, verbose: bool = False
    ) -> None:
        from vtoken.client import Client

        self.address = address
        self.servers = address.servers()
        self.every = every
        self.verbose = verbose
        self.out = Printer(as_json=as_json)
        self.client = Client(self.servers[0], lookup_s=LOOKUP_S, on_lookup=self.tell_lookup)

    def opened(self, server: Server) -> AsyncClient:
        """A client of one of the servers, beside those of the others."""
        from vtoken.client import AsyncClient

        return AsyncClient(server, lookup_s=LOOKUP_S, on_lookup=self.tell_lookup)

    def tell(self, text: str) -> None:
        """Print a remark; with `--json`, standard error holds problem documents only."""
        if not self.out.as_json:
            click.echo(f"vtoken: {text}", err=True)

    def tell_lookup(self, lost: OutcomeUnknown) -> None:
        self.tell(f"{lost.problem.detail}\n  looking it up …")

    def tell_ignored_token(self, server: Server) -> None:
        """Tell that a server has no tokens, so that a wrong one would do as well."""
        source = server.token_source or "the client"
        self.tell(f"{server.url} has no tokens; it did not check the one of {source}")


def requests_by_engine(client: Client) -> dict[int, list[RequestRow]]:
    """Rank -> its requests: of the addressed engine; if none is, of all that answer."""
    named = client.server.engine
    found = {}
    for rank in [named] if named is not None else _ranks(client):
        client.server = replace(client.server, shown=rank)
        found[rank] = client.requests()
    return found


def _ranks(client: Client) -> list[int]:
    """The engines that answer. Raises ProblemError if none does."""
    ranks = [row.engine for row in client.engines().engines if not row.problem]
    if not ranks:
        client.status()  # the server's own refusal
    return ranks


def answered(
    function: Callable[..., int | None],
    *,
    as_json: bool = False,
    verbose: bool = False,
    every: bool = False,
    **values: Any,
) -> int:
    """Run a command; errors of the client are those of the command line."""
    from vtoken.client import ProblemError, RefusedError

    try:
        if values.get("fleet") is not None and not (every or "urls" in values):
            raise UsageError("--fleet names several servers", "add --all")
        fields = Address.__dataclass_fields__
        address = Address(**{name: values.pop(name) for name in fields if name in values})
        remote = Remote(address, every=every, as_json=as_json, verbose=verbose)
        with remote.client as client:
            code = function(remote, **values)
            if client.token_ignored:
                remote.tell_ignored_token(client.server)
            return code or 0
    except CommandError as error:
        error.as_json = as_json
        raise
    except (ProblemError, RefusedError) as error:
        failure = failure_of(error, verbose=verbose)
        failure.as_json = as_json
        raise failure from error
