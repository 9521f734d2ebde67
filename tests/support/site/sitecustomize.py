"""Python imports it when it starts; tests/conftest.py has this folder in PYTHONPATH.

A process that imports torch and vLLM makes most of a million objects that last. Passes of the
garbage collector over them are a sixth of the time of the import, and at the end two seconds more.
"""

import atexit
import gc
import os
import sys

gc.set_threshold(300_000)


@atexit.register
def end_without_collecting() -> None:
    """The last of all functions at the exit."""
    if "torch" in sys.modules:
        gc.freeze()
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Triton would list what is not collected
