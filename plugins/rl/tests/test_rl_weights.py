"""New weights in place: what an engine gives is what one of the new checkpoint gives."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import CheckpointError, RequestError, ToolkitError
from toolkit_lm.outputs import WeightVersionSpan
from toolkit_lm_devkit import randomize
from toolkit_lm_rl.control import Control

MODELS = Path(__file__).parents[3] / "contrib_models"
PROMPTS = [{"prompt_token_ids": [(3 * k) % 90 + 5 for k in range(n)]} for n in (9, 20)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
ENGINE = {
    "max_model_len": 64,
    "num_kv_blocks": 48,
    "block_size": 16,
    "dtype": "float32",
    "renderer": "tokens",
}


def answers(llm):
    return [
        (
            output.outputs[0].token_ids,
            [
                {token: found.logprob for token, found in place.items()}
                for place in output.outputs[0].logprobs
            ],
        )
        for output in llm.generate(PROMPTS, GREEDY)
    ]


def expected(folder, **options):
    with LLM(str(folder), **{**ENGINE, **options}) as llm:
        return answers(llm)


def tensors(folder):
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def check(folder, **options):
    """Weights that were changed compute as if they had been loaded, also after a sleep."""
    wanted = expected(folder / "new", **options)
    with LLM(str(folder / "old"), **{**ENGINE, **options}) as llm:
        assert answers(llm) != wanted
        control = Control(llm)
        assert control.load_weights(tensors(folder / "new").items()) == "1"
        assert answers(llm) == wanted
        for keep in (False, True, True):
            assert control.sleep(2, keep=keep) is keep
            control.wake_up()
            assert answers(llm) == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "cpu", "dtype": "bfloat16"},
        {"kernels": "torch"},
        {"optimization_level": 1, "compilation_config": {"backend": "eager"}},
        pytest.param({"model_impl": "transformers"}, marks=pytest.mark.nightly),
        pytest.param({"engine_process": True}, marks=pytest.mark.nightly),
    ],
    ids=lambda options: " ".join(map(str, options.values()))[:24],
)
def test_weights_change_in_place(policies, options):
    check(policies, **options)


FAMILIES = [
    ("moe", "moe_families", "qwen3_moe", "4 of 8"),
    ("deepseek", "deepseek_families", "DeepseekV3ForCausalLM", None),
    ("hybrid", "hybrid_families", "JambaForCausalLM", None),
    ("hybrid", "hybrid_families", "RecurrentGemmaForCausalLM", None),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (
            ("moe", "moe_families", "gpt_oss", None),
            ("moe", "moe_families", "gemma4", None),
            ("deepseek", "deepseek_families", "KimiLinearForCausalLM", None),
            ("hybrid", "hybrid_families", "Qwen3_5MoeForCausalLM", None),
            ("hybrid", "hybrid_families", "Zamba2ForCausalLM", None),
            ("decoder", "decoder_families", "Gemma3ForCausalLM", None),
            ("decoder", "decoder_families", "GPT2LMHeadModel", None),
        )
    ),
]


@pytest.mark.parametrize(("folder", "module", "family", "variant"), FAMILIES)
def test_each_kind_of_family(folder, module, family, variant, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(MODELS / folder / "tests"))
    made = importlib.import_module(module)
    known = getattr(made, "FAMILIES", None) or made.VARIANTS
    found = known[family]
    make, variants = found if isinstance(found, tuple) else (None, found)
    fields = variants[variant or next(iter(variants))]
    for name, seed in (("old", 0), ("new", 7)):
        if hasattr(made, "MAKERS"):
            model = made.MAKERS[family](**fields)
        else:
            model = made.make_model(family, fields) if make is None else make(**fields)
        randomize(model.eval(), seed)
        model.save_pretrained(tmp_path / name)
    check(tmp_path)


def test_some_weights_of_several_updates(policies, tmp_path):
    """What is not given stays as the last update left it."""
    old = tensors(policies / "old")
    new = tensors(policies / "new")
    names = sorted(new)
    parts = [names[::2], names[1::2]]
    with LLM(str(policies / "old"), **ENGINE) as llm:
        control = Control(llm)
        assert control.weight_version == ""
        for count, part in enumerate(parts):
            folder = tmp_path / str(count)
            folder.mkdir()
            mixed = old | {name: new[name] for name in part}
            if count:
                mixed = new
            save_file(mixed, folder / "model.safetensors")
            (folder / "config.json").write_text((policies / "old" / "config.json").read_text())
            version = control.load_weights(((name, new[name]) for name in part), f"step {count}")
            assert version == control.weight_version == f"step {count}"
            assert answers(llm) == expected(folder)


def test_files_and_folders(policies, tmp_path):
    with LLM(str(policies / "old"), **ENGINE) as llm:
        control = Control(llm)
        assert control.update_weights(str(policies / "new")) == "1"
        wanted = answers(llm)
        assert wanted == expected(policies / "new")
        file = tmp_path / "some.safetensors"
        save_file(tensors(policies / "old"), file)
        assert control.update_weights(str(file)) == "2"
        before = expected(policies / "old")
        assert answers(llm) == before
        # The trainer writes its next weights into the same file.
        file.write_bytes(b"")
        control.sleep(2)
        control.wake_up()
        assert answers(llm) == before


def test_what_is_wrong_changes_nothing(policies, tmp_path):
    with LLM(str(policies / "old"), **ENGINE) as llm:
        before = answers(llm)
        control = Control(llm)
        embed = torch.zeros(272, 64)
        for weights, error, text in (
            ({"model.embed.weight": embed}, CheckpointError, "unexpected: model.embed.weight"),
            ({"model.embed_tokens.weight": embed[:5]}, CheckpointError, r"not \[272, 64\]"),
            ({}, RequestError, "no weights were given"),
        ):
            with pytest.raises(error, match=text):
                control.load_weights(weights.items())
        (tmp_path / "broken.safetensors").write_bytes(b"12345678")
        for path, text in (
            (tmp_path / "nowhere", "cannot be read"),
            (tmp_path / "broken.safetensors", "cannot be read"),
            (policies, "has no files"),
        ):
            with pytest.raises(RequestError, match=text):
                control.update_weights(str(path))

        def failing():
            yield "lm_head.weight", embed
            raise ValueError("the trainer has failed")

        with pytest.raises(ValueError, match="the trainer has failed"):
            control.load_weights(failing())
        with pytest.raises(RequestError, match="no weights were given"):
            control.load_weights([])
        assert control.weight_version == ""
        assert answers(llm) == before


def test_old_keys_and_values_are_not_read(policies):
    """Neither cached prefixes nor those of running requests, whose tokens stay."""
    ids = PROMPTS[1]["prompt_token_ids"]
    long = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(str(policies / "old"), **ENGINE) as llm:
        llm.generate([ids, ids], long)
        engine = llm.engine
        engine.add_request("kept", ids, long)
        got = []
        while len(got) < 4:
            for output in engine.step():
                got = output.outputs[0].token_ids
        begun = list(got)
        control = Control(llm)
        # `LLM` calls workers only between its own requests.
        called = [engine.call_workers("rl.stage", {"path": str(policies / "new")})]
        called.append(engine.call_workers("rl.change", {"version": "b"}))
        while engine.has_unfinished_requests():
            for output in engine.step():
                final = output
        assert all(call.result() for call in called)
        assert final.num_cached_tokens == 0 or final.outputs[0].token_ids[: len(begun)] == begun
        again = llm.generate([ids], long)[0]
        assert again.num_cached_tokens < len(ids)
        assert control.weight_version == "b"
    with LLM(str(policies / "new"), **ENGINE) as llm:
        rest = SamplingParams(temperature=0, max_tokens=10 - len(begun), ignore_eos=True)
        continued = llm.generate([[*ids, *begun]], rest)[0].outputs[0].token_ids
        assert final.outputs[0].token_ids == begun + continued
        assert final.outputs[0].weight_versions == [
            WeightVersionSpan("", 0, len(begun)),
            WeightVersionSpan("b", len(begun), 10),
        ]
        assert again.outputs[0].weight_versions == [WeightVersionSpan("b", 0, 10)]
        assert again.outputs[0].token_ids == llm.generate([ids], long)[0].outputs[0].token_ids


def test_adapters_keep_weights(policies, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(policies / "old")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path)
    plugin = {"lora": {"enabled": True, "modules": [f"a={tmp_path}"]}}
    options = {**ENGINE, "plugin_option": plugin}
    with LLM(str(policies / "old"), **options) as llm:
        before = answers(llm)
        with pytest.raises(ToolkitError, match="Start the engine without lora"):
            Control(llm).update_weights(str(policies / "new"))
        assert answers(llm) == before
