"""Encoder-decoder models that hear: transformers' tokens through the whole engine, of recordings
that the checkpoint's feature extractor reads."""

from __future__ import annotations

import inspect

import audio
import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, save
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ToolkitError
from toolkit_lm_devkit import assert_same_logits
from toolkit_lm_devkit.generation import logprobs_of
from toolkit_lm_transformers.speech import TransformersForSpeech
from transformers import (
    ParakeetFeatureExtractor,
    SeamlessM4TFeatureExtractor,
    Wav2Vec2FeatureExtractor,
)

MELS = audio.MELS
KINDS = {
    "moonshine": (
        "MoonshineForConditionalGeneration",
        Wav2Vec2FeatureExtractor(return_attention_mask=True),
        {},
    ),
    "moonshine_streaming": (
        "MoonshineStreamingForConditionalGeneration",
        Wav2Vec2FeatureExtractor(return_attention_mask=True),
        {"pad_to_multiple_of": 80, "padding": True},
    ),
    "canary": ("CanaryForConditionalGeneration", ParakeetFeatureExtractor(feature_size=MELS), {}),
    "seamless_m4t_v2": (
        "SeamlessM4Tv2ForSpeechToText",
        SeamlessM4TFeatureExtractor(feature_size=MELS // 2, num_mel_bins=MELS // 2),
        {},
    ),
}
"""Samples; samples in frames; a mask that ends before the features; frames in pairs."""
LEAKS = ("seamless_m4t_v2",)
"""Their adapter mixes what the mask hides into the last state: the engine leaves it out."""
OPTIONS = {
    "renderer": "tokens",
    "dtype": "float32",
    "max_model_len": 96,
    "max_encoder_len": 96,
    "max_num_batched_tokens": 200,
    "max_num_seqs": 3,
    "block_size": 4,
    "num_kv_blocks": 100,
    "max_logprobs": VOCAB_SIZE,
    "generation_config": "none",
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=VOCAB_SIZE)


def checkpoint(model_type, folder):
    name, extractor, _ = KINDS[model_type]
    model = save(model_type, folder, architecture=name, config=audio.tiny_config(model_type))
    extractor.save_pretrained(folder)
    return model


def sounds():
    random = np.random.default_rng(2)
    return [random.uniform(-0.5, 0.5, n).astype(np.float32) for n in (4000, 6430, 4000, 6390, 5201)]


@torch.inference_mode()
def reference(model, model_type, sound, tokens):
    _, extractor, options = KINDS[model_type]
    made = extractor(sound, sampling_rate=16000, return_tensors="pt", **options)
    taken = inspect.signature(model.forward).parameters
    given = {name: array for name, array in made.items() if name in taken}
    if model_type in LEAKS:
        seen = int(given["attention_mask"].sum())
        given = {name: array[:, :seen] for name, array in given.items()}
    decoder = torch.tensor([tokens])
    return model(**given, decoder_input_ids=decoder, use_cache=False).logits[0].float()


@pytest.mark.parametrize("model_type", KINDS)
def test_tokens_are_those_of_transformers(model_type, tmp_path):
    """Of lengths that are alike and mixed, with the arrays and the mask of its own extractor."""
    model = checkpoint(model_type, tmp_path)
    prompts = [
        {
            "encoder_prompt": {"audio": sound, "sampling_rate": 16000},
            "decoder_prompt": {"prompt_token_ids": [3, 9]},
        }
        for sound in sounds()
    ]
    with pytest.warns(match="transformers_speech"), LLM(str(tmp_path), **OPTIONS) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    for sound, output in zip(sounds(), outputs, strict=True):
        (completion,) = output.outputs
        before = list(output.prompt_token_ids)
        assert before[-2:] == [3, 9]
        found = reference(model, model_type, sound, [*before, *completion.token_ids])
        expected = torch.log_softmax(found[len(before) - 1 : -1], dim=-1)
        assert_same_logits(logprobs_of(completion, VOCAB_SIZE), expected)


@pytest.mark.filterwarnings("ignore:no installed plugin")
def test_recordings_that_are_refused(tmp_path):
    checkpoint("moonshine", tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        for size, message in ((100, "may be too short"), (90000, "max_encoder_len is 96: cut it")):
            with pytest.raises(ToolkitError, match=message):
                prompt = {"encoder_prompt": {"audio": np.zeros(size)}}
                llm.generate([prompt], PARAMS, use_tqdm=False)
        with pytest.raises(ToolkitError, match="this model hears"):
            llm.generate(["a text"], PARAMS, use_tqdm=False)


@pytest.mark.filterwarnings("ignore:no installed plugin")
def test_a_language_is_not_guessed(tmp_path):
    checkpoint("canary", tmp_path)
    with (
        LLM(str(tmp_path), **OPTIONS) as llm,
        pytest.raises(ToolkitError, match="is told the language"),
    ):
        llm.generate([{"encoder_prompt": {"audio": sounds()[0]}}], PARAMS, use_tqdm=False)


@pytest.mark.filterwarnings("ignore:no installed plugin")
def test_without_a_feature_extractor_features_are_read(tmp_path):
    model = checkpoint("moonshine", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    sound = sounds()[0]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        start = {"decoder_prompt": {"prompt_token_ids": [3]}}
        (output,) = llm.generate([{"encoder_prompt": {"features": sound}, **start}], PARAMS)
        with pytest.raises(ToolkitError, match="cannot make the feature extractor"):
            llm.generate([{"encoder_prompt": {"audio": sound}, **start}], PARAMS)
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    with torch.inference_mode():
        found = model(torch.from_numpy(sound)[None], decoder_input_ids=torch.tensor([tokens]))
    drawn = found.logits[0].argmax(dim=-1)[len(output.prompt_token_ids) - 1 : -1]
    assert drawn.tolist() == list(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("model_type", "name", "reason"),
    [
        ("pop2piano", "Pop2PianoForConditionalGeneration", "hears music and writes notes"),
        ("bart", "BartForConditionalGeneration", "is not an encoder-decoder model that hears"),
        ("qwen3_asr", "Qwen3ASRForConditionalGeneration", "has no encoder beside its decoder"),
    ],
)
def test_models_that_are_refused(model_type, name, reason):
    values = {"model_type": model_type, "architectures": [name]}
    assert reason in TransformersForSpeech.refuses(VllmConfig.default(values))
