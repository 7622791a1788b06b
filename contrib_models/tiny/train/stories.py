"""A small grammar of short stories: an opening that brings a hero in, and one of several plots."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from toolkit_lm_tiny.facts import with_article

FEMALE_NAMES = (
    "Anna", "Lily", "Mia", "Emma", "Sara", "Lucy", "Nora", "Zoe", "Ella", "Rosa", "Ida", "Kate", "Maya", "Ruby",
    "Alice", "Julia", "Clara", "Jane", "Olivia", "Sophie",
)  # fmt: skip
MALE_NAMES = (
    "Max", "Tom", "Ben", "Sam", "Leo", "Tim", "Jack", "Paul", "Oscar", "Finn", "Hugo", "Adam", "Peter", "John",
    "Felix", "David", "Mark", "Noah", "Henry", "Bob",
)  # fmt: skip
NAMES = FEMALE_NAMES + MALE_NAMES

ANIMALS = (
    "dog", "cat", "bird", "fox", "rabbit", "bear", "mouse", "horse", "duck", "frog", "pig", "cow", "owl", "lion",
    "elephant", "monkey", "turtle", "sheep", "fish", "wolf", "dragon", "robot", "hen", "goat", "tiger", "bee",
)  # fmt: skip
WOMEN = ("girl", "queen", "princess", "woman")
MEN = ("boy", "king", "prince", "man")
HEROES = ANIMALS + WOMEN + MEN

ADJECTIVES = (
    "small",
    "kind",
    "brave",
    "happy",
    "clever",
    "shy",
    "young",
    "old",
    "lazy",
    "friendly",
)

OPENINGS = (
    "Once upon a time there was {a_adj} {hero} named {name}.",
    "Once upon a time, {a_adj} {hero} named {name} lived {home}.",
    "Once there was {a_adj} {hero} named {name} who lived {home}.",
    "There once was {a_hero} named {name}. {He} was very {adj}.",
)

PLOTS = (
    "One day {name} lost {his} {toy}. {He} looked everywhere but could not find it. Then a "
    "{friend} named {other} came "
    "to help. They found the {toy} {hidden}, and {name} was happy again.",
    "{name} was lonely and wanted a friend. One {time} {he} met a {friend} named {other}. They "
    "played with a {toy} all "
    "day. From then on, {name} and {other} were best friends.",
    "One {time} {name} was very hungry. {He} walked {away} and found some {food}. On the way "
    "home {he} met a hungry "
    "{friend}. {name} shared the {food}, and they both ate until they were full.",
    "{name} was afraid of {fear}. One night a {friend} named {other} sat next to {him} and sang "
    "a song. After that, "
    "{name} was not afraid any more.",
    "{name} wanted to learn how to {skill}. Every {time} {he} practised with {other} the "
    "{friend}. It was hard, but "
    "{he} did not give up. At last {name} could {skill}, and everyone was proud of {him}.",
    "One {time} a little {friend} fell into the river. {name} heard a cry and ran to help. {He} "
    "pulled the {friend} "
    'out of the water. "Thank you, {name}!" said the {friend}.',
    "One {time} {name} went {away} and got lost. {He} asked a {friend} for the way. The {friend} "
    "was kind and took "
    "{him} home. {name} gave the {friend} some {food} to say thank you.",
    (
        "It was {name}'s birthday. {His} friend {other} the {friend} gave {him} a {toy}. {name} "
        'smiled and said, "This is the best day ever!"'
    ),
)

FILLERS: dict[str, tuple[str, ...]] = {
    "home": (
        "in a forest",
        "in a small house",
        "on a farm",
        "near the sea",
        "in a big garden",
        "in a little village",
    ),
    "away": ("into the forest", "to the river", "up the hill", "to the market", "into the garden"),
    "toy": (
        "red ball",
        "blue hat",
        "golden key",
        "little drum",
        "kite",
        "green book",
        "wooden boat",
    ),
    "hidden": (
        "under a tree",
        "behind a big stone",
        "in the tall grass",
        "under the bed",
        "near the river",
    ),
    "time": ("morning", "day", "evening", "summer day"),
    "food": ("apples", "berries", "bread", "cheese", "cake", "soup", "honey"),
    "fear": ("the dark", "the rain", "the wind", "loud noises", "deep water"),
    "skill": ("swim", "dance", "sing", "paint", "read", "cook", "jump very high"),
}

REQUESTS = (
    "Tell me a story about {x}.", "Tell me a short story about {x}.", "Can you tell me a story about {x}?",
    "Write a story about {x}.", "I want to hear a story about {x}.", "Please tell me a story about {x}.",
    "Write a short story about {x}.", "A story about {x}, please.",
)  # fmt: skip
OPEN_REQUESTS = (
    "Tell me a story.", "Tell me another story.", "Can you tell me a story?", "Write a story.", "Tell me a short story.",
    "I want to hear a story.", "Please tell me a story.", "One more story, please.", "Another story, please.",
)  # fmt: skip


class Story(NamedTuple):
    """A story and a request that it answers."""

    request: str
    text: str


def tell(rng: Random) -> Story:
    """Make up a story; the request names its hero, the hero's friend, the hero's name, or none of
    these."""
    hero, friend = rng.sample(HEROES, 2)
    female = hero in WOMEN or (hero not in MEN and rng.random() < 0.5)
    name = rng.choice(FEMALE_NAMES if female else MALE_NAMES)
    adjective = rng.choice(ADJECTIVES)
    he, his, him = ("she", "her", "her") if female else ("he", "his", "him")
    slots = {key: rng.choice(values) for key, values in FILLERS.items()} | {
        "hero": hero, "a_hero": with_article(hero), "name": name, "adj": adjective, "a_adj": with_article(adjective),
        "friend": friend, "other": rng.choice([other for other in NAMES if other != name]),
        "he": he, "He": he.capitalize(), "his": his, "His": his.capitalize(), "him": him,
    }  # fmt: skip
    plot = rng.choice(PLOTS).replace("a {friend}", with_article(friend))
    text = f"{rng.choice(OPENINGS)} {plot}".format_map(slots)
    return Story(_request(rng, hero, friend, name), text)


def _request(rng: Random, hero: str, friend: str, name: str) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(OPEN_REQUESTS)
    subject = with_article(hero)
    if kind < 0.35:
        subject += f" and {with_article(friend)}"
    elif kind < 0.5:
        subject += f" named {name}"
    return rng.choice(REQUESTS).format(x=subject)
