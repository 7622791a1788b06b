"""Pictures on the routes of pooling models."""

from __future__ import annotations

import base64
import io

import httpx
import numpy as np
import pytest
from PIL import Image
from qwen_harness import random_qwen
from test_pooled_pictures import hidden_states, unit
from test_qwen2_vl_rendered import ITEM, write_checkpoint
from test_retrieval import OPTIONS, make_colqwen2
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from transformers import AutoImageProcessor, PreTrainedTokenizerFast
from vision_checkpoints import drawings

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def url_of(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def part_of(pixels):
    return {"type": "image_url", "image_url": {"url": url_of(pixels)}}


async def answers(folder, asked, **options):
    """Status and answer of each request, (path, body)."""
    config = VllmConfig.make(model=str(folder), **{**OPTIONS, **options})
    found = []
    async with AsyncLLM(config) as llm:
        app = create_app(llm, ServerOptions(max_inputs=8))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://toolkit") as client:
            for path, body in asked:
                reply = await client.post(path, json={"model": llm.config.served_model_name} | body)
                found.append((reply.status_code, reply.json()))
    return found


async def test_late_interaction_with_pictures(tmp_path):
    reference = make_colqwen2(tmp_path, True)
    pictures = drawings(3, 4)
    images = [{"image": url_of(pixels)} for pixels in pictures]
    contents = [{"content": [part_of(pixels)]} for pixels in pictures]
    query = "Is a sum paid in May?"
    pooled = {"task": "token_embed"}
    ranking = {"query": query, "documents": [*images, "a text"]}
    found = await answers(
        tmp_path,
        [
            ("/pooling", {"input": [*images, *contents], **pooled}),
            ("/pooling", {"input": contents[0], **pooled}),
            ("/pooling", {"input": [query], "prompt_name": "query", **pooled}),
            ("/score", {"queries": query, "documents": contents}),
            ("/score", {"queries": images[0], "documents": images}),
            ("/rerank", ranking),
            ("/v2/rerank", {**ranking, "return_documents": True, "max_tokens_per_doc": 4}),
        ],
    )
    assert [status for status, _ in found] == [200] * len(found), found
    both, alone, asked, scores, of_pages, ranked, cohere = (answer for _, answer in found)
    vectors = [reference.picture(pixels)[0].numpy() for pixels in pictures]
    for index, item in enumerate(both["data"]):
        assert np.abs(np.array(item["data"]) - vectors[index % 3]).max() < 1e-4
    assert np.abs(np.array(alone["data"][0]["data"]) - vectors[0]).max() < 1e-4
    of_query = reference.query(query)[0].numpy()
    assert np.abs(np.array(asked["data"][0]["data"]) - of_query).max() < 1e-4
    expected = [float((of_query @ page.T).max(1).sum()) for page in vectors]
    assert [item["score"] for item in scores["data"]] == pytest.approx(expected, abs=1e-3)
    of_pages = [item["score"] for item in of_pages["data"]]
    assert of_pages == pytest.approx(
        [float((vectors[0] @ page.T).max(1).sum()) for page in vectors], abs=1e-3
    )
    by_index = {result["index"]: result for result in ranked["results"]}
    assert [by_index[index]["relevance_score"] for index in range(3)] == pytest.approx(
        expected, abs=1e-3
    )
    assert by_index[3]["document"] == {"text": "a text"} and "document" not in by_index[0]
    assert {result["index"] for result in cohere["results"]} == {0, 1, 2, 3}


async def test_conversations_with_pictures(tmp_path):
    theirs = random_qwen("qwen3_vl")
    path = write_checkpoint(theirs, tmp_path)
    read = PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token="<pad>")
    images = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    (pixels,) = drawings(1, 3)
    subject = theirs, tmp_path, images, read
    content = [part_of(pixels), {"type": "text", "text": "Say it."}]
    body = {"messages": [{"role": "user", "content": content}]}
    said = [{"role": "user", "content": "Say it."}]
    found = await answers(
        tmp_path,
        [
            ("/v1/embeddings", body),
            ("/v1/embeddings", {**body, "add_generation_prompt": True}),
            ("/v1/embeddings", {"input": [{"content": content}, "text"]}),
            ("/pooling", {**body, "task": "embed"}),
            ("/v1/embeddings", {**body, "truncate_prompt_tokens": 4}),
            ("/v1/embeddings", {"messages": [said, body["messages"]]}),
        ],
        runner="pooling",
    )
    assert [status for status, _ in found] == [200, 200, 200, 200, 400, 200], found
    expected = [
        unit(hidden_states(subject, text, [pixels])[-1])
        for text in (f"[user]{ITEM}Say it.", f"[user]{ITEM}Say it.[assistant]")
    ]
    for (_, answer), wanted in zip(found[:3], (*expected, expected[0]), strict=True):
        assert np.abs(np.array(answer["data"][0]["embedding"]) - wanted).max() < 1e-4
    assert np.abs(np.array(found[3][1]["data"][0]["data"]) - expected[0]).max() < 1e-4
    assert "prompts with media are not truncated" in found[4][1]["error"]["message"]
    plain = unit(hidden_states(subject, "[user]Say it.", [])[-1])
    for item, wanted in zip(found[5][1]["data"], (plain, expected[0]), strict=True):
        assert np.abs(np.array(item["embedding"]) - wanted).max() < 1e-4


BAD = [
    ("/pooling", {"input": [{"picture": "a"}]}, 'input[0] must be a text, {"text": text}'),
    ("/pooling", {"input": {"image": 3}}, 'input must be a text, {"text": text}'),
    ("/pooling", {"input": {"content": []}}, "input must be a text"),
    ("/pooling", {"input": {"image": "data:;base64,YQ=="}}, "image 1"),
    ("/score", {"queries": "a", "documents": [3]}, "documents[0] must be a text"),
    ("/score", {"queries": {"a": 3}, "documents": ["a"]}, "queries[0] must be a text"),
    ("/rerank", {"query": "a", "documents": [{"content": 3}]}, "documents[0] must be a text"),
    ("/rerank", {"query": "a", "documents": [{"image": "data:,"}]}, "image 1"),
]


async def test_bad_pictures(tmp_path):
    make_colqwen2(tmp_path, True)
    good = ("/rerank", {"query": "a", "documents": ["b"]})
    asked = [
        request
        for path, body, _ in BAD
        for request in ((path, body | ({"task": "token_embed"} if "input" in body else {})), good)
    ]
    found = await answers(tmp_path, asked)
    for (path, _, message), (status, answer) in zip(BAD, found[::2], strict=True):
        assert status == 400 and message in answer["error"]["message"], (path, answer)
    assert {status for status, _ in found[1::2]} == {200}


@pytest.mark.parametrize("documents", [[{"image": "data:,a"}], ["a", {"content": [{}]}]])
async def test_a_model_of_texts_refuses_pictures(tmp_path, documents):
    [(status, answer)] = await answers(
        "tiny", [("/score", {"queries": "a", "documents": documents})], convert="embed"
    )
    assert status == 400 and "takes no images or other media" in answer["error"]["message"]
