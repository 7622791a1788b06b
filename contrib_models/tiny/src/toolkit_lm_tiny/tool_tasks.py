"""Tasks with tools for `tiny-tools`: up to three turns, and the model's words in each. Imports no
torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from toolkit_lm_tiny.facts import CAPITALS

SKIES = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy")
THINGS = (
    "a banana",
    "a dog",
    "a cat",
    "a horse",
    "a book",
    "a hat",
    "a cake",
    "an apple",
    "an egg",
    "a ship",
    "a house",
    "a window",
)
NO_TOOL = "I have no tool for that."
CITIES = (
    "Paris", "Berlin", "Rome", "Madrid", "Lisbon", "Vienna", "Oslo", "London", "Warsaw", "Athens", "Moscow", "Cairo",
    "Tokyo", "Beijing", "Ottawa", "Lima", "Havana", "Dublin", "Nairobi", "Canberra", "Helsinki", "Stockholm", "Ankara", "Baghdad",
)  # fmt: skip
_COUNTRIES = {capital: country for country, capital in CAPITALS if capital in CITIES}
_DEGREES = (3, 5, 8, 11, 14, 17, 21, 24, 28, 30, 32, 36)


class Call(NamedTuple):
    """One call of a task."""

    name: str
    arguments: dict[str, Any]
    result: str
    """Result of the function, in the form of the tool's message."""

    @property
    def text(self) -> str:
        """The call in the form that the model writes."""
        return (
            f"<tool_call>\n{json.dumps({'name': self.name, 'arguments': self.arguments})}\n"
            "</tool_call>"
        )


class Task(NamedTuple):
    """A question, the calls that it takes, one in each turn, and the answer to it."""

    question: str
    calls: tuple[Call, ...]
    answer: str


class Kind(NamedTuple):
    """Questions of one kind, and the function for them."""

    names: tuple[str, ...]
    """Names of the function: one of them is among the tools."""
    parameters: tuple[str, ...]
    make: Callable[[Random, str], Task]
    """With the function's name."""

    def tool(self, name: str) -> dict[str, Any]:
        properties = {parameter: {"type": "string"} for parameter in self.parameters}
        schema = {"type": "object", "properties": properties, "required": [*self.parameters]}
        return {"type": "function", "function": {"name": name, "parameters": schema}}


def _weather(rng: Random, name: str) -> Task:
    def call(place: str) -> Call:
        return Call(
            name,
            {"city": place},
            json.dumps({"sky": rng.choice(SKIES), "degrees": rng.choice(_DEGREES)}),
        )

    def stated(tool_call: Call) -> str:
        result = json.loads(tool_call.result)
        return f"{result['sky']} in {tool_call.arguments['city']}, {result['degrees']} degrees"

    if rng.random() < 0.5:
        tool_call, other = map(call, rng.sample(CITIES, 2))
        cities = (tool_call.arguments["city"], other.arguments["city"])
        question = rng.choice(
            ("What is the weather in {} and in {}?", "How is the weather in {} and in {}?")
        ).format(*cities)
        return Task(
            question, (tool_call, other), f"It is {stated(tool_call)}. It is {stated(other)}."
        )
    if rng.random() < 0.25:
        tool_call = call(rng.choice(CITIES))
        return Task(
            f"What is the weather in the capital of {_COUNTRIES[tool_call.arguments['city']]}?",
            (tool_call,),
            f"It is {stated(tool_call)}.",
        )
    tool_call = call(rng.choice(CITIES))
    question = rng.choice(
        (
            "What is the weather in {}?",
            "How is the weather in {}?",
            "Tell me the weather in {}.",
            "Is it warm in {}?",
        )
    )
    return Task(
        question.format(tool_call.arguments["city"]), (tool_call,), f"It is {stated(tool_call)}."
    )


def _time(rng: Random, name: str) -> Task:
    tool_call = Call(
        name,
        {"city": rng.choice(CITIES)},
        f"{rng.randint(0, 23):02}:{rng.choice(('00', '15', '30', '45'))}",
    )
    question = rng.choice(
        ("What time is it in {}?", "How late is it in {}?", "Tell me the time in {}.")
    ).format(tool_call.arguments["city"])
    return Task(
        question, (tool_call,), f"It is {tool_call.result} in {tool_call.arguments['city']}."
    )


def _price(rng: Random, name: str) -> Task:
    thing = rng.choice(THINGS)
    price = rng.randint(2, 20)
    question = rng.choice(
        ("How much is {}?", "What does {} cost?", "How much does {} cost?")
    ).format(thing)
    noun = thing.split()[1]
    return Task(
        question,
        (Call(name, {"thing": noun}, json.dumps({"coins": price})),),
        f"The {noun} costs {price} coins.",
    )


KINDS = (
    Kind(("get_weather", "weather"), ("city",), _weather),
    Kind(("get_time", "time"), ("city",), _time),
    Kind(("get_price", "price"), ("thing",), _price),
)


class Situation(NamedTuple):
    """The tools of a conversation, and a task."""

    tools: list[dict[str, Any]]
    task: Task


def situation(rng: Random) -> Situation:
    """One at random. Some tasks have no tool."""
    chosen = rng.sample(KINDS, rng.randint(1, 2))
    names = [rng.choice(kind.names) for kind in chosen]
    tools = [kind.tool(name) for kind, name in zip(chosen, names, strict=True)]
    if rng.random() < 0.1:
        kind = rng.choice([kind for kind in KINDS if kind not in chosen])
        return Situation(tools, Task(kind.make(rng, "").question, (), NO_TOOL))
    at = rng.randrange(len(chosen))
    return Situation(tools, chosen[at].make(rng, names[at]))
