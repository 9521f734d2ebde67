"""vToken's worker on CUDA: copies on a separate stream, page size 1 for requests with holes.

Written against the source of vLLM 0.32 and covered by CPU tests up to the device calls; docs/gpu.md
says what has run on a GPU. It is refused unless `experimental_cuda` is set.
"""
