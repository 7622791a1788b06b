"""Each pooling method against its definition in float64; whole = in chunks; alone = in a batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_poolers import (
    METHODS,
    Concatenated,
    EmbeddingHead,
    SimplePooler,
    embedding_pooler,
    methods as methods_module,
)
from torch import Tensor, nn

SIZE = 12


def weighted_mean(x: Tensor, left_out: int = 0) -> Tensor:
    weights = torch.arange(left_out + 1, left_out + len(x) + 1, dtype=torch.float64)
    return (x * weights[:, None]).sum(0) / weights.sum()


DEFINITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "CLS": lambda x: x[0],
    "LAST": lambda x: x[-1],
    "MEAN": lambda x: x.mean(0),
    "MEAN_SQRT_LEN": lambda x: x.sum(0) / len(x) ** 0.5,
    "WEIGHTED_MEAN": weighted_mean,
    "MAX": lambda x: x.amax(0),
}


def raw_pooler(method) -> SimplePooler:
    return SimplePooler(
        {"embed"}, method, EmbeddingHead(SIZE * method.width, nn.Sequential(), normalize=False)
    )


def some_prompts(count: int, longest: int = 40, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randn(length, SIZE, generator=generator).to(dtype) for length in lengths]


def test_every_method_is_defined_here():
    assert DEFINITIONS.keys() == METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_definition(name, dtype, run):
    prompts = some_prompts(30, dtype=dtype)
    results = run(raw_pooler(METHODS[name]), prompts, PoolingParams(), between=2)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(
            result.double(), DEFINITIONS[name](prompt.double()), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(5))
def test_chunked_is_unchunked(name, seed, run):
    draw = random.Random(seed)
    prompts = some_prompts(9)
    cuts = [
        sorted(draw.sample(range(1, len(p)), draw.randint(0, min(3, len(p) - 1)))) for p in prompts
    ]
    assert any(cuts)
    whole = run(raw_pooler(METHODS[name]), prompts, PoolingParams())
    chunked = run(raw_pooler(METHODS[name]), prompts, PoolingParams(), cuts=cuts, between=1)
    for a, b in zip(whole, chunked, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(5))
def test_the_first_tokens_are_left_out(name, seed, run):
    """They are NaN, so that they are seen in the result. Chunks begin and end before, at and after
    the first token that is pooled."""
    draw = random.Random(seed)
    prompts = some_prompts(12)
    starts = [draw.randrange(len(prompt)) for prompt in prompts]
    for prompt, start in zip(prompts, starts, strict=True):
        prompt[:start] = float("nan")
    cuts = [
        sorted(draw.sample(range(1, len(p)), draw.randint(0, min(4, len(p) - 1)))) for p in prompts
    ]
    for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        if i % 3 == 0 and 0 < start < len(prompt):
            cuts[i] = sorted({*cuts[i], start})
    for chunks in (None, cuts):
        results = run(
            raw_pooler(METHODS[name]),
            prompts,
            PoolingParams(),
            cuts=chunks,
            starts=starts,
            between=1,
        )
        for prompt, start, result in zip(prompts, starts, results, strict=True):
            pooled = prompt[start:].double()
            expected = (
                weighted_mean(pooled, start)
                if name == "WEIGHTED_MEAN"
                else DEFINITIONS[name](pooled)
            )
            torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_alone_is_batched(name, run):
    prompts = some_prompts(20)
    together = run(raw_pooler(METHODS[name]), prompts, PoolingParams())
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = run(raw_pooler(METHODS[name]), [prompt], PoolingParams())
        torch.testing.assert_close(alone, result, rtol=0, atol=0)


def test_a_batch_of_several_blocks(run, monkeypatch):
    prompts = some_prompts(25)
    whole = [run(raw_pooler(method), prompts, PoolingParams()) for method in METHODS.values()]
    monkeypatch.setattr(methods_module, "BLOCK", 7)
    cut = [run(raw_pooler(method), prompts, PoolingParams()) for method in METHODS.values()]
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_concatenated_keeps_the_order_and_the_states_apart(run):
    prompts = some_prompts(6)
    names = ["MAX", "CLS", "MEAN", "WEIGHTED_MEAN", "LAST", "MEAN"]
    pooler = raw_pooler(Concatenated([METHODS[name] for name in names]))
    cuts = [[len(p) // 2] if len(p) > 1 else [] for p in prompts]
    for prompt, result in zip(
        prompts, run(pooler, prompts, PoolingParams(), cuts=cuts), strict=True
    ):
        expected = torch.cat([DEFINITIONS[name](prompt.double()) for name in names])
        torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_nan_stays_with_its_prompt(name, run):
    prompts = [torch.ones(3, SIZE), torch.full((3, SIZE), float("nan")), torch.ones(2, SIZE)]
    results = run(raw_pooler(METHODS[name]), prompts, PoolingParams())
    assert [bool(result.isnan().any()) for result in results] == [False, True, False]


def test_only_last_reads_the_prefix_cache():
    config = VllmConfig.default({"hidden_size": SIZE})
    reading = {
        name for name in METHODS if embedding_pooler(config, name).reads_prefix_cache("embed")
    }
    assert reading == {"LAST"}
    assert not embedding_pooler(config, "LAST").reads_prefix_cache("token_embed")
    assert not raw_pooler(Concatenated([METHODS["LAST"], METHODS["MEAN"]])).reads_prefix_cache(
        "embed"
    )


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"LAST"}))
def test_a_prompt_without_its_beginning_is_refused(name, run):
    from toolkit_lm_poolers import PoolingMetadata, PoolingRow

    row = PoolingRow(
        params=PoolingParams(),
        tokens=slice(0, 2),
        token_ids=torch.zeros(2).int().numpy(),
        start=4,
        num_prompt_tokens=6,
    )
    with pytest.raises(AssertionError, match="lacks the beginning"):
        raw_pooler(METHODS[name])(torch.ones(2, SIZE), PoolingMetadata([row]))
