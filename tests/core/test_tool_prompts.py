"""The parts of prompts with tools, for templates written after published ones."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jinja2
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from vtoken.core.config.prompt_parts import learn_template
from vtoken.core.config.rendering import Message, Tool

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = ("qwen", "llama", "mistral", "hermes")
# Splits white space and punctuation as the tokenizers of Qwen and Llama 3 do.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
]  # fmt: skip


def schema(number: int) -> Tool:
    """The schema of a tool, each of its own length; some begin or end with another key."""
    properties = {f"p{i}": {"type": "string", "description": "What."} for i in range(number % 4)}
    function = {
        "name": f"get_item_{number}",
        "description": "Gets it. " * number,
        "parameters": {"type": "object", "properties": properties, "required": [*properties]},
    }
    if number % 3 == 2:
        function["strict"] = False
    return {"type": "function", "function": function}


SCHEMAS = [schema(number) for number in range(1, 11)]
SYSTEM: Message = {"role": "system", "content": "Be brief, and never say why."}
FIRST: Message = {"role": "user", "content": "What is item 5, in {braces}?"}
SECOND: Message = {"role": "user", "content": "\nAnd item 7?"}
REPLY: Message = {"role": "assistant", "content": "Something else."}


def round_of_calls(number: int, results: int = 1) -> list[Message]:
    ids = [f"call{number}{i:04}" for i in range(results)]
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": f"get_item_{number}", "arguments": {"p0": "a"}},
        }
        for name in ids
    ]
    found = [
        {"role": "tool", "tool_call_id": name, "name": "get", "content": f"It is {number}: {name}."}
        for name in ids
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *found]


CHATS: dict[str, list[Message]] = {
    "first turn": [SYSTEM, FIRST],
    "no system": [FIRST],
    "a result": [SYSTEM, FIRST, *round_of_calls(1)],
    "rounds": [SYSTEM, FIRST, *round_of_calls(1), *round_of_calls(2), *round_of_calls(3)],
    "two results": [SYSTEM, FIRST, *round_of_calls(4, results=2)],
    "later turn": [SYSTEM, FIRST, *round_of_calls(1), REPLY, SECOND],
    "later result": [FIRST, *round_of_calls(1), REPLY, SECOND, *round_of_calls(2)],
}


class Chats:
    """A template and a tokenizer; `characters`: special tokens and single characters are tokens."""

    def __init__(self, name: str, characters: bool) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, indent=indent)
        self._template = environment.from_string((FOLDER / f"{name}.jinja").read_text())
        self._tokenizer = None if characters else trained()
        self._today = "1 May 2026"
        self.learned = learn_template(self._render)
        self._today = "27 November 2026"

    def text(
        self, messages: list[Message], is_prompt: bool = True, tools: Sequence[Tool] = ()
    ) -> str:
        return self._template.render(
            messages=messages, add_generation_prompt=is_prompt, tools=tools, today=self._today
        )

    def pieces(self, text: str) -> tuple[list[int], list[str]]:
        """The ids of its tokens, and their texts."""
        if self._tokenizer is not None:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            return encoded.ids, [text[start:end] for start, end in encoded.offsets]
        return pieces_of(text)

    def _render(
        self, messages: list[Message], is_prompt: bool, tools: Sequence[Tool]
    ) -> Sequence[int]:
        return self.pieces(self.text(messages, is_prompt, tools))[0]

    def found(self, text: str) -> dict[str, list[str]]:
        """Part -> its texts."""
        assert self.learned is not None
        ids, pieces = self.pieces(text)
        parts = self.learned.find(np.array(ids))
        return {
            name: ["".join(pieces[start:end]) for start, end in spans]
            for name, spans in parts._asdict().items()
        }


def pieces_of(text: str) -> tuple[list[int], list[str]]:
    """Special tokens and single characters as tokens, as ids and texts."""
    parts = re.findall("|".join(map(re.escape, SPECIAL)) + r"|[\s\S]", text)
    ids = [-SPECIAL.index(part) - 1 if part in SPECIAL else ord(part) for part in parts]
    return ids, parts


@cache
def trained() -> Tokenizer:
    """A byte-level BPE that has learned words and runs of punctuation of the templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text().replace("\\n", "\n") for path in FOLDER.iterdir()]
    texts += [json.dumps(SCHEMAS), json.dumps(SCHEMAS, indent=4), 'x}}}\n</tools>y.\n\n# z"}\n\n']
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer


@pytest.fixture(params=[True, False], ids=["characters", "bpe"])
def characters(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@cache
def chats_of(name: str, characters: bool) -> Chats:
    return Chats(name, characters)


# What the template writes around its schemas.
AROUND = {
    "qwen": ("# Tools", "</tool_call><|im_end|>\n"),
    "llama": ("Given the following", "}\n\n"),
    "mistral": ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    "hermes": ("You are a function", "</tool_call><|im_end|>\n"),
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("num_tools", [1, 10])
def test_tools_are_what_the_template_adds_for_them(
    name: str, chat: str, num_tools: int, characters: bool
) -> None:
    chats, messages = chats_of(name, characters), CHATS[chat]
    for tools in (SCHEMAS[:num_tools], SCHEMAS[::-1][:num_tools]):
        text = chats.text(messages, tools=tools)
        opening, closing = AROUND[name]
        last = json.dumps(tools[-1], indent=4 if name == "llama" else None)
        start = text.index(opening)
        end = text.index(closing, text.index(last) + len(last) - 1) + len(closing)
        found = chats.found(text)
        # A token may begin with the end of what precedes the tools.
        assert [part.removeprefix("\n\n") for part in found["tools"]] == [text[start:end]]
        plain = chats.found(chats.text(messages))
        assert plain["tools"] == []


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_other_parts_are_those_of_the_prompt_without_tools(
    name: str, chat: str, characters: bool
) -> None:
    chats, messages = chats_of(name, characters), CHATS[chat]
    with_tools = chats.found(chats.text(messages, tools=SCHEMAS))
    without = chats.found(chats.text(messages))
    # Where a system turn begins otherwise with tools, the template's part ends earlier.
    beginnings = [bare(parts["template"][:1] + parts["system"]) for parts in (with_tools, without)]
    assert beginnings[0] == beginnings[1]
    assert bare(with_tools["last_user"]) == bare(without["last_user"])


def bare(spans: list[str]) -> str:
    """The contents of `spans`, without role headers and what is there for tools."""
    text = re.sub(r"<.im_start.>\w+|Environment: ipython|\s", "", "".join(spans))
    return re.sub("|".join(map(re.escape, SPECIAL)), "", text)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [[], SCHEMAS], ids=["no tools", "tools"])
def test_the_last_user_turn_is_no_result_of_a_tool(
    name: str, chat: str, tools: list[Tool], characters: bool
) -> None:
    chats, messages = chats_of(name, characters), CHATS[chat]
    asked = next(m["content"] for m in reversed(messages) if m["role"] == "user")
    last_user = "".join(chats.found(chats.text(messages, tools=tools))["last_user"])
    assert asked.strip() in last_user
    assert not re.search("It is|Something|tool_response|get_item|TOOL", last_user)


@pytest.mark.parametrize("name", ["qwen", "llama", "hermes"])
def test_the_answers_header_is_the_last_one(name: str, characters: bool) -> None:
    chats = chats_of(name, characters)
    assert chats.learned is not None
    ids, _ = chats.pieces(chats.text(CHATS["rounds"], tools=SCHEMAS))
    header = chats.learned.find(np.array(ids)).template[-1]
    assert header[1] >= len(ids) - 1  # a newline may follow
    assert tuple(ids[slice(*header)]) == chats.learned.assistant


def listing(messages: list[Message], is_prompt: bool, tools: Sequence[Tool]) -> str:
    """The names of tools in the first user turn, with nothing between them and the question."""
    names = "".join(f"{tool['function']['name']}\n" for tool in tools)
    texts = [message["content"] for message in messages]
    if tools:
        texts[0] = f"Tools:\n{names}{texts[0]}"
    turns = zip(messages, texts, strict=True)
    text = "".join(f"<s>{message['role']}\n{content}</s>" for message, content in turns)
    return text + ("<s>assistant\n" if is_prompt else "")


def test_tools_whose_end_has_no_mark_last_to_the_end_of_their_turn() -> None:
    learned = learn_template(lambda *chat: pieces_of(listing(*chat))[0])
    assert learned is not None
    chat = [FIRST, REPLY, SECOND]
    ids, pieces = pieces_of(listing(chat, True, SCHEMAS))
    (tools,) = learned.find(np.array(ids)).tools
    text = "".join(pieces[slice(*tools)])
    assert text.startswith("Tools:\nget_item_1\n")
    assert text.endswith(f"{FIRST['content']}</s>")
    ids, _ = pieces_of(listing(chat, True, []))
    assert learned.find(np.array(ids)).tools == ()


def test_a_question_that_looks_like_the_end_of_tools_ends_nothing_early() -> None:
    """Nor does one that looks like a tool begin one."""
    chats = chats_of("llama", False)
    asked = {"role": "user", "content": f"What is\n\n{json.dumps(SCHEMAS[0], indent=4)}\n\n?"}
    (tools,) = chats.found(chats.text([SYSTEM, asked], tools=SCHEMAS[:2]))["tools"]
    assert tools.endswith(f"{json.dumps(SCHEMAS[1], indent=4)}\n\n")
    assert chats.found(chats.text([SYSTEM, asked]))["tools"] == []
