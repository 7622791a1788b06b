"""Requests that the description of Text Embeddings Inference's API has: each route, field and
status is one, asked of ours."""

from __future__ import annotations

import math

import pytest
from documented_requests import LABELS, Documented, fault_of, share_of

pytestmark = pytest.mark.anyio

TEXT = "What is Deep Learning?"
LONG = "word " * 600
MOST = 8


def asked(path: str, holds, *, engine="embed", status=200, **body) -> Documented:
    return Documented(f"POST {path}", body, holds, status=status, engine=engine)


def unit(vector) -> bool:
    return math.isclose(math.hypot(*vector), 1, rel_tol=1e-4)


def refused(kind: str):
    return lambda made: set(made) == {"error", "error_type"} and made["error_type"] == kind


def labelled(made) -> bool:
    return [set(one) for one in made] == [{"score", "label"}] * 3


def ordered(made) -> bool:
    scores = [one["score"] for one in made]
    return scores == sorted(scores, reverse=True)


RANK = {"query": TEXT, "texts": ["Deep Learning is ...", "cheese"]}
SIMILAR = {"source_sentence": TEXT, "sentences": ["What is Machine Learning?", TEXT]}
VECTORS = {
    "/embed: a text": asked("/embed", lambda made: len(made) == 1 and unit(made[0]), inputs=TEXT),
    "/embed: several": asked("/embed", lambda made: len(made) == 2, inputs=[TEXT, "a"]),
    "/embed: token ids": asked("/embed", lambda made: len(made) == 1, inputs=[5, 6, 7]),
    "/embed: lists of token ids": asked("/embed", lambda made: len(made) == 2, inputs=[[5], [6]]),
    "/embed: texts and token ids": asked("/embed", lambda made: len(made) == 2, inputs=["a", [6]]),
    "/embed: normalize": asked("/embed", lambda made: unit(made[0]), inputs=TEXT, normalize=True),
    "/embed: normalize false": asked(
        "/embed", lambda made: not unit(made[0]), inputs=TEXT, normalize=False
    ),
    "/embed: prompt_name null": asked("/embed", len, inputs=TEXT, prompt_name=None),
    "/embed: truncate": asked("/embed", len, inputs=LONG, truncate=True),
    "/embed: truncate null": asked("/embed", len, inputs=TEXT, truncate=None),
    "/embed: truncation_direction Right": asked(
        "/embed", len, inputs=LONG, truncate=True, truncation_direction="Right"
    ),
    "/embed: truncation_direction right": asked(
        "/embed", len, inputs=LONG, truncate=True, truncation_direction="right"
    ),
    "/embed: truncation_direction Left": asked(
        "/embed", len, inputs=LONG, truncate=True, truncation_direction="Left"
    ),
    "/embed: too long": asked("/embed", refused("Validation"), inputs=LONG, status=413),
    "/embed: a batch that is too large": asked(
        "/embed", refused("Validation"), inputs=["a"] * (MOST + 1), status=413
    ),
    "/embed: a model of another kind": asked(
        "/embed", refused("Backend"), inputs="a", status=424, engine="rank"
    ),
    "/embed_all: a text": asked(
        "/embed_all", lambda made: isinstance(made[0][0][0], float), inputs=TEXT
    ),
    "/embed_all: several": asked("/embed_all", lambda made: len(made) == 2, inputs=[TEXT, "a"]),
    "/embed_all: truncate": asked("/embed_all", len, inputs=LONG, truncate=True),
    "/embed_all: too long": asked("/embed_all", refused("Validation"), inputs=LONG, status=413),
    "/embed_all: a model of another kind": asked(
        "/embed_all", refused("Backend"), inputs="a", status=424, engine="rank"
    ),
    "/embed_sparse: a model of dense vectors": asked(
        "/embed_sparse", refused("Backend"), inputs=TEXT, status=424
    ),
    "/embed_sparse: a model of another kind": asked(
        "/embed_sparse", refused("Backend"), inputs=TEXT, status=424, engine="rank"
    ),
    "/similarity": asked(
        "/similarity",
        lambda made: len(made) == 2 and math.isclose(made[1], 1, rel_tol=1e-4),
        inputs=SIMILAR,
    ),
    "/similarity: parameters null": asked("/similarity", len, inputs=SIMILAR, parameters=None),
    "/similarity: truncate": asked(
        "/similarity",
        len,
        inputs={"source_sentence": "a", "sentences": [LONG]},
        parameters={"truncate": True, "truncation_direction": "Right"},
    ),
    "/similarity: prompt_name null": asked(
        "/similarity", len, inputs=SIMILAR, parameters={"prompt_name": None}
    ),
    "/similarity: a batch that is too large": asked(
        "/similarity",
        refused("Validation"),
        inputs={"source_sentence": "a", "sentences": ["a"] * (MOST + 1)},
        status=413,
    ),
    "/similarity: a model of another kind": asked(
        "/similarity", refused("Backend"), inputs=SIMILAR, status=424, engine="rank"
    ),
    "/v1/embeddings: a text": asked(
        "/v1/embeddings",
        lambda made: made["object"] == "list" and made["data"][0]["object"] == "embedding",
        input=TEXT,
    ),
    "/v1/embeddings: several": asked(
        "/v1/embeddings",
        lambda made: [one["index"] for one in made["data"]] == [0, 1],
        input=[TEXT, "a"],
    ),
    "/v1/embeddings: token ids": asked(
        "/v1/embeddings", lambda made: made["data"][0]["embedding"], input=[5, 6]
    ),
    "/v1/embeddings: base64": asked(
        "/v1/embeddings",
        lambda made: isinstance(made["data"][0]["embedding"], str),
        input=TEXT,
        encoding_format="base64",
    ),
    "/v1/embeddings: model and user": asked(
        "/v1/embeddings", lambda made: made["model"] == "tiny", input=TEXT, model=None, user="me"
    ),
    "/v1/embeddings: usage": asked(
        "/v1/embeddings",
        lambda made: made["usage"]["prompt_tokens"] == made["usage"]["total_tokens"] > 0,
        input=TEXT,
    ),
}
LABELLED = {
    "/predict: a text": asked("/predict", labelled, inputs=TEXT, engine="classify"),
    "/predict: a pair": asked("/predict", labelled, inputs=[TEXT, "a"], engine="classify"),
    "/predict: a batch": asked(
        "/predict",
        lambda made: [labelled(one) for one in made] == [True, True],
        inputs=[[TEXT], [TEXT, "a"]],
        engine="classify",
    ),
    "/predict: the likeliest first": asked("/predict", ordered, inputs=TEXT, engine="classify"),
    "/predict: labels": asked(
        "/predict",
        lambda made: {one["label"] for one in made} == set(LABELS.values()),
        inputs=TEXT,
        engine="classify",
    ),
    "/predict: probabilities": asked(
        "/predict",
        lambda made: math.isclose(sum(one["score"] for one in made), 1, rel_tol=1e-4),
        inputs=TEXT,
        engine="classify",
    ),
    "/predict: raw_scores": asked(
        "/predict",
        lambda made: not math.isclose(sum(one["score"] for one in made), 1, rel_tol=1e-4),
        inputs=TEXT,
        raw_scores=True,
        engine="classify",
    ),
    "/predict: truncate": asked(
        "/predict", labelled, inputs=LONG, truncate=True, engine="classify"
    ),
    "/predict: too long": asked(
        "/predict", refused("Validation"), inputs=LONG, status=413, engine="classify"
    ),
    "/predict: a batch that is too large": asked(
        "/predict",
        refused("Validation"),
        inputs=[["a"]] * (MOST + 1),
        status=413,
        engine="classify",
    ),
    "/predict: a model of another kind": asked(
        "/predict", refused("Backend"), inputs=TEXT, status=424
    ),
    "/rerank": asked(
        "/rerank",
        lambda made: sorted(one["index"] for one in made) == [0, 1],
        **RANK,
        engine="rank",
    ),
    "/rerank: best first": asked("/rerank", ordered, **RANK, engine="rank"),
    "/rerank: no text": asked(
        "/rerank",
        lambda made: all(one.get("text") is None for one in made),
        **RANK,
        engine="rank",
    ),
    "/rerank: return_text": asked(
        "/rerank",
        lambda made: all(one["text"] == RANK["texts"][one["index"]] for one in made),
        **RANK,
        return_text=True,
        engine="rank",
    ),
    "/rerank: raw_scores": asked("/rerank", ordered, **RANK, raw_scores=True, engine="rank"),
    "/rerank: truncate": asked(
        "/rerank", ordered, query="a", texts=[LONG, "b"], truncate=True, engine="rank"
    ),
    "/rerank: truncation_direction": asked(
        "/rerank", ordered, **RANK, truncation_direction="Right", engine="rank"
    ),
    "/rerank: too long": asked(
        "/rerank", refused("Validation"), query="a", texts=[LONG], status=413, engine="rank"
    ),
    "/rerank: a batch that is too large": asked(
        "/rerank",
        refused("Validation"),
        query="a",
        texts=["a"] * (MOST + 1),
        status=413,
        engine="rank",
    ),
    "/rerank: a classifier of several labels": asked(
        "/rerank", refused("Backend"), **RANK, status=424, engine="classify"
    ),
}
INFO = {
    "model_id",
    "model_dtype",
    "model_type",
    "max_concurrent_requests",
    "max_input_length",
    "max_batch_tokens",
    "max_client_batch_size",
    "auto_truncate",
    "tokenization_workers",
    "version",
}
OTHERS = {
    "/info": Documented("GET /info", None, lambda made: set(made) >= INFO, engine="embed"),
    "/info: an embedding model": Documented(
        "GET /info", None, lambda made: made["model_type"]["embedding"]["pooling"], engine="embed"
    ),
    "/info: a classifier": Documented(
        "GET /info",
        None,
        lambda made: (
            made["model_type"]["classifier"]["id2label"] == LABELS
            and made["model_type"]["classifier"]["label2id"]
        ),
        engine="classify",
    ),
    "/info: a reranker": Documented(
        "GET /info", None, lambda made: made["model_type"]["reranker"]["id2label"], engine="rank"
    ),
    "/health": Documented("GET /health", None, lambda made: True, engine="embed"),
    "/metrics": Documented("GET /metrics", None, lambda made: "# TYPE" in made, engine="embed"),
    "/ping": Documented("GET /ping", None, lambda made: True, engine="embed"),
    "/decode": asked("/decode", lambda made: len(made) == 1 and made[0], ids=[72, 73]),
    "/decode: several": asked("/decode", lambda made: len(made) == 2, ids=[[72], [73, 74]]),
    "/decode: skip_special_tokens": asked(
        "/decode", lambda made: made == [""], ids=[3], skip_special_tokens=True
    ),
    "/decode: special tokens": asked(
        "/decode", lambda made: made == ["<|im_end|>"], ids=[3], skip_special_tokens=False
    ),
    "/tokenize": asked(
        "/tokenize",
        lambda made: set(made[0][0]) >= {"id", "text", "special", "start", "stop"},
        inputs=TEXT,
    ),
}
CHECKS = {**VECTORS, **LABELLED, **OTHERS}
NOT_HELD = {
    "/embed: truncation_direction Left": (
        '`truncation_direction` "Left" is refused: inputs are cut at their end.'
    ),
    "/tokenize": "`/tokenize` takes vLLM's bodies, and tells no places of tokens in the text.",
}


@pytest.mark.parametrize("name", CHECKS)
async def test_a_documented_request(serve, name):
    async with serve(CHECKS[name].engine, routes=("tei",), max_inputs=MOST) as client:
        fault = await fault_of(client, CHECKS[name])
    if name in NOT_HELD:
        assert fault is not None, "it holds now: take it off the list"
    else:
        assert fault is None, fault


def test_the_share_is_on_the_page():
    print(share_of("Text Embeddings Inference", CHECKS, NOT_HELD))
