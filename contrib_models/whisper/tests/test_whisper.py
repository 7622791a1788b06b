"""Whisper against transformers: features, greedy tokens and beams of several recordings at a time,
and what bad recordings are told."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError
from toolkit_lm_devkit import assert_same_logits, assert_same_tokens, randomize, write_tokenizer
from toolkit_lm_devkit.generation import Preemptions
from toolkit_lm_whisper.features import LogMel
from toolkit_lm_whisper.languages import CODES, code_of

VOCAB_SIZE = 300
START = 3
NO_TIMESTAMPS = 9
SIDES = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
SHAPE = {
    "d_model": 64,
    "max_target_positions": 64,
    **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in SIDES.items()},
}
IDS = {"decoder_start_token_id": START, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2}
LANGUAGES = {"<|en|>": 4, "<|de|>": 5}
TASKS = {"transcribe": 7, "translate": 8}
SUPPRESSED = {"suppress_tokens": [40, 41, 200], "begin_suppress_tokens": [50, 1]}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=VOCAB_SIZE)
OPTIONS = {"device": "cpu", "num_kv_blocks": 1200, "max_num_seqs": 8, "max_logprobs": VOCAB_SIZE}


def recordings() -> list[np.ndarray]:
    """A tone, noise, a sweep that fills the window, and hardly anything."""
    noise = np.random.default_rng(3)
    time = np.arange(16000 * 30) / 16000
    return [
        (0.3 * np.sin(2 * np.pi * 440 * time[:16000])).astype(np.float32),
        noise.normal(0, 0.1, 52345).astype(np.float32),
        (0.5 * np.sin(2 * np.pi * (100 + 50 * time) * time)).astype(np.float32),
        np.full(1, 0.1, np.float32),
    ]


@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_are_those_of_transformers(num_mels):
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_mels)
    for samples in recordings():
        # Its path through torch is another one, in float32.
        expected = extractor._np_extract_fbank_features(
            np.pad(samples, (0, 480000 - len(samples)))[None], "cpu"
        )[0]
        found = LogMel(num_mels)(samples)
        assert (found.shape, found.dtype) == ((num_mels, 3000), np.float32)
        assert np.abs(found - expected).max() < 1e-5
        assert (
            np.abs(found - extractor(samples, sampling_rate=16000).input_features[0]).max() < 2e-3
        )


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function of a generation config -> folder, transformers' model."""

    def make(num_mels=80, **generation):
        suppressed = dict.fromkeys(SUPPRESSED)
        config = transformers.WhisperConfig(
            vocab_size=VOCAB_SIZE, num_mel_bins=num_mels, **suppressed, **SHAPE, **IDS
        )
        model = transformers.WhisperForConditionalGeneration(config).eval()
        positions = model.model.encoder.embed_positions.weight.clone()
        randomize(model)
        with torch.no_grad():
            model.model.encoder.embed_positions.weight.copy_(positions)
        folder = tmp_path_factory.mktemp("whisper")
        model.save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps({**IDS, **generation}))
        write_tokenizer(folder, VOCAB_SIZE)
        return folder, model

    return make


@pytest.fixture(scope="module")
def multilingual(make):
    return make(
        lang_to_id=LANGUAGES,
        task_to_id=TASKS,
        is_multilingual=True,
        no_timestamps_token_id=NO_TIMESTAMPS,
        **SUPPRESSED,
    )


def prompts(decoder=None):
    rest = {} if decoder is None else {"decoder_prompt": {"prompt_token_ids": decoder}}
    return [
        {"encoder_prompt": {"audio": samples, "sampling_rate": 16000}, **rest}
        for samples in recordings()
    ]


def features(samples, num_mels=80):
    return torch.from_numpy(LogMel(num_mels)(samples))[None]


def check(model, outputs, *, greedy=True, num_mels=80):
    """All log probabilities, and greedy tokens, are those of transformers."""
    for samples, output in zip(recordings(), outputs, strict=True):
        assert output.error is None
        for one in output.outputs:
            with torch.inference_mode():
                ids = torch.tensor([[*output.prompt_token_ids, *one.token_ids]])
                logits = model(
                    input_features=features(samples, num_mels), decoder_input_ids=ids
                ).logits
            expected = torch.log_softmax(logits[0, len(output.prompt_token_ids) - 1 : -1], -1)
            found = torch.tensor(
                [[entries[i].logprob for i in range(VOCAB_SIZE)] for entries in one.logprobs]
            )
            assert_same_logits(found, expected)
            if greedy:
                assert_same_tokens(one.token_ids, expected)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_logits_and_greedy_tokens(make, num_mels):
    """Recordings in one batch, each in a step of its own."""
    folder, model = make(num_mels)
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate(prompts([START, 60, 70]), GREEDY, use_tqdm=False)
    check(model, outputs, num_mels=num_mels)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption(make, mode):
    """The pool holds two recordings and their texts. A request that is swapped takes along what the
    encoder made of its recording."""
    folder, model = make()
    watch = Preemptions()
    blocks = {
        "num_kv_blocks": 2 * 375 + 40,
        "block_size": 4,
        "preemption_mode": mode,
        "swap_memory": "64MiB",
    }
    with LLM(
        str(folder), plugins=[watch], enable_prefix_caching=False, **{**OPTIONS, **blocks}
    ) as llm:
        encoded = counted(llm)
        outputs = llm.generate(
            prompts([START, 60, 70]), GREEDY.replace(n=3, max_tokens=60), use_tqdm=False
        )
    check(model, outputs)
    assert watch.count > 0
    assert len(encoded) == len(outputs) + (watch.count if mode == "recompute" else 0)


def counted(llm):
    """A list of the encoder sequences that are computed from now on."""
    cross = llm.engine.client.core.scheduler.request_blocks.cross
    found = []
    allocate = cross.allocate
    cross.allocate = lambda encoder, **how: found.append(encoder) or allocate(encoder, **how)
    return found


def test_several_samples(make):
    """They are those of a request alone, and computed by the same encoder."""
    folder, model = make()
    params = GREEDY.replace(temperature=1.0, seed=3, n=4)
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate(prompts([START, 60]), params, use_tqdm=False)
        [alone] = llm.generate(prompts([START, 60])[1:2], params, use_tqdm=False)
    check(model, outputs, greedy=False)
    assert all(len({tuple(one.token_ids) for one in output.outputs}) == 4 for output in outputs)
    assert [one.token_ids for one in alone.outputs] == [one.token_ids for one in outputs[1].outputs]


@pytest.mark.parametrize("length_penalty", [0.0, 2.0])
def test_beams(make, length_penalty):
    """Beams equal those of transformers, which ignore suppressed tokens just as ours do."""
    named = {"lang_to_id": LANGUAGES, "task_to_id": TASKS, "no_timestamps_token_id": NO_TIMESTAMPS}
    params = SamplingParams(
        use_beam_search=True, beam_width=4, n=2, length_penalty=length_penalty, max_tokens=12
    )

    def search(**suppressed):
        folder, model = make(**named, **suppressed)
        with LLM(str(folder), **OPTIONS) as llm:
            return model, llm.generate(prompts(), params, use_tqdm=False)

    _, outputs = search()
    found = [one.token_ids for output in outputs for one in output.outputs]
    suppressed = {
        "suppress_tokens": sorted({tokens[3] for tokens in found}),
        "begin_suppress_tokens": [1, found[0][0], found[-1][0]],
    }
    model, outputs = search(**suppressed)
    for samples, output in zip(recordings(), outputs, strict=True):
        model.generation_config = transformers.GenerationConfig(**IDS, **suppressed)
        found = transformers.GenerationMixin.generate(
            *(model, features(samples)),
            decoder_input_ids=torch.tensor([output.prompt_token_ids]),
            num_beams=4,
            num_return_sequences=2,
            length_penalty=length_penalty,
            max_new_tokens=12,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [row[len(output.prompt_token_ids) :] for row in found.sequences.tolist()]
        assert [one.token_ids for one in output.outputs] == [
            row[: row.index(1) + 1] if 1 in row else row for row in rows
        ]
        assert [one.score for one in output.outputs] == pytest.approx(
            found.sequences_scores.tolist(), abs=1e-3
        )


def test_suppressed_tokens_are_not_drawn(multilingual):
    folder, model = multilingual
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate(
            prompts(), SamplingParams(temperature=0, max_tokens=16), use_tqdm=False
        )
    for samples, output in zip(recordings(), outputs, strict=True):
        assert output.prompt_token_ids == [
            START,
            LANGUAGES["<|en|>"],
            TASKS["transcribe"],
            NO_TIMESTAMPS,
        ]
        tokens: list[int] = []
        # transformers' processors do the same, token by token.
        while len(tokens) < 16 and tokens[-1:] != [1]:
            with torch.no_grad():
                ids = torch.tensor([[*output.prompt_token_ids, *tokens]])
                logits = (
                    model(input_features=features(samples), decoder_input_ids=ids)
                    .logits[0, -1]
                    .clone()
                )
            logits[
                SUPPRESSED["suppress_tokens"]
                + ([] if tokens else SUPPRESSED["begin_suppress_tokens"])
            ] = -torch.inf
            tokens.append(int(logits.argmax()))
        assert output.outputs[0].token_ids == tokens


def test_a_recording_is_encoded_once(multilingual):
    """Two tasks on one recording: the second finds what the encoder made."""
    folder, _ = multilingual
    params = SamplingParams(temperature=0, max_tokens=4)
    tasks = [[START, 4, task, NO_TIMESTAMPS] for task in TASKS.values()]
    with LLM(str(folder), **OPTIONS) as llm:
        [first] = llm.generate(prompts(tasks[0])[:1], params, use_tqdm=False)
        allocated = counted(llm)
        llm.generate(prompts(tasks[1])[:1], params, use_tqdm=False)
        [again] = llm.generate(prompts(tasks[0])[:1], params, use_tqdm=False)
    assert allocated == []
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_bfloat16_runs(multilingual):
    folder, _ = multilingual
    with LLM(str(folder), dtype="bfloat16", **OPTIONS) as llm:
        outputs = llm.generate(
            prompts(), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
    assert all(output.error is None for output in outputs)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a text", "Whisper's encoder hears"),
        ({"audio": []}, "the audio is empty"),
        ({"audio": [0.0, float("nan")]}, "NaN or infinity"),
        ({"audio": [[0.0], [0.0]]}, "one axis"),
        ({"audio": [[0.0], []]}, "audio must be"),
        ({"audio": ["a"]}, "audio must be an array of numbers"),
        (
            {"audio": [0.0], "sampling_rate": 44100},
            "44100 samples a second, and the model hears 16000",
        ),
        ({"audio": np.zeros(480001)}, r"30.0 seconds, and the model hears 30 at a time"),
    ],
)
def test_bad_recordings_are_told_what_is_wrong(multilingual, prompt, message):
    folder, _ = multilingual
    with LLM(str(folder), **OPTIONS) as llm, pytest.raises(RequestError, match=message):
        llm.generate([{"encoder_prompt": prompt}], use_tqdm=False)


def test_integers_are_scaled(multilingual):
    folder, _ = multilingual
    tone = recordings()[0]
    with LLM(str(folder), **OPTIONS) as llm:
        given = [
            {"encoder_prompt": {"audio": samples}}
            for samples in (tone, (tone * 32767).round().astype(np.int16))
        ]
        one, other = llm.generate(
            given, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_a_window_has_one_length(multilingual):
    folder, _ = multilingual
    with pytest.raises(ConfigError, match="the encoder has 1500 positions"):
        LLM(str(folder), max_encoder_len=1600, **OPTIONS)
    with pytest.raises(ConfigError, match="1500"):
        LLM(str(folder), max_encoder_len=100, **OPTIONS)


def test_english_alone_and_a_language_of_the_checkpoint(make):
    cases = [
        ({"no_timestamps_token_id": NO_TIMESTAMPS}, [START, NO_TIMESTAMPS]),
        (
            {"lang_to_id": LANGUAGES, "task_to_id": TASKS, "language": "de", "task": "translate"},
            [START, 5, 8],
        ),
        ({"lang_to_id": LANGUAGES, "task_to_id": TASKS, "language": "<|de|>"}, [START, 5, 7]),
        # Checkpoints that are trained further have this form.
        ({"lang_to_id": LANGUAGES, "task_to_id": TASKS, "language": "German"}, [START, 5, 7]),
    ]
    for generation, expected in cases:
        folder, _ = make(**generation)
        with LLM(str(folder), **OPTIONS) as llm:
            [output] = llm.generate(prompts()[:1], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.prompt_token_ids == expected


@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.parametrize(
    ("forced", "expected"),
    [
        ([[1, 5], [2, 8]], [5, 8, NO_TIMESTAMPS]),
        ([[1, 5], [2, 7], [3, NO_TIMESTAMPS]], [5, 7, NO_TIMESTAMPS]),
        ([[1, NO_TIMESTAMPS]], [NO_TIMESTAMPS]),
        # Its language is to be detected.
        ([[1, None], [2, 8]], [None, 8, NO_TIMESTAMPS]),
    ],
)
def test_forced_decoder_ids_are_those_of_transformers(make, forced, expected, in_config):
    """The first checkpoints, and those made of them, name language and task in this way."""
    knows = (
        {}
        if len(forced) == 1
        else {"lang_to_id": LANGUAGES, "task_to_id": TASKS, "is_multilingual": True}
    )
    stated = {"no_timestamps_token_id": NO_TIMESTAMPS, **knows}
    folder, model = make(**stated, **({} if in_config else {"forced_decoder_ids": forced}))
    if in_config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "forced_decoder_ids": forced}))
    generation = transformers.GenerationConfig(
        **IDS, **stated, return_timestamps=False, forced_decoder_ids=copy.deepcopy(forced)
    )
    heard = features(recordings()[0])
    theirs = model._retrieve_init_tokens(
        heard,
        1,
        generation_config=generation,
        config=model.config,
        num_segment_frames=3000,
        kwargs={},
    )
    with LLM(str(folder), **OPTIONS) as llm:
        [output] = llm.generate(prompts()[:1], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == [
        START,
        *(4 if token is None else token for token in expected),
    ]
    told = [
        None if token in LANGUAGES.values() and forced[0][1] is None else token
        for token in theirs[0].tolist()
    ]
    assert told == [START, *expected]


@pytest.mark.parametrize("forced", [5, [5], [[2, 5]], [[1, "en"]], [[1, 5, 6]]])
def test_forced_decoder_ids_that_mean_nothing(make, forced):
    folder, _ = make(lang_to_id=LANGUAGES, task_to_id=TASKS, forced_decoder_ids=forced)
    with (
        LLM(str(folder), **OPTIONS) as llm,
        pytest.raises(CheckpointError, match="forced_decoder_ids must be"),
    ):
        llm.generate(prompts()[:1], use_tqdm=False)


def test_a_language_of_the_checkpoint_that_it_does_not_know(make):
    folder, _ = make(lang_to_id=LANGUAGES, task_to_id=TASKS, language="klingon")
    with (
        LLM(str(folder), **OPTIONS) as llm,
        pytest.raises(CheckpointError, match="language 'klingon' is not one of its lang_to_id"),
    ):
        llm.generate(prompts()[:1], use_tqdm=False)


def test_names_of_languages_are_those_of_transformers():
    theirs = transformers.models.whisper.tokenization_whisper.TO_LANGUAGE_CODE
    assert theirs == CODES
    assert {code_of(code) for code in theirs.values()} == set(theirs.values())
    assert [code_of(name) for name in ("de", "<|de|>", "German", "haitian creole", "klingon")] == [
        "de",
        "de",
        "de",
        "ht",
        "klingon",
    ]
