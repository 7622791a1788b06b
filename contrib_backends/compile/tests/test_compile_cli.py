"""The commands `toolkit cache ...`, over a store that was made up."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_cli.app import run
from toolkit_lm_compile import archive as archive_module
from toolkit_lm_compile.archive import read_archive
from toolkit_lm_compile.split import ForwardPlan, Step
from toolkit_lm_compile.store import MANIFEST, Entry, Manifest, open_root

KEY = "ab" * 16
OTHER = "cd" * 16
PLAN = ForwardPlan(
    arguments={},
    inputs=[],
    num_registers=1,
    steps=[Step("part", "0123", [], [0]), Step("part", "0123", [], [0])],
    result=0,
)


def fill(root, key=KEY, model="M float32 -O1"):
    entry = Entry(open_root(root), key, "rank_0_0")
    with entry.locked(), entry.staged() as folder:
        (folder / "parts" / "0123" / "any").mkdir(parents=True)
        (folder / "parts" / "0123" / "any" / "code.so").write_bytes(b"x" * 1000)
        (folder / "graph_0.py").write_text("graph")
        entry.publish(
            folder,
            Manifest(model=model, ingredients={"config": "digest"}, sources={}, plans=[PLAN]),
        )
    return entry


def cache(*arguments, folder):
    return run(["cache", *map(str, arguments), "--cache-dir", str(folder)])


@pytest.fixture
def exported(tmp_path):
    fill(tmp_path / "c")
    assert cache("export", KEY[:6], tmp_path / "e.tar.gz", folder=tmp_path / "c") == 0
    return tmp_path / "e.tar.gz"


def test_list(tmp_path, capsys):
    assert cache("list", "--json", folder=tmp_path / "nothing") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert not (tmp_path / "nothing").exists()
    fill(tmp_path / "c")
    damaged = fill(tmp_path / "c", OTHER)
    (damaged.folder / "graph_0.py").write_text("another")
    assert cache("list", "--json", folder=tmp_path / "c") == 0
    first, second = json.loads(capsys.readouterr().out)
    size = sum(
        path.stat().st_size
        for path in (tmp_path / "c" / KEY / "rank_0_0").rglob("*")
        if path.is_file()
    )
    assert first == {
        "key": KEY,
        "rank": "rank_0_0",
        "model": "M float32 -O1",
        "parts": 1,
        "bytes": size,
    }
    assert second["model"] == "damaged"
    assert cache("list", folder=tmp_path / "c") == 0
    assert "M float32 -O1" in capsys.readouterr().out


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path, capsys):
    fill(tmp_path / "c", model="[/bold] [red] :x: M")
    assert cache("list", folder=tmp_path / "c") == 0
    assert "[/bold] [red] :x: M" in capsys.readouterr().out


def test_show(tmp_path, capsys):
    entry = fill(tmp_path / "c")
    fill(tmp_path / "c", OTHER)
    assert cache("show", KEY[:4], folder=tmp_path / "c") == 0
    folder, _, text = capsys.readouterr().out.partition("\n")
    shown = json.loads(text)
    assert Path(folder) == entry.folder
    assert shown["ingredients"] == {"config": "digest"} and shown["plans"] == [["0123", "0123"]]
    assert set(shown["files"]) == {"graph_0.py", "parts/0123/any/code.so"}
    assert cache("show", "", folder=tmp_path / "c") == 2
    assert "2 entries of the compile cache begin with ''" in capsys.readouterr().err
    assert cache("show", "abd", folder=tmp_path / "c") == 2
    error = "".join(capsys.readouterr().err.split("\n"))
    assert "0 entries of the compile cache begin with 'abd'" in error and KEY in error


def test_show_says_what_is_damaged(tmp_path, capsys):
    (fill(tmp_path / "c").folder / "graph_0.py").write_text("grapg")
    assert cache("show", KEY, folder=tmp_path / "c") == 0
    assert "damaged: its file graph_0.py: its content has changed" in capsys.readouterr().out


def test_prune_takes_one_or_all(tmp_path, capsys):
    one = fill(tmp_path / "c")
    other = fill(tmp_path / "c", OTHER)
    assert cache("prune", KEY, folder=tmp_path / "c") == 0
    assert not one.folder.exists() and other.folder.exists()
    assert cache("prune", "ff", folder=tmp_path / "c") == 2
    assert cache("prune", folder=tmp_path / "c") == 0
    assert not other.folder.exists()
    assert "deleted: 1" in capsys.readouterr().out


def test_pruning_keeps_the_lock_that_others_wait_for(tmp_path):
    entry = fill(tmp_path / "c")
    lock = entry.parent / ".rank_0_0.lock"
    before = lock.stat().st_ino
    assert cache("prune", folder=tmp_path / "c") == 0
    assert not entry.folder.exists() and lock.stat().st_ino == before


def test_an_exported_entry_can_be_imported_elsewhere(exported, tmp_path, capsys):
    before = Entry(tmp_path / "c", KEY, "rank_0_0").read()
    for _ in range(2):
        assert cache("import", exported, folder=tmp_path / "d") == 0
        assert Entry(tmp_path / "d", KEY, "rank_0_0").read() == before
    assert f"taken: {KEY}" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "d").iterdir()} == {KEY}
    with tarfile.open(exported) as tar:
        assert {(one.uid, one.uname, one.mode) for one in tar} == {(0, "", 0o600)}
    open_root(tmp_path / "d")


def test_what_is_damaged_is_not_exported(tmp_path, capsys):
    (fill(tmp_path / "c").folder / "graph_0.py").write_text("grapg")
    assert cache("export", KEY, tmp_path / "e.tar.gz", folder=tmp_path / "c") == 2
    assert "graph_0.py: its content has changed" in capsys.readouterr().err.replace("\n", " ")
    assert not [path for path in tmp_path.iterdir() if path.name != "c"]


def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys):
    fill(tmp_path / "c")
    assert cache("export", KEY, tmp_path / "nowhere" / "e.tar.gz", folder=tmp_path / "c") == 2
    assert "cannot be written" in capsys.readouterr().err


def remade(exported, change):
    """The archive with its members changed: `change` gives what takes the place of a member."""
    made = exported.with_name("changed.tar.gz")
    with tarfile.open(exported) as old, tarfile.open(made, "w:gz") as new:
        for member in old:
            content = old.extractfile(member).read()
            for info, data in change(member, content):
                info.size = info.size or len(data)
                new.addfile(info, io.BytesIO(data))
    return made


def beside(**attributes):
    """A change that adds a member beside the graph."""

    def change(member, content):
        yield member, content
        if member.name.endswith("graph_0.py"):
            info = tarfile.TarInfo(attributes.pop("name", f"{KEY}/rank_0_0/more"))
            for name, value in attributes.items():
                setattr(info, name, value)
            yield info, b""

    return change


def with_manifest(edit):
    def change(member, content):
        if member.name.endswith(MANIFEST):
            content, member.size = edit(content), 0
        yield member, content

    return change


REFUSED = {
    "a path above": (beside(name=f"{KEY}/rank_0_0/../../../x"), "no path in an entry"),
    "an absolute path": (beside(name="/tmp/x"), "no path in an entry"),
    "a path elsewhere in the cache": (beside(name=f"{KEY}/.rank_0_0.lock"), "no path in an entry"),
    "a key that is none": (beside(name="x/rank_0_0/x"), "no path in an entry"),
    "a symbolic link": (beside(type=tarfile.SYMTYPE, linkname="graph_0.py"), "a link, or a device"),
    "a symbolic link out": (
        beside(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "a link, or a device",
    ),
    "a hard link": (
        beside(type=tarfile.LNKTYPE, linkname=f"{KEY}/rank_0_0/graph_0.py"),
        "a link, or a device",
    ),
    "a device": (beside(type=tarfile.CHRTYPE), "a link, or a device"),
    "a pipe": (beside(type=tarfile.FIFOTYPE), "a link, or a device"),
    "a file that the manifest does not name": (
        beside(),
        "'more', which its manifest does not name",
    ),
    "a long name": (beside(name=f"{KEY}/rank_0_0/{'x' * 600}"), "holds more than an entry"),
    "another format": (
        with_manifest(lambda text: text.replace(b"compile cache 2", b"compile cache 1")),
        "of another version.*compile cache 1",
    ),
    "no format": (
        with_manifest(lambda text: text.replace(b'"format"', b'"formal"')),
        "of another version",
    ),
    "another content": (
        with_manifest(lambda text: text.replace(b'"graph_0.py"', b'"graph_1.py"')),
        "its file graph_1.py: it is no file",
    ),
    "a manifest that names a file elsewhere": (
        with_manifest(lambda text: text.replace(b'"graph_0.py"', b'"../../../c/x"')),
        r"its file \.\./\.\./\.\./c/x lies elsewhere",
    ),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_import_refuses(exported, tmp_path, change, reason):
    root = open_root(tmp_path / "d")
    with pytest.raises(ConfigError, match=reason):
        read_archive(remade(exported, change), root)
    assert not list(root.iterdir())


@pytest.mark.parametrize(("name", "most"), [("MOST_BYTES", 900), ("MOST_FILES", 2)])
def test_import_refuses_absurd_sizes(exported, tmp_path, monkeypatch, name, most):
    monkeypatch.setattr(archive_module, name, most)
    with pytest.raises(ConfigError, match="holds more than an entry"):
        read_archive(exported, open_root(tmp_path / "d"))


def test_import_reads_nothing_of_a_file_that_claims_an_absurd_size(tmp_path):
    info = tarfile.TarInfo(f"{KEY}/rank_0_0/large")
    info.size = 2**40
    with gzip.open(tmp_path / "e.tar.gz", "wb") as file:
        file.write(info.tobuf())
    with pytest.raises(ConfigError, match="holds more than an entry"):
        read_archive(tmp_path / "e.tar.gz", open_root(tmp_path / "d"))


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("header")
    info.type = kind
    info.size = size
    return info.tobuf()


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
def test_import_holds_no_large_header_in_memory(tmp_path, kind):
    """tarfile reads a header of attributes, or a long name, whole."""
    size = 300 * 2**20
    with gzip.open(tmp_path / "e.tar.gz", "wb", compresslevel=1) as file:
        file.write(header(kind, size))
        for _ in range(size // 2**20):
            file.write(bytes(2**20))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=f"cannot be read: a header of {size} bytes"):
            read_archive(tmp_path / "e.tar.gz", open_root(tmp_path / "d"))
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_import_refuses_headers_without_an_end(tmp_path):
    attributes = b"%d comment=%b\n" % (2**16, b"x" * (2**16 - 15))
    with gzip.open(tmp_path / "e.tar.gz", "wb", compresslevel=1) as file:
        for _ in range(2000):
            file.write(header(tarfile.XGLTYPE, len(attributes)) + attributes.ljust(2**16, b"\0"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_archive(tmp_path / "e.tar.gz", open_root(tmp_path / "d"))


def test_import_says_what_it_replaces(exported, tmp_path, capsys):
    root = tmp_path / "d"
    assert cache("import", exported, folder=root) == 0
    assert capsys.readouterr().out == f"taken: {KEY}\n"
    assert cache("import", exported, folder=root) == 0
    assert capsys.readouterr().out == f"unchanged: {KEY}, which the cache has already\n"
    fill(root, model="another")
    assert cache("import", exported, folder=root) == 0
    assert capsys.readouterr().out == f"taken: {KEY}, in place of another entry, which is gone\n"
    (root / KEY / "rank_0_0" / "graph_0.py").write_text("damaged")
    assert cache("import", exported, folder=root) == 0
    assert capsys.readouterr().out.startswith(f"taken: {KEY}, in place of")
    assert (root / KEY / "rank_0_0" / "graph_0.py").read_text() == "graph"


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_import_refuses_what_cannot_be_read(exported, tmp_path, content):
    exported.write_bytes(exported.read_bytes()[:200] if content is None else content)
    with pytest.raises(ConfigError, match=r"cannot be read|holds no entry"):
        read_archive(exported, open_root(tmp_path / "d"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_archive(tmp_path / "missing", open_root(tmp_path / "d"))


@pytest.mark.parametrize("place", ["/proc/nowhere/compile", "/proc/self"])
def test_a_folder_that_cannot_be_made_or_written_is_named(place):
    with pytest.raises(
        ConfigError, match=r"cannot be (made|written).*cache_dir.*compile_cache=False"
    ):
        open_root(Path(place))
