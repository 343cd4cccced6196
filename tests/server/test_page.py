"""The page at `/` in a real browser: what a person does with pictures, turns and the memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.hostile import encoded
from support.page_browser import Page, browser, expect
from support.server_harness import Live, Scripted, asked, live, png

import keepsight as ks
from keepsight.demo.scene import Scene
from keepsight.media import sources
from keepsight.report import Piece, Report, Segment, Usage
from keepsight.server.config import ApiKey

STAR = Scene.of(color="red", shape="star", scale="large", background="white", seed=1)
RING = Scene.of(color="blue", shape="ring", scale="large", background="black", seed=2)
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1440, "height": 900}
DESCRIBE = "What is in the picture?"
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as it:
        yield it


@pytest.fixture
def context(chrome: Any) -> Iterator[Any]:
    """A browser that has seen nothing yet."""
    it = chrome.new_context()
    it.set_default_timeout(20_000)
    yield it
    it.close()


@pytest.fixture
def opened(context: Any, server: Live) -> Iterator[Open]:
    """Opens the page of the live server, or of another; nothing remembered, nothing wrong after."""
    pages: list[Page] = []

    def open_page(url: str | None = None, **options: Any) -> Page:
        pages.append(Page(context, url or server.url, **options))
        return pages[-1]

    server.call("/v1/cache/reset", {})
    yield open_page
    assert not [text for page in pages for text in page.wrong]


@pytest.fixture
def scripted(vlm: ks.VLM) -> Iterator[Callable[..., Live]]:
    """A server whose answers are a script."""
    with ExitStack() as stack:
        yield lambda script, **settings: stack.enter_context(live(vlm, script, **settings))


def described(opened: Open, **options: Any) -> Page:
    """A page on which the star was brought and described."""
    page = opened(**options)
    page.attach(STAR, "star.png")
    page.ask(DESCRIBE)
    assert page.said() == STAR.describe()
    return page


# -- asking --------------------------------------------------------------------------------------


def test_a_pasted_picture_is_seen_once_and_then_remembered(opened: Open) -> None:
    page = opened()
    page.attach(STAR)
    first = page.ask(DESCRIBE)
    assert page.said() == STAR.describe()
    expect(first.locator(".seen.computed")).to_have_text("looked at now")
    assert page.cached()[0] == 0
    second = page.ask("What color is the shape in the picture?")
    assert page.said() == "Red."
    expect(second.locator(".seen.memory")).to_have_text("from memory")
    assert page.cached()[0] > 16
    times = re.compile(r"^first word after [\d.]+ m?s, saved [\d.]+ m?s$")
    expect(second.locator(".times")).to_have_text(times)
    second.locator("summary").click()
    expect(second.locator(".numbers")).to_contain_text(re.compile(r"tokens/s.*demo"))
    rows = second.locator("tbody tr")
    expect(rows.filter(has_text="picture.png")).to_contain_text("remembered")
    expect(rows.last).to_contain_text("not seen before")


def test_a_demo_has_pictures_and_questions_to_try(opened: Open) -> None:
    page = opened()
    page.tab.locator("#samples").get_by_role("button", name="Compare the two pictures.").click()
    page.answered()
    assert "red star" in page.said() and "blue ring" in page.said()
    page.tab.locator(".hint").get_by_role("button", name="What color").click()
    expect(page.answers).to_have_count(2)


def test_what_can_be_done_with_a_turn_shows_on_hover_and_focus(opened: Open) -> None:
    page = opened(size=DESK, reduced_motion="reduce")
    page.ask("Hello!")
    page.tab.mouse.move(0, 0)
    acts = page.tab.locator(".turn.user .acts")
    expect(acts).to_have_css("opacity", "0")
    page.tab.locator(".asked").hover()
    expect(acts).to_have_css("opacity", "1")
    page.tab.mouse.move(0, 0)
    acts.get_by_role("button", name="Edit").focus()
    expect(acts).to_have_css("opacity", "1")
    ours, theirs = (
        page.tab.locator(f".turn.{role}").bounding_box() for role in ("user", "assistant")
    )
    assert ours["x"] > theirs["x"], "a question stands at the right"
    assert page.tab.locator("#side").bounding_box()["width"] > 200, "conversations are at the side"


def test_dropped_and_chosen_files_meet_in_one_question(opened: Open) -> None:
    page = opened()
    page.attach(STAR, "star.png", kind="drop")
    ring = {"name": "ring.png", "mimeType": "image/png", "buffer": png(RING.draw())}
    page.tab.set_input_files("#foot input[type=file]", [ring])
    expect(page.tab.locator(".chip.new")).to_have_count(2)
    page.files("drop", ("notes.txt", "text/plain", b"words"))
    expect(page.trouble).to_have_text("notes.txt: neither a picture nor a PDF.")
    page.click("Remove star.png")
    page.ask(DESCRIBE)
    assert page.said() == RING.describe()


def test_the_pages_of_a_pdf_are_pictures(opened: Open, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2")
    path = tmp_path / "two.pdf"
    STAR.draw().save(path, save_all=True, append_images=[RING.draw()])
    page = opened()
    page.files("drop", ("two.pdf", "application/pdf", path.read_bytes()))
    expect(page.tab.locator(".chip.new .words")).to_have_text("2 pages, new")
    answer = page.ask("Describe the pictures.")
    answer.locator("summary").click()
    expect(answer.locator(".seen")).to_have_count(2)
    expect(answer.locator(".seen").last.get_by_role("img")).to_have_accessible_name(
        "two.pdf, page 2"
    )


def test_an_answer_is_stopped_and_what_came_stays(opened: Open, scripted: Any) -> None:
    script = Scripted(*["word "] * 400, wait=0.05)
    page = opened(scripted(script).url)
    page.talk()
    page.question.fill("A next question")
    page.question.press("Enter")
    expect(page.trouble).to_contain_text("An answer is still coming")
    expect(page.button("Ask")).to_be_hidden()
    page.click("Stop")
    expect(page.question).to_be_focused()
    page.answered()
    expect(page.answers.last.locator(".note")).to_have_text("Stopped.")
    expect(page.question).to_have_value("A next question")
    assert script.tickets[0].done.wait(60) and script.tickets[0].cancelled
    assert page.said().startswith("word word")


# -- turns ---------------------------------------------------------------------------------------


def photo(size: tuple[int, int]) -> bytes:
    """A JPEG of a camera held upright: on its side, with a note that says so; its top is red."""
    image = Image.new("RGB", size, "white")
    image.paste("red", (0, 0, size[0] // 4, size[1]))
    turned = Image.Exif()
    turned[0x0112] = 6
    return encoded(image, "JPEG", quality=80, exif=turned)


def pictures_of(messages: Any) -> list[Any]:
    parts = [part for said in messages if said["role"] == "user" for part in said["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def test_a_large_photo_is_sent_smaller_and_upright(opened: Open, scripted: Any) -> None:
    script = Scripted("Yes.")
    page = opened(scripted(script).url)
    page.files("drop", ("a.jpg", "image/jpeg", photo((3600, 2700))))
    note = "new, shrunk from 2700 × 3600 to 1732 × 2309"
    expect(page.chip).to_have_text(note)
    page.ask("Well?")
    page.settings({"Make photos": False})
    page.files("drop", ("a.jpg", "image/jpeg", photo((3600, 2700))))
    expect(page.chip).to_have_text("new")
    page.ask("And this?")
    first, second = (sources.open_source(part) for part in pictures_of(script.asked[1][0]))
    sent = first.decode()
    assert isinstance(sent, Image.Image) and isinstance(second.decode(), Image.Image)
    assert sent.size == (1732, 2309) and second.decode().size == (2700, 3600)
    assert sent.getpixel((800, 20))[1] < 60, "red is at the top"
    assert sent.getpixel((20, 2000))[1] > 200


def test_a_photo_that_cannot_be_read_here_says_what_to_do(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    page = opened()
    page.files("paste", ("IMG_1.HEIC", "", b"\0\0\0\x18ftypheic\0\0\0\0" + bytes(60)))
    chip = page.tab.locator(".chip.refused")
    expect(chip.locator(".words")).to_contain_text("pip install pillow-heif")
    expect(chip.locator(".thumb")).to_have_text("HEIC")


def test_edit_regenerate_and_branches(opened: Open) -> None:
    page = opened()
    page.attach(STAR)
    page.ask("What color is the shape in the picture?")
    asked = page.tab.locator(".turn.user").first
    asked.get_by_role("button", name="Edit").click()
    field = page.tab.get_by_label("Edit the question")
    expect(field).to_be_focused()
    field.fill("What shape is in the picture?")
    field.press("Enter")
    page.answered()
    assert page.said() == "A star."
    expect(page.answers).to_have_count(1)
    page.click("Branch before")
    assert page.said() == "Red."
    page.answers.last.get_by_role("button", name="Regenerate").click()
    page.answered()
    assert page.said() == "Red." and page.cached()[0] == page.cached()[1]
    expect(page.answers.last.locator(".seen .tier")).to_have_text("with the whole prompt")
    group = page.answers.last.locator(".branches")
    expect(group).to_have_accessible_name("Branch 2 of 2")


def test_a_branch_from_an_earlier_answer(opened: Open) -> None:
    page = described(opened)
    page.ask("What color is the shape in the picture?")
    page.answers.first.get_by_role("button", name="Branch").click()
    expect(page.question).to_be_focused()
    expect(page.answers).to_have_count(1)
    expect(page.tab.locator(".hint")).to_contain_text("begins a new branch here")
    page.click("Back to it")
    expect(page.tab.locator(".hint")).not_to_contain_text("begins a new branch")
    expect(page.answers).to_have_count(2)
    page.answers.first.get_by_role("button", name="Branch").click()
    page.ask("Where is the shape in the picture?")
    expect(page.answers).to_have_count(2)
    page.click("Branch before")
    assert page.said() == "Red."


def test_code_tables_and_formulas_are_drawn_and_copied(
    opened: Open, scripted: Any, context: Any
) -> None:
    text = "| a | b |\n|---|--:|\n| 1 | 2 |\n\n```py\nx = 1\n```\n\n$x^2$"
    live = scripted(Scripted(text))
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=live.url)
    page = opened(live.url)
    answer = page.ask("Well?")
    expect(answer.get_by_role("cell", name="2")).to_be_visible()
    expect(answer.locator("math msup")).to_have_text("x2")
    for name, copied in (("Copy the code", "x = 1"), ("Copy the answer", text)):
        answer.get_by_role("button", name=name).click()
        expect(answer.get_by_role("button", name=name)).to_have_text("Copied")
        assert page.tab.evaluate("navigator.clipboard.readText()") == copied
    assert page.overflow() == 0


def test_settings_reach_the_request(opened: Open, scripted: Any) -> None:
    script = Scripted("Yes.")
    page = opened(scripted(script).url)
    page.settings({"System prompt": "Be short.", "Temperature": "0.5", "Longest answer": "7"})
    page.ask("Well?")
    messages, options = script.asked[0]
    assert messages[0]["role"] == "system" and "Be short." in str(messages[0]["content"])
    assert options["temperature"] == 0.5 and options["max_new_tokens"] == 7


# -- looks and hands -----------------------------------------------------------------------------


def paper(page: Page) -> str:
    script = "getComputedStyle(document.documentElement).backgroundColor"
    return str(page.tab.evaluate(script))


def test_light_dark_and_a_phone(opened: Open) -> None:
    light, dark = "rgb(251, 250, 247)", "rgb(22, 22, 21)"
    page = opened(size=PHONE, color_scheme="dark", reduced_motion="reduce")
    assert paper(page) == dark
    page.menu("Light or dark")
    assert paper(page) == light
    page.tab.reload()
    assert paper(page) == light, "the look outlives the page"
    page.attach(STAR, "a_very_long_name_of_a_picture_without_any_space_in_it_at_all.png")
    assert page.overflow() == 0
    answer = page.ask(DESCRIBE)
    answer.locator("summary").click()
    assert page.overflow() == 0
    box = page.question.bounding_box()
    assert box["y"] + box["height"] <= PHONE["height"], "the question stays in sight"
    opened_line = answer.locator("summary").bounding_box()
    assert opened_line["y"] + opened_line["height"] <= box["y"], "not behind the composer"
    tops = {round(e.bounding_box()["y"]) for e in page.tab.locator(".top button:visible").all()}
    assert len(tops) == 1, "the header is one row"
    page.click("Memory")
    expect(page.tab.locator(".held li")).to_have_count(1)
    assert page.overflow() == 0


def test_by_keyboard_alone(opened: Open) -> None:
    page = opened()
    keys = page.tab.keyboard
    page.attach(STAR)
    keys.type("What is")
    keys.press("Shift+Enter")
    keys.press("Backspace")
    keys.type(" in the picture?")
    keys.press("Enter")
    page.answered()
    assert page.said() == STAR.describe()
    expect(page.tab.locator("#status")).to_contain_text(STAR.describe())
    expect(page.question).to_be_focused()
    line = re.compile(r"^first word after .* remembered 0 of \d+ prompt tokens, 0 of 1 picture$")
    for name in (
        "Add pictures or PDFs",
        "Compare the two pictures.",
        "What color is the shape in the picture?",
        DESCRIBE,
        "Regenerate",
        "Copy the answer",
        line,
        "Copy the question",
    ):
        keys.press("Shift+Tab")
        focused = page.tab.locator(":focus")
        expect(focused).to_have_text(name) if name is line else expect(
            focused
        ).to_have_accessible_name(name)
    keys.press("Shift+Tab")
    keys.press("Enter")
    expect(page.tab.get_by_label("Edit the question")).to_be_focused()
    keys.press("Escape")
    expect(page.button("Edit")).to_be_focused()
    for control in page.tab.locator("button:visible, input:visible, textarea:visible").all():
        expect(control).to_have_accessible_name(re.compile(r"\w"))


@pytest.mark.parametrize(("size", "back"), [(PHONE, "Menu"), (DESK, "Settings")])
def test_the_settings_give_the_focus_back(opened: Open, size: Any, back: str) -> None:
    page = opened(size=size)
    opener = page.button(back)
    for done in ("Escape", "Enter"):
        opener.focus()
        page.tab.keyboard.press("Enter")
        if back == "Menu":  # their entry is hidden when they close
            page.tab.locator("#open-settings").focus()
            page.tab.keyboard.press("Enter")
        page.tab.get_by_label("Temperature").press(done)
        expect(page.tab.locator("#settings")).to_be_hidden()
        expect(opener).to_be_focused()


# -- what must not happen --------------------------------------------------------------------------


def test_nothing_that_is_said_becomes_markup(opened: Open, scripted: Any) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    fenced = f"**{evil}** `{evil}`\n\n- {evil}\n\n```\n{evil}\n```"
    page = opened(scripted(Scripted(evil, "\n\n", fenced)).url)
    page.attach(STAR, f"{evil}.png")
    page.ask(evil)
    assert page.said().count("<script>") == 5
    expect(page.tab.locator(".asked")).to_have_text(evil)
    assert page.tab.locator("img[src=x], script:not([src])").count() == 0
    assert page.tab.title() == "Keepsight"


def test_errors_are_said_beside_what_caused_them(opened: Open, scripted: Any) -> None:
    page = opened()
    page.files("paste", ("broken.png", "image/png", b"no picture at all"))
    expect(page.tab.locator(".chip.refused .words")).to_contain_text(
        "not an image in a format that is opened here"
    )
    page.question.fill("And this?")
    page.question.press("Enter")
    expect(page.trouble).to_have_text("Remove broken.png first: what cannot be read is not sent.")
    expect(page.answers).to_have_count(0)
    page.click("Remove broken.png")
    expect(page.question).to_have_value("And this?")
    page.ask("Hello!")
    assert page.said() == "Hello! Show me a picture."
    busy = opened(scripted(Scripted(busy=True)).url)
    alert = busy.ask("Anyone there?").get_by_role("alert")
    expect(alert).to_contain_text(re.compile(r"Try again in \d+ s"))
    expect(busy.answers.get_by_role("button", name="Try again")).to_be_visible()


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(opened: Open, scripted: Any) -> None:
    script = Scripted("Yes.")
    held = scripted(script, keys=(ApiKey("ann", "secret-key"),))
    page = opened(held.url, known=False)
    notice = page.tab.locator("#notice")
    expect(notice).to_contain_text("asks for an API key")
    page.ask("Anyone?")
    expect(page.answers.last.get_by_role("alert")).to_be_visible()
    notice.get_by_role("button", name="Give an API key").click()
    page.tab.get_by_label("API key").fill("secret-key")
    page.tab.get_by_label("API key").press("Enter")
    expect(notice).to_be_hidden()
    page.answers.last.get_by_role("button", name="Try again").click()
    page.answered()
    assert page.said() == "Yes."
    kept = page.tab.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
    assert "secret-key" not in kept[0] and "secret-key" in kept[1]


# -- the memory ----------------------------------------------------------------------------------


def test_the_memory_shows_pins_and_forgets(opened: Open, server: Live) -> None:
    page = described(opened)
    page.attach(RING, "ring.png")
    page.ask("Compare the pictures.")
    assert STAR.name in page.said() and RING.name in page.said()
    page.click("Memory")
    held = page.tab.locator(".held li")
    expect(held).to_have_count(2)
    expect(held.filter(has_text="star.png").locator("img")).to_be_visible()
    expect(page.tab.locator(".answers meter")).to_have_count(2)
    expect(page.tab.locator(".tiers")).to_contain_text("2 pictures")
    page.click("Pin star.png", exact=True)
    expect(held.filter(has_text="star.png")).to_contain_text("pinned")
    expect(page.button("Unpin star.png")).to_be_focused()
    page.click("Delete ring.png")
    expect(held).to_have_count(1)
    expect(page.button("Refresh")).to_be_focused()
    assert len(server.call("/v1/cache/images")[1]["data"]) == 1
    salted = {"model": "demo", "messages": asked(RING.draw()), "cache_salt": "somebody else"}
    server.call("/v1/prepare", salted)
    page.click("Forget everything")
    expect(held).to_have_count(1)
    page.click("Really?")
    expect(page.tab.locator("#memory-view")).to_contain_text("None.")
    assert server.call("/v1/cache/images")[1]["data"] == []
    assert server.call("/v1/cache/explain", salted)[1]["report"]["cached_tokens"] > 0


def test_pictures_that_a_page_has_no_bytes_of_are_pinned_and_deleted(
    opened: Open, server: Live
) -> None:
    server.chat({"messages": asked(STAR.draw())})
    page = opened()
    page.click("Memory")
    held = page.tab.locator(".held li")
    expect(held).to_have_count(1)
    held.get_by_role("button", name="Pin").click()
    expect(held).to_contain_text("pinned")
    [told] = server.call("/v1/cache/images")[1]["data"]
    assert told["pinned"]
    held.get_by_role("button", name="Unpin").click()
    expect(held).not_to_contain_text("pinned")
    held.get_by_role("button", name="Delete").click()
    expect(held).to_have_count(0)
    assert server.call("/v1/cache/images")[1]["data"] == []


class Tiered(Scripted):
    """Says of the pictures of a prompt that they come from one tier after the other."""

    def _say(self, ticket: Any) -> None:
        told = [("reused", "host", None), ("reused", "disk", None), ("reused", "remote", None)]
        told += [("computed", "new", "disk"), ("computed", "evicted", "tower")]
        segments = [
            Segment("image", 4 * i, 4 * i + 4, status, reason, i, features)
            for i, (status, reason, features) in enumerate(told)
        ]
        ticket.put(Piece("Seen.", 1))
        ticket.put(Piece("", None, Usage(20, 1, 12, 5, 1, 4), Report(segments, {}, 20, 12), "stop"))
        ticket.end()


def test_each_tier_has_its_mark(opened: Open, scripted: Any) -> None:
    page = opened(scripted(Tiered()).url)
    page.files("paste", *((f"{n}.png", "image/png", png(STAR.draw())) for n in range(5)))
    answer = page.ask("Well?")
    kinds = [mark.get_attribute("class") for mark in answer.locator(".seen").all()]
    assert kinds == [f"seen {tier}" for tier in ("host", "disk", "remote", "disk", "computed")]
    expect(answer.locator(".seen .tier").nth(2)).to_have_text("from the remote store")
    answer.locator("summary").click()
    expect(answer.locator("tbody tr").last).to_contain_text("made room for something else")


def test_what_a_store_kept_is_known_in_a_new_server(
    opened: Open, demo_parts: dict[str, Any], tmp_path: Path
) -> None:
    for words in ("new", "remembered, on disk"):
        with ks.wrap(*demo_parts["demo"], store=tmp_path) as vlm, live(vlm) as held:
            page = opened(held.url)
            page.attach(STAR)
            expect(page.chip).to_have_text(words)
            page.ask(DESCRIBE)
            assert page.said() == STAR.describe()
            if words != "new":
                whole = "with the whole prompt, from disk"
                expect(page.answers.last.locator(".seen .tier")).to_have_text(whole)
                page.answers.last.locator("summary").click()
                expect(page.answers.last.locator("tbody tr").first).to_contain_text(
                    "it was on disk"
                )
            page.click("Memory")
            expect(page.tab.locator(".tiers")).to_contain_text("On disk")
            expect(page.tab.locator(".held li")).to_have_count(1)
            if words != "new":  # the end of the whole prompt was enough: no features were read
                expect(page.tab.locator(".held li")).to_contain_text("on disk")
                page.click("Pin")
                expect(page.tab.locator(".held li")).to_contain_text("on disk, pinned")


def test_a_tenant_sees_its_own(opened: Open, vlm: ks.VLM) -> None:
    keys = (ApiKey("ann", "anns"), ApiKey("bob", "bobs"))
    with live(vlm, keys=keys) as held:
        page = opened(held.url, known=False)
        for key, count in (("anns", 1), ("bobs", 0)):
            page.settings({"API key": key})
            expect(page.tab.locator("#model")).to_have_text("demo")
            if count:
                page.attach(STAR)
                page.ask(DESCRIBE)
            page.click("Memory")
            page.click("Refresh")
            expect(page.tab.locator(".held li")).to_have_count(count)
            expect(page.tab.locator("#memory-view")).to_contain_text("Of your key.")
            expect(page.tab.locator("#memory-view")).not_to_contain_text("undefined")
            page.click("Talk")


def test_a_page_that_is_loaded_anew_has_lost_nothing(opened: Open) -> None:
    page = described(opened)
    page.ask("What color is the shape in the picture?")
    page.answers.first.get_by_role("button", name="Branch").click()
    page.ask("Where is the shape in the picture?")
    page.attach(RING, "ring.png")
    page.question.fill("not asked yet")
    page.tab.wait_for_timeout(600)
    page.tab.reload()
    expect(page.answers).to_have_count(2)
    assert page.answers.first.locator(".said").inner_text() == STAR.describe()
    expect(page.tab.locator(".shown img").first).to_have_js_property("complete", True)
    expect(page.question).to_have_value("not asked yet")
    expect(page.tab.locator(".chip.new .name")).to_have_text("ring.png")
    page.click("Remove ring.png")
    page.click("Branch before")
    assert page.said() == "Red."
    assert page.cached()[0] > 16, "what was measured is there too"
    page.ask("What shape is in the picture?")
    assert page.said() == "A star." and page.cached()[0] > 16
    other = opened()  # another tab begins anew, and finds it at its side
    expect(other.answers).to_have_count(0)
    other.ask("Hello!")
    other.menu(DESCRIBE)
    assert other.said() == "A star."


def test_an_answer_that_was_cut_off_by_a_reload_is_asked_again(
    opened: Open, scripted: Any, context: Any
) -> None:
    script = Scripted(*["word "] * 400, wait=0.02)
    page = opened(scripted(script).url)
    page.talk()
    page.tab.wait_for_timeout(700)
    page.tab.reload()
    expect(page.answers.last.locator(".note")).to_contain_text("loaded anew")
    assert page.said().startswith("word word")
    script.pieces, script.wait = ("Yes.",), 0.0
    page.answers.last.get_by_role("button", name="Try again").click()
    page.answered()
    assert page.said() == "Yes."


def test_conversations_are_deleted_or_not_kept_at_all(opened: Open) -> None:
    page = opened()
    page.ask("Hello!")
    page.tab.wait_for_timeout(600)
    page.click("New")
    page.delete("Hello!")
    expect(page.button("New")).to_be_focused()
    page.ask("Hi")
    page.settings({"Keep conversations": False})
    page.ask("Who are you?")
    page.tab.wait_for_timeout(600)
    page.tab.reload()
    expect(page.tab.locator("#model")).to_have_text("demo")
    expect(page.answers).to_have_count(0)
    counts = page.tab.evaluate(_COUNTS)
    assert counts == {"talks": 0, "pictures": 0, "drafts": 0}


@pytest.mark.parametrize("where", ["this tab", "another tab"])
def test_a_conversation_deleted_while_its_answer_comes_stays_deleted(
    opened: Open, scripted: Any, where: str
) -> None:
    url = scripted(Scripted(*["word "] * 400, wait=0.02)).url
    page = opened(url)
    page.talk()
    page.tab.wait_for_timeout(600)  # written once
    page = page if where == "this tab" else opened(url)
    page.delete("Talk.")
    page.tab.wait_for_timeout(1000)
    counts = page.tab.evaluate(_COUNTS)
    assert counts["talks"] == counts["pictures"] == 0


def test_a_browser_without_room_says_so(opened: Open) -> None:
    page = opened()
    page.tab.evaluate(
        "() => { IDBObjectStore.prototype.put ="
        " () => { throw new DOMException('full', 'QuotaExceededError') } }"
    )
    page.ask("Hello!")
    assert page.said() == "Hello! Show me a picture."
    notice = page.tab.locator("#notice")
    expect(notice).to_contain_text("no room to keep the conversation: download it")
    notice.get_by_role("button", name="Close").click()
    expect(notice).to_be_hidden()


def test_an_answer_left_for_another_conversation_is_kept_as_far_as_it_came(
    opened: Open, scripted: Any
) -> None:
    page = opened(scripted(Scripted(*["word "] * 400, wait=0.02)).url)
    page.talk()
    page.click("New")
    page.tab.wait_for_timeout(600)
    page.tab.reload()
    page.menu("Talk.")
    expect(page.answers.last.locator(".note")).to_have_text("Stopped.")
    assert page.said().startswith("word word")


_COUNTS = """() => new Promise((done) => {
  indexedDB.open("keepsight").onsuccess = async ({ target: { result } }) => {
    const names = [...result.objectStoreNames], counts = {};
    for (const name of names) await new Promise((next) => {
      result.transaction(name).objectStore(name).count().onsuccess = (event) => {
        counts[name] = event.target.result;
        next();
      };
    });
    result.close();
    done(counts);
  };
})"""


def test_a_conversation_is_downloaded_and_gone_on_with(
    opened: Open, server: Live, tmp_path: Path
) -> None:
    page = described(opened)
    with page.tab.expect_download() as markdown:
        page.menu("Download as Markdown")
    text = Path(markdown.value.path()).read_text(encoding="utf-8")
    assert markdown.value.suggested_filename == "What-is-in-the-picture.md"
    assert "![star.png](<star.png>)" in text and STAR.describe() in text
    with page.tab.expect_download() as kept:
        page.menu("Download as .keep")
    path = tmp_path / kept.value.suggested_filename
    assert path.suffix == ".keep"
    kept.value.save_as(path)
    session = server.service.vlm.resume(path)
    reply = session.ask("What color is the shape in the picture?")
    assert reply.text == "Red." and reply.usage.cached_tokens > 16
    assert reply.usage.images_encoded == 0


def test_a_picture_is_pasted_wherever_the_focus_is(opened: Open) -> None:
    page = opened()
    page.tab.evaluate("document.activeElement.blur()")
    page.files("paste elsewhere", ("a.png", "image/png", png(STAR.draw())))
    expect(page.tab.locator(".chip.new")).to_have_count(1)
    page.ask(DESCRIBE)
    page.tab.locator("#show-memory").click()
    page.tab.locator("#show-memory").focus()
    page.files("paste elsewhere", ("b.png", "image/png", png(RING.draw())))
    expect(page.tab.locator("#talk-view .chip")).to_have_count(1)


def scrolled(page: Page) -> int:
    far: int = page.tab.evaluate("Math.round(scrollY)")
    return far


def test_a_reader_stays_where_they_read(opened: Open, scripted: Any) -> None:
    script = Scripted(*["word "] * 600, wait=0.004)
    page = opened(scripted(script).url, size={"width": 390, "height": 500})
    page.question.fill("Tell me more")
    page.question.press("Enter")
    while page.tab.evaluate("document.documentElement.scrollHeight") < 1200:
        page.tab.wait_for_timeout(50)
    page.tab.evaluate("scrollTo(0, 100)")
    page.answered()
    expect(page.tab.locator(".numbers")).to_be_attached()
    assert scrolled(page) == 100
    page.tab.evaluate("scrollTo(0, 400)")
    page.tab.locator("#show-memory").click()
    expect(page.tab.locator("#memory-view h2")).to_be_visible()
    assert scrolled(page) == 0
    page.tab.locator("#show-talk").click()
    assert scrolled(page) == 400


def test_a_question_is_edited_in_the_whole_width_of_a_phone(opened: Open) -> None:
    page = described(opened, size=PHONE)
    page.click("Edit")
    text = page.tab.locator(".editing textarea")
    assert text.bounding_box()["width"] > 300
    expect(page.tab.locator(".editing .chip.remembered")).to_have_count(1)
    assert page.overflow() <= 0


def test_the_schema_is_read_without_anything_from_elsewhere(
    opened: Open, server: Live, context: Any
) -> None:
    page = Page(context, "about:blank", known=False, size=PHONE)
    asked: list[str] = []
    page.tab.on("request", lambda request: asked.append(request.url))
    page.tab.goto(f"{server.url}/docs")
    page.tab.locator("#chat summary").click()
    page.tab.locator("#chat a", has_text="ChatRequest").click()
    row = page.tab.locator("#record-ChatRequest tr", has_text="temperature")
    expect(row).to_contain_text("number, from 0, to 2")
    page.tab.locator("#record-ChatRequest a", has_text="Message").click()
    expect(page.tab.locator("#record-ChatMessage tr", has_text="role")).to_contain_text("developer")
    assert page.overflow() <= 0 and not page.wrong
    assert asked and all(url.startswith(server.url) for url in asked)
