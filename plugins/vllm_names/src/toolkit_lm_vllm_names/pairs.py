"""Pairs: prompts of a query and a document each, by a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import toolkit_lm
from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import Scored, TokensPrompt
from toolkit_lm.renderer import Renderer


def pair_prompts(
    data_1: Scored | Sequence[Scored],
    data_2: Scored | Sequence[Scored],
    chat_template: str,
    engine: toolkit_lm.LLMEngine,
) -> list[TokensPrompt]:
    """Prompts of one query with each document, or of pairs, for cross-encoders. Each is a text, or
    {"content": [parts of a message]} with images. Raises RequestError, also for another model."""
    if "classify" not in engine.tasks:
        raise RequestError(
            "chat_template is for cross-encoders, and this model does not classify: leave it out.",
            "chat_template",
        )
    queries, documents = (
        [texts] if isinstance(texts, str | Mapping) else list(texts) for texts in (data_1, data_2)
    )
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise RequestError(
            f"{len(queries)} texts in data_1 for {len(documents)} in data_2: give one, or one for "
            "each.",
            "data_1",
        )
    pairs: list[tuple[Any, Any]] = list(zip(queries, documents, strict=True))
    if any(isinstance(side, Mapping) for pair in pairs for side in pair):
        return [_with_media(pair, chat_template, engine.renderer) for pair in pairs]
    tokenizer = engine.renderer.get_tokenizer()
    return [_prompt(query, document, chat_template, tokenizer) for query, document in pairs]


def _with_media(pair: tuple[Any, Any], chat_template: str, renderer: Renderer) -> TokensPrompt:
    """A pair of which a side is the content of a message."""
    contents = [side.get("content") if isinstance(side, Mapping) else side for side in pair]
    if not all(isinstance(content, str | list) for content in contents):
        raise RequestError(
            "a text, or {'content': [parts of a message]}, is needed on both sides.", "data_1"
        )
    messages = [
        {"role": role, "content": content}
        for role, content in zip(("query", "document"), contents, strict=True)
    ]
    rendered = renderer.render_conversation(
        messages, chat_template=chat_template, add_generation_prompt=False, add_special_tokens=True
    )
    prompt = TokensPrompt(prompt_token_ids=rendered.token_ids)
    if rendered.features:
        prompt["features"] = rendered.features
    return prompt


def _prompt(query: str, document: str, chat_template: str, tokenizer: Any) -> TokensPrompt:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False)
    except Exception as error:  # Of jinja, or of the template itself.
        raise RequestError(f"chat_template cannot be rendered: {error}", "chat_template") from error
    return {"prompt_token_ids": list(tokenizer(text)["input_ids"]), "prompt": text}
