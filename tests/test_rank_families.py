"""Families of models over tensor parallel ranks and pipeline stages: what they give is what one
rank gives.

Requests are cut into chunks, swapped, and begin after cached prefixes; some have several sequences,
or beams. The ranks are threads of this process.
`contrib_backends/executor_mp/tests/test_mp_families.py` has some of the families over processes.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audio_checkpoints
import decoder_families
import encdec_families
import encoder_families
import moe_families
import numpy as np
import pytest
import transformers
from toolkit_lm import LLM, PoolingParams, SamplingParams
from toolkit_lm.errors import UnsupportedError
from toolkit_lm_devkit import make_checkpoint, randomize, write_tokenizer
from toolkit_lm_devkit.generation import Preemptions

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
VOCAB_SIZE = 272
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SEVERAL = SamplingParams(n=4, seed=7, max_tokens=8, ignore_eos=True)
BEAMS = SamplingParams(use_beam_search=True, n=3, temperature=0, max_tokens=6)
TIGHT = {
    "device": "cpu",
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "num_kv_blocks": 60,
    "max_num_batched_tokens": 24,
    "preemption_mode": "swap",
    "swap_memory": "4MiB",
}
"""Prompts are cut into chunks, and requests must make room for each other."""
DECODERS = {
    "MistralForCausalLM": "window",
    "Qwen2ForCausalLM": "layer types, tied",
    "Qwen3ForCausalLM": "biases, windows",
    "Phi3ForCausalLM": "window",
    "Gemma2ForCausalLM": "no soft caps",
    "Gemma3ForCausalLM": "two rotary embeddings",
    "GlmForCausalLM": "biases",
    "Glm4ForCausalLM": "biases",
    "GraniteForCausalLM": "biases, tied",
    "Olmo2ForCausalLM": "grouped",
    "OPTForCausalLM": "norms last, projected",
    "GPT2LMHeadModel": "scaled by layer",
}
"""One variant of each."""
BLOCKS = {
    "Qwen2ForCausalLM": 90,
    "Qwen3ForCausalLM": 90,
    "Gemma2ForCausalLM": 100,
    "Gemma3ForCausalLM": 90,
    "T5GemmaForConditionalGeneration": 72,
}
"""Blocks of the pool for two kinds of layers; else 46, for encoder-decoders 34. The pool holds at
least four sequences of a prompt."""
STAGES = [(2, 2)]
"""Tensor x pipeline parallel sizes, of which (2, 2) has the shares of a stage and of a layer. At
night (1, 2) follows. Decoders over two ranks of one stage are in `test_mp_families.py`."""
Prompts = list[dict[str, Any]]
Case = tuple[Prompts, dict[str, Any]]
"""The prompts, and options of the engine."""


def prompt(length: int, start: int = 3) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(start * k) % 250 + 5 for k in range(1, length + 1)]}


PROMPTS: Prompts = [
    prompt(length, start)
    for length, start in ((40, 3), (5, 7), (33, 11), (1, 5), (21, 13), (30, 17))
]


def decoder(folder: Path, architecture: str, variant: str) -> Case:
    fields = decoder_families.VARIANTS[architecture][variant]
    model = decoder_families.make_model(architecture, {**fields, "vocab_size": VOCAB_SIZE}).eval()
    randomize(model)
    make_checkpoint(folder, model)
    return PROMPTS, {"num_kv_blocks": BLOCKS.get(architecture, 46)}


def mixture(folder: Path, family: str, variant: str) -> Case:
    model = moe_families.make(family, variant)
    randomize(model)
    make_checkpoint(folder, model)
    return PROMPTS, {"num_kv_blocks": 46}


def encoder_decoder(folder: Path, architecture: str, variant: str) -> Case:
    fields = encdec_families.VARIANTS[architecture][variant]
    sides = {
        key: {**fields[key], "vocab_size": VOCAB_SIZE}
        for key in ("encoder", "decoder")
        if key in fields
    }
    model = encdec_families.make_model(architecture, {**fields, "vocab_size": VOCAB_SIZE, **sides})
    randomize(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)
    return PROMPTS, {
        "max_encoder_len": 64,
        "max_num_batched_tokens": 70,
        "num_kv_blocks": BLOCKS.get(architecture, 34),
    }


def whisper(folder: Path) -> Case:
    sides = {
        f"{side}_{key}": n
        for side in ("encoder", "decoder")
        for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))
    }
    ids = {"decoder_start_token_id": 3, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2}
    shape = {
        "d_model": 64,
        "max_target_positions": 64,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(vocab_size=VOCAB_SIZE, **sides, **ids, **shape)
    ).eval()
    randomize(model)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(ids))
    write_tokenizer(folder, VOCAB_SIZE)
    noise = np.random.default_rng(3)
    heard = [
        {"audio": noise.normal(0, 0.1, length).astype(np.float32), "sampling_rate": 16000}
        for length in (5000, 52345)
    ]
    prompts = [
        {"encoder_prompt": one, "decoder_prompt": {"prompt_token_ids": [3, 60, 70]}}
        for one in heard
    ]
    # A recording takes 375 blocks, and each is encoded in one step.
    return prompts, {"num_kv_blocks": 900, "max_num_batched_tokens": 1600, "swap_memory": "64MiB"}


def audio(folder: Path) -> Case:
    audio_checkpoints.make_subject(folder)
    mark = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    heard = audio_checkpoints.recordings(0.7, 0.4, 1.0)
    prompts = [
        {"prompt": f"{mark}What? {mark}", "multi_modal_data": {"audio": heard[:2]}},
        {"prompt": "No sound."},
        {"prompt": f"And here? {mark}", "multi_modal_data": {"audio": heard[2:]}},
    ]
    return prompts, {"max_model_len": 256, "num_kv_blocks": 200, "max_num_batched_tokens": 64}


def generated(folder: Path, sizes: tuple[int, int], case: Case) -> tuple[list[Any], int]:
    """Outputs of an engine for the prompts, and its preemptions. Greedy prompts run twice, so that
    the second run begins after cached prefixes."""
    prompts, options = case
    counter = Preemptions()
    found = []
    ranks = {
        "tensor_parallel_size": sizes[0],
        "pipeline_parallel_size": sizes[1],
        "executor": "threads",
    }
    with LLM(str(folder), plugins=[counter, THREADS], **{**TIGHT, **ranks, **options}) as llm:
        for params, some in (
            (GREEDY, prompts),
            (SEVERAL, prompts[:4]),
            (GREEDY, prompts),
            (BEAMS, prompts[:2]),
        ):
            outputs = llm.generate(some, params, use_tqdm=False)
            assert [output.error for output in outputs] == [None] * len(outputs)
            found.append([[list(one.token_ids) for one in output.outputs] for output in outputs])
    return found, counter.count


CASES: dict[str, tuple[Callable[..., Case], tuple[str, ...], list[tuple[int, int]]]] = {
    **{name: (decoder, (name, variant), STAGES) for name, variant in DECODERS.items()},
    "Mixtral": (mixture, ("mixtral", "4 of 8"), STAGES),
    "Qwen3Moe": (mixture, ("qwen3_moe", "all of 4, some dense, window, tied"), STAGES),
    **{
        name: (encoder_decoder, (name, next(iter(own))), [(2, 1)])
        for name, own in encdec_families.VARIANTS.items()
    },
    "Whisper": (whisper, (), [(2, 1)]),
    "Qwen2Audio": (audio, (), [(2, 1), (1, 2), *STAGES]),
}
"""How each is made, with which arguments, and the sizes."""
QUICK = ("GPT2LMHeadModel", "T5ForConditionalGeneration", "Qwen2Audio")
NEVER_CROWDED = ("MistralForCausalLM", "Phi3ForCausalLM", "Whisper", "Qwen2Audio")
"""Nobody must make room there: where all layers are windowed, sequences give back as many blocks as
they take."""


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in CASES]
)
def test_what_generates(tmp_path, name):
    check(tmp_path, name, CASES[name][2])


@pytest.mark.nightly
@pytest.mark.parametrize("name", [one for one in CASES if CASES[one][2] == STAGES])
def test_what_generates_in_stages_of_one_rank(tmp_path, name):
    check(tmp_path, name, [(1, 2)])


def check(folder: Path, name: str, all_sizes: list[tuple[int, int]]) -> None:
    make, arguments, _ = CASES[name]
    case = make(folder, *arguments)
    expected, _ = generated(folder, (1, 1), case)
    for sizes in all_sizes:
        found, preemptions = generated(folder, sizes, case)
        assert found == expected, sizes
        assert preemptions > 0 or name in NEVER_CROWDED, "nobody had to make room"


def test_encoder_decoders_run_in_one_stage(tmp_path):
    name = "BartForConditionalGeneration"
    case = encoder_decoder(tmp_path, name, next(iter(encdec_families.VARIANTS[name])))
    with pytest.raises(
        UnsupportedError, match="run in one pipeline stage: lower pipeline_parallel_size"
    ):
        generated(tmp_path, (1, 2), case)


@pytest.mark.parametrize("family", encoder_families.VARIANTS)
def test_encoders(tmp_path, family):
    """Pooled outputs of whole prompts, without a KV cache, from the last of two stages of two ranks
    each."""
    fields = next(iter(encoder_families.VARIANTS[family].values()))
    model = encoder_families.make_model(f"{family}Model", {**fields, "vocab_size": VOCAB_SIZE})
    randomize(model.eval())
    make_checkpoint(tmp_path, model)
    prompts = [prompt(length) for length in (3, 30, 12)]
    found = []
    for tensor, pipeline in ((1, 1), (2, 2)):
        ranks = {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": pipeline,
            "executor": "threads",
        }
        with LLM(str(tmp_path), plugins=[THREADS], device="cpu", **ranks) as llm:
            outputs = llm.encode(prompts, PoolingParams(task="embed"), use_tqdm=False)
        found.append([list(output.outputs.data) for output in outputs])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
