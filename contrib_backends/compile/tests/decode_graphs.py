"""Shared checks that an attention backend's decodes fit CUDA graphs: steps at fixed addresses, and
a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from test_graphs import Reads
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.attention import (
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchLimits,
    BatchView,
    GroupSetup,
    LayerParams,
)
from toolkit_lm.kv import FullSpec, WindowSpec
from toolkit_lm_devkit.naive import naive_attention
from transformers import MistralConfig, MistralForCausalLM

PROMPTS = [[5, 6, 7], [9], list(range(3, 30)), [40, 41], list(range(50, 61))]
LENGTHS = [9, 3, 5, 7, 2]
"""Lengths of the answers. They differ, so the number of rows changes from step to step."""
ROWS = 4
MOST = 64
BLOCK = 16
"""Number of rows, most keys of a row, and block size of the steps below."""


class FixedSteps:
    """Decode steps of as many rows, in tensors that stay where they are. What nobody stored in the
    cache is NaN."""

    def __init__(
        self,
        backend: type,
        window: int | None,
        block_size: int = BLOCK,
        most: int = MOST,
        **features: Any,
    ) -> None:
        """`features`: more of the layer."""
        self.block_size = block_size
        self.most = most
        sizes = {"num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
        kv_cache = (
            FullSpec(block_size=block_size, **sizes)
            if window is None
            else WindowSpec(block_size=block_size, window=window, **sizes)
        )
        spec = AttentionSpec(
            layer="attn",
            type=AttentionType.DECODER,
            num_heads=4,
            device="cpu",
            kv_cache=kv_cache,
            window=window,
            **sizes,
        )
        limits = BatchLimits(ROWS, 32, most)
        device = torch.device("cpu")
        self.backend = backend(
            GroupSetup(layers=[spec], kv_cache=kv_cache, limits=limits, device=device)
        )
        self.layer = LayerParams(
            name="attn",
            attention_type=AttentionType.DECODER,
            num_heads=4,
            num_kv_heads=2,
            head_size=64,
            scale=0.1,
            window=window,
            **features,
        )
        generator = torch.Generator().manual_seed(0)
        self.keys, self.values = torch.randn(2, ROWS, most, 2, 64, generator=generator)
        self.q = torch.randn(ROWS, 4, 64, generator=generator)
        self.out = torch.empty(ROWS, 4, 64)
        self.k, self.v = torch.empty(2, ROWS, 2, 64)
        self.table = (
            torch.randperm(ROWS * most // block_size, generator=generator).int().view(ROWS, -1)
        )
        self.cache = torch.empty(self.table.numel(), 2, block_size, 2, 64)
        self.slots = torch.empty(ROWS).long()
        self.seq_lens = torch.empty(ROWS).int()
        self.query_start = torch.arange(ROWS + 1).int()

    def run(self, lengths: list[int]) -> list:
        """A step whose rows have so many keys, of which it brings the last; what it reads, and
        where. Its results are checked."""
        self.cache.fill_(torch.nan)
        for row, length in enumerate(lengths):
            self._put(self.cache, row, length - 1)
            block, offset = divmod(length - 1, self.block_size)
            self.slots[row] = self.table[row, block] * self.block_size + offset if length else -1
            self.k[row] = self.keys[row, length - 1]
            self.v[row] = self.values[row, length - 1]
        self.seq_lens.copy_(torch.tensor(lengths))
        view = BatchView(
            query_start=np.arange(ROWS + 1, dtype=np.int32),
            seq_lens=np.array(lengths, np.int32),
            starts=np.array(lengths) - 1,
            query_start_device=self.query_start,
            seq_lens_device=self.seq_lens,
            block_table=self.table,
            slot_mapping=self.slots,
            max_query_len=1,
            max_seq_len=self.most,
            has_padding=True,
            is_fixed=True,
        )
        meta = self.backend.build(view)
        call = AttentionCall(self.layer, self.q, self.k, self.v, (self.cache,), meta, self.out)
        with Reads() as reads:
            self.backend.write_kv(call)
            self.backend.forward(call)
        stored = torch.full_like(self.cache, torch.nan)
        for row, length in enumerate(lengths):
            self._put(stored, row, length)
            if length:
                given = (
                    x.numpy()
                    for x in (
                        self.q[row : row + 1],
                        self.keys[row, :length],
                        self.values[row, :length],
                    )
                )
                layer = self.layer
                sinks = None if layer.sinks is None else layer.sinks.numpy()
                bias = None if layer.bias is None else layer.bias.naive
                features = {
                    "window": layer.window,
                    "soft_cap": layer.soft_cap,
                    "sinks": sinks,
                    "bias": bias,
                }
                exact = naive_attention(*given, kind="decoder", scale=0.1, **features)
                assert np.abs(self.out[row : row + 1].numpy() - exact).max() < 1e-5
        torch.testing.assert_close(self.cache, stored, atol=0, rtol=0, equal_nan=True)
        return reads.places

    def _put(self, cache: torch.Tensor, row: int, count: int) -> None:
        for at in range(count):
            cache[self.table[row, at // self.block_size], :, at % self.block_size] = torch.stack(
                [self.keys[row, at], self.values[row, at]]
            )


def make_model(folder: Path, window: int | None) -> Path:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    shape |= {
        "head_dim": 64,
        "vocab_size": 101,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    MistralForCausalLM(
        MistralConfig(**shape, sliding_window=window, dtype="float32")
    ).save_pretrained(folder)
    return folder


def generate(folder, mode, attention, plugins=(), **options):
    """Tokens of all answers; and how many steps ran in which graphs."""
    details = {"backend": "eager", "cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8]}
    plain = {
        "renderer": "tokens",
        "dtype": "float32",
        "kernels": "torch",
        "num_kv_blocks": 24,
        "max_num_seqs": 5,
    }
    plain |= {
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "optimization_level": 0 if mode == "none" else 1,
    }
    plain |= {"attention_backend": attention, "compilation_config": json.dumps(details)}
    llm = LLM(str(folder), plugins=list(plugins), **plain | options)
    params = [
        SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in LENGTHS
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    runner = llm.llm_engine.client.core.executor.runner
    counts = {} if mode == "none" else dict(runner.compiler.graphs.num_replays)
    return [list(one.outputs[0].token_ids) for one in outputs], counts
