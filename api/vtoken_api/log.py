"""The logger of this package: a child of vLLM's, whose handlers, level and format it inherits."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.vtoken")
