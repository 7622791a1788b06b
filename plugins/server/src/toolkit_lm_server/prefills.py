"""Beginnings of answers, which the last message of a conversation may give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit_lm.errors import RequestError

MARKS = ("prefix", "partial")
"""Fields of a message that mark it as the beginning of the answer: Mistral's and DeepSeek's,
Moonshot's and Qwen's."""

Message = dict[str, Any]


def prefilled(
    conversations: Sequence[list[Message]], options: dict[str, Any]
) -> tuple[list[list[Message]], dict[str, Any]]:
    """Conversations without the marks of their messages, and the options of rendering. A marked
    last message is continued, as by continue_final_message.

    Raises RequestError for a mark on another message, and where only some conversations have one.
    """
    marked = [_is_marked(messages) for messages in conversations]
    if not any(marked):
        return [*conversations], options
    if not all(marked):
        raise RequestError(
            "prefix: either all conversations of a request end with a message that is marked so, "
            "or none.",
            "messages",
        )
    bare = [[*messages[:-1], _bare(messages[-1])] for messages in conversations]
    return bare, {**options, "continue_final_message": True}


def _is_marked(messages: Sequence[Any]) -> bool:
    """Whether the last message is marked."""
    for place, message in enumerate(messages):
        name = next((name for name in MARKS if _has(message, name)), None)
        if name is None:
            continue
        if place + 1 < len(messages) or message.get("role") != "assistant":
            raise RequestError(
                f"messages[{place}].{name} marks the beginning of the answer: only a last message, "
                "of the role assistant, may have it.",
                "messages",
            )
        return True
    return False


def _has(message: Any, name: str) -> bool:
    return isinstance(message, dict) and message.get(name) is True


def _bare(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in MARKS}
