"""Plain torch passes the kit of kernels, and kernels that are wrong do not."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm.model import Kernels
from toolkit_lm_devkit import KernelsConformance
from toolkit_lm_devkit.kernels import OPERATIONS


class TestTorch(KernelsConformance):
    kernels = Kernels
    bitwise = False


class Wrong(Kernels):
    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x, weight, 1e-2)


class InPlace(Kernels):
    def layer_norm(self, x, weight, bias, shape, eps):
        return x.copy_(super().layer_norm(x, weight, bias, shape, eps))


class OfTheBatch(Kernels):
    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x, weight, eps) * (1 + 1e-6 * len(x))


class Last(Kernels):
    def likeliest(self, scores):
        best, indices = torch.max(scores.flip(-1), dim=-1)
        return best, scores.shape[-1] - 1 - indices


@pytest.mark.parametrize(
    ("made", "test", "operation"),
    [
        (Wrong, "test_it_computes_what_torch_does", "rms_norm"),
        (Wrong, "test_it_computes_what_torch_does", "add_rms_norm"),
        (InPlace, "test_what_it_is_given_stays", "layer_norm"),
        (OfTheBatch, "test_a_row_is_computed_alike_whatever_is_beside_it", "rms_norm"),
    ],
)
def test_what_is_wrong_fails(made, test, operation):
    class Kit(KernelsConformance):
        kernels = made

    with pytest.raises(AssertionError):
        getattr(Kit(), test)(OPERATIONS[operation], 48, torch.float32)


def test_the_last_of_equals_fails():
    class Kit(KernelsConformance):
        kernels = Last

    with pytest.raises(AssertionError):
        Kit().test_likeliest_is_the_first_of_the_greatest(48, torch.float32)
