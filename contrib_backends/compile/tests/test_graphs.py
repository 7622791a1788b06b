"""CUDA graphs without a GPU. A stand-in for a graph runs its work again.

It checks that the work reads the addresses of the recording.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compile_harness import QUICKLY
from static_backend import StaticBackend, StaticBackends
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.attention import AttentionSpec, AttentionType, BatchLimits, GraphSupport
from toolkit_lm.config import CompilationOptions, VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.kv import FullSpec
from toolkit_lm.plugin import Plugins
from toolkit_lm_compile import graphs as graphs_module
from toolkit_lm_compile.dispatch import Kind, Mode, Run
from toolkit_lm_compile.graphs import Graphs, Recorder, describe, make_graphs
from toolkit_lm_compile.memory import Memory
from toolkit_lm_compile.options import effective, options_of
from toolkit_lm_compile.replay import Passes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = [[5, 6, 7], [9], list(range(3, 30)), [40, 41], list(range(50, 61))]
LENGTHS = [9, 3, 5, 7, 2]
"""Lengths of the answers. They differ, so the number of rows changes from step to step."""
SIZES = [1, 2, 4, 8, 16]
NONE = Kind.NONE
PIECEWISE = Kind.PIECEWISE
FULL = Kind.FULL


class Reads(TorchDispatchMode):
    """The addresses of what ops read that was not made inside."""

    def __init__(self):
        super().__init__()
        self.places = []
        self.kept = []
        self._made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for one in tree_leaves((args, kwargs)):
            if (
                isinstance(one, torch.Tensor)
                and (place := one.untyped_storage().data_ptr()) not in self._made
            ):
                self.places.append(
                    (str(func), place, tuple(one.shape), tuple(one.stride()), one.storage_offset())
                )
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor) and all(
                place != one.untyped_storage().data_ptr() for _, place, *_ in self.places
            ):
                # Memory that is freed could be that of an input later.
                self.kept.append(one)
                self._made.add(one.untyped_storage().data_ptr())
        return out


class FakeRecorder(Recorder):
    """Runs the work again in place of a graph."""

    def __init__(self):
        self.num_recorded = self.num_replays = 0
        self.is_sealed = False
        self.compares = True

    def record(self, work):
        assert not self.is_sealed, "a request waits for a capture"
        self.num_recorded += 1
        work()
        with Reads() as first:
            work()

        def replay():
            with Reads() as reads:
                work()
            assert not self.compares or reads.places == first.places, (
                "a graph would have read elsewhere"
            )
            self.num_replays += 1

        return replay

    def free_memory(self):
        return 0


@pytest.fixture
def recorder(monkeypatch):
    recorder = FakeRecorder()
    monkeypatch.setattr(graphs_module, "make_recorder", lambda device: recorder)
    return recorder


def make_llama(folder, depth):
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        **shape, vocab_size=101, max_position_embeddings=128, initializer_range=0.3, dtype="float32"
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"), 3)


def make_llm(folder, mode, attention="sdpa", options=None, **details):
    plain = {
        "renderer": "tokens",
        "dtype": "float32",
        "kernels": "torch",
        "attention_backend": attention,
        "num_kv_blocks": 24,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "optimization_level": 1,
    }
    details = {
        "backend": "eager",
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": SIZES,
        **details,
    }
    return LLM(
        str(folder),
        plugins=[StaticBackends()],
        compilation_config=json.dumps(details),
        **plain | (options or {}),
    )


def runner_of(llm):
    return llm.llm_engine.client.core.executor.runner


def caches_of(llm):
    return {
        name: binding.kv_cache[0] for name, binding in runner_of(llm)._bindings.by_layer.items()
    }


def run(llm):
    """Tokens, and what is in the KV cache after it."""
    caches = caches_of(llm)
    for cache in caches.values():
        cache.fill_(7.0)
    StaticBackend.seen.clear()
    params = [
        SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in LENGTHS
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    return [list(one.outputs[0].token_ids) for one in outputs], {
        name: cache.clone() for name, cache in caches.items()
    }


@pytest.fixture(scope="module")
def expected(folder):
    return run(make_llm(folder, "none", options={"optimization_level": 0}))


def check_equal(found, expected):
    assert found[0] == expected[0]
    for name, cache in expected[1].items():
        assert (cache == 7.0).any() and (cache != 7.0).any()
        # Places that nobody wrote are unchanged, to the bit.
        assert torch.equal(found[1][name] == 7.0, cache == 7.0)
        torch.testing.assert_close(found[1][name], cache, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "backend", "ran"),
    [
        ("piecewise", "sdpa", {PIECEWISE, NONE}),
        ("full", "static", {FULL, NONE}),
        ("full", "decode", {FULL, PIECEWISE, NONE}),
        ("full_and_piecewise", "uniform", {FULL, PIECEWISE, NONE}),
        ("full_and_piecewise", "sdpa", {PIECEWISE, NONE}),
    ],
)
def test_padded_steps_give_the_tokens_and_the_cache_of_steps_without_padding(
    folder, expected, recorder, mode, backend, ran
):
    llm = make_llm(folder, mode, backend)
    graphs = runner_of(llm).compiler.graphs
    recorder.is_sealed = True
    num_recorded = recorder.num_recorded
    check_equal(run(llm), expected)
    assert {kind for kind, count in graphs.num_replays.items() if count} == ran
    assert recorder.num_recorded == num_recorded > 0 and recorder.num_replays > 0
    if FULL in ran:
        fixed = [view for view in StaticBackend.seen if view.is_fixed]
        assert any((view.seq_lens == 0).any() for view in fixed), "no step was padded"
        assert all(view.has_padding and view.max_seq_len == 128 for view in fixed)


@pytest.mark.parametrize(
    ("mode", "backend", "ran"),
    [
        ("full_and_piecewise", "decode", {FULL, PIECEWISE}),
        ("full_decode_only", "decode", {FULL, NONE}),
        ("full", "static", {FULL}),
    ],
)
def test_steps_of_prompts_and_of_answers(folder, expected, recorder, mode, backend, ran):
    """No step is larger than the largest graph: prompts are computed in parts, beside answers."""
    llm = make_llm(folder, mode, backend, options={"max_num_batched_tokens": 16})
    graphs = runner_of(llm).compiler.graphs
    assert run(llm)[0] == expected[0]
    assert {kind for kind, count in graphs.num_replays.items() if count} == ran
    longest = {view.max_query_len for view in StaticBackend.seen if view.is_fixed}
    assert longest == ({1, 16} if backend == "static" else {1}), (
        "of steps of any kind, or of one token a row alone"
    )


def test_attention_stays_outside_of_the_parts_and_sees_no_padding(folder, recorder):
    llm = make_llm(folder, "piecewise", "static")
    graphs = runner_of(llm).compiler.graphs
    assert all(type(one) is Passes for one in graphs._passes.values())
    assert recorder.num_recorded == len(SIZES) * 4, (
        "of three layers, the parts before, between and after"
    )
    run(llm)
    assert StaticBackend.seen and not any(
        view.is_fixed or view.has_padding for view in StaticBackend.seen
    )
    assert sorted({view.num_tokens for view in StaticBackend.seen}) != SIZES


def test_graphs_of_all_sizes_share_their_buffers(folder, recorder):
    sizes = {}
    for count in (1, 5):
        llm = make_llm(folder, "piecewise", cudagraph_capture_sizes=SIZES[-count:])
        sizes[count] = runner_of(llm).compiler.graphs._memory.num_bytes
    assert sizes[1] == sizes[5] > 0


@pytest.mark.slow
def test_parts_that_inductor_compiles(recorder, tmp_path):
    """Of one layer: the first part and the last."""
    folder = make_llama(tmp_path / "llama", 1)
    expected = run(make_llm(folder, "none", options={"optimization_level": 0}))
    # Their code allocates what lies between its kernels where no mode of torch sees it.
    recorder.compares = False
    llm = make_llm(
        folder, "piecewise", backend="inductor", cache_dir=str(tmp_path / "cache"), **QUICKLY
    )
    assert run(llm)[0] == expected[0]
    assert runner_of(llm).compiler.graphs.num_replays[PIECEWISE]


def test_a_step_that_fails_later_has_nothing_captured_again(folder, recorder):
    llm = make_llm(folder, "piecewise")
    recorder.is_sealed = True
    before = recorder.num_recorded
    llm.llm_engine.client.core.executor.warm_up()
    assert recorder.num_recorded == before > 0


def test_a_graph_that_cannot_be_captured_ends_the_start_and_says_what_to_do(folder, monkeypatch):
    class Refuses(FakeRecorder):
        def record(self, work):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs_module, "make_recorder", lambda device: Refuses())
    with pytest.raises(
        UnsupportedError,
        match=r"CUDA graph \(piecewise, 16 tokens\) cannot be captured: .* another cudagraph_mode",
    ):
        make_llm(folder, "piecewise")
    assert gc.isenabled()


def test_a_mode_that_attention_cannot_do_is_told_once(folder, recorder, caplog):
    # A share of the memory: the cache is made twice.
    llm = make_llm(folder, "full", options={"num_kv_blocks": None, "kv_cache_memory": "0.0001"})
    assert caplog.text.count("cudagraph_mode full: ") == 1
    assert (
        "'sdpa' are not possible (what it launches depends on the rows of each step)" in caplog.text
        and "It is piecewise." in caplog.text
    )
    assert runner_of(llm).compiler.graphs.mode is Mode.PIECEWISE


FIT = {name: f"{name}/tests/test_{name}_graphs.py" for name in ("flashinfer", "triton")}
"""Backends whose decodes graphs may hold, and where steps at fixed addresses show that they read
where they read."""


def test_each_backend_is_shown_to_be_fit_for_graphs_or_says_why_it_is_not():
    registry = Plugins.load().attention_backends
    page = {"num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
    spec = AttentionSpec(
        layer="one",
        type=AttentionType.DECODER,
        num_heads=4,
        device="cuda",
        kv_cache=FullSpec(block_size=16, **page),
        **page,
    )
    for entry in registry.entries():
        answer = registry.load(entry.key).graphs(spec)
        if entry.key in FIT:
            assert answer is GraphSupport.DECODE
            assert "FixedSteps(" in (Path(__file__).parents[2] / FIT[entry.key]).read_text()
        else:
            assert isinstance(answer, str) and len(answer) > 20, (entry.key, answer)


def test_a_device_without_graphs_is_told_and_runs_without(folder, expected, caplog):
    llm = make_llm(folder, "full_and_piecewise")
    assert runner_of(llm).compiler.graphs is None
    assert (
        "cudagraph_mode full_and_piecewise: there are no CUDA graphs on cpu. It is none."
        in caplog.text
    )
    assert run(llm)[0] == expected[0]


@pytest.mark.parametrize(
    ("details", "device", "support", "told"),
    [
        ({}, "cuda", GraphSupport.NEVER, "CUDA graphs: none"),
        ({"cudagraph_mode": "piecewise"}, "cuda", GraphSupport.NEVER, "CUDA graphs: piecewise"),
        (
            {"cudagraph_mode": "full"},
            "cuda",
            GraphSupport.NEVER,
            "CUDA graphs: piecewise, not full: graphs of the attention backend 'one'",
        ),
        (
            {"cudagraph_mode": "full"},
            "cuda",
            "it is slow",
            (
                "CUDA graphs: piecewise, not full: graphs of the attention backend 'one' are not "
                "possible (it is slow), so"
            ),
        ),
        (
            {"cudagraph_mode": "full"},
            "cuda",
            GraphSupport.DECODE,
            "CUDA graphs: full_and_piecewise, not full: the attention backend 'one'",
        ),
        (
            {"cudagraph_mode": "full"},
            "cpu",
            GraphSupport.ALWAYS,
            "CUDA graphs: none, not full: there are no CUDA graphs on cpu",
        ),
        (
            {"cudagraph_mode": "full", "splitting_ops": []},
            "cuda",
            GraphSupport.ALWAYS,
            "CUDA graphs: none, not full: graphs need",
        ),
    ],
)
def test_what_is_explained(details, device, support, told):
    config = VllmConfig.default(device=device, compilation_config=json.dumps(details))
    assert describe(options_of(config), config, {"one": support}).startswith(told)


@pytest.mark.parametrize(
    "details",
    [
        {"cudagraph_mode": "all"},
        {"cudagraph_capture_sizes": [0]},
        {"cudagraph_capture_sizes": [*range(1, 66)]},
    ],
)
def test_wrong_options_are_refused(details):
    with pytest.raises(ConfigError, match=r"compilation_config.*cudagraph"):
        options_of(VllmConfig.default(compilation_config=json.dumps(details)))


def test_graphs_do_not_change_what_is_compiled():
    assert effective(CompilationOptions(), 1) == effective(
        CompilationOptions(cudagraph_mode="full", cudagraph_capture_sizes=(4,)), 1
    )


class Shrinking(FakeRecorder):
    """A device whose memory is taken by graphs: 100 bytes for the first of a kind, 10 for each
    other."""

    def __init__(self):
        super().__init__()
        self.free = 10_000

    def free_memory(self):
        return self.free


def test_memory_is_estimated_from_two_graphs_of_each_kind(monkeypatch):
    recorder = Shrinking()
    monkeypatch.setattr(graphs_module, "make_recorder", lambda device: recorder)
    options = CompilationOptions(
        cudagraph_mode="full_and_piecewise", cudagraph_capture_sizes=(1, 2, 4, 8, 16, 32)
    )
    graphs = make_graphs(SimpleNamespace(parts={}), options, VllmConfig.default())
    graphs.bind(BatchLimits(8, 64, 128), {"one": GraphSupport.DECODE})
    seen = []

    def step():
        run = graphs._forced
        assert (
            graphs.begin_step(1, 1, 1, whole=True) == (run[2], run[1], run[3])
            if run.kind is FULL
            else True
        )
        recorder.free -= 10 if any(one.kind is run.kind for one in seen) else 100
        seen.append(run)

    # Whole: 1, 2, 4, 8. Parts: 1, 2, 4, 8, 16, 32.
    assert graphs.estimate(step) == (100 + 3 * 10) + (100 + 5 * 10)
    assert [one.num_tokens for one in seen if one.kind is FULL] == [8, 4]
    assert [one.num_tokens for one in seen if one.kind is PIECEWISE] == [32, 16]
    assert not graphs._passes, "it was a trial"


def test_sizes_that_no_step_reaches_are_not_captured():
    options = CompilationOptions(cudagraph_mode="piecewise", cudagraph_capture_sizes=(4, 100, 4))
    model = SimpleNamespace(parts={})
    graphs = Graphs(model, options, Mode.PIECEWISE, FakeRecorder(), torch.device("cpu"))
    graphs.bind(BatchLimits(8, 64, 128), {"one": GraphSupport.NEVER})
    assert graphs._dispatcher.graphs() == [Run(PIECEWISE, 4)]


def test_buffers_are_taken_again_once_they_are_given_back():
    memory = Memory(torch.device("cpu"))
    strided = torch.zeros(6, 10)[:, :4]
    first = memory.like(strided)
    second = memory.allocate([3], [1], torch.int64)
    assert (
        first.shape == strided.shape
        and first.stride() == strided.stride()
        and first.data_ptr() != second.data_ptr()
    )
    place = first.data_ptr()
    memory.give_back(first)
    memory.give_back(torch.zeros(3))
    assert memory.allocate([2, 2], [2, 1], torch.float32).data_ptr() == place
    before = memory.num_bytes
    memory.allocate([100], [1], torch.float32)
    assert memory.num_bytes == before + 400
    memory.give_all_back()
    memory.allocate([100], [1], torch.float32)
    assert memory.num_bytes == before + 400
