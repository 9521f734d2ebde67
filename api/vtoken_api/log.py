"""The one logger of this package: a child of vLLM's, so that its lines look like the server's.

Knows the name only; handlers, levels and formats are vLLM's.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.vtoken")
