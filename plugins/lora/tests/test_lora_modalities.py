"""Adapters that requests have by their media: Granite Speech's own, and those of an option."""

from __future__ import annotations

import types
import warnings

import audio
import msgspec
import pytest
import torch
from given_pictures import FIRST_SPECIAL, Given
from peft import LoraConfig
from tiny_models import VOCAB_SIZE, save
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_devkit import assert_same_logits
from toolkit_lm_devkit.generation import logprobs_of
from toolkit_lm_lora.front import LoRARequest, LoraRequests
from toolkit_lm_serving import ADAPTERS
from transformers import GraniteSpeechForConditionalGeneration, PreTrainedModel

NAME = "GraniteSpeechForConditionalGeneration"
OPTIONS = {
    "model_impl": "transformers_audio_text",
    "renderer": "given_pictures",
    "plugins": [Given()],
    "dtype": "float32",
    "max_model_len": 128,
    "num_kv_blocks": 96,
    "block_size": 4,
    "max_logprobs": VOCAB_SIZE,
}
PARAMS = SamplingParams(
    temperature=0,
    max_tokens=4,
    ignore_eos=True,
    logprobs=VOCAB_SIZE,
    allowed_token_ids=list(range(FIRST_SPECIAL)),
)


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    """A checkpoint with an adapter, as transformers saves both, and its model."""
    folder = tmp_path_factory.mktemp("granite")
    config = audio.tiny_config("granite_speech")
    config.has_lora_adapter = True
    model = save("granite_speech", folder, architecture=NAME, config=config)
    sound = audio.sound(model, 0)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = r".*language_model.*(q_proj|v_proj)"
        model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        # Its own method would write what the adapter wraps into the checkpoint.
        PreTrainedModel.save_pretrained(model, str(folder))
        loaded = GraniteSpeechForConditionalGeneration.from_pretrained(folder).eval()
    return loaded, folder, sound


def prompt(model, sounds):
    count = len(sounds[0]["input_ids"]) if sounds else 0
    places = [part for _ in sounds for part in (audio.audio_token(model), count)]
    arrays = [{name: array.numpy() for name, array in one.items()} for one in sounds]
    return {
        "prompt_token_ids": [3, *places, 9, 31],
        "multi_modal_data": {"audio": arrays},
    }


def expected(model, output, sounds, adapted):
    """What transformers gives, which turns its adapter on where there are recordings."""
    model.enable_adapters() if adapted else model.disable_adapters()
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    found = audio.logits(model, torch.tensor(tokens), sounds)
    return torch.log_softmax(found[len(output.prompt_token_ids) - 1 : -1], dim=-1)


def test_granite_speech_hears_through_its_own_adapter(granite):
    model, folder, sound = granite
    given = [[], [sound], []]
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate([prompt(model, sounds) for sounds in given], PARAMS, use_tqdm=False)
        # Sequences of one length are computed together, whatever adapters they have.
        named = msgspec.structs.replace(PARAMS, extra_args={"adapter": "audio"})
        texts = llm.generate([prompt(model, [])] * 2, [PARAMS, named], use_tqdm=False)
        # A request that names adapters has those alone.
        off = msgspec.structs.replace(PARAMS, extra_args={"adapters": []})
        [without] = llm.generate([prompt(model, [sound])], off, use_tqdm=False)
    for sounds, output in zip(given, outputs, strict=True):
        assert not output.error, output.error
        found = logprobs_of(output.outputs[0], VOCAB_SIZE)
        assert_same_logits(found, expected(model, output, sounds, bool(sounds)))
    for output, adapted in zip(texts, (False, True), strict=True):
        found = logprobs_of(output.outputs[0], VOCAB_SIZE)
        assert_same_logits(found, expected(model, output, [], adapted))
    found = logprobs_of(without.outputs[0], VOCAB_SIZE)
    assert_same_logits(found, expected(model, without, [sound], False))
    adapted = expected(model, without, [sound], True)
    assert (adapted - expected(model, without, [sound], False)).abs().max() > 1e-2


def made(**options):
    own = {
        "pinned": [],
        "max_file_gib": 16,
        "modules": [],
        "modalities": [],
        "folder": None,
        **options,
    }
    return LoraRequests(VllmConfig.make(model="tiny"), options=types.SimpleNamespace(**own))


def test_adapters_of_an_option(two_adapters):
    """By modality, for clients that may name no adapter, too."""
    requests = made(
        modules=[f"{name}={two_adapters.paths[name]}" for name in ("all", "rslora")],
        modalities="audio=all,image=rslora",
    )

    def asked(*modalities, **arguments):
        request = types.SimpleNamespace(
            features=[types.SimpleNamespace(modality=modality) for modality in modalities],
            context={ADAPTERS: "nothing"},
            prompt_token_ids=[1, 2],
        )
        share, _ = requests.prepare(request, arguments)
        return [] if share is None else [use[2] for use in msgspec.msgpack.decode(share)]

    assert asked() == [] and asked("video") == []
    assert asked("audio", "audio") == ["all"]
    assert asked("image", "audio") == ["rslora", "all"]
    assert asked("audio", adapters=[]) == []


def test_a_wrong_option():
    for value in ("audio", "audio=", "=x"):
        with pytest.raises(ConfigError, match=r"modalities: .* is not MODALITY=NAME"):
            made(modalities=value)


def test_requests_name_others(granite, two_adapters):
    """An adapter of another model is refused, and does not run beside its own."""
    model, folder, sound = granite
    with LLM(str(folder), **OPTIONS) as llm:
        other = LoRARequest("other", 1, str(two_adapters.paths["all"]))
        [found] = llm.generate([prompt(model, [sound])], PARAMS, lora_request=other, use_tqdm=False)
    assert "needs" in found.error or "no module" in found.error
