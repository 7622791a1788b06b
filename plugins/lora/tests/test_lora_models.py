"""Adapters of models that pool, and of those with an encoder."""

from __future__ import annotations

import warnings

import pytest
import torch
from lora_adapters import PROMPT, given
from peft import LoraConfig, PeftModel, get_peft_model
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm_devkit import make_checkpoint
from toolkit_lm_lora.front import LoRARequest
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

BERT = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
DECODER = r".*decoder\..*(self_attn\..*_proj|encoder_attn\.(q|out)_proj|fc1|fc2)"


def save(load, path, targets, **fields):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        made = get_peft_model(load(), LoraConfig(r=4, target_modules=targets, **fields))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
        made.save_pretrained(path)
        return PeftModel.from_pretrained(load(), path).eval()


@torch.no_grad()
def test_a_model_that_pools(tmp_path):
    """MiniLM's shape. Its pooler, which means of tokens do without, is adapted too."""
    torch.manual_seed(0)
    make_checkpoint(tmp_path / "base", BertModel(BertConfig(**BERT)).eval())
    load = lambda: BertModel.from_pretrained(tmp_path / "base")  # noqa: E731
    adapted = save(load, tmp_path / "adapter", "all-linear")
    own = {"lora": {"enabled": True}}
    with LLM(str(tmp_path / "base"), runner="pooling", dtype="float32", plugin_option=own) as llm:
        prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:9]}] * 2
        request = LoRARequest("a", 1, str(tmp_path / "adapter"))
        outputs = llm.embed(prompts, lora_request=[request, request, None, None], use_tqdm=False)
        for output, prompt, model in zip(
            outputs, prompts, [adapted] * 2 + [load().eval()] * 2, strict=True
        ):
            found = torch.tensor(output.outputs.embedding)
            ids = torch.tensor([prompt["prompt_token_ids"]])
            hidden = model(ids).last_hidden_state[0].mean(0)
            assert (found - hidden / hidden.norm()).abs().max() < 1e-5
        alone = llm.encode(prompts[0], pooling_task="embed", lora_request=request, use_tqdm=False)
        assert alone[0].outputs.data.tolist() == outputs[0].outputs.embedding
        with pytest.raises(RequestError, match="lora_request has 1 entries for 4 prompts"):
            llm.embed(prompts, lora_request=[request], use_tqdm=False)
        with pytest.raises(TypeError, match="takes no 'lora_requests'"):
            llm.embed(prompts, lora_requests=[request], use_tqdm=False)


@pytest.mark.parametrize("saved", [["classifier"], ["classifier", "pooler"]], ids=str)
@torch.no_grad()
def test_heads_of_a_classifier(tmp_path, saved):
    """A cross-encoder's shape: the adapter brings a head, or all of it."""
    torch.manual_seed(0)
    config = BertConfig(**BERT, num_labels=3)
    make_checkpoint(tmp_path / "base", BertForSequenceClassification(config).eval())
    load = lambda: BertForSequenceClassification.from_pretrained(tmp_path / "base")  # noqa: E731
    adapted = save(load, tmp_path / "adapter", ["query", "dense"], modules_to_save=saved)
    request = LoRARequest("a", 1, str(tmp_path / "adapter"))
    own = {"lora": {"enabled": True}}
    with LLM(str(tmp_path / "base"), runner="pooling", dtype="float32", plugin_option=own) as llm:
        prompts = [{"prompt_token_ids": PROMPT[:length]} for length in (33, 9, 20, 9)]
        requests = [request, None, request, request]
        outputs = llm.classify(prompts, lora_request=requests, use_tqdm=False)
        for output, prompt, one in zip(outputs, prompts, requests, strict=True):
            model = adapted if one else load().eval()
            ids = torch.tensor([prompt["prompt_token_ids"]])
            expected = model(ids).logits[0].softmax(-1)
            assert not output.error, output.error
            assert (torch.tensor(output.outputs.probs) - expected).abs().max() < 1e-5


@torch.no_grad()
def test_the_decoder_of_a_model_with_an_encoder(tmp_path):
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=272,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=128,
        init_std=0.2,
        forced_eos_token_id=None,
    )
    make_checkpoint(tmp_path / "base", BartForConditionalGeneration(config).eval())
    load = lambda: BartForConditionalGeneration.from_pretrained(tmp_path / "base")  # noqa: E731
    adapted = save(load, tmp_path / "adapter", DECODER)
    save(load, tmp_path / "encoder", r".*encoder\.layers.*fc1")
    save(load, tmp_path / "shared", ["shared"])
    start = [config.decoder_start_token_id, 20, 30]
    prompt = {
        "encoder_prompt": {"prompt_token_ids": PROMPT},
        "decoder_prompt": {"prompt_token_ids": start},
    }
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    own = {"lora": {"enabled": True}}
    with LLM(str(tmp_path / "base"), dtype="float32", plugin_option=own) as llm:
        request = LoRARequest("a", 1, str(tmp_path / "adapter"))
        outputs = llm.generate(
            [prompt] * 3, params, lora_request=[request, None, request], use_tqdm=False
        )
        assert given(outputs[0]) == given(outputs[2])
        for output, model in zip(outputs, (adapted, load().eval()), strict=False):
            ids = [*start, *output.outputs[0].token_ids]
            logits = model(
                input_ids=torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([ids])
            ).logits[0, len(start) - 1 : -1]
            assert logits.argmax(-1).tolist() == list(output.outputs[0].token_ids)
            for step, logprobs in zip(
                output.outputs[0].logprobs, logits.log_softmax(-1), strict=True
            ):
                assert all(
                    abs(at.logprob - float(logprobs[token])) < 1e-4 for token, at in step.items()
                )
        for name in ("encoder", "shared"):
            request = LoRARequest(name, 1, str(tmp_path / name))
            [found] = llm.generate(prompt, params, lora_request=request, use_tqdm=False)
            assert "which is of an encoder" in found.error, name
