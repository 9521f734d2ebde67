"""Fixtures that any test may use."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.heap import freeze_heap
from tests.support.site import sitecustomize

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub library is imported; no test downloads
# Servers that tests start keep audit log and flight recorder here, not in the user's home.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="vtoken-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
# Tensors this small gain nothing from more threads, and lose much where the cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Processes that tests start run it too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(sitecustomize.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# Every HTTP client makes one, which reads all certificates of the machine: 20 ms.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Engines, servers and benches are processes of their own. Where Python may keep no bytecode beside
# the sources, each would compile 5,000 modules of torch and vLLM again.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Examples take as long as the machine lets them. In CI, where the result must not depend on luck,
# they are the same each time; anywhere else new ones.
settings.register_profile(
    "vtoken",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("vtoken")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with engines and servers begin first, so that short ones fill the end of a run: each
    file has one process, which its engines and servers belong to.
    """
    long = {item.path for item in items if {"slow", "vllm"} & {m.name for m in item.iter_markers()}}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    freeze_heap()  # imports and tests last until the end


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """One line before pytest's last one: which tests did not run, and how to run them."""
    yield
    skipped = Counter(
        (report.nodeid.partition("::")[0], report.longrepr[2].removeprefix("Skipped: "))
        for report in terminalreporter.stats.get("skipped", [])
    )
    said = [f"{num} of {path} ({why})" for (path, why), num in sorted(skipped.items())]
    if said:
        terminalreporter.write_line(f"did not run: {'; '.join(said)}")


@pytest.fixture(scope="session")
def demo_model(pytestconfig: pytest.Config) -> Path:
    """Folder of the embedded demo model; made once, reused by later runs of the same recipe."""
    from filelock import FileLock

    from vtoken.demo.model import build

    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("demo-model")
    with FileLock(folder / "lock"):  # several test processes may want it at once
        return build(folder / "model")


@pytest.fixture(scope="session")
def hf_model(demo_model: Path) -> Any:
    """The demo model in Hugging Face transformers, float32, eager attention: for `reference`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def trained_model() -> Path:
    """Folder of the demo's trained model, or a skip where it is not and cannot be fetched."""
    from filelock import FileLock

    from vtoken.demo.trained_model import TrainedModelError, cache_folder, fetch

    cache_folder().mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache_folder() / "lock"):  # several test processes may create it at once
            return fetch()
    except TrainedModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def trained_hybrid() -> Path:
    """Folder of Gemma 3 270M, or a skip where it is not: 240 MB are fetched for `make test-models`
    alone.
    """
    from vtoken.demo.trained_model import MANIFEST, MODELS, TrainedModelError, cache_folder, fetch

    folder = cache_folder() / MODELS["gemma"].folder_name
    if not (folder / MANIFEST).is_file() and not os.environ.get("VTOKEN_ALL_MODELS"):
        pytest.skip("gemma was not fetched: `make test-models` and `vtoken demo --model gemma` do")
    try:
        return fetch("gemma")
    except TrainedModelError as error:
        pytest.skip(str(error))


@pytest.fixture
def own_machine_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Benchmarks of tests measure nothing: they do not wait for those of this machine."""
    path = tmp_path / "machine.lock"
    monkeypatch.setattr("vtoken_bench.machine_lock.lock_path", lambda: path)
    return path
