"""Drawings for the model `tiny-vision`: up to five shapes, and their description in words. Imports
no torch."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KINDS = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "red": ((255, 0, 0), (190, 30, 45)),
    "orange": ((255, 165, 0), (240, 120, 20)),
    "yellow": ((255, 255, 0), (240, 205, 40)),
    "green": ((40, 230, 60), (0, 110, 30)),
    "blue": ((0, 0, 255), (50, 120, 225)),
    "purple": ((128, 0, 128), (160, 70, 210)),
    "black": ((0, 0, 0), (35, 35, 40)),
    "white": ((255, 255, 255), (240, 240, 235)),
}
"""The two ends of what has the name."""
NUMBERS = ("no", "one", "two", "three", "four", "five")
MOST = 5
_HELD_OUT = 20
"""One in this many contents was kept from training."""
_CONTRAST = 100
"""The least distance in RGB of a background to each of its shapes."""
_MARGIN = 1.2
"""How far apart shapes stand, in their radii."""
_SIZES = ((0.0, 0.0), (0.15, 0.26), (0.15, 0.24), (0.14, 0.2), (0.13, 0.17), (0.12, 0.155))
"""Smallest and largest radius, as a share of the shorter side, by the number of shapes."""
_Colour = tuple[int, int, int]


class Shape(NamedTuple):
    """One shape, in pixels."""

    kind: str
    colour: str
    rgb: _Colour
    x: float
    y: float
    radius: float
    angle: float

    def corners(self) -> list[tuple[float, float]]:
        """The points of its outline, of all but circles."""
        turn = self.angle
        spokes = {"square": 4, "triangle": 3, "star": 10, "cross": 12}[self.kind]
        if self.kind == "square":
            polar = [(1.15, math.pi * (i + 0.5) / 2) for i in range(spokes)]
        elif self.kind == "triangle":
            polar = [(1.2, math.tau * i / spokes) for i in range(spokes)]
        elif self.kind == "star":
            polar = [(0.5 if i % 2 else 1.2, math.tau * i / spokes) for i in range(spokes)]
        else:
            near = 0.33
            far = 1.05
            quarter = [
                (math.hypot(far, near), math.atan2(near, far)),
                (near * math.sqrt(2), math.pi / 4),
                (math.hypot(far, near), math.atan2(far, near)),
            ]
            polar = [
                (length, angle + math.pi / 2 * i) for i in range(4) for length, angle in quarter
            ]
        return [
            (
                self.x + self.radius * length * math.sin(turn + angle),
                self.y - self.radius * length * math.cos(turn + angle),
            )
            for length, angle in polar
        ]


class Drawing(NamedTuple):
    """Shapes that do not touch, on a background that runs from one colour at the top to another at
    the bottom."""

    width: int
    height: int
    background: tuple[_Colour, _Colour]
    shapes: tuple[Shape, ...]

    @property
    def groups(self) -> dict[tuple[str, str], int]:
        """How many shapes of each colour and kind, in the order of the tables."""
        return _groups([(shape.colour, shape.kind) for shape in self.shapes])

    def count(self, colour: str | None = None, kind: str | None = None) -> int:
        """How many shapes, of a colour, of a kind."""
        return sum(
            colour in (None, shape.colour) and kind in (None, shape.kind) for shape in self.shapes
        )

    @property
    def content(self) -> str:
        """Content of the drawing in words: "Two red circles and one blue square."."""
        return _in_words(self.groups)

    @property
    def is_held_out(self) -> bool:
        """The model has seen no drawing of this content in training."""
        return _is_held_out(self.content)

    def pixels(self) -> NDArray[np.uint8]:
        """Pixels of the drawing, [height, width, 3]."""
        top, bottom = (np.array(colour, np.float64) for colour in self.background)
        ramp = np.linspace(0, 1, self.height)[:, None, None]
        image: NDArray[np.uint8] = np.empty((self.height, self.width, 3), np.uint8)
        image[:] = np.rint(top + (bottom - top) * ramp)
        for shape in self.shapes:
            reach = 1.3 * shape.radius
            left = max(0, int(shape.x - reach))
            upper = max(0, int(shape.y - reach))
            part = image[upper : int(shape.y + reach) + 1, left : int(shape.x + reach) + 1]
            rows, columns = np.mgrid[0 : part.shape[0], 0 : part.shape[1]] + 0.5
            part[_covers(shape, columns + left, rows + upper)] = shape.rgb
        return image


def counted(number: int, name: str) -> str:
    """A number of things: "two red circles", "no crosses"."""
    return f"{NUMBERS[number]} {name if number == 1 else plural(name)}"


def plural(name: str) -> str:
    """Plural of a kind's name."""
    return f"{name}es" if name.endswith("s") else f"{name}s"


def draw(random: Random, *, held_out: bool | None = None) -> Drawing:
    """A drawing, any or only such that is (not) held out."""
    while True:
        contents = _contents(random)
        if (
            held_out in (None, _is_held_out(_in_words(_groups(contents))))
            and (drawing := _draw(random, contents)) is not None
        ):
            return drawing


def scatter(random: Random) -> Drawing:
    """A drawing of the most shapes, each of any kind and one of three colours."""
    while True:
        palette = random.sample(tuple(COLOURS), 3)
        contents = [(random.choice(palette), random.choice(KINDS)) for _ in range(MOST)]
        if (drawing := _draw(random, contents)) is not None and not drawing.is_held_out:
            return drawing


def _draw(random: Random, contents: list[tuple[str, str]]) -> Drawing | None:
    side = random.choice((48, 64, 80, 96, 128, 160))
    width, height = (round(side * random.uniform(0.86, 1.16)) for _ in range(2))
    while (shapes := _place(random, contents, width, height)) is None:
        pass
    background = _background(random, shapes)
    return None if background is None else Drawing(width, height, background, shapes)


def _groups(contents: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
    found = Counter(contents)
    return {
        (colour, kind): found[colour, kind]
        for colour in COLOURS
        for kind in KINDS
        if (colour, kind) in found
    }


def _in_words(groups: dict[tuple[str, str], int]) -> str:
    parts = [counted(number, f"{colour} {kind}") for (colour, kind), number in groups.items()] or [
        counted(0, "shape")
    ]
    text = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"{text[0].upper()}{text[1:]}."


def _is_held_out(content: str) -> bool:
    return zlib.crc32(content.encode()) % _HELD_OUT == 0


def _contents(random: Random) -> list[tuple[str, str]]:
    """Colours and kinds: a few groups of shapes that are alike."""
    total = random.choices(range(MOST + 1), (1, 6, 6, 6, 6, 6))[0]
    groups = random.choices((1, 2, 3), (4, 5, 1))[0]
    looks = [(random.choice(tuple(COLOURS)), random.choice(KINDS)) for _ in range(groups)]
    if (
        groups > 1 and random.random() < 0.3
    ):  # alike but for one thing, so that neither the colour nor the kind tells them apart
        colour, kind = looks[0]
        looks[1] = random.choice([(colour, looks[1][1]), (looks[1][0], kind)])
    return (looks + [random.choice(looks) for _ in range(MOST)])[:total]


def _place(
    random: Random, contents: list[tuple[str, str]], width: int, height: int
) -> tuple[Shape, ...] | None:
    """Find a place for each shape, or None where there is none. The more there are, the smaller
    they are."""
    low, high = _SIZES[len(contents)]
    shades = {colour: random.random() for colour, _ in contents}
    shapes: list[Shape] = []
    for colour, kind in contents:
        for _ in range(20):
            radius = min(width, height) * random.uniform(low, high)
            edge = _MARGIN * radius
            x = random.uniform(edge, width - edge)
            y = random.uniform(edge, height - edge)
            if all(
                math.hypot(x - other.x, y - other.y) > _MARGIN * (radius + other.radius)
                for other in shapes
            ):
                angle = random.uniform(-0.12, 0.12)
                shapes.append(
                    Shape(kind, colour, _shade(random, colour, shades[colour]), x, y, radius, angle)
                )
                break
        else:
            return None
    return tuple(shapes)


def _shade(random: Random, colour: str, share: float) -> _Colour:
    first, last = COLOURS[colour]
    red, green, blue = (
        min(255, max(0, round(a + (b - a) * share + random.uniform(-8, 8))))
        for a, b in zip(first, last, strict=True)
    )
    return red, green, blue


def _background(random: Random, shapes: tuple[Shape, ...]) -> tuple[_Colour, _Colour] | None:
    """One colour, or two that are near, away from the colours of all shapes; None where none was
    found."""
    for _ in range(30):
        low, high = random.choices(((195, 255), (0, 70), (0, 255)), (6, 2, 2))[0]
        red, green, blue = (random.randint(low, high) for _ in range(3))
        shift = random.choice((0, 0, random.randint(-40, 40)))
        other = tuple(min(255, max(0, value + shift)) for value in (red, green, blue))
        if all(
            math.dist(shape.rgb, colour) > _CONTRAST
            for shape in shapes
            for colour in ((red, green, blue), other)
        ):
            return (red, green, blue), (other[0], other[1], other[2])
    return None


def _covers(shape: Shape, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which points lie inside a shape."""
    if shape.kind == "circle":
        inside: NDArray[np.bool_] = (x - shape.x) ** 2 + (y - shape.y) ** 2 < shape.radius**2
        return inside
    inside = np.zeros(x.shape, np.bool_)
    corners = shape.corners()
    for (x1, y1), (x2, y2) in zip(corners, [*corners[1:], corners[0]], strict=True):
        if y1 != y2:  # a ray to the right crosses this edge
            inside ^= ((y1 > y) != (y2 > y)) & (x < (x2 - x1) * (y - y1) / (y2 - y1) + x1)
    return inside
