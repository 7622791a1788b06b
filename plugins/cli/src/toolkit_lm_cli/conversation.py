"""A conversation: what was said, and what will be said next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from toolkit_lm.errors import RequestError, in_plain_words

from toolkit_lm_cli.attachments import question

_MOST = 64 * 2**20
"""Bytes of a saved conversation."""


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class Conversation:
    """The messages so far: the system's, then questions and answers. What is attached waits for the
    next question."""

    def __init__(self, system: str | None = None, attached: Sequence[dict[str, Any]] = ()) -> None:
        self.system = system
        self.turns: list[dict[str, Any]] = []
        self.attached = list(attached)
        """Content parts: images and recordings."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, text: str) -> list[dict[str, Any]]:
        """The messages with a question at their end, which is not part of the conversation before
        it is answered."""
        return [*self.messages, question(text, self.attached)]

    def add(self, asked: dict[str, Any], answer: str) -> None:
        """A question that was answered, and its answer."""
        self.turns += [asked, {"role": "assistant", "content": answer}]
        self.attached = []

    def undo(self) -> dict[str, Any]:
        """Takes the last question back, and all that was said to it. Raises RequestError where
        there is none."""
        for number in reversed(range(len(self.turns))):
            if self.turns[number]["role"] == "user":
                asked = self.turns[number]
                del self.turns[number:]
                return asked
        raise RequestError("nothing was asked so far.")

    def clear(self) -> None:
        self.turns = []
        self.attached = []

    def save(self, path: Path, *, replace: bool = False) -> None:
        """Writes the messages as JSON. Raises RequestError where it cannot, or the file is there
        and may not be replaced."""
        try:
            with path.open("w" if replace else "x", encoding="utf-8") as file:
                json.dump({"messages": self.messages}, file, indent=1, ensure_ascii=False)
                file.write("\n")
        except FileExistsError:
            raise RequestError(f"{str(path)!r} is there already: /save! replaces it.") from None
        except OSError as error:
            raise RequestError(f"{str(path)!r} cannot be written: {error.strerror}.") from None

    def load(self, path: Path) -> None:
        """Reads messages: those that `save` wrote, or a bare list. Raises RequestError, and then
        nothing has changed."""
        messages: Any = None
        try:
            with path.open("rb") as file:
                data = file.read(_MOST + 1)
            if len(data) > _MOST:
                raise RequestError(f"{str(path)!r} has more than {_MOST} bytes.")
            decoded = msgspec.json.decode(data)
            messages = decoded.get("messages") if isinstance(decoded, dict) else decoded
            msgspec.convert(messages, list[_Message])
        except OSError as error:
            raise RequestError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            wrong = in_plain_words(error, "messages", messages)
            raise RequestError(f"{str(path)!r} is not a saved conversation. {wrong}") from None
        is_system = (
            bool(messages)
            and messages[0]["role"] == "system"
            and isinstance(messages[0].get("content"), str)
        )
        self.system = messages[0]["content"] if is_system else None
        self.turns = messages[is_system:]
        self.attached = []
