"""`toolkit explain`, on a small model, and `toolkit env`."""

from __future__ import annotations

import json
import os

from toolkit_lm import __version__


def test_explain_names_every_choice(toolkit, checkpoint):
    done = toolkit("explain", checkpoint)
    assert done.code == 0, done.err
    for part in ("LlamaForCausalLM", "plugin 'decoder'", "generate", "hf", "sdpa", "(2 layers)"):
        assert part in done.out
    found = json.loads(toolkit("explain", checkpoint, "--json").out)
    assert (found["plugin"], found["renderer"], len(found["layers"])) == ("decoder", "hf", 2)
    assert found["layers"][0]["backend"] == "sdpa"


def test_explain_tells_of_several_engines(toolkit, checkpoint):
    assert "engines" not in toolkit("explain", checkpoint).out
    done = toolkit("explain", checkpoint, "--data-parallel-size", "3")
    assert done.code == 0 and "3, each with all of the model on 1 of the devices" in " ".join(done.out.split())
    found = json.loads(toolkit("explain", checkpoint, "--data-parallel-size", "3", "--json").out)
    assert found["config"]["parallel"]["data_parallel_size"] == 3


def test_an_unknown_architecture_is_one_error(toolkit, checkpoint):
    done = toolkit("explain", checkpoint, "--plugins", "cli", "--plugins", "sdpa")
    assert (done.code, done.out) == (1, "")
    assert "'LlamaForCausalLM'" in done.err


def test_names_that_nobody_has_registered_are_found_before_a_start(toolkit, checkpoint):
    done = toolkit("explain", checkpoint, "--drafter", "nope")
    assert (done.code, done.out) == (2, "") and "no drafter 'nope' is registered" in done.err
    done = toolkit("explain", checkpoint, "--scheduling-policy", "fifo")
    assert (done.code, done.out) == (2, "") and "no scheduling policy 'fifo' is registered. Known: fair, fcfs, priority" in done.err


def test_env_names_versions_and_machine(toolkit):
    import torch

    facts = json.loads(toolkit("env", "--json").out)
    assert (facts["toolkit-lm"], facts["packages"]["torch"], facts["cpu count"]) == (__version__, torch.__version__, os.cpu_count())
    assert facts["plugins"]["core"] == f"{__version__} ok"
    assert torch.__version__ in toolkit("env").out
