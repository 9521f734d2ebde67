"""Names Ray's GPUs as what vLLM's CPU platform places workers on. For tests with a Ray that says
that it has some; vLLM's own platform names nothing, and refuses Ray.
"""

from __future__ import annotations


def name_gpus() -> None:
    """Change the platform of this process; also Ray's hook of each process that it starts."""
    from vllm.platforms import current_platform

    type(current_platform).ray_device_key = "GPU"
