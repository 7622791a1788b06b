"""What a start from a GGUF file holds: the quantized weights, and work on one layer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from gguf_models import checkpoint

LOAD = """
import re, sys
from pathlib import Path
import torch
from toolkit_lm import VllmConfig
from toolkit_lm.model.loader import load_model
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
plugins = Plugins.load()
asked = VllmConfig.make(model=sys.argv[1], device="cpu", dtype="bfloat16")
config = resolve(asked, plugins)
model_cls = plugins.models.load(config.checkpoint.architecture)
torch.ones(1024, 1024, dtype=torch.bfloat16).float() @ torch.ones(1024, 1024)
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmHWM")
model = load_model(model_cls, config, torch.device("cpu"), plugins)
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""
WORK = 80e6
"""Bytes to unpack and rearrange the largest layer, of 8 million weights, and memory that torch
keeps."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
def test_the_peak_is_that_of_the_codes_and_one_layer(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    folder = checkpoint(
        tmp_path / "plain", "llama", **sizes, vocab_size=4096, num_attention_heads=16
    )
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, Type.Q4_0)
    num_bytes = (folder / "model.safetensors").stat().st_size / 2
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak, held = map(int, done.stdout.split())
    quantized = file.stat().st_size
    assert quantized < 0.29 * num_bytes
    # With the whole file beside, it would be twice the codes.
    assert peak < quantized + WORK, f"{(peak - quantized) / 1e6:.0f} MB beside the codes"
    assert held <= peak
