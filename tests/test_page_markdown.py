"""What the page makes of Markdown and formulas, run in Node, and what it never makes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import keepsight.server

PAGE = Path(keepsight.server.__file__).parent / "page"
_RUN = """
import { markdown } from "./markdown.js";
const shown = (k) => typeof k === "string" ? k.replaceAll("<", "&lt;")
  : `<${k.tag}>${k.kids.map(shown).join("")}</${k.tag}>`;
const tags = (k) => typeof k === "string" ? [] : [k, ...k.kids.flatMap(tags)];
let input = "";
for await (const piece of process.stdin) input += piece;
const made = JSON.parse(input).map((text) => {
  const nodes = markdown(text), all = nodes.flatMap(tags);
  return { html: nodes.map(shown).join(""), tags: all.map((k) => k.tag),
    props: all.flatMap((k) => Object.keys(k.props)) };
});
process.stdout.write(JSON.stringify(made));
"""
_TAGS = """p h3 h4 h5 h6 hr pre blockquote ul ol li table thead tbody tr th td code
strong em del span math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover
munderover mtable mtr mtd"""
_PROPS = """language start class scope display alttext stretchy fence largeop accent width
linethickness mathvariant"""


def read(*texts: str) -> list[Any]:
    """What the page's own code makes of texts."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node: apt-get install nodejs")
    command = [node, "--input-type=module", "-e", _RUN]
    done = subprocess.run(
        command, input=json.dumps(texts), cwd=PAGE, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    made: list[Any] = json.loads(done.stdout)
    return made


CASES = {
    "# A *b*": "<h3>A <em>b</em></h3>",
    "a\nb\n\nc": "<p>a\nb</p><p>c</p>",
    "**a `**` b** __c__ ~~d~~": "<p><strong>a <code>**</code> b</strong> <strong>c</strong> "
    "<del>d</del></p>",
    "***a***": "<p><strong><em>a</em></strong></p>",
    "snake_case_name 2*3*4 a * b": "<p>snake_case_name 2<em>3</em>4 a * b</p>",
    r"\*a\* \_b\_": "<p>*a* _b_</p>",
    "So:\n- a\n- b\n  1. c\n  2. d\n\nafter": "<p>So:</p><ul><li>a</li><li>b<ol><li>c</li>"
    "<li>d</li></ol></li></ul><p>after</p>",
    "- [ ] a\n- [x] b": "<ul><li>☐ a</li><li>☑ b</li></ul>",
    "3. a\n4. b": "<ol><li>a</li><li>b</li></ol>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "---": "<hr></hr>",
    "```py\n# no\n**x**\n```\nb": "<pre># no\n**x**</pre><p>b</p>",
    "~~~\nstill comes": "<pre>still comes</pre>",
    "| a | b |\n|---|:-:|\n| `x|y` | 1 \\| 2 |\n| c |": "<table><thead><tr><th>a</th><th>b</th>"
    "</tr></thead><tbody><tr><td><code>x|y</code></td><td>1 | 2</td></tr>"
    "<tr><td>c</td><td></td></tr></tbody></table>",
    "a | b is no table": "<p>a | b is no table</p>",
    "[here](http://a.b/c) ![p](http://a.b/p.png)": "<p><span>here <span>(http://a.b/c)</span>"
    "</span> ![p](http://a.b/p.png)</p>",
    "It costs $5 and $6.": "<p>It costs $5 and $6.</p>",
    "$x^2$": "<p><math><msup><mi>x</mi><mn>2</mn></msup></math></p>",
    r"\(\frac{a}{b}\)": "<p><math><mfrac><mi>a</mi><mi>b</mi></mfrac></math></p>",
    "$$\n\\sum_{i=1}^n \\sqrt{x_i}\n$$": "<math><mrow><munderover><mo>∑</mo><mrow><mi>i</mi>"
    "<mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><msqrt><msub><mi>x</mi><mi>i</mi></msub>"
    "</msqrt></mrow></math>",
    r"\[\begin{pmatrix}1&2\\3&4\end{pmatrix}\]": "<math><mrow><mo>(</mo><mtable><mtr><mtd><mn>1"
    "</mn></mtd><mtd><mn>2</mn></mtd></mtr><mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr>"
    "</mtable><mo>)</mo></mrow></math>",
    r"$\left(\alpha_i^2\right)$": "<p><math><mrow><mo>(</mo><msubsup><mi>α</mi><mi>i</mi><mn>2"
    "</mn></msubsup><mo>)</mo></mrow></math></p>",
}


def test_what_answers_write_is_read() -> None:
    made = read(*CASES)
    assert {text: one["html"] for text, one in zip(CASES, made, strict=True)} == CASES


def test_a_formula_that_is_not_known_is_shown_as_written() -> None:
    unknown = [r"$\foo{x}$", r"$\frac{a}$", r"$a_b_c$", r"$\begin{evil}x\end{evil}$", "${{}$"]
    for text, one in zip(unknown, read(*unknown), strict=True):
        assert one["html"] == f"<p><code>{text[1:-1]}</code></p>"


HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(1)</script>",
    "[x](javascript:alert(1)) [x](data:text/html,<script>) ![x](http://evil/p.png)",
    "<svg/onload=alert(1)> <math href=javascript:alert(1)>x</math>",
    '```<script>\nx\n```\n```" onload=alert(1)\nx\n```',
    r"$\href{javascript:alert(1)}{x}$ $\text{<b onclick=x>}$ $\class{x}{y} \style{x}{y}$",
    "$__proto__$ $\\constructor$ $\\hasOwnProperty{x}$ $\\begin{__proto__}x\\end{__proto__}$",
    "# <b>x</b>\n- <i>\n> <a href=x>\n\n|<u>|b|\n|-|-|\n|<u>|`<u>`|",
    "\u202e\u0000\ufeff**\ud800**",
]


def test_hostile_text_makes_only_known_elements() -> None:
    made = read(*HOSTILE)
    for one in made:
        assert set(one["tags"]) <= set(_TAGS.split())
        assert set(one["props"]) <= set(_PROPS.split())
    assert "&lt;script>" in made[0]["html"] and "javascript:alert(1)" in made[1]["html"]


def test_long_hostile_text_is_read_in_bounded_work() -> None:
    """Each of these takes minutes where a step looks at the rest of the text again and again."""
    n = 60_000
    texts = [
        mark * (n // len(mark))
        for mark in (
            *("*a ", "**", "a**b ", "_a_b", "~~", "[", "[a](", "`", "$a ", "\\", "|", "> ", "- "),
            *("$$\n", "$$x\n", "\\[\n", "```\n", "- a\n\n", "2. a\nx\n", "a|\n", "\n", " ", "#"),
            *("*a **b ", "> > > > > > > > > > x\n", "|a\n|-\n", "***a ", "\\(", "a`b"),
        )
    ]
    texts += ["\n".join(" " * i + "- a" for i in range(400)), "$" + "{" * 3000 + "$"]
    texts += ["|" * n + "\n" + "|-" * n, " ".join("`" * i for i in range(1, 300)), "*a_ " * n + "*"]
    assert len(read(*texts)) == len(texts)
