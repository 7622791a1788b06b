"""Long recordings: the rules of timestamps, windows, languages, fallbacks, and the command."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
import transformers
from toolkit_lm import LLM
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm.renderer import Rendered
from toolkit_lm.sampling import ProcessorRow
from toolkit_lm_devkit import randomize, write_tokenizer
from toolkit_lm_whisper.formats import FORMATS
from toolkit_lm_whisper.long_form import (
    LongForm,
    Recording,
    Segment,
    Thresholds,
    Transcript,
    split_at_pairs,
)
from toolkit_lm_whisper.recordings import read_recording
from toolkit_lm_whisper.timestamps import Timestamps
from toolkit_lm_whisper.transcriber import Transcriber
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

WITHOUT = 300
END = 1
START = 290
VOCAB_SIZE = WITHOUT + 1 + 1501
GENERATION = {
    "decoder_start_token_id": START,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": 2,
    "no_timestamps_token_id": WITHOUT,
    "lang_to_id": {"<|en|>": 291, "<|de|>": 292},
    "task_to_id": {"transcribe": 293, "translate": 294},
    "prev_sot_token_id": 295,
    "is_multilingual": True,
    "max_initial_timestamp_index": 50,
    "return_timestamps": True,
}
SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
SHAPE = {
    "d_model": 32,
    "max_target_positions": 48,
    **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in SIDES.items()},
}


@pytest.mark.parametrize("most_first", [None, 3])
def test_rules_of_timestamps_are_those_of_transformers(most_first):
    generator = np.random.default_rng(0)
    config = transformers.GenerationConfig(
        no_timestamps_token_id=20, eos_token_id=5, max_initial_timestamp_index=most_first
    )
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=2)
    ours = Timestamps(VllmConfig.default(), torch.device("cpu"))
    for length in [0] * 20 + list(generator.integers(1, 8, 400)):
        scores = torch.from_numpy(generator.normal(0, 3, 40).astype(np.float32))
        output = sorted(
            generator.integers(6, 40, length), key=lambda token: token if token > 20 else 0
        )
        tokens = np.array([7, 8, *output], np.int32)
        row = ProcessorRow(1, tokens, 2, 0)
        ours.add(row, {"begin": 21, "end": 5, "most_first": most_first}, {})
        expected = theirs(torch.from_numpy(tokens[None].astype(np.int64)), scores[None].clone())[0]
        assert torch.equal(ours.apply(scores[None].clone(), [row])[0], expected), output


@pytest.mark.parametrize(
    ("tokens", "pieces", "rest"),
    [
        ([], [], None),
        ([100, 1, 2], [[100, 1, 2]], None),
        ([100, 1, 2, 150], [[100, 1, 2, 150]], None),
        ([100, 1, 150, 150, 2, 180], [[100, 1, 150], [150, 2, 180]], None),
        ([100, 1, 150, 150, 2], [[100, 1, 150]], 50),
        ([100, 1, 150, 160, 2, 180, 180], [[100, 1, 150], [160, 2, 180]], 80),
    ],
)
def test_windows_are_cut_where_timestamps_meet(tokens, pieces, rest):
    assert split_at_pairs(tokens, 100) == (pieces, rest)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    ids = {
        key: GENERATION[key]
        for key in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = transformers.WhisperConfig(
        vocab_size=VOCAB_SIZE, suppress_tokens=None, begin_suppress_tokens=None, **SHAPE, **ids
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    randomize(model, seed=4)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    write_tokenizer(folder, VOCAB_SIZE)
    return folder, model


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(
        str(checkpoint[0]), device="cpu", dtype="float32", num_kv_blocks=1200, max_num_seqs=8
    ) as llm:
        yield llm


def recording(seconds: float, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed)
    time = np.arange(int(16000 * seconds)) / 16000
    return (
        0.4 * np.sin(2 * np.pi * (200 + 20 * time) * time) + noise.normal(0, 0.05, len(time))
    ).astype(np.float32)


@pytest.mark.parametrize("uses_context", [False, True])
def test_long_recordings_are_those_of_transformers(checkpoint, llm, uses_context):
    """Greedy: segments, and where the next window begins."""
    folder, model = checkpoint
    samples = recording(70)
    [found] = Transcriber(
        llm, Thresholds(temperatures=(0.0,)), uses_context=uses_context
    ).transcribe([(samples, 16000)], language="en")
    extractor = transformers.WhisperFeatureExtractor()
    inputs = extractor(
        samples,
        sampling_rate=16000,
        truncation=False,
        padding="longest",
        return_attention_mask=True,
        return_tensors="pt",
    )
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    asked = {
        "language": "en",
        "task": "transcribe",
        "return_timestamps": True,
        "return_segments": True,
        "do_sample": False,
    }
    with torch.no_grad():
        expected = model.generate(**inputs, **asked, condition_on_prev_tokens=uses_context)
    segments = expected["segments"][0]
    assert [[t for t in s["tokens"].tolist() if t < WITHOUT and t != END] for s in segments] == [
        s.token_ids for s in found.segments
    ]
    assert [round(float(s["start"]), 2) for s in segments] == [
        round(s.start, 2) for s in found.segments
    ]
    assert (found.language, found.duration) == ("en", 70.0)


def test_several_at_once_are_those_of_each_alone(llm):
    given = [(recording(40, 1), 16000), (recording(3, 2), 16000), (recording(65, 3), 16000)]
    transcriber = Transcriber(llm)
    seen = []
    together = transcriber.transcribe(
        given, progress=lambda index, seconds: seen.append((index, seconds))
    )
    assert together == [transcriber.transcribe([one])[0] for one in given]
    assert [max(seconds for i, seconds in seen if i == index) for index in range(3)] == [40, 3, 65]
    assert {one.language for one in together} <= {"en", "de"}


@pytest.mark.parametrize("seed", range(4))
def test_detected_languages_are_those_of_transformers(checkpoint, llm, seed):
    _, model = checkpoint
    samples = recording(3, seed) * (1, 0.05, 0.3, 0.7)[seed]
    [found] = Transcriber(llm, Thresholds(temperatures=(0.0,))).transcribe([(samples, 16000)])
    heard = transformers.WhisperFeatureExtractor()(
        samples, sampling_rate=16000, return_tensors="pt"
    ).input_features
    [token] = model.detect_language(
        heard, generation_config=transformers.GenerationConfig(**GENERATION)
    ).tolist()
    assert GENERATION["lang_to_id"][f"<|{found.language}|>"] == token


def test_what_is_drawn_again_is_what_transformers_draws_again(checkpoint, llm):
    """The same log probabilities and compression rates decide."""
    folder, model = checkpoint
    samples = recording(70)
    inputs = transformers.WhisperFeatureExtractor()(
        samples,
        sampling_rate=16000,
        truncation=False,
        padding="longest",
        return_attention_mask=True,
        return_tensors="pt",
    )
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    told = []
    theirs = {
        name: getattr(model, name)
        for name in ("_retrieve_avg_logprobs", "_retrieve_compression_ratio")
    }
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for name, function in theirs.items():
            patch.setattr(
                model,
                name,
                lambda *given, name=name, function=function: (
                    told.append((name, function(*given))) or told[-1][1]
                ),
            )
        model.generate(
            **inputs,
            language="en",
            task="transcribe",
            return_timestamps=True,
            temperature=(0.0,),
            logprob_threshold=-1.0,
            compression_ratio_threshold=1.35,
            no_speech_threshold=2.0,
            condition_on_prev_tokens=False,
            max_new_tokens=SHAPE["max_target_positions"] - 3,
        )
    transcriber = Transcriber(
        llm, Thresholds(temperatures=(0.0,), most_no_speech=2.0), uses_context=False
    )
    [found] = transcriber.transcribe([(samples, 16000)], language="en")
    ours = {one.seek: one for one in found.segments}.values()
    expected = {name: [float(value) for key, value in told if key == name] for name in theirs}
    assert len(ours) > 2
    assert [one.avg_logprob for one in ours] == pytest.approx(
        expected["_retrieve_avg_logprobs"], abs=1e-3
    )
    assert [one.compression_ratio for one in ours] == pytest.approx(
        expected["_retrieve_compression_ratio"]
    )


def test_languages_by_name(llm):
    given = (recording(2), 16000)
    transcriber = Transcriber(llm, Thresholds(temperatures=(0.0,)))
    [by_name], [by_code] = (
        transcriber.transcribe([given], language=name) for name in ("German", "de")
    )
    assert by_name == by_code
    assert by_name.language == "de"


def test_what_fails_is_drawn_again(llm):
    never = Thresholds(temperatures=(0.0, 0.5), least_logprob=0.0)
    calls = []
    transcriber = Transcriber(llm, never)
    generate = llm.generate
    llm.generate = lambda prompts, params, **how: (
        calls.append([one.temperature for one in params]) or generate(prompts, params, **how)
    )
    try:
        transcriber.transcribe([(recording(2), 16000)], language="de")
    finally:
        del llm.generate
    assert calls == [[0.0], [0.0], [0.5]], "the second asks for the probability of silence"


def test_silence_has_no_text(checkpoint, llm):
    """The probability is that of the token before <|notimestamps|>, where the transcript starts."""
    _, model = checkpoint
    samples = recording(35)
    model_of_speech = LongForm(llm.config, llm.engine.renderer)
    limits = Thresholds(temperatures=(0.0,))
    told = Recording(
        model_of_speech,
        samples,
        16000,
        language="de",
        thresholds=limits,
        tells_no_speech=True,
        uses_context=False,
    )
    steps = told.steps()
    ask = next(steps)
    while ask is not None:
        try:
            ask = steps.send(llm.generate([ask.prompt], ask.params, use_tqdm=False)[0])
        except StopIteration:
            ask = None
    features = transformers.WhisperFeatureExtractor()(
        samples, sampling_rate=16000, truncation=False, padding=False, return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(
            input_features=features.input_features[:, :, :3000],
            decoder_input_ids=torch.tensor([[START]]),
        ).logits
    assert told.transcript.segments[0].no_speech_prob == pytest.approx(
        logits[0, 0].softmax(-1)[WITHOUT - 1].item(), rel=1e-4
    )
    for most, expected in ((0.0, 0), (1.0, len(told.transcript.segments))):
        limits = Thresholds(temperatures=(0.0,), least_logprob=0.0, most_no_speech=most)
        [found] = Transcriber(llm, limits, uses_context=False).transcribe(
            [(samples, 16000)], language="de"
        )
        assert len(found.segments) == expected
        assert found.duration == 35


def test_what_was_said_before_is_read(llm):
    """Tokens that are marks of the model's are not taken from a client's text."""
    model = LongForm(llm.config, llm.engine.renderer)
    given = []
    marked = [5, START, 6, 291, 293, END, 7, WITHOUT - 1, WITHOUT, WITHOUT + 5]
    model.renderer = SimpleNamespace(
        render_prompt=lambda text, add_special_tokens: given.append(text) or Rendered(marked)
    )
    first = next(Recording(model, recording(2), 16000, language="en", prompt="  A name. ").steps())
    assert first.prompt["decoder_prompt"]["prompt_token_ids"] == [295, 5, 6, 7, START, 291, 293]
    assert given == [" A name."]
    bare = next(Recording(model, recording(2), 16000, language="en", prompt=" ").steps())
    assert bare.prompt["decoder_prompt"]["prompt_token_ids"] == [START, 291, 293]


def test_files_that_are_no_recordings(tmp_path):
    soundfile.write(tmp_path / "none.wav", np.zeros(0), 16000)
    (tmp_path / "text.mp3").write_text("no sound")
    for name, why in (
        ("none.wav", "it has no samples"),
        (
            "text.mp3",
            "it is not a recording of a known format; "
            "known: AAC, FLAC, M4A, MP3, MP4, Ogg, WAV, WEBM",
        ),
    ):
        with pytest.raises(RequestError, match=f"{name}: {why}"):
            read_recording(tmp_path / name, 16000)
    for path, why in (
        (tmp_path / "missing.wav", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(RequestError, match=f"{path} cannot be read: {why}"):
            read_recording(path, 16000)


def test_bad_requests(llm):
    transcriber = Transcriber(llm)
    with pytest.raises(RequestError, match="the audio is empty"):
        transcriber.transcribe([([], 16000)])
    with pytest.raises(RequestError, match="language 'xx' is not one"):
        transcriber.transcribe([(recording(1), 16000)], language="xx")
    with pytest.raises(RequestError, match="this model has transcribe, translate"):
        transcriber.transcribe([(recording(1), 16000)], task="sing")
    with LLM("tiny", num_kv_blocks=32, max_model_len=64) as other, pytest.raises(ToolkitError):
        Transcriber(other)


def test_formats():
    found = Transcript(
        "en", 4.5, [Segment(0.0, 1.5, " Good day.", [1]), Segment(3661.25, 3662.0, " Bye.", [2, 3])]
    )
    assert FORMATS["txt"](found) == "Good day. Bye.\n"
    assert FORMATS["srt"](found).splitlines()[:3] == [
        "1",
        "00:00:00,000 --> 00:00:01,500",
        "Good day.",
    ]
    assert FORMATS["vtt"](found).splitlines()[5:7] == ["01:01:01.250 --> 01:01:02.000", "Bye."]
    assert json.loads(FORMATS["json"](found))["segments"][1] == {
        "start": 3661.25,
        "end": 3662.0,
        "text": " Bye.",
        "tokens": [2, 3],
    }
