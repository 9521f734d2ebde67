"""vToken: token-level virtualization for reclaimable KV caches."""

__version__ = "0.3.0"
