"""Encoder-decoder models without a class of ours: transformers' tokens through the whole engine,
with prompts of all lengths, preemption, beams and half precision."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import VOCAB_SIZE, save
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm_devkit import assert_same_logits, assert_same_tokens
from toolkit_lm_devkit.generation import logprobs_of
from toolkit_lm_devkit.kv_kind import KVKindConformance
from toolkit_lm_transformers.encoder_decoder import TransformersForEncoderDecoder
from toolkit_lm_transformers.spec import EncodedSpec
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

KINDS = {
    "fsmt": "FSMTForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
}
"""Two vocabularies; sinusoidal positions; experts that take so many tokens of a sequence."""
OTHERS = ("fsmt", "switch_transformers")
START = 3
OPTIONS = {
    "renderer": "tokens",
    "max_model_len": 32,
    "max_num_seqs": 6,
    "block_size": 4,
    "max_logprobs": VOCAB_SIZE,
    "generation_config": "none",
}
LENGTHS = (5, 17, 5, 30, 1, 9)
"""Two prompts of one length are computed together."""
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=VOCAB_SIZE)


class TestEncoded(KVKindConformance):
    spec = EncodedSpec(block_size=4, widths=(("float32", 32),), token_bytes=128)


def checkpoint(model_type, folder, dtype=torch.float32):
    return save(
        model_type,
        folder,
        dtype,
        architecture=KINDS[model_type],
        decoder_start_token_id=START,
        forced_bos_token_id=None,
        forced_eos_token_id=None,
    )


def texts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


def requests(decoder=(START,), count=None):
    return [
        {
            "encoder_prompt": {"prompt_token_ids": text},
            "decoder_prompt": {"prompt_token_ids": [*decoder]},
        }
        for text in texts()[:count]
    ]


@torch.inference_mode()
def logits(model, text, tokens):
    given = {"input_ids": torch.tensor([text]), "decoder_input_ids": torch.tensor([tokens])}
    return model(**given, use_cache=False).logits[0].float()


@pytest.mark.parametrize(
    "model_type", ["m2m_100", *(pytest.param(k, marks=pytest.mark.nightly) for k in OTHERS)]
)
def test_tokens_are_those_of_transformers(model_type, tmp_path):
    """The pool is too small for all sequences at a time."""
    model = checkpoint(model_type, tmp_path)
    options = {**OPTIONS, "dtype": "float32", "num_kv_blocks": 24, "max_encoder_len": 32}
    with pytest.warns(match="transformers_encoder_decoder"), LLM(str(tmp_path), **options) as llm:
        outputs = llm.generate(requests((START, 7, 8)), PARAMS, use_tqdm=False)
    for text, output in zip(texts(), outputs, strict=True):
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        found = logits(model, text, [START, 7, 8, *tokens])[2:-1]
        expected = torch.log_softmax(found, dim=-1)
        assert_same_logits(logprobs_of(completion, VOCAB_SIZE), expected)
        assert_same_tokens(tokens, expected)


def test_several_samples_share_an_encoder_sequence(tmp_path):
    model = checkpoint("m2m_100", tmp_path)
    params = SamplingParams(
        n=3, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True, logprobs=VOCAB_SIZE
    )
    options = {**OPTIONS, "dtype": "float32", "num_kv_blocks": 64, "max_encoder_len": 32}
    with LLM(str(tmp_path), model_impl="transformers_encoder_decoder", **options) as llm:
        outputs = llm.generate(requests(count=2), params, use_tqdm=False)
    for text, output in zip(texts()[:2], outputs, strict=True):
        for completion in output.outputs:
            found = logits(model, text, [START, *completion.token_ids])[:-1]
            expected = torch.log_softmax(found, dim=-1)
            assert_same_logits(logprobs_of(completion, VOCAB_SIZE), expected)


def test_half_precision_is_proven(tmp_path):
    checkpoint("m2m_100", tmp_path, torch.bfloat16)
    options = {**OPTIONS, "dtype": "bfloat16", "num_kv_blocks": 64, "max_encoder_len": 32}
    with LLM(str(tmp_path), model_impl="transformers_encoder_decoder", **options) as llm:
        outputs = llm.generate(requests(count=2), PARAMS, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]


def test_sequences_as_many_as_may_run_follow_the_proof(tmp_path):
    """The made-up sequences of the start hold no row of the encoder afterwards."""
    checkpoint("m2m_100", tmp_path)
    options = {**OPTIONS, "max_num_seqs": 2, "num_kv_blocks": 64, "max_encoder_len": 32}
    with LLM(str(tmp_path), model_impl="transformers_encoder_decoder", **options) as llm:
        assert len(llm.generate(requests(), PARAMS, use_tqdm=False)) == len(LENGTHS)


@pytest.mark.parametrize(
    ("model_type", "change", "reason"),
    [
        ("m2m_100", {"architectures": ["M2M100Model"]}, "is not an encoder-decoder model of text"),
        ("m2m_100", {"is_encoder_decoder": False}, "has no encoder of text"),
        ("m2m_100", {"quantization_config": {"quant_method": "x"}}, "its weights are quantized"),
    ],
)
def test_refusals(model_type, change, reason, tmp_path):
    checkpoint(model_type, tmp_path)
    values = {**json.loads((tmp_path / "config.json").read_text()), **change}
    assert reason in TransformersForEncoderDecoder.refuses(VllmConfig.default(values))


SEEING = sorted(
    (model_type, name)
    for model_type, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    if name not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
    and getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False)
)


@pytest.mark.parametrize(("model_type", "name"), SEEING)
def test_encoders_that_read_pictures_are_refused(model_type, name):
    """By name, with the reason; those that have a class of their own never come here."""
    values = {**CONFIG_MAPPING[model_type]().to_dict(), "architectures": [name]}
    reason = TransformersForEncoderDecoder.refuses(VllmConfig.default(values))
    assert reason == f"the encoder of {name} reads pictures, and those of this fallback read text"


def test_a_decoder_that_sees_later_tokens_is_refused(tmp_path):
    save(
        "prophetnet",
        tmp_path,
        architecture="ProphetNetForConditionalGeneration",
        decoder_start_token_id=START,
    )
    with pytest.raises(Exception, match="does not compute ProphetNetForConditionalGeneration"):
        LLM(
            str(tmp_path),
            model_impl="transformers_encoder_decoder",
            dtype="float32",
            num_kv_blocks=64,
            max_encoder_len=32,
            **OPTIONS,
        )


@pytest.mark.parametrize("name", ["BartForSequenceClassification", "T5ForSequenceClassification"])
def test_classifiers_of_encoder_decoder_models_are_run(name, tmp_path):
    """Although a class generates with their body."""
    model_type = name.removesuffix("ForSequenceClassification").lower()
    save(
        model_type,
        tmp_path,
        architecture=name,
        num_labels=3,
        eos_token_id=0,
        decoder_start_token_id=START,
    )
    with (
        pytest.warns(match="transformers_pooling"),
        LLM(str(tmp_path), renderer="tokens", dtype="float32", max_model_len=32) as llm,
    ):
        (output,) = llm.classify([{"prompt_token_ids": [5, 6, 0]}], use_tqdm=False)
    assert len(output.outputs.probs) == 3


def test_a_checkpoint_that_names_no_class_is_found_by_its_type(tmp_path):
    checkpoint("m2m_100", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["architectures"]
    path.write_text(json.dumps(values))
    options = {**OPTIONS, "num_kv_blocks": 64, "max_encoder_len": 32}
    with pytest.warns(match="transformers_encoder_decoder"), LLM(str(tmp_path), **options) as llm:
        assert llm.generate(requests()[:1], PARAMS, use_tqdm=False)[0].outputs


def test_a_longer_encoder_prompt_than_stated_is_refused(tmp_path):
    checkpoint("m2m_100", tmp_path)
    with pytest.raises(Exception, match="the encoder has 128 positions"):
        LLM(
            str(tmp_path),
            model_impl="transformers_encoder_decoder",
            num_kv_blocks=64,
            max_encoder_len=129,
            **OPTIONS,
        )


def test_code_of_a_checkpoint_is_not_run(tmp_path):
    checkpoint("m2m_100", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "architectures": ["MyForConditionalGeneration"]}))
    with pytest.raises(CheckpointError, match="MyForConditionalGeneration"):
        LLM(str(tmp_path), **OPTIONS)
