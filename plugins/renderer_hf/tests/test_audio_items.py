"""Recordings: what is read of them and refused, and what stands for them in a prompt."""

from __future__ import annotations

import base64
import io
import json
import threading

import numpy as np
import pytest
import soundfile
import torch
from hearing import AUDIO, EXTRACTOR, ITEM, MARKS, MELS, SECONDS, TEMPLATE, HearingRules, train
from seeing import LLAVA, LlavaRules, train_newlines
from sounds import recorded
from toolkit_lm.errors import CheckpointError, ContextLengthError, RequestError
from toolkit_lm.renderer.feature_lookup import HeldFeature
from toolkit_lm_renderer_hf import audio_processor, media
from transformers import WhisperFeatureExtractor

RATE = 16000


@pytest.fixture(scope="module")
def tokenizer():
    return train()


@pytest.fixture
def make_hearing(tokenizer, make_renderer):
    def make(extractor=EXTRACTOR, **options):
        files = {"chat_template.jinja": TEMPLATE, "preprocessor_config.json": json.dumps(extractor)}
        renderer = make_renderer(tokenizer, files=files, hf_config={"vocab_size": 400}, **options)
        renderer.set_rules(HearingRules(renderer.config))
        return renderer

    return make


@pytest.fixture
def hearing(make_hearing):
    return make_hearing()


@pytest.fixture
def worked(monkeypatch):
    """Items decoded and processed from here on."""
    seen = []
    decode = soundfile.SoundFile.read
    process = audio_processor.AudioProcessor.process
    monkeypatch.setattr(
        soundfile.SoundFile,
        "read",
        lambda *args, **more: (seen.append("decoded"), decode(*args, **more))[1],
    )
    monkeypatch.setattr(
        audio_processor.AudioProcessor,
        "process",
        lambda *args: (seen.append("processed"), process(*args))[1],
    )
    return seen


def tone(seconds=0.5, hertz=440.0, rate=RATE):
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(
        np.float32
    )


def file_of(samples, kind="WAV", rate=RATE, subtype=None):
    file = io.BytesIO()
    soundfile.write(
        file,
        samples,
        rate,
        format=kind,
        subtype="FLOAT" if kind == "WAV" and subtype is None else subtype,
    )
    return file.getvalue()


def encoded(data):
    return base64.b64encode(data).decode()


def data_url(data):
    return f"data:audio/wav;base64,{encoded(data)}"


def chat(*parts):
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
            ],
        }
    ]


def of(source, **more):
    return {"type": "audio", "audio": source, **more}


def values(feature):
    return feature.data["input_features"].to_numpy()


def expected_of(samples):
    made = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)(
        samples, sampling_rate=RATE, return_attention_mask=True, return_tensors="np"
    )
    return made["input_features"], made["attention_mask"]


# Sources


def test_a_recording_is_the_same_however_it_comes(hearing):
    samples = tone()
    file = file_of(samples)
    sources = [
        {"type": "input_audio", "input_audio": {"data": encoded(file), "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": encoded(file)}},
        {"type": "input_audio", "input_audio": {"data": data_url(file), "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": file, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": data_url(file)}},
        {"type": "audio_url", "audio_url": data_url(file)},
        {"type": "audio", "url": data_url(file)},
        {"type": "file", "file": {"file_data": encoded(file), "filename": "a.wav"}},
        {"type": "file", "file": {"file_data": data_url(file)}},
        *map(
            of,
            (
                data_url(file),
                file,
                bytearray(file),
                samples,
                (samples, RATE),
                (samples, 16000.0),
                samples.astype(np.float64),
            ),
        ),
        *map(of, (torch.from_numpy(samples), (torch.from_numpy(samples), RATE))),
    ]
    features, mask = expected_of(samples)
    for source in sources:
        rendered = hearing.render_conversation(chat("a ", source, " b"))
        [feature] = rendered.features
        assert feature.modality == "audio"
        assert np.array_equal(values(feature), features), source
        assert np.array_equal(feature.data["feature_attention_mask"].to_numpy(), mask)
        at = feature.mm_position
        assert rendered.token_ids[at.offset - 1 : at.end + 1] == [
            MARKS.index("<|audio_bos|>"),
            *[AUDIO] * 12,
            MARKS.index("<|audio_eos|>"),
        ]


def test_integers_are_scaled(hearing):
    given = (tone() * 32767).astype(np.int16)
    [feature] = hearing.render_conversation(chat(of(given))).features
    assert np.abs(values(feature) - expected_of(given.astype(np.float32) / 32767)[0]).max() < 1e-5


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_recordings_are_resampled_to_the_processors_rate(hearing, rate):
    """Resampling equals soxr's, for files and for samples."""
    import soxr

    samples = tone(1.0, rate=rate)
    expected, mask = expected_of(soxr.resample(samples, rate, RATE))
    for source in (
        file_of(samples, rate=rate),
        (samples, rate),
        file_of(np.stack([samples, samples], axis=1), rate=rate),
    ):
        [feature] = hearing.render_conversation(chat(of(source))).features
        assert np.abs(values(feature) - expected).max() < 1e-4
        assert np.array_equal(feature.data["feature_attention_mask"].to_numpy(), mask)


@pytest.mark.parametrize(
    ("kind", "subtype", "format"),
    [("MP3", None, "mp3"), ("FLAC", None, "flac"), ("OGG", None, "ogg"), ("OGG", "OPUS", "opus")],
)
def test_formats(hearing, kind, subtype, format):
    data = file_of(tone(rate=48000), kind, 48000, subtype)
    part = {"type": "input_audio", "input_audio": {"data": encoded(data), "format": format}}
    [feature] = hearing.render_conversation(chat(part)).features
    assert feature.data["feature_attention_mask"].to_numpy().sum() == pytest.approx(50, abs=1)


@pytest.mark.parametrize(
    ("container", "codec", "format"),
    [
        ("ipod", "aac", "m4a"),
        ("mp4", "aac", "mp4"),
        ("webm", "libopus", "webm"),
        ("adts", "aac", "aac"),
    ],
)
def test_formats_of_phones_and_browsers(hearing, container, codec, format):
    data = recorded(container, codec, 48000, 0.5)
    part = {"type": "input_audio", "input_audio": {"data": encoded(data), "format": format}}
    for source in (part, of(data)):
        [feature] = hearing.render_conversation(chat(source)).features
        assert feature.data["feature_attention_mask"].to_numpy().sum() == pytest.approx(50, abs=5)
    part["input_audio"]["format"] = "wav"
    with pytest.raises(
        RequestError, match="it is said to be of the format WAV, and is of the format"
    ):
        hearing.render_conversation(chat(part))


def test_several_recordings_among_text(hearing):
    a = tone(0.3)
    b = tone(2.0, 300)
    c = tone(0.1, 900)
    rendered = hearing.render_conversation(chat("first ", of(a), of(b), " then ", of(c), of(a)))
    assert [one.mm_position.length for one in rendered.features] == [7, 50, 2, 7]
    assert rendered.token_ids.count(AUDIO) == 66
    for feature, samples in zip(rendered.features, (a, b, c, a), strict=True):
        assert np.array_equal(values(feature), expected_of(samples)[0])
    names = [one.mm_identifier for one in rendered.features]
    assert names[0] == names[3] and len(set(names)) == 3


def test_plain_prompts(hearing):
    a = tone(0.3)
    b = tone(0.2, 300)
    text = f"a {ITEM} b {ITEM}"
    found = hearing.render_prompt({"prompt": text, "multi_modal_data": {"audio": [a, (b, RATE)]}})
    assert [one.mm_position.length for one in found.features] == [7, 5]
    alone = hearing.render_prompt({"prompt": ITEM, "multi_modal_data": {"audio": (b, RATE)}})
    assert np.array_equal(values(alone.features[0]), expected_of(b)[0])
    with pytest.raises(RequestError, match="placeholders"):
        hearing.render_prompt({"prompt": ITEM, "multi_modal_data": {"audio": [a, b]}})


def test_typed_placeholders_are_text(hearing):
    rendered = hearing.render_conversation(chat(of(tone(0.2)), "what does <|AUDIO|> mean?"))
    assert rendered.token_ids.count(AUDIO) == 5


def test_embeddings_in_the_place_of_a_recording(hearing):
    embeds = np.ones((3, 6), np.float32)
    for part in (of(embeds), {"type": "audio_embeds", "audio_embeds": embeds}):
        rendered = hearing.render_conversation(chat(part))
        assert rendered.token_ids.count(AUDIO) == 3
        assert np.array_equal(rendered.features[0].data["embeds"].to_numpy(), embeds)


# Identity


class Held:
    """Items of a prompt that an engine holds."""

    def __init__(self, rendered):
        self.held = {
            one.mm_identifier: HeldFeature(
                rendered.token_ids[one.mm_position.offset : one.mm_position.end],
                one.mm_position.mask,
                one.layout,
                1,
            )
            for one in rendered.features
        }

    def get(self, identifier):
        return self.held.get(identifier)


def test_a_recording_that_the_engine_holds_is_neither_decoded_nor_processed(hearing, worked):
    file = file_of(tone())
    other = file_of(tone(0.25))
    first = hearing.render_conversation(chat(of(file)))
    assert worked == ["decoded", "decoded", "processed"]
    hearing.feature_cache = Held(first)
    again = hearing.render_conversation(chat("b ", of(file), of(other)))
    assert worked[3:] == ["decoded", "decoded", "processed"]
    assert again.features[0].data is None and again.features[1].data is not None
    assert again.features[0].mm_identifier == first.features[0].mm_identifier
    assert [one.mm_position.length for one in again.features] == [12, 6]


def test_a_recording_twice_in_a_prompt_is_processed_once(hearing, worked):
    file = file_of(tone())
    assert len(hearing.render_conversation(chat(of(file), of(file), of(file))).features) == 3
    assert worked == ["decoded", "decoded", "processed"]


def test_identifiers(make_hearing):
    def name(part, made):
        return made.render_conversation(chat(part)).features[0].mm_identifier

    made = make_hearing()
    samples = tone()
    names = [
        name(of(samples), made),
        name(of((samples, 8000)), made),
        name(of(tone(hertz=441.0)), made),
        name(of(samples, uuid="mine"), made),
        name(of(file_of(samples)), made),
        name(of(np.append(samples, np.float32(0))), made),
    ]
    assert len(set(names)) == len(names)
    assert name(of(samples.copy()), made) == names[0] == name(of((samples, RATE)), made)
    other = make_hearing({**EXTRACTOR, "chunk_length": 1})
    assert name(of(samples), other) != names[0]


# Refusals


def test_what_is_refused_is_one_error_that_names_the_item(hearing):
    good = file_of(tone())
    cut = file_of(tone(), "FLAC")
    gif = b"GIF89a" + bytes(40)
    movie = b"\0\0\0\x18ftypmp42" + bytes(100)
    nan = tone()
    nan[7] = np.nan

    def spoken(data, **more):
        return {"type": "input_audio", "input_audio": {"data": encoded(data), **more}}

    bad = [
        (of(b""), "it is empty"),
        (spoken(b""), "it is empty"),
        (of(file_of(tone(0))), "it has no samples"),
        (of(tone(0)), "it has no samples"),
        (of(good[:-100]), "it is a truncated WAV"),
        (of(cut[: len(cut) // 2]), "it is a broken or truncated FLAC"),
        (of(good[:20] + bytes(40) + good[60:]), "it is a truncated WAV: it has no samples"),
        (
            of(b"no recording"),
            "it is not a recording of a known format; "
            "known: AAC, FLAC, M4A, MP3, MP4, Ogg, WAV, WEBM",
        ),
        (of(gif), "it is an image, and no recording"),
        (of(movie), "it is a broken or truncated recording"),
        (
            {"type": "audio_url", "audio_url": {"url": data_url(movie)}},
            "it is a broken or truncated recording",
        ),
        (
            spoken(good, format="mp3"),
            "it is said to be of the format MP3, and is of the format WAV",
        ),
        (spoken(good, format="pcm16"), r"its format is 'pcm16'; known: wav, mp3,"),
        (spoken(good, format=["wav"]), "its format is"),
        ({"type": "input_audio", "input_audio": encoded(good)}, "input_audio must be"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio must be"),
        ({"type": "input_audio"}, "must have 'input_audio'"),
        ({"type": "input_audio", "input_audio": {"data": "a!b", "format": "wav"}}, "base64"),
        (of(file_of(np.zeros((100, 9)))), "it has 9 channels; up to 8"),
        (of(file_of(np.zeros(100), rate=10)), "it states 10 samples a second"),
        (of((tone(), 10)), "it has 10 samples a second"),
        (of((tone(), 0)), "it has 0 samples a second"),
        (of((tone(), 16000.5)), "it has 16000.5 samples a second"),
        (of((tone(), float("nan"))), "samples a second"),
        (of((tone(), True)), "not a tuple"),
        (of([1.0, 2.0]), "not a list"),
        (of(7), "not a int"),
        (of(nan), "not finite"),
        (of(np.zeros((10, 2, 2), np.float32)), "of one channel, not float32"),
        (of(np.zeros((10, 2), np.int16)), "of one channel, not int16"),
        (of(np.array(["a"])), "must be floats or integers"),
        (of("http://127.0.0.1/a.wav"), "not allowed"),
        (of("/etc/passwd"), "none of a data URL"),
        ({"type": "file", "file": {"file_data": encoded(b"MThd")}}, "no known format"),
        (of(tone(2.01)), r"it has 2\.01 seconds, and the model hears 2 at a time: cut it"),
        (of(file_of(tone(2.5))), r"it has 2\.50 seconds, and the model hears 2 at a time: cut it"),
    ]
    for part, told in bad:
        with pytest.raises(RequestError, match=told) as error:
            hearing.render_conversation(chat(of(good), part, of(good)))
        where = "item 2, file: " if part["type"] == "file" else "audio 2: "
        assert str(error.value).startswith(where), error.value
        assert error.value.param == "messages"
        assert len(str(error.value)) < 250
        assert len(hearing.render_conversation(chat(of(good))).features) == 1


def test_bounds_come_before_the_work(make_hearing, worked):
    made = make_hearing(
        {**EXTRACTOR, "chunk_length": 30}, max_audio_seconds=1.5, max_media_bytes=1_000_000
    )
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        with pytest.raises(
            RequestError,
            match=r"audio 1: it has 2\.00 seconds, more than the 1\.5 that are taken "
            r"\(max_audio_seconds\)",
        ):
            made.render_conversation(chat(of(file_of(tone(2.0), kind))))
    with pytest.raises(RequestError, match=r"audio 1: it has 2\.00 seconds, .*max_audio_seconds"):
        made.render_conversation(chat(of(tone(2.0))))
    with pytest.raises(RequestError, match=r"audio 1: it has .* MiB, more than"):
        made.render_conversation(chat(of(b"fLaC" + bytes(2_000_000))))
    with pytest.raises(RequestError, match=r"audio 17: there are 17; .*limit_mm_per_prompt"):
        made.render_conversation(chat(*[of(tone())] * 17))
    assert worked == []


def test_recordings_stop_where_there_is_no_room_for_more(make_hearing, worked):
    made = make_hearing(max_model_len=100)
    with pytest.raises(
        ContextLengthError,
        match=r"audio 2: it has 50 tokens, 100 with the items before it; .*100 tokens",
    ):
        made.render_conversation(chat(*(of(tone(2.0, hertz)) for hertz in (300, 400, 500))))
    assert worked.count("processed") == 2


def test_a_limit_of_no_recordings(make_hearing):
    made = make_hearing(
        {"image_processor_type": "CLIPImageProcessor"}, limit_mm_per_prompt=["audio=0"]
    )
    with pytest.raises(RequestError, match=r"audio 1: there are 1; .*limit_mm_per_prompt"):
        made.render_conversation(chat(of(tone())))


def test_a_model_that_takes_no_audio(make_renderer):
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
    }
    files = {"chat_template.jinja": LLAVA, "preprocessor_config.json": json.dumps(images)}
    seeing = make_renderer(train_newlines(), files=files, hf_config={"vocab_size": 400})
    seeing.set_rules(LlavaRules(seeing.config))
    part = {
        "type": "input_audio",
        "input_audio": {"data": encoded(file_of(tone())), "format": "wav"},
    }
    for one in (part, of(tone())):
        with pytest.raises(RequestError, match="audio 1: this model takes no audio, only image"):
            seeing.render_conversation(chat(one))


def test_a_model_that_takes_no_images(hearing):
    with pytest.raises(RequestError, match="image 1: this model takes no image, only audio"):
        hearing.render_conversation(chat({"type": "image", "image": np.zeros((4, 4, 3), np.uint8)}))


def test_options_of_the_processor_are_refused(hearing):
    with pytest.raises(
        RequestError, match="mm_processor_kwargs: 'sampling_rate' cannot be set by a request"
    ) as error:
        hearing.render_conversation(chat(of(tone())), mm_processor_kwargs={"sampling_rate": 8000})
    assert error.value.param == "mm_processor_kwargs"


# Checkpoints


def test_the_processors_config_may_be_nested(make_hearing, tokenizer, make_renderer):
    files = {
        "chat_template.jinja": TEMPLATE,
        "processor_config.json": json.dumps({"feature_extractor": EXTRACTOR}),
    }
    made = make_renderer(tokenizer, files=files, hf_config={"vocab_size": 400})
    made.set_rules(HearingRules(made.config))
    [feature] = made.render_conversation(chat(of(tone()))).features
    assert np.array_equal(values(feature), expected_of(tone())[0])


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, "has neither processor_config.json nor preprocessor_config.json"),
        (
            {**EXTRACTOR, "chunk_length": 10**9},
            "chunk_length is 1000000000; it may be from 1 to 4096",
        ),
        ({**EXTRACTOR, "sampling_rate": 0}, "sampling_rate is 0"),
        ({**EXTRACTOR, "n_fft": "many"}, "n_fft is 'many'"),
        ({**EXTRACTOR, "hop_length": True}, "hop_length is True"),
        ({**EXTRACTOR, "hop_length": 1, "feature_size": 1024}, "make no sense for a window"),
        (
            {**EXTRACTOR, "chunk_length": 4096, "sampling_rate": 384_000},
            "make no sense for a window",
        ),
        ({**EXTRACTOR, "dither": 0.1}, "make no sense for a window"),
    ],
)
def test_checkpoints_that_make_no_sense(make_hearing, stated, message):
    with pytest.raises(CheckpointError, match=message):
        make_hearing(stated)


def test_other_features_are_refused_by_name(make_hearing):
    made = make_hearing({**EXTRACTOR, "feature_extractor_type": "ParakeetFeatureExtractor"})
    with pytest.raises(
        RequestError,
        match=r"audio 1: .*the checkpoint names 'ParakeetFeatureExtractor'\. Give audio_embeds",
    ):
        made.render_conversation(chat(of(tone())))
    assert made.render_conversation(chat(of(np.ones((2, 6), np.float32)))).features


# Costs


def test_what_a_recording_takes_at_most(make_hearing):
    made = make_hearing({**EXTRACTOR, "chunk_length": 30, "feature_size": 128})
    whole, beside = made.media_size(of(file_of(tone())), {})
    [feature] = make_hearing().render_conversation(chat(of(tone()))).features
    assert whole == 4 * 129 * 3000
    assert 12 * 480_000 < beside < 100 * 480_000
    small, _ = make_hearing().media_size(of(file_of(tone())), {})
    assert small == sum(len(array.data) for array in feature.data.values())
    assert made.media_size({"type": "image", "image": b"x"}, {}) == (0, 0)
    assert made.media_size({"type": "audio_embeds", "audio_embeds": {}}, {}) == (0, 0)


def test_threads(hearing):
    """The first recordings come at once: one extractor is made."""
    found = {}
    sounds = [tone(0.5, 200 + 50 * i) for i in range(8)]
    expected = [expected_of(one)[0] for one in sounds]

    def render(i):
        found[i] = values(hearing.render_conversation(chat(of(sounds[i]))).features[0])

    threads = [threading.Thread(target=render, args=(i,)) for i in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for i, one in enumerate(expected):
        assert np.array_equal(found[i], one)


def test_files_are_fetched_from_allowed_hosts_alone(make_hearing, monkeypatch):
    made = make_hearing(allowed_media_hosts=["sounds.example.com"])
    file = file_of(tone())
    asked = []
    monkeypatch.setattr(
        media,
        "load_bytes",
        lambda source, limits, **more: asked.append((source, limits.allowed_hosts)) or file,
    )
    [feature] = made.render_conversation(
        chat({"type": "audio_url", "audio_url": {"url": "https://sounds.example.com/a.wav"}})
    ).features
    assert asked == [("https://sounds.example.com/a.wav", ("sounds.example.com",))]
    assert np.array_equal(values(feature), expected_of(tone())[0])
