"""Taps and slots of a part: hidden states of named layers, however the model is computed, and what
the part says of each row and token."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.attention import slots
from toolkit_lm.errors import ConfigError, PluginError
from toolkit_lm.step import StepPart
from toolkit_lm_decoder.llama import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
PROMPT = [(3 * k) % 250 + 3 for k in range(1, 21)]
WAYS = {
    "eager": {"kernels": "torch"},
    "fused": {"kernels": "cpu"},
    "compiled": {"optimization_level": 2, "compilation_config": json.dumps({"backend": "eager"})},
    "inductor": {"optimization_level": 2},
    "stages": {"executor": "threads", "pipeline_parallel_size": 2},
    "tensor": {"executor": "threads", "tensor_parallel_size": 2},
}


class Tapping(StepPart):
    """Keeps what it taps, and what the layers could read of its slots."""

    ranks = "last_stage"
    taps = ("model.layers.0", "model.layers.2")
    buffers: ClassVar = {"rows": ("row", torch.int32), "tokens": ("token", torch.int64)}
    steps: ClassVar[list] = []

    def context(self, inputs, buffers):
        buffers["rows"][:] = inputs.rows + 1
        buffers["tokens"][:] = inputs.token_index

    def finish(self, inputs, hidden_states, result, step):
        with pytest.raises(ValueError, match=r"'model\.layers\.1' is not tapped.*layers\.0"):
            step.tap("model.layers.1")
        self.steps.append(
            (
                {name: step.tap(name).clone() for name in self.taps},
                slots("rows").clone(),
                slots("tokens")[: len(inputs.token_index)].tolist(),
            )
        )


@pytest.fixture
def tapped(monkeypatch):
    def tap(part):
        monkeypatch.setattr(LlamaForCausalLM, "parts", {"tapping": part})

    return tap


def run(folder, tokens=4, **options) -> list[list[int]]:
    options = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4, "renderer": "tokens"} | (
        {"max_num_batched_tokens": 8, "max_model_len": 64, "block_size": 4} | options
    )
    with LLM(str(folder), plugins=[THREADS], **options) as llm:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        out = llm.generate([{"prompt_token_ids": PROMPT}], params)
        return [list(one.outputs[0].token_ids) for one in out]


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.nightly if way == "inductor" else ()) for way in WAYS],
)
def test_a_tap_gives_what_the_layer_does(make_llama, tapped, way):
    folder, reference = make_llama("tapped", num_hidden_layers=4)
    # Inductor's parts are compared with the model alone: each run compiles for half a minute.
    plain = None if way == "inductor" else run(folder, **WAYS[way])
    tapped(Tapping)
    Tapping.steps.clear()
    [tokens] = run(folder, **WAYS[way])
    assert plain in (None, [tokens])
    with torch.no_grad():
        expected = reference(
            torch.tensor([PROMPT + tokens[:-1]]), output_hidden_states=True
        ).hidden_states
    # After the warm-up: chunks of 8, 8 and 4 tokens, and three of one.
    ranks = 2 if way == "tensor" else 1
    steps = Tapping.steps[-6 * ranks :: ranks]
    assert [len(places) for _, _, places in steps] == [8, 8, 4, 1, 1, 1]
    for layer in (0, 2):
        found = torch.cat([taps[f"model.layers.{layer}"] for taps, _, _ in steps])
        assert torch.allclose(found, expected[layer + 1][0], atol=1e-4)
    assert [place for _, _, places in steps for place in places] == list(range(23))
    assert all(rows.tolist() == [rows[0], 0, 0, 0] and rows[0] > 0 for _, rows, _ in steps)


def test_a_tapped_layer_is_fused_as_others_are(make_llama, tapped):
    """So that a part that taps changes no token, not even by rounding."""
    seen = []

    class Looking(Tapping):
        def finish(self, inputs, hidden_states, result, step):
            seen.extend(
                (one.fused is not None and one.may_bypass()) for one in self.model.model.layers
            )

    tapped(Looking)
    run(make_llama("tapped", num_hidden_layers=4)[0], kernels="cpu")
    assert seen and all(seen)


def test_an_unknown_layer_is_named_with_the_nearest(make_llama, tapped):
    class Wrong(Tapping):
        taps = ("model.layer.1",)

    tapped(Wrong)
    with pytest.raises(ConfigError, match=r"no layer 'model\.layer\.1'.*'model\.layers\.1'"):
        run(make_llama("tapped", num_hidden_layers=4)[0])


def test_two_buffers_of_one_name_are_refused(make_llama, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "parts", {"one": Tapping, "other": Tapping})
    with pytest.raises(PluginError, match="'other' has a buffer 'rows', and so has another"):
        run(make_llama("tapped", num_hidden_layers=4)[0])
