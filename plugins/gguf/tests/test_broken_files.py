"""Broken and contradictory GGUF files are refused, with the file, the tensor and what was expected;
none of their numbers is believed before it is compared with the file's length."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path

import pytest
import toolkit_lm_tiny
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from toolkit_lm.errors import CheckpointError, ToolkitError, UnsupportedError
from toolkit_lm_gguf.config import hf_config
from toolkit_lm_gguf.container import Container
from toolkit_lm_gguf.file import GGUFFile
from toolkit_lm_gguf.loader import GGUFLoader
from toolkit_lm_gguf.types import UNREADABLE

TINY = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
HUGE = 2**63
U32 = 4
STRING = 8
ARRAY = 9


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def array(key: str, of_type: int, count: int, raw: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, of_type, count) + raw


def tensor(name: str = "t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0):
    return (
        text(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


def file(*parts: bytes, tensors: int = 0, values: int = 0, version: int = 3, data: int = 0):
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, values) + b"".join(parts)
    return header + bytes(-len(header) % 32 + data)


WHOLE = file(number("a", 7), tensor(), values=1, tensors=1, data=128)
BROKEN = {
    "empty": (b"", r"cannot be read"),
    "another magic": (b"GGML" + WHOLE[4:], r"does not begin with GGUF"),
    "version 1": (file(version=1), r"has GGUF version 1, not 2 or 3"),
    "big-endian": (file(version=3 << 24), r"has GGUF version 50331648, .*little-endian"),
    "no header": (WHOLE[:10], r"the number of tensors needs 8 bytes from byte 8 on"),
    "too many values": (
        file(values=HUGE)[:24],
        r"length of a key of the metadata needs 8 bytes from byte 24 on, and the file has 24",
    ),
    "too many tensors": (
        file(tensors=HUGE)[:24],
        r"the length of the name of a tensor needs 8 bytes",
    ),
    "a long key": (file(text("a", HUGE), values=1), r"a key of the metadata needs \d+ bytes"),
    "a key that is no text": (file(text(b"\xff"), values=1), r"a key of the metadata is not UTF-8"),
    "a key twice": (file(number("a", 1), number("a", 2), values=2), r"states 'a' twice"),
    "an unknown type of a value": (
        file(text("a") + struct.pack("<I", 99), values=1),
        r"a has the unknown type 99",
    ),
    "a long array": (file(array("a", U32, HUGE), values=1), r"a needs \d+ bytes from byte"),
    "a long array of texts": (
        file(array("a", STRING, HUGE), values=1),
        r"a has 9223372036854775808 texts, and they end after it",
    ),
    "a long text in an array": (
        file(array("a", STRING, 2, text("b") + text("c", HUGE)), values=1),
        r"a has 2 texts, and they end after it",
    ),
    "an array of arrays": (
        file(array("a", ARRAY, 1, struct.pack("<IQ", U32, 0)), values=1),
        r"a is an array of the unknown type 9",
    ),
    "an alignment of 0": (
        file(number("general.alignment", 0), values=1),
        r"general\.alignment 0, which is no power of two",
    ),
    "an alignment that is a text": (
        file(text("general.alignment") + struct.pack("<I", STRING) + text("b"), values=1),
        r"general\.alignment 'b', which is no power of two",
    ),
    "no dimensions": (file(tensor(shape=()), tensors=1), r"tensor t has 0 dimensions, not 1 to 4"),
    "many dimensions": (
        file(text("t") + struct.pack("<I", 2**31), tensors=1),
        r"tensor t has 2147483648 dimensions",
    ),
    "a dimension of 0": (file(tensor(shape=(0,)), tensors=1), r"tensor t has the shape \[0\]"),
    "a size that overflows": (
        file(tensor(shape=(2**32, 2**31)), tensors=1, data=128),
        r"tensor t \(F32 \[2147483648, 4294967296\]\) has 36893488147419103232 bytes from byte",
    ),
    "a tensor twice": (
        file(tensor(), tensor(), tensors=2, data=128),
        r"holds two tensors 't'\.",
    ),
    "an offset outside": (
        file(tensor(offset=HUGE), tensors=1, data=128),
        r"tensor t \(F32 \[32\]\) has 128 bytes from byte \d+ on .*the file has 192",
    ),
    "an offset that is not aligned": (
        file(tensor(offset=1), tensors=1, data=256),
        r"from byte 65 on \(the alignment is 32\)",
    ),
    "a truncated tensor": (WHOLE[:-1], r"tensor t \(F32 \[32\]\) has 128 bytes from byte"),
    "rows that are no whole blocks": (
        file(tensor(shape=(48,), kind=2), tensors=1, data=128),
        r"tensor t has the shape \[48\], and Q4_0 holds rows of whole blocks of 32",
    ),
    "an unknown type": (
        file(tensor(kind=4096), tensors=1, data=128),
        r"tensor t has the unknown type 4096",
    ),
}
"""Content of a file, and what its refusal says."""


def test_what_is_whole_is_read(tmp_path):
    (tmp_path / "a.gguf").write_bytes(WHOLE)
    container = Container(tmp_path / "a.gguf")
    assert container.get("a") == 7 and container.tensors["t"].num_bytes == 128


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_what_is_wrong(tmp_path, name):
    content, pattern = BROKEN[name]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.gguf.*({pattern})"):
        Container(tmp_path / "a.gguf")


@pytest.mark.parametrize("kind", UNREADABLE.values())
def test_a_type_that_is_not_read_is_refused_by_name(tmp_path, kind):
    (tmp_path / "a.gguf").write_bytes(file(tensor(kind=Type[kind]), tensors=1, data=128))
    with pytest.raises(
        UnsupportedError,
        match=rf"a\.gguf: the tensor t has the type {kind}, .*Q4_K.*llama-quantize",
    ):
        Container(tmp_path / "a.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_gguf(path, TINY, Type.Q8_0)
    return path.read_bytes()


def attempt(path: Path) -> None:
    """Reads all of a file but its weights."""
    hf_config(GGUFFile(path))
    GGUFLoader.unpack(path, None)


def test_a_changed_header_is_read_or_refused(tmp_path, whole):
    """Whatever byte is changed, and wherever the file ends."""
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    end = min(info.start for info in GGUFFile(path).tensors.values())
    drawn = random.Random(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(drawn.choice((1, 8))):
            # Most of the header is the vocabulary.
            changed[drawn.randrange(drawn.choice((64, 2048, end)))] = drawn.choice((0, 255, 128, 8))
        if drawn.random() < 0.2:
            del changed[drawn.randrange(end) :]
        path.write_bytes(changed)
        try:
            attempt(path)
        except ToolkitError as error:
            refused += 1
            assert "model.gguf" in str(error)
    assert refused > 50
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024, f"{grown} KiB"


CONTRADICTIONS = {
    "no architecture": ({"general.architecture": 3}, r"general\.architecture"),
    "no count of layers": ({"{arch}.block_count": None}, r"states no llama\.block_count"),
    "too many layers": (
        {"{arch}.block_count": 2**31 - 1},
        r"has 2147483647 layers, and no tensor blk\.6\.attn_norm\.weight",
    ),
    "too few layers": ({"{arch}.block_count": 5}, r"states 5 layers, and holds .* of layer 5"),
    "no layers": ({"{arch}.block_count": 0}, r"llama\.block_count 0, which must be at least 1"),
    "another width": (
        {"{arch}.embedding_length": 256},
        r"tensor \S+ of shape \[.*128\], and its metadata ask for \[.*256\]",
    ),
    "a huge width": ({"{arch}.embedding_length": 2**31 - 1}, r"of shape .* ask for .*2147483647"),
    "another number of heads": ({"{arch}.attention.head_count": 8}, r"blk\.0\.attn_q\.weight|ask"),
    "another number of KV heads": ({"{arch}.attention.head_count_kv": 4}, r"attn_k\.weight of"),
    "KV heads by layer": (
        {"{arch}.attention.head_count_kv": [2, 2]},
        r"llama\.attention\.head_count_kv as list, not int",
    ),
    "a width that is a text": (
        {"{arch}.embedding_length": "128"},
        r"llama\.embedding_length as str, not int",
    ),
    "another size of heads": (
        {"{arch}.attention.key_length": 16, "{arch}.attention.value_length": 16},
        r"attn_\w+\.weight of shape",
    ),
    "another inner size": ({"{arch}.feed_forward_length": 100}, r"ffn_\w+\.weight of shape"),
    "fewer tokens": ({"tokenizer.ggml.tokens": ["a"]}, r"has 1 tokens in .*, and 1536 rows"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, r"states no tokenizer\.ggml\.tokens"),
    "tokens that are numbers": (
        {"tokenizer.ggml.tokens": [1] * 1536},
        r"has numbers in tokenizer\.ggml\.tokens",
    ),
    "fewer types of tokens": (
        {"tokenizer.ggml.token_type": [1]},
        r"1536 tokens in .*, and 1 in tokenizer\.ggml\.token_type",
    ),
    "an end outside": (
        {"tokenizer.ggml.eos_token_id": 9999},
        r"tokenizer\.ggml\.eos_token_id 9999, and has 1536 tokens",
    ),
    "merges of nothing": ({"tokenizer.ggml.merges": ["zz zz"]}, r"tokenizer that cannot be built"),
    "split in two": ({"split.count": 2}, r"is one of 2 files, and its name does not say so"),
    "missing tensor": ({}, r"layers, and no tensor blk\.3\.ffn_up\.weight", "blk.3.ffn_up.weight"),
    "no embedding": ({}, r"has no tensor token_embd\.weight", "token_embd.weight"),
    "no last norm": ({}, r"has no tensor output_norm\.weight", "output_norm.weight"),
}
"""Values of the metadata, what the refusal says, and a tensor that is left out."""


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, name):
    metadata, pattern, *without = CONTRADICTIONS[name]
    path = tmp_path / "model.gguf"
    write_gguf(path, TINY, Type.F16, metadata=metadata, without={*without})
    with pytest.raises(CheckpointError, match=rf"model\.gguf .*({pattern})"):
        attempt(path)


REFUSED = {
    "values of another size": (
        {"{arch}.attention.value_length": 16},
        r"keys of size 32 and values of size 16, which differ",
    ),
    "another architecture": ({"general.architecture": "falcon"}, r"architecture 'falcon'\. Known:"),
    "another scaling": ({"{arch}.rope.scaling.type": "dynamic"}, r"by 'dynamic'. Able: linear"),
    "another tokenizer": ({"tokenizer.ggml.model": "bert"}, r"the kind 'bert'. Known: gpt2, llama"),
    "other words": ({"tokenizer.ggml.pre": "klingon"}, r"as 'klingon' does, which is unknown"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_class_computes_is_refused_by_name(tmp_path, name):
    metadata, pattern = REFUSED[name]
    path = tmp_path / "model.gguf"
    write_gguf(path, TINY, Type.F16, metadata=metadata)
    with pytest.raises(UnsupportedError, match=rf"model\.gguf .*{pattern}"):
        attempt(path)


def test_a_missing_file_of_a_split_checkpoint_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", TINY, Type.Q8_0, split=30)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf cannot be read"):
        attempt(tmp_path / "m-00001-of-00002.gguf")
