"""`toolkit embed`, on a small model with random weights."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from toolkit_lm import LLM

SMALL = ("--load-format", "dummy", "--convert", "embed", "--device", "cpu", "--dtype", "float32")


@pytest.fixture
def embed(toolkit, checkpoint, tmp_path):
    """embed(name, content, ...): runs `toolkit embed` over a file; returns what it left, and the
    vectors, if there are any."""

    def call(name, content, *arguments, out="out.npy"):
        source = tmp_path / name
        source.write_bytes(content.encode() if isinstance(content, str) else content)
        done = toolkit(
            "embed", checkpoint, "--in", source, "--out", tmp_path / out, *SMALL, *arguments
        )
        assert not list(tmp_path.glob("*.part"))
        return done, np.load(tmp_path / out) if (tmp_path / out).exists() else None

    return call


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(
        str(checkpoint), load_format="dummy", convert="embed", device="cpu", dtype="float32"
    ) as one:
        yield one


def expected(llm, texts, **options):
    return np.stack([output.outputs.data for output in llm.embed(texts, use_tqdm=False, **options)])


def test_each_line_has_its_row(embed, llm):
    texts = [f"text {number} " + "x" * (number % 50) for number in range(700)]
    done, vectors = embed("in.txt", "\n".join(texts), "--max-num-seqs", "16")
    assert done.code == 0, done.err
    assert (vectors.dtype, vectors.shape) == (np.float32, (700, 16))
    np.testing.assert_allclose(vectors, expected(llm, texts), atol=1e-5)
    assert "700/700" in done.err


def test_standard_input_is_a_text_a_line(toolkit, checkpoint, tmp_path, monkeypatch, llm):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("Zürich\n\nlast".encode())))
    done = toolkit("embed", checkpoint, "--in", "-", "--out", tmp_path / "out.npy", *SMALL)
    assert done.code == 1 and "line 2: the text is empty." in done.err
    vectors = np.load(tmp_path / "out.npy")
    np.testing.assert_allclose(vectors[[0, 2]], expected(llm, ["Zürich", "last"]), atol=1e-5)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO()))
    done = toolkit("embed", checkpoint, "--in", "-", "--out", tmp_path / "none.npy", *SMALL)
    assert (done.code, done.err) == (2, "error: --in: '-' is empty.\n")


def test_bad_lines_are_told_and_the_others_go_on(embed, llm):
    lines = [
        b'{"body": "first"}',
        b"no json",
        b'{"body": 5}',
        b'{"text": "x"}',
        b'{"body": ""}',
        b"\xff",
        b"",
        b'{"body": "last\\n"}',
    ]
    done, vectors = embed("in.jsonl", b"\n".join(lines) + b"\n", "--field", "body")
    assert done.code == 1
    assert "6 of 8 lines could not be embedded" in done.err
    for number, why in (
        (2, "not JSON"),
        (3, "not a int"),
        (4, "not an object with a field 'body'"),
        (5, "empty"),
        (6, "not UTF-8"),
        (7, "JSON"),
    ):
        assert f"line {number}: " in done.err and why in next(
            one for one in done.err.splitlines() if f"line {number}:" in one
        )
    assert np.isnan(vectors[1:7]).all()
    np.testing.assert_allclose(vectors[[0, 7]], expected(llm, ["first", "last\n"]), atol=1e-5)


@pytest.mark.parametrize("out", ["out.npy", "out.parquet"])
def test_lines_that_json_and_files_cannot_hold(toolkit, checkpoint, tmp_path, out):
    if out.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / "in.jsonl").write_text(
        "\n".join(["[" * 100_000, r'{"text": "\ud800"}', '{"text": "good"}'])
    )
    done = toolkit(
        "embed", checkpoint, "--in", tmp_path / "in.jsonl", "--out", tmp_path / out, *SMALL
    )
    assert done.code == 1 and "2 of 3 lines" in done.err
    assert "line 1: it is not JSON: maximum recursion depth exceeded" in done.err
    assert "line 2: 'text' is not a valid text: lone surrogate at position 0." in done.err
    assert (tmp_path / out).stat().st_size


def test_long_lines_are_errors_or_cut(embed, llm):
    texts = ["short", "x" * 5000]
    done, vectors = embed("in.txt", "\n".join(texts))
    assert (done.code, np.isnan(vectors).any(axis=1).tolist()) == (1, [False, True])
    assert "line 2: " in done.err and "max_model_len" in done.err
    done, vectors = embed(
        "in.txt",
        "\n".join(texts),
        "--truncate-prompt-tokens",
        "10",
        "--dimensions",
        "4",
        "--matryoshka",
    )
    assert (done.code, vectors.shape) == (0, (2, 4))
    cut = expected(llm, ["short", "x" * 10])[:, :4]
    np.testing.assert_allclose(vectors, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "error"),
    [
        ("in.csv", "x", (), "must end in .txt or .jsonl"),
        ("in.txt", "", (), "is empty"),
        ("in.txt", "x", ("--task", "token_embed"), "one row for each text"),
        ("in.txt", "x", ("--task", "classify"), "Supported: embed, token_embed"),
        ("in.txt", "x", ("--dimensions", "17"), "ask for 1 to 16"),
        ("in.txt", "x", ("--prompt-name", "query"), "no prompt 'query'"),
        ("in.txt", "x", ("--field", "text"), "--field is for .jsonl files"),
    ],
)
def test_what_is_wrong_with_all_lines_is_one_error(embed, name, content, arguments, error):
    done, vectors = embed(name, content, *arguments)
    assert done.code in (1, 2) and vectors is None
    assert error in done.err and "Traceback" not in done.err
    assert "0/1" not in done.err


def test_a_wrong_output_is_one_error(embed, toolkit, checkpoint, tmp_path):
    done, _ = embed("in.txt", "x", out="out.csv")
    assert done.code == 2 and "must end in .npy or .parquet" in done.err
    done, _ = embed("in.txt", "x", out="absent/out.npy")
    assert done.code == 2 and "cannot be written" in done.err
    (tmp_path / "folder.npy").mkdir()
    done = toolkit(
        "embed", checkpoint, "--in", tmp_path / "in.txt", "--out", tmp_path / "folder.npy", *SMALL
    )
    assert done.code == 2 and "is a folder" in done.err


def test_parquet_needs_its_extra(embed, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done, _ = embed("in.txt", "x", out="out.parquet")
    assert done.code == 2 and "toolkit-lm-cli[parquet]" in done.err


def test_parquet(toolkit, checkpoint, tmp_path, llm):
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {number}" for number in range(1200)]
    texts[7] = ""
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    done = toolkit(
        "embed",
        checkpoint,
        "--in",
        tmp_path / "in.jsonl",
        "--out",
        tmp_path / "out.parquet",
        *SMALL,
    )
    assert done.code == 1 and "1 of 1200" in done.err
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert (table["text"], table["vector"][7], table["error"][6:8]) == (
        texts,
        None,
        [None, "the text is empty."],
    )
    del texts[7], table["vector"][7]
    np.testing.assert_allclose(np.array(table["vector"]), expected(llm, texts), atol=1e-5)
