"""Routes of the Open Inference Protocol over small pooling models."""

from __future__ import annotations

import numpy as np
import pytest
from toolkit_lm_server.plugin_routes import SHIPPED

pytestmark = pytest.mark.anyio

INFER = "/v2/models/{}/infer"
TEXTS = ["Paris is in France", "a cat"]


@pytest.fixture
def asked(serve):
    return lambda name="embed", **options: serve(name, routes=("kserve",), max_inputs=4, **options)


def texts(*data, shape=None, **more):
    return {
        "name": "text",
        "shape": shape or [len(data)],
        "datatype": "BYTES",
        "data": [*data],
        **more,
    }


def integers(name, data, shape, datatype="INT64"):
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


async def model_of(client) -> str:
    return (await client.get("/v1/models")).json()["data"][0]["id"]


async def infer(client, *inputs, **more):
    path = INFER.format(await model_of(client))
    return await client.post(path, json={"inputs": [*inputs], **more})


async def tensor(client, *inputs, **more):
    reply = await infer(client, *inputs, **more)
    assert reply.status_code == 200, reply.text
    [made] = reply.json()["outputs"]
    assert made["datatype"] == "FP32"
    return np.array(made["data"]).reshape(made["shape"])


async def test_the_routes_are_off_until_they_are_named(serve):
    assert "kserve" not in SHIPPED
    async with serve("embed") as client:
        for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny"):
            assert (await client.get(path)).status_code == 404
        assert (await infer(client, texts("a"))).status_code == 404


async def test_the_server_and_its_health(asked):
    async with asked() as client:
        found = (await client.get("/v2")).json()
        live = (await client.get("/v2/health/live")).json()
        ready = (await client.get("/v2/health/ready")).json()
        model = (await client.get("/v2/models/tiny/ready")).json()
    assert (found["name"], found["extensions"]) == ("toolkit-lm", []) and found["version"]
    assert live == {"live": True} and ready == {"live": True, "ready": True}
    assert model == {"name": "tiny", "ready": True}


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("embed", [{"name": "embedding", "datatype": "FP32", "shape": [-1, -1]}]),
        ("classify", [{"name": "scores", "datatype": "FP32", "shape": [-1, 3]}]),
        ("generate", []),
    ],
)
async def test_a_model_tells_its_tensors(asked, name, outputs):
    async with asked(name) as client:
        model = await model_of(client)
        found = (await client.get(f"/v2/models/{model}")).json()
    assert (found["name"], found["platform"]) == (model, "toolkit-lm")
    assert found["outputs"] == outputs
    assert [each["name"] for each in found["inputs"]] == (
        ["text", "input_ids", "attention_mask"] if outputs else []
    )


async def test_vectors_are_those_of_the_other_route(asked):
    async with asked() as client:
        found = await tensor(client, texts(*TEXTS))
        other = (await client.post("/v1/embeddings", json={"input": TEXTS})).json()
    assert found == pytest.approx(np.array([one["embedding"] for one in other["data"]]), abs=1e-5)


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        ([5, 6, 7, 8, 9, 10], [2, 3]),
        ([[5, 6, 7], [8, 9, 10]], [2, 3]),
    ],
)
@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT32"])
async def test_token_ids(asked, data, shape, datatype):
    async with asked() as client:
        found = await tensor(client, integers("input_ids", data, shape, datatype))
        other = await client.post("/v1/embeddings", json={"input": [[5, 6, 7], [8, 9, 10]]})
    wanted = np.array([one["embedding"] for one in other.json()["data"]])
    assert found == pytest.approx(wanted, abs=1e-5)


async def test_a_mask_leaves_out_padding(asked):
    async with asked() as client:
        found = await tensor(
            client,
            integers("input_ids", [5, 6, 0, 7, 0, 0], [2, 3]),
            integers("attention_mask", [1, 1, 0, 1, 0, 0], [2, 3]),
        )
        other = await client.post("/v1/embeddings", json={"input": [[5, 6], [7]]})
    wanted = np.array([one["embedding"] for one in other.json()["data"]])
    assert found == pytest.approx(wanted, abs=1e-5)


async def test_scores_are_those_of_the_other_route(asked):
    async with asked("classify") as client:
        found = await tensor(client, texts(*TEXTS, shape=[2, 1]))
        other = (await client.post("/classify", json={"input": TEXTS})).json()
        logits = await tensor(client, texts(*TEXTS), parameters={"use_activation": False})
    assert found == pytest.approx(np.array([one["probs"] for one in other["data"]]), abs=1e-5)
    soft = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert soft == pytest.approx(found, abs=1e-5)


async def test_pairs(asked):
    async with asked("classify") as client:
        logits = {"use_activation": False}
        found = await tensor(client, texts("a", "b", "c", "d", shape=[2, 2]), parameters=logits)
        single = await tensor(client, texts("a", "b", shape=[1, 2]), parameters=logits)
        alone = await tensor(client, texts("a", "c"), parameters=logits)
    assert found.shape == alone.shape == (2, 3) and not np.array_equal(found, alone)
    assert found[:1] == pytest.approx(single, abs=1e-6)


async def test_parameters(asked):
    async with asked() as client:
        unit = await tensor(client, texts("a cat"), parameters={"normalize": True})
        free = await tensor(client, texts("a cat"), parameters={"normalize": False})
        cut = await tensor(client, texts("word " * 400), parameters={"truncate": True})
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-5)
    assert free / np.linalg.norm(free) == pytest.approx(unit, abs=1e-5)
    assert cut.shape == unit.shape


async def test_the_id_and_the_outputs_that_are_asked_for(asked):
    async with asked() as client:
        made = (await infer(client, texts("a"), id="42", outputs=[{"name": "embedding"}])).json()
        bare = (await infer(client, texts("a"))).json()
    assert (made["id"], made["model_name"]) == ("42", "tiny") and "id" not in bare


WRONG = {
    "no inputs": ([], {}),
    "no data": ([texts(shape=[0])], {}),
    "a shape that does not fit": ([texts("a", shape=[2])], {}),
    "rows of other lengths": ([integers("input_ids", [[5], [6, 7]], [2, 2])], {}),
    "a row too many": ([integers("input_ids", [[5], [6]], [1, 1])], {}),
    "three columns of texts": ([texts("a", "b", "c", shape=[1, 3])], {}),
    "three dimensions": ([integers("input_ids", [5], [1, 1, 1])], {}),
    "a huge shape": ([integers("input_ids", [5], [1, 2**40])], {}),
    "numbers as texts": ([texts(5)], {}),
    "texts as numbers": ([integers("input_ids", ["a"], [1, 1])], {}),
    "true as a number": ([integers("input_ids", [True], [1, 1])], {}),
    "a type of floats": ([integers("input_ids", [5], [1, 1], "FP32")], {}),
    "a token that is not there": ([integers("input_ids", [10**6], [1, 1])], {}),
    "no tokens": ([integers("input_ids", [], [1, 0])], {}),
    "a mask alone": ([integers("attention_mask", [1], [1, 1])], {}),
    "a mask that hides all": (
        [integers("input_ids", [5], [1, 1]), integers("attention_mask", [0], [1, 1])],
        {},
    ),
    "a mask of another shape": (
        [integers("input_ids", [5, 6], [1, 2]), integers("attention_mask", [1], [1, 1])],
        {},
    ),
    "token types": (
        [integers("input_ids", [5], [1, 1]), integers("token_type_ids", [0], [1, 1])],
        {},
    ),
    "the same tensor twice": ([integers("input_ids", [5], [1, 1])] * 2, {}),
    "texts twice": ([texts("a"), texts("b")], {}),
    "too many inputs": ([texts(*["a"] * 5)], {}),
    "too many tensors": ([texts("a")] * 9, {}),
    "an output that is not there": ([texts("a")], {"outputs": [{"name": "logits"}]}),
    "a task that is not served": ([texts("a")], {"parameters": {"task": "classify"}}),
    "a parameter that is not there": ([texts("a")], {"parameters": {"other": 1}}),
    "a vector of classes": ([texts("a")], {"parameters": {"use_activation": True}}),
    "a text that is too long": ([texts("word " * 400)], {}),
    "more dimensions than there are": ([texts("a")], {"parameters": {"dimensions": 10**6}}),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_bodies(asked, name):
    inputs, more = WRONG[name]
    async with asked() as client:
        reply = await infer(client, *inputs, **more)
    assert reply.status_code == 400 and set(reply.json()) == {"error"}, reply.text
    assert isinstance(reply.json()["error"], str)


async def test_models_that_are_not_there(asked):
    async with asked() as client:
        for method, path in (
            ("GET", "/v2/models/other"),
            ("GET", "/v2/models/other/ready"),
            ("GET", "/v2/models/other/one/ready"),
            ("POST", "/v2/models/other/infer"),
        ):
            reply = await client.request(method, path, json={"inputs": [texts("a")]})
            assert reply.status_code == 404 and "'other" in reply.json()["error"]
        other = await infer(client, texts("a"), model="other")
    assert other.status_code == 404


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v2/models/tiny", "GET"),
        ("/v2/models/org/tiny", "GET"),
        ("/v2/models/tiny/ready", "GET"),
        (INFER.format("tiny"), "POST"),
        (INFER.format("org/tiny"), "POST"),
    ],
)
async def test_other_methods_are_told_those_of_the_route(asked, path, allowed):
    async with asked() as client:
        reply = await client.put(path, json={})
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


async def test_a_model_that_generates_has_no_tensors(asked):
    async with asked("generate") as client:
        reply = await infer(client, texts("a"))
    assert reply.status_code == 400 and "generate" in reply.json()["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2"),
        ("GET", "/v2/health/live"),
        ("GET", "/v2/health/ready"),
        ("GET", "/v2/models/tiny"),
        ("GET", "/v2/models/tiny/ready"),
        ("POST", INFER.format("tiny")),
    ],
)
async def test_the_key_is_needed(asked, method, path):
    async with asked(api_key="secret") as client:
        reply = await client.request(method, path, json={"inputs": [texts("a")]})
    assert reply.status_code == 401 and set(reply.json()) == {"error"}
