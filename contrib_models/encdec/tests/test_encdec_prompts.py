"""Tokens with which decoders begin and end, and the errors of bad prompts."""

import pytest
import torch
import transformers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError, ContextLengthError, RequestError
from toolkit_lm_devkit import randomize, write_tokenizer

VOCAB_SIZE = 272
BEGIN = 0
END = 1
START = 2
SIZES = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 32,
}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
IDS = {
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": 3,
    "decoder_start_token_id": START,
}
OPTIONS = {"device": "cpu", "max_model_len": 40, "max_num_seqs": 8, "num_kv_blocks": 100}
ENCODER = {"prompt_token_ids": [5, 80, 7, 200, 6]}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function of a generation config -> folder, transformers' model."""

    def make(architecture=transformers.BartForConditionalGeneration, **generation):
        config = architecture.config_class(
            vocab_size=VOCAB_SIZE, max_position_embeddings=48, **SIZES, **HEADS, **IDS
        )
        model = architecture(config).eval()
        randomize(model)
        for module in model.modules():
            if hasattr(module, "create_weight"):
                # Positions that are computed are not in the file.
                module.weight.data.copy_(module.create_weight())
        for name, value in {**IDS, "forced_eos_token_id": None, **generation}.items():
            setattr(model.generation_config, name, value)
        folder = tmp_path_factory.mktemp("forced")
        model.save_pretrained(folder)
        write_tokenizer(folder, VOCAB_SIZE)
        return folder, model

    return make


def test_default_and_explicit_decoder_prompts(make):
    folder, _ = make()
    given = [[START, BEGIN, 51, 178, END], [51, 178], [START]]
    prompts = [
        "a text",
        *(
            {"encoder_prompt": "a text", "decoder_prompt": {"prompt_token_ids": ids}}
            for ids in given
        ),
    ]
    prompts.append({"encoder_prompt": {"prompt": "a text"}, "decoder_prompt": "so"})
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    text = outputs[0].encoder_prompt_token_ids
    assert [output.encoder_prompt_token_ids for output in outputs] == [text] * 5
    assert [output.encoder_prompt for output in outputs] == ["a text"] * 5
    decoder = [output.prompt_token_ids for output in outputs]
    assert decoder[:4] == [[START], [START, BEGIN, 51, 178, END], [START, 51, 178], [START]]
    assert decoder[4][0] == START
    assert [output.prompt for output in outputs] == [None, None, None, None, "so"]


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "generation",
    [
        {"forced_bos_token_id": 9},
        {"forced_eos_token_id": END},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 11},
    ],
)
def test_forced_tokens_are_those_of_transformers(make, generation, num_beams):
    folder, model = make(**generation)
    params = SamplingParams(temperature=0, max_tokens=6)
    if num_beams > 1:
        params = SamplingParams(
            use_beam_search=True, beam_width=num_beams, n=1, max_tokens=6, length_penalty=1.0
        )
    starts = [[START], [START, 30]]
    with LLM(str(folder), **OPTIONS) as llm:
        prompts = [
            {"encoder_prompt": ENCODER, "decoder_prompt": {"prompt_token_ids": ids}}
            for ids in starts
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for start, output in zip(starts, outputs, strict=True):
        found = model.generate(
            torch.tensor([ENCODER["prompt_token_ids"]]),
            decoder_input_ids=torch.tensor([start]),
            max_new_tokens=6,
            num_beams=num_beams,
        )
        expected = found[0, len(start) :].tolist()
        expected = expected[: expected.index(END) + 1] if END in expected else expected
        assert output.outputs[0].token_ids == expected
        assert (expected[0] == 9) == ("forced_bos_token_id" in generation and start == [START])


@pytest.mark.parametrize("num_beams", [1, 4])
def test_bad_words_of_the_checkpoint_are_not_drawn(make, num_beams):
    """Marian's checkpoints name their padding, which has the logit 0."""
    params = SamplingParams(temperature=0, max_tokens=6)
    if num_beams > 1:
        params = SamplingParams(use_beam_search=True, beam_width=num_beams, n=1, max_tokens=6)

    def generate(**generation):
        folder, model = make(transformers.MarianMTModel, **generation)
        with LLM(str(folder), **OPTIONS) as llm:
            return model, llm.generate([ENCODER], params, use_tqdm=False)[0].outputs[0].token_ids

    drawn = generate()[1]
    bad_words = [[drawn[0]], drawn[2:4], [END]]
    model, found = generate(bad_words_ids=bad_words)
    encoder = torch.tensor([ENCODER["prompt_token_ids"]])
    expected = model.generate(encoder, max_new_tokens=6, num_beams=num_beams)[0, 1:].tolist()
    assert found == (expected[: expected.index(END) + 1] if END in expected else expected)
    assert found != drawn


def test_the_language_of_mbart(make):
    folder, _ = make(transformers.MBartForConditionalGeneration, forced_bos_token_id=17)
    with LLM(str(folder), **OPTIONS) as llm:
        [output] = llm.generate("a text", SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.prompt_token_ids == [START, 17]


def test_bad_prompts_are_told_what_is_wrong(make):
    folder, _ = make()
    params = SamplingParams(max_tokens=2)
    with LLM(str(folder), max_encoder_len=8, **OPTIONS) as llm:
        with pytest.raises(
            ContextLengthError,
            match=r"encoder prompt has 9 tokens.* 8 tokens for its encoder \(max_encoder_len\)",
        ):
            llm.generate([{"prompt_token_ids": [5] * 9}], params, use_tqdm=False)
        for empty in ({"prompt_token_ids": []}, "", {"encoder_prompt": ""}):
            with pytest.raises(RequestError, match="empty"):
                llm.generate([empty], params, use_tqdm=False)
        with pytest.raises(RequestError, match="needs an encoder prompt beside it"):
            llm.generate([{"decoder_prompt": "b"}], params, use_tqdm=False)
        with pytest.raises(RequestError, match="unknown key 'prompt' beside encoder_prompt"):
            llm.generate([{"encoder_prompt": "a", "prompt": "b"}], params, use_tqdm=False)
        with pytest.raises(ContextLengthError, match="maximum context length is 40"):
            llm.generate(
                [{"encoder_prompt": "a", "decoder_prompt": {"prompt_token_ids": [5] * 40}}],
                params,
                use_tqdm=False,
            )
        [cut] = llm.generate(
            [{"prompt_token_ids": [5, 6, 7] * 4}],
            params.replace(truncate_prompt_tokens=-1),
            use_tqdm=False,
        )
    assert cut.encoder_prompt_token_ids == [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.mark.parametrize(
    "asked",
    [
        {"convert": "classify"},
        {"runner": "pooling"},
        {"extra_tasks": ["embed"]},
        {"runner": "generate", "convert": "embed"},
    ],
)
def test_it_is_not_converted(make, asked):
    folder, _ = make()
    with pytest.raises(ConfigError, match="is an encoder-decoder model"):
        LLM(str(folder), **OPTIONS, **asked)


def test_a_model_without_an_encoder_takes_one_prompt():
    asked = [{"encoder_prompt": "a", "decoder_prompt": "b"}]
    only = "only encoder-decoder models take an encoder prompt"
    with (
        LLM("tiny", max_model_len=64, num_kv_blocks=32) as llm,
        pytest.raises(RequestError, match=only),
    ):
        llm.generate(asked, use_tqdm=False)
    with pytest.raises(ConfigError, match="max_encoder_len is for encoder-decoder models"):
        LLM("tiny", max_encoder_len=8)


def test_conversations_are_read_turn_by_turn(make):
    folder, _ = make()
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
    )
    messages = [
        {"role": "system", "content": "Shorten:"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "three"}]},
    ]
    with LLM(str(folder), **OPTIONS) as llm:
        [output] = llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False)
        [text] = llm.generate("Shorten: three", SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.encoder_prompt_token_ids == text.encoder_prompt_token_ids
