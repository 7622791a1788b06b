"""Text Embeddings Inference's routes: the checks of its documentation and tests, over small
models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from documented_requests import LABELS, classifier
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio

SMALL = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 64,
    "engine_process": False,
}
LONG = "word " * 200
TEXTS = ["Paris is in France", "a cat", "The capital of France is Paris"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[dict[str, AsyncLLM]]:
    """Engines of small models: vectors, labels, and ranks."""

    def folder(name: str, num_labels: int) -> str:
        return classifier(tmp_path_factory.mktemp(name), num_labels)

    made = {
        "embed": AsyncLLM(VllmConfig.make(model="tiny", convert="embed", matryoshka=True, **SMALL)),
        "classify": AsyncLLM(
            VllmConfig.make(model=folder("labels", 3), load_format="dummy", **SMALL)
        ),
        "rank": AsyncLLM(VllmConfig.make(model=folder("rank", 1), load_format="dummy", **SMALL)),
    }
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def tei_apps(models):
    return {
        name: create_app(engine, ServerOptions(routes=("tei",), max_inputs=8))
        for name, engine in models.items()
    }


@pytest.fixture
def asked(tei_apps):
    """asked(name): a client of the app over that model."""

    @asynccontextmanager
    async def of(name: str = "embed"):
        transport = httpx.ASGITransport(tei_apps[name])
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client

    return of


async def good(client, path, **body):
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_the_routes_are_off_until_they_are_named(serve):
    async with serve("embed") as client:
        assert (await client.post("/embed_all", json={"inputs": "a"})).status_code == 404
        assert (await client.get("/info")).status_code == 404


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        ("What is Deep Learning?", 1),
        (["What is Deep Learning?"], 1),
        (TEXTS, 3),
        ([5, 6, 7], 1),
        ([[5, 6, 7], [8, 9]], 2),
        (["a text", [8, 9]], 2),
    ],
)
async def test_vectors(asked, inputs, count):
    async with asked() as client:
        found = await good(client, "/embed", inputs=inputs)
    assert len(found) == count
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(count), abs=1e-5)


async def test_vectors_are_those_of_the_other_route(asked):
    async with asked() as client:
        found = await good(client, "/embed", inputs=TEXTS)
        other = await good(client, "/v1/embeddings", input=TEXTS)
    assert np.array(found) == pytest.approx(
        np.array([one["embedding"] for one in other["data"]]), abs=1e-5
    )


async def test_vectors_of_a_batch_are_those_of_single_ones(asked):
    async with asked() as client:
        both = await good(client, "/embed", inputs=TEXTS)
        single = [(await good(client, "/embed", inputs=text))[0] for text in TEXTS]
    assert np.array(both) == pytest.approx(np.array(single), abs=1e-5)


async def test_vectors_may_keep_their_length(asked):
    async with asked() as client:
        [free] = await good(client, "/embed", inputs="a cat", normalize=False)
        [unit] = await good(client, "/embed", inputs="a cat")
    assert np.linalg.norm(free) != pytest.approx(1, abs=1e-2)
    assert np.array(free) / np.linalg.norm(free) == pytest.approx(np.array(unit), abs=1e-5)


async def test_vectors_may_be_cut(asked):
    async with asked() as client:
        [found] = await good(client, "/embed", inputs="a cat", dimensions=64)
    assert len(found) == 64 and np.linalg.norm(found) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
async def test_long_inputs_are_cut_where_it_is_asked_for(asked, path):
    async with asked() as client:
        refused = await client.post(path, json={"inputs": LONG})
        found = await good(client, path, inputs=LONG, truncate=True, truncation_direction="Right")
        other = await client.post(path, json={"inputs": LONG, "truncate": False})
    assert (refused.status_code, other.status_code, len(found)) == (413, 413, 1)
    assert refused.json()["error_type"] == "Validation" and refused.json()["error"]


async def test_a_vector_of_each_token(asked):
    async with asked() as client:
        [found] = await good(client, "/embed_all", inputs="a cat sat")
        tokens = await good(client, "/tokenize", prompt="a cat sat")
        two = await good(client, "/embed_all", inputs=["a", "a cat sat"])
    assert len(found) == tokens["count"] and len(two) == 2
    assert np.array(two[1]) == pytest.approx(np.array(found), abs=1e-5)


async def test_a_model_of_dense_vectors_gives_no_sparse_ones(asked):
    async with asked() as client:
        reply = await client.post("/embed_sparse", json={"inputs": "a"})
    assert reply.status_code == 424 and reply.json()["error_type"] == "Backend"


@pytest.mark.parametrize(
    ("inputs", "shape"),
    [
        ("I like you. I love you", None),
        (["I like you", "I love you"], None),
        ([["I like you"]], 1),
        ([["I like you"], ["I hate pineapples"]], 2),
        ([["What?", "This"], ["alone"]], 2),
    ],
)
async def test_labels(asked, inputs, shape):
    async with asked("classify") as client:
        found = await good(client, "/predict", inputs=inputs)
    lists = [found] if shape is None else found
    assert len(lists) == (shape or 1)
    for labels in lists:
        scores = [one["score"] for one in labels]
        assert scores == sorted(scores, reverse=True) and sum(scores) == pytest.approx(1, abs=1e-5)
        assert {one["label"] for one in labels} == set(LABELS.values())


async def test_labels_are_those_of_the_other_route(asked):
    async with asked("classify") as client:
        found = await good(client, "/predict", inputs="I like you")
        [other] = (await good(client, "/classify", input="I like you"))["data"]
    assert found[0]["label"] == other["label"]
    assert [one["score"] for one in found] == pytest.approx(sorted(other["probs"])[::-1], abs=1e-5)


async def test_raw_scores_are_logits(asked):
    async with asked("classify") as client:
        found = await good(client, "/predict", inputs="I like you")
        raw = await good(client, "/predict", inputs="I like you", raw_scores=True)
    logits = np.array([one["score"] for one in raw])
    soft = np.exp(logits) / np.exp(logits).sum()
    assert soft == pytest.approx(np.array([one["score"] for one in found]), abs=1e-5)


async def test_long_inputs_of_labels(asked):
    async with asked("classify") as client:
        assert (await client.post("/predict", json={"inputs": LONG})).status_code == 413
        assert len(await good(client, "/predict", inputs=LONG, truncate=True)) == 3


@pytest.mark.parametrize("name", ["rank", "embed"])
async def test_ranks(asked, name):
    body = {"query": "What is the capital of France?", "texts": TEXTS}
    async with asked(name) as client:
        found = await good(client, "/rerank", **body)
        told = await good(client, "/rerank", **body, return_text=True)
        other = await good(client, "/v1/rerank", query=body["query"], documents=TEXTS)
    scores = [one["score"] for one in found]
    assert scores == sorted(scores, reverse=True)
    assert sorted(one["index"] for one in found) == [0, 1, 2] and "text" not in found[0]
    assert all(one["text"] == TEXTS[one["index"]] for one in told)
    results = [(one["index"], one["relevance_score"]) for one in other["results"]]
    assert [index for index, _ in results] == [one["index"] for one in found]
    assert scores == pytest.approx([score for _, score in results], abs=1e-5)


async def test_raw_scores_of_ranks(asked):
    body = {"query": "What is the capital of France?", "texts": TEXTS}
    async with asked("rank") as client:
        found = await good(client, "/rerank", **body)
        raw = await good(client, "/rerank", **body, raw_scores=True)
    logits = np.array([one["score"] for one in raw])
    assert 1 / (1 + np.exp(-logits)) == pytest.approx(
        np.array([one["score"] for one in found]), abs=1e-5
    )


async def test_long_texts_of_ranks(asked):
    body = {"query": "a", "texts": [LONG, "b"]}
    async with asked("rank") as client:
        assert (await client.post("/rerank", json=body)).status_code == 413
        assert len(await good(client, "/rerank", **body, truncate=True)) == 2


async def test_the_servers_own_ranks_are_still_there(asked):
    body = {"query": "a", "documents": ["b", "c", "d"], "top_n": 2}
    async with asked("rank") as client:
        found = await good(client, "/rerank", **body)
        other = await good(client, "/v1/rerank", **body)
    assert found["results"] == other["results"] and len(found["results"]) == 2


async def test_similarities(asked):
    async with asked() as client:
        found = await good(
            client, "/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS}
        )
        vectors = np.array(await good(client, "/embed", inputs=TEXTS))
    assert found == pytest.approx((vectors @ vectors[0]).tolist(), abs=1e-5)
    assert found[0] == pytest.approx(1, abs=1e-5)


async def test_similarities_of_long_texts(asked):
    body = {"inputs": {"source_sentence": "a", "sentences": [LONG]}}
    async with asked() as client:
        assert (await client.post("/similarity", json=body)).status_code == 413
        assert len(await good(client, "/similarity", **body, parameters={"truncate": True})) == 1


@pytest.mark.parametrize(
    ("name", "kind"), [("embed", "embedding"), ("classify", "classifier"), ("rank", "reranker")]
)
async def test_the_model(asked, name, kind):
    async with asked(name) as client:
        found = (await client.get("/info")).json()
    assert [*found["model_type"]] == [kind] and found["model_dtype"] == "float32"
    assert (found["max_input_length"], found["max_client_batch_size"]) == (64, 8)
    assert found["auto_truncate"] is False and found["version"]
    if kind == "classifier":
        assert found["model_type"][kind]["id2label"] == LABELS


async def test_a_model_that_generates_has_no_kind(serve):
    async with serve(routes=("tei",)) as client:
        assert (await client.get("/info")).json()["model_type"] == {}
        reply = await client.post("/embed", json={"inputs": "a"})
    assert (reply.status_code, reply.json()["error_type"]) == (424, "Backend")


WRONG = {
    "no inputs": ("/embed", {}, 400),
    "an empty list": ("/embed", {"inputs": []}, 400),
    "a number": ("/embed", {"inputs": 7}, 400),
    "a token that is not there": ("/embed", {"inputs": [10**6]}, 400),
    "too many inputs": ("/embed", {"inputs": ["a"] * 9}, 413),
    "too many inputs of tokens": ("/embed_all", {"inputs": ["a"] * 9}, 413),
    "too many texts": ("/rerank", {"query": "a", "texts": ["a"] * 9}, 413),
    "too many sentences": (
        "/similarity",
        {"inputs": {"source_sentence": "a", "sentences": ["a"] * 9}},
        413,
    ),
    "no sentences": ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400),
    "more dimensions than there are": ("/embed", {"inputs": "a", "dimensions": 10**6}, 400),
    "a cut of the beginning": (
        "/embed",
        {"inputs": "a", "truncate": True, "truncation_direction": "Left"},
        400,
    ),
    "a prompt without a name": ("/embed", {"inputs": "a", "prompt_name": "query"}, 400),
    "labels of vectors": ("/predict", {"inputs": "a"}, 424),
    "three texts": ("/predict", {"inputs": ["a", "b", "c"]}, 400),
    "no texts": ("/rerank", {"query": "a", "texts": []}, 400),
    "texts and documents": ("/rerank", {"query": "a", "texts": ["b"], "documents": ["c"]}, 400),
    "neither": ("/rerank", {"query": "a"}, 400),
    "a field of the other shape": ("/rerank", {"query": "a", "texts": ["b"], "top_n": 1}, 400),
    "another model": ("/embed", {"inputs": "a", "model": "other"}, 404),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_bodies(asked, name):
    path, body, status = WRONG[name]
    async with asked() as client:
        reply = await client.post(path, json=body)
    assert (reply.status_code, set(reply.json())) == (status, {"error", "error_type"}), reply.text
    assert reply.json()["error_type"] == ("Backend" if status == 424 else "Validation")


@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/embed_sparse", "/similarity"])
async def test_a_classifier_gives_no_vectors(asked, path):
    inputs = {"source_sentence": "a", "sentences": ["b"]} if path == "/similarity" else "a"
    async with asked("rank") as client:
        reply = await client.post(path, json={"inputs": inputs})
    assert (reply.status_code, reply.json()["error_type"]) == (424, "Backend")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/embed"),
        ("POST", "/embed_all"),
        ("POST", "/embed_sparse"),
        ("POST", "/predict"),
        ("POST", "/rerank"),
        ("POST", "/similarity"),
        ("GET", "/info"),
    ],
)
async def test_the_key_is_needed(serve, method, path):
    async with serve("embed", routes=("tei",), api_key="secret") as client:
        reply = await client.request(method, path, json={"inputs": "a"})
    assert reply.status_code == 401 and set(reply.json()) == {"error", "error_type"}
