"""`toolkit explain`, on a small model."""

from __future__ import annotations

import json


def test_explain_names_every_choice(toolkit, checkpoint):
    done = toolkit("explain", checkpoint)
    assert done.code == 0, done.err
    for part in ("LlamaForCausalLM", "plugin 'decoder'", "generate", "hf", "sdpa", "(2 layers)"):
        assert part in done.out
    found = json.loads(toolkit("explain", checkpoint, "--json").out)
    assert (found["plugin"], found["renderer"], len(found["layers"])) == ("decoder", "hf", 2)
    assert found["layers"][0]["backend"] == "sdpa"


def test_an_unknown_architecture_is_one_error(toolkit, checkpoint):
    done = toolkit("explain", checkpoint, "--plugins", "sdpa")
    assert (done.code, done.out) == (1, "")
    assert "'LlamaForCausalLM'" in done.err
