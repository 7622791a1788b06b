"""`toolkit lora list` and `toolkit lora merge`: a merged checkpoint is what PEFT computes."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from lora_adapters import FAMILIES, FORMS, given, reference
from toolkit_lm import LLM
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli import run
from toolkit_lm_lora.merging import merge

_REFUSED = {
    # The layers have no biases of their own.
    "bias": r"no tensor of its own for .* \(bias\)",
    "invoked": "from alora_invocation_tokens on",
}


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("gpt2", marks=pytest.mark.nightly),
        pytest.param("mixtral", marks=pytest.mark.nightly),
    ],
)
def test_merged_checkpoints(make_adapters, family, tmp_path):
    adapters = make_adapters(family)
    kind = FAMILIES[family][0]
    dtype = torch.float32 if family == "mixtral" else torch.float64
    config = VllmConfig.make(model=str(adapters.checkpoint), dtype="float32", renderer="tokens")
    plugins = Plugins.load(config.plugins)
    for form in FORMS[family]:
        out = tmp_path / form
        if form in _REFUSED:
            with pytest.raises(UnsupportedError, match=_REFUSED[form]):
                merge(config, plugins, [(adapters.paths[form], 1.0)], out)
            assert not out.exists()
            continue
        assert merge(config, plugins, [(adapters.paths[form], 1.0)], out)
        found = reference(kind.from_pretrained(out, dtype=dtype).eval())
        expected = adapters.expected[form]
        assert found.tokens == expected.tokens, form
        assert (found.logprobs - expected.logprobs).abs().max() < 1e-3, form
        shutil.rmtree(out)


def test_the_commands(make_adapters, tmp_path, capsys):
    adapters = make_adapters("tied")
    words = ["lora", "merge", str(adapters.checkpoint), "--adapter"]
    out = str(tmp_path / "out")
    assert run([*words, str(adapters.paths["tokens"]), "--out", out]) == 0, capsys.readouterr().err
    assert "tensors are changed" in capsys.readouterr().out
    assert run([*words, str(adapters.paths["tokens"]), "--out", out]) != 0
    assert "and is not empty" in capsys.readouterr().err
    # A tied head has no weight that B A could be added to.
    assert run([*words, str(adapters.paths["embedding"]), "--out", f"{out}2"]) != 0
    assert "lm_head (weight)" in capsys.readouterr().err
    shutil.copytree(adapters.paths["tokens"], tmp_path / "all" / "good")
    (tmp_path / "all" / "bad").mkdir()
    assert run(["lora", "list", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert run(["lora", "list", str(tmp_path / "all")]) == 0
    printed = capsys.readouterr().out
    assert "good" in printed
    assert "cannot be" in printed


def test_merged_at_the_start(make_adapters, tmp_path):
    """`merge`: tokens are those of adapters beside the weights, and the checkpoint is kept by its
    contents. Quantization at load reads it."""
    adapters = make_adapters("llama")
    all_, layers = (adapters.paths[name] for name in ("all", "layers"))
    own = {"merge": f"{all_}=0.5, {layers}=-1.5", "merge_dir": str(tmp_path), "enabled": False}
    both = adapters.combined(["all", "layers"], [0.5, -1.5])
    for _ in range(2):
        with adapters.llm(own) as llm:
            [found] = adapters.ask(llm, None)
            assert list(found.outputs[0].token_ids) == both.tokens
            assert llm.config.served_model_name == str(adapters.checkpoint)
            assert llm.config.checkpoint.path.startswith(str(tmp_path))
        [folder] = tmp_path.iterdir()
    # One that is not additive; only the last one has room, and the adapters beside it are others.
    own = {"merge": [str(adapters.paths["norms"])], "merge_dir": str(tmp_path), "merge_gib": 0}
    modules = [f"layers={layers}"]
    with adapters.llm({**own, "modules": modules}) as llm:
        adapters.assert_is(adapters.ask(llm, None)[0], "norms")
        [one] = tmp_path.iterdir()
        assert one != folder
        assert given(adapters.ask(llm, "layers")[0]) != given(adapters.ask(llm, None)[0])
    with adapters.llm(own, quantization="int8") as llm:
        assert not adapters.ask(llm, None)[0].error


def test_what_cannot_be_merged_at_the_start(make_adapters, tmp_path):
    adapters = make_adapters("llama")
    for entry, wrong in (
        ("x=y", "'x=y' is neither FOLDER nor FOLDER=SCALE"),
        (str(tmp_path / "nowhere"), "there is no such folder"),
        (str(adapters.paths["invoked"]), "from alora_invocation_tokens on"),
        (f"{adapters.paths['dora']}=2", "its scale can only be 1"),
        ("[1", "option merge"),
    ):
        own = {"merge": entry, "merge_dir": str(tmp_path / "cache")}
        with pytest.raises(PluginError, match=re.escape(wrong)), adapters.llm(own):
            pass
        assert not [*(tmp_path / "cache").glob("*")]
    config = json.loads((adapters.checkpoint / "config.json").read_text())
    quantized = shutil.copytree(adapters.checkpoint, tmp_path / "quantized")
    stated = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    own = {"lora": {"merge": str(adapters.paths["all"]), "merge_dir": str(tmp_path / "cache")}}
    with pytest.raises(PluginError, match="Merge into the checkpoint that they were made of"):
        LLM(str(quantized), renderer="tokens", plugin_option=own)
