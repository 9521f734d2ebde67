"""Measurements that need a GPU: `python -m vtoken_bench.checks NAME…` prints one JSON array.

They need torch, Triton and numpy, not vLLM. If vLLM or a FlashAttention 3 wheel is installed, its
attention is measured too. With `--device cpu` and `TRITON_INTERPRET=1` they run tiny sizes in
Triton's interpreter and report correctness only; every time is null.
"""
