"""Protected tokens: found in chat prompts, named by clients, never evicted by any policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.core.harness import CoreEngine
from tests.support.core.live import LiveEngine, make_quiet
from vtoken.base.arrays import Ragged
from vtoken.base.errors import RefusedError
from vtoken.core.config.prompt_parts import (
    NO_PARTS,
    ChatTemplate,
    PromptParts,
    learn_template,
)
from vtoken.core.config.protection import PROTECT, protection
from vtoken.core.config.rendering import Message, Render
from vtoken.core.config.request_rules import Prompt, RequestRules, request_rules
from vtoken.core.config.spans import read_spans
from vtoken.core.config.token_sequences import Spans
from vtoken.policies import Policy, View, make_policy
from vtoken.policies.base import Batch
from vtoken.wire import Protect

ALL = Protect(last_user=True)

# ---------------------------------------------------------------- the parts of a chat

SPECIAL = {"<s>": 1, "</s>": 2, "<|system|>": 3, "<|user|>": 4, "<|bot|>": 5, "[q]": 6, "[a]": 7}


def encode(text: str) -> list[int]:
    """Special tokens and single characters as tokens; two newlines are one token, as in BPE."""
    ids = []
    while text:
        special = next((name for name in SPECIAL if text.startswith(name)), None)
        piece = special or ("\n\n" if text.startswith("\n\n") else text[0])
        ids.append(SPECIAL.get(piece, 1000 + sum(map(ord, piece)) + len(piece)))
        text = text[len(piece) :]
    return ids


def encoded(render: Callable[[list[Message], bool], str]) -> Render:
    """A template that has no place for tools, as token ids."""
    return lambda messages, is_prompt, _: encode(render(messages, is_prompt))


def turns(messages: list[Message], is_prompt: bool) -> str:
    """Like most templates: a role header, the content, an end."""
    names = {"system": "<|system|>\n", "user": "<|user|>\n", "assistant": "<|bot|>\n"}
    text = "<s>" + "".join(f"{names[m['role']]}{m['content']}</s>\n" for m in messages)
    return text + ("<|bot|>\n" if is_prompt else "")


def with_default_system(messages: list[Message], is_prompt: bool) -> str:
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "I help."}, *messages]
    return turns(messages, is_prompt)


def with_a_date(messages: list[Message], is_prompt: bool) -> str:
    return turns(messages, is_prompt).replace("<|system|>\n", f"<|system|>\nToday: {TODAY[0]}\n")


def without_system(messages: list[Message], is_prompt: bool) -> str:
    if messages[0]["role"] == "system":
        raise ValueError("System role not supported")
    return turns(messages, is_prompt)


def brackets(messages: list[Message], is_prompt: bool) -> str:
    """The system prompt is part of the first user turn; the end of a turn begins the next."""
    del is_prompt
    if messages[0]["role"] == "system":
        first = f"{messages[0]['content']}\n{messages[1]['content']}"
        messages = [{"role": "user", "content": first}, *messages[2:]]
    return "".join(
        f"<s>[q] {m['content']} [a]" if m["role"] == "user" else f" {m['content']} </s>"
        for m in messages
    )


def thinking(messages: list[Message], is_prompt: bool) -> str:
    """The last past turn has an empty thought, the coming answer has none."""
    text = turns(messages, is_prompt)
    if messages[-1]["role"] == "assistant" and not is_prompt:
        head, _, last = text.rpartition("<|bot|>\n")
        text = f"{head}<|bot|>\n<think></think>{last}"
    return text


def channels(messages: list[Message], is_prompt: bool) -> str:
    """Answers have a channel behind their role, and the last one ends with another token."""
    names = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|bot|>[q]"}
    text = "".join(f"{names[m['role']]}{m['content']}</s>" for m in messages)
    if messages[-1]["role"] == "assistant" and not is_prompt:
        return text.removesuffix("</s>") + "[a]"
    return text + ("<|bot|>" if is_prompt else "")


def roleless(messages: list[Message], is_prompt: bool) -> str:
    del is_prompt
    return "".join(f"{m['content']}\n" for m in messages)


TODAY = ["Monday"]
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, you."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "\nWhat is it?"},
]


def found(render: Any, messages: list[Message]) -> dict[str, list[str]]:
    """Part -> its texts, in the prompt that `render` makes of `messages`."""
    template = learn_template(encoded(render))
    assert template is not None
    TODAY[0] = "Friday"
    text = render(messages, True)
    TODAY[0] = "Monday"
    ids = encode(text)
    names = {encode(text[i])[0]: text[i] for i in range(len(text))}
    names |= {number: name for name, number in SPECIAL.items()} | {encode("\n\n")[0]: "\n\n"}
    parts = template.find(np.array(ids))
    return {
        part: ["".join(names[i] for i in ids[start:end]) for start, end in spans]
        for part, spans in parts._asdict().items()
    }


@pytest.mark.parametrize(
    ("render", "messages", "template", "system", "last_user"),
    [
        (
            turns, CHAT,
            ["<s><|system|>", "<|bot|>"], ["\nBe brief.</s>\n"],
            ["<|user|>\n\nWhat is it?</s>\n"],
        ),
        (
            turns, CHAT[1:],
            ["<s><|user|>", "<|bot|>"], [], ["<|user|>\n\nWhat is it?</s>\n"],
        ),
        (
            with_default_system, CHAT[1:2],
            ["<s><|system|>", "<|bot|>"], ["\nI help.</s>\n"], ["<|user|>\nHello, you.</s>\n"],
        ),
        (
            with_a_date, CHAT[:2],
            ["<s><|system|>\nToday: ", "<|bot|>"], ["Friday\nBe brief.</s>\n"],
            ["<|user|>\nHello, you.</s>\n"],
        ),
        (
            without_system, CHAT[1:],
            ["<s><|user|>", "<|bot|>"], [], ["<|user|>\n\nWhat is it?</s>\n"],
        ),
        (
            brackets, CHAT,
            ["<s>[q] ", " [a]"], [], ["<s>[q] \nWhat is it?"],
        ),
        (
            thinking, CHAT,
            ["<s><|system|>", "<|bot|>\n"], ["\nBe brief.</s>\n"],
            ["<|user|>\n\nWhat is it?</s>\n"],
        ),
        (
            channels, CHAT,
            ["<|system|>", "<|bot|>"], ["Be brief.</s>"], ["<|user|>\nWhat is it?</s>"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_the_parts_of_a_chat_are_found_for_every_template(
    render: Any,
    messages: list[Message],
    template: list[str],
    system: list[str],
    last_user: list[str],
) -> None:
    assert found(render, messages) == {
        "template": template,
        "system": system,
        "tools": [],
        "last_user": last_user,
    }


def test_the_beginning_of_an_answer_is_not_a_part() -> None:
    """Nor is it the user's: vLLM continues the final message of a chat on request."""
    begun = encode(turns(CHAT, True) + "It is")
    template = learn_template(encoded(turns))
    assert template is not None
    parts = template.find(np.array(begun))
    assert parts.template[-1][1] == len(begun) - len("\nIt is")
    assert parts.last_user[0][1] == parts.template[-1][0]


def test_a_template_without_roles_is_not_learned() -> None:
    assert learn_template(encoded(roleless)) is None


@pytest.mark.parametrize("text", ["", "Once upon a time", "<|bot|>\nHi", "<s>"])
def test_a_prompt_that_is_not_a_chat_has_no_parts(text: str) -> None:
    template = learn_template(encoded(turns))
    assert template is not None
    assert template.find(np.array(encode(text), dtype=np.int64)) == NO_PARTS


def test_a_chat_of_another_template_has_no_head() -> None:
    template = ChatTemplate(head=(9, 9), opening=(9, 4), user=(4,), assistant=(5,))
    assert template.find(np.array([7, 7, 4, 7, 5])) == PromptParts(((4, 5),), last_user=((2, 4),))


# ---------------------------------------------------------------- what is protected

PARTS = PromptParts(((0, 3), (57, 60)), ((3, 20),), (), ((40, 57),))


@pytest.mark.parametrize(
    ("named", "wanted", "budget", "spans", "cut"),
    [
        ((), Protect(), 100, [(0, 20), (57, 60)], ()),
        ((), ALL, 200, [(0, 20), (40, 60)], ()),
        ((), Protect(template=False, system=False), 100, [], ()),
        (((5, 7), (30, 31)), Protect(system=False), 100, [(0, 3), (5, 7), (30, 31), (57, 60)], ()),
        # A quarter, the template first, then the beginning of the system prompt.
        ((), ALL, 58, [(0, 11), (57, 60)], ("system", "last_user")),
        ((), Protect(system=False, last_user=True), 58, [(0, 3), (49, 60)], ("last_user",)),
        ((), ALL, 10, [(0, 2)], ("template", "system", "last_user")),
        # The client's spans come first and complete; a part that covers them too still counts.
        (((0, 12),), Protect(), 28, [(0, 12), (57, 60)], ("system",)),
        (((10, 40),), ALL, 32, [(10, 40)], ("template", "system", "last_user")),
    ],
)
def test_parts_take_a_quarter_of_what_is_left(
    named: Spans, wanted: Protect, budget: int, spans: Spans, cut: tuple[str, ...]
) -> None:
    made = protection(named, PARTS, wanted, budget, 2)
    assert made.spans() == spans
    assert made.cut == cut
    assert made.num_tokens == sum(end - start for start, end in spans)
    ids = np.arange(70)
    covered = {t for start, end in spans for t in range(start, end)}
    assert set(ids[made.covers(ids)].tolist()) == covered


@pytest.mark.parametrize(
    ("value", "spans"),
    [
        ("[[3, 5], [0, 2]]", ((0, 2), (3, 5))),
        ("[0, 2, 2, 5]", ((0, 2), (2, 5))),
        ([7, 9], ((7, 9),)),
        ("[]", ()),
    ],
)
def test_spans_come_as_pairs_or_flat(value: Any, spans: Spans) -> None:
    assert read_spans(value, PROTECT) == spans


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        ("[[3, 5]", "as text"), ("{}", "as text"), (5, "a list"), ([1, 2, 3], "as text"),
        ("[[1, 2, 3]]", "as text"), ("[[1, 2], 3]", "as text"), ([1, 2.0], "as text"),
        ([0, True], "as text"), ('[["0", "1"]]', "as text"), ("[" * 999, "as text"),
        ([2, 2], "0 <= start < end"), ([3, 1], "0 <= start < end"), ([-1, 1], "0 <= start < end"),
        ([0, 4, 3, 5], "start at least 4"),
    ],
)  # fmt: skip
def test_bad_spans_are_refused_with_value_and_bound(value: Any, bound: str) -> None:
    with pytest.raises(RefusedError) as caught:
        request_rules({PROTECT: value})
    assert caught.value.field == PROTECT
    assert caught.value.value is not None
    assert bound in str(caught.value.bound)


@pytest.mark.parametrize(
    ("arguments", "field", "numbers"),
    [
        ({PROTECT: [0, 64], "vtoken_budget_tokens": 64}, PROTECT, ("64", "63")),
        (
            {PROTECT: [0, 60], "vtoken_budget_tokens": 64, "vtoken_policy": "streaming_llm"},
            PROTECT,
            ("60", "59"),
        ),
        (
            {"vtoken_budget_tokens": 64, "vtoken_budget_ratio": 0.5},
            "vtoken_budget_ratio",
            ("64", "0.5"),
        ),
        ({"vtoken_budget_ratio": 1.5}, "vtoken_budget_ratio", ("1.5", "0..1")),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_with_both_numbers(
    arguments: dict[str, Any], field: str, numbers: tuple[str, str]
) -> None:
    with pytest.raises(RefusedError) as caught:
        request_rules(arguments)
    assert caught.value.field == field
    message = f"{caught.value.detail} {caught.value.bound}"
    assert all(number in message for number in numbers)


def test_a_span_outside_the_prompt_is_refused_when_the_prompt_is_known() -> None:
    rules = request_rules({PROTECT: [0, 2, 90, 101]})
    assert rules is not None
    rules.prompt = Prompt(101)
    rules.check_prompt()
    rules.prompt = Prompt(100)
    with pytest.raises(RefusedError, match=r"\[90, 101\] leaves the prompt of 100 tokens"):
        rules.check_prompt()


# ---------------------------------------------------------------- budgets


def make(arguments: dict[str, Any] | None = None, **config: Any) -> LiveEngine:
    engine = make_quiet(num_blocks=128)
    fixed = {"policy": {"name": "streaming_llm"}, "interval_tokens": 0, "evict_when": "always"}
    engine.configure(**fixed | {"budget_ratio": 0.0} | config)
    rules = request_rules(arguments)
    engine.runtime.announce("a", rules, prompt=Prompt(100), num_prompt_tokens=100)
    engine.admit("a", 100)
    return engine


@pytest.mark.parametrize(
    ("config", "arguments", "budget"),
    [
        ({"budget_tokens": 60}, None, 60),
        ({"budget_tokens": 60, "budget_ratio": 0.4, "budget_floor_tokens": 8}, None, 40),
        ({"budget_ratio": 0.4, "budget_floor_tokens": 50}, None, 50),
        ({"budget_tokens": 60}, {"vtoken_budget_ratio": 0.7}, 256),
        ({"budget_floor_tokens": 8}, {"vtoken_budget_ratio": 0.7}, 70),
        ({"budget_tokens": 60, "budget_ratio": 0.4}, {"vtoken_budget_ratio": 0}, 60),
        ({"budget_ratio": 0.4}, {"vtoken_budget_tokens": 33}, 33),
        ({"budget_tokens": 20}, {PROTECT: [0, 30]}, 35),  # streaming_llm needs five more
    ],
)
def test_a_budget_is_in_tokens_or_a_share_of_the_prompt(
    config: dict[str, Any], arguments: dict[str, Any] | None, budget: int
) -> None:
    with make(arguments, **config) as engine:
        engine.steps(3)
        detail = engine.reporter.request("a")
        assert detail.budget_tokens == budget
        assert detail.live == min(budget + 1, 102)


TOOLS = ((10, 50),)


@pytest.mark.parametrize(
    ("config", "arguments", "budget"),
    [
        ({"budget_ratio": 0.5, "budget_floor_tokens": 8}, None, 40 + 30),
        ({"budget_ratio": 0.5, "budget_floor_tokens": 40}, None, 40 + 40),
        ({"budget_tokens": 20}, None, 40 + 20),
        ({"budget_tokens": 60}, {"vtoken_budget_tokens": 9}, 40 + 9),
        # A span of the client that covers some of them counts once.
        ({"budget_tokens": 20}, {PROTECT: [0, 20]}, 30 + 25),
        ({"budget_tokens": 20, "protect": {"tools": False}}, None, 20),
        ({"budget_tokens": 20, "policy": {"name": "none"}}, None, 20),
    ],
)
def test_tools_are_protected_whole_and_a_budget_is_of_the_rest(
    config: dict[str, Any], arguments: dict[str, Any] | None, budget: int
) -> None:
    parts = PromptParts(((0, 3),), ((3, 10),), TOOLS, ((50, 90),))
    prompt = Prompt(100, lambda: parts)
    rules = request_rules(arguments) or RequestRules()
    rules.prompt = prompt
    with make_quiet(num_blocks=128) as engine:
        fixed = {"policy": {"name": "streaming_llm"}, "budget_ratio": 0.0}
        engine.configure(**fixed | config)
        own, made = rules.under(engine.runtime.config), rules.protection(engine.runtime.config)
        assert own.budget_tokens == budget
        protects = own.protect.tools and own.policy.name != "none"
        assert made.covers(np.arange(10, 50)).all() == protects
        assert "tools" not in made.cut
        # The other parts have a quarter of what the rest leaves.
        assert made.num_tokens - 40 * protects <= 20 if PROTECT in (arguments or {}) else 10


def test_a_floor_below_what_the_policy_needs_is_refused_while_a_share_is_set() -> None:
    with make(budget_floor_tokens=2) as engine:
        for ratio in (0.5, 0.0):
            reply = engine.ask("patch_config", patch={"budget_ratio": ratio})
            refused = reply.problem is not None and reply.problem.field == "budget_floor_tokens"
            assert refused == (ratio > 0)


def test_admission_and_what_if_count_the_share() -> None:
    with make(budget_tokens=4096) as engine:
        engine.steps(2)
        patch = {"budget_ratio": 0.2, "budget_floor_tokens": 5}
        result = engine.call("patch_config", patch=patch, validate_only=True)
        assert result.what_if.evicted_tokens == 101 - 20
        admission, engine.runtime.shape.max_chunk_tokens = engine.runtime.admission, 16
        engine.configure(evict_during="both", **patch)
        engine.runtime.announce("b", None, num_prompt_tokens=1000, max_tokens=1100)
        assert admission.peak_tokens("b", 1000) == 200 + 16


# ---------------------------------------------------------------- eviction

EVICTING = ["random", "streaming_llm", "h2o", "tova", "keydiff", "snapkv", "peak_attention"]
NAMED = ((5, 9), (20, 21))


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("evict_during", ["decode", "both"])
def test_no_policy_evicts_what_is_protected(policy: str, evict_during: str) -> None:
    """In batches and request by request, also while the prompt is computed."""
    params = {
        "snapkv": {"window": 4},
        "random": {"sinks": 1, "recent": 2},
        "keydiff": {"recent": 1},
        "peak_attention": {"sinks": 1, "recent": 2},
    }.get(policy, {})
    engine = CoreEngine(
        num_blocks=64,
        prefill_chunk_tokens=8,
        config={
            "policy": {"name": policy, "params": params},
            "budget_tokens": 24,
            "evict_when": "always",
            "interval_tokens": 0,
            "evict_during": evict_during,
            "theta_f": 0.0,
            "low_watermark_blocks": 64,
        },
    )
    parts = PromptParts(((0, 2),), last_user=((26, 30),))
    engine.add("a", 30, rules=RequestRules(protect=NAMED), prompt=Prompt(30, lambda: parts))
    engine.add("b", 30)
    engine.run(40)
    tables = engine.runtime.tables
    assert engine.runtime.requests.protection("a").spans() == [(0, 2), (5, 9), (20, 21)]
    assert {0, 1, 5, 6, 7, 8, 20} <= set(tables["a"].live_ids().tolist())
    assert [tables[name].num_live for name in "ab"] == [25, 25]
    assert engine.runtime.requests.protection("b").spans() == []
    assert engine.runtime.counters.invariants.violations == 0


class Stubborn(Policy):
    """Evicts the oldest tokens, ignoring the view."""

    name, summary = "stubborn", "-"
    together = False

    def select_victims(self, view: View) -> Any:
        return np.arange(view.num_victims)

    def select_many(self, batch: Batch) -> Ragged | None:
        if not self.together:
            return None
        num_victims = 19 - 8
        return Ragged.joined([np.arange(num_victims)] * len(batch.budget))


@pytest.mark.parametrize("together", [False, True])
def test_a_protected_victim_is_refused_as_a_dead_one_is(together: bool) -> None:
    policy = Stubborn()
    policy.together = together
    fixed = {"budget_tokens": 8, "interval_tokens": 0, "evict_when": "always"}
    engine = CoreEngine(config={"policy": {"name": "none"}} | fixed)
    engine.runtime.active.config = replace(engine.runtime.config, policy=policy)
    engine.add("a", 19, rules=RequestRules(protect=((3, 5),)))
    engine.step()
    engine.step()
    assert engine.runtime.ranking.is_suspended(policy)
    assert engine.runtime.tables["a"].num_dead == 0
    newest = engine.runtime.events.page(0, 100, "violation").events[-1]
    assert "protected" in newest.summary


def test_protection_that_is_enabled_later_spares_live_tokens() -> None:
    with make(budget_tokens=40, protect={"system": False}) as engine:
        parts = PromptParts(system=((0, 70),))
        engine.runtime.announce("b", None, prompt=Prompt(100, lambda: parts))
        engine.admit("b", 100)
        engine.steps(3)
        table = engine.runtime.tables["b"]
        kept = [*range(4), *range(65, 102)]
        assert table.live_ids().tolist() == kept
        engine.configure(protect={"system": True}, budget_tokens=20)
        engine.steps(1)
        spans = engine.runtime.requests.protection("b").spans()
        assert spans == [(0, 3)]  # a quarter of 20 less the least, 5
        assert table.live_ids().tolist() == [*range(4), *range(86, 103)]
        assert engine.reporter.request("b").protection_cut == ["system"]


def test_documents_mark_protected_tokens() -> None:
    with make({PROTECT: "[[10, 13], [50, 51]]"}, budget_tokens=40) as engine:
        for _ in range(2):  # it waits, then it runs
            detail = engine.reporter.request("a")
            assert detail.protected == [(10, 13), (50, 51)]
            assert detail.protection_cut == []
            engine.steps(2)
        rows = engine.reporter.tokens("a", 8, 6).rows
        assert [row.token_id for row in rows if row.protected] == [10, 11, 12]


def test_a_shadow_does_not_see_protected_tokens() -> None:
    with make({PROTECT: [0, 30]}, budget_tokens=40, shadow={"name": "sliding_window"}) as engine:
        engine.steps(3)
        shadow = engine.runtime.shadow.document()
        assert shadow is not None
        assert (shadow.compared, shadow.waiting, shadow.error) == (2, 0, None)
        assert shadow.agreed == shadow.victims  # the sinks of the other are protected


# ---------------------------------------------------------------- prompts given as embeddings


def test_a_policy_that_needs_token_ids_evicts_nothing_of_an_embedded_prompt() -> None:
    """An event reports it; requests with token ids are not affected."""
    with make(policy={"name": "fastgen"}, budget_tokens=40) as engine:
        engine.runtime.announce("e", None, prompt=Prompt(100, is_embedded=True))
        engine.admit("e", 100)
        engine.steps(4)
        live = {table.request_id: table.num_live for table in engine.runtime.tables}
        assert live == {"a": 41, "e": 103}
        summaries = [e.summary for e in engine.runtime.events.page(0, 100, "eviction").events]
        assert summaries[0].startswith("fastgen evicts nothing of e: its prompt came as embeddings")
        assert engine.reporter.request("e").policy == "none"
        engine.configure(policy={"name": "streaming_llm"})
        engine.steps(2)
        assert engine.runtime.tables["e"].num_live == 41
        assert engine.runtime.counters.invariants.violations == 0


def test_an_embedded_prompt_with_such_a_policy_is_refused() -> None:
    rules = RequestRules(policy=make_policy("fastgen", {}), prompt=Prompt(9, is_embedded=True))
    with pytest.raises(RefusedError, match="embeddings") as caught:
        rules.check_prompt()
    assert (caught.value.field, caught.value.value) == ("vtoken_policy", "fastgen")
    RequestRules(policy=make_policy("fastgen", {}), prompt=Prompt(9)).check_prompt()
