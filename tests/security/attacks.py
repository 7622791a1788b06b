"""Good bodies for each route that takes one, and what attacks make of them."""

from __future__ import annotations

import json
from collections.abc import Callable

HI = {"messages": [{"role": "user", "content": "hi"}]}
GENERATED = {
    "/v1/chat/completions": {**HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/invocations": {"prompt": "a", "max_tokens": 2},
    "/infill": {"prompt": "a", "n_predict": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/conversations": {"items": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions/batch": {
        "messages": [[{"role": "user", "content": "hi"}]],
        "max_tokens": 2,
    },
    "/v1/messages": {**HI, "max_tokens": 2},
    "/v1/messages/count_tokens": HI,
    "/v2/chat": {**HI, "max_tokens": 2},
    "/api/chat": {**HI, "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/api/show": {"model": "tiny"},
    "/completion": {"prompt": "a", "n_predict": 2},
    "/apply-template": HI,
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "a"},
    "/decode": {"ids": [5]},
    "/detokenize": {"tokens": [5]},
}
POOLED = {
    "/v1/embeddings": {"input": "a"},
    "/v1/embed": {"texts": ["a"]},
    "/v2/embed": {"texts": ["a"]},
    "/pooling": {"input": "a", "task": "embed"},
    "/classify": {"input": "a"},
    "/v1/moderations": {"input": "a"},
    "/score": {"queries": "a", "documents": ["b"]},
    "/v1/score": {"queries": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/embed": {"inputs": "a"},
    "/embed_all": {"inputs": "a"},
    "/embed_sparse": {"inputs": "a"},
    "/predict": {"inputs": "a"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/encode": {"text": "a"},
    "/v2/models/{name:path}/infer": {
        "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}]
    },
    "/embedding": {"content": "a"},
    "/embeddings": {"content": "a"},
    "/reranking": {"query": "a", "documents": ["b"]},
    "/v1/reranking": {"query": "a", "documents": ["b"]},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
}
BODIES = {**GENERATED, **POOLED}
"""A good body for each route that takes one."""


def nested(depth: int, before: str = "[", after: str = "]") -> str:
    return before * depth + "1" + after * depth


def with_text(path: str, field: str, text: str) -> bytes:
    """The good body and a field whose JSON is `text`."""
    return (json.dumps(BODIES[path])[:-1] + f", {json.dumps(field)}: {text}}}").encode()


def first(path: str) -> str:
    return next(iter(BODIES[path]))


DEPTHS = (90, 200, 500, 970, 5000, 300_000)
ATTACKS: dict[str, Callable[[str], bytes]] = {
    "nothing": lambda path: b"",
    "blank": lambda path: b" \n",
    "no object": lambda path: b"[1]",
    "null": lambda path: b"null",
    "broken": lambda path: json.dumps(BODIES[path]).encode()[:-1],
    "empty": lambda path: b"{}",
    **{
        f"deep lists, {depth}": lambda path, depth=depth: with_text(
            path, first(path), nested(depth)
        )
        for depth in DEPTHS
    },
    **{
        f"deep objects, {depth}": lambda path, depth=depth: with_text(
            path, first(path), nested(depth, '{"a":', "}")
        )
        for depth in DEPTHS
    },
    "deep and open": lambda path: with_text(path, first(path), "[" * 10**6),
    "deep in a text": lambda path: with_text(path, "unknown", json.dumps("[{" * 10**5)),
    "wide": lambda path: json.dumps(
        {**BODIES[path], **{f"x{number}": 1 for number in range(100_000)}}
    ).encode(),
    "wide list": lambda path: with_text(path, first(path), json.dumps([None] * 300_000)),
    "wide object": lambda path: with_text(
        path, first(path), json.dumps({str(number): 1 for number in range(100_000)})
    ),
    "the same name": lambda path: ("{" + '"unknown": 1, ' * 100_000 + '"unknown": 1}').encode(),
    "huge integer": lambda path: with_text(path, first(path), "9" * 4000),
    "endless integer": lambda path: with_text(path, first(path), "9" * 10**6),
    "huge number": lambda path: with_text(path, first(path), "1e999"),
    "NaN": lambda path: with_text(path, first(path), "NaN"),
    "Infinity": lambda path: with_text(path, first(path), "-Infinity"),
    "not UTF-8": lambda path: b'{"\xff": 1}',
    "UTF-16": lambda path: json.dumps(BODIES[path]).encode("utf-16"),
    "a surrogate": lambda path: with_text(path, "unknown", r'"\ud800"'),
    "unknown field": lambda path: with_text(path, "unknown", "1"),
    "unknown field with a long name": lambda path: with_text(path, "x" * 10**6, "1"),
    "model with a long name": lambda path: with_text(path, "model", json.dumps("x" * 10**6)),
}
