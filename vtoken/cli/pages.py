"""Help texts: the commands in groups, and examples of each."""

from __future__ import annotations

GROUPS = {
    "Inspect": {
        "console": "the live console",
        "status": "the state of the KV cache, once",
        "engines": "every engine of the server, and whether they agree; exit code 1 if not",
        "watch": "a status line every interval, until interrupted",
        "requests": "every request that holds or waits for blocks",
        "request": "one request and its block table, or its tokens",
        "block": "one block: its owners, its slots, why it is pinned",
        "events": "events of the engine, oldest first",
        "audit": "the audit log: changes and dry runs with their callers",
        "doctor": "check the installation, the server and what it has done so far",
        "mcp": "serve the Model Context Protocol on standard input, for agents",
    },
    "Change": {
        "config": "read or change the configuration",
        "policy": "list eviction policies, or use one",
        "compact": "compact now, and wait for the result",
        "forget": "let tokens of a request die before all its others",
        "end": "end a streaming-input session for its client",
        "pause": "stop planning relocations; those in flight finish",
        "resume": "plan relocations again",
        "confirm": "keep the change that is on trial",
        "undo": "restore the configuration before the last change",
        "sync": "give all engines one configuration: that of --engine, else the most common",
    },
    "Record": {
        "record": "write the stream to a file, for `console --replay` and scripts",
    },
    "Run": {
        "serve": "vLLM's server with vToken: every vLLM flag, and --vtoken-…",
        "calibrate": "find the layers of a model that rank tokens best, for `serve`",
        "demo": "start a server, traffic and the console",
        "bench": "run benchmarks, in a checkout of the repository",
        "completion": "print a completion script for your shell",
    },
}

EPILOG = """\
environment:
  VTOKEN_URL     the server (default: http://127.0.0.1:8000)
  VTOKEN_TOKEN   bearer token, if the server needs one
  VTOKEN_CAFILE  certificate of an https:// server, or of its authority
  NO_COLOR       no colours

exit codes: 0 done, 1 refused or failed, 2 usage
more: vtoken COMMAND --help
"""

EXAMPLES = {
    "status": [
        "vtoken status",
        "vtoken status --json | jq .fragmentation.f",
        "vtoken status --all --fleet production.fleet",
    ],
    "engines": ["vtoken engines", "vtoken engines --json | jq -r .sentence"],
    "watch": [
        "vtoken watch --interval 500ms",
        "vtoken watch --json | jq 'select(.status).status.blocks.free'",
    ],
    "requests": ["vtoken requests", "vtoken requests --json | jq -r '.[].id'"],
    "request": ["vtoken request cmpl-7", "vtoken request cmpl-7 --tokens"],
    "block": ["vtoken block 17"],
    "events": ["vtoken events -n 100 --kind config --kind violation", "vtoken events --follow"],
    "audit": ["vtoken audit -n 50"],
    "mcp": ["vtoken mcp --token-file control.token"],
    "doctor": ["vtoken doctor", "vtoken doctor --url http://gpu7:8000"],
    "compact": ["vtoken compact --dry-run", "vtoken compact --request cmpl-7 --batch-size 64"],
    "forget": [
        "vtoken forget cmpl-7 120 900",
        "vtoken forget cmpl-7 120 900 1024 1400",
        "vtoken forget cmpl-7 --text 'the output of a tool'",
    ],
    "end": ["vtoken end stream-7"],
    "confirm": ["vtoken config set theta_f=0.1 --confirm-within 5m", "vtoken confirm"],
    "undo": ["vtoken undo --dry-run", "vtoken undo --if-revision 7"],
    "sync": ["vtoken sync --dry-run", "vtoken sync --engine 0"],
    "record": [
        "vtoken record incident.jsonl.gz --last 10m",
        "vtoken record incident.jsonl.gz --duration 5m",
    ],
    "console": [
        "vtoken console",
        "vtoken console --url http://gpu7:8000 --read-only",
        "vtoken console http://gpu7:8000 http://gpu8:8000",
        "vtoken console --fleet production.fleet",
        "vtoken console --replay incident.jsonl.gz --at 14:02:11",
        "vtoken console --export pool.svg",
    ],
    "completion": [
        "bash:  vtoken completion bash > ~/.local/share/bash-completion/completions/vtoken",
        "zsh:   vtoken completion zsh > ~/.zfunc/_vtoken      # with ~/.zfunc in fpath",
        "fish:  vtoken completion fish > ~/.config/fish/completions/vtoken.fish",
    ],
    "config get": ["vtoken config get", "vtoken config get policy.name"],
    "config set": [
        "vtoken config set theta_f=0.1 batch_size=64",
        "vtoken config set budget_ratio=0.33 --dry-run",
        "vtoken config set theta_f=0.1 --guard-p95 40ms --guard 'preemptions>0'",
        "vtoken config set policy.name=h2o probe.every_steps=4",
        "vtoken config set theta_f=0.1 --all --fleet production.fleet",
    ],
    "policy list": ["vtoken policy list"],
    "policy use": ["vtoken policy use streaming_llm sinks=4", "vtoken policy use h2o --dry-run"],
}
