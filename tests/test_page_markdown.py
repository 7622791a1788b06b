"""Markdown and formulas of answers on the page at `/`: what they look like, and that no text of a
model becomes markup."""

from __future__ import annotations

import html
import re

import pytest
from browsing import NEEDS_CHROMIUM, browser, served, tiny

__all__ = ["browser", "served", "tiny"]
pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def render(browser, tiny):
    """render(text): the HTML of a Markdown text on the page, without attributes of layout."""
    page = browser.new_page()
    page.goto(f"{tiny}/")

    def made(text: str) -> str:
        markup = page.evaluate(
            """async (text) => {
                const { rendered } = await import("/ui/markdown.js");
                const around = document.createElement("div");
                around.append(rendered(text));
                document.body.append(around);
                const markup = around.innerHTML;
                around.remove();
                return markup;
            }""",
            text,
        )
        markup = re.sub(r' (class="plain"|rel="[^"]*"|target="_blank"|title="[^"]*")', "", markup)
        assert page.evaluate("window.bad") is None
        return markup

    yield made
    page.close()


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# a #\n## b\n#### c", "<h3>a</h3><h4>b</h4><h6>c</h6>"),
        ("#hash", "<p>#hash</p>"),
        ("---", "<hr>"),
        ("**a** *b* ***c*** ~~d~~ `e`", "<p><strong>a</strong> <em>b</em> "
         "<strong><em>c</em></strong> <s>d</s> <code>e</code></p>"),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
        (r"\*not\* \`code\`", "<p>*not* `code`</p>"),
        ("``a ` b``", "<p><code>a ` b</code></p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("- a\n  - b\n    1. c\n- d",
         '<ul><li>a<ul><li>b<ol start="1"><li>c</li></ol></li></ul></li><li>d</li></ul>'),
        ("1. a\n   - b\n2. c",
         '<ol start="1"><li>a<ul><li>b</li></ul></li><li>c</li></ol>'),
        ("- a\n\n  b\n- c", "<ul><li><p>a</p><p>b</p></li><li>c</li></ul>"),
        ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
        ("in\n1985. It was", "<p>in\n1985. It was</p>"),
        ("> a\n> > b\n\nc",
         "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        ("[a](https://b.org/c_(d))", '<p><a href="https://b.org/c_(d)">a</a></p>'),
        ('[**a**](http://b.org "t")', '<p><a href="http://b.org/">**a**</a></p>'),
        ("see https://b.org/x.", '<p>see <a href="https://b.org/x">https://b.org/x</a>.</p>'),
        ("<https://b.org>", '<p><a href="https://b.org/">https://b.org</a></p>'),
        ("![a](https://b.org/c.png)", '<p><a href="https://b.org/c.png">a</a></p>'),
        ("It costs $5 or $6.", "<p>It costs $5 or $6.</p>"),
    ],
)  # fmt: skip
def test_markdown(render, text, markup):
    assert render(text) == markup


def test_tables(render):
    markup = render("| a | b |\n|:--|--:|\n| `x|y` | 2 |\n| only |\n\nafter")
    assert re.findall(r"<(t[hd]) class=\"(\w+)\">(.*?)</t[hd]>", markup) == [
        ("th", "left", "a"),
        ("th", "right", "b"),
        ("td", "left", "<code>x|y</code>"),
        ("td", "right", "2"),
        ("td", "left", "only"),
        ("td", "right", ""),
    ]
    assert markup.endswith("<p>after</p>")
    # A line of delimiters with other columns makes none.
    assert "<table" not in render("| a | b |\n|---|\n| 1 |")


@pytest.mark.parametrize("fence", ["```", "~~~~"])
def test_code(render, fence):
    markup = render(f"{fence}python\nif x:  # <b>\n    return 'a'\n{fence}\nafter")
    code = re.search(r"<code>(.*)</code>", markup, re.DOTALL)[1]
    assert html.unescape(re.sub(r"<[^>]+>", "", code)) == "if x:  # <b>\n    return 'a'"
    kinds = re.findall(r'<span class="(\w+)">(.*?)</span>', code)
    assert kinds == [("word", "if"), ("note", "# &lt;b&gt;"), ("word", "return"), ("string", "'a'")]
    assert "<p>after</p>" in markup
    # An answer that is being written has no end of the block yet.
    assert "<code>one\ntwo</code>" in render(f"{fence}\none\ntwo")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"$x^2_i$", ["<msubsup>", "<mi>x</mi>", "<mn>2</mn>"]),
        (r"\(\frac{a}{\sqrt{b}}\)", ["<mfrac>", "<msqrt>"]),
        (r"$$\sum_{i=1}^n \alpha_i$$", ["<munderover>", "∑", "α", 'display="block"']),
        (r"$\left(\begin{matrix}1 & 2\\3 & 4\end{matrix}\right)$", ["<mtable>", "<mn>4</mn>"]),
        (r"$\mathbb{R} \text{if } x \neq 0$", ["ℝ", "<mtext>if </mtext>", "≠"]),
        ("\\[\nE = mc^2\n\\]", ["<msup>", 'display="block"']),
    ],
)
def test_formulas(render, text, parts):
    markup = render(text)
    assert "<math" in markup
    assert [part for part in parts if part not in markup] == []


@pytest.mark.parametrize(
    "text", [r"\href{javascript:1}{x}", r"\frac{a}", "x^2^3", "{" * 40 + "}" * 40, r"\constructor"]
)
def test_other_formulas_stay_text(render, text):
    markup = render(f"${text}$")
    assert "<math" not in markup
    assert text in html.unescape(markup)


MALICIOUS = (
    "<img src=x onerror='window.bad=1'>",
    "<script>window.bad=1</script>",
    "[a](javascript:window.bad=1)",
    "[a](JaVaScRiPt:window.bad=1)",
    "[a](java\nscript:window.bad=1)",
    "[a](data:text/html,<script>window.bad=1</script>)",
    "[a](vbscript:x)",
    "[a](//evil.org)",
    "[a](file:///etc/passwd)",
    "<javascript:window.bad=1>",
    "![a](javascript:window.bad=1)",
    '[a](https://b.org/"onmouseover="window.bad=1)',
    '[a](https://b.org "x" onclick="window.bad=1")',
    "```html\" onmouseover=\"window.bad=1\n<script>window.bad=1</script>\n```",
    '| a" onclick="window.bad=1 |\n|---|\n| <img src=x onerror=window.bad=1> |',
    r"$\text{<img src=x onerror=window.bad=1>}$",
    r"$\href{javascript:window.bad=1}{x}$",
    "> <svg onload=window.bad=1>",
    "- <iframe srcdoc='<script>parent.bad=1</script>'>",
    "# <style>*{display:none}</style>",
    "`<b>` **<i>x</i>** ~~<u>~~",
    "__proto__ [x](constructor) ```__proto__\n```",
    "&lt;script&gt; &#60;b&#62;",
)  # fmt: skip
TAGS = """
    p h3 h4 h5 h6 hr strong em s code ul ol li a div span button svg path pre blockquote table
    thead tbody tr th td math mrow mtext mo mi mn"""
ATTRIBUTES = """
    class href tabindex role aria-label aria-hidden viewBox d type start alttext display stretchy
    title"""


@pytest.mark.parametrize("around", ["{}", "- {}", "> {}", "**{}**", "a\n\n{}"])
def test_no_text_becomes_markup(render, around):
    for text in MALICIOUS:
        markup = render(around.format(text))
        tags = re.findall(r"<(\w+)((?:\s+[\w-]+(?:=\"[^\"]*\")?)*)\s*>", markup)
        assert len(tags) == len(re.findall(r"<\w", markup)), markup
        assert {tag for tag, _ in tags} <= {*TAGS.split()}, (text, markup)
        attributes = [pair for _, every in tags for pair in re.findall(r'([\w-]+)="(.*?)"', every)]
        assert {name for name, _ in attributes} <= {*ATTRIBUTES.split()}, (text, markup)
        for name, value in attributes:
            assert name != "href" or value.startswith(("https://b.org", "http://b.org")), markup


def test_no_text_keeps_the_page_busy(browser, tiny):
    """60,000 characters that a parser may go through again and again."""
    page = browser.new_page()
    page.goto(f"{tiny}/")
    units = ["*a ", "**a ", "_a ", "`", "``a` ", "$a ", "[", "[a](", "![", "<", "> ", "- ", "  - ",
             "|", "|-", "# ", "```\n", "~~~\n", "\\", "\\(", "$$", "https://", "#", "1. ", "***",
             "[a](http://a", "$\\frac", "```js\n\"\\\"", " ", "|-\n", "-" ]  # fmt: skip
    slow = page.evaluate(
        """async (units) => {
            const { rendered } = await import("/ui/markdown.js");
            const slow = [];
            for (const unit of units)
                for (const text of [unit.repeat(59000 / unit.length), "# a|" + unit.repeat(9000)]) {
                    const start = performance.now();
                    rendered(text);
                    const took = performance.now() - start;
                    if (took > 8000) slow.push([unit, took]);
                    window.slowest = Math.max(window.slowest ?? 0, took);
                }
            return slow;
        }""",
        units,
    )
    assert slow == [], page.evaluate("window.slowest")
    page.close()
