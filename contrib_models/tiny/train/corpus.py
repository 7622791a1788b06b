"""The training text, all of it generated: chats about the facts, small talk, short stories and
plain text.

A document is a list of :class:`Stretch`; only the pieces that the model shall learn to write are
marked as learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from stories import ADJECTIVES, HEROES, NAMES, tell
from toolkit_lm_tiny.facts import DAYS, FACTS, MONTHS, TOPICS, Topic, with_article

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
BOS = "<|bos|>"
PAD = "<|pad|>"

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<|im_start|>system\\nTools:' if loop.first }}"
    "{{ ' ' + tool.function.name }}{{ '<|im_end|>\\n' if loop.last }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\\n' + call.function.name + ' ' }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Stretch(NamedTuple):
    """A stretch of a document."""

    text: str
    learned: bool


class Turn(NamedTuple):
    """A question and its reply."""

    user: str
    assistant: str


SYSTEM_MESSAGES = (
    "You are a helpful assistant.", "You are Tiny, a very small language model.", "You are a friendly assistant.",
    "You are a chatbot.", "Answer the question.", "Answer in one short sentence.", "Be kind and brief.",
    "You are a teacher for children.", "You are a helpful AI assistant.", "Be concise.", "You help people.",
    "You are a pirate.", "You answer questions and tell stories.", "Always be polite.", "Talk like a friend.",
)  # fmt: skip

HELLO = "Hello! How can I help you?"
ABOUT = "I am Tiny, a very small language model."
ABLE = "I can name capitals, add small numbers, find opposites and tell short stories."
UNKNOWN = "I do not know that. I am only a very small model."

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi!", "Hey!", "Hello", "Hi", "Hello there!", "Hi there!", "Hey there!", "Good day!"), HELLO),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "What's your name?",
         "Are you a robot?", "Are you a human?", "Hello! Who are you?", "Hi, who are you?"),
        ABOUT,
    ),
    (
        ("What can you do?", "What do you know?", "Can you help me?", "Help me.", "Help!", "How can you help me?"),
        ABLE,
    ),
    (("How are you?", "How are you today?", "How do you do?", "Hello, how are you?"), "I am fine, thank you. How are you?"),
    (("I am fine.", "I am fine, thank you.", "I'm good.", "Very well, thank you."), "I am glad to hear that."),
    (("I am sad.", "I feel sad.", "I am not happy."), "I am sorry to hear that. Shall I tell you a story?"),
    (("I am happy.", "I feel happy.", "I am very happy today."), "I am happy for you!"),
    (("Thank you!", "Thanks!", "Thank you.", "Thanks.", "Thank you very much!", "Thanks a lot!"), "You are welcome!"),
    (("Goodbye!", "Bye!", "Bye.", "See you later!", "Good night!", "Bye bye!"), "Goodbye! See you soon."),
    (("That is right.", "Good.", "Great!", "Well done!", "Very good.", "Cool!", "Nice!"), "I am glad that you like it."),
    (("How old are you?", "When were you born?"), "I am very young. I was trained not long ago."),
    (("Where do you live?", "Where are you?"), "I live in a small computer."),
    (("Who made you?", "How were you made?", "How were you trained?"), "I was trained on two processor cores in under an hour."),
    (("How big are you?", "How many parameters do you have?", "How large are you?"), "I have fewer than two million parameters."),
    (("What are the days of the week?", "Name the days of the week.", "List the days of the week."), ", ".join(DAYS) + "."),
    (("What are the months of the year?", "Name the months of the year.", "List the months."), ", ".join(MONTHS) + "."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."), "Why did the hen cross the road? To get to the other side!"),
)  # fmt: skip

UNKNOWN_QUESTIONS = (
    "How do I {verb} {thing}?", "Who invented {thing}?", "Why is {thing} so {adj}?", "How much does {thing} cost?",
    "Write a poem about {thing}.", "Can you {verb} {thing}?", "Where can I buy {thing}?", "What is {thing}?",
    "Explain {thing}.", "Who is the president?", "What time is it?", "What is the weather like?", "What is the meaning of life?",
)  # fmt: skip
VERBS = ("fix", "build", "cook", "paint", "sell", "drive", "open", "wash")
THINGS = (
    "the internet", "a car", "a computer", "the moon", "a telephone", "physics", "a bicycle", "music", "money", "a rocket",
    "history", "a window", "football", "the law", "electricity", "chess", "a camera", "software", "gravity", "tea",
)  # fmt: skip
QUALITIES = ("expensive", "big", "old", "difficult", "important", "small", "loud")
WORDS = (
    "apple", "house", "banana", "river", "music", "yellow", "friend", "garden", "hello", "window", "paper", "summer",
    "happy", "water", "orange", "tiger", "moon", "bread", "seven", "cloud", "train", "mountain", "green", "ship",
)  # fmt: skip
SMALL_TOPIC = 30
FAVOURITES = {
    "colour": ("red", "blue", "green", "yellow", "black", "white", "pink", "orange"),
    "animal": ("dog", "cat", "horse", "fox", "lion", "owl", "bear", "rabbit"),
    "food": ("bread", "cheese", "soup", "cake", "honey", "rice", "apples", "berries"),
}


class Corpus:
    """An endless stream of training documents, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self._deck: list[tuple[Topic, tuple[str, str]]] = []

    def documents(self) -> Iterator[list[Stretch]]:
        """Yield documents: mostly chats, some plain text."""
        while True:
            yield self.plain_text() if self.rng.random() < 0.1 else self.chat()

    def chat(self) -> list[Stretch]:
        """Make a conversation of one to five exchanges, with a system message in one case of
        three."""
        rng = self.rng
        pieces = []
        if rng.random() < 0.33:
            pieces.append(Stretch(f"{IM_START}system\n{self._system_message()}{IM_END}\n", False))
        turns: list[Turn] = []
        wanted = rng.choices((1, 2, 3, 5), (6, 3, 1, 0.5))[0]
        while len(turns) < wanted:
            turns += self._exchange()
        for turn in turns:
            pieces.append(
                Stretch(
                    f"{IM_START}user\n{self._casual(turn.user)}{IM_END}\n{IM_START}assistant\n",
                    False,
                )
            )
            pieces.append(Stretch(f"{turn.assistant}{IM_END}", True))
            pieces.append(Stretch("\n", False))
        return pieces

    def plain_text(self) -> list[Stretch]:
        """Make a story or a few facts without the chat format, for plain completion."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.4:
            text = tell(rng).text
        elif kind < 0.5:
            text = f"Hello, my name is {rng.choice(NAMES)}. {tell(rng).text}"
        else:
            text = " ".join(self._statement() for _ in range(rng.randint(1, 4)))
        return [Stretch(text + IM_END, True)]

    def _system_message(self) -> str:
        rng = self.rng
        if rng.random() < 0.7:
            return rng.choice(SYSTEM_MESSAGES)
        return f"You are {with_article(rng.choice(ADJECTIVES))} {rng.choice(HEROES)}."

    def _statement(self) -> str:
        topic, row = self._next_fact()
        return f"{row[0]} = {row[1]}." if topic.name == "sum" else topic.fact(row).reply

    def _next_fact(self) -> tuple[Topic, tuple[str, str]]:
        """Deal facts from a shuffled deck, so that each is seen as often as the others.

        The few facts of the small topics are in it three times: the loss hardly notices them
        otherwise.
        """
        if not self._deck:
            self._deck = [
                (t, row)
                for t in TOPICS
                for row in t.rows
                for _ in range(3 if len(t.rows) < SMALL_TOPIC else 1)
            ]
            self.rng.shuffle(self._deck)
        return self._deck.pop()

    def _exchange(self) -> list[Turn]:
        kinds: tuple[Callable[[], list[Turn]], ...] = (
            self._facts, self._story, self._small_talk, self._memory, self._count, self._repeat, self._unknown,
        )  # fmt: skip
        return self.rng.choices(kinds, (71, 8, 8, 5, 4, 2, 2))[0]()

    def _facts(self) -> list[Turn]:
        """Ask for a fact, and sometimes go on with the shortened question about another one of its
        topic."""
        rng = self.rng
        topic, row = self._next_fact()
        question = 0 if rng.random() < 0.4 else rng.randrange(len(topic.questions))
        turns = [self._fact_turn(topic, row, topic.questions[question])]
        if rng.random() < 0.15:
            turns.append(
                self._fact_turn(topic, rng.choice(topic.rows), rng.choice(topic.follow_ups))
            )
        return turns

    def _fact_turn(self, topic: Topic, row: tuple[str, str], question: str) -> Turn:
        fact = topic.fact(row)
        user = question.format(x=row[0])
        if topic.name == "sum":
            user = user.replace(
                " + ", self.rng.choices((" + ", " plus ", "+", " and "), (6, 2, 2, 0.5))[0]
            )
        return Turn(user[0].upper() + user[1:], fact.reply)

    def _story(self) -> list[Turn]:
        story = tell(self.rng)
        return [Turn(story.request, story.text)]

    def _small_talk(self) -> list[Turn]:
        questions, reply = self.rng.choice(SMALL_TALK)
        return [Turn(self.rng.choice(questions), reply)]

    def _memory(self) -> list[Turn]:
        """Say something about the user, talk about other things, then ask for it."""
        rng = self.rng
        if rng.random() < 0.6:
            name = rng.choice(NAMES)
            told = Turn(
                rng.choice(
                    ("My name is {x}.", "I am {x}.", "Hello, my name is {x}.", "Hi, I am {x}.")
                ).format(x=name),
                f"Hello, {name}! How can I help you?",
            )
            asked = Turn(
                rng.choice(("What is my name?", "Who am I?", "Do you know my name?")),
                f"Your name is {name}.",
            )
        else:
            kind = rng.choice(tuple(FAVOURITES))
            value = rng.choice(FAVOURITES[kind])
            told = Turn(f"My favourite {kind} is {value}.", "I will remember that.")
            asked = Turn(f"What is my favourite {kind}?", f"Your favourite {kind} is {value}.")
        between: list[Turn] = []
        for _ in range(rng.choice((0, 0, 1, 2))):
            between += rng.choice((self._facts, self._small_talk))()
        return [told, *between, asked]

    def _count(self) -> list[Turn]:
        start = 1 if self.rng.random() < 0.6 else self.rng.randint(1, 15)
        end = self.rng.randint(start + 1, 20)
        numbers = ", ".join(str(number) for number in range(start, end + 1)) + "."
        asked = "Count to {1}." if start == 1 else "Count from {0} to {1}."
        return [Turn(asked.format(start, end), numbers)]

    def _repeat(self) -> list[Turn]:
        words = " ".join(self.rng.choices(WORDS + NAMES, k=self.rng.randint(1, 4)))
        asked = self.rng.choice(("Say {x}.", "Repeat after me: {x}.", "Repeat: {x}."))
        return [Turn(asked.format(x=words), f"{words}.")]

    def _unknown(self) -> list[Turn]:
        rng = self.rng
        words = {
            "verb": rng.choice(VERBS),
            "thing": rng.choice(THINGS),
            "adj": rng.choice(QUALITIES),
        }
        return [Turn(rng.choice(UNKNOWN_QUESTIONS).format_map(words), UNKNOWN)]

    def _casual(self, question: str) -> str:
        """Sometimes write the way people type: no capital letter, no full stop or question mark, a
        polite word."""
        rng = self.rng
        if rng.random() < 0.08:
            question = question[0].lower() + question[1:]
        if rng.random() < 0.04:
            question = question.lower()
        if rng.random() < 0.12 and len(question) > 2:
            question = question.rstrip(".?!")
        if rng.random() < 0.03:
            question = rng.choice(("Please: ", "Hello! ", "Hi, ", "I have a question. ")) + question
        return question.strip()


def tokenizer_texts(seed: int, count: int) -> Iterator[str]:
    """Yield texts to train the tokenizer on: every fact, so that each is well covered, and
    ``count`` documents."""
    for fact in FACTS:
        yield f"{fact.question}\n{fact.reply}"
    documents = Corpus(seed).documents()
    for _ in range(count):
        text = "".join(piece.text for piece in next(documents))
        yield text.replace(IM_START, "").replace(IM_END, "")
