"""The contract of readers of pooling requests' texts, which also score pairs. Importing it needs no
torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict, Unpack

from toolkit_lm.config.tasks import Task
from toolkit_lm.errors import RequestError
from toolkit_lm.outputs import PoolingRequestOutput
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Prompt, Scored, TextPair
from toolkit_lm.renderer import RenderedText


class TextOptions(TypedDict, total=False):
    """How the texts of pooling requests are read."""

    prompt_name: str | Sequence[str | None] | None
    """Name of a checkpoint's prompt ("query", "document") that is put before each text; or one name
    per text."""
    truncate_prompt_tokens: int | None
    """Truncates longer prompts to this many tokens (-1: to the model's limit). Without it they are
    an error."""
    instruction: str | None
    """Instruction, for rerankers that take one."""


class Scoring(ABC):
    """Pairs of texts to be scored: the prompts to compute, and the scores of their outputs."""

    prompts: list[str | TextPair]
    """Prompts that the engine must compute."""
    prompt_names: list[str | None]
    """Name of the checkpoint's prompt that precedes each prompt."""
    names: list[str]
    """Name of each prompt in errors."""

    @abstractmethod
    def params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Returns `params` with the task, and as the comparison requires. Raises RequestError."""

    @abstractmethod
    def culprit(self, error: RequestError) -> RequestError:
        """Returns the error to show for `error`, which one of `prompts` caused: a pair may fail
        because of its query alone. This is slow."""

    @abstractmethod
    def scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[PoolingRequestOutput]:
        """Returns one score per pair, from the engine's outputs for `prompts`."""


class PoolingInputs(ABC):
    """Reads the texts of a pooling model's requests. Thread-safe."""

    prompts: Mapping[str, str]
    """The checkpoint's prompts: texts that precede the input, by name."""

    @abstractmethod
    def check(self, params: PoolingParams, size: int) -> None:
        """Raises RequestError, with `param` set, for parameters that a task does not support.
        `size`: size of an embedding, or number of logits."""

    @abstractmethod
    def render(
        self, prompts: Sequence[Prompt | TextPair], **options: Unpack[TextOptions]
    ) -> list[RenderedText | RequestError]:
        """Returns the token ids of each prompt, or the reason for which it cannot be rendered.
        Raises RequestError for an error that concerns all of them."""

    @abstractmethod
    def scoring(
        self,
        queries: Scored | Sequence[Scored],
        documents: Scored | Sequence[Scored],
        tasks: Collection[Task],
        fields: tuple[str, str],
    ) -> Scoring:
        """Pairs one query with all documents, or one query with each. `tasks`: the model's tasks.
        `fields`: names of the two in errors.

        Raises RequestError, also if the model does not score.
        """
