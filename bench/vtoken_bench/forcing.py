"""Names for forcing a request's first output tokens, shared with `vtoken_bench.vllm.forcing`."""

ARGUMENT = "bench_forced"  # in `vllm_xargs`: a list of token ids
PROCESSOR = "vtoken_bench.vllm.forcing:ForcedTokens"  # for `--logits-processors`
FREE = -1  # in the list: this token is sampled
