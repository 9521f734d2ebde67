"""Which modules the console imports and when."""

from __future__ import annotations

import subprocess
import sys

FORBIDDEN = ("vllm", "torch", "fastapi", "zmq", "vtoken_api", "transformers")
LATE = ("numpy", "httpx", "websockets", "msgspec")


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_console_imports_the_wire_only() -> None:
    loaded = modules_after(
        "import pkgutil, importlib, vtoken_console as c\n"
        "for m in pkgutil.walk_packages(c.__path__, 'vtoken_console.'):\n"
        "    importlib.import_module(m.name)"
    )
    assert not loaded & set(FORBIDDEN)
    ours = {m for m in loaded if m.startswith("vtoken.")}
    ours -= {m for m in ours if m.split(".")[1] in ("client", "recording", "wire")}
    light = {"vtoken.base", "vtoken.base.documents", "vtoken.base.errors", "vtoken.base.hosts"}
    assert ours == light | {"vtoken.base.quantities", "vtoken.sentences"}


def test_first_frame_waits_for_neither_numpy_nor_the_network_libraries() -> None:
    assert not modules_after("import vtoken_console.app.app") & set(LATE)
