"""Text by an alphabet: a token for each character of it, and UTF-8 bytes for all others.

The file letters.json of a checkpoint holds the alphabet. Token 0 ends a sequence, tokens 1 to 256
are bytes, and the letters follow in the order of the file.
"""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.prompts import Conversation, SingletonPrompt, parse_prompt
from toolkit_lm.renderer import DecodeStream, Rendered, Renderer

FILE = "letters.json"
END = 0
END_TEXT = "<end>"
FIRST_BYTE = 1
FIRST_LETTER = FIRST_BYTE + 256


class LettersStream(DecodeStream):
    """Holds back the bytes of an unfinished character."""

    def __init__(self, letters: Sequence[str], skip_special_tokens: bool) -> None:
        self.letters = letters
        self.skip_special_tokens = skip_special_tokens
        self.bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self.text(token_id) for token_id in token_ids)

    def flush(self) -> str:
        text = self.bytes.decode(b"", final=True)
        self.bytes.reset()
        return text

    def text(self, token_id: int) -> str:
        """Text that a token adds."""
        if FIRST_BYTE <= token_id < FIRST_LETTER:
            return self.bytes.decode(bytes([token_id - FIRST_BYTE]))
        if token_id == END:
            return "" if self.skip_special_tokens else self.flush() + END_TEXT
        return self.flush() + self.letters[token_id - FIRST_LETTER]


class LettersRenderer(Renderer):
    """A conversation is a line "role> content" for each message."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.letters = read_letters(file_of(config))
        self.ids = {letter: FIRST_LETTER + i for i, letter in enumerate(self.letters)}

    @classmethod
    def refuses(cls, config: VllmConfig) -> str | None:
        try:
            read_letters(file_of(config))
        except CheckpointError as error:
            return str(error)
        return None

    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        if not messages:
            raise RequestError("a conversation needs a message.", "messages")
        lines = []
        for message in messages:
            role = message.get("role")
            content = message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise RequestError("role and content of a message must be texts.", "messages")
            lines.append(f"{role}> {content}\n")
        if kwargs.get("add_generation_prompt", True):
            lines.append("assistant> ")
        return self.render_prompt("".join(lines))

    def render_prompt(
        self, prompt: SingletonPrompt, *, add_special_tokens: bool = True
    ) -> Rendered:
        parsed = parse_prompt(prompt)
        stated = parsed.get("prompt_token_ids")
        token_ids = self.encode(parsed["prompt"]) if stated is None else cast(list[int], stated)
        if not token_ids:
            raise RequestError("the prompt is empty.", "prompt")
        return Rendered(token_ids)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Raises RequestError for half a character."""
        token_ids: list[int] = []
        for place, character in enumerate(text):
            if (letter := self.ids.get(character)) is not None:
                token_ids.append(letter)
                continue
            try:
                token_ids += [FIRST_BYTE + byte for byte in character.encode()]
            except UnicodeEncodeError:
                reason = f"the prompt is no valid text: half a character at position {place}."
                raise RequestError(reason, "prompt") from None
        return token_ids

    def decode_stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        return LettersStream(self.letters, skip_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        stream = LettersStream(self.letters, skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self.decode([token_id]) for token_id in token_ids]

    @property
    def vocab_size(self) -> int:
        return FIRST_LETTER + len(self.letters)

    @property
    def eos_token_ids(self) -> list[int]:
        return [END]


def file_of(config: VllmConfig) -> Path:
    """Path of a checkpoint's alphabet file."""
    assert config.checkpoint is not None, "a renderer is asked about a checkpoint"
    return Path(config.checkpoint.path) / FILE


def read_letters(path: Path) -> list[str]:
    """The alphabet in a file. Raises CheckpointError."""
    try:
        letters = json.loads(path.read_text(encoding="utf-8"))["letters"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path.name} holds no alphabet: {error!r}.") from None
    is_list = isinstance(letters, list) and all(isinstance(letter, str) for letter in letters)
    if (
        not is_list
        or any(len(letter) != 1 for letter in letters)
        or len({*letters}) != len(letters)
    ):
        raise CheckpointError(f"{path.name}: 'letters' must be characters, each of them once.")
    return list(letters)
