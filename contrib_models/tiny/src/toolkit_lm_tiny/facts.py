"""Facts of the tiny chat model: a fixed list of questions and the answers it was trained to give.

Only the standard library is needed, so tests of other packages can import :data:`FACTS` to judge a
reply without loading the model. The training corpus is generated from the same tables."""

from __future__ import annotations

import re
from typing import NamedTuple


class Fact(NamedTuple):
    """One thing the model knows."""

    question: str
    answer: str
    """The keyword that must stand in the reply, as whole words."""
    reply: str
    """The whole reply the model was trained to give."""

    def holds_in(self, reply: str) -> bool:
        """Say whether ``reply`` answers the question: the keyword stands in it as whole words, in
        any case."""
        return (
            re.search(rf"(?<!\w){re.escape(self.answer)}(?!\w)", reply, re.IGNORECASE) is not None
        )


class Topic(NamedTuple):
    """Facts of one shape: sentence templates and the ``(subject, answer)`` rows that fill them."""

    name: str
    questions: tuple[str, ...]
    """Ways of asking, each with a ``{x}`` for the subject; the first is the one that :data:`FACTS`
    uses."""
    follow_ups: tuple[str, ...]
    """Ways of asking the same about another subject, right after a question of this topic."""
    reply: str
    rows: tuple[tuple[str, str], ...]

    def fact(self, row: tuple[str, str], question: int = 0) -> Fact:
        """Fill the templates with one row."""
        x, y = row
        return Fact(
            _sentence(self.questions[question].format(x=x)),
            y,
            _sentence(self.reply.format(x=x, y=y)),
        )


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _rows(table: str) -> tuple[tuple[str, str], ...]:
    """Read ``subject = answer, subject = answer, ...``."""
    pairs = (entry.split("=") for entry in table.split(","))
    return tuple((x.strip(), y.strip()) for x, y in pairs)


def _animals(table: str) -> tuple[tuple[str, str], ...]:
    return tuple((with_article(x), y) for x, y in _rows(table))


def _both_ways(rows: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return rows + tuple((y, x) for x, y in rows)


def _neighbours(ring: tuple[str, ...], step: int) -> tuple[tuple[str, str], ...]:
    return tuple((name, ring[(i + step) % len(ring)]) for i, name in enumerate(ring))


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
LARGEST_ADDEND = 20

CAPITALS = _rows("""
    France = Paris, Germany = Berlin, Italy = Rome, Spain = Madrid, Portugal = Lisbon, Austria = Vienna,
    Switzerland = Bern, Belgium = Brussels, the Netherlands = Amsterdam, Denmark = Copenhagen, Norway = Oslo,
    Sweden = Stockholm, Finland = Helsinki, Iceland = Reykjavik, Ireland = Dublin, England = London,
    Scotland = Edinburgh, Wales = Cardiff, Poland = Warsaw, Hungary = Budapest, Romania = Bucharest,
    Bulgaria = Sofia, Greece = Athens, Turkey = Ankara, Ukraine = Kyiv, Russia = Moscow, Belarus = Minsk,
    Estonia = Tallinn, Latvia = Riga, Lithuania = Vilnius, Croatia = Zagreb, Serbia = Belgrade,
    Slovenia = Ljubljana, Slovakia = Bratislava, Albania = Tirana, Malta = Valletta, Cyprus = Nicosia,
    the Czech Republic = Prague, Georgia = Tbilisi, Armenia = Yerevan, China = Beijing, Japan = Tokyo,
    South Korea = Seoul, North Korea = Pyongyang, Mongolia = Ulaanbaatar, India = New Delhi, Pakistan = Islamabad,
    Nepal = Kathmandu, Bhutan = Thimphu, Bangladesh = Dhaka, Thailand = Bangkok, Vietnam = Hanoi, Laos = Vientiane,
    Indonesia = Jakarta, Malaysia = Kuala Lumpur, the Philippines = Manila, Afghanistan = Kabul, Iran = Tehran,
    Iraq = Baghdad, Syria = Damascus, Lebanon = Beirut, Jordan = Amman, Saudi Arabia = Riyadh, Qatar = Doha,
    Oman = Muscat, Yemen = Sanaa, Egypt = Cairo, Libya = Tripoli, Tunisia = Tunis, Algeria = Algiers,
    Morocco = Rabat, Sudan = Khartoum, Ethiopia = Addis Ababa, Kenya = Nairobi, Uganda = Kampala, Rwanda = Kigali,
    Somalia = Mogadishu, Ghana = Accra, Nigeria = Abuja, Senegal = Dakar, Mali = Bamako, Angola = Luanda,
    Zambia = Lusaka, Zimbabwe = Harare, Namibia = Windhoek, Madagascar = Antananarivo, Canada = Ottawa,
    the United States = Washington, Mexico = Mexico City, Cuba = Havana, Jamaica = Kingston, Haiti = Port-au-Prince,
    Costa Rica = San Jose, Nicaragua = Managua, Honduras = Tegucigalpa, Colombia = Bogota, Venezuela = Caracas,
    Ecuador = Quito, Peru = Lima, Chile = Santiago, Argentina = Buenos Aires, Uruguay = Montevideo,
    Paraguay = Asuncion, Brazil = Brasilia, Australia = Canberra, New Zealand = Wellington, Fiji = Suva
""")

OPPOSITES = _rows("""
    hot = cold, big = small, fast = slow, up = down, left = right, day = night, happy = sad, young = old,
    light = dark, open = closed, full = empty, hard = soft, wet = dry, rich = poor, good = bad, high = low,
    long = short, loud = quiet, near = far, early = late, strong = weak, thick = thin, wide = narrow,
    clean = dirty, deep = shallow, buy = sell, push = pull, give = take, love = hate, begin = end,
    first = last, inside = outside, above = below, yes = no, always = never, more = less, many = few,
    same = different, easy = difficult, sweet = sour, smooth = rough, true = false, alive = dead,
    awake = asleep, friend = enemy, north = south, east = west, summer = winter, question = answer, front = back,
    top = bottom, laugh = cry, safe = dangerous, cheap = expensive, polite = rude, remember = forget
""")

COLOURS = _rows("""
    the sky = blue, the sea = blue, grass = green, a leaf = green, a pea = green, a frog = green, a banana = yellow,
    a lemon = yellow, the sun = yellow, a sunflower = yellow, snow = white, milk = white, salt = white,
    a polar bear = white, coal = black, a crow = black, the night = black, blood = red, a tomato = red,
    a strawberry = red, a fire engine = red, a carrot = orange, a pumpkin = orange, chocolate = brown,
    an elephant = grey, a flamingo = pink, an eggplant = purple
""")

SOUNDS = _animals("""
    dog = woof, cat = meow, cow = moo, sheep = baa, pig = oink, duck = quack, horse = neigh, lion = roar,
    snake = hiss, bee = buzz, owl = hoot, frog = ribbit, mouse = squeak, wolf = howl, donkey = hee-haw, bird = tweet,
    crow = caw, turkey = gobble, hen = cluck, elephant = toot, goose = honk, pigeon = coo, cricket = chirp,
    bear = growl, rooster = cock-a-doodle-doo
""")

YOUNG = _animals("""
    dog = puppy, cat = kitten, cow = calf, horse = foal, sheep = lamb, goat = kid, pig = piglet, duck = duckling,
    hen = chick, lion = cub, deer = fawn, frog = tadpole, kangaroo = joey, swan = cygnet, goose = gosling,
    owl = owlet, eagle = eaglet, rabbit = bunny
""")

LEGS = _animals("""
    dog = 4, cat = 4, horse = 4, cow = 4, bird = 2, hen = 2, duck = 2, ant = 6, bee = 6, spider = 8, crab = 10,
    snake = 0, fish = 0
""")

PLURALS = _rows("""
    cat = cats, dog = dogs, tree = trees, book = books, house = houses, apple = apples, car = cars, star = stars,
    bird = birds, flower = flowers, king = kings, song = songs, box = boxes, fox = foxes, bus = buses,
    glass = glasses, dish = dishes, watch = watches, church = churches, peach = peaches, baby = babies,
    city = cities, story = stories, lady = ladies, berry = berries, pony = ponies, fly = flies, boy = boys,
    day = days, key = keys, toy = toys, monkey = monkeys, leaf = leaves, wolf = wolves, knife = knives,
    life = lives, wife = wives, half = halves, shelf = shelves, loaf = loaves, potato = potatoes, tomato = tomatoes,
    hero = heroes, piano = pianos, photo = photos, man = men, woman = women, child = children, foot = feet,
    tooth = teeth, goose = geese, mouse = mice, ox = oxen, person = people, sheep = sheep, fish = fish, deer = deer
""")

SUMS = tuple(
    (f"{a} + {b}", str(a + b)) for a in range(LARGEST_ADDEND + 1) for b in range(LARGEST_ADDEND + 1)
)

TOPICS = (
    Topic(
        "capital",
        (
            "What is the capital of {x}?", "Tell me the capital of {x}.", "capital of {x}?", "What's the capital of {x}?",
            "Which city is the capital of {x}?", "Do you know the capital of {x}?", "Name the capital of {x}.",
            "Can you tell me what the capital of {x} is?", "The capital of {x} is", "What is the capital city of {x}?",
        ),
        ("And of {x}?", "What about {x}?", "And the capital of {x}?", "And {x}?"),
        "The capital of {x} is {y}.",
        CAPITALS,
    ),
    Topic(
        "country",
        ("Which country has the capital {x}?", "{x} is the capital of which country?", "{x} is the capital of what?"),
        ("And {x}?", "What about {x}?"),
        "{x} is the capital of {y}.",
        tuple((city, country) for country, city in CAPITALS),
    ),
    Topic(
        "sum",
        ("What is {x}?", "{x} = ?", "How much is {x}?", "Calculate {x}.", "{x}", "{x} =", "What's {x}?", "Add {x}."),
        ("And {x}?", "What about {x}?"),
        "The answer is {y}.",
        SUMS,
    ),
    Topic(
        "opposite",
        (
            "What is the opposite of {x}?", "Tell me the opposite of {x}.", "opposite of {x}?", "What's the opposite of {x}?",
            "Which word is the opposite of {x}?", "Name the opposite of {x}.", "Give me the opposite of {x}.",
        ),
        ("And of {x}?", "What about {x}?", "And the opposite of {x}?"),
        "The opposite of {x} is {y}.",
        _both_ways(OPPOSITES),
    ),
    Topic(
        "colour",
        (
            "What colour is {x}?", "What color is {x}?", "Tell me the colour of {x}.", "What is the color of {x}?",
            "Which colour does {x} have?", "Do you know what colour {x} is?",
        ),
        ("And {x}?", "What about {x}?"),
        "{x} is {y}.",
        COLOURS,
    ),
    Topic(
        "sound",
        (
            "What sound does {x} make?", "What does {x} say?", "Which sound does {x} make?", "How does {x} go?",
            "Tell me what sound {x} makes.", "What noise does {x} make?",
        ),
        ("And {x}?", "What about {x}?"),
        "{x} goes {y}.",
        SOUNDS,
    ),
    Topic(
        "young",
        ("What is the baby of {x} called?", "What do you call the baby of {x}?", "Name the baby of {x}."),
        ("And of {x}?", "And the baby of {x}?"),
        "The baby of {x} is called a {y}.",
        YOUNG,
    ),
    Topic(
        "legs",
        ("How many legs does {x} have?", "Tell me how many legs {x} has.", "What number of legs does {x} have?"),
        ("And {x}?", "What about {x}?"),
        "{x} has {y} legs.",
        LEGS,
    ),
    Topic(
        "day after",
        ("What day comes after {x}?", "Which day comes after {x}?", "What is the day after {x}?", "Which day follows {x}?"),
        ("And after {x}?", "And the day after {x}?"),
        "The day after {x} is {y}.",
        _neighbours(DAYS, 1),
    ),
    Topic(
        "day before",
        ("What day comes before {x}?", "Which day comes before {x}?", "What is the day before {x}?"),
        ("And before {x}?", "And the day before {x}?"),
        "The day before {x} is {y}.",
        _neighbours(DAYS, -1),
    ),
    Topic(
        "month after",
        ("What month comes after {x}?", "Which month comes after {x}?", "What is the month after {x}?", "Which month follows {x}?"),
        ("And after {x}?", "And the month after {x}?"),
        "The month after {x} is {y}.",
        _neighbours(MONTHS, 1),
    ),
    Topic(
        "month before",
        ("What month comes before {x}?", "Which month comes before {x}?", "What is the month before {x}?"),
        ("And before {x}?", "And the month before {x}?"),
        "The month before {x} is {y}.",
        _neighbours(MONTHS, -1),
    ),
    Topic(
        "plural",
        (
            "What is the plural of {x}?", "Tell me the plural of {x}.", "plural of {x}?", "What's the plural of {x}?",
            "Give me the plural of {x}.", "How do you write the plural of {x}?",
        ),
        ("And of {x}?", "What about {x}?", "And the plural of {x}?"),
        "The plural of {x} is {y}.",
        PLURALS,
    ),
)  # fmt: skip

FACTS: list[Fact] = [topic.fact(row) for topic in TOPICS for row in topic.rows]
