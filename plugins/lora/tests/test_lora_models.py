"""Adapters of models that pool, and of those with an encoder."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from lora_adapters import PROMPT
from peft import LoraConfig, PeftModel, get_peft_model
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_lora.front import LoRARequest
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    T5Config,
    T5ForConditionalGeneration,
)

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
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


def save(load, path, target_modules, **fields):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        made = get_peft_model(load(), LoraConfig(r=4, target_modules=target_modules, **fields))
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


@torch.no_grad()
def test_task_adapters_in_the_checkpoint_of_jina_3(tmp_path):
    """Folders of the checkpoint, by their tasks."""
    torch.manual_seed(0)
    config = JinaEmbeddingsV3Config(**BERT, type_vocab_size=1)
    base = tmp_path / "base"
    make_checkpoint(base, JinaEmbeddingsV3Model(config).eval())
    load = lambda: JinaEmbeddingsV3Model.from_pretrained(base).eval()  # noqa: E731
    plain = load()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
    adapted = {
        task: save(load, base / task, targets) for task in ("retrieval_query", "text_matching")
    }
    models = {None: plain, **adapted}
    own = {"lora": {"folder": str(base)}}
    with LLM(str(base), runner="pooling", dtype="float32", plugin_option=own) as llm:
        outputs = llm.embed(
            [{"prompt_token_ids": PROMPT}] * 3,
            lora_request=[
                None if task is None else LoRARequest(task, 1, str(base / task)) for task in models
            ],
            use_tqdm=False,
        )
    for output, model in zip(outputs, models.values(), strict=True):
        assert not output.error, output.error
        hidden = model(torch.tensor([PROMPT])).last_hidden_state[0].mean(0)
        found = torch.tensor(output.outputs.embedding)
        assert (found - hidden / hidden.norm()).abs().max() < 1e-5


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


SHAPE = {
    "vocab_size": 272,
    "d_model": 64,
    "decoder_start_token_id": 3,
    "pad_token_id": 2,
    "eos_token_id": 1,
}
BART = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 128,
    "init_std": 0.2,
    "forced_eos_token_id": None,
}
T5 = {"num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 96, "feed_forward_proj": "gated-gelu"}
WITH_ENCODERS = {
    "bart": (BartForConditionalGeneration, BartConfig(**SHAPE, **BART)),
    "t5": (T5ForConditionalGeneration, T5Config(**SHAPE, **T5)),
}
OF_ENCODERS = {
    "bart": {
        "all": {"target_modules": "all-linear"},
        "dora": {"target_modules": ["fc1", "k_proj"], "use_dora": True},
        # PEFT changes a module that the model does not call.
        "shared": {"target_modules": ["shared", "q_proj"]},
        "norms": {"target_modules": ["fc2"], "modules_to_save": ["final_layer_norm"]},
        "decoder": {"target_modules": DECODER},
    },
    "t5": {
        "all": {"target_modules": "all-linear"},
        "norms": {"target_modules": ["wo"], "modules_to_save": ["layer_norm"]},
    },
}


@pytest.mark.parametrize(
    ("family", "level", "ranks", "slots"),
    [
        ("bart", 0, 2, 8),
        ("bart", 0, 1, 1),
        ("t5", 1, 1, 8),
        pytest.param("bart", 1, 1, 8, marks=pytest.mark.nightly),
        pytest.param("bart", 0, 1, 8, marks=pytest.mark.nightly),
        pytest.param("t5", 0, 1, 1, marks=pytest.mark.nightly),
    ],
)
@torch.no_grad()
def test_models_with_an_encoder(tmp_path, family, level, ranks, slots):
    """The layers of encoder, decoder and cross attention. Nobody reads another one's encoder, also
    while adapters take turns."""
    torch.manual_seed(0)
    kind, config = WITH_ENCODERS[family]
    model = kind(config).eval()
    randomize(model)
    make_checkpoint(tmp_path / "base", model)
    load = lambda: kind.from_pretrained(tmp_path / "base")  # noqa: E731
    models = {None: load().eval()}
    for name, fields in OF_ENCODERS[family].items():
        models[name] = save(load, tmp_path / name, **fields)
    start = [config.decoder_start_token_id, 20, 30]
    asked = [(name, length) for length in (33, 12) for name in (*models, None)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    options = {"enabled": True, "max_adapters": slots}
    own = {"plugin_option": {"lora": options}, "optimization_level": level}
    if ranks > 1:
        own |= {"plugins": [THREADS], "executor": "threads", "tensor_parallel_size": ranks}
    if level:
        own["compilation_config"] = json.dumps({"backend": "eager"})
    with LLM(str(tmp_path / "base"), dtype="float32", **own) as llm:
        for count in (len(asked), 1):
            outputs = llm.generate(
                [
                    {
                        "encoder_prompt": {"prompt_token_ids": PROMPT[:length]},
                        "decoder_prompt": {"prompt_token_ids": start},
                    }
                    for _, length in asked[:count]
                ],
                params,
                lora_request=[
                    None if name is None else LoRARequest(name, 1, str(tmp_path / name))
                    for name, _ in asked[:count]
                ],
                use_tqdm=False,
            )
            for output, (name, length) in zip(outputs, asked, strict=False):
                if name == "shared":
                    assert "embeddings of models with an encoder" in output.error
                    continue
                assert not output.error, output.error
                [choice] = output.outputs
                ids = [*start, *choice.token_ids]
                given = {"decoder_input_ids": torch.tensor([ids])}
                logits = models[name](input_ids=torch.tensor([PROMPT[:length]]), **given).logits
                expected = logits[0, len(start) - 1 : -1].log_softmax(-1)
                assert expected.argmax(-1).tolist() == list(choice.token_ids), name
                for step, logprobs in zip(choice.logprobs, expected, strict=True):
                    for token, at in step.items():
                        assert abs(at.logprob - float(logprobs[token])) < 1e-4, name
