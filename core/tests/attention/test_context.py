"""The one context of a step: who finds what in it, by name, and when it nests."""

import threading

import pytest
import torch
from toolkit_lm.attention import ForwardContext, current, forward_context, op_layer, slots
from toolkit_lm.model import named_layers
from torch import nn

EMPTY = ForwardContext({}, [])


class Named(nn.Module):
    def __init__(self, prefix):
        super().__init__()
        self.prefix = prefix


def test_layers_are_found_by_their_prefix():
    first = Named("model.first")
    second = Named("model.second")
    layers = named_layers(nn.Sequential(first, nn.Linear(1, 1), nn.Sequential(second)))
    assert layers == {"model.first": first, "model.second": second}
    with forward_context(ForwardContext({}, [], layers)):
        assert op_layer("model.second") is second
        with pytest.raises(KeyError):
            op_layer("model.third")


def test_slots_are_the_buffers_of_parts():
    buffer = torch.zeros(3)
    with forward_context(EMPTY._replace(slots={"adapters": buffer})):
        assert slots("adapters") is buffer
        with pytest.raises(KeyError, match="other"):
            slots("other")


@pytest.mark.parametrize("find", [current, op_layer, slots])
def test_outside_of_a_step_the_culprit_is_named(find):
    with pytest.raises(AssertionError, match=r"'model\.first' .* outside a forward_context"):
        find("model.first")


def test_a_second_pass_runs_within_the_first_ones_context():
    inner = ForwardContext({}, [], {"a": nn.Identity()})
    with forward_context(EMPTY):
        with forward_context(inner, within=EMPTY):
            assert op_layer("a") is inner.layers["a"]
        with pytest.raises(KeyError):
            op_layer("a")
        with pytest.raises(AssertionError, match="inside another"), forward_context(inner):
            pass
    with pytest.raises(AssertionError), forward_context(inner, within=EMPTY):
        pass


def test_threads_do_not_meet():
    refused = []

    def look():
        with pytest.raises(AssertionError):
            op_layer("a")
        refused.append(True)

    with forward_context(ForwardContext({}, [], {"a": nn.Identity()})):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert refused
