"""Adapters of models that read pictures: the tower, what joins it to the language model, and the
language model, as PEFT computes them."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from given_renderer import Given
from peft import LoraConfig, PeftModel, get_peft_model
from qwen_harness import VOCAB, arguments, picture, prompt_of, random_qwen, rules_of
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import write_tokenizer
from toolkit_lm_lora.front import LoRARequest
from toolkit_lm_whisper.features import LogMel
from transformers import WhisperConfig, WhisperForConditionalGeneration
from vision_checkpoints import drawings, make_subject

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
COUNT = 6
FORMS = {
    "all": {"target_modules": "all-linear"},
    "language": {"target_modules": r".*language_model.*(q_proj|down_proj)"},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
}
TOWERS = {
    "llava": {
        "tower": {"target_modules": r".*vision_tower.*(k_proj|fc2)"},
        "joining": {"target_modules": ["linear_1", "linear_2"]},
        "norms": {"target_modules": ["linear_1"], "modules_to_save": ["layer_norm1"]},
    },
    "qwen2_vl": {
        "tower": {"target_modules": r".*visual.blocks.*(qkv|proj|fc1)"},
        "joining": {"target_modules": r".*visual.merger.mlp\.[02]"},
    },
}
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=VOCAB)


def adapt(load, folder, seed, **fields):
    """Saves an adapter with random weights. Returns what PEFT loads."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model(load(), LoraConfig(r=4, lora_alpha=8, **fields))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if parameter.requires_grad:
                    noise = torch.randn_like(parameter) * 0.1
                    parameter.copy_(noise if "lora_" in name else parameter + noise)
        made.save_pretrained(folder)
        return PeftModel.from_pretrained(load(), folder).eval()


class Subject:
    """A checkpoint, prompts of it with pictures, and its adapters."""

    def __init__(self, folder, family):
        if family == "llava":
            made = make_subject(folder / "base", family)
            model = made.model
            self.folder = made.folder
            one, two = drawings(2, seed=3)
            texts = (f"see {made.mark} there", [one]), (f"{made.mark} or {made.mark}", [two, one])
            self.prompts = [
                {"prompt": text, "multi_modal_data": {"image": images}} for text, images in texts
            ]
            self.inputs = [made.inputs(text, images) for text, images in texts]
            self.options = {}
        else:
            model = random_qwen(family)
            self.folder = folder / "base"
            model.save_pretrained(self.folder)
            rules = rules_of(model)
            text = [11, 12, 13, 14]
            given = [
                prompt_of(rules, text, picture(4, 6), text),
                prompt_of(rules, picture(2, 2), text, picture(4, 6)),
            ]
            self.prompts = [
                {
                    "prompt_token_ids": prompt.token_ids,
                    "multi_modal_data": {"features": prompt.features},
                }
                for prompt in given
            ]
            self.inputs = [
                {"input_ids": torch.tensor([prompt.token_ids]), **arguments(prompt)}
                for prompt in given
            ]
            self.options = {"renderer": "given", "plugins": [Given()]}
        load = lambda: type(model).from_pretrained(self.folder)  # noqa: E731
        self.models = {None: load().eval()}
        for seed, (name, fields) in enumerate({**FORMS, **TOWERS[family]}.items()):
            self.models[name] = adapt(load, folder / name, seed, **fields)
        self.paths = {name: str(folder / name) for name in self.models if name}

    @torch.inference_mode()
    def logprobs(self, name, index, drawn):
        """[drawn, V], after each of the tokens."""
        inputs = dict(self.inputs[index])
        ids = inputs.pop("input_ids")
        length = ids.shape[1]
        for key in inputs.keys() & {"attention_mask", "mm_token_type_ids"}:
            value = int(key == "attention_mask")
            inputs[key] = torch.nn.functional.pad(inputs[key], (0, len(drawn)), value=value)
        model = self.models[name]
        for module in model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None
        logits = model(input_ids=torch.cat([ids, torch.tensor([drawn])], 1), **inputs).logits[0]
        return logits[length - 1 : -1].log_softmax(-1)

    def check(self, outputs, asked):
        for output, (name, index) in zip(outputs, asked, strict=True):
            assert not output.error, output.error
            [choice] = output.outputs
            expected = self.logprobs(name, index, list(choice.token_ids))
            for step, logprobs in zip(choice.logprobs, expected, strict=True):
                found = torch.tensor([step[token].logprob for token in range(len(logprobs))])
                assert (found - logprobs).abs().max() < 1e-3, (name, index)


@pytest.mark.parametrize(
    ("family", "ranks", "level"),
    [
        ("llava", 2, 0),
        ("qwen2_vl", 1, 1),
        pytest.param("llava", 1, 0, marks=pytest.mark.nightly),
        pytest.param("qwen2_vl", 1, 0, marks=pytest.mark.nightly),
    ],
)
def test_pictures_are_seen_through_adapters(tmp_path, family, ranks, level):
    """One picture is seen by all adapters in one step, and later by one that comes back to it."""
    subject = Subject(tmp_path, family)
    asked = [(name, index) for index in (0, 1) for name in subject.models]
    own = {"lora": {"enabled": True}}
    if ranks > 1:
        subject.options |= {"executor": "threads", "tensor_parallel_size": ranks}
        subject.options |= {"plugins": [THREADS]}
    if level:
        details = json.dumps({"backend": "eager"})
        subject.options |= {"optimization_level": level, "compilation_config": details}
    with LLM(
        str(subject.folder),
        dtype="float32",
        max_logprobs=VOCAB,
        max_model_len=192,
        num_kv_blocks=300,
        plugin_option=own,
        **subject.options,
    ) as llm:
        for turn in (asked, asked[:1], asked[::-1]):
            outputs = llm.generate(
                [subject.prompts[index] for _, index in turn],
                GREEDY,
                lora_request=[
                    LoRARequest(name, 1, subject.paths[name]) if name else None for name, _ in turn
                ],
                use_tqdm=False,
            )
            subject.check(outputs, turn)


@torch.inference_mode()
def test_sounds_are_heard_through_adapters(tmp_path):
    """Whisper's encoder, decoder and cross attention, beside requests without an adapter."""
    sides = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
    config = WhisperConfig(
        vocab_size=VOCAB,
        d_model=64,
        max_target_positions=64,
        decoder_start_token_id=3,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **{f"{side}_{key}": size for side in ("encoder", "decoder") for key, size in sides.items()},
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base", VOCAB)
    load = lambda: WhisperForConditionalGeneration.from_pretrained(tmp_path / "base")  # noqa: E731
    with torch.inference_mode(False):
        adapted = adapt(load, tmp_path / "a", 0, target_modules=["q_proj", "v_proj", "fc1"])
    samples = np.random.default_rng(3).normal(0, 0.1, 8000).astype(np.float32)
    prompt = {
        "encoder_prompt": {"audio": samples, "sampling_rate": 16000},
        "decoder_prompt": {"prompt_token_ids": [3, 60, 70]},
    }
    request = LoRARequest("a", 1, str(tmp_path / "a"))
    own = {"lora": {"enabled": True}}
    features = torch.from_numpy(LogMel(80)(samples))[None]
    with LLM(str(tmp_path / "base"), dtype="float32", max_logprobs=VOCAB, plugin_option=own) as llm:
        asked = [request, None, request]
        outputs = llm.generate([prompt] * 3, GREEDY, lora_request=asked, use_tqdm=False)
    for output, one in zip(outputs, asked, strict=True):
        assert not output.error, output.error
        [choice] = output.outputs
        ids = torch.tensor([[3, 60, 70, *choice.token_ids]])
        theirs = (adapted if one else model)(input_features=features, decoder_input_ids=ids)
        expected = theirs.logits[0, 2:-1].log_softmax(-1)
        for step, logprobs in zip(choice.logprobs, expected, strict=True):
            found = torch.tensor([step[token].logprob for token in range(VOCAB)])
            assert (found - logprobs).abs().max() < 1e-3
