"""Qwen2-Audio through renderer and engine: tokens are those that transformers' processor and model
make of the same recordings."""

from __future__ import annotations

import base64
import io

import pytest
import soundfile
import torch
from audio_checkpoints import AUDIO, FAMILIES, ITEM, RATE, make_subject, recordings
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from toolkit_lm_audio.qwen2_audio import Qwen2AudioForConditionalGeneration
from toolkit_lm_devkit import MultimodalConformance
from toolkit_lm_renderer_hf.audio_processor import AudioProcessor

OPTIONS = {"device": "cpu", "max_model_len": 192, "num_kv_blocks": 200, "max_num_seqs": 8}
COUNT = 12
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request, tmp_path_factory):
    return make_subject(tmp_path_factory.mktemp("audio"), request.param)


class TestAudio(MultimodalConformance):
    modality = "audio"

    def num_scarce_blocks(self, reference):
        return (
            None if getattr(reference.model.config.text_config, "use_sliding_window", False) else 26
        )


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_subject(tmp_path_factory.mktemp("audio"))


def prompt_of(text, sounds) -> dict:
    return {"prompt": text, "multi_modal_data": {"audio": sounds}} if sounds else {"prompt": text}


def drawn(llm, prompts, params=GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def wav(samples) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def test_an_engine_process_is_sent_a_recording_once(other, monkeypatch):
    """An item that the engine holds is neither processed again nor sent."""
    sounds = recordings(0.5, 0.9, seed=4)
    text = f"{ITEM} or {ITEM}?"
    expected = other.greedy(text, sounds, COUNT)[1]
    processed = []
    process = AudioProcessor.process
    monkeypatch.setattr(
        AudioProcessor, "process", lambda *args: (processed.append(1), process(*args))[1]
    )
    with LLM(str(other.folder), **OPTIONS, engine_process=True) as llm:
        for _ in range(3):
            assert drawn(llm, [prompt_of(text, sounds), prompt_of(text, sounds)]) == [expected] * 2
    assert len(processed) <= 4


def test_a_recording_is_encoded_once_while_it_is_held(other, monkeypatch):
    sounds = recordings(0.5, 0.9, seed=4)
    text = f"{ITEM} or {ITEM}?"
    encoded = []
    encode = Qwen2AudioForConditionalGeneration.encode_items
    with LLM(str(other.folder), **OPTIONS) as llm:
        monkeypatch.setattr(
            Qwen2AudioForConditionalGeneration,
            "encode_items",
            lambda *args: (encoded.append(len(args[2])), encode(*args))[1],
        )
        found = [drawn(llm, [prompt_of(f"{start}{text}", sounds)]) for start in ("", "a ", "b ")]
    assert encoded == [2]
    assert found[0] == [other.greedy(text, sounds, COUNT)[1]]


def test_embeddings_in_the_place_of_a_recording(other):
    (sound,) = recordings(0.5, seed=3)
    text = f"see {ITEM} there"
    caught = []
    hook = other.model.model.multi_modal_projector.register_forward_hook(
        lambda _, given, out: caught.append(out)
    )
    with torch.inference_mode():
        other.model(**other.inputs(text, [sound]))
    hook.remove()
    embeds = caught[0][0, :12].numpy()
    with LLM(str(other.folder), **OPTIONS) as llm:
        heard, given = drawn(
            llm,
            [prompt_of(text, [sound]), {"prompt": text, "multi_modal_data": {"audio": [embeds]}}],
        )
    assert heard == given == other.greedy(text, [sound], COUNT)[1]


def test_conversations(other):
    """Recordings stand where the template has them; what a user types is text. A file is what its
    samples are."""
    a, b = recordings(0.5, 1.0, seed=7)
    data = base64.b64encode(wav(b)).decode()
    parts = [
        {"type": "audio", "audio": a},
        {"type": "text", "text": "is it\n"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "system", "content": "Listen."}, {"role": "user", "content": parts}]
    typed = [
        {
            "role": "user",
            "content": [*parts[:1], {"type": "text", "text": "what does <|AUDIO|> mean?"}],
        }
    ]
    bare = [
        {"role": "system", "content": "Listen."},
        {"role": "user", "content": [parts[0], parts[1], {"type": "audio"}, parts[3]]},
    ]
    text = other.processor.apply_chat_template(bare, add_generation_prompt=True, tokenize=False)
    prompt, expected = other.greedy(text, [a, b], COUNT)
    with LLM(str(other.folder), **OPTIONS) as llm:
        found, of_typed = llm.chat([messages, typed], GREEDY)
    assert (found.prompt_token_ids, list(found.outputs[0].token_ids)) == (prompt, expected)
    assert of_typed.prompt_token_ids.count(AUDIO) == 12


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"audio": recordings(0.5, 1.1)},
            r"audio 2: it has 1\.10 seconds, and the model hears 1 at a time",
        ),
        ({"audio": recordings(0.5, 0.02)}, "audio 2: it is too short: it has 2 frames of sound"),
        (
            {"audio": [*recordings(0.5), b"no recording"]},
            "audio 2: it is not a recording of a known format",
        ),
        (
            {"audio": [*recordings(0.5), wav(recordings(0.5)[0])[:-9]]},
            "audio 2: it is a truncated WAV",
        ),
    ],
)
def test_what_is_refused(other, data, message):
    good = prompt_of(f"{ITEM}{ITEM}", recordings(0.4, 0.2))
    with LLM(str(other.folder), **OPTIONS) as llm:
        with pytest.raises(ToolkitError, match=message):
            llm.generate([{"prompt": f"{ITEM}{ITEM}", "multi_modal_data": data}], GREEDY)
        assert len(drawn(llm, [good])[0]) == COUNT
