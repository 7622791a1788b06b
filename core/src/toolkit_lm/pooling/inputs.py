"""The contract of what reads the texts of pooling requests, and scores pairs of them. Importing it
needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict, Unpack

from toolkit_lm.config.tasks import Task
from toolkit_lm.errors import RequestError
from toolkit_lm.outputs import PoolingRequestOutput
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Prompt, TextPair
from toolkit_lm.renderer import RenderedText


class TextOptions(TypedDict, total=False):
    """How the texts of pooling requests are read."""

    prompt_name: str | Sequence[str | None] | None
    """One of the checkpoint's prompts ("query", "document"), which goes before each text; or one
    for each."""
    truncate_prompt_tokens: int | None
    """Cut longer prompts to so many tokens (-1: to what the model can take). Without it they are an
    error."""
    instruction: str | None
    """For rerankers that take one."""


class Scoring(ABC):
    """Pairs of texts to be scored: what the engine is to compute for them, and what comes of it."""

    prompts: list[str | TextPair]
    """What the engine is to read."""
    prompt_names: list[str | None]
    """The name of the checkpoint's prompt that goes before each."""
    names: list[str]
    """What errors call each."""

    @abstractmethod
    def params(self, given: PoolingParams | None = None) -> PoolingParams:
        """What was `given`, with the task, and as the comparison needs it. Raises RequestError."""

    @abstractmethod
    def culprit(self, error: RequestError) -> RequestError:
        """What the user is to be told of `error`, which one of `prompts` gave: a pair may fail for
        its query alone. It takes a while."""

    @abstractmethod
    def scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[PoolingRequestOutput]:
        """One for each pair, of what the engine gave for `prompts`."""


class PoolingInputs(ABC):
    """What an engine's pooling model reads of its users' texts. Thread-safe."""

    prompts: Mapping[str, str]
    """Of the checkpoint: texts that go before the input, by name."""

    @abstractmethod
    def check(self, params: PoolingParams, size: int) -> None:
        """Raises RequestError, with `param` set, for what a task cannot give. `size`: of an
        embedding, or the number of logits."""

    @abstractmethod
    def render(
        self, prompts: Sequence[Prompt | TextPair], **options: Unpack[TextOptions]
    ) -> list[RenderedText | RequestError]:
        """Token ids of each, or why it cannot be rendered. Raises RequestError for what is wrong
        with all of them."""

    @abstractmethod
    def scoring(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        tasks: Collection[Task],
        fields: tuple[str, str],
    ) -> Scoring:
        """One query for all documents, or one for each. `tasks`: those of the model. `fields`: what
        errors call the two.

        Raises RequestError, also where the model does not score.
        """
