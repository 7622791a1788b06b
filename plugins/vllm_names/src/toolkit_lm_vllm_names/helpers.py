"""Helpers that vLLM's scripts import."""

from __future__ import annotations

import importlib
import itertools
import logging
import socket
import uuid
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from toolkit_lm.errors import RequestError

GenerationTask = Literal["generate", "transcription"]
PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify", "plugin"]
SupportedTask = GenerationTask | PoolingTask
ChatCompletionMessageParam = dict[str, Any]
VLLMValidationError = RequestError


class UsageContext(StrEnum):
    """Who makes an engine. Nobody is told here."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class Counter:
    """Numbers one after the other, by `next(counter)`."""

    def __init__(self, start: int = 0) -> None:
        self._numbers = itertools.count(start)
        self.counter = start

    def __next__(self) -> int:
        number = next(self._numbers)
        self.counter = number + 1
        return number

    def reset(self) -> None:
        """Begins at 0 again."""
        self._numbers = itertools.count()
        self.counter = 0


def random_uuid() -> str:
    """A fresh id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def cdiv(a: int, b: int) -> int:
    """Quotient, rounded up."""
    return -(a // -b)


def get_open_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def get_ip() -> str:
    """The address of this machine, by its name; else that of the loopback."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def init_logger(name: str) -> logging.Logger:
    """The logger of this name."""
    return logging.getLogger(name)


def load_chat_template(chat_template: Path | str | None) -> str | None:
    """The text of a chat template, given itself or by its file."""
    if chat_template is None:
        return None
    text = str(chat_template)
    is_file = not any(mark in text for mark in "{}\n") and Path(text).is_file()
    return Path(text).read_text(encoding="utf-8") if is_file else text


def get_tokenizer(tokenizer_name: str, *args: Any, **options: Any) -> Any:
    """The tokenizer of a checkpoint, by transformers."""
    for name in ("tokenizer_mode", "download_dir"):
        options.pop(name, None)
    auto = importlib.import_module("transformers").AutoTokenizer
    return auto.from_pretrained(tokenizer_name, *args, **options)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Does nothing: an engine that is deleted, or closed, gives its memory back."""


def print_embeddings(embeds: list[float], prefix: str = "Embeddings") -> None:
    """Prints the first four numbers of a vector, and its size."""
    first = f"[{', '.join(map(str, embeds[:4]))}, ...]" if len(embeds) > 4 else embeds
    print(f"{prefix}: {first} (size={len(embeds)})")
