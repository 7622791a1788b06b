"""OpenAI's moderations over small classifiers: the probabilities are those of /classify."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import toolkit_lm_tiny
from openai import AsyncOpenAI
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_vendor_apis.moderations import Options

pytestmark = pytest.mark.anyio
SMALL = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "engine_process": False}
PATH = "/v1/moderations"
KINDS = {
    "softmax": ({"0": "hate", "1": "Neutral", "2": "self-harm"}, {}),
    "sigmoid": ({"0": "toxic", "1": "threat"}, {"problem_type": "multi_label_classification"}),
    "nameless": ({"0": "LABEL_0", "1": "LABEL_1"}, {}),
    "moods": ({"0": "angry", "1": "calm"}, {}),
    "single": ({"0": "toxic"}, {}),
}


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory) -> Iterator:
    """engine_of(kind, **options of the plugin)"""
    made: dict[str, AsyncLLM] = {}

    def get(kind: str, **options) -> AsyncLLM:
        key = json.dumps([kind, options])
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            tiny = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tiny / file, folder)
            labels, more = KINDS[kind]
            config = json.loads((tiny / "config.json").read_text())
            config |= {"architectures": ["LlamaForSequenceClassification"], **more}
            (folder / "config.json").write_text(json.dumps({**config, "id2label": labels}))
            own = {"plugin_option": {"moderations": options}} if options else {}
            made[key] = AsyncLLM(
                VllmConfig.make(model=str(folder), load_format="dummy", **own, **SMALL)
            )
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


@asynccontextmanager
async def asked(engine):
    app = create_app(engine, ServerOptions(routes=["moderations"], max_inputs=4))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize(
    ("kind", "options", "categories"),
    [
        ("softmax", {}, {"hate": 0, "self-harm": 2}),
        ("softmax", {"threshold": 0.01}, {"hate": 0, "self-harm": 2}),
        ("softmax", {"safe_labels": ["Hate"]}, {"Neutral": 1, "self-harm": 2}),
        ("sigmoid", {}, {"toxic": 0, "threat": 1}),
        ("single", {}, {"toxic": 0}),
        ("nameless", {"safe_labels": ["label_0"]}, {"LABEL_1": 1}),
        ("moods", {"safe_labels": []}, {"angry": 0, "calm": 1}),
    ],
)
async def test_labels_are_categories(engine_of, kind, options, categories):
    texts = ["Once upon a time", "The cat"]
    async with asked(engine_of(kind, **options)) as client:
        reply = (await client.post(PATH, json={"input": texts})).json()
        body = {"input": texts, "use_activation": True}
        probs = [one["probs"] for one in (await client.post("/classify", json=body)).json()["data"]]
    threshold = options.get("threshold", 0.5)
    for result, row in zip(reply["results"], probs, strict=True):
        wanted = {name: row[index] for name, index in categories.items()}
        assert result["category_scores"] == pytest.approx(wanted)
        found = {name: score >= threshold for name, score in wanted.items()}
        assert (result["categories"], result["flagged"]) == (found, any(found.values()))
        assert result["category_applied_input_types"] == {name: ["text"] for name in categories}


async def test_inputs(engine_of):
    engine = engine_of("softmax")
    async with asked(engine) as client:
        own = AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=client)
        name = engine.served_model_name
        reply = await own.moderations.create(model=name, input="Once\nThe cat")
        part = [{"type": "text", "text": text} for text in ("Once", "The cat")]
        joined = await own.moderations.create(model=name, input=part)
        assert reply.id.startswith("modr-") and reply.model == name
        assert joined.results == reply.results, "parts are one input"
        for value, message in (
            ([], "input must be"),
            (5, "input must be"),
            (["a", 5], "input[0] must be"),
            ([{"type": "image_url", "image_url": {"url": "x"}}], "no images"),
            (["a"] * 5, "at most 4"),
            ("", "empty"),
        ):
            refused = await client.post(PATH, json={"input": value})
            error = refused.json()["error"]
            assert refused.status_code == 400 and message in error["message"], error
        other = await client.post(PATH, json={"input": "a", "model": "omni-moderation-latest"})
        assert other.status_code == 404


@pytest.mark.parametrize("kind", ["nameless", "moods"])
async def test_what_nobody_can_know_is_refused(engine_of, kind):
    async with asked(engine_of(kind)) as client:
        refused = await client.post(PATH, json={"input": "a"})
    assert refused.status_code == 400 and "moderations.safe_labels" in refused.text


async def test_other_models_say_what_to_do(serve):
    for name in ("generate", "embed"):
        async with serve(name, routes=("moderations",)) as client:
            refused = await client.post(PATH, json={"input": "a"})
            error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "model")
        assert "Serve a classifier" in error["message"]
    async with serve("generate") as client:
        missing = await client.post(PATH, json={"input": "a"})
    assert missing.status_code == 404 and "moderations" in missing.json()["error"]["message"]


@pytest.mark.parametrize("threshold", [0, 1.5, float("nan")])
def test_a_threshold_is_a_probability(threshold):
    with pytest.raises(ConfigError, match="threshold"):
        Options(threshold=threshold)
