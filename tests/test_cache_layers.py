"""Layers that use the KV cache are asked what they need, and never what class they are of."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.plugin import hookimpl
from toolkit_lm_decoder.llama import LlamaAttention, LlamaForCausalLM
from toolkit_lm_sdpa.backend import SdpaBackend

ROOT = Path(__file__).parents[1]
CHECKS = {
    "core/src/toolkit_lm/model/fused.py": "kernels compute in the place of this class's forward",
}
"""Uses of the class as a value, each with its reason."""


def sources():
    for pattern in ("core/src", "libs/*/src", "plugins/*/src", "contrib_*/*/src"):
        for folder in ROOT.glob(pattern):
            yield from folder.rglob("*.py")


def uses_as_value(tree):
    """Places where `Attention` stands as a value: neither called, nor a base, nor a type hint."""
    other = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            other.add(id(node.func))
        elif isinstance(node, ast.ClassDef):
            other |= {id(base) for base in node.bases}
        hints = [getattr(node, field, None) for field in ("annotation", "returns")]
        for hint in filter(None, hints):
            other |= {id(part) for part in ast.walk(hint)}
    for node in ast.walk(tree):
        name = getattr(node, "id", getattr(node, "attr", None))
        if name == "Attention" and id(node) not in other:
            yield node


def test_nobody_asks_for_the_class_attention():
    found = {}
    for path in sources():
        text = path.read_text()
        if "Attention" in text and (uses := list(uses_as_value(ast.parse(text)))):
            found[str(path.relative_to(ROOT))] = [node.lineno for node in uses]
    assert found.keys() == CHECKS.keys(), found


def test_the_check_sees_what_it_looks_for():
    text = "isinstance(x, Attention)\ntype(x) is attention.Attention\n"
    text += "def f(x: Attention) -> Attention: Attention(x)\nclass A(Attention): pass\n"
    assert [node.lineno for node in uses_as_value(ast.parse(text))] == [1, 2]


def of_decoder(spec):
    return msgspec.structs.replace(spec, type=AttentionType.DECODER)


class SidewaysBackend(SdpaBackend):
    """Runs one type of attention, which no other backend knows: a decoder's by another name."""

    @classmethod
    def refuses(cls, spec):
        if spec.type != "sideways":
            return f"no attention of type {str(spec.type)!r}, only 'sideways'"
        return super().refuses(of_decoder(spec))

    def __init__(self, setup):
        super().__init__(replace(setup, layers=[of_decoder(spec) for spec in setup.layers]))

    def write_kv(self, call):
        super().write_kv(as_decoder(call))

    def forward(self, call):
        super().forward(as_decoder(call))


def as_decoder(call):
    layer = replace(call.layer, attention_type=AttentionType.DECODER)
    return msgspec.structs.replace(call, layer=layer)


class SidewaysAttention(LlamaAttention):
    attention_type = "sideways"


class SidewaysForCausalLM(LlamaForCausalLM):
    attention = SidewaysAttention


class Sideways:
    """A plugin with a model of a type of attention of its own, and its backend."""

    name = "sideways"

    def __init__(self, backend=True):
        self.backend = backend

    @hookimpl
    def toolkit_register_models(self, models):
        models.add("LlamaForCausalLM", f"{__name__}:SidewaysForCausalLM", override=True)

    @hookimpl
    def toolkit_register_attention_backends(self, backends):
        if self.backend:
            backends.add("sideways", f"{__name__}:SidewaysBackend")


def run(folder, *plugins, **options):
    with LLM(str(folder), plugins=plugins, dtype="float32", max_model_len=64, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": list(range(3, 25))}], params, use_tqdm=False)
    return outputs[0].outputs[0].token_ids


def test_a_type_of_attention_that_a_plugin_brings(make_llama):
    folder, _ = make_llama("layers")
    expected = run(folder)
    given = {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    assert run(folder, Sideways(), attention_backend="sideways=sideways", **given) == expected
    with pytest.raises(UnsupportedError, match="no attention of type 'sideways'"):
        run(folder, Sideways(backend=False))
    with pytest.raises(ConfigError, match=r"'sidewise' is not a kind of layer.*'sideways'"):
        run(folder, Sideways(), attention_backend="sidewise=sideways")


class BothWays(LlamaAttention):
    attention_type = AttentionType.ENCODER


class BothWaysForCausalLM(LlamaForCausalLM):
    attention = BothWays


class BothWaysPlugin:
    name = "both-ways"

    @hookimpl
    def toolkit_register_models(self, models):
        models.add("LlamaForCausalLM", f"{__name__}:BothWaysForCausalLM", override=True)


def test_a_layer_that_nobody_feeds_is_refused(make_llama):
    folder, _ = make_llama("layers")
    with pytest.raises(
        UnsupportedError,
        match=r"'model.layers.0.self_attn.attn' needs whole sequences, which this engine does "
        r"not give\. Supported: layers that need the KV cache",
    ):
        run(folder, BothWaysPlugin())


def test_a_type_by_its_name_is_cores():
    layer = Attention(2, 8, type="encoder", vllm_config=VllmConfig.default(), prefix="layer")
    assert layer.params.attention_type is AttentionType.ENCODER
    assert layer.kv_cache_spec() is None
    assert not layer.one_way
