"""Errors of `coverage.py` in one line, without folders of the machine."""

from __future__ import annotations

import re

from toolkit_lm.errors import ToolkitError


def brief(error: BaseException) -> str:
    """One line of an error."""
    text = " ".join(str(error).split())
    text = without_folders(text)
    return f"{type(error).__name__}: {text}"[:160] if text else type(error).__name__


def reason_of(error: ToolkitError) -> str:
    """Why the engine refuses a checkpoint: the reason of the fallback for such a class, if there is
    one."""
    text = " ".join(str(error).split())
    refused = re.findall(r"The fallback '\w+' cannot run it: (.*?)\. (?=[A-Z`])", text)
    for_it = [reason for reason in refused if not _OF_OTHERS.search(reason)]
    return without_folders((for_it or refused[-1:] or [text])[0])[:160]


_OF_OTHERS = re.compile(
    r"is not an? (causal|model of|encoder-decoder|text encoder)|it is an encoder-decoder model"
    r"|is a model of text, which"
)
"""Reasons of fallbacks for other kinds of classes."""


def without_folders(text: str) -> str:
    return re.sub(r"(?<=\s)/\S+/", "", re.sub(r"'/[^']*'", "...", text))
