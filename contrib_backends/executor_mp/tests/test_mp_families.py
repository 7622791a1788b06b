"""Families of models over ranks: tokens, beams, vectors are those of one rank, in chunks, swapped,
and from the prefix cache.

`tests/test_rank_families.py` has all families over ranks that are threads. Here each kind of plan
and of result is sent to processes once, in each way to share a model; the rest at night.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import decoder_families
import encdec_families
import encoder_families
import moe_families
import pytest
import vision_checkpoints
from toolkit_lm import LLM, PoolingParams, SamplingParams
from toolkit_lm.errors import CheckpointError
from toolkit_lm.events import RequestEvent
from toolkit_lm.plugin import hookimpl
from toolkit_lm_devkit import make_checkpoint, randomize, write_tokenizer

VOCAB_SIZE = 272
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
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
DECODERS = list(decoder_families.VARIANTS)
SLOW = pytest.mark.slow
NIGHTLY = pytest.mark.nightly
BLOCKS = {
    "MistralForCausalLM": 46,
    "Phi3ForCausalLM": 46,
    "Gemma2ForCausalLM": 112,
    "Gemma3ForCausalLM": 90,
}
"""Blocks of the pool for families with windows. Others have 30. A smaller pool could not hold four
sequences of a prompt."""
BY_DAY = "Gemma3ForCausalLM"
"""It has two kinds of windows."""
SIZES = [(2, 1), (1, 2), (2, 2)]


class Preemptions:
    """A plugin that counts them."""

    name = "preemptions"

    def __init__(self):
        self.count = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += isinstance(event, RequestEvent) and event.kind == "preempted"


def prompt(length: int, start: int = 3) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(start * k) % 250 + 5 for k in range(1, length + 1)]}


def sized(sizes: tuple[int, int]) -> dict[str, Any]:
    return {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}


def tokens(outputs) -> list[list[list[int]]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def generated(
    folder: Path, sizes: tuple[int, int], prompts=None, *, beams=True, **options
) -> tuple[list, int]:
    """Generates each kind of request twice, so that it starts from cached prefixes. Returns the
    results and the number of preemptions."""
    counter = Preemptions()
    prompts = prompts or [
        prompt(length, start)
        for length, start in ((40, 3), (5, 7), (33, 11), (1, 5), (21, 13), (30, 17))
    ]
    with LLM(str(folder), plugins=[counter], **{**TIGHT, **sized(sizes), **options}) as llm:
        assert llm.engine.config.parallel.executor == ("in_process" if sizes == (1, 1) else "mp")
        found = [
            tokens(llm.generate(prompts, params, use_tqdm=False))
            for params in (GREEDY, SEVERAL, GREEDY)
        ]
        if beams:
            found.append(tokens(llm.generate(prompts[:2], BEAMS, use_tqdm=False)))
    return found, counter.count


def check(folder: Path, sizes, *arguments, **options) -> int:
    expected, _ = generated(folder, (1, 1), *arguments, **options)
    found, preemptions = generated(folder, sizes, *arguments, **options)
    assert found == expected
    return preemptions


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(one, marks=() if one == BY_DAY else NIGHTLY) for one in DECODERS],
)
def test_decoders(tmp_path, architecture):
    """Each family: its first variant, over two ranks."""
    fields = next(iter(decoder_families.VARIANTS[architecture].values()))
    model = decoder_families.make_model(architecture, {**fields, "vocab_size": VOCAB_SIZE}).eval()
    randomize(model)
    make_checkpoint(tmp_path, model)
    preemptions = check(tmp_path, (2, 1), num_kv_blocks=BLOCKS.get(architecture, 30))
    # Where all layers are windowed, sequences give back as many blocks as they take.
    assert preemptions > 0 or architecture in ("MistralForCausalLM", "Phi3ForCausalLM"), (
        "nobody had to make room"
    )


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        pytest.param("no window, tied", (2, 2), marks=SLOW),
        *(
            pytest.param(*one, marks=NIGHTLY)
            for one in (("no window, tied", (1, 2)), ("window", (1, 2)), ("window", (2, 2)))
        ),
    ],
)
def test_stages(tmp_path, variant, sizes):
    """Three layers in two stages; tied embeddings are on the first and the last."""
    fields = decoder_families.VARIANTS["MistralForCausalLM"][variant]
    model = decoder_families.make_model(
        "MistralForCausalLM", {**fields, "vocab_size": VOCAB_SIZE}
    ).eval()
    randomize(model)
    make_checkpoint(tmp_path, model)
    check(tmp_path, sizes)


@pytest.mark.parametrize(
    ("family", "variant", "sizes"),
    [
        (family, variant, sizes)
        for family, variant in (("mixtral", "2 of 4"), ("qwen3_moe", "1 of 8, dense between"))
        for sizes in SIZES
    ],
)
@NIGHTLY
def test_mixtures_of_experts(tmp_path, family, variant, sizes):
    model = moe_families.make(family, variant)
    randomize(model)
    make_checkpoint(tmp_path, model)
    check(tmp_path, sizes)


def test_whole_experts(tmp_path):
    """Expert parallelism: each rank holds half of the experts."""
    model = moe_families.make("mixtral", "4 of 8")
    randomize(model)
    make_checkpoint(tmp_path, model)
    expected, _ = generated(tmp_path, (1, 1), beams=False)
    found, _ = generated(tmp_path, (2, 1), beams=False, enable_expert_parallel=True)
    assert found == expected


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("BartForConditionalGeneration", marks=NIGHTLY),
        pytest.param("T5ForConditionalGeneration", marks=SLOW),
        pytest.param("T5GemmaForConditionalGeneration", marks=NIGHTLY),
    ],
)
def test_encoder_decoders(tmp_path, architecture):
    fields = next(iter(encdec_families.VARIANTS[architecture].values()))
    sides = {
        key: {**fields[key], "vocab_size": VOCAB_SIZE}
        for key in ("encoder", "decoder")
        if key in fields
    }
    encdec_families.make_model(
        architecture, {**fields, "vocab_size": VOCAB_SIZE, **sides}
    ).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, VOCAB_SIZE)
    options = {"max_encoder_len": 64, "max_num_batched_tokens": 70, "num_kv_blocks": 120}
    check(tmp_path, (2, 1), **options)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llava", (2, 1)),
        *(pytest.param("llava", sizes, marks=NIGHTLY) for sizes in SIZES[1:]),
        *(pytest.param("gemma3", sizes, marks=NIGHTLY) for sizes in SIZES),
    ],
)
def test_vision(tmp_path, family, sizes):
    subject = vision_checkpoints.make_subject(tmp_path, family)
    images = vision_checkpoints.drawings(3)
    prompts = [
        {
            "prompt": f"{subject.mark}What is in {subject.mark}?",
            "multi_modal_data": {"image": images[:2]},
        },
        {"prompt": "No picture in this one."},
        {"prompt": f"And here? {subject.mark}", "multi_modal_data": {"image": images[2:]}},
    ]
    check(tmp_path, sizes, prompts, max_model_len=128, num_kv_blocks=120, max_num_batched_tokens=40)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Bert", (2, 1)),
        *(
            pytest.param(*one, marks=NIGHTLY)
            for one in (("Bert", (1, 2)), ("ModernBert", (2, 1)), ("ModernBert", (1, 2)))
        ),
    ],
)
def test_encoders(tmp_path, family, sizes):
    """Pooled results of whole prompts, without a KV cache."""
    fields = next(iter(encoder_families.VARIANTS[family].values()))
    model = encoder_families.make_model(
        f"{family}Model", {**fields, "vocab_size": VOCAB_SIZE}
    ).eval()
    randomize(model)
    make_checkpoint(tmp_path, model)
    check_vectors(tmp_path, sizes)


@pytest.mark.parametrize(
    "sizes",
    [(1, 2), *(pytest.param(one, marks=NIGHTLY) for one in ((2, 1), (2, 2)))],
)
def test_pooled_decoders(tmp_path, sizes):
    """In chunks, whose state the last stage keeps."""
    fields = next(iter(decoder_families.VARIANTS["Qwen3ForCausalLM"].values()))
    model = decoder_families.make_model(
        "Qwen3ForCausalLM", {**fields, "vocab_size": VOCAB_SIZE}
    ).eval()
    randomize(model)
    make_checkpoint(tmp_path, model)
    chunked = {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "block_size": 4,
        "num_kv_blocks": 64,
    }
    check_vectors(tmp_path, sizes, runner="pooling", convert="embed", max_model_len=64, **chunked)


def check_vectors(folder: Path, sizes, **options) -> None:
    prompts = [prompt(length) for length in (3, 30, 12)]
    found = []
    for each in ((1, 1), sizes):
        with LLM(str(folder), device="cpu", **sized(each), **options) as llm:
            outputs = llm.encode(prompts, PoolingParams(task="embed"), use_tqdm=False)
        found.append([list(output.outputs.data) for output in outputs])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_models_of_transformers_are_refused(tmp_path):
    """Their layers do not shard."""
    from transformers import StableLmConfig, StableLmForCausalLM

    config = {
        **decoder_families.LLAMA_LIKE,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    make_checkpoint(tmp_path, StableLmForCausalLM(StableLmConfig(**config)).eval())
    with pytest.raises(CheckpointError, match="models of transformers run on one rank"):
        LLM(str(tmp_path), **TIGHT, **sized((2, 1)))
