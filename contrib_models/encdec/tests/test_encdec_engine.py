"""Every family through the whole engine: what it draws, finds and forgets is what transformers
makes of the same prompts."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from encdec_families import VARIANTS, make_model
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import LoadEvent, RequestEvent, StepEvent
from toolkit_lm.plugin import hookimpl
from toolkit_lm_devkit import assert_same_logits, assert_same_tokens, write_tokenizer

VOCAB_SIZE = 272
"""Enough for the tokenizer of the kit."""
LENGTHS = (5, 17, 40, 3, 55, 33, 1, 21)
"""Lengths of encoder prompts."""
ROOMY = {
    "device": "cpu",
    "block_size": 16,
    "max_model_len": 64,
    "max_encoder_len": 64,
    "num_kv_blocks": 400,
    "max_num_seqs": 16,
    "max_logprobs": VOCAB_SIZE,
}
# All sequences of a prompt fit, but not of all prompts.
TIGHT = {**ROOMY, "num_kv_blocks": 22}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=VOCAB_SIZE)
CASES = [(architecture, next(iter(variants))) for architecture, variants in VARIANTS.items()]
ALL_CASES = [
    (architecture, variant) for architecture, variants in VARIANTS.items() for variant in variants
]
ONE_OF_EACH = [
    ("BartForConditionalGeneration", "shared"),
    ("T5ForConditionalGeneration", "first release"),
]


class Watch:
    """A plugin that remembers the engine's events."""

    name = "watch"

    def __init__(self):
        self.events = []

    @hookimpl
    def toolkit_event(self, event):
        self.events.append(event)

    @property
    def num_preempted(self):
        return sum(
            isinstance(event, RequestEvent) and event.kind == "preempted" for event in self.events
        )

    def loads(self, name):
        return [getattr(event, name) for event in self.events if isinstance(event, LoadEvent)]

    @property
    def steps(self):
        """Tokens of each step."""
        return [event.num_tokens for event in self.events if isinstance(event, StepEvent)]


@dataclass
class Subject:
    """A checkpoint, and the model of transformers."""

    folder: Any
    model: Any

    @property
    def vocab_size(self):
        return self.model.get_output_embeddings().weight.shape[0]

    def prompts(self, lengths=LENGTHS):
        """Random token ids."""
        generator = torch.Generator().manual_seed(7)
        return [
            torch.randint(5, self.vocab_size, (n,), generator=generator).tolist() for n in lengths
        ]

    def logprobs(self, output, completion):
        """[output tokens, V] along what the engine has drawn."""
        prompt = output.prompt_token_ids
        tokens = list(completion.token_ids)
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.tensor([output.encoder_prompt_token_ids]),
                decoder_input_ids=torch.tensor([prompt + tokens]),
            )
        return out.logits[0, len(prompt) - 1 : -1].log_softmax(-1)

    def check(self, outputs, *, greedy=True):
        """The log probabilities of all tokens, and greedy tokens, are those of transformers."""
        for output in outputs:
            assert output.error is None
            for completion in output.outputs:
                reference = self.logprobs(output, completion)
                ours = [
                    [entries[token].logprob for token in range(self.vocab_size)]
                    for entries in completion.logprobs
                ]
                assert_same_logits(torch.tensor(ours), reference)
                if greedy:
                    assert_same_tokens(completion.token_ids, reference)


def with_vocabulary(fields):
    """Fields with the tokenizer's vocabulary size; a decoder's own vocabulary is smaller."""
    sizes = {"vocab_size": VOCAB_SIZE} | (
        {"decoder_vocab_size": VOCAB_SIZE - 8} if "decoder_vocab_size" in fields else {}
    )
    sides = {
        key: {**fields[key], "vocab_size": VOCAB_SIZE}
        for key in ("encoder", "decoder")
        if key in fields
    }
    return {**fields, **sizes, **sides}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function (architecture, variant) -> Subject."""
    made = {}

    def make(architecture, variant):
        if (architecture, variant) not in made:
            folder = tmp_path_factory.mktemp(architecture)
            model = make_model(architecture, with_vocabulary(VARIANTS[architecture][variant]))
            model.save_pretrained(folder)
            write_tokenizer(folder, VOCAB_SIZE)
            made[architecture, variant] = Subject(folder, model)
        return made[architecture, variant]

    return make


def generate(subject, prompts, params, *plugins, **options):
    """`prompts`: token ids of encoder prompts, or explicit prompts."""
    given = [
        {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt for prompt in prompts
    ]
    with LLM(str(subject.folder), plugins=list(plugins), **{**ROOMY, **options}) as llm:
        return llm.generate(given, params, use_tqdm=False)


@pytest.mark.parametrize(("architecture", "variant"), ALL_CASES)
def test_greedy(make, architecture, variant):
    subject = make(architecture, variant)
    # Encoders in several steps, beside decoders.
    outputs = generate(subject, subject.prompts(), GREEDY, max_num_batched_tokens=70)
    subject.check(outputs)
    assert all(output.prompt_token_ids == [3] for output in outputs)


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_greedy_of_the_reference_backend(make, architecture, variant):
    subject = make(architecture, variant)
    subject.check(
        generate(subject, subject.prompts(), GREEDY, attention_backend="sdpa", block_size=4)
    )


@pytest.mark.parametrize(("architecture", "variant"), CASES)
@pytest.mark.parametrize("length_penalty", [0.0, 2.0])
def test_beam_search(make, architecture, variant, length_penalty):
    subject = make(architecture, variant)
    width = 4
    params = SamplingParams(
        use_beam_search=True, beam_width=width, n=2, length_penalty=length_penalty, max_tokens=12
    )
    prompts = subject.prompts((9, 33, 1, 50))
    # An end that does come up.
    ends = [
        output.outputs[0].token_ids[3]
        for output in generate(subject, prompts, params.replace(ignore_eos=True))
    ]
    outputs = generate(
        subject, prompts, [params.replace(stop_token_ids=[end], ignore_eos=True) for end in ends]
    )
    for output, end in zip(outputs, ends, strict=True):
        found = subject.model.generate(
            torch.tensor([output.encoder_prompt_token_ids]),
            decoder_input_ids=torch.tensor([output.prompt_token_ids]),
            num_beams=width,
            num_return_sequences=2,
            length_penalty=length_penalty,
            max_new_tokens=12,
            eos_token_id=end,
            do_sample=False,
            # The cache of transformers 5 fails where a decoder has more layers than its encoder.
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [
            until(row, end) for row in found.sequences[:, len(output.prompt_token_ids) :].tolist()
        ]
        assert [one.token_ids for one in output.outputs] == rows
        assert [one.score for one in output.outputs] == pytest.approx(
            found.sequences_scores.tolist(), abs=1e-3
        )


def until(tokens, end):
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token == end), tokens)


@pytest.mark.parametrize(("architecture", "variant"), ONE_OF_EACH)
def test_several_samples_share_an_encoder(make, architecture, variant):
    subject = make(architecture, variant)
    watch = Watch()
    params = SamplingParams(
        temperature=1, seed=5, n=4, max_tokens=12, ignore_eos=True, logprobs=VOCAB_SIZE
    )
    prompts = subject.prompts()
    together = generate(subject, prompts, params, watch)
    subject.check(together, greedy=False)
    assert all(len({tuple(one.token_ids) for one in output.outputs}) == 4 for output in together)
    # An encoder is computed once for its four samples.
    assert sum(watch.steps) - len(LENGTHS) * 4 * params.max_tokens < 2 * sum(LENGTHS)
    alone = [generate(subject, [prompt], params)[0] for prompt in prompts[:2]]
    for ours, theirs in zip(together, alone, strict=False):
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("architecture", "variant"), ONE_OF_EACH)
def test_preemption(make, architecture, variant, mode, caching):
    subject = make(architecture, variant)
    watch = Watch()
    options = {
        "preemption_mode": mode,
        "swap_memory": "8MiB",
        "enable_prefix_caching": caching,
        **TIGHT,
    }
    outputs = generate(subject, subject.prompts(), GREEDY.replace(n=2), watch, **options)
    subject.check(outputs)
    assert watch.num_preempted > 0
    assert (max(watch.loads("num_used_host_blocks")) > 0) == (mode == "swap")
    assert (watch.loads("num_used_blocks")[-1], watch.loads("num_used_host_blocks")[-1]) == (0, 0)


def both(encoder, decoder):
    return {
        "encoder_prompt": {"prompt_token_ids": encoder},
        "decoder_prompt": {"prompt_token_ids": decoder},
    }


@pytest.mark.parametrize(("architecture", "variant"), ONE_OF_EACH)
def test_decoder_prompts_in_chunks(make, architecture, variant):
    subject = make(architecture, variant)
    watch = Watch()
    encoders = subject.prompts((5, 17, 40, 3))
    decoders = subject.prompts((39, 2, 38, 30))
    outputs = generate(
        subject,
        [both(*prompt) for prompt in zip(encoders, decoders, strict=True)],
        GREEDY.replace(max_tokens=12),
        watch,
        max_encoder_len=40,
        max_num_batched_tokens=41,
    )
    subject.check(outputs)
    assert [output.prompt_token_ids for output in outputs] == [
        [3, *decoder] for decoder in decoders
    ]
    assert max(watch.steps) <= 41


@pytest.mark.parametrize(("architecture", "variant"), ONE_OF_EACH)
def test_a_cached_decoder_prompt_belongs_to_its_encoder(make, architecture, variant):
    subject = make(architecture, variant)
    first, second = subject.prompts((20, 20))
    (decoder,) = subject.prompts((39,))
    params = GREEDY.replace(max_tokens=6)
    with LLM(str(subject.folder), **ROOMY) as llm:
        outputs = [
            llm.generate(both(encoder, decoder), params, use_tqdm=False)[0]
            for encoder in (first, second, first)
        ]
    subject.check(outputs)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 32]
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids


@pytest.mark.parametrize(("architecture", "variant"), ONE_OF_EACH)
def test_texts(make, architecture, variant):
    subject = make(architecture, variant)
    outputs = generate(
        subject,
        ["a text", {"encoder_prompt": "a text", "decoder_prompt": "An"}],
        GREEDY.replace(max_tokens=6),
    )
    subject.check(outputs)
    assert [output.encoder_prompt for output in outputs] == ["a text", "a text"]
    assert (
        outputs[1].prompt_token_ids[: len(outputs[0].prompt_token_ids)]
        == outputs[0].prompt_token_ids
    )
    assert len(outputs[1].prompt_token_ids) == len(outputs[0].prompt_token_ids) + 2
