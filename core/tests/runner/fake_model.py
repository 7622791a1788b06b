"""A model and a backend so small that their results are known: the next token is the sum of all
tokens so far, modulo the vocabulary."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from toolkit_lm.attention import Attention, AttentionBackend, BatchView
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import PageTensor, plan_groups
from toolkit_lm.messages import NewSequence, ScheduledSequence
from toolkit_lm.model import Model
from toolkit_lm.param_spec import ProcessorParams
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import (
    AttentionBackendRegistry,
    CompilerRegistry,
    KernelsRegistry,
    KVTierRegistry,
    LogitsProcessorRegistry,
    PartRegistry,
    PluginInfo,
)
from toolkit_lm.runner import ModelRunner
from toolkit_lm.sampling import LogitsProcessor
from toolkit_lm_loaders.dummy import DummyLoader
from torch import Tensor

VOCAB = 32
NAN = VOCAB - 1
"""A row that has this token gets logits that are not finite."""
BLOCK_SIZE = 4


class SumBackend(AttentionBackend):
    """Each token gets the sum of the values that it sees. They are read from the cache."""

    @classmethod
    def refuses(cls, spec) -> None:
        return None

    @classmethod
    def page_layout(cls, spec):
        return [PageTensor((spec.block_size,), spec.dtype)] * 2

    def build(self, batch: BatchView) -> BatchView:
        return batch

    def write_kv(self, call) -> None:
        values = call.kv_cache[1]
        slots = call.metadata.slot_mapping
        size = values.shape[1]
        values[slots // size, slots % size] = call.v[:, 0, 0]

    def forward(self, call) -> None:
        meta = call.metadata
        for row in range(meta.num_rows):
            start = int(meta.query_start[row])
            end = int(meta.query_start[row + 1])
            length = int(meta.seq_lens[row])
            values = call.kv_cache[1][meta.block_table[row].long()].reshape(-1)[:length]
            call.out[start:end, 0, 0] = values.cumsum(0)[length - (end - start) :]


class SumModel(Model):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.attention = Attention(1, 1, vllm_config=vllm_config, prefix="attention")

    def forward(self, input_ids, positions, *, intermediate=None) -> Tensor:
        values = input_ids[:, None].float()
        values = torch.where(values == NAN, torch.nan, values)
        return self.attention(values, values, values)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """The likeliest is the sum, then those near it."""
        return -(torch.arange(VOCAB, device=hidden_states.device) - hidden_states % VOCAB).abs()


class Drift(LogitsProcessor):
    """Makes a token the likeliest that depends on all tokens drawn before. It remembers them as a
    number."""

    stage = "logits"

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.levels: dict[int, float] = {}

    def add(self, row, arguments, state) -> None:
        self.levels[row.key] = state.get("level", arguments["level"])

    def remove(self, key: int) -> None:
        del self.levels[key]

    def apply(self, values: Tensor, rows) -> Tensor:
        for row, scores in zip(rows, values, strict=True):
            scores[int(self.levels[row.key]) % NAN] = 100.0
        return values

    def after_draw(self, row, token_id: int, prob: float):
        self.levels[row.key] = 1.5 * self.levels[row.key] + token_id + 1
        return {"level": self.levels[row.key]}


def next_token(tokens: list[int]) -> int:
    return sum(tokens) % VOCAB


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that a greedy sequence samples."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Models(dict[str, Any]):
    """No plugin registers the class."""

    def load(self, name: str) -> type:
        return SumModel


def make_plugins() -> Any:
    """Plugins for a runner: the two classes above and random weights, and nothing else."""
    backends = AttentionBackendRegistry(owner=PluginInfo("test"))
    processors = LogitsProcessorRegistry(owner=PluginInfo("test"))
    processors.add("drift", "fake_model:Drift", params=ProcessorParams)
    backends.add("sum", f"{__name__}:SumBackend")
    kernels = KernelsRegistry(owner=PluginInfo("test"))
    kernels.add("torch", "toolkit_lm.model:Kernels")
    loaders = SimpleNamespace(make=lambda name, source: DummyLoader(source))
    kv_tiers = KVTierRegistry(owner=PluginInfo("test"))
    kv_tiers.add("host", "toolkit_lm.kv:HostStore")
    plugins = {
        "kv_tiers": kv_tiers,
        "parts": PartRegistry(),
        "models": Models(),
        "attention_backends": backends,
        "kernels": kernels,
        "compilers": CompilerRegistry(),
        "loaders": loaders,
        "logits_processors": processors,
    }
    boundary = nullcontext()
    named = {
        "info": lambda name: None,
        "boundary": boundary,
        "boundary_of": lambda owner, target: boundary,
    }
    return SimpleNamespace(options=lambda name: None, **named, **plugins)


def make_config(**options) -> VllmConfig:
    defaults = {
        "load_format": "dummy",
        "block_size": BLOCK_SIZE,
        "max_model_len": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    }
    return VllmConfig.default({"architectures": ["SumModel"]}, **defaults | options)


def make_runner(num_blocks: int = 16, num_host_blocks: int = 4, **options) -> ModelRunner:
    runner = ModelRunner(make_config(**options), make_plugins())
    runner.load()
    runner.init_kv_cache(
        plan_groups(runner.kv_cache_specs(), {"attention": "sum"}).sized(
            [num_blocks], [num_host_blocks]
        )
    )
    return runner


def new(
    seq_id: int,
    tokens: list[int],
    blocks: list[int],
    *,
    num_prompt_tokens: int | None = None,
    **changes,
) -> NewSequence:
    """A greedy sequence, unless `changes` say otherwise."""
    fields = {"params": SamplingParams(temperature=0), "seed": 0, "stop_token_ids": []}
    num_prompt_tokens = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return NewSequence(
        seq_id=seq_id,
        token_ids=tokens,
        num_prompt_tokens=num_prompt_tokens,
        block_tables=[blocks],
        **fields | changes,
    )


def row(
    seq_id: int,
    num_tokens: int,
    new_blocks: list[int] | None = None,
    samples: bool = True,
    start: int = 0,
) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, num_tokens, [new_blocks or []], samples)
