"""Faults that the kit finds in models and linear methods, and unusual good models, which pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from toolkit_lm.attention import Attention, CacheBackend, CacheLayer, current
from toolkit_lm.kv import FullSpec, PageTensor
from toolkit_lm.model import (
    HFConfig,
    LinearMethod,
    Model,
    ParallelLMHead,
    QKVParallelLinear,
    Quantization,
    RMSNorm,
    RowParallelLinear,
    UnquantizedMethod,
    VocabParallelEmbedding,
    new_parameter,
)
from toolkit_lm.plugin import hookimpl
from toolkit_lm_decoder.granite import GraniteDecoderLayer, GraniteForCausalLM
from toolkit_lm_decoder.llama import LlamaForCausalLM, LlamaModel
from toolkit_lm_devkit import (
    LinearMethodConformance,
    ModelConformance,
    TransformersConformance,
    load_checkpoint,
    write_checkpoint,
)
from toolkit_lm_devkit.forward import logits_of
from toolkit_lm_devkit.model import Subject
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "mamba"))

import toolkit_lm_mamba
from toolkit_lm_mamba.mixer import MambaMixer

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


class Registering:
    """A plugin that has one model, in the place of whichever is registered."""

    name = "registering"

    def __init__(self, architecture, target, **options):
        self.architecture = architecture
        self.target = target
        self.options = options

    @hookimpl
    def toolkit_register_models(self, models):
        models.add(self.architecture, self.target, **self.options)


# Wrong models


class UnscaledRope(LlamaModel):
    """Takes the base of its rotary positions from config.json, and not their scaling."""

    def _rotary(self, config):
        plain = HFConfig(
            {**config.values, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        )
        return RotaryEmbedding(RopeParameters.read(plain, 16), vllm_config=self.vllm_config)


class UnscaledRopeForCausalLM(LlamaForCausalLM):
    decoder = UnscaledRope


class Llama(TransformersConformance):
    def make_hf_model(self, **variant):
        from transformers import LlamaConfig, LlamaForCausalLM as Reference

        return Reference(LlamaConfig(**SHAPE | variant))


def test_a_rope_scaling_that_is_ignored_is_found(tmp_path):
    class Wrong(Llama):
        plugins = [
            Registering("LlamaForCausalLM", f"{__name__}:UnscaledRopeForCausalLM", override=True)
        ]

    folder = tmp_path / "first"
    folder.mkdir()
    kit = Wrong()
    subject = Subject(folder, kit.make_checkpoint(folder), plugins=kit.plugins)
    assert kit.model_class(subject) is UnscaledRopeForCausalLM
    with pytest.raises(
        pytest.fail.Exception,
        match=r"rope type 'linear' of config\.json is neither obeyed nor refused",
    ):
        kit.test_every_rope_scaling_is_obeyed_or_refused(tmp_path, subject)


class Forgetful(GraniteDecoderLayer):
    """Vouches for its parts, which do not tell of the multiplier."""

    seams = GraniteDecoderLayer.seams

    def parts(self):
        return self.parts_of(
            input_norm=self.input_layernorm, post_norm=self.post_attention_layernorm
        )


class ForgetfulForCausalLM(GraniteForCausalLM):
    layer = Forgetful


class Granite(TransformersConformance):
    def make_hf_model(self, **variant):
        from transformers import GraniteConfig, GraniteForCausalLM as Reference

        return Reference(GraniteConfig(**SHAPE, residual_multiplier=0.3, attention_multiplier=0.25))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_parts_that_do_not_tell_all_are_found(tmp_path, monkeypatch, is_wrong):
    from toolkit_lm_cpu.library import refusal

    if refusal() is not None:
        pytest.skip(str(refusal()))
    kit = Granite()
    plugins = (
        [Registering("GraniteForCausalLM", f"{__name__}:ForgetfulForCausalLM", override=True)]
        if is_wrong
        else []
    )
    subject = Subject(tmp_path, kit.make_checkpoint(tmp_path), {"device": "cpu"}, plugins)
    if not is_wrong:
        kit.check_fusing(subject, monkeypatch)
        return
    with pytest.raises(
        AssertionError,
        match="Forgetful: the layer in one call of kernels, by its `parts`, is not what",
    ):
        kit.check_fusing(subject, monkeypatch)


# Good models that keep something else than keys and values


class TestMamba(TransformersConformance):
    """Purely recurrent, from a plugin that is not installed."""

    plugins = [toolkit_lm_mamba]
    pipeline_stages = 1
    tensor_parallel_sizes = (2,)
    lengths = (5, 17, 3, 33, 1)
    max_tokens = 12
    max_model_len = 64

    def make_hf_model(self, **variant):
        from transformers import MambaConfig, MambaForCausalLM as Reference

        sizes = {
            "vocab_size": 272,
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 2,
            "time_step_rank": 4,
            "conv_kernel": 4,
        }
        return Reference(MambaConfig(**sizes, eos_token_id=1, pad_token_id=0))


class Mixed(nn.Module):
    """x -> x + mixer(norm(x)), then x + attention(norm(x)): a recurrence and keys and values in one
    model."""

    def __init__(self, *, vllm_config, prefix):
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        self.norm = RMSNorm(size, eps=1e-5, vllm_config=vllm_config)
        self.mixer = MambaMixer(vllm_config=vllm_config, prefix=f"{prefix}.mixer")
        self.norm_2 = RMSNorm(size, eps=1e-5, vllm_config=vllm_config)
        self.qkv_proj = QKVParallelLinear(
            size, 16, 4, 2, vllm_config=vllm_config, prefix=f"{prefix}.qkv_proj"
        )
        heads = self.qkv_proj.num_heads
        kv_heads = self.qkv_proj.num_kv_heads
        self.attn = Attention(
            heads, 16, num_kv_heads=kv_heads, vllm_config=vllm_config, prefix=f"{prefix}.attn"
        )
        self.o_proj = RowParallelLinear(
            64, size, vllm_config=vllm_config, prefix=f"{prefix}.o_proj"
        )

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        sizes = [self.qkv_proj.q_size, self.qkv_proj.kv_size, self.qkv_proj.kv_size]
        return x + self.o_proj(self.attn(*self.qkv_proj(self.norm_2(x)).split(sizes, dim=-1)))


class HybridForCausalLM(Model):
    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        sizes = config.require("vocab_size", int), config.require("hidden_size", int)
        self.embeddings = VocabParallelEmbedding(
            *sizes, vllm_config=vllm_config, prefix="embeddings"
        )
        self.layers = nn.ModuleList(
            [Mixed(vllm_config=vllm_config, prefix=f"layers.{index}") for index in range(2)]
        )
        self.norm = RMSNorm(sizes[1], eps=1e-5, vllm_config=vllm_config)
        self.lm_head = ParallelLMHead(*sizes, vllm_config=vllm_config, prefix="lm_head")

    def forward(self, input_ids, positions, **inputs):
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def compute_logits(self, hidden_states):
        return self.lm_head(hidden_states)


HYBRID = Registering("HybridForCausalLM", f"{__name__}:HybridForCausalLM", length_keys=())


class TestHybrid(ModelConformance):
    """A recurrence and attention side by side. The reference is the forward pass without an
    engine."""

    plugins = [toolkit_lm_mamba, HYBRID]
    pipeline_stages = 1
    tensor_parallel_sizes = (2,)
    lengths = (5, 17, 3, 33, 1)
    max_tokens = 12
    max_model_len = 64

    def make_checkpoint(self, folder, **variant):
        config = {
            "architectures": ["HybridForCausalLM"],
            "vocab_size": 272,
            "hidden_size": 32,
            "state_size": 8,
            "time_step_rank": 4,
            "conv_kernel": 4,
            "eos_token_id": 1,
        }
        generator = torch.Generator().manual_seed(0)
        shapes = {"embeddings": (272, 32), "norm": (32,), "lm_head": (272, 32)}
        for index in range(2):
            layer = {
                "norm": (32,),
                "norm_2": (32,),
                "q_proj": (64, 32),
                "k_proj": (32, 32),
                "v_proj": (32, 32),
                "o_proj": (32, 64),
                "mixer.in_proj": (128, 32),
                "mixer.x_proj": (20, 64),
                "mixer.dt_proj": (64, 4),
                "mixer.out_proj": (32, 64),
                "mixer.conv1d": (64, 1, 4),
            }
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        weights = {
            f"{n}.weight": 0.2 * torch.randn(s, generator=generator) + (len(s) == 1)
            for n, s in shapes.items()
        }
        for index in range(2):
            mixer = f"layers.{index}.mixer"
            weights |= {
                f"{mixer}.dt_proj.bias": torch.zeros(64),
                f"{mixer}.conv1d.bias": torch.zeros(64),
            }
            weights |= {f"{mixer}.A_log": torch.zeros(64, 8), f"{mixer}.D": torch.ones(64)}
        write_checkpoint(folder, config, weights)
        plugins = Subject(folder, None, plugins=self.plugins).loaded
        model = load_checkpoint(
            HybridForCausalLM, folder, plugins=plugins, max_model_len=self.max_model_len
        )
        return lambda token_ids: logits_of([model], torch.tensor(list(token_ids)))


class MeanBackend(CacheBackend):
    """Pages of what a layer was given, through block tables, as those of latent attention."""

    @classmethod
    def page_layout(cls, spec):
        return [PageTensor((spec.block_size, 2 * spec.head_size), spec.dtype)]

    def build(self, batch):
        return batch


class Mean(CacheLayer):
    """x [T, H] -> the mean of it and of all that came before."""

    backend = MeanBackend

    def __init__(self, size, *, vllm_config, prefix):
        super().__init__(prefix)
        self.spec = FullSpec(
            block_size=vllm_config.cache.block_size, num_kv_heads=1, head_size=size, dtype="float32"
        )

    def kv_cache_spec(self):
        return self.spec

    def forward(self, x):
        binding, batch = current(self.prefix)
        (pages,) = binding.kv_cache
        size = self.spec.block_size
        stored = batch.slot_mapping >= 0
        slots = batch.slot_mapping[stored]
        pages[slots // size, slots % size] = torch.cat([x, x], -1)[stored]
        out = torch.zeros_like(x)
        bounds = batch.query_start.tolist()
        for row, (start, end, length) in enumerate(
            zip(bounds, bounds[1:], batch.seq_lens.tolist(), strict=False)
        ):
            places = torch.arange(length)
            seen = pages[batch.block_table[row][places // size].long(), places % size, : x.shape[1]]
            means = seen.cumsum(0) / (places + 1)[:, None]
            out[start:end] = means[length - end + start :] if length else 0
        return out


class MeanForCausalLM(Model):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.embeddings = VocabParallelEmbedding(
            272, 32, vllm_config=vllm_config, prefix="embeddings"
        )
        self.mean = Mean(32, vllm_config=vllm_config, prefix="mean")
        self.lm_head = ParallelLMHead(272, 32, vllm_config=vllm_config, prefix="lm_head")

    def forward(self, input_ids, positions, **inputs):
        x = self.embeddings(input_ids)
        return x + self.mean(x)

    def compute_logits(self, hidden_states):
        return self.lm_head(hidden_states)


class TestPagedCacheLayer(ModelConformance):
    """A layer other than attention that keeps pages of every token: memory grows, and ranks and
    stages are compared."""

    plugins = [Registering("MeanForCausalLM", f"{__name__}:MeanForCausalLM")]
    pipeline_stages = 1
    tensor_parallel_sizes = (2,)

    def make_checkpoint(self, folder, **variant):
        sizes = {"vocab_size": 272, "hidden_size": 32, "max_position_embeddings": 128}
        config = {"architectures": ["MeanForCausalLM"], "eos_token_id": 1, **sizes}
        generator = torch.Generator().manual_seed(0)
        embeddings, head = (torch.randn(272, 32, generator=generator) for _ in range(2))
        write_checkpoint(folder, config, {"embeddings.weight": embeddings, "lm_head.weight": head})

        def reference(token_ids):
            x = embeddings[list(token_ids)]
            return (x + x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]) @ head.T

        return reference


def test_the_plugin_is_what_registers_the_model():
    models = [
        Subject(Path(), None, plugins=plugins).loaded.models
        for plugins in ((), (toolkit_lm_mamba,))
    ]
    targets = [one.get("MambaForCausalLM").target.partition(":")[0] for one in models]
    assert targets == ["toolkit_lm_hybrid.mamba", "toolkit_lm_mamba.model"]


# Linear methods


class ScaledActivations(LinearMethod):
    """int8 of activations, with one scale for all rows of a step, or with one for each."""

    per_row = False

    def create(self, layer, spec):
        self.weight = layer.weight = new_parameter(spec.shape, torch.float32, spec.loader())

    def multiply(self, x, bias):
        if not len(x):
            return F.linear(x, self.weight.to(x.dtype), bias)
        top = x.float().abs().amax(-1, keepdim=True) if self.per_row else x.float().abs().max()
        scale = top.clamp_min(1e-30) / 127
        return F.linear((x.float() / scale).round() * scale, self.weight, bias).to(x.dtype)


class ScaledRows(ScaledActivations):
    per_row = True


class OfTheBatch(Quantization):
    made = ScaledActivations

    def method(self, spec):
        return self.made() if spec.kind == "linear" else None


class OfRows(OfTheBatch):
    made = ScaledRows


@pytest.mark.parametrize("layer", ["replicated", "qkv", "row"])
def test_a_product_that_depends_on_the_batch_is_found(layer):
    wrong = type("KitOf", (LinearMethodConformance,), {"quantization": OfTheBatch})()
    right = type("KitOf", (LinearMethodConformance,), {"quantization": OfRows})()
    right.test_a_row_is_computed_alike_whatever_is_beside_it(layer, torch.float32)
    with pytest.raises(AssertionError, match="it depends on the rows beside it"):
        wrong.test_a_row_is_computed_alike_whatever_is_beside_it(layer, torch.float32)


class Named(Quantization):
    """Looks up by their names which layers are quantized, as formats of checkpoints state them."""

    PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    seen: list[tuple[str, int]] = []

    def method(self, spec):
        *path, last = spec.prefix.split(".")
        parts = [".".join([*path, part]) for part in self.PACKED.get(last, (last,))]
        # A layer has as many parts as its name says.
        assert len(parts) in (1, len(spec.outputs)), (
            f"{spec.prefix} has {len(spec.outputs)} parts, not {len(parts)}"
        )
        self.seen.append((spec.prefix, len(parts)))
        quantized = set(parts) & {*self.config["modules"]}
        assert len(quantized) in (0, len(parts)), f"{spec.prefix} is quantized in part"
        return UnquantizedMethod() if quantized else None


def test_layers_have_the_names_of_checkpoints():
    names = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "mlp.gate",
    ]
    modules = [f"model.layers.0.{name}" for name in names]
    kit = type(
        "KitOf",
        (LinearMethodConformance,),
        {"quantization": Named, "quantization_config": {"modules": modules}},
    )()
    for layer in ("replicated", "column", "merged", "qkv", "row"):
        kit.test_it_leaves_no_layer_of_its_kinds(layer)
    assert {("model.layers.0.self_attn.qkv_proj", 3), ("model.layers.0.mlp.gate_up_proj", 2)} < {
        *Named.seen
    }
    own = {"row": "transformer.h.0.attn.c_proj"}
    kit = type(
        "KitOf",
        (LinearMethodConformance,),
        {"quantization": Named, "quantization_config": {"modules": [own["row"]]}, "names": own},
    )()
    kit.test_it_leaves_no_layer_of_its_kinds("row")
