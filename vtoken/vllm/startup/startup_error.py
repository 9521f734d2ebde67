"""Repeats the reason why a server did not start as the last line of its log.

The engine raises in its own process, and tracebacks of three vLLM processes follow. `vtoken serve`
creates a file for the reason, which is that of the first process that fails. The server's process,
which ends last, prints the file's content at exit. Without the file (`vllm.LLM`), the exception is
the only report.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from vtoken.base.errors import SelfTestError, UnsupportedError

PLACE = "VTOKEN_LAST_WORDS"  # "process id of the server:file"
# vLLM's sentence on a KV cache that is too small for one request.
_NO_ROOM = re.compile(
    r"max seq len \((?P<length>\d+)\), \((?P<needed>[\d.]+ GiB).*? \((?P<there>[\d.]+ GiB)\)"
    r"(.*maximum model length is (?P<fits>\d+))?"
)
# And on a length that the model was not made for.
_TOO_LONG = re.compile(r"max_model_len \((\d+)\) is greater than the derived \w+ \(\w+=(\d+)")
_NO_CODE = re.compile(r"Model architectures \['(\w+)'.*\] failed to be inspected")
_ELSEWHERE = re.compile(r"see (root cause|stack trace)", re.IGNORECASE)  # another process failed
_OF_PYDANTIC = re.compile(r"^\d+ validation errors? for \w+ (Value error, )?| \[type=.*")


def offer() -> None:
    """Create the file for the reason, for this process and its children; it survives `exec`.

    If this fails, the log contains the reason only once.
    """
    os.environ.pop(PLACE, None)  # set if another `vtoken serve` started this one
    with suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="vtoken-")
        os.close(handle)
        os.environ[PLACE] = f"{os.getpid()}:{path}"


@contextmanager
def kept() -> Iterator[None]:
    """Write the reason of a failure in the context to the file, if there is one."""
    try:
        yield
    except Exception as error:
        keep(words_of(error))
        raise


def keep(words: str) -> None:
    """Write a reason to the file, unless there is none or it has one."""
    _, _, path = os.environ.get(PLACE, "").partition(":")
    if path and words:
        with suppress(OSError):
            if not Path(path).read_text():
                Path(path).write_text(words)


def keep_memory() -> None:
    """Wrap what makes vLLM's KV cache, so that it is said why there is not enough. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    make = EngineCore._initialize_kv_caches
    if not hasattr(make, "keeps_reason"):
        EngineCore._initialize_kv_caches = kept()(make)
        EngineCore._initialize_kv_caches.keeps_reason = True


def words_of(error: Exception) -> str:
    """Cause and remedy; empty if the error only says that another process failed."""
    if isinstance(error, UnsupportedError | SelfTestError):
        return str(error)
    text = " ".join(str(error).split())
    if _ELSEWHERE.search(text):
        return ""
    if found := _NO_ROOM.search(text):
        shorter = f"set --max-model-len {found['fits']} or lower, or " if found["fits"] else ""
        return (
            f"one request of {found['length']} tokens needs {found['needed']} of KV cache, and "
            f"there are {found['there']}; {shorter}give the cache more memory: where they are set, "
            "--kv-cache-memory-bytes and --num-gpu-blocks-override, else --gpu-memory-utilization"
        )
    if found := _TOO_LONG.search(text):
        return f"--max-model-len {found[1]} is more than the model's {found[2]} positions"
    if (found := _NO_CODE.search(text)) and find_spec("torchvision") is None:
        return (
            f"vLLM cannot import its code of {found[1]}, and torchvision, which that of models "
            "with images needs, is missing; install its build for your torch: beside the CPU build "
            "of torch 2.13, uv pip install --torch-backend cpu torchvision==0.28.0"
        )
    return _OF_PYDANTIC.sub("", text).partition(" See https:")[0]


def words_of_server(error: Exception, args: Namespace) -> str:
    """Cause and remedy of a failure in the server's own process, started with vLLM's `args`."""
    if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        if args.uds:
            return f"{args.uds} exists; end the server that listens there, or remove the file"
        where = f"{args.host or 'every address'}, port {args.port}"
        if error.errno == errno.EADDRINUSE:
            return f"{where} is in use; end the server that listens there, or set another --port"
        return f"this machine has no address {args.host}; set another --host"
    if type(error).__module__.startswith("huggingface_hub"):
        why = words_of(error).partition(". ")[0]
        return (
            f"the model {args.model} is no folder here, and Hugging Face does not give it ({why}); "
            "check the name, HF_TOKEN if it is gated, and HF_HUB_OFFLINE"
        )
    return words_of(error) if isinstance(error, OSError | ValueError) else ""


def print_at_exit() -> None:
    """In the server's process: print the file's content at exit and remove the file."""
    owner, _, path = os.environ.get(PLACE, "").partition(":")
    if owner == str(os.getpid()):
        atexit.register(_print, Path(path), os.getpid())


def _print(path: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child inherits the registration
    with suppress(OSError):
        reason = path.read_text()
        path.unlink()
        if reason:
            print(f"\nvtoken serve: {reason}", file=sys.stderr, flush=True)
