"""What the page makes of Markdown and formulas, run in Node, and the files of others that it uses.

What of it reaches the page is DOMPurify's to say: tests/test_page.py looks in a browser.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import keepsight.server

PAGE = Path(keepsight.server.__file__).parent / "page"
_RUN = """
import fs from "node:fs";
(0, eval)(fs.readFileSync("vendor/temml.min.js", "utf8"));
const { html } = await import(`${process.cwd()}/markdown.js`);
let input = "";
for await (const piece of process.stdin) input += piece;
const read = (text) => { try { return html(text); } catch { return "plain"; } }; // as prose.js does
process.stdout.write(JSON.stringify(JSON.parse(input).map(read)));
"""


def read(*texts: str) -> list[str]:
    """The HTML that the page's own code makes of texts."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node: apt-get install nodejs")
    command = [node, "--input-type=module", "-e", _RUN]
    done = subprocess.run(
        command, input=json.dumps(texts), cwd=PAGE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    made: list[Any] = json.loads(done.stdout)
    return made


CASES = {
    "# A *b*": "<h3>A <em>b</em></h3>",
    "a\nb": "<p>a<br>b</p>",
    "- [ ] a\n- [x] b": "<li>☐ a</li>",
    "[here](http://a.b/c) ![p](http://a.b/p.png)": '<a href="http://a.b/c">here</a> ![p](http',
    "```py\n**x**\n```": '<pre><code class="language-py">**x**\n</code></pre>',
    "| a | b |\n|---|:-:|\n| 1 | 2 |": '<td align="center">2</td>',
    "It costs $5 and $6.": "<p>It costs $5 and $6.</p>",
    "$x^2$": "<msup><mi>x</mi>",
    r"\(\frac{a}{b}\)": "<mfrac><mi>a</mi><mi>b</mi></mfrac>",
    "$$\n\\sqrt{x}\n$$": '<math display="block"',
    r"\[\begin{pmatrix}1&2\\3&4\end{pmatrix}\]": "<mtable",
    r"$\foo{x}$": r"<p><code>\foo{x}</code></p>",
    r"$\href{javascript:alert(1)}{x}$": "<code>",
    "<img src=x onerror=alert(1)>": "&#60;img src=x onerror=alert(1)&#62;",
}


def test_what_answers_write_is_read() -> None:
    for (text, wanted), made in zip(CASES.items(), read(*CASES), strict=True):
        assert wanted in made, text


def test_long_hostile_text_is_read_in_bounded_work() -> None:
    """Each of these takes minutes where a step looks at the rest of the text again and again."""
    n = 20_000
    texts = [
        mark * (n // len(mark))
        for mark in (
            *("*a ", "**", "a**b ", "_a_b", "~~", "`", "$a ", "\\", "|", "> ", "- "),
            *("$$\n", "$$x\n", "\\[\n", "```\n", "- a\n\n", "2. a\nx\n", "a|\n", "\n", " ", "#"),
        )
    ]
    assert len(read(*texts)) == len(texts)


def test_files_of_others_are_those_of_their_releases() -> None:
    folder = PAGE / "vendor"
    told = json.loads((folder / "versions.json").read_text())
    files = {name: digest for one in told.values() for name, digest in one["files"].items()}
    there = {path.name for path in folder.iterdir()} - {"versions.json"}
    assert there == set(files)
    for name, digest in files.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
