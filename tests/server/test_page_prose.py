"""What the page makes of Markdown and formulas in a real browser, and what it never makes."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from support.page_browser import browser

from keepsight.server import site

VENDOR = Path(site.__file__).parent / "page" / "vendor"
# Renders texts beside the page and tells their markup, and what else they made.
_READ = """async (texts) => {
  const { prose } = await import("/page/prose.js");
  return texts.map((text) => {
    const room = document.createElement("div");
    room.append(prose(text));
    document.body.append(room);
    const all = [...room.querySelectorAll("*")];
    const attributes = all.flatMap((one) => one.getAttributeNames());
    const made = { html: room.innerHTML, text: room.textContent, attributes };
    made.tags = all.map((one) => one.localName);
    room.remove();
    return made;
  });
}"""
Read = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The page without a model."""
    app = FastAPI(openapi_url=None)
    app.include_router(site.routes(demo=False))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def tab(url: str) -> Iterator[Any]:
    with browser() as chrome:
        tab = chrome.new_page()
        tab.goto(url)
        yield tab


@pytest.fixture
def read(tab: Any) -> Iterator[Read]:
    """Reads texts; nothing was asked of anybody, and the policy was never tried."""
    asked: list[str] = []
    wrong: list[str] = []
    heard = {
        "request": lambda request: asked.append(request.url),
        "console": lambda message: wrong.append(message.text),
        "dialog": lambda dialog: (wrong.append("a dialog"), dialog.dismiss()),
    }
    for name, hear in heard.items():
        tab.on(name, hear)
    yield lambda *texts: tab.evaluate(_READ, list(texts))
    for name, hear in heard.items():
        tab.remove_listener(name, hear)
    assert not [one for one in asked if "/page/" not in one]
    assert not [one for one in wrong if "status of 404" not in one]  # there is no API beside it


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# A *b*", "<h3>A <em>b</em></h3>"),
        ("a\nb\n\nc", "<p>a<br>b</p>\n<p>c</p>"),
        ("**a `**` b** ~~d~~", "<p><strong>a <code>**</code> b</strong> <del>d</del></p>"),
        ("snake_case_name", "<p>snake_case_name</p>"),
        (r"\*a\* \_b\_", "<p>*a* _b_</p>"),
        ("- [ ] a\n- [x] b", "<ul>\n<li>☐ a</li>\n<li>☑ b</li>\n</ul>"),
        ("3. a\n4. b", '<ol start="3">\n<li>a</li>\n<li>b</li>\n</ol>'),
        ("> a", "<blockquote>\n<p>a</p>\n</blockquote>"),
        ("---", "<hr>"),
        ("It costs $5 and $6.", "<p>It costs $5 and $6.</p>"),
        ("![p](http://a.b/p.png)", "<p>![p](http://a.b/p.png)</p>"),
        ("<b>x</b> <!-- y -->", "<p>&lt;b&gt;x&lt;/b&gt; &lt;!-- y --&gt;</p>"),
        (r"$\foo{x}$", r"<p><code>\foo{x}</code></p>"),
        (
            "[here](http://a.b/c)",
            '<p><a href="http://a.b/c" rel="noopener noreferrer nofollow" target="_blank" '
            'title="http://a.b/c">here</a></p>',
        ),
    ],
)
def test_what_answers_write_is_read(read: Read, text: str, html: str) -> None:
    assert read(text)[0]["html"].strip() == html


@pytest.mark.parametrize(
    ("text", "tags", "words"),
    [
        ("$x^2$", ["math", "msup"], "x2"),
        (r"\(\frac{a}{b}\)", ["math", "mfrac"], "ab"),
        ("So\n$$\n\\sum_{i=1}^n \\sqrt{x_i}\n$$", ["munderover", "msqrt"], "∑i=1nxi"),
        ("\\[\na\n= b\n\\]", ["math"], "a=b"),
        (r"\[\begin{pmatrix}1&2\\3&4\end{pmatrix}\]", ["mtable", "mtr", "mtd"], "(1234)"),
        ("| a | b |\n|---|:-:|\n| 1 | 2 |", ["table", "thead", "th", "td"], "a"),
        ("```py\n# no\n**x**\n```", ["pre", "code", "button"], "# no\n**x**"),
        ("~~~\nstill comes", ["pre", "code"], "still comes"),
    ],
)
def test_formulas_tables_and_code_are_drawn(
    read: Read, text: str, tags: list[str], words: str
) -> None:
    [made] = read(text)
    assert set(tags) <= set(made["tags"]) and words in made["text"]


HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(1)</script>",
    "[x](javascript:alert(1)) [x](data:text/html,<script>) [x](/v1/cache/reset) [x](//evil/)",
    "![x](http://127.0.0.1:9/p.png) ![x][1]\n\n[1]: http://127.0.0.1:9/p.png",
    "<svg/onload=alert(1)> <math href=javascript:alert(1)>x</math> <style>*{}</style>",
    '```<script>\nx\n```\n```" onload=alert(1)\nx\n```',
    '[x](http://a.b/"onclick=alert(1)) <http://a.b/<script>> "onclick="alert(1)',
    r"$\href{javascript:alert(1)}{x}$ $\includegraphics{http://127.0.0.1:9/p.png}$",
    r"$\text{<b onclick=x>}$ $\class{x}{y} \style{color:red}{y} \id{x}{y} \data{a=b}{y}$",
    r"$\color{red}x$ $\htmlStyle{position:fixed}{x}$ $\url{javascript:alert(1)}$",
    "$__proto__$ $\\constructor$ $\\begin{__proto__}x\\end{__proto__}$",
    "# <b>x</b>\n- <i>\n> <a href=x>\n\n|<u>|b|\n|-|-|\n|<u>|`<u>`|",
    r"$\def\a{\a\a}\a$ $\rule{1000em}{1000em}$",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "\u202e\u0000\ufeff**\ud7ff**",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_makes_nothing_that_acts_or_loads(read: Read, text: str) -> None:
    [made] = read(text)
    drawn = {"svg", "path", "button", "div", "span"}  # of the button that copies code
    harmless = """p br h3 h4 h5 h6 hr pre blockquote ul ol li table thead tbody tr th td code strong
    em del a math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup mtable mtr mtd
    mstyle mpadded mphantom menclose"""
    assert set(made["tags"]) <= {*harmless.split(), *drawn}
    acting = [name for name in made["attributes"] if name.startswith("on") or name == "style"]
    assert not acting and "src" not in made["attributes"] and "id" not in made["attributes"]
    assert 'href="http' in made["html"] or "href" not in made["attributes"]


def test_long_hostile_text_is_read(read: Read) -> None:
    """Each of these takes minutes where a step looks at the rest of the text again and again."""
    marks = ["*a ", "**", "a**b ", "_a_b", "~~", "[", "[a](", "`", "$a ", "\\", "|", "> ", "- "]
    marks += ["$$\n", "$$x\n", "\\[\n", "```\n", "- a\n\n", "2. a\nx\n", "a|\n", "\n", " ", "#"]
    marks += ["*a **b ", "> > > > > x\n", "|a\n|-\n", "***a ", "\\(", "a`b", "<", "<a ", "![", "&"]
    texts = [mark * (20_000 // len(mark)) for mark in marks]
    texts += ["\n".join(" " * i + "- a" for i in range(200)), "$" + "{" * 3000 + "$", "x" * 300_000]
    assert len(read(*texts)) == len(texts)


def test_the_browser_refuses_what_is_not_the_pages(tab: Any, url: str) -> None:
    policy = tab.request.get(url).headers["content-security-policy"]
    assert "script-src 'self';" in policy and "default-src 'none'" in policy
    assert "unsafe" not in policy
    for act in (
        "document.body.innerHTML = '<b>x</b>'",
        "trustedTypes.createPolicy('mine', {})",
        "trustedTypes.createPolicy('dompurify', {})",  # DOMPurify has it already
    ):
        tried = f"{{ {act}; return 'taken' }} catch (error) {{ return error.name }}"
        assert tab.evaluate(f"() => {{ try {tried} }}") == "TypeError", act


def test_vendored_files_are_the_versions_that_they_say() -> None:
    told = json.loads((VENDOR / "versions.json").read_text("utf-8"))
    hashes = {name: sha for one in told.values() for name, sha in one["files"].items()}
    files = {path.name: path.read_bytes() for path in VENDOR.iterdir()}
    del files["versions.json"]
    assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == hashes
    scripts = {"marked": "marked.esm.js", "dompurify": "purify.min.js", "temml": "temml.min.js"}
    for name, file in scripts.items():
        assert told[name]["version"].encode() in files[file] and f"LICENSE.{name}" in files
