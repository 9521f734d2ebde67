"""Objects that last until the end of a test process, out of the garbage collector's sight.

With torch and vLLM they are most of a million, and a collection that passes over them takes half a
second; vLLM collects nine times an engine, and some tests collect themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


def freeze_heap() -> None:
    """Pass over everything that is alive now in later collections."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep vLLM from freezing an engine, and from thawing what `freeze_heap` has frozen."""
    with patch.object(gc, "freeze"), patch.object(gc, "unfreeze"):
        yield
