"""Limits of the score probe's memory, on any device. Imports nothing, as the kernels need it."""

MAX_LOGITS = 1 << 26  # logits of all heads in memory at once, 4 bytes each
