"""Questions about drawings for the model `tiny-vision`, and the exact answers it was trained to
give. Imports no torch."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from .drawings import COLOURS, KINDS, Drawing, counted, draw, plural

DESCRIBE = (
    "What is in this picture?", "What is in the picture?", "What's in this image?", "What is in this image?", "What do you see?",
    "Describe this picture.", "Describe the image.", "What does the picture show?", "What can you see in this picture?", "What is this?",
)  # fmt: skip
COUNT = (
    "How many {x} are there?", "How many {x} are in the picture?", "How many {x} are in this image?", "How many {x} do you see?",
    "Count the {x}.",
)  # fmt: skip
COLOUR = (
    "What colour {is} the {x}?",
    "What color {is} the {x}?",
    "Which colour {is} the {x}?",
    "Tell me the colour of the {x}.",
)
SHAPE = (
    "Which {shape} {is} {x}?",
    "What {is} the {x} {shape}?",
    "What kind of {shape} {is} the {x} {shape}?",
)
EXISTS = (
    "Is there a {x}?",
    "Do you see a {x}?",
    "Is there a {x} in the picture?",
    "Does the picture show a {x}?",
)
DESCRIBE_ONE = (
    "What is in the {x} picture?",
    "What is in the {x} image?",
    "Describe the {x} picture.",
    "What does the {x} picture show?",
)
COUNT_ONE = (
    "How many shapes are in the {x} picture?",
    "How many shapes are in the {x} image?",
    "Count the shapes in the {x} picture.",
)
MORE = (
    "Which picture has more shapes?",
    "Which image has more shapes?",
    "In which picture are more shapes?",
)
WITH = (
    "Which picture has a {x}?",
    "Which image has a {x}?",
    "Which picture shows a {x}?",
    "In which picture is a {x}?",
)
ORDINALS = ("first", "second")

_HELLO = "Hello! Show me a picture of shapes, and I will tell you what is in it."
_SELF = (
    "I am a tiny model that looks at pictures. I know five shapes, their colours and how many "
    "there are."
)
_NO_PICTURE = "I see no picture. Please show me one."
TALK: dict[str, str] = {
    **dict.fromkeys(
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hi there!",
            "Hey",
            "Good morning",
            "Good morning!",
            "Good evening!",
        ),
        _HELLO,
    ),
    **dict.fromkeys(
        (
            "Who are you?",
            "What are you?",
            "What can you do?",
            "What do you know?",
            "How can you help me?",
        ),
        _SELF,
    ),
    **dict.fromkeys(("Thank you!", "Thank you.", "Thanks!", "Thanks"), "You are welcome."),
    **dict.fromkeys(("Goodbye!", "Bye!", "Bye", "Good night!"), "Goodbye!"),
}
"""Questions that it answers without a picture, and the answers."""


class Question(NamedTuple):
    """A question of one kind, and its answer."""

    kind: str
    text: str
    answer: str


def ask(random: Random, drawing: Drawing) -> Question:
    """A question about one picture."""
    makers = (_describe, _count_all, _count, _count, _colour, _shape, _exists)
    while (question := random.choice(makers)(random, drawing)) is None:
        pass
    return question


def ask_pair(random: Random, first: Drawing, second: Drawing) -> Question:
    """A question about two pictures."""
    makers = (_describe_one, _describe_one, _count_one, _more, _with)
    while (question := random.choice(makers)(random, (first, second))) is None:
        pass
    return question


def ask_blind(random: Random, drawing: Drawing) -> Question:
    """A question without a picture, whose answer says so; `drawing` is what the questioner may have
    had in mind."""
    if random.random() < 0.5:
        text = random.choice(tuple(TALK))
        return Question("talk", text, TALK[text])
    return Question("no picture", ask(random, drawing).text, _NO_PICTURE)


class Task(NamedTuple):
    """A question with the pictures that it is about."""

    question: Question
    drawings: tuple[Drawing, ...]


def exam(count: int, seed: int = 0) -> list[Task]:
    """Questions about held-out drawings: of ten, seven about one picture, two about two, and one
    without a picture."""
    random = Random(seed)
    tasks = []
    for i in range(count):
        first = draw(random, held_out=True)
        second = draw(random, held_out=True)
        if i % 10 < 7:
            tasks.append(Task(ask(random, first), (first,)))
        elif i % 10 < 9:
            tasks.append(Task(ask_pair(random, first, second), (first, second)))
        else:
            tasks.append(Task(ask_blind(random, first), ()))
    return tasks


def _there_are(number: int, name: str) -> str:
    return f"There {'is' if number == 1 else 'are'} {counted(number, name)}."


def _describe(random: Random, drawing: Drawing) -> Question:
    return Question("describe", random.choice(DESCRIBE), drawing.content)


def _count_all(random: Random, drawing: Drawing) -> Question:
    return Question(
        "count", random.choice(COUNT).format(x="shapes"), _there_are(len(drawing.shapes), "shape")
    )


def _count(random: Random, drawing: Drawing) -> Question:
    """Asks for the number of shapes of a colour, a kind or both; mostly of shapes that are
    there."""
    looks = [(shape.colour, shape.kind) for shape in drawing.shapes]
    colour = random.choice(tuple(COLOURS))
    kind = random.choice(KINDS)
    if looks and random.random() < 0.8:
        colour = random.choice(looks)[0]
        kind = random.choice(looks)[1]
    asked = random.randrange(3)
    number = drawing.count(colour if asked != 1 else None, kind if asked != 0 else None)
    name = (f"{colour} shape", kind, f"{colour} {kind}")[asked]
    return Question(
        "count of", random.choice(COUNT).format(x=plural(name)), _there_are(number, name)
    )


def _colour(random: Random, drawing: Drawing) -> Question | None:
    """Asks for the colour of a kind whose shapes all have one colour."""
    kinds = [
        kind
        for kind in KINDS
        if len({shape.colour for shape in drawing.shapes if shape.kind == kind}) == 1
    ]
    if not kinds:
        return None
    kind = random.choice(kinds)
    colour = next(shape.colour for shape in drawing.shapes if shape.kind == kind)
    verb, name = ("is", kind) if drawing.count(kind=kind) == 1 else ("are", plural(kind))
    return Question(
        "colour",
        random.choice(COLOUR).format_map({"is": verb, "x": name}),
        f"The {name} {verb} {colour}.",
    )


def _shape(random: Random, drawing: Drawing) -> Question | None:
    """Asks for the shape of a colour that only one kind has."""
    colours = [
        colour
        for colour in COLOURS
        if len({shape.kind for shape in drawing.shapes if shape.colour == colour}) == 1
    ]
    if not colours:
        return None
    colour = random.choice(colours)
    kind = next(shape.kind for shape in drawing.shapes if shape.colour == colour)
    if drawing.count(colour) == 1:
        words = {"shape": "shape", "is": "is", "x": colour}
        answer = f"The {colour} shape is a {kind}."
    else:
        words = {"shape": "shapes", "is": "are", "x": colour}
        answer = f"The {colour} shapes are {plural(kind)}."
    return Question("shape", random.choice(SHAPE).format_map(words), answer)


def _exists(random: Random, drawing: Drawing) -> Question:
    """Asks whether a shape is there. Yes and no are equally frequent. Absent shapes often combine a
    colour and a kind that are there."""
    colour, kind = _look(random, [drawing], is_there=bool(drawing.shapes) and random.random() < 0.5)
    answer = "Yes." if drawing.count(colour, kind) else "No."
    return Question(
        "yes or no",
        random.choice(EXISTS).format(x=f"{colour} {kind}").replace(" a orange", " an orange"),
        answer,
    )


def _look(random: Random, drawings: list[Drawing], *, is_there: bool) -> tuple[str, str]:
    looks = [(shape.colour, shape.kind) for drawing in drawings for shape in drawing.shapes]
    if is_there:
        return random.choice(looks)
    while True:
        colour = (
            random.choice(looks)[0]
            if looks and random.random() < 0.6
            else random.choice(tuple(COLOURS))
        )
        kind = random.choice(looks)[1] if looks and random.random() < 0.6 else random.choice(KINDS)
        if (colour, kind) not in looks or random.random() < 0.05:
            return colour, kind


_Pair = tuple[Drawing, Drawing]


def _describe_one(random: Random, pair: _Pair) -> Question:
    i = random.randrange(2)
    return Question(
        "describe one of two", random.choice(DESCRIBE_ONE).format(x=ORDINALS[i]), pair[i].content
    )


def _count_one(random: Random, pair: _Pair) -> Question:
    i = random.randrange(2)
    return Question(
        "count one of two",
        random.choice(COUNT_ONE).format(x=ORDINALS[i]),
        _there_are(len(pair[i].shapes), "shape"),
    )


def _more(random: Random, pair: _Pair) -> Question | None:
    first, second = (len(drawing.shapes) for drawing in pair)
    return (
        None
        if first == second
        else Question(
            "more of two", random.choice(MORE), f"The {ORDINALS[first < second]} picture."
        )
    )


def _with(random: Random, pair: _Pair) -> Question | None:
    """Asks about a group of shapes that only one of the two pictures has."""
    looks = [
        (i, look)
        for i, drawing in enumerate(pair)
        for look in drawing.groups
        if look not in pair[1 - i].groups
    ]
    if not looks:
        return None
    i, (colour, kind) = random.choice(looks)
    text = random.choice(WITH).format(x=f"{colour} {kind}").replace(" a orange", " an orange")
    return Question("which of two", text, f"The {ORDINALS[i]} picture.")
