"""What `vtoken --help` says: the commands by what they are for, and examples of each."""

from __future__ import annotations

GROUPS = {
    "See": {
        "console": "the live console",
        "status": "everything that matters now, once",
        "watch": "a status line every interval, until interrupted",
        "requests": "every request that holds or waits for blocks",
        "request": "one request and its block table, or its tokens",
        "block": "one block: owners, why it is pinned, slot by slot",
        "events": "what happened, oldest first",
        "audit": "who changed or tried out what",
        "doctor": "is it installed right, is the server there, has it done anything?",
    },
    "Act": {
        "config": "read or change the configuration",
        "policy": "list eviction policies, or use one",
        "compact": "compact now, and wait for the result",
        "pause": "stop planning relocations; those in flight finish",
        "resume": "plan relocations again",
        "confirm": "keep the change that is on trial",
        "undo": "restore the configuration before the last change",
    },
    "Share": {
        "record": "write the stream to a file, for `console --replay` and scripts",
    },
    "Run": {
        "serve": "vLLM's server with vToken: every vLLM flag, and --vtoken-…",
        "calibrate": "find the layers of a model that rank tokens best, for `serve`",
        "demo": "a server, traffic and the console, ready to look at",
        "bench": "measure: baselines, variants, micro-benchmarks",
        "completion": "completion of commands for your shell",
    },
}

EPILOG = """\
environment:
  VTOKEN_URL    the server (default: http://127.0.0.1:8000)
  VTOKEN_TOKEN  bearer token, when the server wants one
  NO_COLOR      no colours

exit codes: 0 done, 1 refused or failed, 2 usage
more: vtoken COMMAND --help
"""

EXAMPLES = {
    "status": ["vtoken status", "vtoken status --json | jq .fragmentation.f"],
    "watch": [
        "vtoken watch --interval 500ms",
        "vtoken watch --json | jq 'select(.status).status.blocks.free'",
    ],
    "requests": ["vtoken requests", "vtoken requests --json | jq -r '.[].id'"],
    "request": ["vtoken request cmpl-7", "vtoken request cmpl-7 --tokens"],
    "block": ["vtoken block 17"],
    "events": ["vtoken events -n 100 --kind config --kind violation", "vtoken events --follow"],
    "audit": ["vtoken audit -n 50"],
    "doctor": ["vtoken doctor", "vtoken doctor --url http://gpu7:8000"],
    "compact": ["vtoken compact --dry-run", "vtoken compact --request cmpl-7 --batch-size 64"],
    "confirm": ["vtoken config set theta_f=0.1 --confirm-within 5m", "vtoken confirm"],
    "undo": ["vtoken undo --dry-run", "vtoken undo"],
    "record": [
        "vtoken record incident.jsonl.gz --last 10m",
        "vtoken record incident.jsonl.gz --duration 5m",
        "vtoken record incident.jsonl.gz --duration 5m --with-text",
    ],
    "console": [
        "vtoken console",
        "vtoken console --url http://gpu7:8000 --read-only",
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
        "vtoken config set budget_tokens=1024 --dry-run",
        "vtoken config set theta_f=0.1 --confirm-within 5m --guard-p95 40ms --guard-preemptions 0",
        "vtoken config set policy.name=h2o probe.every_steps=4",
    ],
    "policy list": ["vtoken policy list"],
    "policy use": ["vtoken policy use streaming_llm sinks=4", "vtoken policy use h2o --dry-run"],
}
