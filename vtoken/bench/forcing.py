"""How a request names the tokens that its output begins with; the engine's side of it is
`vtoken.vllm.bench_forcing`.
"""

ARGUMENT = "bench_forced"  # in `vllm_xargs`: a list of token ids
PROCESSOR = "vtoken.vllm.bench_forcing:ForcedTokens"  # for `--logits-processors`
