"""Writes the tables of docs/request_fields.md, from the table of request fields and the bodies of
routes.

usage: python docs/generate_request_fields.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel
from toolkit_lm.config import PluginsConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.completions import CompletionBody
from toolkit_lm_server.infill import InfillBody
from toolkit_lm_server.peer_fields import PEER_FIELDS
from toolkit_lm_server.pooling_protocol import (
    AnyPoolingBody,
    ClassifyBody,
    CohereEmbedBody,
    CohereRerankBody,
    EmbeddingBody,
    ScoreBody,
)
from toolkit_lm_server.protocol import (
    ChatBody,
    StreamOptions,
    body_of,
)
from toolkit_lm_server.render_protocol import DetokenizeBody, TokenizeBody
from toolkit_lm_server.request_fields import SPEECH, STREAM_OPTIONS, Verdict, Verdicts
from toolkit_lm_server.responses.body import ResponsesBody
from toolkit_lm_transcription.routes import TranscriptionForm, TranslationForm
from toolkit_lm_vendor_apis.anthropic.body import CountBody, MessagesBody
from toolkit_lm_vendor_apis.cohere.body import CohereChatBody
from toolkit_lm_vendor_apis.llama_cpp.body import LlamaCompletionBody
from toolkit_lm_vendor_apis.ollama.body import (
    EmbedBody,
    GenerateBody,
    OldEmbedBody,
    OllamaChatBody,
    ShowBody,
)
from toolkit_lm_vendor_apis.sglang.body import SglangGenerateBody

PAGE = Path(__file__).with_name("request_fields.md")
BEGIN = "<!-- written by docs/generate_request_fields.py -->\n"
END = "<!-- end of what is written -->\n"


def bodies() -> dict[str, type[BaseModel]]:
    """Classes of bodies by route, with the parameters of the plugins of this distribution."""
    processors = Plugins.load(PluginsConfig()).logits_processors
    return {
        "/v1/chat/completions": body_of(ChatBody, processors, {}),
        "/v1/completions": body_of(CompletionBody, processors, {}),
        "/infill": body_of(InfillBody, processors, {}),
        "/completion": body_of(LlamaCompletionBody, processors, {}),
        "/generate": SglangGenerateBody,
        "/v1/responses": body_of(ResponsesBody, processors, {}),
        "/v1/messages": MessagesBody,
        "/v1/messages/count_tokens": CountBody,
        "/v2/chat": CohereChatBody,
        "/api/chat": OllamaChatBody,
        "/api/generate": GenerateBody,
        "/api/embed": EmbedBody,
        "/api/embeddings": OldEmbedBody,
        "/api/show": ShowBody,
        "/v1/embeddings": EmbeddingBody,
        "/pooling": AnyPoolingBody,
        "/classify": ClassifyBody,
        "/score": ScoreBody,
        "/rerank": CohereRerankBody,
        "/v2/embed": CohereEmbedBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
        "/v1/audio/transcriptions": TranscriptionForm,
        "/v1/audio/translations": TranslationForm,
    }


def verdict(body: type[BaseModel], name: str) -> Verdict | None:
    """Treatment of a field, or of a nested one ("text.format"). None: the body reads it.

    Raises KeyError for an unknown one."""
    outer, _, inner = name.partition(".")
    stated = {one.alias or field for field, one in body.model_fields.items()}
    verdicts: Verdicts = getattr(body, "verdicts", SPEECH)
    if inner:
        inside = {
            "stream_options": (tuple(StreamOptions.model_fields), STREAM_OPTIONS),
            **getattr(body, "nested", {}),
        }
        stated = set(inside[outer][0])
        verdicts = inside[outer][1]
        name = inner
    return None if name in stated else verdicts[name]


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page with its tables as they should be."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "".join(tables()) + END + after


def tables() -> Iterator[str]:
    for route, body in bodies().items():
        yield from table(route, body, PEER_FIELDS[route])


def table(route: str, body: type[BaseModel], peers: Mapping[str, str]) -> Iterator[str]:
    """Table of one route: fields read under their own names first, then the rest."""
    whose: dict[str, list[str]] = {}
    for peer, names in peers.items():
        for name in names.split():
            whose.setdefault(name, []).append(peer)
    found = {name: verdict(body, name) for name in sorted(whose)}
    obeyed = ", ".join(f"`{name}`" for name, one in found.items() if one is None)
    yield f"\n### `POST {route}`\n\nObeyed: {obeyed}.\n"
    others = {name: one for name, one in found.items() if one is not None}
    if others:
        yield "\n| field | whose | here |\n| --- | --- | --- |\n"
    for name, one in others.items():
        yield f"| `{name}` | {', '.join(dict.fromkeys(whose[name]))} | {reported(one)} |\n"


def reported(one: Verdict) -> str:
    """In words."""
    match one.becomes:
        case "renamed":
            return f"obeyed, as `{one.note}`"
        case "idle":
            return f"no effect: {one.note}"
        case "reported":
            return f"ignored and reported: {one.note}"
    values = ", ".join(f"`{json.dumps(value)}`" for value in one.neutral)
    without = f" with {' or '.join(f'`{name}`' for name in one.qualifies)}" if one.qualifies else ""
    return f"refused{without}{f', but for {values}' if values else ''}: {one.note}"


if __name__ == "__main__":
    main()
