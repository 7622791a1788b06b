"""Linear methods that wrap another one: what they change counts wherever a layer is computed, and
they know which rows they are given."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
import torch
import transformers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import ChangingMethod, FusibleLayer, LinearBase, Rows, VocabParallelEmbedding
from toolkit_lm.plugin import Plugins
from toolkit_lm.step import StepPart
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import load_checkpoint, make_checkpoint, randomize
from toolkit_lm_moe.experts import RoutedExperts
from toolkit_lm_moe.mixtral import MixtralForCausalLM

PROMPTS = [{"prompt_token_ids": [(7 * i + n) % 250 + 3 for i in range(n)]} for n in (9, 4)]
GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "detokenize": False}
WAYS = {
    "fused": {"kernels": "cpu"},
    "compiled": {"optimization_level": 2, "compilation_config": json.dumps({"backend": "eager"})},
}
SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 256,
    "dtype": "float32",
}


class Adapter(ChangingMethod):
    """Adds what depends on the input, and keeps what it saw."""

    def __init__(self, inner, name, seen):
        super().__init__(inner)
        self.name = name
        self.seen = seen

    def change(self, x, out, rows):
        if not torch.compiler.is_compiling():
            self.seen.append((self.name, x.clone(), rows))
        return out.add_(x.mean(-1, keepdim=True))


class Adapting(StepPart):
    """Wraps the layers of a model that has its weights, and may have been fused."""

    seen: ClassVar[list] = []
    only: ClassVar[str] = ""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen.clear()
        for name, layer in self.model.named_modules():
            wanted = isinstance(layer, LinearBase) and layer.spec.kind != "embedding"
            if wanted and self.only in name:
                layer.wrap(lambda method, name=name: Adapter(method, name, self.seen))


def run(folder, **options):
    params = options.pop("params", GREEDY)
    common = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_kv_blocks": 32}
    with LLM(str(folder), **common | options) as llm:
        return [
            (
                one.outputs[0].token_ids,
                one.outputs[0].logprobs and one.outputs[0].cumulative_logprob,
            )
            for one in llm.generate(PROMPTS, SamplingParams(**params, logprobs=0), use_tqdm=False)
        ]


@pytest.fixture
def adapting(monkeypatch):
    def of(model_class, only=""):
        monkeypatch.setattr(Adapting, "only", only)
        monkeypatch.setattr(model_class, "parts", {"adapting": Adapting})
        return Adapting.seen

    return of


def assert_same(ours, expected):
    for (tokens, score), (wanted, wanted_score) in zip(ours, expected, strict=True):
        assert list(tokens) == list(wanted)
        assert score == pytest.approx(wanted_score, abs=1e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("only", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"])
def test_a_wrapped_layer_is_computed_as_such_in_every_way(make_llama, adapting, way, only):
    folder, _ = make_llama("wrapped")
    plain = run(folder, kernels="torch")
    adapting(LlamaForCausalLM, only)
    expected = run(folder, kernels="torch")
    assert_same(run(folder, **WAYS[way]), expected)
    assert any(score != wanted for (_, score), (_, wanted) in zip(plain, expected, strict=True))


def test_kernels_stop_fusing_a_layer_that_is_wrapped_later(make_llama):
    folder, _ = make_llama("wrapped")
    model = load_checkpoint(LlamaForCausalLM, folder, kernels="cpu")
    layers = [layer for layer in model.modules() if isinstance(layer, FusibleLayer)]
    assert all(layer.fused is not None and layer.may_bypass() for layer in layers)
    layers[0].mlp.down_proj.wrap(lambda method: Adapter(method, "", []))
    assert [layer.may_bypass() for layer in layers] == [False, True]
    assert "Adapter" in layers[0].refuses_bypass()


def test_layers_say_which_rows_they_are_given(make_llama, adapting):
    folder, _ = make_llama("wrapped")
    seen = adapting(LlamaForCausalLM)
    run(folder)
    heads = [rows for name, _, rows in seen if name == "lm_head"]
    assert set(heads[-GREEDY["max_tokens"] :]) == {Rows.SAMPLED}  # before it, the warm-up
    assert {rows for name, _, rows in seen if name != "lm_head"} == {Rows.FLAT}


def test_heads_name_the_tokens_of_prompts(make_llama, adapting):
    """A head of prompts' log probabilities sees other tokens than those that are drawn after."""
    folder, _ = make_llama("wrapped")
    seen = adapting(LlamaForCausalLM)
    run(folder, params=GREEDY | {"prompt_logprobs": 0}, max_num_seqs=1)
    given = [
        rows.tolist() for name, x, rows in seen if name == "lm_head" and rows is not Rows.SAMPLED
    ]
    assert given == [list(range(8)), list(range(3))]


def test_experts_are_given_the_tokens_that_went_to_them(tmp_path, adapting):
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE))
    randomize(model)
    folder = make_checkpoint(tmp_path, model)
    plain = run(folder)
    seen = adapting(MixtralForCausalLM, ".mlp.")
    ours = run(folder)
    assert_same(run(folder, kernels="torch"), ours)
    assert ours != plain
    routed = None
    found = 0
    for name, x, rows in seen:
        if name.endswith(".gate"):
            routed = x
        elif name.endswith("gate_up_proj"):
            assert torch.equal(routed[rows], x)
            found += 1
    assert found


def test_experts_are_not_multiplied_in_one_when_one_is_wrapped(tmp_path):
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE))
    folder = make_checkpoint(tmp_path, model)
    made = load_checkpoint(MixtralForCausalLM, folder)
    experts = next(one for one in made.modules() if isinstance(one, RoutedExperts))
    assert experts.may_bypass()
    experts.get_submodule("2.down_proj").wrap(lambda method: Adapter(method, "", []))
    assert not experts.may_bypass()


def test_a_method_that_looks_up_no_embeddings_wraps_no_embedding(make_llama):
    folder, _ = make_llama("wrapped")
    model = load_checkpoint(LlamaForCausalLM, folder)
    table = next(one for one in model.modules() if isinstance(one, VocabParallelEmbedding))
    with pytest.raises(UnsupportedError, match=r"Adapter cannot wrap model\.embed_tokens"):
        table.wrap(lambda method: Adapter(method, "", []))


@pytest.mark.parametrize("architecture", ["T5", "Bart"])
def test_layers_of_an_encoder_say_so(tmp_path, architecture):
    """Also those of cross attention that make keys and values of what the encoder gives."""
    fields = {
        "T5": {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2},
        "Bart": {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
        },
    }
    config = getattr(transformers, f"{architecture}Config")(vocab_size=272, **fields[architecture])
    name = f"{architecture}ForConditionalGeneration"
    folder = make_checkpoint(tmp_path, getattr(transformers, name)(config))
    made = load_checkpoint(Plugins.load().models.load(name), folder)
    for name, layer in made.named_modules():
        if isinstance(layer, LinearBase) and layer.spec.kind == "linear":
            of_encoder = "encoder." in name or name.endswith(".kv_proj")
            assert layer.rows is (Rows.ENCODER if of_encoder else Rows.FLAT), name
