"""What a pooling model reads of its users' texts: with the checkpoint's prompts, pairs, and a reranker's template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llm_toolkit.config import VllmConfig
from llm_toolkit.engine.score_template import choose_score_template
from llm_toolkit.errors import CheckpointError, RequestError, nearest
from llm_toolkit.plugin import Plugins
from llm_toolkit.pooling import SentenceTransformersConfig, read_sentence_transformers
from llm_toolkit.prompts import Prompt, TextPair, parse_prompt
from llm_toolkit.renderer import RenderedText, Renderer, score_tokens

logger = logging.getLogger(__name__)


class PoolingTexts:
    """Renders texts for pooling. Thread-safe."""

    def __init__(self, config: VllmConfig, renderer: Renderer, plugins: Plugins) -> None:
        assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
        self.renderer = renderer
        self.max_tokens = config.max_model_len
        self.prompts: dict[str, str] = {}
        """Of the checkpoint's sentence-transformers files: texts that go before the input, by name."""
        self.default_prompt_name: str | None = None
        self.lower_case = False
        self.template = None
        if config.model.runner == "pooling":
            self.template = choose_score_template(config, plugins)
            if found := read_sentence_transformers(config.checkpoint.path):
                self.prompts, self.default_prompt_name = found.prompts, found.default_prompt_name
                self.lower_case = found.transformer.do_lower_case
                _check_processing(found)
                if unlike := _unlike(found):
                    logger.warning("%s: scores are not those of sentence-transformers, for %s.", found.folder, "; ".join(unlike))

    def render(
        self,
        prompts: Sequence[Prompt | TextPair],
        *,
        prompt_name: str | Sequence[str | None] | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[RenderedText]:
        """Token ids of each. `prompt_name`: for all, or one for each. Raises RequestError for what cannot be rendered."""
        most = self._most(truncate_prompt_tokens)
        self._check(instruction)
        return self._render(list(prompts), self._befores(prompt_name, len(prompts)), most, instruction)

    def render_each(
        self,
        prompts: Sequence[Prompt | TextPair],
        *,
        prompt_name: str | Sequence[str | None] | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[RenderedText | RequestError]:
        """As `render`, with an error in the place of what cannot be rendered. Raises RequestError for what is wrong with all of them."""
        most = self._most(truncate_prompt_tokens)
        self._check(instruction)
        return self._render_each(list(prompts), self._befores(prompt_name, len(prompts)), most, instruction)

    def _render_each(
        self, prompts: list[Any], befores: list[str], most: int | None, instruction: str | None
    ) -> list[RenderedText | RequestError]:
        try:
            return list(self._render(prompts, befores, most, instruction))
        except RequestError as error:
            if len(prompts) == 1:
                return [error]
        # Errors are rare: halves without one are rendered at once.
        half = len(prompts) // 2
        parts = (slice(None, half), slice(half, None))
        return [one for part in parts for one in self._render_each(prompts[part], befores[part], most, instruction)]

    def _render(self, prompts: list[Any], befores: list[str], most: int | None, instruction: str | None) -> list[RenderedText]:
        rendered: list[RenderedText | None] = []
        texts: list[str | tuple[str, str]] = []
        for prompt, before in zip(prompts, befores, strict=True):
            item = self._item(prompt, before)
            if isinstance(item, RenderedText):
                rendered.append(RenderedText(item.token_ids[:most]))
            elif not isinstance(item, str) and self.template is not None:
                query, document = item
                rendered.append(RenderedText(score_tokens(self.renderer, self.template, query, document, instruction, max_tokens=most)))
            else:
                rendered.append(None)
                texts.append(item)
        others = iter(self.renderer.render_texts(texts, max_tokens=most) if texts else ())
        return [next(others) if one is None else one for one in rendered]

    def _item(self, prompt: Any, before: str) -> str | TextPair | RenderedText:
        if isinstance(prompt, tuple):
            if len(prompt) != 2 or not all(isinstance(text, str) for text in prompt):
                raise RequestError("a pair must be two texts.", "input")
            return (self._lowered(prompt[0]), self._lowered(prompt[1]))
        parsed = parse_prompt(prompt)
        if parsed.get("prompt_token_ids") is not None:
            return RenderedText(self.renderer.render_prompt(parsed)[0])
        # An empty text is refused even where a prompt goes before it.
        return self._lowered(before + parsed["prompt"]) if parsed["prompt"] else ""

    def _lowered(self, text: str) -> str:
        return text.lower() if self.lower_case else text

    def _most(self, truncate_prompt_tokens: int | None) -> int | None:
        if truncate_prompt_tokens is None:
            return None
        if type(truncate_prompt_tokens) is not int or not (truncate_prompt_tokens == -1 or 1 <= truncate_prompt_tokens <= self.max_tokens):
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or an integer from 1 to {self.max_tokens}, not {truncate_prompt_tokens!r}.",
                "truncate_prompt_tokens",
            )
        return self.max_tokens if truncate_prompt_tokens == -1 else truncate_prompt_tokens

    def _check(self, instruction: str | None) -> None:
        if instruction is not None and self.template is None:
            raise RequestError("this model takes no instruction: it has no score template.", "instruction")

    def _befores(self, names: str | Sequence[str | None] | None, count: int) -> list[str]:
        """What goes before each prompt."""
        if names is None or isinstance(names, str):
            return [self._before(names)] * count
        if not isinstance(names, list | tuple) or len(names) != count:
            raise RequestError(f"prompt_name must be a name, or a list of {count}, one for each prompt.", "prompt_name")
        return [self._before(name) for name in names]

    def _before(self, name: str | None) -> str:
        name = name if name is not None else self.default_prompt_name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            raise RequestError(f"the checkpoint has no prompt {name!r}. {nearest(str(name), self.prompts)}", "prompt_name")
        return self.prompts[name]


def _check_processing(found: SentenceTransformersConfig) -> None:
    """Raises CheckpointError for arguments of the tokenizer that would change what the model reads. Those of chat templates do not."""
    if unknown := [key for key in found.transformer.processing_options if key != "chat_template"]:
        raise CheckpointError(
            f"the Transformer module of {found.folder!r} has processing_kwargs for {', '.join(map(repr, unknown))}, which is not supported."
        )


def _unlike(found: SentenceTransformersConfig) -> list[str]:
    """What a checkpoint says of the comparison of texts that `score` does not do."""
    transformer, mask = found.transformer, found.token_mask
    unlike = []
    if found.similarity not in (None, "cosine", "maxsim"):
        unlike.append(f"texts are compared by their cosine, not by {found.similarity!r}")
    if mask is not None and (mask.skiplist_words or mask.keep_only_token_ids is not None):
        unlike.append("no token of a document is left out")
    if transformer.query_expansion is not None:
        unlike.append("queries are not filled up with mask tokens")
    if transformer.query_length is not None or transformer.document_length is not None:
        unlike.append("queries and documents have no lengths of their own")
    return unlike
