"""The names of a checkpoint's weights."""

from __future__ import annotations

import json
import struct

import pytest
from toolkit_lm.errors import CheckpointError
from toolkit_lm_pooling_adapters.weight_names import stored_weights


def write_weights(folder, *names):
    header = json.dumps(
        {
            "__metadata__": {},
            **{name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names},
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def test_stored_weights(tmp_path):
    assert stored_weights(tmp_path) == frozenset()
    write_weights(tmp_path, "a", "b")
    assert stored_weights(tmp_path) == {"a", "b"}
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 10**6))
    with pytest.raises(CheckpointError, match="truncated"):
        stored_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"c": "x.safetensors"}})
    )
    assert stored_weights(tmp_path) == {"c"}
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read: RecursionError"):
        stored_weights(tmp_path)
