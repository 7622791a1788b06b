"""Language models as embedders, against transformers."""

import json

import pytest
import torch
import transformers
from adapter_harness import IDS, SMALL, config_of, load, pooled
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import Absent, Model
from toolkit_lm_decoder.gpt2 import GPT2LMHeadModel
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_decoder.qwen3 import Qwen3ForCausalLM
from toolkit_lm_devkit import save_random
from toolkit_lm_poolers import embedding_pooler
from toolkit_lm_pooling_adapters.embedding import as_embedding_model
from toolkit_lm_transformers.model import TransformersForCausalLM
from torch.nn import functional as F

FAMILIES = {
    "llama": ("LlamaForCausalLM", LlamaForCausalLM, {}),
    "llama, tied": ("LlamaForCausalLM", LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "gemma, by the fallback": ("GemmaForCausalLM", TransformersForCausalLM, {}),
    "gpt2": (
        "GPT2LMHeadModel",
        GPT2LMHeadModel,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
}


def make(architecture, more, **kwargs):
    config_class = getattr(transformers, architecture).config_class
    return getattr(transformers, architecture)(config_class(**{**SMALL, **more}, **kwargs))


def hidden_states(folder):
    """[T, H] by transformers' model without a head."""
    with torch.inference_mode():
        return transformers.AutoModel.from_pretrained(folder)(IDS[None]).last_hidden_state[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(family, tmp_path):
    architecture, model_class, more = FAMILIES[family]
    folder = save_random(tmp_path, make(architecture, more))
    expected = hidden_states(folder)
    model = load(as_embedding_model, model_class, folder)
    torch.testing.assert_close(pooled(model), F.normalize(expected[-1], dim=0))
    torch.testing.assert_close(pooled(model, normalize=False, dimensions=5), expected[-1, :5])
    torch.testing.assert_close(pooled(model, task="token_embed", normalize=False), expected)
    model = load(as_embedding_model, model_class, folder, pooling_type="MEAN", normalize=False)
    torch.testing.assert_close(pooled(model), expected.mean(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_the_decoder_alone(family, tmp_path):
    """Sentence-transformers writes "layers.0..." instead of "model.layers.0..."."""
    architecture, model_class, more = FAMILIES[family]
    save_random(tmp_path / "whole", make(architecture, more))
    alone = transformers.AutoModel.from_pretrained(tmp_path / "whole")
    alone.save_pretrained(tmp_path / "alone")
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    (tmp_path / "alone" / "config.json").write_text(
        json.dumps({**config, "architectures": [architecture]})
    )
    for folder in (tmp_path / "whole", tmp_path / "alone"):
        torch.testing.assert_close(
            pooled(load(as_embedding_model, model_class, folder), normalize=False),
            hidden_states(tmp_path / "whole")[-1],
        )


def test_sentence_transformers_files_win(tmp_path):
    folder = save_random(tmp_path, make("LlamaForCausalLM", {}))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": i,
                    "name": str(i),
                    "path": path,
                    "type": f"sentence_transformers.models.{kind}",
                }
                for i, (path, kind) in enumerate(modules)
            ]
        )
    )
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 64, "do_lower_case": False})
    )
    (folder / "1_Pooling").mkdir()
    pooling = {
        "word_embedding_dimension": 32,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    torch.testing.assert_close(
        pooled(load(as_embedding_model, LlamaForCausalLM, folder)), hidden_states(folder).mean(0)
    )


def test_a_head_is_all_that_is_left_of_a_tied_embedding(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_random(tmp_path, make("LlamaForCausalLM", {"tie_word_embeddings": True}))
    expected = hidden_states(folder)[-1]
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors")
    torch.testing.assert_close(
        pooled(load(as_embedding_model, LlamaForCausalLM, folder), normalize=False), expected
    )


def test_a_classifier_is_passed_over(tmp_path):
    folder = save_random(tmp_path, make("LlamaForSequenceClassification", {}))
    torch.testing.assert_close(
        pooled(load(as_embedding_model, LlamaForCausalLM, folder), normalize=False),
        hidden_states(folder)[-1],
    )


def test_the_class(tmp_path):
    config = config_of(save_random(tmp_path, make("LlamaForCausalLM", {})))
    before = dict(vars(LlamaForCausalLM))
    converted = as_embedding_model(LlamaForCausalLM, config)
    assert converted.__name__ == converted.__qualname__ == "LlamaForCausalLMEmbedding"
    assert issubclass(converted, LlamaForCausalLM)
    assert dict(vars(LlamaForCausalLM)) == before
    assert as_embedding_model(converted, config) is converted
    model = converted(vllm_config=config)
    assert isinstance(model.lm_head, Absent)
    with pytest.raises(NotImplementedError):
        model.compute_logits(torch.zeros(1, 32))


class Native(Model):
    """A pooling model."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pooler = embedding_pooler(vllm_config)


class Headless(Model):
    """Neither a language model nor a pooling model."""


class Odd(Model):
    """Gives logits, but not by a head."""

    def compute_logits(self, hidden_states):
        return hidden_states


def test_a_pooling_model_comes_back_unchanged():
    assert as_embedding_model(Native, VllmConfig.default({"hidden_size": 8})) is Native


def test_what_cannot_be_converted_is_refused_before_weights_are_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = VllmConfig.default({"hidden_size": 8})
    with pytest.raises(
        UnsupportedError,
        match="Headless cannot be converted into a pooling model: it gives neither logits nor "
        "pooled",
    ):
        as_embedding_model(Headless, config)
    with pytest.raises(
        UnsupportedError,
        match="Odd cannot be converted into a pooling model: it has no language-modeling head",
    ):
        as_embedding_model(Odd, config)(vllm_config=config)


@pytest.mark.parametrize("asked", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_decoder_that_should_look_both_ways_is_refused(asked):
    config = VllmConfig.default({**SMALL, **asked})
    with pytest.raises(
        UnsupportedError,
        match=f"LlamaForCausalLM cannot be .*'{next(iter(asked))}' asks for bidirectional "
        "attention",
    ):
        as_embedding_model(LlamaForCausalLM, config)(vllm_config=config)
    config = VllmConfig.default({**SMALL, **{key: not value for key, value in asked.items()}})
    as_embedding_model(LlamaForCausalLM, config)(vllm_config=config)
