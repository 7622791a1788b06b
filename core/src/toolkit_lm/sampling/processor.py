"""LogitsProcessor: the contract of what plugins bring to the sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.config import VllmConfig


class ProcessorRow(NamedTuple):
    """One row of the logits, and the sequence that it belongs to."""

    key: int
    """Names the sequence for its life, whichever row it has in a step."""
    token_ids: np.ndarray
    """[N] int32, read only: all its tokens so far, the prompt and the output."""
    num_prompt_tokens: int


class LogitsProcessor(ABC):
    """Changes the logits of the sequences that ask for it by name in `SamplingParams.logits_processors`.

    One instance serves all sequences of a worker, from one thread. What it does to a row must be a function of the row's arguments and
    tokens alone: a preempted sequence is removed and added again. An exception fails the request that it was raised for, and no other.
    """

    argmax_invariant: ClassVar[bool]
    """True: the likeliest token stays the likeliest. Such a processor works after the temperature and all other filters, and never on
    greedy rows. False: it works on the model's logits, before greedy rows take the likeliest, after penalties."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.config = config
        self.device = device

    @classmethod
    @abstractmethod
    def check(cls, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError for arguments that `add` would not take. Called where the request arrives, from any thread."""

    @abstractmethod
    def add(self, key: int, arguments: Mapping[str, Any], prompt_token_ids: Sequence[int]) -> None:
        """A sequence joins the batch."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """A sequence leaves the batch: finished, aborted or preempted. Also called where `add` raised."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        """The changed logits [R, V] float32 of these rows. Changing them in place is fine. Minus infinity rules a token out."""
