"""What the tests of mixtures of experts share: small models of transformers, and a forward pass without an engine."""

import json
from pathlib import Path

import msgspec
import torch
from toolkit_lm.attention import Attention, AttentionBackend, Binding, GroupMetadata, forward_context
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import load_model
from toolkit_lm_moe.mixtral import MixtralForCausalLM
from toolkit_lm_moe.qwen3_moe import Qwen3MoeForCausalLM
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM as HFMixtral, Qwen3MoeConfig, Qwen3MoeForCausalLM as HFQwen3Moe

# Shorter than some prompts of the tests, and long enough that eight sequences do not fit a tight pool.
WINDOW = 40
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MIXTRAL = {
    "2 of 4": {},
    "1 of 4, tied": {"num_experts_per_tok": 1, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "4 of 8": {"num_experts_per_tok": 4, "num_local_experts": 8, "head_dim": 24},
    "window": {"sliding_window": WINDOW, "hidden_act": "gelu"},
}
QWEN3_MOE = {
    "4 of 8": {"num_experts_per_tok": 4, "num_local_experts": 8, "norm_topk_prob": True},
    "unnormalized, biases": {"num_experts_per_tok": 2, "attention_bias": True, "head_dim": 24},
    "1 of 8, dense between": {"num_experts_per_tok": 1, "num_local_experts": 8, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    "all of 4, some dense, window, tied": {
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "mlp_only_layers": [0, 2],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
}
FAMILIES = {"mixtral": (MixtralForCausalLM, MIXTRAL), "qwen3_moe": (Qwen3MoeForCausalLM, QWEN3_MOE)}
CASES = [(family, variant) for family, (_, variants) in FAMILIES.items() for variant in variants]


def make_mixtral(**changes):
    return HFMixtral(MixtralConfig(**{**SHAPE, **changes})).eval()


def make_qwen3_moe(**changes):
    shape = {**SHAPE, "head_dim": 16, "moe_intermediate_size": 48, **changes}
    shape["num_experts"] = shape.pop("num_local_experts")
    return HFQwen3Moe(Qwen3MoeConfig(**shape)).eval()


def make(family, variant):
    maker = {"mixtral": make_mixtral, "qwen3_moe": make_qwen3_moe}[family]
    return maker(**FAMILIES[family][1][variant])


class CausalAttention(AttentionBackend):
    """Without a cache: the batch is one sequence, and each token sees those before it, of its window where there is one."""

    @classmethod
    def refuses(cls, spec):
        return None

    @classmethod
    def kv_cache_shape(cls, spec, num_blocks):
        raise NotImplementedError

    def build(self, batch):
        return None

    def write_kv(self, layer, k, v, kv_cache, slot_mapping):
        raise NotImplementedError

    def forward(self, layer, q, k, v, kv_cache, meta, out):
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        visible = (distance >= 0) & (distance < (layer.window or len(q)))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=layer.scale, enable_gqa=True)
        out.copy_(attended.transpose(0, 1))


def logits_of(models, input_ids):
    """Logits [T, V] of one sequence; `models` are the stages of a pipeline, most often one."""
    layers = [m for model in models for m in model.modules() if isinstance(m, Attention)]
    bindings = {layer.prefix: Binding(CausalAttention(torch.device("cpu")), None, 0) for layer in layers}
    out = None
    with torch.inference_mode(), forward_context(bindings, [GroupMetadata(None, None)]):
        for model in models:
            out = model(input_ids, torch.arange(len(input_ids)), intermediate=out)
        return models[-1].compute_logits(out)


def load(model_cls, folder: Path, *, rank: int = 0, **options):
    """The model of a checkpoint folder, as one rank holds it."""
    config = VllmConfig.default(json.loads((folder / "config.json").read_text()), **options).with_rank(rank)
    config = msgspec.structs.replace(config, checkpoint=msgspec.structs.replace(config.checkpoint, path=str(folder)))
    return load_model(model_cls, config, torch.device("cpu"))


def reference_logits(model, input_ids):
    """Logits [T, V] by transformers."""
    with torch.inference_mode():
        return model(input_ids[None]).logits[0]
