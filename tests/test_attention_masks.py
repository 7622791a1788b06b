"""Every attention backend that can run here: random batches of every kind against the formula, and
that no sequence sees another."""

from __future__ import annotations

import functools

import flashinfer_stand_in
import materialized_masks
import msgspec
import numpy as np
import pytest
import stand_in_kernel
import toolkit_lm_cpu
import toolkit_lm_flash_attn
import toolkit_lm_flashinfer
import toolkit_lm_flex
import toolkit_lm_sdpa
import toolkit_lm_triton
import toolkit_lm_xformers
import torch
from cross_step import CrossStep
from toolkit_lm.attention import AttentionType, select_backend
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.plugin import AttentionBackendRegistry, PluginInfo, Plugins
from toolkit_lm_cpu.backend import CpuBackend
from toolkit_lm_devkit import AttentionStep, assert_bf16_error
from toolkit_lm_flash_attn.backend import FlashAttnBackend
from toolkit_lm_flashinfer.backend import FlashInferBackend
from toolkit_lm_flex.backend import FlexBackend
from toolkit_lm_sdpa.backend import SdpaBackend
from toolkit_lm_triton.backend import TritonBackend
from toolkit_lm_xformers.backend import XformersBackend

BACKENDS = {
    "sdpa": SdpaBackend,
    "cpu": CpuBackend,
    "flex": FlexBackend,
    "flash_attn": FlashAttnBackend,
    "flash_attn's arguments": stand_in_kernel.backend_of(stand_in_kernel.GATHERING),
    "flash_attn's pages": stand_in_kernel.backend_of(stand_in_kernel.PAGING),
    "flashinfer": FlashInferBackend,
    "flashinfer's wrappers": flashinfer_stand_in.StandInBackend,
    "xformers": XformersBackend,
    "xformers' masks": materialized_masks.backend_of(None),
    "xformers' pages": materialized_masks.backend_of(16),
    "triton": TritonBackend,
}
"""Backends; those that need a GPU also with stand-ins for their kernels, which run on a CPU."""
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
DECODER_BATCHES = ["prefill", "chunked prefill", "decode", "mixed"]
KINDS = [*DECODER_BATCHES, "uncached", "encoder", "cross"]
FEATURES = {
    "plain": {},
    "window": {"window": 9},
    "bias": {"bias": "table"},
    "bias by offset": {"bias": "offsets"},
    "window and bias": {"window": 5, "bias": "alibi"},
    "sinks": {"sinks": True},
    "soft cap": {"soft_cap": 2.0},
    "spans": {"spans": True},
    "spans and window": {"spans": True, "window": 7},
    "spans and bias": {"spans": True, "bias": "table"},
    "spans, sinks and soft cap": {"spans": True, "window": 9, "sinks": True, "soft_cap": 2.0},
}
HEADS = [(4, 4), (4, 2), (4, 1)]
DTYPES = ["float32", "bfloat16"]
UNCACHED = ("uncached", "encoder")
MOST_KEYS = 50
WITHOUT = {"cross": ("window", "bias", "spans"), "encoder": ("spans",)}
"""Features that make no sense for some kinds."""
CASES = [
    (kind, name)
    for kind in KINDS
    for name in FEATURES
    if not set(WITHOUT.get(kind, ())) & set(FEATURES[name])
]

Step = AttentionStep | CrossStep


def random_rows(random: np.random.Generator, kind: str) -> list[tuple[int, int]]:
    """Three to six rows of (queries, keys)."""
    rows = []
    for _ in range(random.integers(3, 7)):
        keys = int(random.integers(1, MOST_KEYS))
        shape = random.choice(DECODER_BATCHES[:3]) if kind == "mixed" else kind
        rows.append(
            {"decode": (1, keys), "chunked prefill": (int(random.integers(1, keys + 1)), keys)}.get(
                shape, (keys, keys)
            )
        )
    return rows


def random_cross(random: np.random.Generator) -> dict:
    """Encoders and rows, of which the first two share an encoder; and the encoders that the step
    writes: none, some or all."""
    encoders = random.integers(1, MOST_KEYS, random.integers(2, 5)).tolist()
    queries = random.integers(1, 12, 5).tolist()
    owners = random.integers(0, len(encoders), 5).tolist()
    owners[1] = owners[0]
    written = random.permutation(len(encoders))[: random.integers(0, len(encoders) + 1)].tolist()
    return {
        "encoders": encoders,
        "rows": list(zip(queries, owners, strict=True)),
        "written": written,
    }


def make_step(
    backend,
    kind: str,
    feature: str,
    seed: int,
    dtype: str = "float32",
    device: str = "cpu",
    **fields,
) -> Step:
    random = np.random.default_rng([seed, KINDS.index(kind)])
    heads = HEADS[random.integers(len(HEADS))]
    fields |= {
        "heads": heads,
        "dtype": getattr(torch, dtype),
        "device": device,
        "seed": seed,
        **FEATURES[feature],
    }
    if kind == "cross":
        return CrossStep(backend, **random_cross(random), **fields)
    type = AttentionType.ENCODER if kind == "encoder" else AttentionType.DECODER
    return AttentionStep(
        backend, random_rows(random, kind), type=type, cached=kind not in UNCACHED, **fields
    )


def able_steps(name: str, kind: str, feature: str, device: str, seeds=(0,), **fields) -> list[Step]:
    """Steps of each dtype that the backend runs. The test is skipped, with the backend's reason,
    where it runs none."""
    steps = [
        make_step(BACKENDS[name], kind, feature, seed, dtype, device, **fields)
        for dtype in DTYPES
        for seed in seeds
    ]
    refusals = [
        step.backend.refuses(
            step.layer.attention_spec(torch.device(device), cached=kind not in UNCACHED)
        )
        for step in steps
    ]
    able = [step for step, refusal in zip(steps, refusals, strict=True) if refusal is None]
    if not able:
        pytest.skip(f"{name} on {device}: {refusals[-1]}")
    return able


def run(step: Step) -> torch.Tensor:
    with torch.inference_mode():
        return step.run()


def assert_exact(found: torch.Tensor, step: Step, exact: torch.Tensor) -> None:
    assert found.isfinite().all(), "a slot that no query sees leaks into the output"
    if step.dtype is torch.float32:
        assert (found - exact).abs().max() <= 1e-5
    else:
        assert_bf16_error([found], [step.eager()], [exact])


@functools.cache
def by_the_formula(kind: str, feature: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """In float64. It does not depend on the backend."""
    return torch.from_numpy(
        make_step(SdpaBackend, kind, feature, seed, str(dtype).removeprefix("torch.")).naive()
    )


every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_device = pytest.mark.parametrize("device", DEVICES)
WITH_SPANS = ("sdpa", "cpu")
"""A test below has the others refuse them."""
BACKEND_CASES = [
    (name, *case)
    for name in BACKENDS
    for case in CASES
    if name in WITH_SPANS or "spans" not in FEATURES[case[1]]
]
every_case = pytest.mark.parametrize(
    ("backend", "kind", "feature"),
    BACKEND_CASES,
    ids=[f"{name}-{kind}, {feature}" for name, kind, feature in BACKEND_CASES],
)


@every_case
@every_device
def test_equals_the_formula(backend, kind, feature, device) -> None:
    for step in able_steps(backend, kind, feature, device, seeds=range(2)):
        assert_exact(run(step), step, by_the_formula(kind, feature, step.seed, step.dtype))


@pytest.mark.parametrize("change", ["other values", "NaN"])
@every_case
@every_device
def test_no_query_sees_another_sequence(backend, kind, feature, change, device) -> None:
    """The keys and values of one sequence change: what the others give stays the same, bit for
    bit."""
    steps, changed_steps = (
        able_steps(backend, kind, feature, device, seeds=(7,)) for _ in range(2)
    )
    for step, changed in zip(steps, changed_steps, strict=True):
        victim = owner(step, 2)
        for x in (changed.k, changed.v):
            x[victim] = (
                torch.full_like(x[victim], torch.nan) if change == "NaN" else 3 * x[victim] - 1
            )
        others = (
            torch.cat([torch.full((len(q),), owner(step, row)) for row, q in enumerate(step.q)])
            != victim
        )
        before = run(step)
        after = run(changed)
        assert others.any()
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[~others], after[~others])


def owner(step: Step, row: int) -> int:
    """The sequence whose keys a row sees."""
    return step.rows[row][1] if isinstance(step, CrossStep) else row


@pytest.mark.parametrize("kind", ["mixed", "cross"])
@every_backend
@every_device
def test_padding_changes_nothing(backend, kind, device) -> None:
    for step in able_steps(backend, kind, "plain", device, padding=2):
        assert_exact(run(step), step, by_the_formula(kind, "plain", step.seed, step.dtype))


def cross_steps(name: str, device: str, *given) -> list[CrossStep]:
    """Steps of each dtype that the backend runs. The test is skipped where it runs none."""
    able_steps(name, "cross", "plain", device)
    steps = [
        CrossStep(BACKENDS[name], *given, dtype=getattr(torch, dtype), device=device)
        for dtype in DTYPES
    ]
    return [step for step in steps if step.backend.refuses(step.spec()) is None]


@pytest.mark.parametrize("written", [[], [1], [0, 1, 2], [2, 0]], ids=str)
@every_backend
@every_device
def test_a_step_writes_the_keys_of_some_encoders(backend, written, device) -> None:
    """And reads those that were written before. Rows 0 and 3 share a block table, and so do 1 and
    2."""
    for step in cross_steps(
        backend, device, [40, 3, 17], [(2, 0), (1, 1), (5, 1), (2, 0), (1, 2)], written
    ):
        step.q[3] = step.q[0]
        found = run(step)
        assert_exact(found, step, torch.from_numpy(step.naive()))
        assert torch.equal(found[:2], found[8:10])


@pytest.mark.parametrize("written", [[], [1, 0]], ids=str)
@every_backend
@every_device
def test_queries_as_many_as_the_encoders_tokens(backend, written, device) -> None:
    """They are other tokens all the same, and see all keys."""
    for step in cross_steps(backend, device, [5, 9], [(5, 0), (9, 1)], written):
        assert_exact(run(step), step, torch.from_numpy(step.naive()))


@pytest.mark.parametrize("asked", ["window", "bias"])
@every_backend
def test_cross_attention_has_no_positions_to_relate(backend, asked) -> None:
    spec = make_step(BACKENDS[backend], "cross", "plain", 0).spec()
    refused = msgspec.structs.replace(spec, **{asked: 7 if asked == "window" else True})
    assert BACKENDS[backend].refuses(refused)


@pytest.mark.parametrize("kind", ["mixed", "encoder"])
@every_backend
def test_spans_are_refused_where_they_are_not_computed(backend, kind) -> None:
    step = make_step(BACKENDS[backend], kind, "plain", 0)
    spec = step.layer.attention_spec(torch.device("cpu"), cached=kind == "mixed")
    refusal = BACKENDS[backend].refuses(msgspec.structs.replace(spec, spans=True))
    is_able = BACKENDS[backend].refuses(spec) is None
    assert (refusal is None) == (is_able and backend in WITH_SPANS and kind == "mixed")
    if is_able and refusal is not None:
        assert "spans" in refusal


def span_step(name: str) -> AttentionStep:
    """Step of six tokens after three. The test is skipped if the backend cannot run it."""
    step = AttentionStep(BACKENDS[name], [(6, 9)], spans=True)
    if (
        refusal := step.backend.refuses(step.layer.attention_spec(torch.device("cpu"), cached=True))
    ) is not None:
        pytest.skip(refusal)
    return step


@pytest.mark.parametrize("backend", WITH_SPANS)
def test_a_token_sees_what_comes_after_it_in_its_span(backend) -> None:
    """Two spans side by side, of which the first begins before the step: each token sees up to the
    end of its own, and no further."""
    step = span_step(backend)
    step.row_spans = [np.array([[0, 1], *[[1, 6]] * 5, *[[6, 9]] * 3], np.int32)]
    plain = run(step)
    for key, seers in ((5, range(3, 9)), (8, range(6, 9)), (6, range(6, 9))):
        changed = span_step(backend)
        changed.row_spans = step.row_spans
        changed.v[0][key] += 1
        assert [
            i for i in range(3, 9) if not torch.equal(run(changed)[i - 3], plain[i - 3])
        ] == list(seers)


@pytest.mark.parametrize("backend", WITH_SPANS)
def test_a_span_that_ends_after_the_step_is_no_step(backend) -> None:
    step = span_step(backend)
    step.row_spans = [np.array([[0, 1], *[[1, 12]] * 8], np.int32)]
    with pytest.raises(AssertionError, match="a span ends after the step"):
        run(step)


@pytest.fixture(scope="module")
def registry() -> AttentionBackendRegistry:
    found = AttentionBackendRegistry(owner=PluginInfo("all"))
    nvidia = (toolkit_lm_flash_attn, toolkit_lm_flashinfer, toolkit_lm_xformers, toolkit_lm_triton)
    for module in (toolkit_lm_sdpa, toolkit_lm_cpu, toolkit_lm_flex, *nvidia):
        module.toolkit_register_attention_backends(found)
    return found


def test_the_selector_prefers_what_has_run_and_is_fastest(registry) -> None:
    spec = make_step(SdpaBackend, "cross", "plain", 0).spec()
    order = ["cpu", "sdpa", "flash_attn", "xformers", "triton", "flashinfer", "flex"]
    assert [
        entry.key for entry in sorted(registry.entries(), key=lambda entry: -entry.priority)
    ] == order
    assert select_backend(spec, registry).name in ("cpu", "sdpa")
    assert select_backend(spec, registry, "flex").backend is FlexBackend


def test_nothing_that_no_gpu_has_run_goes_before_the_references() -> None:
    """All installed backends are checked, except those that refuse GPUs altogether, with or without
    a GPU here."""
    plugins = Plugins.load()
    spec = msgspec.structs.replace(
        make_step(SdpaBackend, "cross", "plain", 0).spec(), device="cuda"
    )
    reasons = {
        entry.key: plugins.attention_backends.ask(entry.key, spec)
        for entry in plugins.attention_backends.entries()
    }
    found = {
        entry.key: entry.priority
        for entry in plugins.attention_backends.entries()
        if reasons[entry.key] != "no kernel for device cuda"
    }
    # PyTorch's operations, both.
    assert found.pop("sdpa") == found.pop("latent") == 0
    assert found.keys() >= {
        "flash_attn",
        "xformers",
        "triton",
        "flashinfer",
        "flex",
    }
    on_gpu = VllmConfig.default(device="cuda")
    refusals = {
        entry.key: plugins.kernels.load(entry.key).refuses(on_gpu)
        for entry in plugins.kernels.entries()
    }
    kernels = {
        entry.key: entry.priority
        for entry in plugins.kernels.entries()
        if refusals[entry.key] != "it has nothing for device cuda"
    }
    assert kernels.pop("torch") == 0 and kernels.keys() >= {"triton"}
    assert all(priority < 0 for priority in (*found.values(), *kernels.values())), (found, kernels)


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer", "xformers", "triton"])
def test_the_selector_gives_the_reason_of_what_cannot_run(registry, name) -> None:
    spec = make_step(SdpaBackend, "cross", "plain", 0).spec()
    reason = BACKENDS[name].refuses(spec)
    assert reason is not None
    with pytest.raises(UnsupportedError) as error:
        select_backend(spec, registry, name)
    assert reason in str(error.value)
