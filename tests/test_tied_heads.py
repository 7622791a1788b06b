"""A checkpoint that ties its head to the embeddings in config.json, and holds another head: the
file counts, as transformers has it."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import CAUSAL, save
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    ParallelLMHead,
    Quantization,
    ShardLoader,
    UnquantizedMethod,
    VocabParallelEmbedding,
    construction,
    new_parameter,
)
from toolkit_lm.model.matching import load_parameters
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import randomize

MODELS = Plugins.load(PluginsConfig(plugins=["decoder", "moe"])).models
# A model without a head names no type.
OWN = {entry.model_type: "auto" for entry in MODELS.entries() if entry.model_type is not None}
FALLBACK = {"stablelm": "transformers", "gpt_neox": "transformers", "llama": "transformers"}
PROMPT = [5, 17, 33, 99, 120, 7, 44, 60]
TEXT = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOWER = {
    "model_type": "clip_vision_model",
    **TEXT,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 32,
}


def edit(folder, change):
    file = folder / "config.json"
    hf_config = json.loads(file.read_text())
    change(hf_config)
    file.write_text(json.dumps(hf_config))


def ours(folder, **options):
    llm = LLM(
        model=str(folder),
        renderer="tokens",
        dtype="float32",
        num_kv_blocks=64,
        max_num_seqs=4,
        max_model_len=64,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params)
    return list(output.outputs[0].token_ids)


def theirs(model):
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(PROMPT) :].tolist()


def untied(model_type, folder):
    """A checkpoint with a head of its own, whose config.json says that it is tied."""
    save(model_type, folder, tie_word_embeddings=False)
    edit(folder, lambda hf_config: hf_config.update(tie_word_embeddings=True))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(("model_type", "model_impl"), [*OWN.items(), *FALLBACK.items()])
def test_a_head_that_differs_is_kept_and_told(model_type, model_impl, tmp_path, caplog):
    model = untied(model_type, tmp_path)
    with caplog.at_level(logging.WARNING, "toolkit_lm"):
        found = ours(tmp_path, model_impl=model_impl)
    assert found == theirs(model)
    [message] = [text for text in caplog.messages if "which differ: they are not tied" in text]
    assert "`tie_word_embeddings: false` in config.json silences this" in message
    assert CAUSAL[model_type]


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_an_equal_copy_is_no_reason_to_complain(model_impl, tmp_path, caplog):
    model = save("llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        tmp_path / "model.safetensors",
    )
    assert ours(tmp_path, model_impl=model_impl) == theirs(model)
    assert not [text for text in caplog.messages if "tied" in text]


class Scaled(UnquantizedMethod):
    """A weight times a factor per output, plus an offset: a tied head shares all three."""

    def create(self, layer, spec):
        if spec.tied_to is not None:
            self.weight, self.factor, self.offset = (
                getattr(spec.tied_to, name) for name in ("weight", "factor", "offset")
            )
        else:
            outputs = spec.outputs
            self.weight = new_parameter(spec.shape, spec.dtype, spec.loader())
            self.factor, self.offset = (
                new_parameter(spec.shape[:1], spec.dtype, ShardLoader(outputs)) for _ in range(2)
            )
        layer.weight = self.weight
        layer.factor = self.factor
        layer.offset = self.offset


class ScaledLayers(Quantization):
    def method(self, spec):
        return Scaled()


PARTS = ("weight", "factor", "offset")


def tied_pair():
    config = VllmConfig.default({}, dtype="float32")
    pair = torch.nn.Module()
    with construction(quantization=ScaledLayers(config)):
        pair.embed = VocabParallelEmbedding(6, 4, vllm_config=config, prefix="embed")
        pair.head = ParallelLMHead(6, 4, tied_to=pair.embed, vllm_config=config, prefix="head")
    return pair


def fill(pair, weights):
    load_parameters(pair, weights.items(), packed={}, renames=(), ignored=())


def of_both(*differing):
    """A checkpoint of both layers; those parameters of the head differ."""
    weights = {}
    for name in PARTS:
        shape = (6, 4) if name == "weight" else (6,)
        weights[f"embed.{name}"] = torch.zeros(shape) if name == "offset" else torch.randn(shape)
        weights[f"head.{name}"] = weights[f"embed.{name}"] + float(name in differing)
    return weights


@pytest.mark.parametrize("differing", [("weight",), ("weight", "factor"), ("offset",), PARTS])
def test_all_parameters_of_a_head_that_differs_in_one_are_its_own(differing):
    weights = of_both(*differing)
    fill(pair := tied_pair(), weights)
    assert pair.head.factor is not pair.embed.factor
    for name, expected in weights.items():
        assert torch.equal(pair.get_parameter(name), expected), name


def test_a_head_of_equal_parameters_stays_tied():
    fill(pair := tied_pair(), of_both())
    assert all(getattr(pair.head, name) is getattr(pair.embed, name) for name in PARTS)


def test_what_lacks_of_a_head_that_differs_is_named():
    weights = of_both("weight")
    del weights["head.factor"]
    with pytest.raises(CheckpointError, match=r"^1 missing: head\.factor\.$"):
        fill(tied_pair(), weights)


@pytest.mark.parametrize("holds", [True, False], ids=["own", "none"])
@pytest.mark.parametrize(
    ("top", "nested"), [(True, None), (None, True), (False, True), (True, False)]
)
def test_llava_takes_the_head_of_its_file_wherever_the_flag_is(top, nested, holds, tmp_path):
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT, "max_position_embeddings": 64},
        vision_config=TOWER,
        image_token_index=149,
    )
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = not holds
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    assert holds == any(
        name.endswith("lm_head.weight") for name in load_file(tmp_path / "model.safetensors")
    )

    def say(hf_config):
        for part, flag in ((hf_config, top), (hf_config["text_config"], nested)):
            part.pop("tie_word_embeddings", None)
            if flag is not None:
                part["tie_word_embeddings"] = flag

    edit(tmp_path, say)
    assert ours(tmp_path) == theirs(model)


@pytest.mark.parametrize("family", ["Bart", "T5"])
def test_an_encoder_decoder_model_takes_the_head_of_its_file(family, tmp_path):
    sizes = {"vocab_size": 150, "d_model": 32, "decoder_start_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **ENCDEC[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.empty(150, 32))
    randomize(model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = getattr(transformers, f"{family}ForConditionalGeneration").from_pretrained(
        tmp_path, dtype=torch.float32
    )
    assert not torch.equal(reference.lm_head.weight, reference.get_input_embeddings().weight)
    llm = LLM(
        model=str(tmp_path),
        renderer="tokens",
        dtype="float32",
        num_kv_blocks=64,
        max_num_seqs=4,
        max_model_len=64,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [output] = llm.generate(
        [
            {
                "encoder_prompt": {"prompt_token_ids": PROMPT},
                "decoder_prompt": {"prompt_token_ids": [2]},
            }
        ],
        params,
    )
    ids = torch.tensor([[2]])
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat(
                [
                    ids,
                    reference(input_ids=torch.tensor([PROMPT]), decoder_input_ids=ids)
                    .logits[:, -1:]
                    .argmax(-1),
                ],
                1,
            )
    assert list(output.outputs[0].token_ids) == ids[0, 1:].tolist()


ENCDEC = {
    "Bart": {
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
        "max_position_embeddings": 64,
        "forced_eos_token_id": None,
    },
    "T5": {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}
