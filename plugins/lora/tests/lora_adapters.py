"""Random models and adapters, which PEFT makes and saves, and what PEFT computes with them."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import make_checkpoint
from toolkit_lm_lora.front import LoRARequest
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PROMPT = [(37 * i) % 250 + 16 for i in range(33)]
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **SHAPE,
            head_dim=16,
            global_head_dim=32,
            num_kv_shared_layers=1,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=272,
            layer_types=["full_attention"] * 2,
        ),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SHAPE, num_local_experts=4)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=272,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=256,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=1,
        ),
    ),
}
GPT2 = {"fan_in_fan_out": True}
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "all": {"target_modules": "all-linear"},
        "dora": {"target_modules": "all-linear", "use_dora": True},
        "rslora": {
            "target_modules": ["q_proj", "v_proj"],
            "use_rslora": True,
            "rank_pattern": {"q_proj": 8},
            "alpha_pattern": {"v_proj": 3},
        },
        "regex": {
            "target_modules": r".*\.(k_proj|up_proj)",
            "exclude_modules": ["layers.0.mlp.up_proj"],
        },
        "layers": {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1]},
        "embedding": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        "norms": {"target_modules": ["q_proj"], "modules_to_save": ["norm", "input_layernorm"]},
        "tokens": {
            "target_modules": ["q_proj"],
            "trainable_token_indices": [*PROMPT[:5], 100, 101],
        },
        "bias": {"target_modules": ["q_proj", "down_proj"], "lora_bias": True},
        "invoked": {
            "target_modules": "all-linear",
            "alora_invocation_tokens": PROMPT[20:23],
            "task_type": "CAUSAL_LM",
        },
    },
    "tied": {
        "embedding": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        "tokens": {
            "target_modules": ["q_proj"],
            "trainable_token_indices": [*PROMPT[:5], 100, 101],
        },
    },
    "qwen3": {
        "dora": {"target_modules": "all-linear", "use_dora": True},
        "norms": {"target_modules": ["k_proj"], "modules_to_save": ["q_norm", "k_norm", "norm"]},
    },
    "gemma4": {
        "embeddings of layers": {
            "target_modules": [
                "q_proj",
                "down_proj",
                "per_layer_input_gate",
                "per_layer_projection",
            ]
        },
    },
    "mixtral": {
        "experts": {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
        "down": {
            "target_modules": ["o_proj", "gate"],
            "target_parameters": ["experts.down_proj"],
        },
    },
    "gpt2": {
        "fused": {"target_modules": ["c_attn", "c_proj", "c_fc"], **GPT2},
        "biases": {"target_modules": ["c_attn"], "bias": "all", **GPT2},
        "own biases": {"target_modules": ["c_attn"], "bias": "lora_only", **GPT2},
    },
}


class Reference(NamedTuple):
    tokens: list[int]
    logprobs: torch.Tensor
    """[tokens, V]."""


class Adapters:
    """A checkpoint of a family, adapters of some forms, and what each gives."""

    def __init__(self, folder: Path, family: str, forms: dict[str, dict[str, Any]]) -> None:
        kind, config = FAMILIES[family]
        torch.manual_seed(1)
        self.checkpoint = folder / "base"
        make_checkpoint(self.checkpoint, kind(config))
        # Its grouped product takes no float64.
        dtype = "float32" if family == "mixtral" else "float64"
        self._load = lambda dtype="float32": kind.from_pretrained(
            self.checkpoint, dtype=dtype
        ).eval()
        self.paths: dict[str | None, Path] = {}
        self.expected = {None: reference(self._load(dtype))}
        for seed, (name, fields) in enumerate(forms.items()):
            self.paths[name] = self.save(folder / name, seed, **fields)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = PeftModel.from_pretrained(self._load(dtype), self.paths[name])
            self.expected[name] = reference(made.to(getattr(torch, dtype)).eval())

    def save(self, path: Path, seed: int = 0, **fields: Any) -> Path:
        """Saves an adapter with random weights."""
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = get_peft_model(self._load(), LoraConfig(**{"r": 4, "lora_alpha": 8, **fields}))
            with torch.no_grad():
                for name, parameter in made.named_parameters():
                    noise = torch.randn_like(parameter) * 0.1
                    if parameter.requires_grad and "magnitude" in name:
                        parameter.mul_(1 + noise)
                    elif parameter.requires_grad:
                        parameter.copy_(noise if "lora_" in name else parameter + noise)
            made.save_pretrained(path)
        return path

    def combined(self, names: list[str], scales: list[float]) -> Reference:
        """What several adapters give at a time, each with a scale."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = PeftModel.from_pretrained(self._load("float64"), self.paths[names[0]], names[0])
            for name in names[1:]:
                made.load_adapter(self.paths[name], name)
            made.base_model.set_adapter(names)
        for module in made.modules():
            if hasattr(module, "set_scale"):
                for name, scale in zip(names, scales, strict=True):
                    if name in module.scaling:
                        module.set_scale(name, scale)
        return reference(made.double().eval())

    def request(self, name: str | None) -> LoRARequest | None:
        return None if name is None else LoRARequest(name, 1, str(self.paths[name]))

    @contextmanager
    def llm(self, own: dict[str, Any] | None = None, **options: Any) -> Any:
        given = {
            "num_kv_blocks": 256,
            "block_size": 16,
            "max_model_len": 128,
            "dtype": "float32",
            "renderer": "tokens",
            "plugin_option": {"lora": {"enabled": True, **(own or {})}},
        }
        with LLM(str(self.checkpoint), **given | options) as made:
            yield made

    def ask(self, llm: LLM, *names: str | None, **params: Any) -> list[Any]:
        sampling = SamplingParams(
            **{"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 3, **params}
        )
        return llm.generate(
            [{"prompt_token_ids": PROMPT}] * len(names),
            sampling,
            lora_request=[self.request(name) for name in names],
            use_tqdm=False,
        )

    def assert_is(self, output: Any, name: str | None, most: float = 1e-4) -> None:
        """The output is PEFT's: the tokens, and their log probabilities."""
        assert not output.error, output.error
        expected = self.expected[name]
        [choice] = output.outputs
        assert list(choice.token_ids) == expected.tokens, name
        for step, logprobs in zip(choice.logprobs, expected.logprobs, strict=True):
            for token, one in step.items():
                assert abs(one.logprob - float(logprobs[token])) <= most, name


@torch.no_grad()
def reference(model: Any, num_tokens: int = 8) -> Reference:
    """Greedy tokens after PROMPT."""
    ids = list(PROMPT)
    for _ in range(num_tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        ids.append(int(logits[-1].argmax()))
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return Reference(ids[len(PROMPT) :], logits.double().log_softmax(-1))


def given(output: Any) -> Any:
    """Tokens, and what the likeliest had at each."""
    assert not output.error, output.error
    return [
        (
            list(one.token_ids),
            [{token: at.logprob for token, at in step.items()} for step in one.logprobs or ()],
        )
        for one in output.outputs
    ]
