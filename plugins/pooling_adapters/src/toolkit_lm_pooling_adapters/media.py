"""Pictures and other media in the prompts of pooling requests. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import Scored, parse_prompt
from toolkit_lm.renderer import RenderedText, Renderer

_SOURCES = {"image": ("image", "url"), "image_url": ("image_url",)}
"""Keys that may hold the image of a content part, by the part's type."""


def has_media(prompt: Any) -> bool:
    """Whether a prompt is rendered by `render_media`: it has items, is rendered already, or is the
    content of a message."""
    return isinstance(prompt, Mapping) and any(
        prompt.get(key) for key in ("multi_modal_data", "features", "content")
    )


def parts_of(side: Scored) -> list[Mapping[str, Any]]:
    """One side of a pair as content parts of a message. Raises RequestError."""
    if isinstance(side, str):
        return [{"type": "text", "text": side}]
    if set(side) == {"content"} and isinstance(side["content"], list):
        return list(side["content"])
    if set(side) == {"multi_modal_data"} and isinstance(side["multi_modal_data"], Mapping):
        return [
            {"type": kind, kind: item}
            for kind, items in side["multi_modal_data"].items()
            for item in (items if isinstance(items, list | tuple) else [items])
        ]
    raise RequestError(
        "a query or document with media must be {'content': [parts of a message]}, or "
        "{'multi_modal_data': ...} without a text of its own.",
        "input",
    )


def check_length(rendered: RenderedText, most: int | None) -> RenderedText:
    """A prompt with media as it is. Raises RequestError for one of more than `most` tokens, since a
    cut could divide an item."""
    if most is not None and len(rendered.token_ids) > most:
        raise RequestError(
            f"the prompt has {len(rendered.token_ids)} tokens, more than {most}, and prompts with "
            "media are not truncated.",
            "truncate_prompt_tokens",
        )
    return rendered


def render_media(
    prompt: Mapping[str, Any], renderer: Renderer, text: str, picture: str | None, most: int | None
) -> RenderedText:
    """The tokens and items of a prompt for which `has_media` is true.

    `text`: goes before the prompt's own text. `picture`: text in which a picture without text of
    its own is read, its placeholder included; None: such a picture is refused. `most`: tokens that
    the prompt may have. Raises RequestError.
    """
    if renderer.rules is None:
        raise RequestError("this model takes no images or other media.", "input")
    is_plain = "prompt" in prompt and prompt.get("prompt_token_ids") is None
    if text and not is_plain and (picture is None or "features" in prompt):
        raise RequestError(
            f"the checkpoint's prompt {text!r} goes before a text, and this prompt has no place "
            "for it: write it into the prompt.",
            "prompt_name",
        )
    if "features" in prompt:
        rendered = RenderedText(list(prompt["prompt_token_ids"]), features=list(prompt["features"]))
    elif "content" in prompt:
        rendered = _content(prompt, renderer, picture)
    else:
        rendered = _items(prompt, renderer, text, picture)
    return check_length(rendered, most)


def _items(
    prompt: Mapping[str, Any], renderer: Renderer, text: str, picture: str | None
) -> RenderedText:
    """A prompt with `multi_modal_data`."""
    if prompt.get("prompt_token_ids") is None and not prompt.get("prompt"):
        if picture is None:
            raise RequestError(
                "a prompt with images needs the key 'prompt': a text with a placeholder for each.",
                "prompt",
            )
        rendered = renderer.render_prompt(
            parse_prompt({**prompt, "prompt": picture}, media=True), add_special_tokens=False
        )
        return RenderedText(rendered.token_ids, features=rendered.features)
    parsed: Any = parse_prompt(prompt, media=True)
    if text:
        parsed = {**parsed, "prompt": text + parsed["prompt"]}
    rendered = renderer.render_prompt(parsed)
    return RenderedText(rendered.token_ids, features=rendered.features)


def _content(prompt: Mapping[str, Any], renderer: Renderer, picture: str | None) -> RenderedText:
    """Content of a message: by the text for pictures, or else by the chat template."""
    if set(prompt) != {"content"} or not isinstance(prompt["content"], list):
        raise RequestError(
            "content must be a list of parts of a message, and stand alone.", "content"
        )
    parts = prompt["content"]
    if picture is None:
        rendered = renderer.render_conversation(
            [{"role": "user", "content": parts}], add_generation_prompt=False
        )
        return RenderedText(rendered.token_ids, features=rendered.features)
    source = _source(parts[0]) if len(parts) == 1 else None
    if source is None:
        raise RequestError(
            "this model reads a text, or one image: content must be one part of type 'image_url'.",
            "content",
        )
    return _items({"multi_modal_data": {"image": source}}, renderer, "", picture)


def _source(part: Any) -> Any:
    """The image of a content part; None for another part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "image_url"):
        return None
    found = next((part[key] for key in _SOURCES[kind] if part.get(key) is not None), None)
    return found.get("url") if isinstance(found, Mapping) else found
