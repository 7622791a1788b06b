"""The cache on disk of what was quantized at load: a safetensors file for each rank of each
checkpoint and each choice of options."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import platformdirs
import torch
from toolkit_lm import __version__
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from torch import Tensor

from toolkit_lm_quantize import Options

logger = logging.getLogger(__name__)

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by name."""

_FORMAT = "toolkit_lm quantized 1"
_DTYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
}
"""Dtypes as safetensors names them."""
_MOST_HEADER = 100 * 2**20
"""Bytes of a header, as safetensors limits them."""
_STAGED = ".staged-"
_ABANDONED = 3600.0
"""Seconds after which a file that nobody writes to is what a dead process has left."""


def open_cache(vllm_config: VllmConfig, scheme: str, options: Options) -> Cache | None:
    """The cache of what this rank quantizes. None: nothing is to be kept."""
    checkpoint = vllm_config.checkpoint
    if not options.cache or checkpoint is None or vllm_config.load.load_format == "dummy":
        return None
    source = Path(checkpoint.source or checkpoint.path)
    files = _files(source)
    if not files:
        return None
    parallel = vllm_config.parallel
    load = vllm_config.load
    ingredients = {
        "format": _FORMAT,
        "version": __version__,
        "files": files,
        "config": checkpoint.hf_config,
        "architecture": checkpoint.architecture,
        "scheme": scheme,
        "group": load.quantization_group_size,
        "skip": load.quantization_skip,
        "override": load.quantization_override,
        "load_format": load.load_format,
        "ranks": [
            parallel.rank,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.enable_expert_parallel,
        ],
    }
    text = json.dumps(ingredients, sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    try:
        root = Path(options.cache_dir).expanduser() if options.cache_dir else default_root()
    except RuntimeError as error:
        raise ConfigError(
            f"option quantize.cache_dir: {options.cache_dir!r} is no folder: {error}"
        ) from None
    return Cache(root / f"{key}.safetensors", int(options.cache_gib * 2**30))


def default_root() -> Path:
    """`toolkit_lm/quantized` in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("toolkit_lm")) / "quantized"


def _files(source: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of the last change of each file with weights."""
    paths = [source] if source.is_file() else sorted(source.glob("*.safetensors*"))
    found = []
    for path in paths:
        real = path.resolve()
        with contextlib.suppress(OSError):
            status = real.stat()
            found.append((str(real), status.st_size, status.st_mtime_ns))
    return found


class Cache:
    """One rank's file. It is complete or absent: it is written under another name, and renamed.

    Processes that start at once each write one, and the last stays: they are the same.
    """

    def __init__(self, path: Path, limit: int) -> None:
        """`limit`: most bytes of all files of the folder."""
        self.path = path
        self.limit = limit
        self.is_complete = False
        """Whether the file is there, and need not be written."""
        self._places: dict[str, tuple[str, tuple[int, ...], int]] | None = None
        """Dtype, shape and position in the file, by name."""
        self._left: set[str] = set()
        self._file: Any = None
        self._staged = ""
        self._starts: dict[str, int] = {}
        try:
            self._places = _read_header(path)
            self.is_complete = True
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._damaged(str(error))
        if self.is_complete:
            # Others may own the file, or it cannot be changed: then its time of use is not kept.
            with contextlib.suppress(OSError):
                os.utime(path)
            logger.info("quantized weights are read from %s", path)

    def find(self, prefix: str, layout: Layout) -> dict[str, Tensor] | None:
        """The tensors of a layer, each mapped on its own, so that it leaves memory when it is
        dropped. None: they are not there."""
        if self._places is None:
            return None
        found: dict[str, Tensor] = {}
        for name, (dtype, shape) in layout.items():
            stored, size, start = self._places.get(f"{prefix}.{name}", ("", (), 0))
            if (stored, size) != (_DTYPES[dtype], shape):
                self._damaged(f"{prefix}.{name} is {stored or 'absent'} {list(size)}")
                return None
            try:
                found[name] = _mapped(self.path, start, dtype, shape)
            except (OSError, ValueError) as error:
                self._damaged(str(error))
                return None
        return found

    @property
    def is_writing(self) -> bool:
        return self._file is not None

    def begin(self, layout: Layout) -> None:
        """Opens a new file, which will hold these tensors. Where it cannot be had, nothing is
        kept."""
        places: dict[str, Any] = {"__metadata__": {"format": _FORMAT}}
        start = 0
        for name, (dtype, shape) in layout.items():
            end = start + math.prod(shape) * dtype.itemsize
            places[name] = {
                "dtype": _DTYPES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
            start = end
        if start > self.limit:
            logger.warning(
                "the quantized weights (%.1f GiB) are not kept for the next start: "
                "quantize.cache_gib is %.1f",
                start / 2**30,
                self.limit / 2**30,
            )
            self.is_complete = True
            return
        header = json.dumps(places).encode()
        header += b" " * (-len(header) % 8)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_abandoned()
            descriptor, self._staged = tempfile.mkstemp(prefix=_STAGED, dir=self.path.parent)
            self._file = open(descriptor, "wb")  # noqa: SIM115 - it is open between calls
            self._file.write(len(header).to_bytes(8, "little") + header)
            self._file.truncate(8 + len(header) + start)
        except OSError as error:
            self._give_up(error)
            return
        self._places = None
        self._starts = {
            name: 8 + len(header) + entry["data_offsets"][0]
            for name, entry in places.items()
            if name in layout
        }
        self._left = set(layout)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor. The last one completes the file."""
        if self._file is None:
            return
        try:
            self._file.seek(self._starts[name])
            self._file.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
            self._left.discard(name)
            if not self._left:
                self._publish()
        except OSError as error:
            self._give_up(error)

    def _publish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        Path(self._staged).replace(self.path)
        self._staged = ""
        self.is_complete = True
        self._evict()
        logger.info("quantized weights are kept in %s", self.path)

    def _evict(self) -> None:
        """Removes the files that were not used for longest, until the rest fits into the limit."""
        others = [path for path in self.path.parent.glob("*.safetensors") if path != self.path]
        with contextlib.suppress(OSError):
            known = {path: path.stat() for path in others}
            total = self.path.stat().st_size + sum(status.st_size for status in known.values())
            for path, status in sorted(known.items(), key=lambda item: item[1].st_mtime):
                if total <= self.limit:
                    return
                path.unlink(missing_ok=True)
                total -= status.st_size

    def _remove_abandoned(self) -> None:
        for path in self.path.parent.glob(f"{_STAGED}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()

    def _damaged(self, reason: str) -> None:
        logger.warning("%s is damaged, and is made anew: %s", self.path, reason)
        self.is_complete = False
        self._places = None

    def _give_up(self, error: OSError) -> None:
        logger.warning("the quantized weights are not kept for the next start: %s", error)
        if self._file is not None:
            # A full disk fails the close, too: it writes what is left in the buffer.
            with contextlib.suppress(OSError):
                self._file.close()
        if self._staged:
            with contextlib.suppress(OSError):
                Path(self._staged).unlink(missing_ok=True)
        self._file = None
        self._staged = ""
        self.is_complete = True


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Dtype, shape and position of each tensor. Raises OSError, or ValueError for a file that is
    not whole."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER:
            raise ValueError(f"its header has {length} bytes")
        header = file.read(length)
        size = os.fstat(file.fileno()).st_size
    try:
        places = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(places.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(place, type=_Entry) for name, place in places.items()}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    if metadata.get("format") != _FORMAT:
        raise ValueError("it has another format")
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    end = 8 + length
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        dtype = dtypes.get(entry.dtype)
        if dtype is None or stop - start != math.prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"{name} is {entry.dtype} {list(entry.shape)} in {stop - start} bytes")
        found[name] = entry.dtype, entry.shape, 8 + length + start
        end = max(end, 8 + length + stop)
    if size != end:
        raise ValueError(f"it has {size} bytes, not {end}")
    return found


def _mapped(path: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the file, which is read where it is touched. Writing to it changes no file."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    first = start - start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(),
            start - first + count * dtype.itemsize,
            access=mmap.ACCESS_COPY,
            offset=first,
        )
    raw = torch.frombuffer(
        mapped, dtype=torch.uint8, count=count * dtype.itemsize, offset=start - first
    )
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)
