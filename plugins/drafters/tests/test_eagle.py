"""The drafter "eagle": logits of published heads, all drafts of a head that knows the target, and
heads that do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from draft_heads import (
    DRAFTS,
    SHAPE,
    THREADS,
    Eagle1,
    Eagle3,
    assert_same_drafts,
    drafted,
    generate,
    make_target,
    randomize,
    save_head,
    start,
)
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import PluginWarning
from toolkit_lm_devkit import DraftModelConformance
from toolkit_lm_drafters.eagle import EagleDrafter
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder), str(folder)


@pytest.fixture(scope="module")
def tokens(target):
    with start(target[1], None) as llm:
        return generate(llm)


STAGES = {"pipeline_parallel_size": 2, "executor": "threads", "given": [THREADS]}
HEADS = {
    "eagle 1": (Eagle1, {}, {}),
    "eagle 1, biased": (Eagle1, {"bias": True}, {}),
    "eagle 3": (Eagle3, {"draft_vocab_size": 60}, {"draft_vocab_size": 60}),
    "eagle 3, other taps": (
        Eagle3,
        {"layers": (0, 5)},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5]}},
    ),
    "eagle 3, taps as vLLM counts them": (
        Eagle3,
        {"layers": (0, 5, 6)},
        {"eagle_aux_hidden_state_layer_ids": [1, 6, 7]},
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_logits_are_those_of_the_published_formula(target, tokens, monkeypatch, tmp_path, case):
    kind, given, fields = HEADS[case]
    model, folder = target
    head = randomize(kind(model, **given))
    path = save_head(head, tmp_path, **fields)
    options = [f"model={path}", f"num_speculative_tokens={DRAFTS}"]
    seen, drawn = drafted(folder, monkeypatch, EagleDrafter, "eagle", options)
    assert drawn == tokens
    assert_same_drafts(head, model, seen)


def test_a_head_of_speculators(target, tokens, monkeypatch, tmp_path):
    """Its config.json has the layer in a dict of its own, and counts taps as vLLM does."""
    model, folder = target
    head = randomize(Eagle3(model, (0, 5, 6), 60))
    path = save_head(head, tmp_path)
    layer = json.loads((tmp_path / "config.json").read_text())
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 60,
        "eagle_aux_hidden_state_layer_ids": [1, 6, 7],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "transformer_layer_config": layer,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = [f"model={path}", f"num_speculative_tokens={DRAFTS}"]
    seen, drawn = drafted(folder, monkeypatch, EagleDrafter, "eagle", options)
    assert drawn == tokens
    assert_same_drafts(head, model, seen)
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_before_fc": True}))
    with pytest.raises(ConfigError, match=r"norm_before_fc True, and heads are built with False"):
        start(folder, "eagle", options)


@pytest.mark.parametrize("case", ["eagle 1", "eagle 3"])
def test_two_stages_draft_as_one(target, tokens, monkeypatch, tmp_path, case):
    """A tap of the first stage is passed on, and the embedding is read for the last."""
    kind, given, fields = HEADS[case]
    model, folder = target
    head = randomize(kind(model, **given))
    path = save_head(head, tmp_path, **fields)
    options = [f"model={path}", f"num_speculative_tokens={DRAFTS}"]
    seen, drawn = drafted(folder, monkeypatch, EagleDrafter, "eagle", options, **STAGES)
    assert drawn == tokens
    assert_same_drafts(head, model, seen)


class TestEagle(DraftModelConformance):
    """A head that knows a target whose next token depends on the last one alone."""

    drafter = "eagle"
    engine_options = {"device": "cpu", "dtype": "float32", "renderer": "tokens"}
    few_blocks = 84
    pytestmark = pytest.mark.nightly

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("markov")
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 2}))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
        # So that the last norm, which the head has not, changes nothing.
        table = model.model.embed_tokens.weight.data
        table /= table.square().mean(-1, keepdim=True).sqrt()
        model.config.rms_norm_eps = 1e-12
        model.save_pretrained(folder)
        head = Eagle1(model)
        head.layers[0].self_attn.o_proj.weight.data.zero_()
        head.layers[0].mlp.down_proj.weight.data.zero_()
        size = SHAPE["hidden_size"]
        head.fc.weight.data = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
        save_head(head, folder / "head")
        return str(folder)

    @classmethod
    def twin_options(cls, checkpoint):
        return {"plugin_option": [f"drafters.model={checkpoint}/head"]}

    drafter_options = twin_options


def test_two_ranks_draft_as_one(target, tokens, tmp_path):
    path = save_head(randomize(Eagle3(target[0])), tmp_path)
    ranks = {"tensor_parallel_size": 2, "executor": "threads", "given": [THREADS]}
    with start(target[1], "eagle", [f"model={path}"], **ranks) as llm:
        assert generate(llm) == tokens


WRONG = {
    "width": ({"hidden_size": 48}, r"for a model of hidden_size 48, and this model's is 32"),
    "vocabulary": ({"vocab_size": 97}, r"for a model of vocab_size 97, and this model's is 96"),
    "taps": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 8]}},
        r"outputs of layers \[1, 8\], and the model has layers 0 to 7",
    ),
    "an embedding tapped": (
        {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
        r"outputs of layers \[-1, 2, 5\]",
    ),
    "other norms": (
        {"eagle_config": {"use_mtp_layernorm": True}},
        r"states use_mtp_layernorm True, and heads are built with False",
    ),
    "no d2t": ({"draft_vocab_size": 50}, r"draft_vocab_size is 50.*vocab_size 96"),
    "missing": ({"num_hidden_layers": 2}, r"missing: layers\.1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_head_that_does_not_fit_is_named_with_the_target(target, tmp_path, case):
    fields, message = WRONG[case]
    path = save_head(randomize(Eagle3(target[0])), tmp_path, **fields)
    with pytest.raises(ConfigError, match=message) as raised:
        start(target[1], "eagle", [f"model={path}"])
    assert repr(path) in str(raised.value) and repr(target[1]) in str(raised.value)


def test_a_missing_head(target):
    with pytest.raises(ConfigError, match=r"needs the head: drafters\.model=FOLDER"):
        start(target[1], "eagle")
    with pytest.raises(ConfigError, match=r"EAGLE head 'nowhere' and model .*neither a folder"):
        start(target[1], "eagle", ["model=nowhere"])


def test_a_head_that_is_not_finite_is_dropped(target, tokens, tmp_path):
    head = randomize(Eagle3(target[0]))
    head.fc.weight.data.fill_(torch.nan)
    path = save_head(head, tmp_path)
    with (
        pytest.warns(PluginWarning, match=r"eagle.*not finite.*is dropped"),
        start(target[1], "eagle", [f"model={path}"]) as llm,
    ):
        assert generate(llm) == tokens
