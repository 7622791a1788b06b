"""`lints.py`: what each of its rules finds, and what it lets pass."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("lints", Path(__file__).with_name("lints.py"))
lints = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lints)


def found(rule, source: str) -> list[int]:
    return [line for line, _ in rule(ast.parse(source))]


def test_a_pragma_counts_as_a_part_of_its_line():
    fits = f"x = {'1' * 80}  # noqa: E741"
    long = f"x = {'1' * 84}  # type: ignore"
    assert max(map(len, (fits, long))) > 100 > len(fits)
    assert [line for line, _ in lints.overlong(f"{fits}\n{long}\n{'y' * 120}\n")] == [2]


@pytest.mark.parametrize(
    "source",
    [
        "a, b = 1, 2",
        "self.a, self.b = x, f(y)",
        "(a, b), c = x, y",
        "[a, b] = [f(), g()]",
        "a, b = (\n    1,\n    2,\n)",
        "for _ in x:\n    a, b = c, d",
    ],
)
def test_packed_assignments_are_found(source):
    assert len(found(lints.packed, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "a, b = b, a",
        "a, b = b, a + b",
        "self.new, new = [], self.new",
        "i, a[i] = a[i], i",
        "(a, b), c = x, a",
        "a, b = pair",
        "a, *b = 1, 2",
        "a = 1, 2",
        "(a,) = [b]",
        "a = b = 1",
    ],
)
def test_swaps_steps_and_what_is_unpacked_pass(source):
    assert found(lints.packed, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = 1 if a else 2 if b else 3",
        "x = (1 if a else 2) if b else 3",
        "x = 1 if (a if b else c) else 2",
    ],
)
def test_conditional_expressions_in_others_are_found(source):
    assert set(found(lints.nested, source)) == {1}


def test_conditional_expressions_side_by_side_pass():
    assert found(lints.nested, "x = (1 if a else 2) + f(3 if b else 4)") == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1\n\n'''Apart.'''", 3),
        ("x = 1\nf()\n'''Of nothing.'''", 3),
        ("class A:\n    '''A.'''\n    x: int = 1\n    # a comment\n    '''Apart.'''", 5),
        ("def f():\n    '''F.'''\n    '''Of nothing.'''", 3),
        ("if a:\n    '''Of nothing.'''", 2),
    ],
)
def test_texts_of_nothing_are_found(source, line):
    assert found(lints.orphans, source) == [line]


def test_docstrings_and_texts_under_attributes_pass():
    source = (
        "'''M.'''\nx = 1\n'''X.'''\nx += 1\n'''X.'''\n"
        "class A:\n    '''A.'''\n    y: int\n    '''Y.'''\n"
    )
    assert found(lints.orphans, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "one = 1",
        "[one for one in x]",
        "def f(given): ...",
        "def _take(): ...",
        "def take_in(): ...",
        "x._told = 1",
        "if (its := f()): ...",
    ],
)
def test_names_that_say_nothing_are_found(source):
    assert len(found(lints.vague, source)) == 1


def test_names_of_others_pass():
    assert found(lints.vague, "x = np.take(y)\ntaken = request.given\ndef uptake(only): ...") == []


def test_comments_that_do_not_begin_with_their_subject_are_found():
    source = (
        "# Of two, the first.\nx = 1\n# The first\n# As a rule.\ny = 1  # What\n    # What is\n"
    )
    assert [line for line, _ in lints.turned(source)] == [1, 6]


HELPERS = """
import pytest
from helper import run, compared

def verify(x): ...

def inner(x):
    assert x

def outer(x):
    inner(x)

@pytest.fixture
def served():
    def ask(x):
        assert x
    return ask

@pytest.fixture
def given():
    return 1
"""


@pytest.mark.parametrize(
    ("body", "is_idle"),
    [
        ("f(x)", True),
        ("run(x)", True),
        ("print(given)", True),
        ("assert x", False),
        ("with pytest.raises(ValueError): f()", False),
        ("mock.assert_called_once()", False),
        ("check_it(x)", False),
        ("verify(x)", False),
        ("inner(x)", False),
        ("outer(x)", False),
        ("compared(x)", False),
        ("served(x)", False),
        ("subprocess.run(command, check=True)", False),
    ],
)
def test_a_test_that_asserts_nothing_is_found(tmp_path, body, is_idle):
    (tmp_path / "helper.py").write_text("def run(x): ...\ndef compared(x):\n    assert x\n")
    path = tmp_path / "test_one.py"
    path.write_text(f"{HELPERS}\ndef test_it(given):\n    {body}\n")
    tests = lints.Tests([path, tmp_path / "helper.py"])
    assert [what.split()[0] for _, what in tests.idle(path)] == ["test_it"] * is_idle


def test_what_is_found_is_said_with_its_place(tmp_path, capsys):
    path = tmp_path / "one.py"
    path.write_text("x = 1\na, b = 1, 2\n")
    assert lints.main([str(path)]) == 1
    told = "targets that are packed together: give each a line of its own"
    assert capsys.readouterr().err == f"{path}:2: {told}\n"
    path.write_text("x = 1\n")
    assert lints.main([str(path)]) == 0


def wording(*texts: str, path: str = "core/src/a.py") -> list[str]:
    """Faults of a module whose attributes have these docstrings."""
    source = "\n".join(f"x{n} = {n}\n{text!r}" for n, text in enumerate(texts))
    return list(lints.worded({Path(path): ast.parse(source)}))


@pytest.mark.parametrize("opener", ["Of", "As", "By", "What", "Those", "Where"])
def test_docstrings_that_put_the_subject_last_are_counted_by_place(opener, monkeypatch):
    monkeypatch.setattr(lints, "_OPENERS", {"core/src": 0})
    texts = [f"{opener} several, any."] + ["Plain."] * 20
    assert wording(*texts)[0].startswith(f'core/src/a.py:2: begins with "{opener}"')
    assert wording(*texts, path="libs/src/a.py") == []
    assert wording(*texts, *texts[:1], path="libs/src/a.py")[-1].endswith("limit 1 (of 22)")
    assert wording("Officers.", "Asks.", "Bytes.") == []


def test_docstrings_of_all_kinds_are_read():
    source = "'A'\nx = 1\n'B'\nclass C:\n  'C'\n  y: int\n  'D'\ndef f():\n  'E'\n  'F'"
    assert "".join(text for _, text in sorted(lints.docstrings(ast.parse(source)))) == "ABCDE"


@pytest.mark.parametrize("text", ["It is no option.", "These are no tokens.", "Nobody that asks."])
def test_negated_predicates_are_found(text, monkeypatch):
    monkeypatch.setattr(lints, "_OPENERS", {})
    assert len(wording(text)) == 2


def test_other_negations_pass():
    assert wording("If there is no option.", "There are no tokens.", "It is no longer one.") == []


def test_long_sentences_are_measured_at_the_95th_percentile(monkeypatch):
    monkeypatch.setattr(lints, "_LONGER", {})
    short = ["Short one. Another."] * 10
    long = " ".join(["word"] * 26) + "."
    assert wording(*short, long) == []
    assert wording(*short, long, long)[-1].startswith("core: sentences of 26 words")


def test_sentences_end_at_blank_lines_and_items():
    text = "One\ntwo. Three\n\nfour\n- five\n- six"
    assert [*lints.sentences(text)] == ["One\ntwo.", "Three", "four", "five", "six"]


def test_hooks_that_repeat_a_sentence_are_found():
    hook = "@hookspec\ndef f{0}():\n    '''Does {0}. Thread: main.'''"
    assert found(lints.repeated, "\n".join(map(hook.format, range(3)))) == [2, 5, 8]
    assert found(lints.repeated, "\n".join(map(hook.format, range(2)))) == []
