"""Chat templates that loop for ever or grow without end: a RequestError, in time and with little
memory."""

from __future__ import annotations

import json
import resource
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from toolkit_lm.errors import CheckpointError, ConfigError, ContextLengthError, RequestError
from toolkit_lm_renderer_hf import bounded
from toolkit_lm_renderer_hf.chat_template import ChatTemplate, find_chat_template

CHAT = [{"role": "user", "content": "hi"}]
SECONDS = 0.3
BIG = "{% set big = 'a' * 900000 %}"
NAMESPACE = (
    "{% set ns = namespace(x=start) %}{% for i in range(99) %}{% set ns.x = change %}{% endfor "
    "%}{{ ns.x }}"
)
FOREVER = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with a condition": (
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}"
    ),
    "loops that count": "{% set ns = namespace(x=0) %}{% for a in range(99999) %}{% for b in "
    "range(99999) %}"
    "{% set ns.x = ns.x + 1 %}{% endfor %}{% endfor %}",
    "macros that call themselves twice": (
        "{% macro m(d) %}{% if d %}{{ m(d - 1) }}{{ m(d - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
}
LARGE = {
    "a product": "{{ 'a' * 10**10 }}",
    "a product, the other way": "{{ 10**10 * 'a' }}",
    "a product of products": BIG + "{{ big * 900000 }}",
    "a list": "{{ [1] * 10**9 }}",
    "a tuple": "{{ (1, 2) * 10**9 }}",
    "a power": "{{ 9 ** 100000 }}",
    "squares": NAMESPACE.replace("start", "3").replace("change", "ns.x * ns.x"),
    "padding": "{{ 'a'.ljust(10**10) }}",
    "padding by another name": "{{ 'a'['zfill'](10**10) }}",
    "a filter's width": "{{ 'a'|center(width=10**10) }}",
    "a percent": "{{ '%1000000000d' % 1 }}",
    "a percent with a star": "{{ '%*d' % (10**9, 1) }}",
    "a percent as a filter": "{{ '%1000000000d'|format(1) }}",
    "many percents": BIG + "{{ ('%(a)s' * 90000) % {'a': big} }}",
    "braces": "{{ '{:1000000000}'.format(1) }}",
    "braces in braces": "{{ '{:{}}'.format(1, 10**9) }}",
    "many braces": BIG + "{{ ('{0}' * 90000).format(big) }}",
    "a text doubled by ~": NAMESPACE.replace("start", "'a'").replace("change", "ns.x ~ ns.x"),
    "a text doubled by +": NAMESPACE.replace("start", "'a'").replace("change", "ns.x + ns.x"),
    "a list doubled": NAMESPACE.replace("start", "[1]").replace("change", "ns.x + ns.x"),
    "lists of one by one": "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% for b in "
    "range(99999) %}"
    "{% set ns.x = ns.x + [1] %}{% endfor %}{% endfor %}",
    "lists in lists": NAMESPACE.replace("start", "1").replace("change", "[ns.x, ns.x]"),
    "tuples in tuples": NAMESPACE.replace("start", "1").replace("change", "(ns.x, ns.x)"),
    "objects in objects": NAMESPACE.replace("start", "1").replace(
        "change", "{'a': ns.x, 'b': ns.x}"
    ),
    "dict() in dict()": NAMESPACE.replace("start", "1").replace("change", "dict(a=ns.x, b=ns.x)"),
    "dict.fromkeys()": NAMESPACE.replace("start", "1").replace(
        "change", "dict.fromkeys('ab', ns.x)"
    ),
    "lists by a filter": NAMESPACE.replace("start", "1").replace(
        "change", "[q, w]|map('default', ns.x)|list"
    ),
    "a macro's arguments": (
        "{% macro m(d) %}{{ m(d - 1, varargs, varargs) if d else varargs }}{% endmacro %}{{ "
        "m(90, 1, 1) }}"
    ),
    "a lazy list": "{{ range(99999)|map('center', 99999)|list|length }}",
    "a lazy join": "{{ range(99999)|map('center', 99999)|join|length }}",
    "separators": BIG + "{{ range(99999)|join(big)|length }}",
    "separators of a method": BIG + "{{ big.join('b' * 99999)|length }}",
    "replacements": BIG + "{{ big.replace('a', big)|length }}",
    "replacements of a filter": BIG + "{{ big|replace('a', big)|length }}",
    "an indentation": "{{ ('a\n' * 300000)|indent(99999)|length }}",
    "an indentation by a text": "{{ ('a\n' * 300000)|indent('x' * 9999)|length }}",
    "an indentation of JSON": "{{ {'a': 1}|tojson(indent=10**10) }}",
    "separators of JSON": BIG + "{{ range(9999)|list|tojson(separators=(big, big))|length }}",
    "a batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "slices": "{{ [1]|slice(10**10)|list }}",
    "digits": "{{ 1.5|round(10**10) }}",
    "a block that is set": "{% set x %}{% for i in range(99999) %}"
    + "y" * 50_000
    + "{% endfor %}{% endset %}",
    "a block that is called": "{% block a %}{% for i in range(99999) if go %}"
    + "y" * 50_000
    + "{% endfor %}{% endblock %}"
    "{% set go = true %}{{ self.a()|length }}",
    "copies": BIG + "".join(f"{{% set a{i} = big[1:] %}}" for i in range(2000)),
}
REFUSED = {
    "sums of lists": "{{ ([[1]] * 90000)|sum(start=[]) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "a table": "{{ 'a'.translate({97: 'b' * 99999}) }}",
    "appended items": "{% set x = [] %}{% for i in range(99999) %}{{ x.append(1) }}{% endfor %}",
    "macros that call themselves": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "texts of a removed function": "{{ lipsum(n=10**6) }}",
    "a long format of the time": "{{ strftime_now('%d' * 10**5) }}",
}


def render(source: str) -> str:
    return ChatTemplate({"default": source}, {}).render(CHAT, max_length=2**20)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", FOREVER)
def test_a_rendering_ends_in_time(name, monkeypatch):
    monkeypatch.setattr(bounded, "MOST_SECONDS", SECONDS)
    start = time.thread_time()
    with pytest.raises(
        RequestError,
        match=r"the chat template took too long: more than 0\.3 seconds of processor time",
    ):
        render(FOREVER[name])
    assert time.thread_time() - start < 10 * SECONDS


class StarvedClock:
    """On the wall a minute goes by with each look; of the processor's time, this thread gets what
    it really gets."""

    def __init__(self):
        self.now = 0

    thread_time = staticmethod(time.thread_time)

    def monotonic(self):
        self.now += 60
        return self.now


def test_time_that_other_work_takes_is_not_the_templates(monkeypatch):
    monkeypatch.setattr(bounded, "time", StarvedClock())
    assert (
        render(
            "{% for m in messages %}{% for i in range(999) %}{% endfor %}{{ m.content }}{% "
            "endfor %}"
        )
        == "hi"
    )
    monkeypatch.setattr(bounded, "MOST_SECONDS", SECONDS)
    with pytest.raises(RequestError, match="took too long"):
        render(FOREVER["loops"])


@pytest.mark.parametrize("name", FOREVER)
def test_trials_and_the_rendering_share_one_budget(name, monkeypatch):
    """Each trial of a template that takes for ever would take as long again."""
    monkeypatch.setattr(bounded, "MOST_SECONDS", SECONDS)
    budgets = []
    monkeypatch.setattr(
        bounded,
        "Budget",
        lambda length, make=bounded.Budget: budgets.append(make(length)) or budgets[-1],
    )
    with pytest.raises(RequestError, match="took too long"):
        ChatTemplate({"default": FOREVER[name]}, {}).render(CHAT, max_length=2**20)
    assert len(budgets) == 1


@pytest.mark.parametrize("name", LARGE)
def test_a_rendering_makes_no_more_than_its_budget(name, monkeypatch):
    # Only the size may end it, however slow the machine is.
    monkeypatch.setattr(bounded, "MOST_SECONDS", 300)
    before = peak()
    with pytest.raises(RequestError, match="the chat template grew too large"):
        render(LARGE[name])
    assert peak() - before < 2**30


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_template_needs_is_refused(name):
    with pytest.raises(RequestError, match=r"forbids|cannot render|refuses"):
        render(REFUSED[name])


def test_a_long_conversation_that_a_template_collects_is_in_the_budget():
    chat = [{"role": "user", "content": "x" * 1000}] * 900
    source = (
        "{% set ns = namespace(x=[]) %}{% for m in messages %}{% set ns.x = ns.x + [m] %}{% "
        "endfor %}{{ ns.x|length }}"
    )
    source += "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert ChatTemplate({"default": source}, {}).render(chat, max_length=2**20).startswith("900x")
    source = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content "
        "%}{% endfor %}{{ ns.x|length }}{{ ns.x }}"
    )
    assert (
        ChatTemplate({"default": source}, {})
        .render(chat[:600], max_length=2**20)
        .startswith("600000x")
    )


def test_what_is_written_is_bounded_too():
    with pytest.raises(ContextLengthError):
        render(
            "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% "
            "endfor %}"
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x" * 2**18 + "x", "too long: it may have 262144 characters"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled: RecursionError"),
        ("{{ " + "+".join(["a"] * 9999) + " }}", "cannot be compiled: RecursionError"),
        ("{{ 'a'|urlize }}", "does not parse: line 1: No filter named 'urlize'"),
    ],
)
def test_sources_are_bounded(source, message):
    for error in (CheckpointError, ConfigError):
        with pytest.raises(error, match=message):
            ChatTemplate({"default": source}, {}, error)


def test_files_are_bounded(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("x" * 50_000_000)
    with pytest.raises(CheckpointError, match="too long"):
        find_chat_template(None, tmp_path, {}, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        find_chat_template(None, tmp_path, {}, {})


@pytest.mark.parametrize(
    "template",
    [3, {"a": 3}, [{"name": "default"}], ["x"], [{"name": "default", "template": ["x"]}]],
)
def test_a_template_is_a_text(tmp_path, template):
    with pytest.raises(CheckpointError, match="chat_template must be a text"):
        find_chat_template(None, tmp_path, {"chat_template": template}, {})


@pytest.mark.parametrize(
    "source",
    [
        (
            "{{ 'a'.center(5) }}|{{ 'a'|center(3) }}|{{ '%5.1f' % 2 }}|{{ '%s-%s'|format(1, 2) "
            "}}|{{ '{:>3}{}'.format(1, 2) }}"
        ),
        "{{ [1] + [2] }}{{ (1, 2) * 2 }}{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 'a' ~ 1 ~ none }}{{ 7 % 3 }}",
        (
            "{{ messages|map(attribute='role')|join(', ') }}{{ [3, 1]|sort }}{{ {'a': "
            "1}|items|list }}{{ [1, 2]|sum }}"
        ),
        (
            "{% for a, b in [(1, 2), (3, 4)] %}{{ loop.index }}/{{ loop.length }}{{ a + b }}{% "
            "endfor %}"
        ),
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        (
            "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1) "
            "}}{{ m(1, 2, 3, c=4) }}"
        ),
        (
            "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}{% block c "
            "%}d{% endblock %}{{ self.c() }}"
        ),
        (
            "{{ 'a-b'.replace('-', '+').split('+') }}{{ '-'.join(['x', 'y']) }}{{ 'abc'[1:] }}{{ "
            "'x\ny'|indent(2) }}"
        ),
        (
            "{% macro m() %}<{{ caller(1) }}>{% endmacro %}{% call(x) m() %}{{ x }}{% endcall "
            "%}{{ (messages + messages)[1:] }}"
        ),
        (
            "{{ {'a': [1, {'b': 'é'}]}|tojson(indent=2) }}{{ [1, 2]|tojson(separators=(',', "
            "':')) }}{{ 'a' if false }}"
        ),
    ],
)
def test_ordinary_expressions_give_what_jinja_gives(source):
    source += "{{ messages[0].content }}"
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    jinja.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    assert render(source) == jinja.from_string(source).render(messages=CHAT)
