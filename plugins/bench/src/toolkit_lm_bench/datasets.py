"""Prompts to send: random ones, and those of files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit_lm.errors import ConfigError

from toolkit_lm_bench.options import DatasetOptions

SEED_STRIDE = 1_000_003
"""Between the seeds of prompts of two seeds that a user may give. Runs and loads have one of their
own each."""
_OUTPUT_LEN = 128
_CHARACTERS_PER_TOKEN = 4
"""Characters per token of English text, roughly. Files hold texts, and the client has no
tokenizer."""
_WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "hand",
)
"""Words of one token in most vocabularies."""


@dataclass(frozen=True)
class Prompt:
    """One request."""

    content: str | list[int]
    """A text, or token ids."""
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """Number of token ids; 0 for a text, whose tokens are not counted."""
        return 0 if isinstance(self.content, str) else len(self.content)

    @property
    def text(self) -> str:
        """For a server that takes no token ids: a word for each, so that the length is about
        right."""
        if isinstance(self.content, str):
            return self.content
        return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in self.content)


@dataclass(frozen=True)
class Conversation:
    """Several requests, one for each user turn: it waits for the answer before, and has all that
    was said in its prompt."""

    messages: list[dict[str, Any]]
    """Without the answers."""
    max_tokens: int


Work = Prompt | Conversation


def make_works(options: DatasetOptions, seed: int) -> list[Work]:
    """`num_prompts` of a dataset, another choice for another seed. Raises ConfigError."""
    return _DATASETS[options.dataset](options, random.Random(seed))  # nosec B311 # no secret


def _random(options: DatasetOptions, rng: random.Random) -> list[Work]:
    return [
        Prompt(_token_ids(options.input_len, options, rng), _output_len(options))
        for _ in range(options.num_prompts)
    ]


def _shared_prefix(options: DatasetOptions, rng: random.Random) -> list[Work]:
    prefix = _token_ids(options.prefix_len, options, rng)
    return [
        Prompt(prefix + _token_ids(options.input_len, options, rng), _output_len(options))
        for _ in range(options.num_prompts)
    ]


def _conversations(options: DatasetOptions, rng: random.Random) -> list[Work]:
    path = _path(options)
    found: list[Work] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            where = f"line {number} of {str(path)!r}"
            row = _parse(line, where)
            turns = [message for message in _messages(row, where) if message["role"] != "assistant"]
            if not any(message["role"] == "user" for message in turns):
                raise ConfigError(
                    f"option 'dataset_path': {where} is a conversation without a user's message."
                )
            found.append(Conversation(turns, _output_len(options)))
    return _choose(found, options, rng, path)


def _sharegpt(options: DatasetOptions, rng: random.Random) -> list[Work]:
    path = _path(options)
    rows = _parse(_read(path), repr(str(path)))
    if not isinstance(rows, list):
        raise ConfigError(
            f"option 'dataset_path': {str(path)!r} is not in ShareGPT's format: it holds no list "
            "of conversations."
        )
    return _choose(list(_sharegpt_prompts(rows, options, path)), options, rng, path)


def _sharegpt_prompts(rows: list[Any], options: DatasetOptions, path: Path) -> Iterator[Work]:
    """The first question of each conversation that has an answer."""
    for index, row in enumerate(rows):
        try:
            turns = [str(turn["value"]) for turn in row["conversations"][:2]]
        except (LookupError, TypeError):
            message = (
                f"option 'dataset_path': item {index} of {str(path)!r} is not in ShareGPT's "
                "format: conversations, each turn with value."
            )
            raise ConfigError(message) from None
        if len(turns) == 2 and all(turns):
            yield Prompt(turns[0], options.output_len or -(-len(turns[1]) // _CHARACTERS_PER_TOKEN))


_DATASETS: dict[str, Callable[[DatasetOptions, random.Random], list[Work]]] = {
    "random": _random,
    "shared-prefix": _shared_prefix,
    "conversation": _conversations,
    "sharegpt": _sharegpt,
}


def _token_ids(count: int, options: DatasetOptions, rng: random.Random) -> list[int]:
    # The first tokens of a vocabulary are often special ones.
    return [rng.randrange(options.vocab_size // 10, options.vocab_size) for _ in range(count)]


def _output_len(options: DatasetOptions) -> int:
    return options.output_len or _OUTPUT_LEN


def _choose(
    found: list[Work], options: DatasetOptions, rng: random.Random, path: Path
) -> list[Work]:
    if len(found) < options.num_prompts:
        message = (
            f"option 'num_prompts': {str(path)!r} has {len(found)} prompts, and "
            f"{options.num_prompts} are asked for."
        )
        raise ConfigError(
            f"{message} None is sent twice: it would be in the server's prefix cache."
        )
    return rng.sample(found, options.num_prompts)


def _path(options: DatasetOptions) -> Path:
    if options.dataset_path is None:
        raise ConfigError(f"option 'dataset_path': the dataset {options.dataset!r} needs a file.")
    return Path(options.dataset_path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"option 'dataset_path': {str(path)!r} cannot be read: {error}"
        ) from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"option 'dataset_path': {where} is not JSON: {error}") from None


def _messages(row: Any, where: str) -> list[dict[str, Any]]:
    """Messages of an object with messages, or of a list of them."""
    messages = row.get("messages") if isinstance(row, dict) else row
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message and "content" in message
        for message in messages
    ):
        raise ConfigError(
            f"option 'dataset_path': {where} is not a conversation: give messages, each with "
            "role and content."
        )
    return messages
