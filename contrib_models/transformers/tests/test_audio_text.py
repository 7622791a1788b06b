"""Models that hear without a class of ours: transformers' tokens through the whole engine, with
chunks and several recordings; and those that are refused."""

from __future__ import annotations

import audio
import pytest
import torch
from given_pictures import FIRST_SPECIAL, Given
from tiny_models import VOCAB_SIZE, save
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ToolkitError
from toolkit_lm_devkit import assert_same_logits
from toolkit_lm_devkit.generation import logprobs_of
from toolkit_lm_transformers.image_text import TransformersForAudioText
from toolkit_lm_transformers.pooling import TransformersForPooling

NAME = "GlmAsrForConditionalGeneration"
OPTIONS = {
    "model_impl": "transformers_audio_text",
    "renderer": "given_pictures",
    "plugins": [Given()],
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 4,
    "num_kv_blocks": 96,
    "max_logprobs": VOCAB_SIZE,
}
PARAMS = SamplingParams(
    temperature=0,
    max_tokens=6,
    ignore_eos=True,
    logprobs=VOCAB_SIZE,
    allowed_token_ids=list(range(FIRST_SPECIAL)),
)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm")
    model = save("glmasr", folder, architecture=NAME, config=audio.tiny_config("glmasr"))
    return model, folder, [audio.sound(model, seed, 25) for seed in range(2)]


def prompt(model, sounds):
    places = [part for n in range(len(sounds)) for part in (audio.audio_token(model), 4 + n)]
    return {
        "prompt_token_ids": [3, *places, 9, 31],
        "multi_modal_data": {
            "audio": [{name: a.numpy() for name, a in arrays.items()} for arrays in sounds]
        },
    }


def test_tokens_are_those_of_transformers(glm):
    """Of no recording, one and two, in an engine too small for all at a time."""
    model, folder, (a, b) = glm
    given = [[], [a], [a, b], [b]]
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate([prompt(model, sounds) for sounds in given], PARAMS, use_tqdm=False)
    for sounds, output in zip(given, outputs, strict=True):
        (completion,) = output.outputs
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        expected = audio.logits(model, torch.tensor(tokens), sounds)
        expected = torch.log_softmax(expected[len(output.prompt_token_ids) - 1 : -1], dim=-1)
        assert_same_logits(logprobs_of(completion, VOCAB_SIZE), expected)


def test_a_recording_is_heard_without_noise(tmp_path):
    """VibeVoice-ASR would add noise to it by default, another one in each step."""
    name = "VibeVoiceAsrForConditionalGeneration"
    config = audio.tiny_config("vibevoice_asr")
    model = save("vibevoice_asr", tmp_path, architecture=name, config=config)
    sounds = [audio.sound(model)]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        outputs = llm.generate([prompt(model, sounds)] * 2, PARAMS, use_tqdm=False)
    for output in outputs:
        (completion,) = output.outputs
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        expected = audio.logits(model, torch.tensor(tokens), sounds)
        expected = torch.log_softmax(expected[len(output.prompt_token_ids) - 1 : -1], dim=-1)
        assert_same_logits(logprobs_of(completion, VOCAB_SIZE), expected)


def test_a_recording_without_its_tokens_is_refused(glm):
    model, folder, (a, _) = glm
    bad = {**a, "input_ids": torch.tensor([5, 6])}
    with (
        LLM(str(folder), **OPTIONS) as llm,
        pytest.raises(ToolkitError, match="a recording must have input_ids"),
    ):
        llm.generate([prompt(model, [bad])], PARAMS, use_tqdm=False)


def test_pictures_are_none_of_its_media(glm):
    model, folder, (a, _) = glm
    given = prompt(model, [a])
    given["multi_modal_data"] = {"image": given["multi_modal_data"]["audio"]}
    with LLM(str(folder), **OPTIONS) as llm, pytest.raises(ToolkitError, match="no image"):
        llm.generate([given], PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("fallback", "model_type", "name", "reason"),
    [
        (TransformersForAudioText, "m2m_100", "M2M100ForConditionalGeneration", "an encoder-deco"),
        (TransformersForAudioText, "vibevoice", "VibeVoiceForConditionalGeneration", "diffusion"),
        (TransformersForPooling, "vibevoice", "VibeVoiceForConditionalGeneration", "writes speech"),
        (TransformersForPooling, "vits", "VitsModel", "writes speech"),
        (
            TransformersForAudioText,
            "kyutai_speech_to_text",
            "KyutaiSpeechToTextForConditionalGeneration",
            "each token of its output hears",
        ),
        (TransformersForAudioText, "llama", "LlamaForCausalLM", "is not a model of recordings"),
    ],
)
def test_refusals(fallback, model_type, name, reason):
    values = {"model_type": model_type, "architectures": [name]}
    assert reason in fallback.refuses(VllmConfig.default(values))
