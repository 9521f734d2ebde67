"""Data-parallel engines on two nodes under hybrid balancing, and engines of two ranks each.

`make test-models` runs this file. The nodes are two servers on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support import data_parallel
from tests.support.cli_harness import run
from tests.support.data_parallel import assert_both_engines_are_exact, fleet
from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.demo.server import Server, any_free_port

ALL = bool(os.environ.get("VTOKEN_ALL_MODELS"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not ALL, reason="twelve starts of vLLM; `make test-models` runs it"),
]


@pytest.fixture(scope="module")
def nodes(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Engines 0 and 1 on the first node, 2 and 3 on the second; each waits for the other one."""
    rpc_port = any_free_port()
    servers = [
        data_parallel.server(
            demo_model,
            tmp_path_factory.mktemp(f"node-{node}"),
            [
                "--data-parallel-hybrid-lb",
                "--data-parallel-size=4",
                "--data-parallel-size-local=2",
                f"--data-parallel-start-rank={2 * node}",
                "--data-parallel-address=127.0.0.1",
                f"--data-parallel-rpc-port={rpc_port}",
                "--api-server-count=1",
            ],
        )
        for node in (0, 1)
    ]
    with ExitStack() as running, ThreadPoolExecutor(len(servers)) as starts:
        yield [*starts.map(running.enter_context, servers)]


async def test_engines_on_two_nodes_are_exact_and_each_nodes_server_changes_its_own(
    nodes: list[Server], hf_model: Any
) -> None:
    for number, server in enumerate(nodes):
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as http:
            await assert_both_engines_are_exact(http, hf_model)
            found = await fleet(http)
            assert [row.engine for row in found.engines] == [2 * number, 2 * number + 1]
            patch = {"theta_f": 0.3 + 0.1 * number}
            answer = await http.patch("/vtoken/v1/config", json=patch)
            result = msgspec.json.decode(answer.content, type=wire.PatchResult)
            assert [part.engine for part in result.engines] == [2 * number, 2 * number + 1]
            assert (await fleet(http)).ok


async def test_a_fleet_file_names_both_nodes_for_one_change(
    nodes: list[Server], tmp_path: Path
) -> None:
    file = tmp_path / "fleet"
    file.write_text("".join(f"{server.url} name=node{n}\n" for n, server in enumerate(nodes)))
    differ = await run("status", "--all", "--fleet", str(file))
    assert differ.code == 1
    assert "node1/2, node1/3 differ from the others: theta_f 0.4 where" in differ.out
    ran = await run("config", "set", "theta_f=0.2", "--all", "--fleet", str(file))
    assert ran.code == 0, ran.err
    assert "4 engines, all answer and run the same configuration" in ran.out


async def test_two_ranks_in_each_of_two_engines_are_exact(
    demo_model: Path, hf_model: Any, tmp_path: Path
) -> None:
    arguments = ["--data-parallel-size=2", "--tensor-parallel-size=2"]
    with data_parallel.server(demo_model, tmp_path, arguments) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as http:
            await assert_both_engines_are_exact(http, hf_model)
            answer = await http.patch("/vtoken/v1/config", json={"theta_f": 0.5})
            assert answer.status_code == 200, answer.text
            assert (await fleet(http)).ok
