"""The configuration in force: the newest one, that of the newest step, and failed policies.

Independent of requests. A new revision takes effect in the next step, entirely.
"""

from __future__ import annotations

from vtoken.core.config.values import VTokenConfig
from vtoken.policies import Policy


class ActiveConfig:
    """`config`, numbered `revision`, takes effect in the next step; `of_step`: both, of the newest
    step, None before the first. `suspended`: policies that failed and evict nothing more.
    """

    def __init__(self, config: VTokenConfig) -> None:
        self.config = config
        self.revision = 1
        self.of_step: tuple[VTokenConfig, int] | None = None
        self.suspended: list[Policy] = []

    def install(self, config: VTokenConfig, revision: int | None = None) -> None:
        """Install a new revision, in force from the next step on; by default the next number."""
        self.config = config
        self.revision = self.revision + 1 if revision is None else revision

    def begin_step(self) -> None:
        """A step begins, which runs entirely with the current configuration."""
        self.of_step = self.config, self.revision
