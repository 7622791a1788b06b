"""How ops find their layers: by name, in the model that this thread computes."""

import threading

import pytest
from toolkit_lm.model import named_layers, op_layer, op_layers
from torch import nn


class Named(nn.Module):
    def __init__(self, prefix):
        super().__init__()
        self.prefix = prefix


def test_layers_are_found_by_their_prefix():
    first = Named("model.first")
    second = Named("model.second")
    layers = named_layers(nn.Sequential(first, nn.Linear(1, 1), nn.Sequential(second)))
    assert layers == {"model.first": first, "model.second": second}
    with op_layers(layers):
        assert op_layer("model.second") is second
        with pytest.raises(KeyError):
            op_layer("model.third")
    with op_layers({}):
        pass


def test_outside_of_a_pass_the_layer_is_named():
    with pytest.raises(
        AssertionError,
        match=r"layer 'model\.first' is computed as an op outside of a compiled forward pass",
    ):
        op_layer("model.first")


def test_passes_do_not_nest_and_threads_do_not_meet():
    with (
        op_layers({}),
        pytest.raises(AssertionError, match="inside another one on the same thread"),
        op_layers({}),
    ):
        pass
    refused = []

    def look():
        with pytest.raises(AssertionError):
            op_layer("a")
        refused.append(True)

    with op_layers({"a": nn.Identity()}):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert refused
