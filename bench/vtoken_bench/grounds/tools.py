"""Tools that a prompt offers: schemas, requests for one of them, and the call that is wanted.

Names of functions and parameters are drawn, and no request contains one: whoever names the
parameters of a function has read its schema. A description says in the request's words what a tool
does; yet models of this size often choose another one, so prompts give the name of the function.

The template is written after the published ones: the tools stand in the system turn as with Qwen
2.5, and a schema has its parameters at the top, as those of Llama 3.1's custom tools.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

NUM_TOOLS = 10  # a prompt offers
NUM_ROUNDS = 3  # of a request and a call; the last call is asked for
DONE = "It is done."  # the model's turn after a result
CALL = "<tool_call>\n{"  # how a call begins
PARAMETERS = '"parameters": {"'  # in a call, before the first name

TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\nYou are an assistant.\n\n# Tools\n\nYou may call one or more ' }}
    {{- 'functions. They are within <tools></tools>:\n<tools>' }}
    {%- for tool in tools %}
        {%- set own = tool.function %}
        {{- '\n{"description": ' + own.description | tojson + ', "name": ' + own.name | tojson }}
        {{- ', "parameters": ' + own.parameters.properties | tojson + '}' }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each call, return JSON within <tool_call></tool_call>:\n<tool_call>\n' }}
    {{- '{"name": <name>, "parameters": <parameters>}\n</tool_call><|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are an assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": ' + call.function.name | tojson + ', "parameters": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


@dataclass(frozen=True)
class Parameter:
    """`names` and `values`: of which one is drawn."""

    names: str
    type: str
    description: str
    values: str


@dataclass(frozen=True)
class Kind:
    """What a tool is for. `request`: with `{0}` and `{1}` for the values of its parameters."""

    names: str
    description: str
    parameters: tuple[Parameter, Parameter]
    request: str


@dataclass(frozen=True)
class Tool:
    """A tool, with a request for it and the arguments of the call that the request wants."""

    kind: str
    name: str
    schema: dict[str, Any]
    request: str
    arguments: dict[str, Any]


def _text(names: str, description: str, values: str) -> Parameter:
    return Parameter(names, "string", description, values)


def _number(names: str, description: str, least: int, most: int) -> Parameter:
    return Parameter(names, "integer", description, " ".join(map(str, range(least, most))))


KINDS: dict[str, Kind] = {
    "weather": Kind(
        "sky_report outlook_sheet climate_card",
        "Tells the weather of a town on a day. Use it for any question about the weather.",
        (
            _text("town_label place_key", "The town.", "Oslo Bergen Lisbon Krakow Dublin Geneva"),
            _number("day_offset days_ahead", "How many days from now.", 2, 9),
        ),
        "What is the weather in {0} in {1} days?",
    ),
    "parcel": Kind(
        "shipment_trace cargo_status crate_log",
        "Tells where a parcel is. Use it for any question about a parcel.",
        (
            _text(
                "waybill_ref consignment_no", "The sender.", "Abbott Brandt Castell Dupont Eriksen"
            ),
            _number("max_events row_limit", "How many events to list.", 2, 9),
        ),
        "Where is the parcel from {0}? List the last {1} events.",
    ),
    "train": Kind(
        "rail_board departure_list line_table",
        "Lists the trains from a station. Use it for any question about trains.",
        (
            _text("halt_name stop_tag", "The station.", "Basel Ghent Leiden Turin Poznan Aarhus"),
            _number("num_rows entry_count", "How many trains to list.", 2, 9),
        ),
        "Which trains leave from {0}? List {1} of them.",
    ),
    "money": Kind(
        "sum_exchange rate_swap coin_change",
        "Changes euros into another currency. Use it for anything with money.",
        (
            _text("target_unit wanted_code", "The currency.", "dollars pounds francs yen zloty"),
            _number("base_value start_sum", "How many euros.", 110, 990),
        ),
        "Change euros into {0}, {1} of them.",
    ),
    "translation": Kind(
        "phrase_render wording_shift text_recast",
        "Translates a word into another language. Use it for any translation.",
        (
            _text("goal_tongue into_speech", "The language.", "French German Spanish Polish Dutch"),
            _text("source_term raw_phrase", "The word.", "bridge candle garden window summer"),
        ),
        "Translate into {0} the word {1}.",
    ),
    "email": Kind(
        "letter_dispatch note_courier post_out",
        "Sends an email to a person. Use it for any email that has to be sent.",
        (
            _text(
                "recipient_tag addressee_id", "The person.", "Agnes Bruno Celia Dario Edith Felix"
            ),
            _text("header_line subject_text", "The subject.", "dinner holidays football music"),
        ),
        "Send an email to {0} about {1}.",
    ),
    "hotel": Kind(
        "lodging_hold room_claim stay_order",
        "Books a hotel room in a city. Use it for any booking of a hotel.",
        (
            _text(
                "city_mark locality_id", "The city.", "Vienna Prague Milan Porto Riga Lyon Seville"
            ),
            _number("night_total stay_length", "How many nights.", 2, 9),
        ),
        "Book a hotel room in {0} for {1} nights.",
    ),
    "recipe": Kind(
        "dish_finder meal_search plate_lookup",
        "Finds recipes with an ingredient. Use it for any question about recipes and cooking.",
        (
            _text("main_item key_produce", "The ingredient.", "apples cheese honey lemons olives"),
            _number("cook_minutes time_cap", "How many minutes it may take.", 15, 60),
        ),
        "Find a recipe with {0} that takes {1} minutes.",
    ),
    "light": Kind(
        "luminaire_set glow_control beam_adjust",
        "Sets the light of a room. Use it whenever a light should be brighter or darker.",
        (
            _text("chamber_id zone_name", "The room.", "kitchen hall bedroom cellar office"),
            _number("glow_percent beam_level", "How bright, in percent.", 10, 95),
        ),
        "Set the light in the {0} to {1} percent.",
    ),
    "timer": Kind(
        "countdown_start alarm_arm clock_trigger",
        "Starts a timer. Use it whenever somebody wants a timer for something.",
        (
            _text(
                "tag_text caption_line", "What the timer is for.", "pasta eggs laundry bread tea"
            ),
            _number("span_minutes run_length", "How many minutes.", 3, 40),
        ),
        "Start a timer for the {0}, {1} minutes.",
    ),
}


def toolbox(rng: random.Random) -> list[Tool]:
    """NUM_TOOLS tools in any order, each with other names than in another draw."""
    tools = [_tool(rng, name, kind) for name, kind in KINDS.items()]
    rng.shuffle(tools)
    return tools[:NUM_TOOLS]


def _tool(rng: random.Random, kind_name: str, kind: Kind) -> Tool:
    name = rng.choice(kind.names.split())
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for parameter in kind.parameters:
        own, value = rng.choice(parameter.names.split()), rng.choice(parameter.values.split())
        properties[own] = {"type": parameter.type, "description": parameter.description}
        arguments[own] = int(value) if parameter.type == "integer" else value
    function = {
        "name": name,
        "description": kind.description,
        "parameters": {"type": "object", "properties": properties, "required": [*properties]},
    }
    schema = {"type": "function", "function": function}
    return Tool(kind_name, name, schema, kind.request.format(*arguments.values()), arguments)


def line(tool: Tool) -> str:
    """The schema as `TEMPLATE` writes it."""
    own = tool.schema["function"]
    parameters = own["parameters"]["properties"]
    return json.dumps(
        {"description": own["description"], "name": own["name"], "parameters": parameters}
    )


def rounds(tools: list[Tool], results: list[str]) -> list[dict[str, Any]]:
    """A chat in which each of `tools` is asked for and called; a result follows all but the last.

    `results`: one fewer than `tools`.
    """
    messages: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        identity = f"call0000{number}"
        function = {"name": tool.name, "arguments": tool.arguments}
        call = {"id": identity, "type": "function", "function": function}
        messages += [
            {"role": "user", "content": tool.request},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        if number < len(results):
            messages += [
                {"role": "tool", "tool_call_id": identity, "content": results[number]},
                {"role": "assistant", "content": DONE},
            ]
    return messages
