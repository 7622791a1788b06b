"""Formats of a prompt of embeddings: a tensor [n, H] as safetensors or as torch.save writes it, in
base64. Nothing of a client's is unpickled. Importing it needs no torch."""

from __future__ import annotations

import binascii
import io
import json
import math
import pickletools  # nosec B403 # it lists opcodes, and runs none
import re
import zipfile
from base64 import b64decode
from collections.abc import Mapping
from typing import Any, NamedTuple

from toolkit_lm.errors import RequestError

PARAM = "prompt_embeds"
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an entry, by safetensors' names of dtypes."""
_STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
_MOST_HEADER = 4096
"""Most bytes of the description of a tensor."""
_MOST_FILES = 16
"""Most files of an archive. torch.save writes 7."""
LENGTH = 8
"""Bytes of the length at the start of a safetensors file."""
_WANTED = (
    "base64 of one contiguous tensor [tokens, hidden size] of float32, float16 or bfloat16, as "
    "safetensors.torch.save({'prompt_embeds': tensor}) or torch.save(tensor) writes it"
)


class Embeds(NamedTuple):
    """Embeddings of a prompt: rows of little-endian numbers."""

    dtype: str
    """A key of `_SIZES`."""
    num_tokens: int
    size: int
    """Numbers of a row."""
    data: bytes

    @property
    def row_bytes(self) -> int:
        return _SIZES[self.dtype] * self.size


def decoded(text: str, most_bytes: int) -> Embeds:
    """Reads a tensor in base64. Raises RequestError for more than `most_bytes` of numbers, and for
    what is not a tensor of two dimensions."""
    if len(text) > (most_bytes + _MOST_FILES * _MOST_HEADER) * 4 // 3:
        raise _error(f"has {len(text)} characters, more than the longest prompt takes")
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _error("is no base64") from None
    found = _archive(data) if data.startswith(b"PK") else _safetensors(data)
    if not found.num_tokens or not found.size:
        raise _error(f"has the shape [{found.num_tokens}, {found.size}]")
    if len(found.data) != found.num_tokens * found.row_bytes:
        raise _error("has another number of bytes than its shape states")
    return found


def _error(problem: str) -> RequestError:
    return RequestError(f"{PARAM} {problem}: it must be {_WANTED}.", PARAM)


def _safetensors(data: bytes) -> Embeds:
    length = int.from_bytes(data[:LENGTH], "little")
    if not 0 < length <= min(_MOST_HEADER, len(data) - LENGTH):
        raise _error("is neither a file of safetensors nor of torch.save")
    try:
        header = json.loads(data[LENGTH : LENGTH + length])
    except (ValueError, RecursionError):
        raise _error("has a header of safetensors that is no JSON") from None
    tensors = (
        [entry for name, entry in header.items() if name != "__metadata__"]
        if isinstance(header, Mapping)
        else []
    )
    if len(tensors) != 1 or not isinstance(tensors[0], Mapping):
        raise _error(f"has {len(tensors)} tensors")
    shape = tensors[0].get("shape")
    dtype = tensors[0].get("dtype")
    begin = LENGTH + length
    body = data[begin:]
    if tensors[0].get("data_offsets") != [0, len(body)]:
        raise _error("has another number of bytes than its header states")
    return _embeds(dtype, shape, body)


def _embeds(dtype: Any, shape: Any, data: bytes) -> Embeds:
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise _error(f"has the dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _error("states no shape")
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2:
        raise _error(f"has {len(shape)} dimensions")
    return Embeds(dtype, shape[0], shape[1], data)


def _archive(data: bytes) -> Embeds:
    """Reads the zip archive of torch.save. Its pickle is compared with that of one tensor, opcode
    by opcode; none is run."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {file.filename: file for file in archive.infolist()}
            if len(files) > _MOST_FILES or any(
                file.compress_type != zipfile.ZIP_STORED or file.file_size > len(data)
                for file in files.values()
            ):
                raise _error("is an archive that torch.save does not write")
            [name] = [name for name in files if name.endswith("/data.pkl")]
            root = name.removesuffix("data.pkl")
            if files[name].file_size > _MOST_HEADER:
                raise _error("has a pickle of more than one tensor")
            storage = _described(archive.read(name))
            if f"{root}byteorder" in files and archive.read(f"{root}byteorder") != b"little":
                raise _error("has big-endian numbers")
            content = archive.read(f"{root}data/{storage.key}")
    except RequestError:
        raise
    except Exception:
        # zipfile and pickletools raise whatever comes.
        raise _error("is an archive that torch.save does not write") from None
    size = _SIZES[storage.dtype]
    begin = storage.offset * size
    end = begin + math.prod(storage.shape) * size
    return _embeds(storage.dtype, storage.shape, content[begin:end])


class _Storage(NamedTuple):
    dtype: str
    key: str
    offset: int
    shape: list[int]


_INTEGERS = ("BININT", "BININT1", "BININT2")
_NO_MEANING = ("PROTO", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME")
_TENSOR = re.compile(
    r"GLOBAL:torch\._utils _rebuild_tensor_v2 MARK MARK BINUNICODE:storage "
    r"GLOBAL:torch (?P<storage>\w+) BINUNICODE:(?P<key>\d{1,9}) BINUNICODE:[\w:]{1,16} INT:\d+ "
    r"TUPLE BINPERSID INT:(?P<offset>\d+) "
    r"INT:(?P<shape>\d+(?: INT:\d+)*) TUPLE[23] INT:(?P<strides>\d+(?: INT:\d+)*) TUPLE[23] "
    r"NEW(?:FALSE|TRUE) GLOBAL:collections OrderedDict EMPTY_TUPLE REDUCE TUPLE REDUCE STOP"
)
"""Opcodes of the pickle of a tensor of two or three dimensions."""


def _described(pickled: bytes) -> _Storage:
    words = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _NO_MEANING:
            continue
        kind = "INT" if opcode.name in _INTEGERS else opcode.name
        words.append(kind if argument is None else f"{kind}:{argument}")
    match = _TENSOR.fullmatch(" ".join(words))
    if match is None or match["storage"] not in _STORAGES:
        raise _error("is an archive of something else than one tensor")
    shape = [int(size) for size in match["shape"].split(" INT:")]
    strides = [int(size) for size in match["strides"].split(" INT:")]
    if strides != [math.prod(shape[place + 1 :]) for place in range(len(shape))]:
        raise _error("is not contiguous")
    return _Storage(_STORAGES[match["storage"]], match["key"], int(match["offset"]), shape)
