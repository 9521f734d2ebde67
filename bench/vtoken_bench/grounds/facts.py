"""Facts that a prompt states once and asks for: a sentence, a question, and what to find."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """`gold`: strings that the answer must contain. `prefix`: the beginning of the answer."""

    kind: str
    statement: str
    question: str
    prefix: str
    gold: tuple[str, ...]

    def is_in(self, answer: str) -> bool:
        """Whether the answer has every string of the fact, case ignored."""
        answer = answer.lower()
        return all(gold.lower() in answer for gold in self.gold)


Draw = Callable[[random.Random], Fact]


def _list_of(text: str, between: str = " ") -> list[str]:
    return text.split(between)


_FIRST = _list_of(
    "Agnes Bruno Celia Dario Edith Felix Greta Hugo Irene Jonas Karin Leon Marta Nils Olga Pablo "
    "Rosa Simon Tilda Viktor"
)
_LAST = _list_of(
    "Abbott Brandt Castell Dupont Eriksen Fischer Galvez Hansen Ingram Jansson Kovacs Lindqvist "
    "Moreau Novak Ortega Petrov Quinn Ricci Sandoval Tanaka Ullman Varga Weber Zimmer"
)
_OBJECTS = _list_of(
    "the church clock, the harbour crane, the school roof, the old printing press, the town "
    "fountain, the museum lift, the village pump, the lighthouse lamp, the theatre curtain, "
    "the ferry ramp",
    between=", ",
)
_EVENTS = _list_of(
    "the summer picnic, the science fair, the winter market, the boat race, the book sale, "
    "the garden party, the bake sale, the chess evening",
    between=", ",
)
_GOODS = _list_of(
    "apples bread butter candles cheese coffee cups flour forks honey lemons milk napkins olives "
    "onions pasta plates rice ropes salt soap spoons sugar tea tents tomatoes towels"
)
_MEETINGS = _list_of(
    "the choir rehearsal, the fire drill, the flower show, the parents' evening, the street "
    "festival, the swimming lesson, the tennis final, the wine tasting",
    between=", ",
)
_MONTHS = _list_of(
    "January February March April May June July August September October November December"
)
_PURCHASES = _list_of(
    "the second ambulance, the new oven, the concert organ, the wooden bridge, the playground, "
    "the fire engine, the bus shelter, the greenhouse",
    between=", ",
)


def _name(rng: random.Random) -> Fact:
    thing, name = rng.choice(_OBJECTS), f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"
    return Fact(
        "name",
        f"The person who repaired {thing} is {name}.",
        f"What is the name of the person who repaired {thing}?",
        f"The person who repaired {thing} is",
        (name,),
    )


def _list(rng: random.Random) -> Fact:
    event, goods = rng.choice(_EVENTS), rng.sample(_GOODS, 3)
    return Fact(
        "list",
        f"The shopping list for {event} is: {goods[0]}, {goods[1]}, {goods[2]}.",
        f"What is on the shopping list for {event}?",
        f"The shopping list for {event} is:",
        tuple(goods),
    )


def _date(rng: random.Random) -> Fact:
    meeting, date = rng.choice(_MEETINGS), f"{rng.randint(1, 28)} {rng.choice(_MONTHS)}"
    return Fact(
        "date",
        f"{meeting[0].upper()}{meeting[1:]} takes place on {date}.",
        f"When does {meeting} take place?",
        f"{meeting[0].upper()}{meeting[1:]} takes place on",
        (date,),
    )


def _sum(rng: random.Random) -> Fact:
    thing, amount = rng.choice(_PURCHASES), f"{rng.randint(1, 98)},{rng.randint(100, 999)}"
    return Fact(
        "sum",
        f"The council paid {amount} euros for {thing}.",
        f"How many euros did the council pay for {thing}?",
        "The council paid",
        (amount,),
    )


FACTS: Mapping[str, Draw] = {"name": _name, "list": _list, "date": _date, "sum": _sum}
