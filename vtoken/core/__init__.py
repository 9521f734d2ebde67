"""The runtime between policies and block pool, without vLLM: tables, plans, steps."""
