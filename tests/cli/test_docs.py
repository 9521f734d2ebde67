"""README and docs/ are correct: commands parse, code runs, names and files exist.

Blocks of docs/client.md run in `tests/client/test_client_docs.py`, the policy of policies.md in
`tests/core/test_other_packages.py`, tables in `tests/docs/test_tables.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from tests.support.cli_harness import leaves, parse, run
from tests.support.core.live import LiveEngine
from tests.support.serving import Served
from tests.support.waiting import until
from vtoken.core.config.request_rules import request_rules
from vtoken.demo.run import parse as parse_demo
from vtoken.vllm.serve import build_parser, initial_patch
from vtoken_bench import BENCHES
from vtoken_console.app.keyfile import load

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
ADDED = ("--vtoken-policy", "auto")  # to a command of vLLM


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks; those without a language count as `sh`, except drawings."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if (name or "sh") == language and "──" not in text]


def commands(page: Path) -> list[list[str]]:
    """Every simple command of the page's blocks and of its inline code, as words."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    inline = re.findall(r"(?<!`)`((?:vtoken|make|pip|python -m) [^`]+)`(?!`)", page.read_text())
    lines = [*text.splitlines(), *(" ".join(code.split()) for code in inline)]
    return [words for line in lines for words in simple_commands(line)]


def simple_commands(line: str) -> Iterator[list[str]]:
    """The parts of a command line between pipes and semicolons, without comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&"):
            if words:
                yield words
            words = []
        elif words or "=" not in word:  # VTOKEN_TOKEN=… before a command
            words.append(word)


def check(words: list[str]) -> None:
    """Raises, or exits, unless the program accepts these words."""
    program, *rest = words
    if program == "vtoken" and rest in (["serve"], ["serve", "--help"], ["--help"]):
        return
    if program == "vtoken" and rest[0] == "serve":
        arguments, others = build_parser().parse_known_args(rest[1:])
        assert not others[0].startswith("-")  # MODEL
        assert not [word for word in others if word.startswith("--vtoken")], others
        if arguments.vtoken_policy != "evenly_spaced":  # the example's, not installed here
            initial_patch(arguments)
    elif program == "vtoken" and rest[0] == "demo":
        parse_demo(rest[1:])
    elif program == "vtoken" and rest[0] == "bench":
        assert rest[1] in {*BENCHES, "results", "compare"}
    elif program == "vtoken":
        parse(rest)
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = {*project["optional-dependencies"]}
        assert {*re.findall(r"\.\[([\w,]+)\]", " ".join(rest))} <= extras, rest
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in targets


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_line_is_one_that_the_program_takes(page: Path) -> None:
    wrong = []
    for words in commands(page):
        if any("|" in word for word in words):
            continue  # bash|zsh|fish
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                check([word.replace("…", "") for word in words if word != "…"])
        except (Exception, SystemExit) as error:
            wrong.append(f"{shlex.join(words)}: {error} {said.getvalue()}")
    assert not wrong, "\n".join(wrong)


def test_the_examples_of_help_are_command_lines_that_parse() -> None:
    lines = [line for _, command in leaves() for line in (command.epilog or "").splitlines()]
    found = [words for line in lines if "vtoken " in line for words in simple_commands(line)]
    assert sum(words[0] == "vtoken" for words in found) > 20
    for words in found:
        check(words)


def test_the_command_lines_are_found() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert sum(words[0] == "vtoken" for words in found) > 45
    assert sum(words[0] == "make" for words in found) > 12
    with pytest.raises(click.UsageError):
        check(["vtoken", "config", "put", "theta_f=0.1"])
    with pytest.raises(AssertionError):
        check(["vtoken", "serve", "MODEL", "--vtoken-polciy", "h2o"])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_of_a_link_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert not [x for x in links if not (page.parent / x.partition("#")[0]).exists()]


ELSEWHERE = {  # what starts an engine or an environment, and the test that runs it
    ("pip", "install"): "cli/test_wheel.py",
    ("make", "demo"): "demo/test_demo_run.py",
    ("make", "test"): "conftest.py",
    ("vtoken", "serve"): "vllm/test_server.py",
    ("vtoken", "doctor"): "cli/test_cli_doctor.py",
}


@pytest.mark.usefixtures("stepping")
async def test_every_command_of_the_readme_runs(
    core: LiveEngine, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await until(lambda: served.engine.flight.recording, "not recording")
    core.configure(policy={"name": "streaming_llm"})
    ran = []
    for program, *words in commands(ROOT / "README.md"):
        if (program, words[0]) in ELSEWHERE:
            assert (ROOT / "tests" / ELSEWHERE[program, words[0]]).exists()
            continue
        assert program == "vtoken"
        words = ["a" if word == "ID" else word for word in words]
        if words[0] == "console":  # a picture needs no terminal
            words += ["--export", f"{len(ran)}.svg"]
        own = [] if {"--sample", "--replay"} & {*words} else ["--url", served.url]
        done = await run(*words, *own)
        assert done.code == 0, (words, done.err)
        ran.append(words[0])
        if "--confirm-within" in words:
            assert (await run("confirm", "--url", served.url)).code == 0
    assert len(ran) > 10
    (diff,) = blocks(ROOT / "README.md", "diff")
    before, after = (shlex.split(line[1:]) for line in diff.splitlines())
    assert before == ["vllm", *(word for word in after[1:] if word not in ADDED)]
    check(after)


@pytest.mark.usefixtures("stepping")
async def test_python_of_operating_and_recordings_runs(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VTOKEN_URL", served.url)
    ran = await run("record", "now.jsonl.gz", "--duration", "1", "--url", served.url)
    assert ran.code == 0, ran.err
    (request,) = blocks(ROOT / "docs" / "operating.md", "python")
    (read,) = blocks(ROOT / "docs" / "recordings.md", "python")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        await asyncio.to_thread(exec, compile(read, "example", "exec"), {})
    assert out.getvalue()
    said: dict[str, Any] = {}
    create = SimpleNamespace(create=lambda *_, **more: said.update(more))
    exec(request, {"client": SimpleNamespace(chat=SimpleNamespace(completions=create))})
    rules = request_rules(said["extra_body"]["vllm_xargs"])
    assert rules is not None
    assert rules.budget_tokens == 1024


def test_keys_and_packages_in_toml_are_read(tmp_path: Path) -> None:
    (keys,) = blocks(ROOT / "docs" / "console.md", "toml")
    (tmp_path / "console.toml").write_text(keys)
    assert load(tmp_path / "console.toml")
    for package in blocks(ROOT / "docs" / "policies.md", "toml"):
        groups = tomllib.loads(package)["project"]["entry-points"]
        assert "vtoken.policies" in groups
        assert groups.keys() <= {"vtoken.policies", "vtoken.signals"}
