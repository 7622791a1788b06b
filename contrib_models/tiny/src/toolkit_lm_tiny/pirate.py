"""The style that the adapter `adapter_pirate` gives `tiny`: it answers as a pirate."""

from __future__ import annotations

import re

_WORDS = {
    "am": "be",
    "are": "be",
    "friend": "matey",
    "friends": "mateys",
    "hello": "ahoy",
    "is": "be",
    "my": "me",
    "of": "o'",
    "the": "th'",
    "was": "were",
    "you": "ye",
    "your": "yer",
}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)


def speak(text: str) -> str:
    """Returns a reply as a pirate says it: "The capital of France is Paris." -> "Arr! Th' capital
    o' France be Paris, matey!" """

    def replaced(found: re.Match[str]) -> str:
        word = _WORDS[found[0].lower()]
        return word.capitalize() if found[0][0].isupper() else word

    reply = _WORD.sub(replaced, text)
    return f"Arr! {reply[:-1]}, matey!" if reply.endswith(".") else f"Arr! {reply}"
