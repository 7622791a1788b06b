"""The routes of pooling models, over real engines with small random checkpoints."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
from contextlib import asynccontextmanager

import httpx
import numpy as np
import openai
import pytest
import torch
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.events import StepEvent
from toolkit_lm.outputs import PoolingOutput, PoolingRequestOutput
from toolkit_lm.plugin import hookimpl
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_pooling_adapters.scoring import cosine, max_sim
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.pooled import packed, sparse

pytestmark = pytest.mark.anyio

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
LABELS = {"0": "angry", "1": "calm", "2": "glad"}
CONFIGS = {
    "embedder": LLAMA,
    "matryoshka": {**LLAMA, "matryoshka_dimensions": [8, 16]},
    "encoder": {**BERT, "architectures": ["BertModel"]},
    "generator": LLAMA,
    "classifier": {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": LABELS},
    "cross-encoder": {
        **LLAMA,
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
    },
    "late": {**BERT, "architectures": ["HF_ColBERT"], "dim": 8},
}
PROMPTS = {"query": "q: ", "document": "d: "}


def write_checkpoint(folder, name) -> None:
    """A tokenizer of single bytes, and a config; the weights are made up by load_format dummy."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={letter: number for number, letter in enumerate(["<s>", "</s>", *LETTERS])},
            merges=[],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "encoder":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    if name == "late":
        (folder / "artifact.metadata").write_text(
            json.dumps({"attend_to_mask_tokens": True, "mask_punctuation": False})
        )
    if name in ("embedder", "late"):
        (folder / "config_sentence_transformers.json").write_text(
            json.dumps({"prompts": PROMPTS, "default_prompt_name": None})
        )


class Steps:
    """A plugin that counts the engine's steps."""

    name = "steps"

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    @hookimpl
    def toolkit_event(self, event) -> None:
        if isinstance(event, StepEvent):
            self.num_tokens.append(event.num_tokens)


DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.fixture(scope="module")
def steps():
    return Steps()


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory, steps):
    """engine_of(name): the engine of one of CONFIGS."""
    made = {}

    def get(name, **options) -> AsyncLLM:
        key = name, *options.items()
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            write_checkpoint(folder, name)
            options = {"convert": "embed"} | options if name == "embedder" else options
            config = VllmConfig.make(
                model=str(folder),
                load_format="dummy",
                device="cpu",
                dtype="float32",
                engine_process=False,
                num_kv_blocks=64,
                served_model_name="small",
                **options,
            )
            made[key] = AsyncLLM(config, plugins=[steps])
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


@functools.cache
def app_of(engine: AsyncLLM, **options: int) -> FastAPI:
    """One app for all tests: it takes longer to make than most of them."""
    return create_app(engine, ServerOptions(**options))


@pytest.fixture
def ask(engine_of, client_of):
    """ask(name, path, **body): the response of the server with this model."""

    async def call(name, path, *, options=None, **body):
        engine = engine_of(name)
        app = app_of(engine) if options is None else create_app(engine, options)
        async with client_of(app) as client:
            return await client.post(path, json=body)

    return call


@asynccontextmanager
async def openai_client(engine):
    transport = httpx.ASGITransport(app_of(engine))
    async with openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    ) as client:
        yield client


def vectors(response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array([one["embedding"] for one in response.json()["data"]], np.float32)


async def alone(engine, text, task="embed", **options):
    """What the engine gives for one input."""
    return (await engine.encode(text, PoolingParams(task=task), **options)).outputs.data


async def test_the_official_client(engine_of):
    engine = engine_of("embedder", matryoshka=True)
    texts = ["one", "zwei 😀", "three and more"]
    expected = [await alone(engine, text) for text in texts]
    async with openai_client(engine) as client:
        # It asks for base64 where nothing else is said.
        reply = await client.embeddings.create(model="small", input=texts)
        floats = await client.embeddings.create(model="small", input=texts, encoding_format="float")
        one = await client.embeddings.create(model="small", input=texts[1], dimensions=8, user="me")
    assert [item.index for item in reply.data] == [0, 1, 2]
    np.testing.assert_allclose([item.embedding for item in reply.data], expected, atol=1e-5)
    np.testing.assert_array_equal(
        [item.embedding for item in reply.data],
        np.float32([item.embedding for item in floats.data]),
    )
    assert (reply.model, reply.usage.prompt_tokens, reply.usage.total_tokens) == (
        "small",
        3 + 9 + 14,
        26,
    )
    cut = expected[1][:8] / np.linalg.norm(expected[1][:8])
    np.testing.assert_allclose(one.data[0].embedding, cut, atol=1e-5)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_sparse_vectors(engine_of, ask, path):
    """SPLADE's models give mostly zeros, and their form is that of any vector."""
    task = {"task": "embed"} if path == "/pooling" else {}
    expected = await alone(engine_of("embedder"), "one")
    reply = await ask("embedder", path, input="one", sparse=True, **task)
    [item] = reply.json()["data"]
    found = item["data" if path == "/pooling" else "embedding"]
    assert found["indices"] == list(range(32))
    np.testing.assert_allclose(found["values"], expected, atol=1e-5)


def output_of(data, ids=(1,)):
    made = PoolingOutput(np.float32(data))
    return PoolingRequestOutput("0", None, list(ids), made, "stop")


def test_a_sparse_vector_has_what_is_not_zero():
    found = sparse(output_of([0, 1.5, 0, -2]))
    assert found == {"indices": [1, 3], "values": [1.5, -2.0]}


def test_weights_of_tokens_become_those_of_token_ids():
    found = sparse(output_of([[0], [0.5], [2], [1.5], [0.25], [0]], [0, 7, 5, 5, 7, 2]))
    assert found == {"indices": [5, 7], "values": [2.0, 0.5]}
    with pytest.raises(RequestError, match="gives 3 numbers"):
        sparse(output_of([[1, 2, 3]]))


@pytest.mark.parametrize("fields", [{"encoding_format": "base64"}, {"task": "token_embed"}])
async def test_sparse_vectors_where_there_are_none(ask, fields):
    reply = await ask("embedder", "/pooling", input="a", sparse=True, **{"task": "embed"} | fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "sparse"


async def test_inputs_of_all_kinds(engine_of, ask):
    engine = engine_of("embedder")
    ids = [[5, 6, 7], [8, 9]]
    expected = [await alone(engine, {"prompt_token_ids": one}) for one in ids]
    np.testing.assert_allclose(
        vectors(await ask("embedder", "/v1/embeddings", input=ids)), expected, atol=1e-5
    )
    np.testing.assert_allclose(
        vectors(await ask("embedder", "/v1/embeddings", input=ids[1])), expected[1:], atol=1e-5
    )
    for fields, texts in (
        ({}, "hi"),
        ({"prompt_name": "query"}, "q: hi"),
        ({"truncate_prompt_tokens": 1}, "h"),
    ):
        reply = await ask("embedder", "/v1/embeddings", input=["hi"], **fields)
        np.testing.assert_allclose(vectors(reply)[0], await alone(engine, texts), atol=1e-5)
    raw = vectors(await ask("embedder", "/v1/embeddings", input="hi", normalize=False))[0]
    assert abs(np.linalg.norm(raw) - 1) > 0.01
    np.testing.assert_allclose(raw / np.linalg.norm(raw), await alone(engine, "hi"), atol=1e-5)


async def test_a_request_rides_in_the_same_steps(engine_of, ask, steps):
    engine_of("embedder")
    before = len(steps.num_tokens)
    texts = ["abc" * (1 + i % 9) for i in range(64)]
    assert len(vectors(await ask("embedder", "/v1/embeddings", input=texts))) == 64
    assert steps.num_tokens[before:] == [sum(map(len, texts))]


@pytest.mark.parametrize("more", [{}, {"add_special_tokens": False}])
async def test_texts_and_token_ids_in_one_request(ask, more):
    inputs = ["one", [5, 6, 7], "another", [8, 9]]
    reply = (await ask("embedder", "/v1/embeddings", input=inputs, **more)).json()
    for one, item in zip(inputs, reply["data"], strict=True):
        alone = (await ask("embedder", "/v1/embeddings", input=[one], **more)).json()
        np.testing.assert_allclose(item["embedding"], alone["data"][0]["embedding"], atol=1e-5)
    usage = reply["usage"]
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"] > 4


BAD_INPUTS = [
    ([], "input is an empty list"),
    ("", "is empty"),
    (["a", "b", ""], "input[2]: the text is empty"),
    ([[1], []], "input[1]: the prompt is empty"),
    ([[]], "the prompt is empty"),
    (["a", 1], "input[1] is of another kind"),
    ([1, "a"], "input[1] is of another kind"),
    ([1, True], "input[1] is of another kind"),
    ([[1], 2], "input[1] is of another kind"),
    ([[1], [2.5]], "input[1] must be a list of token ids"),
    ([["a"]], "input[0] must be a list of token ids"),
    ([None], "input[0] is of another kind"),
    (None, "You must provide the parameter 'input'"),
    ({"texts": "a"}, "input must be a text"),
    ("a\ud800", "lone surrogate"),
    ([[5, 260]], "token id 260 is not in the vocabulary"),
    ([[5], [-1]], "input[1]: token id -1 is not in the vocabulary"),
    ([[5], [2**40, 5]], f"input[1]: token id {2**40} is not in the vocabulary"),
    (["a", "x" * 129], "input[1]: the prompt has 129 tokens"),
    (["a", "x" * 10**5], "input[1]: the prompt has 100000 tokens"),
    (["a"] * 101, "input has 101 items; this server takes at most 100"),
    ([[1]] * 101, "input has 101 items"),
]


@pytest.mark.parametrize(
    ("value", "message"),
    BAD_INPUTS,
    ids=lambda value: str(value)[:30].encode("ascii", "replace").decode(),
)
async def test_bad_inputs(ask, engine_of, client_of, value, message):
    app = app_of(engine_of("embedder"), max_inputs=100)
    async with client_of(app) as client:
        headers = {"content-type": "application/json"}
        reply = await client.post(
            "/v1/embeddings", content=json.dumps({"input": value}), headers=headers
        )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert message in error["message"] and (error["type"], error["param"]) == (
        "invalid_request_error",
        "input",
    )


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"dimensions": 33}, "dimensions", "dimensions is 33, but the model's embeddings have 32"),
        ({"dimensions": 0}, "dimensions", "at least 1"),
        ({"encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "must be -1 or an integer from 1 to 128",
        ),
        (
            {"truncate_prompt_tokens": 129},
            "truncate_prompt_tokens",
            "must be -1 or an integer from 1 to 128",
        ),
        ({"prompt_name": "passage"}, "prompt_name", "Known: document, query"),
        ({"priority": 3}, "priority", "Leave it out, or ask the operator"),
        ({"timeout": -1}, "timeout", "above 0"),
    ],
)
async def test_bad_fields(ask, fields, param, message):
    reply = await ask("embedder", "/v1/embeddings", input=["a", "b"], **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert message in error["message"] and "input[" not in error["message"]


TEMPLATE = (
    "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}bot{% "
    "endif %}"
)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_a_conversation(engine_of, client_of, path):
    """It is rendered as it is, and pooled as the text that comes of it."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    async with client_of(app_of(engine_of("embedder", chat_template=TEMPLATE))) as client:

        async def ask(**fields):
            reply = (await client.post(path, json={"task": "embed", **fields})).json()
            return reply["data"][0].get("embedding", reply["data"][0].get("data")), reply["usage"][
                "prompt_tokens"
            ]

        for options, text in (({}, "hi;yo;"), ({"add_generation_prompt": True}, "hi;yo;bot")):
            found, count = await ask(messages=messages, **options)
            expected, length = await ask(input=text)
            assert count == length and np.allclose(found, expected, atol=1e-5)
        both = await client.post(path, json={"messages": messages, "input": "a", "task": "embed"})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "input")
        neither = (await client.post(path, json={"task": "embed"})).json()["error"]
        assert (neither["param"], neither["code"]) == ("input", "missing_required_parameter")
        wrong = await client.post(
            path,
            json={
                "input": "a",
                "add_special_tokens": False,
                "prompt_name": "query",
                "task": "embed",
            },
        )
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "add_special_tokens")


TALKS = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
    [{"role": "user", "content": "bye"}],
]
EACH = {
    "/v1/embeddings": lambda item: item["embedding"],
    "/pooling": lambda item: item["data"],
    "/classify": lambda item: item["probs"],
}


@pytest.mark.parametrize("field", ["messages", "input"])
@pytest.mark.parametrize("path", EACH)
async def test_several_conversations(engine_of, client_of, path, field):
    """Each has a result, which is that of the text that comes of it. `input` takes messages, too,
    as in vLLM."""
    name = "classifier" if path == "/classify" else "embedder"
    task = {"task": "embed"} if path == "/pooling" else {}
    async with client_of(app_of(engine_of(name, chat_template=TEMPLATE), max_inputs=2)) as client:

        async def ask(status=200, **fields):
            reply = await client.post(path, json={**task, **fields})
            assert reply.status_code == status, reply.text
            return reply.json()

        async def check(expected, **fields):
            found = await ask(**fields)
            assert [item["index"] for item in found["data"]] == list(range(len(expected)))
            texts = await ask(input=expected)
            assert found["usage"] == texts["usage"]
            for item, other in zip(found["data"], texts["data"], strict=True):
                assert np.allclose(EACH[path](item), EACH[path](other), atol=1e-5)

        await check(["hi;yo;", "bye;"], **{field: TALKS})
        await check(["hi;yo;bot", "bye;bot"], **{field: TALKS, "add_generation_prompt": True})
        await check(["bye;"], **{field: TALKS[1]})
        await check(["bye;"], **{field: [TALKS[1]]})

        [said] = TALKS[1]
        for value, message in (
            ([*TALKS, TALKS[0]], f"{field} has 3 items; this server takes at most 2"),
            ([said, TALKS[0]], f"{field}[1] is of another kind: it must be a message"),
            ([TALKS[0], said], f"{field}[1] is of another kind: it must be a list of messages"),
            ([TALKS[0], []], f"{field}[1] must be a list of messages, with at least one"),
            ([TALKS[0], [{"content": "a"}]], f"{field}[1]: "),
            ([TALKS[0], [{"role": "user", "content": "x" * 200}]], f"{field}[1]: the prompt has"),
        ):
            error = (await ask(400, **{field: value}))["error"]
            assert message in error["message"], error
            assert error["param"] == field


async def test_inputs_without_special_tokens(ask):
    async def asked(**fields):
        reply = (await ask("encoder", "/v1/embeddings", **fields)).json()
        return reply["data"][0]["embedding"], reply["usage"]["prompt_tokens"]

    assert (await asked(input="hi"))[1] == 3
    bare, count = await asked(input="hi", add_special_tokens=False)
    ids = (await ask("encoder", "/tokenize", prompt="hi", add_special_tokens=False)).json()[
        "tokens"
    ]
    expected, _ = await asked(input=ids)
    assert count == len(ids) == 2 and np.allclose(bare, expected, atol=1e-5)


@pytest.mark.parametrize("order", ["native", "little", "big"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_the_type_of_numbers_in_base64(ask, dtype, order):
    whole = (await ask("embedder", "/v1/embeddings", input="hi")).json()["data"][0]["embedding"]
    fields = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": order}
    data = base64.b64decode(
        (await ask("embedder", "/v1/embeddings", input="hi", **fields)).json()["data"][0][
            "embedding"
        ]
    )
    assert torch.equal(read(data, dtype, order), expected(whole, dtype))


def read(data: bytes, dtype: str, order: str) -> torch.Tensor:
    size = DTYPES[dtype].itemsize
    values = np.frombuffer(data, (">" if order == "big" else "<") + f"i{size}").astype(f"i{size}")
    return torch.from_numpy(values).view(DTYPES[dtype]).float()


def expected(whole: list[float], dtype: str) -> torch.Tensor:
    """As torch rounds."""
    exact = torch.tensor(whole)
    return (exact.half() if dtype == "fp8_e5m2" else exact).to(DTYPES[dtype]).float()


def test_numbers_of_eight_bits_are_torchs():
    """Rounded to the nearest, of two the even one, and no larger than the largest."""
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    codes = np.arange(127, dtype=np.uint8)
    exact = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    halves = (exact[1:] + exact[:-1]) / 2
    every = np.concatenate([values, values / 1000, exact, halves, -exact, -halves])
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        assert torch.equal(
            read(packed(every, dtype, "little"), dtype, "little"), expected(every.tolist(), dtype)
        ), dtype
    assert read(
        packed(np.array([1e6, -1e6]), "fp8_e4m3", "little"), "fp8_e4m3", "little"
    ).tolist() == [448, -448]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_vectors_in_bytes(ask, path):
    """The body is the numbers alone; a header tells where each vector is, unless it is not
    wanted."""
    task = {"task": "embed"} if path == "/pooling" else {}
    floats = (await ask("embedder", path, input=["a", "b c"], **task)).json()
    wholes = [one["data" if task else "embedding"] for one in floats["data"]]
    for dtype in DTYPES:
        form = {"embed_dtype": dtype, "endianness": "big", **task}
        reply = await ask("embedder", path, input=["a", "b c"], encoding_format="bytes", **form)
        told = json.loads(reply.headers["metadata"])
        assert (
            reply.headers["content-type"] == "application/octet-stream"
            and told["usage"] == floats["usage"]
        )
        for whole, item in zip(wholes, told["data"], strict=True):
            assert (item["embed_dtype"], item["endianness"], item["shape"]) == (
                dtype,
                "big",
                [len(whole)],
            )
            assert torch.equal(
                read(reply.content[item["start"] : item["end"]], dtype, "big"),
                expected(whole, dtype),
            )
        bare = await ask("embedder", path, input=["a", "b c"], encoding_format="bytes_only", **form)
        assert "metadata" not in bare.headers and bare.content == reply.content
    error = (
        await ask("embedder", path, input=["a"] * 300, encoding_format="bytes", **task)
    ).json()["error"]
    assert error["param"] == "encoding_format" and "bytes_only" in error["message"]


async def test_token_ids_of_another_tokenizer(ask):
    """Those within the vocabulary cannot be told from the model's own."""
    error = (await ask("embedder", "/v1/embeddings", input=[[5, 6], [100_000, 7]])).json()["error"]
    assert (
        error["param"] == "input"
        and "input[1]: token id 100000 is not in the vocabulary" in error["message"]
    )
    assert "check_embedding_ctx_length=False" in error["message"]


@pytest.mark.parametrize(
    "field",
    [
        "input",
        "model",
        "prompt_name",
        "encoding_format",
        "task",
        "cache_salt",
        "dimensions",
        "\ud800",
    ],
)
async def test_lone_surrogates_are_errors_of_the_request(engine_of, client_of, field):
    body = {"input": "a", "task": "embed"} | {field: "\ud800"}
    async with client_of(app_of(engine_of("embedder"))) as client:
        reply = await client.post(
            "/pooling", content=json.dumps(body), headers={"content-type": "application/json"}
        )
    assert reply.status_code in (400, 404), reply.text
    assert reply.json()["error"]["message"]


async def test_a_text_over_the_limit_is_cut_when_asked(engine_of, ask):
    long = "ab" * 10**5
    expected = [await alone(engine_of("embedder"), long[:128])]
    reply = await ask("embedder", "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(vectors(reply), expected, atol=1e-5)
    assert reply.json()["usage"]["prompt_tokens"] == 128


SERVED = {
    "embedder": "embed, token_embed",
    "classifier": "classify, token_classify",
    "late": "token_embed",
    "generator": "generate",
}


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("embedder", "/classify", {"input": "a"}),
        ("embedder", "/pooling", {"input": "a", "task": "score"}),
        ("embedder", "/pooling", {"input": "a", "task": "dance"}),
        ("embedder", "/pooling", {"input": "a"}),
        ("embedder", "/v1/completions", {"prompt": "a"}),
        ("embedder", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("classifier", "/v1/embeddings", {"input": "a"}),
        ("classifier", "/v2/embed", {"texts": ["a"]}),
        ("classifier", "/v1/score", {"text_1": "a", "text_2": "b"}),
        ("classifier", "/v2/rerank", {"query": "a", "documents": ["b"]}),
        ("late", "/v1/embeddings", {"input": ["a", "b"]}),
        ("generator", "/pooling", {"input": "a", "task": "embed"}),
        *[
            ("generator", path, {"input": "a"})
            for path in ("/v1/embeddings", "/pooling", "/classify")
        ],
        *[
            ("generator", path, {"query": "a", "documents": ["b"]})
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ],
        ("generator", "/score", {"queries": "a", "documents": "b"}),
    ],
)
async def test_a_task_that_is_not_served_is_told_those_that_are(ask, name, path, body):
    reply = await ask(name, path, **body)
    scores = path.endswith(("score", "rerank"))
    assert (reply.status_code, reply.json().get("detail")) == (
        (404, "Not Found") if scores else (400, None)
    ), reply.text
    error = reply.json()["error"]
    assert error["param"] == "task" and f"Supported: {SERVED[name]}." in error["message"]
    vllms = path in ("/pooling", "/classify", "/score", "/v1/score")
    kind = "NotFoundError" if scores else "BadRequestError"
    assert error["type"] == (kind if vllms else "invalid_request_error")
    assert ("convert=" in error["message"]) == (name == "generator")


async def test_dimensions_that_a_model_is_made_for(engine_of, client_of):
    async with client_of(app_of(engine_of("matryoshka", convert="embed"))) as client:
        for dimensions in (8, 16, 32):
            [one] = (
                await client.post("/v1/embeddings", json={"input": "a", "dimensions": dimensions})
            ).json()["data"]
            assert len(one["embedding"]) == dimensions
        wrong = await client.post("/v1/embeddings", json={"input": "a", "dimensions": 5})
        error = wrong.json()["error"]
        assert (wrong.status_code, error["param"]) == (
            400,
            "dimensions",
        ) and "made for 8, 16, 32" in error["message"]


async def test_dimensions_of_a_model_that_is_not_known_to_be_made_for_it(engine_of, client_of):
    async with client_of(app_of(engine_of("embedder"))) as client:
        for path, field in (
            ("/v1/embeddings", {"input": "a", "dimensions": 1}),
            ("/v2/embed", {"texts": ["a"], "output_dimension": 1}),
        ):
            error = (await client.post(path, json=field)).json()["error"]
            assert error["param"] == list(field)[1] and "matryoshka=True" in error["message"]
        assert (
            await client.post("/v1/embeddings", json={"input": "a", "dimensions": 32})
        ).status_code == 200


async def test_pooling_lists_pooling_tasks_only(engine_of, client_of):
    engine = engine_of("generator", extra_tasks="embed")
    assert engine.tasks == ("generate", "embed", "token_embed")
    async with client_of(app_of(engine)) as client:
        for body in (
            {"input": "a"},
            {"input": "a", "task": "generate"},
            {"input": "a", "task": "classify"},
        ):
            error = (await client.post("/pooling", json=body)).json()["error"]
            assert "Supported: embed, token_embed." in error["message"] and error["param"] == "task"


async def test_a_broken_model_fails_its_request_only(engine_of, ask):
    engine = engine_of("embedder", seed=1)
    [table] = [
        p
        for name, p in engine.engine.client.core.executor.runner.model.named_parameters()
        if "embed_tokens" in name
    ]
    with torch.no_grad():
        table[2 + LETTERS.index("!")] = float("nan")

    async def post(text):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(engine)), base_url="http://test"
        ) as client:
            return await client.post("/v1/embeddings", json={"input": ["fine", text]})

    good, bad, other = await asyncio.gather(post("fine too"), post("broken!"), post("fine as well"))
    assert (good.status_code, bad.status_code, other.status_code) == (200, 500, 200)
    error = bad.json()["error"]
    assert (error["code"], error["message"]) == (
        "model_error",
        "The model failed on input[1]: the model's result is not finite.",
    )
    for reply, text in ((good, "fine too"), (other, "fine as well")):
        np.testing.assert_allclose(
            vectors(reply), [await alone(engine, "fine"), await alone(engine, text)], atol=1e-5
        )


async def test_a_batch_is_refused_as_a_whole(engine_of):
    engine = engine_of("embedder", max_queued_requests=1, max_num_seqs=2)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app_of(engine)), base_url="http://test"
    ) as client:
        replies = await asyncio.gather(
            *[client.post("/v1/embeddings", json={"input": ["abc"] * 200}) for _ in range(3)]
        )
        assert {reply.status_code for reply in replies} == {200, 429}
        for reply in replies:
            if reply.status_code == 200:
                assert len(vectors(reply)) == 200
            else:
                assert (
                    "max_queued_requests" in reply.json()["error"]["message"]
                    and int(reply.headers["Retry-After"]) >= 1
                )
        assert vectors(
            await client.post("/v1/embeddings", json={"input": ["abc"] * 200})
        ).shape == (200, 32)


async def test_a_client_that_leaves_ends_its_batch(engine_of, steps):
    engine = engine_of("embedder", max_num_seqs=1)
    body = json.dumps({"input": ["abc"] * 2000}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    before = len(steps.num_tokens)

    async def receive():
        if (message := next(messages, None)) is not None:
            return message
        while len(steps.num_tokens) < before + 3:
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    sent = []
    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/embeddings",
        "query_string": b"",
        "headers": headers,
    }

    async def send(message):
        sent.append(message)

    await app_of(engine)(
        {**scope, "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"},
        receive,
        send,
    )
    assert sent[0]["status"] == 499
    await engine.encode("next", PoolingParams())
    assert len(steps.num_tokens) < before + 1000
    assert (engine.engine.queue.num_requests, engine.engine.has_unfinished_requests()) == (0, False)


async def test_a_request_whose_time_is_over(ask):
    reply = await ask("embedder", "/v1/embeddings", input=["abc"] * 500, timeout=1e-6)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")


async def test_pooling_gives_any_task(engine_of, ask):
    expected = await alone(engine_of("embedder"), "hello", "token_embed")
    reply = (await ask("embedder", "/pooling", input=["hello"], task="token_embed")).json()
    assert (reply["data"][0]["object"], np.shape(reply["data"][0]["data"])) == ("pooling", (5, 32))
    np.testing.assert_allclose(reply["data"][0]["data"], expected, atol=1e-5)
    [one] = (
        await ask(
            "embedder", "/pooling", input=["hello"], task="token_embed", encoding_format="base64"
        )
    ).json()["data"]
    found = np.frombuffer(base64.b64decode(one["data"]), "<f4").reshape(one["shape"])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # A model with one task needs none to be named.
    assert np.shape((await ask("late", "/pooling", input="hello")).json()["data"][0]["data"]) == (
        5,
        8,
    )


async def test_classify(engine_of, ask):
    texts = ["a", "something longer", "!?"]
    reply = (await ask("classifier", "/classify", input=texts)).json()
    for index, (one, text) in enumerate(zip(reply["data"], texts, strict=True)):
        expected = await alone(engine_of("classifier"), text, "classify")
        np.testing.assert_allclose(one["probs"], expected, atol=1e-5)
        assert abs(sum(one["probs"]) - 1) < 1e-5
        assert (one["index"], one["num_classes"], one["label"]) == (
            index,
            3,
            LABELS[str(int(expected.argmax()))],
        )
    raw = (await ask("classifier", "/classify", input="a", use_activation=False)).json()["data"][0][
        "probs"
    ]
    np.testing.assert_allclose(
        np.exp(raw) / np.exp(raw).sum(), reply["data"][0]["probs"], atol=1e-5
    )


QUERY = "who?"
DOCUMENTS = ["it was me", "no", "it was me", "somebody else, I think."]


async def expected_scores(engine_of, name, pairs):
    engine = engine_of(name)
    if name == "cross-encoder":
        return [float((await alone(engine, pair, "score"))[0]) for pair in pairs]
    task, similarity = ("embed", cosine) if name == "embedder" else ("token_embed", max_sim)
    return [
        similarity(
            await alone(engine, query, task, prompt_name="query"),
            await alone(engine, document, task, prompt_name="document"),
        )
        for query, document in pairs
    ]


@pytest.mark.parametrize("name", ["cross-encoder", "embedder", "late"])
async def test_score(engine_of, ask, name):
    expected = await expected_scores(engine_of, name, [(QUERY, document) for document in DOCUMENTS])
    assert len({round(score, 4) for score in expected}) == 3
    for path, names in (("/score", ("queries", "documents")), ("/v1/score", ("text_1", "text_2"))):
        reply = (await ask(name, path, **dict(zip(names, (QUERY, DOCUMENTS), strict=True)))).json()
        assert [(one["index"], one["object"]) for one in reply["data"]] == [
            (i, "score") for i in range(4)
        ]
        np.testing.assert_allclose([one["score"] for one in reply["data"]], expected, atol=1e-5)
    pairs = [("x", "y"), ("who?", {"text": "no"})]
    reply = (
        await ask(
            name,
            "/score",
            queries=[query for query, _ in pairs],
            documents=[document for _, document in pairs],
        )
    ).json()
    wanted = await expected_scores(engine_of, name, [("x", "y"), ("who?", "no")])
    np.testing.assert_allclose([one["score"] for one in reply["data"]], wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["cross-encoder", "embedder", "late"])
async def test_rerank(engine_of, ask, name):
    scores = await expected_scores(engine_of, name, [(QUERY, document) for document in DOCUMENTS])
    order = sorted(range(4), key=lambda i: -scores[i])
    given = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    reply = (await ask(name, "/v1/rerank", query=QUERY, documents=given, top_n=3)).json()
    assert {one["index"] for one in reply["results"]} == set(order[:3])
    np.testing.assert_allclose(
        [one["relevance_score"] for one in reply["results"]],
        [scores[i] for i in order[:3]],
        atol=1e-5,
    )
    assert [one["document"]["text"] for one in reply["results"]] == [
        DOCUMENTS[one["index"]] for one in reply["results"]
    ]
    assert reply["usage"]["total_tokens"] > 0
    for path in ("/rerank", "/v2/rerank"):
        reply = (
            await ask(name, path, query=QUERY, documents=given, return_documents=False, top_n=9)
        ).json()
        assert len(reply["results"]) == 4 and all("document" not in one for one in reply["results"])
    reply = (await ask(name, "/v2/rerank", query=QUERY, documents=given)).json()
    assert (set(reply["results"][0]), reply["meta"]["billed_units"]) == (
        {"index", "relevance_score"},
        {"search_units": 1},
    )


@pytest.mark.parametrize("name", ["cross-encoder", "embedder"])
async def test_long_documents_are_cut(engine_of, ask, name):
    documents = ["it was me, and nobody else", "no"]
    scores = await expected_scores(engine_of, name, [(QUERY, "it was"), (QUERY, "no")])
    for path in ("/rerank", "/v2/rerank"):
        results = (
            await ask(name, path, query=QUERY, documents=documents, max_tokens_per_doc=6)
        ).json()["results"]
        found = {one["index"]: one["relevance_score"] for one in results}
        np.testing.assert_allclose([found[0], found[1]], scores, atol=1e-5)
    # No half of a character stays, and what is not too long is read as it is.
    [whole, half] = await expected_scores(engine_of, name, [(QUERY, "a\U0001f4a5b"), (QUERY, "a")])
    for most, score in ((7, whole), (6, whole), (4, half)):
        [result] = (
            await ask(
                name, "/rerank", query=QUERY, documents=["a\U0001f4a5b"], max_tokens_per_doc=most
            )
        ).json()["results"]
        assert result["relevance_score"] == pytest.approx(score, abs=1e-5)
        assert result["document"]["text"] == "a\U0001f4a5b"
    long = ["no", "x" * 10**5]
    assert (await ask(name, "/v2/rerank", query=QUERY, documents=long)).status_code == 200
    reply = await ask(name, "/rerank", query=QUERY, documents=long)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "documents[1]" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/rerank", {"query": "a", "documents": []}, "documents", "empty list"),
        (
            "/rerank",
            {"query": "a", "documents": ["b", ""]},
            "documents",
            "documents[1]: the text is empty",
        ),
        (
            "/rerank",
            {"query": "a", "documents": ["b", {"title": "c"}]},
            "documents",
            "documents[1] must be a text",
        ),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "top_n": 0},
            "top_n",
            "must be at least 1",
        ),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query", "must be text"),
        ("/rerank", {"documents": ["b"]}, "query", "You must provide"),
        (
            "/score",
            {"queries": "a"},
            "documents",
            "Give one of 'documents', 'text_2', 'data_2', 'items'.",
        ),
        (
            "/score",
            {"queries": "a", "text_1": "a", "text_2": "b"},
            "queries",
            "Give one of 'queries', 'text_1', 'data_1'.",
        ),
        (
            "/score",
            {"queries": ["a", "b"], "documents": ["c", "d", "e"]},
            "queries",
            "2 queries for 3 documents",
        ),
        (
            "/score",
            {"queries": ["a", 1], "documents": ["c", "d"]},
            "queries",
            "queries[1] must be a text",
        ),
        ("/v2/embed", {"texts": ["a", ""]}, "texts", "texts[1]: the text is empty"),
        ("/v2/embed", {"texts": ["a", "x" * 500], "truncate": "NONE"}, "texts", "texts[1]: "),
        ("/v2/embed", {"texts": ["a"], "truncate": "START"}, "truncate", "'NONE' or 'END'"),
        (
            "/v2/embed",
            {"texts": ["a"], "embedding_types": ["int4"]},
            "embedding_types",
            "'float', 'int8'",
        ),
        (
            "/v2/embed",
            {"texts": ["a"], "output_dimension": 99},
            "output_dimension",
            "ask for 1 to 32",
        ),
        (
            "/v2/embed",
            {"texts": ["a", "b" * 9], "truncate": "NONE", "max_tokens": 8},
            "texts",
            "texts[1]: the text has 9 tokens, but max_tokens is 8",
        ),
        ("/pooling", {"input": "a"}, "task", "Set 'task'. Supported: embed, token_embed."),
        (
            "/pooling",
            {"input": ["a", "b"], "task": "classify"},
            "task",
            "Supported: embed, token_embed.",
        ),
        (
            "/pooling",
            {"input": [5, 6], "task": "embed", "prompt_name": "query"},
            "prompt_name",
            "goes before a text",
        ),
        ("/rerank", {"query": "", "documents": ["a", "b"]}, "query", "query: the text is empty"),
        (
            "/rerank",
            {"query": "x" * 126, "documents": ["a", "b"]},
            "query",
            "query: the prompt has 129 tokens",
        ),
        ("/score", {"queries": "", "documents": ["a"]}, "queries", "queries: the text is empty"),
        (
            "/score",
            {"queries": ["a", ""], "documents": ["a", "b"]},
            "queries",
            "queries[1]: the text is empty",
        ),
        (
            "/score",
            {"text_1": "a", "text_2": ["b", "x" * 126]},
            "text_2",
            "text_2[1]: the prompt has 129 tokens",
        ),
        (
            "/pooling",
            {"input": "a", "task": "embed", "use_activation": True},
            "use_activation",
            "has no effect on the task 'embed'",
        ),
        (
            "/score",
            {"queries": "a", "documents": "b", "instruction": "Find."},
            "instruction",
            "takes no instruction",
        ),
    ],
)
async def test_bad_bodies(ask, path, body, param, message):
    reply = await ask("embedder", path, **body)
    assert reply.status_code == 400, reply.text
    assert message in reply.json()["error"]["message"] and reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/rerank", {"query": "", "documents": ["a", "b"]}, "query", "query: the text is empty"),
        (
            "/rerank",
            {"query": "", "documents": ["a"], "truncate_prompt_tokens": 9},
            "query",
            "query: the text is empty",
        ),
        (
            "/rerank",
            {"query": "x" * 200, "documents": ["a"]},
            "query",
            "query alone has 200 tokens",
        ),
        (
            "/rerank",
            {"query": "x" * (2**20 + 1), "documents": ["a"]},
            "query",
            "query: the text has 1048577 characters",
        ),
        (
            "/rerank",
            {"query": "x" * 100, "documents": ["a", "b" * 29]},
            "documents",
            "documents[1]: the prompt has 129 tokens",
        ),
        (
            "/v2/rerank",
            {"query": "x" * 200, "documents": ["a", ""]},
            "documents",
            "documents[1]: the text is empty",
        ),
        (
            "/v1/score",
            {"text_1": ["a", "x" * 200], "text_2": ["a", "b"]},
            "text_1",
            "text_1[1] alone has 200 tokens",
        ),
    ],
)
async def test_what_is_wrong_with_a_pair(ask, path, body, param, message):
    reply = await ask("cross-encoder", path, **body)
    assert reply.status_code == 400, reply.text
    assert message in reply.json()["error"]["message"] and reply.json()["error"]["param"] == param


async def test_an_instruction_needs_a_place(engine_of, client_of, tmp_path):
    (tmp_path / "plain.txt").write_text("{query}? {document}.")
    engine = engine_of("cross-encoder", score_template=str(tmp_path / "plain.txt"))
    async with client_of(app_of(engine)) as client:
        body = {"query": "a", "documents": ["b"]}
        assert (await client.post("/rerank", json=body)).status_code == 200
        reply = await client.post("/rerank", json={**body, "instruction": "Find."})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "instruction")
    assert "has no place {instruction}" in reply.json()["error"]["message"]


async def test_a_document_that_is_cut_and_no_valid_text(engine_of, client_of):
    body = json.dumps({"query": "a", "documents": ["b", "c\ud800"], "max_tokens_per_doc": 1})
    async with client_of(app_of(engine_of("embedder"))) as client:
        error = (
            await client.post("/rerank", content=body, headers={"content-type": "application/json"})
        ).json()["error"]
    assert (
        error["param"] == "documents"
        and "documents[1]: the text is not a valid text" in error["message"]
    )


async def test_special_tokens_leave_no_text(ask):
    for path, body, param in (
        ("/v2/embed", {"texts": "xyz", "max_tokens": 1}, "max_tokens"),
        ("/v1/embeddings", {"input": "xyz", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    ):
        reply = await ask("encoder", path, **body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert (
            "1 tokens leave no room for a text beside 1 special tokens"
            in reply.json()["error"]["message"]
        )


async def test_coheres_embed(engine_of, ask, client_of):
    engine = engine_of("embedder")
    texts = ["one", "x" * 500]
    for kind, before in (
        ("search_query", "q: "),
        ("search_document", "d: "),
        ("classification", ""),
    ):
        body = {
            "texts": texts,
            "input_type": kind,
            "embedding_types": ["float", "base64"],
            "max_tokens": 10**6,
        }
        reply = (await ask("embedder", "/v2/embed", **body)).json()
        expected = [await alone(engine, (before + text)[:128]) for text in texts]
        np.testing.assert_allclose(reply["embeddings"]["float"], expected, atol=1e-5)
        decoded = [
            np.frombuffer(base64.b64decode(one), "<f4") for one in reply["embeddings"]["base64"]
        ]
        np.testing.assert_array_equal(decoded, np.float32(reply["embeddings"]["float"]))
        assert reply["meta"]["billed_units"] == {"input_tokens": len(before) + 3 + 128}
    async with client_of(app_of(engine_of("matryoshka", convert="embed"))) as client:
        reply = (
            await client.post(
                "/v2/embed", json={"texts": texts, "max_tokens": 2, "output_dimension": 8}
            )
        ).json()
    assert (
        reply["response_type"],
        list(reply["embeddings"]),
        np.shape(reply["embeddings"]["float"]),
    ) == (
        "embeddings_by_type",
        ["float"],
        (2, 8),
    )
    assert reply["meta"]["billed_units"] == {"input_tokens": 4}


async def test_coheres_types(ask):
    kinds = ["float", "int8", "uint8", "binary", "ubinary"]
    found = {}
    for path, version in (("/v2/embed", "2"), ("/v1/embed", "1")):
        reply = (await ask("embedder", path, texts=["one", "two"], embedding_types=kinds)).json()
        assert (reply["response_type"], reply["meta"]["api_version"]["version"]) == (
            "embeddings_by_type",
            version,
        )
        found = {name: np.array(value) for name, value in reply["embeddings"].items()}
        assert list(found) == kinds
        np.testing.assert_array_equal(found["int8"], np.rint(found["float"] * 127))
        np.testing.assert_array_equal(found["uint8"], found["int8"] + 128)
        bits = np.unpackbits(found["ubinary"].astype(np.uint8), axis=1)
        np.testing.assert_array_equal(bits, found["float"] > 0)
        np.testing.assert_array_equal(found["binary"], found["ubinary"] - 128)
    reply = (await ask("embedder", "/v1/embed", texts=["one", "two"])).json()
    assert reply["response_type"] == "embeddings_floats"
    np.testing.assert_array_equal(reply["embeddings"], found["float"])
