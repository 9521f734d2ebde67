"""Servers with TLS: a certificate that nobody knows, named or not, and the wrong scheme."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509

from tests.support.cli_harness import Ran, run
from tests.support.core.live import LiveEngine
from tests.support.serving import Served, serve
from tests.support.tls import TLS, privately_signed, self_signed
from vtoken.client import AsyncClient, Client, RefusedError, Server, TLSFailed


@pytest.fixture(params=[self_signed, privately_signed])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> TLS:
    made: TLS = request.param(tmp_path)
    return made


@pytest.fixture
async def secure(core: LiveEngine, tls: TLS) -> AsyncIterator[Served]:
    async with serve(core.handle, tls=tls) as served:
        yield served


def commands(folder: Path) -> tuple[tuple[str, ...], ...]:
    return (
        ("status",),
        ("status", "--all"),
        ("config", "set", "theta_f=0.5"),
        ("watch", "--count", "1"),
        ("events", "--limit", "1"),
        ("doctor",),
        ("record", str(folder / "a.jsonl"), "--duration", "250ms"),
        ("console", "--export", str(folder / "a.json")),
    )


async def ran_on(url: str, *command: str, **env: str) -> Ran:
    return await run(*command, "--url", url, **env)


async def test_every_command_trusts_the_named_certificate(
    secure: Served, tls: TLS, tmp_path: Path
) -> None:
    named = str(tls.authority)
    for number, env in enumerate(({"VTOKEN_CAFILE": named}, {"SSL_CERT_FILE": named}, {})):
        folder = tmp_path / str(number)
        folder.mkdir()
        option = () if env else ("--cafile", named)
        for command in commands(folder):
            ran = await ran_on(secure.url, *command, *option, **env)
            assert ran.code == 0, (command, env, ran.out, ran.err)


async def test_a_certificate_that_is_not_known_is_named_with_the_remedy(
    secure: Served, tmp_path: Path
) -> None:
    for command in commands(tmp_path):
        ran = await ran_on(secure.url, *command)
        said = " ".join((ran.out + ran.err).split())
        assert ran.code == 1, command
        assert "its certificate is not trusted" in said, command
        assert "with --cafile or VTOKEN_CAFILE" in said, command
        assert "vtoken serve" not in said, command


async def test_wrong_scheme_is_named_with_the_right_one(
    secure: Served, served: Served, tls: TLS
) -> None:
    plain = secure.url.replace("https", "http")
    encrypted = served.url.replace("http", "https")
    for command in (("status",), ("watch", "--count", "1")):
        ran = await ran_on(plain, *command)
        assert ran.err == (
            f"vtoken: cannot reach {plain}: the server uses TLS; its address is {secure.url}\n"
        )
        ran = await ran_on(encrypted, *command, "--cafile", str(tls.authority))
        assert ran.err == (
            f"vtoken: cannot reach {encrypted}: the server does not use TLS; its address is "
            f"{served.url}\n"
        )


async def test_a_name_that_is_not_in_the_certificate_is_said(
    core: LiveEngine, tmp_path: Path
) -> None:
    tls = self_signed(tmp_path, (x509.DNSName("gpu7.example"),))
    async with serve(core.handle, tls=tls) as served:
        ran = await ran_on(served.url, "status", "--cafile", str(tls.authority))
    assert "certificate is not valid for '127.0.0.1'; call the server by a name" in ran.err


async def test_client_trusts_the_named_certificate_alone(secure: Served, tls: TLS) -> None:
    with pytest.raises(TLSFailed):
        await asyncio.to_thread(Client(secure.url).status)
    async with AsyncClient(Server(secure.url, cafile=tls.authority)) as client:
        assert (await client.status()).epoch
        async with client.stream() as stream:
            await anext(stream)
    trusted = Server("https://vtoken.example", cafile=tls.authority).tls()
    assert isinstance(trusted, ssl.SSLContext)
    assert len(trusted.get_ca_certs()) == 1


async def test_file_without_certificates_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for file in (tmp_path / "empty", tmp_path / "missing"):
        ran = await ran_on("https://127.0.0.1:9", "status", "--cafile", str(file))
        assert ran.code == 2
        assert f"cannot read certificates from {file}" in ran.err
        with pytest.raises(RefusedError):
            Server("https://127.0.0.1:9", cafile=file)
