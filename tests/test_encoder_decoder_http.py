"""An encoder-decoder model behind the HTTP API: two prompts in one completion, and chats with
summarisers and translators."""

from __future__ import annotations

import httpx
import pytest
import torch
import transformers
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_server.app import create_app

VOCAB = 272
SIZES = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 32,
}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3, "decoder_start_token_id": 2}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder, and transformers' model."""
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCAB,
            max_position_embeddings=64,
            forced_eos_token_id=None,
            **SIZES,
            **heads,
            **IDS,
        )
    ).eval()
    randomize(model)
    return make_checkpoint(tmp_path_factory.mktemp("bart"), model), model


def greedy(model, encoder_ids, decoder_ids, count):
    found = model.generate(
        torch.tensor([encoder_ids]),
        decoder_input_ids=torch.tensor([decoder_ids]),
        max_new_tokens=count,
        eos_token_id=-1,
    )
    return found[0, len(decoder_ids) :].tolist()


@pytest.mark.anyio
async def test_completions_and_chats(checkpoint):
    folder, model = checkpoint
    async with AsyncLLM(
        VllmConfig.make(model=str(folder), device="cpu", max_num_seqs=4, num_kv_blocks=64)
    ) as llm:
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            common = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}

            async def ask(path="/v1/completions", **body):
                answer = await client.post(path, json={**common, **body})
                return answer.status_code, answer.json()

            text = llm.renderer.render_prompt("A long text.").token_ids
            status, plain = await ask(prompt="A long text.")
            assert status == 200
            assert plain["usage"]["prompt_tokens"] == len(text) + 1
            expected = llm.renderer.decode(greedy(model, text, [2], 5), skip_special_tokens=True)
            assert plain["choices"][0]["text"] == expected
            status, both = await ask(encoder_prompt="A long text.", decoder_prompt=[2, 0, 40, 50])
            assert status == 200
            assert both["usage"]["prompt_tokens"] == len(text) + 4
            assert both["choices"][0]["text"] == llm.renderer.decode(
                greedy(model, text, [2, 0, 40, 50], 5), skip_special_tokens=True
            )
            status, alone = await ask(encoder_prompt="A long text.")
            assert alone["choices"][0]["text"] == expected
            for body in ({"decoder_prompt": "b"}, {"encoder_prompt": "a", "prompt": "b"}, {}):
                status, error = await ask(**body)
                assert status == 400
                assert "encoder_prompt" in error["error"]["message"]
            status, error = await ask(prompt=[5] * 65)
            assert status == 400
            assert "max_encoder_len" in error["error"]["message"]
            status, answered = await ask(
                "/v1/chat/completions", messages=[{"role": "user", "content": "A long text."}]
            )
            assert status == 200
            assert answered["usage"]["completion_tokens"] == 5


@pytest.mark.anyio
async def test_a_model_without_an_encoder_refuses_two_prompts():
    async with (
        AsyncLLM(VllmConfig.make(model="tiny", num_kv_blocks=32, max_model_len=64)) as llm,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(llm)), base_url="http://test"
        ) as client,
    ):
        answer = await client.post(
            "/v1/completions", json={"encoder_prompt": "a", "decoder_prompt": "b"}
        )
    assert answer.status_code == 400
    assert "only encoder-decoder models" in answer.json()["error"]["message"]
