"""The contract of model classes' constructors."""

import pytest
from toolkit_lm.errors import PluginError
from toolkit_lm.model import check_constructor
from torch import nn


class Right(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()


class Positional(nn.Module):
    def __init__(self, vllm_config, prefix, quant_config):
        super().__init__()


class Extra(nn.Module):
    def __init__(self, *, vllm_config, prefix="", cache_config):
        super().__init__()


@pytest.mark.parametrize("cls", [Positional, Extra])
def test_an_old_constructor_is_refused_and_the_shim_shown(cls):
    with pytest.raises(PluginError) as caught:
        check_constructor(cls)
    assert cls.__qualname__ in str(caught.value)
    assert (
        f"class {cls.__name__}Shim({cls.__name__}):\n    def __init__(self, *, vllm_config, prefix="
        in str(caught.value)
    )


def test_the_contract_of_constructors():
    check_constructor(Right)
