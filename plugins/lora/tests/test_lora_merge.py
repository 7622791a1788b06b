"""`toolkit lora list` and `toolkit lora merge`: a merged checkpoint is what PEFT computes."""

from __future__ import annotations

import shutil

import pytest
import torch
from lora_adapters import FAMILIES, FORMS, reference
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
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
                merge(config, plugins, adapters.paths[form], out)
            assert not out.exists()
            continue
        assert merge(config, plugins, adapters.paths[form], out)
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
    assert run(["lora", "list", str(tmp_path / "all")]) == 0
    printed = capsys.readouterr().out
    assert "good" in printed
    assert "cannot be" in printed
