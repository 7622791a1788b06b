"""`collective_rpc`: methods of an application's class on each worker."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toolkit_lm import LLM
from toolkit_lm.errors import ConfigError, RequestError, ToolkitError
from toolkit_lm_rl.control import Control

ENGINE = {
    "max_model_len": 64,
    "num_kv_blocks": 24,
    "block_size": 16,
    "dtype": "float32",
    "renderer": "tokens",
}


def options(path="rl_extension.PolicyWorker"):
    return {**ENGINE, "plugin_option": {"rl": {"worker_extension_cls": path}}}


@pytest.fixture(scope="module")
def llm(policies):
    with LLM(str(policies / "old"), **options()) as llm:
        yield llm


def test_values_of_calls(llm):
    control = Control(llm)
    assert control.collective_rpc("where") == [{"rank": 0, "device": "cpu", "layers": 2}]
    values = [1, -2.5, "text", b"bytes", None, True, [1, [2]], {"key": {"inner": 3}}]
    assert control.collective_rpc("echo", values, {"named": "x"}) == [[values, {"named": "x"}]]
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool):
        tensor = torch.arange(6).reshape(2, 3).to(dtype)
        [[scaled, array, is_half]] = control.collective_rpc("scale", [tensor], {"by": 1})
        assert scaled.dtype is (tensor * 1).dtype
        assert torch.equal(scaled, tensor * 1)
        assert array.dtype == np.int16
        assert array.tolist() == [0, 1, 2]
        assert is_half is (dtype is torch.bfloat16)
    for tensor in (torch.tensor(2.5), torch.zeros(0, 4), torch.ones(4, 4).T[:, ::2]):
        [[[found], _]] = control.collective_rpc("echo", [tensor])
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)


def test_what_cannot_be_called(llm):
    control = Control(llm)
    for method, args, text in (
        ("loda", (), "Did you mean 'load'"),
        ("_private", (), "has no method '_private'"),
        ("get_model", (), "has no method 'get_model'"),
        ("echo", [object()], r"args\[0\] is a object: calls carry"),
        ("echo", [{"a": {1: 2}}], r"args\[0\]\['a'\] is a dict"),
        ("echo", [torch.zeros(5 << 20)], "the most is"),
        (len, (), "Functions are not sent"),
        ("unknown_value", (), "the answer of unknown_value is a object"),
        ("where", [1], "takes 1 positional argument"),
    ):
        with pytest.raises(ToolkitError, match=text):
            control.collective_rpc(method, args)
    assert control.collective_rpc("layers") == [2]


def test_weights_that_a_method_loads(llm, policies):
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    control = Control(llm)
    path = str(policies / "new" / "model.safetensors")
    before = llm.generate([prompt])[0].outputs[0]
    with pytest.raises(ToolkitError, match="the trainer's method fails"):
        control.collective_rpc("load", [path], {"fails": True})
    assert control.weight_version == ""
    with pytest.raises(RequestError, match="no weights were given"):
        control._call("change", {"version": None})
    [count] = control.collective_rpc("load", [path])
    assert count > 10
    assert control.weight_version == "1"
    with LLM(str(policies / "new"), **ENGINE) as other:
        expected = other.generate([prompt])[0].outputs[0]
    found = llm.generate([prompt])[0].outputs[0]
    assert before.weight_versions[0].version == ""
    assert found.weight_versions[0].version == "1"
    greedy = llm.engine.processor.default_params.replace(temperature=0, max_tokens=6)
    assert len(expected.token_ids) == len(found.token_ids)
    with LLM(str(policies / "new"), **ENGINE) as other:
        wanted = other.generate([prompt], greedy)[0].outputs[0].token_ids
    assert llm.generate([prompt], greedy)[0].outputs[0].token_ids == wanted


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nothing", "no path of a class"),
        ("rl_extension.Missing", "cannot be imported"),
        ("no_module_here.Class", "cannot be imported"),
        ("rl_extension.load_file", "is no class"),
    ],
)
def test_paths_of_no_class(policies, path, text):
    with pytest.raises(ConfigError, match=text):
        LLM(str(policies / "old"), **options(path))


def test_an_engine_without_extension(policies):
    with (
        LLM(str(policies / "old"), **ENGINE) as llm,
        pytest.raises(RequestError, match=r"set the option rl\.worker_extension_cls"),
    ):
        Control(llm).collective_rpc("where")
