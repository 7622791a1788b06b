"""Memory kept free next to a KV cache that gets a share of a device's memory. The device is made
up."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import Model
from toolkit_lm.parts import MediaPart
from toolkit_lm.runner.step_parts import StepParts

MIB = 2**20
warm_up = importlib.import_module("toolkit_lm.runner.warm_up")


class Runner:
    """Counts the steps that it is asked to run."""

    selections = {}
    kv_cache = None
    compiler = None

    def __init__(self, parts, device, **options):
        self.config = VllmConfig.make(
            model="any", max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4, **options
        )
        self.device = torch.device(device)
        made = [
            kind(
                Model(vllm_config=self.config), self.config, self.device, plugins=None, options=None
            )
            for kind in parts
        ]
        self.parts = StepParts({type(part).__name__: part for part in made})
        self.num_steps = 0

    def kv_cache_specs(self):
        return {"layer": None}

    def init_kv_cache(self, kv_cache):
        pass

    def execute(self, plan):
        self.num_steps += 1


@pytest.fixture
def profile(monkeypatch):
    planned = SimpleNamespace(
        pools=[], max_blocks=lambda *lengths: [1], sized=lambda *numbers: None
    )
    monkeypatch.setattr(warm_up, "plan_groups", lambda *groups: planned)
    monkeypatch.setattr(warm_up, "_made_up", lambda *numbers: None)
    monkeypatch.setattr(warm_up, "_drop", lambda plan: None)
    monkeypatch.setattr(warm_up, "_resident", {"VmRSS": 10 * MIB, "VmHWM": 13 * MIB}.get)

    def profile(parts, device, compiler=None, **options):
        runner = Runner(parts, device, **options)
        runner.compiler = compiler
        return warm_up.profile(runner), runner.num_steps

    return profile


@pytest.mark.parametrize("options", [{}, {"kv_cache_memory": "0.5"}], ids=["auto", "fraction"])
def test_a_gpu_keeps_room_for_what_encoders_make(profile, options):
    assert profile([MediaPart], "cuda", encoder_cache_memory="96MiB", **options) == (
        96 * MIB,
        2,
    )
    assert profile([], "cuda", encoder_cache_memory="96MiB", **options) == (0, 2)


def test_a_fraction_of_a_host_leaves_room_for_the_step_too(profile):
    assert profile([MediaPart], "cpu", encoder_cache_memory="96MiB", kv_cache_memory="0.5") == (
        99 * MIB,
        2,
    )
    assert profile([], "cpu", kv_cache_memory="0.5") == (3 * MIB, 2)


@pytest.mark.parametrize(
    "options", [{"kv_cache_memory": "64MiB"}, {"num_kv_blocks": 4}], ids=["bytes", "blocks"]
)
def test_a_cache_of_a_stated_size_is_what_it_is(profile, options):
    assert profile([MediaPart], "cuda", **options) == (0, 0)


def test_graphs_are_counted_before_the_cache_gets_its_share(profile):
    compiler = SimpleNamespace(estimate=lambda step: 5 * MIB)
    assert profile([], "cuda", compiler) == (5 * MIB, 2)
    assert profile([], "cuda", compiler, num_kv_blocks=8) == (0, 0), (
        "whoever states blocks gets them"
    )
