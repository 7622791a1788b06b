"""Handlers take the engine of a request's model."""

from __future__ import annotations

import pytest
from toolkit_lm_server.engines import ByModel, by_model
from toolkit_lm_server.errors import ApiError

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/infill": {"input_prefix": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"queries": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["a"], "input_type": "classification"},
    "/invocations": {"prompt": "a"},
}


def test_one_thing_by_each_name(make_engine):
    engines = by_model(
        make_engine(served_model_name=["a", "b"]), make_engine(served_model_name="c")
    )
    assert list(engines) == ["a", "b", "c", None]
    assert engines["a"] is engines["b"] is engines[None] is not engines["c"]
    made = engines.each(lambda engine: [engine])
    assert made["a"] is made["b"] is made[None] and made["c"] == [engines["c"]]
    for mapping in (engines, made):
        with pytest.raises(ApiError, match=r"'d' does not exist. This server has 'a', 'b', 'c'"):
            mapping["d"]
    assert ByModel({None: 1})[None] == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_model_that_is_not_served(client, path, anyio_backend):
    answer = await client.post(path, json={"model": "other", **PATHS[path]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == "The model 'other' does not exist. This server has 'fake'."
