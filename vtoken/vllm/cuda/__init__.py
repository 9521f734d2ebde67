"""vToken's worker on CUDA: copies on a separate stream, page size 1 for requests with holes.

Written against the source of vLLM 0.32 and covered by CPU tests up to the device calls; no part of
it has run on a GPU (docs/gpu.md). It is refused unless `experimental_cuda` is set.
"""
