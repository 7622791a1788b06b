"""Pairs: prompts of a query and a document each, by a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import toolkit_lm
from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import TokensPrompt


def pair_prompts(
    data_1: str | Sequence[str],
    data_2: str | Sequence[str],
    chat_template: str,
    engine: toolkit_lm.LLMEngine,
) -> list[TokensPrompt]:
    """Prompts of one query with each document, or of pairs, for cross-encoders. Raises
    RequestError, also for another model."""
    if "classify" not in engine.tasks:
        raise RequestError(
            "chat_template is for cross-encoders, and this model does not classify: leave it out.",
            "chat_template",
        )
    queries, documents = (
        [texts] if isinstance(texts, str) else list(texts) for texts in (data_1, data_2)
    )
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise RequestError(
            f"{len(queries)} texts in data_1 for {len(documents)} in data_2: give one, or one for "
            "each.",
            "data_1",
        )
    tokenizer = engine.renderer.get_tokenizer()
    return [
        _prompt(query, document, chat_template, tokenizer)
        for query, document in zip(queries, documents, strict=True)
    ]


def _prompt(query: str, document: str, chat_template: str, tokenizer: Any) -> TokensPrompt:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False)
    except Exception as error:  # Of jinja, or of the template itself.
        raise RequestError(f"chat_template cannot be rendered: {error}", "chat_template") from error
    return {"prompt_token_ids": list(tokenizer(text)["input_ids"]), "prompt": text}
