"""Prompts of embeddings: their answers are those of the tokens whose embeddings they are."""

from __future__ import annotations

import io
import json
import zipfile
from base64 import b64decode, b64encode

import httpx
import pytest
import torch
import transformers
from safetensors.torch import save
from toolkit_lm import AsyncLLM
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError, UnsupportedError
from toolkit_lm_devkit import make_checkpoint
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_vllm import LLM, SamplingParams
from toolkit_lm_vllm_names.embeds_format import decoded
from toolkit_lm_vllm_names.table import translate
from toolkit_lm_vllm_names.tensors import encoded

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
OPTIONS = {"max_model_len": 256, "num_gpu_blocks_override": 64, "block_size": 16}
FAMILIES = {
    "llama": ("LlamaConfig", SMALL, {}),
    "llama by transformers": ("LlamaConfig", SMALL, {"model_impl": "transformers"}),
    "gemma2": ("Gemma2Config", {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 16}, {}),
    "granite": ("GraniteConfig", {**SMALL, "embedding_multiplier": 3.5}, {}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
        {},
    ),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 4}, {}),
}


def hf_model(name: str):
    """A model of transformers with random weights, whose greedy answers vary."""
    kind, fields, _ = FAMILIES[name]
    torch.manual_seed(3)
    config = getattr(transformers, kind)(**fields, initializer_range=0.4)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]


def answers(outputs) -> list[list[int]]:
    for output in outputs:
        assert output.error is None
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_of_tokens_answer_as_the_tokens(name, tmp_path):
    model = hf_model(name)
    make_checkpoint(tmp_path, model)
    prompts = prompts_of(3, 40, 100)
    prompts.append(prompts[2][:64] + prompts[1][:10])
    with torch.no_grad():
        embeds = [model.get_input_embeddings()(torch.tensor(ids)) for ids in prompts]
    more = {**OPTIONS, **FAMILIES[name][2], "dtype": "float32", "max_num_seqs": 3}
    with LLM(str(tmp_path), enable_prompt_embeds=True, max_num_batched_tokens=48, **more) as llm:
        expected = answers(llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY))
        assert len({*map(tuple, expected)}) == len(prompts)
        cold = llm.generate([{"prompt_embeds": rows} for rows in embeds], GREEDY)
        warm = llm.generate([{"prompt_embeds": rows[None]} for rows in embeds], GREEDY)
        assert answers(cold) == answers(warm) == expected
        assert [output.prompt_token_ids for output in cold] == [[0] * len(ids) for ids in prompts]
        assert [output.num_cached_tokens for output in warm] == [0, 32, 96, 64]
        # The tokens that stand for them share nothing with them.
        [zeros] = llm.generate({"prompt_token_ids": [0] * 100}, GREEDY)
        assert not zeros.num_cached_tokens and answers([zeros]) != expected[2:3]
        # Between tokens, in one step.
        mixed = [{"prompt_token_ids": prompts[0]}, {"prompt_embeds": embeds[1]}]
        assert answers(llm.generate(mixed, GREEDY)) == expected[:2]


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"engine_process": True},
        {"optimization_level": 2},
        {"num_gpu_blocks_override": 14, "max_model_len": 128},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_in_every_kind_of_engine(options, tmp_path):
    model = hf_model("llama")
    make_checkpoint(tmp_path, model)
    prompts = prompts_of(40, 60, 70)
    with torch.no_grad():
        embeds = [model.get_input_embeddings()(torch.tensor(ids)) for ids in prompts]
    more = {**OPTIONS, "dtype": "float32", "max_num_seqs": 3, **options}
    params = GREEDY.replace(max_tokens=24)
    with LLM(str(tmp_path), enable_prompt_embeds=True, **more) as llm:
        expected = answers(llm.generate([{"prompt_token_ids": ids} for ids in prompts], params))
        llm.reset_prefix_cache()
        for _ in range(2):
            outputs = llm.generate([{"prompt_embeds": rows} for rows in embeds], params)
            assert answers(outputs) == expected


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", enable_prompt_embeds=True, max_model_len=64) as made:
        yield made


@pytest.fixture(scope="module")
def rows(llm) -> torch.Tensor:
    [found] = llm.apply_model(lambda model: model.embed_input_ids(torch.arange(5, 15)).clone())
    return found


def saved(tensor, **options) -> str:
    """Base64 of what torch.save writes."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer, **options)
    return b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 8), (1, 3, 8), (300, 70000 // 300)])
def test_formats_of_a_tensor(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    grown = torch.nn.Parameter(tensor).detach().requires_grad_()
    files = {
        "encoded": encoded(tensor),
        "safetensors": b64encode(save({"any": tensor})).decode(),
        "torch.save": saved(tensor),
        "with a gradient": saved(grown),
        "a part": saved(torch.cat([tensor, tensor])[-shape[0] :]) if len(shape) == 2 else None,
    }
    flat = tensor.reshape(shape[-2:])
    for name, text in files.items():
        if text is None:
            continue
        found = decoded(text, 2**24)
        data = torch.frombuffer(bytearray(found.data), dtype=dtype).view(found.num_tokens, -1)
        assert data.equal(flat), name


class Evil:
    """Its pickle runs a function."""

    def __reduce__(self):
        return (print, ("a pickle was run",))


def _zipped(tensor, change) -> str:
    """The archive of torch.save with files changed."""
    files = zipfile.ZipFile(io.BytesIO(b64decode(saved(tensor))))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in change({name: files.read(name) for name in files.namelist()}).items():
            archive.writestr(name, data)
    return b64encode(buffer.getvalue()).decode()


def _header(**changes) -> str:
    data = save({"any": torch.zeros(2, 4)})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header["any"] |= changes
    text = json.dumps(header).encode()
    return b64encode(len(text).to_bytes(8, "little") + text + bytes(32)).decode()


SHAPED = torch.zeros(2, 4)
WRONG = {
    "no base64": "§",
    "no file": b64encode(b"x" * 100).decode(),
    "a truncated file": b64encode(save({"a": SHAPED})[:-1]).decode(),
    "two tensors": b64encode(save({"a": SHAPED, "b": torch.zeros(2, 4)})).decode(),
    "too long": "A" * 3_000_000,
    "of another rank": saved(torch.zeros(8)),
    "two prompts": saved(torch.zeros(2, 2, 4)),
    "of integers": saved(torch.zeros(2, 4, dtype=torch.int64)),
    "of doubles": saved(torch.zeros(2, 4, dtype=torch.float64)),
    "a list": saved([SHAPED]),
    "a parameter": saved(torch.nn.Parameter(SHAPED)),
    "a function": saved(Evil()),
    "not contiguous": saved(torch.zeros(4, 2).T),
    "empty": saved(torch.zeros(0, 4)),
    "in the old format": saved(SHAPED, _use_new_zipfile_serialization=False),
    "a storage too short": _zipped(
        SHAPED, lambda files: {n: d[:7] if n.endswith("/0") else d for n, d in files.items()}
    ),
    "without its storage": _zipped(
        SHAPED, lambda files: {n: d for n, d in files.items() if not n.endswith("/0")}
    ),
    "big-endian": _zipped(
        SHAPED, lambda files: {n: b"big" if "byteorder" in n else d for n, d in files.items()}
    ),
    "many files": _zipped(SHAPED, lambda files: files | {f"more/{i}": b"" for i in range(20)}),
    "a shape of text": _header(shape="24"),
    "a negative shape": _header(shape=[-2, -4]),
    "a shape of lists": _header(shape=[[2], [4]]),
    "offsets elsewhere": _header(data_offsets=[0, 2**40]),
    "an unknown dtype": _header(dtype="F8"),
    "a dtype of lists": _header(dtype=[1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_tensor_is_refused(name, capsys):
    with pytest.raises(RequestError, match="prompt_embeds") as told:
        decoded(WRONG[name], 2**20)
    assert told.value.param == "prompt_embeds" and "run" not in capsys.readouterr().out


def test_a_compressed_archive_is_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**20))
    with pytest.raises(RequestError, match="does not write"):
        decoded(b64encode(buffer.getvalue()).decode(), 2**20)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_embeds": torch.zeros(8)}, r"not a tensor \(8,\)"),
        ({"prompt_embeds": [[0.0]]}, "not a list"),
        ({"prompt_embeds": torch.zeros(2, 8)}, "hidden size is"),
        ({"prompt_embeds": torch.zeros(2, 8), "prompt": "hi"}, "prompt_embeds or prompt"),
    ],
)
def test_wrong_prompts(llm, prompt, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_logprobs": 0},
        {"repetition_penalty": 1.1},
        {"extra_args": {"no_repeat_ngram_size": 2}},
        {"extra_args": {"dry_multiplier": 0.8}},
        {"truncate_prompt_tokens": 4},
    ],
)
def test_parameters_that_read_tokens_of_the_prompt(llm, rows, options):
    with pytest.raises(RequestError):
        llm.generate([{"prompt_embeds": rows}], GREEDY.replace(**options))


def test_longer_than_the_model(llm, rows):
    with pytest.raises(RequestError, match="maximum context length"):
        llm.generate([{"prompt_embeds": rows.repeat(20, 1)}], GREEDY)


def test_off_until_asked_for(rows):
    with LLM("tiny") as made, pytest.raises(RequestError, match="enable_prompt_embeds"):
        made.generate([{"prompt_embeds": rows}], GREEDY)


def test_models_without_the_seam_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"enable_prompt_embeds: \w+ has a part 'media'"):
        LLM("tiny-vision", enable_prompt_embeds=True)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_over_http(rows):
    options = translate({"model": "tiny", "enable_prompt_embeds": True, "max_model_len": 64})
    config = VllmConfig.make(**options)
    ids = list(range(5, 15))
    body = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    async with AsyncLLM(config) as engine:
        app = create_app(engine, ServerOptions())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def complete(**fields):
                return await client.post("/v1/completions", json={**body, **fields})

            [expected] = (await complete(prompt=ids)).json()["choices"]
            assert len(expected["token_ids"]) > 2
            for fields in (
                {"prompt_embeds": encoded(rows)},
                {"prompt_embeds": saved(rows), "prompt": ""},
                {"prompt_embeds": [saved(rows)], "prompt": []},
            ):
                reply = await complete(**fields)
                assert reply.status_code == 200, reply.text
                [choice] = reply.json()["choices"]
                assert choice["token_ids"] == expected["token_ids"]
                assert reply.json()["usage"]["prompt_tokens"] == len(ids)
            for fields, param in (
                ({"prompt_embeds": saved(Evil())}, "prompt_embeds"),
                ({"prompt_embeds": [encoded(rows)] * 2}, "prompt_embeds"),
                ({"prompt_embeds": encoded(rows), "prompt": "hi"}, "prompt"),
                ({"prompt_embeds": encoded(rows), "echo": True}, "echo"),
                ({"prompt_embeds": encoded(rows), "prompt_logprobs": 1}, "prompt_logprobs"),
                ({"prompt_embeds": 7}, "prompt_embeds"),
            ):
                reply = await complete(**fields)
                assert reply.status_code == 400, reply.text
                assert reply.json()["error"]["param"] == param
            # A chat has a prompt of its own.
            chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_embeds": encoded(rows)}
            reply = await client.post("/v1/chat/completions", json=chat)
            assert reply.status_code == 400 and "by itself" in reply.text
