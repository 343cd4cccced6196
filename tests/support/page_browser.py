"""A headless Chromium on the page of a live server, for tests that skip, and say so, without one.

What a person does (paste, drop, ask) and sees, in the words of the tests.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from keepsight.demo.scene import Scene
from support.server_harness import png

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = playwright.expect

# Nothing that the browser would do by itself, so that it talks to the page's server alone.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_HAND_OVER = """([files, kind]) => {
  const carried = new DataTransfer();
  for (const [name, type, data] of files) {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    carried.items.add(new File([bytes], name, { type }));
  }
  const about = { bubbles: true, cancelable: true };
  if (kind.startsWith("paste")) {
    const event = new ClipboardEvent("paste", { ...about, clipboardData: carried });
    document.activeElement.dispatchEvent(event);
  } else for (const step of ["dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(step, { ...about, dataTransfer: carried }));
  }
}"""


def chromium() -> str:
    """The browser's path, or a skip."""
    found = os.environ.get("KEEPSIGHT_TEST_CHROMIUM") or next(
        (path for path in map(shutil.which, _NAMES) if path), None
    )
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium, or set KEEPSIGHT_TEST_CHROMIUM")
    return str(found)


@contextmanager
def browser() -> Iterator[Any]:
    """A browser; each of its contexts has a profile of its own."""
    path = chromium()
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, headless=True, args=_FLAGS)
        expect.set_options(timeout=20_000)
        try:
            yield started
        finally:
            started.close()


class Page:
    """What a person does on the page, and what they see."""

    def __init__(self, context: Any, url: str, known: bool = True, **options: Any) -> None:
        self.tab = context.new_page()
        self.tab.set_viewport_size(options.pop("size", {"width": 1100, "height": 820}))
        self.tab.emulate_media(**options)
        self.wrong: list[str] = []  # what the browser complained of
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("console", self._note)
        self.tab.goto(url)
        if known:
            expect(self.tab.locator("#model")).to_have_text("demo")

    def _note(self, message: Any) -> None:
        if message.type == "error" and "status of" not in message.text:
            self.wrong.append(message.text)

    def button(self, name: str, **how: Any) -> Any:
        return self.tab.get_by_role("button", name=name, **how)

    def click(self, name: str, **how: Any) -> None:
        self.button(name, **how).click()

    @property
    def trouble(self) -> Any:
        """What is said below the question."""
        return self.tab.locator("#foot .trouble")

    @property
    def chip(self) -> Any:
        """What is said of the picture that waits."""
        return self.tab.locator(".chip .words")

    @property
    def question(self) -> Any:
        return self.tab.locator("#question")

    @property
    def answers(self) -> Any:
        return self.tab.locator(".turn.assistant")

    def files(self, kind: str, *files: tuple[str, str, bytes]) -> None:
        """Paste (into the question, or elsewhere) or drop files, as a browser hands them over."""
        packed = [[name, type_, base64.b64encode(data).decode()] for name, type_, data in files]
        if kind == "paste":
            self.question.focus()
        self.tab.evaluate(_HAND_OVER, [packed, kind])

    def attach(self, scene: Scene, name: str = "picture.png", kind: str = "paste") -> None:
        """Bring a picture and wait until the server has looked at its header."""
        before = self.tab.locator(".chip").count()
        self.files(kind, (name, "image/png", png(scene.draw())))
        expect(self.tab.locator(".chip:is(.new, .remembered)")).to_have_count(before + 1)

    def ask(self, text: str) -> Any:
        """Ask and wait for the whole answer; its element."""
        self.question.fill(text)
        self.question.press("Enter")
        return self.answered()

    def talk(self) -> None:
        """Ask for an answer of many words, and wait for the first ones."""
        self.question.fill("Talk.")
        self.question.press("Enter")
        expect(self.answers.last.locator(".said")).to_contain_text("word word")

    def menu(self, name: str) -> None:
        """Choose an entry of the side, which a narrow window opens from its menu."""
        opener = self.tab.get_by_role("button", name="Menu")
        if opener.is_visible():
            opener.click()
        self.tab.locator("#side").get_by_role("button", name=name, exact=True).click()

    def settings(self, fields: dict[str, Any]) -> None:
        """Fill fields of the settings by their labels, or uncheck them."""
        self.menu("Settings")
        for label, value in fields.items():
            field = self.tab.get_by_label(label)
            field.fill(value) if value else field.uncheck()
        self.click("Done")

    def delete(self, title: str) -> None:
        """Delete a conversation, and say yes."""
        self.menu(f"Delete the conversation: {title}")
        self.tab.locator("#talks button", has_text="Really?").click()
        expect(self.tab.locator("#talks li", has_text=title)).to_have_count(0)

    def answered(self) -> Any:
        """The last answer, when it is whole."""
        expect(self.answers.last).to_be_visible()
        expect(self.tab.locator("[aria-busy]")).to_have_count(0, timeout=30_000)
        return self.answers.nth(self.answers.count() - 1)

    def said(self) -> str:
        text: str = self.answers.last.locator(".said").inner_text()
        return text

    def cached(self) -> tuple[int, int]:
        """Tokens remembered and tokens of the prompt, as the last answer says."""
        text = self.answers.last.locator(".counts").text_content()
        found = re.search(r"remembered (\d+) of (\d+) prompt tokens", text)
        assert found, text
        return int(found[1]), int(found[2])

    def overflow(self) -> int:
        """How many pixels the page is wider than the window."""
        wide: int = self.tab.evaluate("document.documentElement.scrollWidth - innerWidth")
        return wide
