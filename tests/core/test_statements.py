"""No two statements of one engine contradict each other, in any state that requests bring about."""

from __future__ import annotations

import random
import re
from collections import Counter
from copy import deepcopy
from typing import Any

from tests.support.account import Account, Moment, Said, contradictions
from tests.support.core.live import make_quiet
from vtoken.core.config.request_rules import request_rules
from vtoken.sentences.advice import put_into_words
from vtoken.wire import PatchResult

# As `vtoken serve --vtoken-policy auto` has it, with a floor that short prompts are above.
AUTO = {
    "policy": {"name": "keydiff", "params": {"anchor": "seen"}},
    "evict_when": "pressure",
    "budget_ratio": 0.5,
    "budget_floor_tokens": 16,
    "interval_tokens": 8,
    "park_bytes": 1 << 17,
    "restore_after_ms": 0,
    "low_watermark_blocks": 4,
}
OWN: list[dict[str, Any] | None] = [
    None,
    None,
    None,
    {"vtoken_policy": "none"},
    {"vtoken_evict_when": "always", "vtoken_budget_tokens": 24},
]


class Server:
    """One engine under random requests and changes, and the account of what happens."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.live = make_quiet(65, block_size=4)
        self.live.core.reserves = True
        self.live.configure(**AUTO)
        self.account = Account(self.live.runtime)
        self.lengths: dict[str, int] = {}
        self.outputs: dict[str, int] = {}

    def act(self) -> None:
        live, rng = self.live, self.rng
        match rng.choices(["add", "steps", "remove", "preempt", "patch"], [6, 12, 1, 1, 2])[0]:
            case "add" if len(live.core.waiting) < 4:
                name = f"r{len(self.lengths)}"
                self.lengths[name] = length = rng.randint(8, 60)
                rules = request_rules(rng.choice(OWN))
                most = rng.choice([4, 40, 120])
                live.admit(name, length, max_tokens=most, seed=len(self.lengths), rules=rules)
            case "steps":
                live.steps(rng.choice([1, 1, 2, 7]))
            case "remove" if live.core.running:
                live.finish(rng.choice(live.core.running).id)
            case "preempt" if live.core.running:
                live.core.preempt_newest()
            case "patch":
                patch = rng.choice(
                    [
                        {"reclamation": rng.choice(["auto"] * 4 + ["paused", "off"])},
                        {"budget_ratio": rng.choice([0.3, 0.5, 0.9])},
                        {"evict_after_wait_ms": rng.choice([0, 0, 60_000])},
                        {"headroom_blocks": rng.choice([0, 2, 8])},
                        {"park_bytes": rng.choice([0, 1 << 14, 1 << 17, 1 << 17])},
                        {"evict_when": rng.choice(["pressure", "pressure", "always"])},
                    ]
                )
                live.call("patch_config", patch=patch, actor="root")

    def said(self) -> Said:
        live = self.live
        live.facts.running, live.facts.waiting = len(live.core.running), len(live.core.waiting)
        dry_run: PatchResult = live.call(
            "patch_config", patch={"budget_tokens": 1024}, validate_only=True
        )
        names = [*self.account.ended][-5:]
        status = live.reporter.status()
        put_into_words(status)
        return Said(
            status=status,
            rows=live.reporter.rows(),
            config=live.call("config"),
            blocks=live.call("blocks"),
            events=live.runtime.events.page(0, 1 << 20).events,
            details={name: live.reporter.request(name) for name in names},
            dry_run=dry_run if live.runtime.config.budget_ratio else None,
        )

    def moment(self) -> Moment:
        core = self.live.core
        for request in [*core.running, *core.waiting]:
            self.outputs[request.id] = request.num_known - request.num_prompt_tokens
        return Moment(
            total_blocks=core.store.num_blocks - 1,
            free_blocks=core.store.num_free_blocks(),
            running=len(core.running),
            waiting=len(core.waiting),
            tokens={r.id: r.num_computed for r in core.running},
            output=None,
        )


def test_no_two_statements_contradict_each_other() -> None:
    seen = Counter[str]()
    for seed in range(6):
        server = Server(seed)
        try:
            for _ in range(150):
                server.act()
                said = server.said()
                assert contradictions(said, server.account, server.moment()) == [], seed
                seen[re.split("[ :]", said.status.fragmentation.sentence)[0]] += 1
        finally:
            server.live.close()
        seen["given"] += server.account.given
    assert seen["given"] > 0
    heads = {"OK", "IDLE", "FULL", "SHORT", "GIVING", "FRAGMENTED", "PAUSED", "Memory"}
    assert heads <= seen.keys()


def set_sentence(said: Said, old: str, new: str) -> None:
    found = said.status.fragmentation
    assert old in found.sentence
    found.sentence = found.sentence.replace(old, new)


def test_control_every_wrong_statement_is_noticed() -> None:
    server = Server(0)
    try:
        while True:
            server.act()
            said = server.said()
            memory = said.status.pressure
            if memory is not None and memory.waits_for == "end" and memory.givers:
                break
        assert contradictions(said, server.account, server.moment()) == []
        for wrong in (
            lambda said: setattr(said.status.pressure, "short_blocks", 0),
            lambda said: setattr(said.status.pressure, "givable_tokens", 10_000),
            lambda said: setattr(said.status.pressure, "waits_for", "giving"),
            lambda said: setattr(said.status.fragmentation, "cause", "ok"),
            lambda said: setattr(said.status.blocks, "free", said.status.blocks.free + 1),
            lambda said: setattr(said.status.tokens, "evicted", said.status.tokens.evicted + 1),
            lambda said: setattr(said.rows[0], "dead", said.rows[0].dead + 1),
            lambda said: setattr(said.dry_run.what_if, "givable_blocks", 0),
            lambda said: set_sentence(said, " can be given", "1 can be given"),
            lambda said: set_sentence(said, "SHORT", "OK"),
            lambda said: said.status.advice.clear(),
        ):
            copy = deepcopy(said)
            wrong(copy)
            assert contradictions(copy, server.account, server.moment()) != []
    finally:
        server.live.close()
