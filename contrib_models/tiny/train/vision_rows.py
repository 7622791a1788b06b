"""Training data of `tiny-vision`: chats about drawings, as rows of tokens with their attention
masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from PIL import Image
from toolkit_lm_tiny.drawing_questions import TALK, Question, ask, ask_blind, ask_pair
from toolkit_lm_tiny.drawings import COLOURS, KINDS, Drawing, draw, scatter
from torch import Tensor

PAD = "<|pad|>"
BOS = "<|bos|>"
START = "<|im_start|>"
END = "<|im_end|>"
IMAGE = "<image>"
SIDE = 48
PATCH = 12
NUM_PATCHES = (SIDE // PATCH) ** 2
LOOKS = (1 + len(KINDS), 1 + len(COLOURS), 2)
"""How many classes each of `looks` has."""
IGNORED = -100
SYSTEM = (
    "You are a helpful assistant.",
    "Answer questions about pictures.",
    "You look at pictures.",
)
QUESTIONS = 4
# Kinds of rows in a batch: independent questions about one picture or two, or a chat of several
# turns.
MIX = ("one", "two", "chat")
MIX_WEIGHTS = (5, 3, 2)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in "
    "message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif 'image' in part['type'] %}{{ "
    "'<image>' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# So many of the questions are of the kinds that take the longest to learn.
HARD = ("describe", "count of", "describe one of two")
HARD_SHARE = 0.5
Encode = Callable[[str], Sequence[int]]
Preprocess = Callable[[list[Image.Image]], Tensor]


@dataclass
class Row:
    """Tokens in segments: a segment sees itself and segment 0; one below 0 sees itself alone."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)

    def add(self, ids: Sequence[int], segment: int, position: int, *, learned: bool = False) -> int:
        """Append tokens; give the position that follows."""
        self.ids += ids
        self.labels += ids if learned else [IGNORED] * len(ids)
        self.segments += [segment] * len(ids)
        self.positions += range(position, position + len(ids))
        return position + len(ids)


class Rows:
    """Makes rows at random, of drawings that are not held out."""

    def __init__(self, encode: Encode, image_token: int, seed: int) -> None:
        self._encode = encode
        self._image = [image_token] * NUM_PATCHES
        self._random = Random(seed)

    def make(self, kind: str, count: int) -> list[Row]:
        """`count` rows of a kind."""
        make = self._chat if kind == "chat" else self._independent
        return [make(1 if kind == "one" else 2) for _ in range(count)]

    def draw(self) -> Drawing:
        """A drawing that is not held out."""
        return draw(self._random, held_out=False)

    def scatter(self) -> Drawing:
        """A drawing of many shapes."""
        return scatter(self._random)

    def _independent(self, num_pictures: int) -> Row:
        """Questions that see the pictures, not each other, and sometimes one that sees no
        picture."""
        row = Row()
        random = self._random
        row.drawings = [self.draw() for _ in range(num_pictures)]
        start = self._begin(row)
        start = row.add(self._encode(f"{START}user\n"), 0, start)
        start = row.add(self._image * num_pictures, 0, start)
        for segment in range(1, 1 + QUESTIONS):
            is_hard = random.random() < HARD_SHARE
            while True:
                question = (
                    ask(random, row.drawings[0])
                    if num_pictures == 1
                    else ask_pair(random, row.drawings[0], row.drawings[1])
                )
                if question.kind in HARD or not is_hard:
                    break
            self._answer(row, question, segment, start)
        if random.random() < 0.3:
            self._answer(
                row,
                ask_blind(random, row.drawings[0]),
                -1,
                row.add(self._encode(f"{START}user\n"), -1, 0),
            )
        return row

    def _chat(self, most_pictures: int) -> Row:
        """Several turns. A picture comes with the first question or a later one, before or behind
        the text."""
        row = Row()
        random = self._random
        position = self._begin(row)
        for _ in range(random.randint(1, QUESTIONS)):
            is_new = len(row.drawings) < most_pictures and random.random() < (
                0.7 if not row.drawings else 0.2
            )
            if is_new:
                row.drawings.append(self.draw())
            question = self._next_question(row)
            parts: list[Sequence[int]] = [self._encode(question.text)]
            if is_new:
                parts.insert(random.randrange(2), self._image)
            position = row.add(self._encode(f"{START}user\n"), 0, position)
            for part in parts:
                position = row.add(part, 0, position)
            position = self._reply(row, question, 0, position)
            position = row.add(self._encode("\n"), 0, position)
        return row

    def _next_question(self, row: Row) -> Question:
        random = self._random
        if random.random() < 0.1:
            text = random.choice(tuple(TALK))
            return Question("talk", text, TALK[text])
        if not row.drawings:
            return ask_blind(random, self.draw())
        if len(row.drawings) == 2 and random.random() < 0.5:
            return ask_pair(random, row.drawings[0], row.drawings[1])
        return ask(random, row.drawings[-1])

    def _begin(self, row: Row) -> int:
        """Some programs put BOS before every prompt, some chats have a system message: neither may
        do harm."""
        position = 0
        random = self._random
        if random.random() < 0.1:
            position = row.add(self._encode(BOS), 0, position)
        if random.random() < 0.1:
            position = row.add(
                self._encode(f"{START}system\n{random.choice(SYSTEM)}{END}\n"), 0, position
            )
        return position

    def _answer(self, row: Row, question: Question, segment: int, position: int) -> int:
        return self._reply(
            row, question, segment, row.add(self._encode(question.text), segment, position)
        )

    def _reply(self, row: Row, question: Question, segment: int, position: int) -> int:
        position = row.add(self._encode(f"{END}\n{START}assistant\n"), segment, position)
        return row.add(self._encode(f"{question.answer}{END}"), segment, position, learned=True)


def collate(rows: list[Row], pad: int) -> dict[str, Tensor]:
    """Rows of one batch, padded behind."""
    length = max(len(row.ids) for row in rows)
    shape = (len(rows), length)
    ids = np.full(shape, pad)
    labels = np.full(shape, IGNORED)
    positions = np.zeros(shape, np.int64)
    segments = np.full(shape, -2)
    for i, row in enumerate(rows):
        for target, values in (
            (ids, row.ids),
            (labels, row.labels),
            (positions, row.positions),
            (segments, row.segments),
        ):
            target[i, : len(values)] = values
    query = segments[:, :, None]
    key = segments[:, None, :]
    seen = ((query == key) | ((key == 0) & (query > 0))) & np.tri(length, dtype=np.bool_)
    names = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "attention_mask": seen[:, None],
    }
    return {name: torch.from_numpy(array) for name, array in names.items()}


def pictures(drawings: list[Drawing]) -> list[Image.Image]:
    """Drawings as images for an image processor."""
    return [Image.fromarray(drawing.pixels()) for drawing in drawings]


def looks(drawings: list[Drawing]) -> Tensor:
    """Labels of each patch: kind and colour of the shape near it (0: none), and whether it has the
    shape's centre.

    [drawings, patches, 3]"""
    found = np.zeros((len(drawings), NUM_PATCHES, 3), np.int64)
    across = SIDE // PATCH
    colours = tuple(COLOURS)
    rows, columns = np.mgrid[0:across, 0:across].reshape(2, -1) + 0.5
    for i, drawing in enumerate(drawings):
        for shape in drawing.shapes:
            x = shape.x / drawing.width * across
            y = shape.y / drawing.height * across
            away = np.hypot(
                (columns - x) * drawing.width / across, (rows - y) * drawing.height / across
            )
            centre = int(y) * across + int(x)
            near = away < shape.radius
            near[centre] = True
            found[i, near, :2] = 1 + KINDS.index(shape.kind), 1 + colours.index(shape.colour)
            found[i, centre, 2] = 1
    return torch.from_numpy(found)
