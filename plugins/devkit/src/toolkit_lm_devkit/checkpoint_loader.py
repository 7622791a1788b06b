"""CheckpointLoaderConformance: what every checkpoint loader must do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import CheckpointLoader
from torch import Tensor

from toolkit_lm_devkit.conformance import Conformance

_UNPACK = """
import importlib, sys
from pathlib import Path
module, name, file = sys.argv[1:]
print(getattr(importlib.import_module(module), name).unpack(Path(file), None))
sys.exit("torch" in sys.modules)
"""


class CheckpointLoaderConformance(Conformance):
    """Subclass it as `class TestMine(CheckpointLoaderConformance)`, name `loader`, and write
    checkpoints in `write`."""

    loader: ClassVar[type[CheckpointLoader]]

    def write(self, folder: Path) -> tuple[Path, Mapping[str, Tensor]]:
        """Writes a checkpoint into an empty folder. Gives what the loader is made with, the folder
        or a file, and the tensors in it."""
        raise NotImplementedError(f"{type(self).__name__} must define write(folder)")

    def read(self, source: Path) -> dict[str, Tensor]:
        """Copies, as a loader may reuse its memory."""
        return {name: tensor.clone() for name, tensor in self.loader(source)}

    def test_it_gives_the_tensors(self, tmp_path: Path) -> None:
        source, expected = self.write(tmp_path)
        found = self.read(source)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].device.type == "cpu"
            assert torch.equal(found[name], tensor.to(found[name].dtype)), (
                f"{name} has other values"
            )

    def test_it_can_be_read_again(self, tmp_path: Path) -> None:
        source, _ = self.write(tmp_path)
        loader = self.loader(source)
        first, second = ({name: tensor.clone() for name, tensor in loader} for _ in range(2))
        assert first.keys() == second.keys() and all(
            torch.equal(first[name], second[name]) for name in first
        )

    def test_errors_name_what_is_read(self, tmp_path: Path) -> None:
        source, _ = self.write(tmp_path)
        assert str(source) in str(self.loader(source))

    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        source, _ = self.write(tmp_path)
        for file in [source] if source.is_file() else sorted(source.iterdir()):
            file.unlink()
        with pytest.raises(CheckpointError, match=source.name):
            self.read(source)

    def test_what_is_truncated_is_named(self, tmp_path: Path) -> None:
        source, _ = self.write(tmp_path)
        files = [source] if source.is_file() else sorted(source.iterdir())
        largest = max(files, key=lambda file: file.stat().st_size)
        content = largest.read_bytes()
        for kept in (0, 3, len(content) // 2):
            largest.write_bytes(content[:kept])
            with pytest.raises(CheckpointError, match=source.name):
                self.read(source)

    def test_a_file_is_unpacked_without_torch(self, tmp_path: Path) -> None:
        source, _ = self.write(tmp_path)
        if source.is_dir():
            return
        command = [
            sys.executable,
            "-c",
            _UNPACK,
            self.loader.__module__,
            self.loader.__name__,
            str(source),
        ]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # The words are our own.
        done = subprocess.run(  # nosec B603
            command, env=environ, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr or f"{self.loader.__name__} imports torch"
        folder = Path(done.stdout.strip())
        assert json.loads((folder / "config.json").read_text())["architectures"]
        assert self.loader.unpack(source, None) == folder, "it is unpacked twice"
