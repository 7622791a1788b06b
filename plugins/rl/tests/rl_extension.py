"""A class of an application, of the kind that trainers bring."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import load_file


class PolicyWorker:
    def where(self):
        return {"rank": self.rank, "device": str(self.device), "layers": self.layers()}

    def layers(self):
        return len(self.model_runner.model.model.layers)

    def echo(self, *values, **named):
        return [values, named]

    def scale(self, tensor, *, by):
        return tensor * by, np.arange(3, dtype=np.int16), tensor.dtype is torch.bfloat16

    def load(self, path, *, fails=False):
        names = self.model_runner.model.load_weights(load_file(path).items())
        if fails:
            raise ValueError("the trainer's method fails")
        return len(names)

    def picture(self):
        return torch.zeros(2)

    def unknown_value(self):
        return object()

    def _private(self):
        return 1
