"""PaliGemma through renderer and engine: tokens are those that transformers' processor and model
make of the same pictures. A prompt sees all of itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from toolkit_lm.model import Absent
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import (
    MultimodalConformance,
    assert_bf16_error,
    checkpoint_config,
    load_checkpoint,
    randomize,
    run_ranks,
)
from transformers import (
    Gemma2Config,
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from vision_checkpoints import Subject, drawings, write_vision_tokenizer
from vision_families import IMAGE, TEXT, TOWER, VOCAB
from vision_harness import logits_of_prompts, prompt_of

MOST = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT_FIELDS = {**TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 3}


def made(window):
    """`window`: Gemma 2's; None: a model with Gemma."""
    text = (
        Gemma2Config(**TEXT_FIELDS, sliding_window=window)
        if window
        else GemmaConfig(**TEXT, head_dim=16)
    )
    model = PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            vision_config=SiglipVisionConfig(
                **TOWER, image_size=28, patch_size=14, vision_use_head=False
            ),
            text_config=text,
            image_token_index=IMAGE,
            projection_dim=64,
            vocab_size=VOCAB,
            hidden_size=64,
        )
    )
    randomize(model)
    return model.eval()


class PaliSubject(Subject):
    """A checkpoint, and what transformers makes of it."""

    mark = "<image>"

    def inputs(self, text, images):
        if not images:
            return dict(self.processor.tokenizer(text, return_tensors="pt"))
        found = self.processor(
            text=text, images=images, return_tensors="np", input_data_format="channels_last"
        )
        return {name: torch.from_numpy(array) for name, array in found.items() if name != "labels"}


def make_pali(folder, window):
    model = made(window)
    model.save_pretrained(folder)
    tokenizer = write_vision_tokenizer(folder)
    size = {"height": 28, "width": 28}
    images = SiglipImageProcessorPil(size=size)
    images.image_seq_length = 4
    images.save_pretrained(folder)
    return PaliSubject(folder, model, PaliGemmaProcessor(images, tokenizer), f"window {window}")


@pytest.fixture(scope="module", params=[62, pytest.param(4096, marks=pytest.mark.nightly)])
def reference(request, tmp_path_factory):
    return make_pali(tmp_path_factory.mktemp("pali"), request.param)


class TestPaliGemma(MultimodalConformance):
    modality = "image"

    def engine(self, reference, **options):
        # A step takes a prompt whole.
        budget = max(options.pop("max_num_batched_tokens", 192), 64)
        return super().engine(reference, max_num_batched_tokens=budget, **options)

    def num_scarce_blocks(self, reference):
        # Layers of two kinds have blocks of their own.
        return 78

    def test_a_prefix_that_ends_inside_an_item(self, reference):
        """What begins alike shares nothing, since all depends on the end. What is equal does."""
        a, b = reference.items(2, seed=5)
        with self.engine(reference, block_size=8) as llm:
            for items, ending, is_known in (
                ([a, b], " x", False),
                ([a, b], " y", False),
                ([a, a], " x", False),
                ([a, b], " x", True),
                ([a, b], " y", True),
            ):
                text = f"{reference.mark} and {reference.mark}{ending}"
                [num_cached] = self.check(llm, reference, [(text, items)])
                assert (num_cached > 0) == is_known
            # Text alone is read in one direction.
            texts = [("What is this, and that, and that, and the other one?", [])]
            self.check(llm, reference, texts)
            assert self.check(llm, reference, texts)[0] > 0


def test_gemma_of_the_first_paligemma(tmp_path):
    subject = make_pali(tmp_path, None)
    kit = TestPaliGemma()
    images = subject.items(2)
    asked = [("<image> and", images[:1]), ("is <image> or <image> it?", images)]
    with kit.engine(subject) as llm:
        kit.check(llm, subject, asked)
        assert all(kit.check(llm, subject, asked[1:]))


def test_a_prompt_that_no_step_has_room_for(reference):
    options = {**TestPaliGemma.engine_options, "max_num_batched_tokens": 32}
    with (
        LLM(str(reference.folder), **options) as llm,
        pytest.raises(ToolkitError, match=r"tokens, and the model needs them all in one step"),
    ):
        llm.generate(
            [{"prompt": f"{'o ' * 40}<image>", "multi_modal_data": {"image": drawings(1)}}]
        )


def test_what_is_complete_stays_as_it_is(reference):
    tokens = [5, IMAGE, 0, 12, 202]
    plugins = Plugins.load()
    rules = plugins.models.load_multimodal("PaliGemmaForConditionalGeneration")(
        checkpoint_config(reference.folder)
    )
    begin = rules.begin
    completed = list(rules.complete([begin, *tokens]))
    assert completed[:3] == [5, IMAGE, begin] and list(rules.complete(completed)) == completed
    assert list(rules.complete([begin, 5])) == [begin, 5]


def ours(folder, **options):
    plugins = Plugins.load()
    name = "PaliGemmaForConditionalGeneration"
    model = load_checkpoint(plugins.models.load(name), folder, plugins=plugins, **options)
    return model, plugins.models.load_multimodal(name)(checkpoint_config(folder))


def prompts_of(rules):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1, 3, 28, 28, generator=generator)
    return [prompt_of(rules, a, [11, 12, 13]), prompt_of(rules, a, b, [11, 12, 13, 14, 15])]


@torch.inference_mode()
def their_logits(theirs, prompt):
    ids = torch.tensor([prompt.token_ids])
    found = theirs(
        input_ids=ids,
        pixel_values=torch.cat(prompt.pictures).to(theirs.dtype),
        token_type_ids=torch.zeros_like(ids),
    )
    return found.logits[0].float()


def whole(monkeypatch):
    """Has all of a prompt be one span, as PrefixPart does."""
    monkeypatch.setattr(
        "vision_harness.spans_of",
        lambda prompt: np.full((len(prompt.token_ids), 2), (0, len(prompt.token_ids)), np.int32),
    )


def test_ranks_and_stages(reference, monkeypatch):
    whole(monkeypatch)
    model, rules = ours(reference.folder)
    prompts = prompts_of(rules)
    expected = [their_logits(reference.model, prompt) for prompt in prompts]
    for prompt, reference_logits in zip(prompts, expected, strict=True):
        (found,) = logits_of_prompts(model, [prompt])
        assert (found - reference_logits).abs().max() <= MOST * reference_logits.abs().max()

    def compute(rank):
        part = load_checkpoint(
            type(model),
            reference.folder,
            rank=rank,
            plugins=Plugins.load(),
            tensor_parallel_size=2,
        )
        return logits_of_prompts(part, prompts[:1])[0]

    for found in run_ranks(compute, 2):
        assert (found - expected[0]).abs().max() <= MOST * expected[0].abs().max()
    first, last = (
        load_checkpoint(
            type(model),
            reference.folder,
            rank=rank,
            plugins=Plugins.load(),
            pipeline_parallel_size=2,
        )
        for rank in range(2)
    )
    assert isinstance(last.encoder, Absent)
    for stages, alone in zip(
        logits_of_prompts(first, prompts, last), logits_of_prompts(model, prompts), strict=True
    ):
        assert torch.equal(stages, alone)


def test_bfloat16(reference, monkeypatch):
    whole(monkeypatch)
    model, rules = ours(reference.folder, dtype="bfloat16")
    prompts = prompts_of(rules)
    exact = [their_logits(reference.model, prompt) for prompt in prompts]
    half = type(reference.model).from_pretrained(reference.folder, dtype=torch.bfloat16).eval()
    found = logits_of_prompts(model, prompts)
    assert_bf16_error(found, [their_logits(half, prompt) for prompt in prompts], exact)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"projection_dim": 32}, "'projection_dim' 32 must be the hidden size"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "must be of a SigLIP model"),
    ],
)
def test_configs_that_describe_no_model(fields, reason, tmp_path):
    made(9).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ToolkitError, match=reason):
        ours(tmp_path)
