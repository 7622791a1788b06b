"""`commits.py`: which subjects of commits it finds at fault, and which commits it looks at."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("commits", Path(__file__).with_name("commits.py"))
commits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(commits)
ROOMS = commits.all_rooms(commits.ROOT)


@pytest.mark.parametrize(
    "subject",
    [
        "server: refuse fields that would change the answer",
        "server, vendor_apis: pass on what clients send",
        "scheduler: run, report and forget",
        "params: need no torch",
        "lint: hold lines to 100 columns",
        "fixup! docs: embed pictures",
        f"core: {'a' * 66}",
    ],
)
def test_a_subject_with_a_room_and_an_imperative_is_fine(subject):
    assert list(commits.faults(subject, ROOMS)) == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Refuse fields", "not `room: imperative`"),
        ("", "not `room: imperative`"),
        ("server:refuse fields", "not `room: imperative`"),
        ("kitchen: refuse fields", "no room is named 'kitchen'"),
        ("server, kitchen: refuse fields", "no room is named 'kitchen'"),
        ("renderer-hf: refuse tools", "no room is named 'renderer-hf'"),
        ("server: Refuse fields", "no imperative"),
        ("server: refused fields", "no imperative"),
        ("server: refusing fields", "no imperative"),
        ("server: refuses fields", "no imperative"),
        ("server: ", "no imperative"),
        ("server: refuse fields.", "full stop"),
        (f"core: {'a' * 67}", "73 characters, and may have 72"),
    ],
)
def test_what_is_wrong_with_a_subject_is_told(subject, fault):
    assert [fault in told for told in commits.faults(subject, ROOMS)] == [True]


def test_rooms_are_those_of_core_and_the_folders():
    """Each has a name of its own, so that a subject tells where to look."""
    some = {"scheduler", "params", "core", "renderer_hf", "sdpa", "media", "tests", "docs", "ci"}
    assert some <= ROOMS
    assert not {"src", "__init__", "_version", "conftest", "py"} & ROOMS
    folders = [path.name for pattern in commits.FOLDERS for path in commits.ROOT.glob(pattern)]
    names = [name for name in folders if name in ROOMS]
    names += commits.distributions(commits.ROOT) - {"core"}
    assert sorted(names) == sorted(set(names))


@pytest.fixture
def history(tmp_path):
    """A repository of three commits, none with a room, and the hash of the first."""
    command = ["git", "-C", str(tmp_path / "full"), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q", str(tmp_path / "full")], check=True)
    for subject in ("First", "Second", "Third"):
        subprocess.run([*command, "commit", "-q", "--allow-empty", "-m", subject], check=True)
    base = subprocess.check_output([*command, "rev-parse", "HEAD~2"], text=True).strip()
    return tmp_path / "full", base


def test_commits_after_the_base_are_looked_at(history):
    root, base = history
    subjects, left_out = commits.subjects_since(root, base)
    assert [subject for _, subject in subjects] == ["Third", "Second"] and not left_out


def test_what_history_does_not_have_is_said(history, tmp_path):
    root, base = history
    shallow = tmp_path / "shallow"
    clone = ["git", "clone", "-q", "--depth", "1", f"file://{root}", str(shallow)]
    subprocess.run(clone, check=True)
    assert [x for _, x in commits.subjects_since(shallow, base)[0]] == ["Third"]
    assert "A shallow clone: 1 " in commits.subjects_since(shallow, base)[1]
    assert "not in this history" in commits.subjects_since(root, "0" * 40)[1]
    shutil.rmtree(root / ".git")
    assert "no history" in commits.subjects_since(root, base)[1]


def test_a_message_that_is_being_written_is_looked_at(tmp_path, capsys):
    (tmp_path / "message").write_text("\n# a comment\nserver: refused fields\n\nThe reason.\n")
    assert commits.main([str(tmp_path / "message")]) == 1
    assert "this commit: 'refused' is no imperative" in capsys.readouterr().err
    (tmp_path / "message").write_text("server: refuse fields\n")
    assert commits.main([str(tmp_path / "message")]) == 0
