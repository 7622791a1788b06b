"""Samples: prompts of random tokens, for vLLM's scripts that measure."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from typing import Any

from toolkit_lm.errors import ToolkitError

_RANDOM = "random"


@dataclass
class SampleRequest:
    """A prompt, its number of tokens, and how many tokens its answer may have."""

    prompt: str
    prompt_len: int
    expected_output_len: int
    multi_modal_data: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `get_samples` reads."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--dataset-name", default=_RANDOM, help=f"Only {_RANDOM!r}.")
    parser.add_argument("--dataset-path", default=None)
    parser.add_argument("--enable-multimodal-chat", action="store_true")
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """Prompts of `random_input_len` random tokens each, at most. Raises ToolkitError for another
    dataset."""
    if args.dataset_name != _RANDOM or args.dataset_path is not None:
        raise ToolkitError(
            f"dataset {args.dataset_name!r} is not here: use {_RANDOM!r}, without a path; or the "
            "command `toolkit bench`, which reads files of prompts."
        )
    drawn = random.Random(args.seed)  # nosec B311 # prompts, no secrets
    special = {*tokenizer.all_special_ids}
    usual = [token for token in range(len(tokenizer)) if token not in special]
    samples = []
    for _ in range(args.num_prompts):
        ids = drawn.choices(usual, k=args.random_input_len)
        text, length = _text(ids, tokenizer)
        samples.append(SampleRequest(text, length, args.random_output_len))
    return samples


def _text(ids: list[int], tokenizer: Any) -> tuple[str, int]:
    """Text of the first ids, and its number of tokens: at most that of `ids`. Other tokens may come
    of a text than those that made it."""
    kept = len(ids)
    while True:
        text = tokenizer.decode(ids[:kept])
        length = len(tokenizer.encode(text, add_special_tokens=False))
        if length <= len(ids):
            return text, length
        kept -= length - len(ids)
