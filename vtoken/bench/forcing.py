"""Names for forcing a request's first output tokens, shared with `vtoken.vllm.bench_forcing`."""

ARGUMENT = "bench_forced"  # in `vllm_xargs`: a list of token ids
PROCESSOR = "vtoken.vllm.bench_forcing:ForcedTokens"  # for `--logits-processors`
