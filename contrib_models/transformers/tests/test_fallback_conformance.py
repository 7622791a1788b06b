"""The fallback passes the kit, as any model class does; families that show other sides of it are in
test_parity.py."""

import torch
import transformers
from toolkit_lm_devkit import TransformersConformance

SHAPE = {
    "vocab_size": 271,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Fallback(TransformersConformance):
    engine_options = {"device": "cpu", "model_impl": "transformers"}
    # Its layers are those of transformers, and several ranks are refused: there are no shards
    # (test_refusals.py).
    test_shards_make_up_the_whole = None
    test_ranks_and_stages_compute_the_whole = None
    family = ""

    def make_hf_model(self, **variant):
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.family}Config")(
            **SHAPE, max_position_embeddings=128, **variant
        )
        return getattr(transformers, f"{self.family}ForCausalLM")(config)


class TestStableLm(Fallback):
    family = "StableLm"
    variants = {
        "plain": {"num_key_value_heads": 2},
        "normed": {
            "num_key_value_heads": 2,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
        },
    }


class TestCohere(Fallback):
    family = "Cohere"
    variants = {"normed": {"num_key_value_heads": 2, "logit_scale": 0.3, "use_qk_norm": True}}
