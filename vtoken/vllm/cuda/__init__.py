"""vToken's worker half on CUDA: copies on a stream of their own, page size 1 for holes.

Written against the source of vLLM 0.32 and covered by CPU tests up to the device calls; no part of
it has run on a GPU (docs/gpu.md). It is refused unless `experimental_cuda` is set.
"""
