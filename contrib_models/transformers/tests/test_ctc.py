"""Models that label the frames of a recording: transformers' texts through the whole engine, for
recordings of all lengths; and what is refused."""

from __future__ import annotations

import json

import audio
import numpy as np
import pytest
import torch
from tiny_models import save
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJ"]
OPTIONS = {"dtype": "float32", "num_kv_blocks": 600, "block_size": 8, "max_num_seqs": 3}
PARAMS = SamplingParams(temperature=0, max_tokens=None, skip_special_tokens=False)


def ctc(folder, **changes):
    """A Wav2Vec2 that often says the same letter twice, and its processor."""
    config = audio.tiny_config("wav2vec2")
    config.pad_token_id = 0
    config.vocab_size = len(LETTERS)
    for name, value in changes.items():
        setattr(config, name, value)
    model = save("wav2vec2", folder, architecture="Wav2Vec2ForCTC", config=config)
    audio.vary(model)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "letters.json").write_text(json.dumps({c: i for i, c in enumerate(LETTERS)}))
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "letters.json"))
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    processor = Wav2Vec2Processor(extractor, tokenizer)
    processor.save_pretrained(folder)
    return model, processor, folder


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return ctc(tmp_path_factory.mktemp("wav2vec2"))


def recordings(*lengths):
    random = np.random.default_rng(1)
    return [
        (random.uniform(-0.5, 0.5, n) * np.sin(np.arange(n) / 9)).astype(np.float32)
        for n in lengths
    ]


def requests(sounds):
    return [{"encoder_prompt": {"audio": sound, "sampling_rate": 16000}} for sound in sounds]


@torch.inference_mode()
def reference(model, processor, sound):
    made = processor(sound, sampling_rate=16000, return_tensors="pt")
    return processor.batch_decode(model(**made).logits.argmax(dim=-1))[0]


def test_texts_are_those_of_transformers(letters):
    """Of lengths that are alike, mixed and the shortest; silence; more than run at a time."""
    model, processor, folder = letters
    sounds = [*recordings(1600, 5000, 1600, 9000, 700, 40), np.zeros(3000, np.float32)]
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate(requests(sounds), PARAMS, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [reference(model, processor, sound) for sound in sounds]
    assert len(set(texts)) > 3 and max(map(len, texts)) > 20
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_labels_that_repeat_are_heard_twice_after_a_blank(letters):
    """What the frames say, by hand: a label counts once until another, or the blank, follows."""
    from toolkit_lm_transformers.speech import TransformersForCTC

    model = TransformersForCTC.__new__(TransformersForCTC)
    torch.nn.Module.__init__(model)
    model.blank = 0
    model.num_labels = 4
    frames = torch.tensor([[1, 1, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0]])[..., None].float()

    class Heard:
        last_hidden_state = frames

    logits = model.spell(Heard, torch.zeros(2, 5), use_cache=False).logits
    assert logits.argmax(dim=-1).tolist() == [[1, 1, 2, 0, 0], [0, 0, 0, 0, 0]]
    assert logits.isfinite().sum() == 10


def test_a_stream_ends_with_the_same_text(letters):
    """White space at the ends is of no text, whatever follows it."""
    _, processor, folder = letters
    from toolkit_lm_transformers.ctc_renderer import CtcRenderer

    with LLM(str(folder), **OPTIONS) as llm:
        renderer = llm.engine.renderer
        assert isinstance(renderer, CtcRenderer)
        for labels in ([4, 5, 4, 4, 6, 4], [4, 4], [], [5, 3, 6], [1, 5]):
            stream = renderer.decode_stream([0], skip_special_tokens=False)
            text = "".join(stream.push([label]) for label in labels) + stream.flush()
            expected = processor.tokenizer.decode(labels, group_tokens=False)
            assert text == renderer.decode(labels) == expected


def test_half_precision(letters):
    _, _, folder = letters
    with LLM(str(folder), **{**OPTIONS, "dtype": "bfloat16"}) as llm:
        (output,) = llm.generate(requests(recordings(9000)), PARAMS, use_tqdm=False)
    assert output.outputs[0].text


def test_small_letters_and_languages(tmp_path):
    """Of a tokenizer that writes small letters, and has a vocabulary for each language."""
    _, _, folder = ctc(tmp_path)
    letters = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({"eng": letters, "deu": {"<pad>": 0}}))
    path = folder / "tokenizer_config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "target_lang": "eng", "do_lower_case": True}))
    tokenizer = Wav2Vec2CTCTokenizer.from_pretrained(folder)
    with LLM(str(folder), **OPTIONS) as llm:
        (output,) = llm.generate(requests(recordings(9000)), PARAMS, use_tqdm=False)
    labels = [label for label in output.outputs[0].token_ids if label]
    assert output.outputs[0].text == tokenizer.decode(labels, group_tokens=False)
    assert output.outputs[0].text != output.outputs[0].text.upper()
    path.write_text(json.dumps({**stated, "target_lang": "fra"}))
    with pytest.raises(ToolkitError, match="'fra', of eng, deu"):
        LLM(str(folder), **OPTIONS)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"encoder_prompt": {"audio": np.zeros(13), "sampling_rate": 16000}}, "may be too short"),
        ({"encoder_prompt": {"audio": np.zeros(0)}}, "samples of one channel"),
        ({"encoder_prompt": {"audio": np.zeros((2, 800))}}, "samples of one channel"),
        ({"encoder_prompt": {"audio": np.full(800, np.nan)}}, "NaN or infinity"),
        ({"encoder_prompt": {"audio": [[1], [1, 2]]}}, "must be a list of numbers"),
        ({"encoder_prompt": {"audio": np.zeros(800), "sampling_rate": 8000}}, "resample it"),
        ({"encoder_prompt": {"audio": np.zeros(90000)}}, "max_encoder_len is 1024: cut it"),
        ({"encoder_prompt": {"features": np.zeros((3, 3, 3))}}, "features must be an array"),
        ({"encoder_prompt": {"features": np.zeros((30, 3))}}, "cannot read a recording"),
        ({"encoder_prompt": {"features": np.full(800, np.inf)}}, "must be finite"),
        ("a text", "this model hears"),
        (
            {"encoder_prompt": {"audio": np.ones(800)}, "decoder_prompt": "Hello"},
            "takes no decoder_prompt",
        ),
    ],
)
def test_recordings_that_are_refused(letters, prompt, message):
    """The next one is heard."""
    _, _, folder = letters
    llm = _shared(folder)
    with pytest.raises(ToolkitError, match=message):
        llm.generate([prompt], PARAMS, use_tqdm=False)
    assert llm.generate(requests(recordings(900)), PARAMS, use_tqdm=False)[0].outputs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [5]),
        ("bad_words", ["A"]),
        ("frequency_penalty", 1.0),
        ("logit_bias", {5: 1.0}),
        ("min_tokens", 2),
        ("presence_penalty", 1.0),
        ("repetition_penalty", 1.5),
        ("structured_outputs", {"regex": "A+"}),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_parameters_that_cannot_be_obeyed(letters, name, value):
    _, _, folder = letters
    with pytest.raises(ToolkitError, match=f"{name}|not truncated|structured output"):
        _shared(folder).generate(
            requests(recordings(900)), SamplingParams(**{name: value}), use_tqdm=False
        )


def test_temperature_and_samples_change_no_text(letters):
    _, _, folder = letters
    params = SamplingParams(n=2, temperature=2.0, top_p=0.5, seed=1, max_tokens=None)
    (output,) = _shared(folder).generate(requests(recordings(5000)), params, use_tqdm=False)
    (plain,) = _shared(folder).generate(
        requests(recordings(5000)), SamplingParams(temperature=0, max_tokens=None), use_tqdm=False
    )
    assert [each.text for each in output.outputs] == [plain.outputs[0].text] * 2


_ENGINES: dict = {}


def _shared(folder):
    """One engine for all tests of errors."""
    if folder not in _ENGINES:
        _ENGINES[folder] = LLM(str(folder), **OPTIONS)
    return _ENGINES[folder]


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    for llm in _ENGINES.values():
        llm.close()


def test_all_classes_of_transformers_are_registered():
    from toolkit_lm_transformers import CTC
    from transformers.models.auto.modeling_auto import MODEL_FOR_CTC_MAPPING_NAMES

    assert set(MODEL_FOR_CTC_MAPPING_NAMES.values()) <= set(CTC)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pad_token_id": None}, "the blank, pad_token_id, is None"),
        ({"pad_token_id": 1}, "the tokenizer's blank"),
        ({"quantization_config": {"quant_method": "x"}}, "quant"),
        ({"conv_kernel": "x"}, "conv_kernel"),
    ],
)
def test_checkpoints_that_are_refused(letters, tmp_path, change, reason):
    _, _, folder = letters
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(ToolkitError, match=reason):
        LLM(str(tmp_path), **OPTIONS)
