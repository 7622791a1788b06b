"""The subjects of commits: `room: imperative`, at most 72 characters.

usage: python tests/commits.py [FILE]

FILE: the message of a commit that is being written, for a commit-msg hook. Without it, all commits
since BASE are looked at. Where there is no history (an archive) or only a part of it (a shallow
clone), it looks at what is there, and says so.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = "e67b8ef3e574543bc01dadedcd7c6094d5c07068"
"""The last commit that need not obey. Where a room goes, it becomes the last that names it."""
LONGEST = 72
"""Characters of a subject. Lists of commits cut longer ones."""
OTHER_ROOMS = ("ci", "lint", "all")
"""Rooms without a folder. "all": what changes every room in the same way."""
FOLDERS = ("*", "core/src/toolkit_lm/*")
"""Folders that are rooms, and core's modules. So is the folder of each distribution."""
OPENINGS = ("fixup! ", "squash! ")
"""Prefixes that git puts before the subject of a commit that is to be squashed into another."""
NO_VERB_FORMS = re.compile(r"(?!\w*eed$|embed$|shed$|\w*(?:br|p|r)ing$)\w+(?:ing|ed)")
THIRD_PERSON = re.compile(r"(?!focus$|bias$|alias$|canvas$)\w*[^\Ws]s")


def main(arguments: list[str]) -> int:
    """Prints what is wrong with each subject. Returns the exit code."""
    rooms = all_rooms(ROOT)
    if arguments:
        subjects = [("this commit", subject_of(Path(arguments[0]).read_text(encoding="utf-8")))]
    else:
        subjects, left_out = subjects_since(ROOT, BASE)
        if left_out:
            print(left_out)
    problems = [f"{name}: {told}" for name, line in subjects for told in faults(line, rooms)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if any("room" in problem for problem in problems):
        print(f"rooms: {', '.join(sorted(rooms))}", file=sys.stderr)
    return bool(problems)


def all_rooms(root: Path) -> set[str]:
    """The names that may stand before the colon."""
    found = {path for pattern in FOLDERS for path in root.glob(pattern)}
    names = {path.name for path in found if path.is_dir()}
    names |= distributions(root)
    names |= {path.stem for path in found if path.suffix == ".py" and path.parent != root}
    return {name for name in names if re.fullmatch(r"[a-z]\w*", name)} | set(OTHER_ROOMS)


def distributions(root: Path) -> set[str]:
    """The names of the folders of the workspace's distributions."""
    listed = (root / "requirements-dev.txt").read_text(encoding="utf-8")
    return {Path(folder).name for folder in re.findall(r"^-e \./(\S+)$", listed, re.MULTILINE)}


def subject_of(message: str) -> str:
    """The first line of a message that git takes no comments from yet."""
    lines = (line.strip() for line in message.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def subjects_since(root: Path, base: str) -> tuple[list[tuple[str, str]], str]:
    """The commits after `base`, as short hash and subject, and what could not be looked at.

    Raises subprocess.CalledProcessError where git refuses, after git's own words on stderr.
    """
    if not (root / ".git").exists() or not shutil.which("git"):
        return [], "There is no history, or no git: no subjects of commits are checked."
    command = ["git", "-C", str(root)]
    shallow = output(*command, "rev-parse", "--is-shallow-repository").strip() == "true"
    has_base = [*command, "merge-base", "--is-ancestor", base, "HEAD"]
    since = subprocess.run(has_base, stderr=subprocess.DEVNULL, check=False).returncode == 0
    if not since and not shallow:
        return [], f"Commit {base[:9]} is not in this history: no subjects of commits are checked."
    commits = f"{base}..HEAD" if since else "HEAD"
    lines = output(*command, "log", "--no-merges", "--format=%h%x09%s", commits).splitlines()
    subjects = [(name, subject) for name, _, subject in (line.partition("\t") for line in lines)]
    return subjects, "" if since else f"A shallow clone: {len(lines)} subjects are checked."


def output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def faults(subject: str, rooms: set[str]) -> Iterator[str]:
    """Faults of a subject."""
    for opening in OPENINGS:
        subject = subject.removeprefix(opening)
    if len(subject) > LONGEST:
        yield f"{len(subject)} characters, and may have {LONGEST}: {subject}"
    room, colon, text = subject.partition(": ")
    if not colon:
        yield f"not `room: imperative`: {subject}"
        return
    for name in room.split(", "):
        if name not in rooms:
            yield f"no room is named {name!r}: {subject}"
    verb = text.split(" ")[0].rstrip(",")
    if not verb[:1].islower() or NO_VERB_FORMS.fullmatch(verb) or THIRD_PERSON.fullmatch(verb):
        yield f"{verb!r} is no imperative, such as `refuse`: {subject}"
    if subject.endswith("."):
        yield f"a subject has no full stop: {subject}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
