"""Layout of the chat page on a desktop and a phone, themes, and keyboard."""

from __future__ import annotations

import os

import pytest

from tests.e2e.browser import DESKTOP, PHONE, Page
from tests.e2e.harness import cue

CONTROLS = "button, input, select, textarea, summary"
SMALLEST = {DESKTOP: 36, PHONE: 44}
BOXES = """
const seen = [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility());
return seen.map((e) => {
  const box = e.getBoundingClientRect();
  return [e.outerHTML, e.tagName, box.x, box.width, box.height];
});
"""


def wanted(driver, scheme: str) -> None:
    """Sets the system's preferences."""
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)


def look(page: Page, picture: str, size: tuple[int, int], names: bool = False) -> None:
    """Checks that no element is cut off or too small to touch.

    `names`: also checks that controls have names.

    With CPMCU_SCREENSHOTS=DIR, pictures go there.
    """
    if folder := os.environ.get("CPMCU_SCREENSHOTS"):
        page.driver.save_screenshot(f"{folder}/{picture}-{size[0]}.png")
    width, inner = page.run("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= inner == size[0]
    within = "dialog[open]" if page.texts("dialog[open]") else "body > :not([inert])"
    selector = f"{within} :is({CONTROLS})"
    for text, kind, x, width, height in page.run(BOXES, selector):
        assert height >= SMALLEST[size], text
        assert width >= SMALLEST[size] or kind == "SUMMARY", text
        assert x >= 0 and x + width <= size[0], text
    if names:
        for control in page.driver.find_elements("css selector", selector):
            shown = control.is_displayed()
            assert not shown or control.accessible_name, control.get_attribute("outerHTML")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_looks(driver, scripted, size, scheme):
    wanted(driver, scheme)
    page = Page(driver, scripted, size)
    page.ready()
    look(page, f"empty-{scheme}", size)
    for text in (f"{'long' * 40} {cue('guide')}", cue("think"), cue("story")):
        page.type(text)
        page.find("#send").click()
        page.wait(lambda: not page.texts(".busy"))
    page.answered(3)
    look(page, f"chat-{scheme}", size, names=scheme == "light")
    page.run("document.querySelector('#log').scrollTop = 0")
    page.wait(lambda: page.find("#to-end").is_displayed() or size == DESKTOP)
    look(page, f"top-{scheme}", size)
    selectors = [".mine > .text", ".answer .numbers", "#model", ".code-head", "pre", "#prompt"]
    selectors += [".thought summary", ".answer code", "#send"]
    for selector in selectors:
        assert page.contrast(selector) >= 4.5, selector
    page.click("Edit", ".mine:first-child")
    look(page, f"edit-{scheme}", size)
    page.click("Cancel")
    page.click("Settings")
    look(page, f"settings-{scheme}", size, names=scheme == "light")
    assert page.contrast("#settings label") >= 4.5
    page.click("Cancel", "#settings")
    if size == PHONE:
        page.click("Conversations")
        look(page, f"list-{scheme}", size)
        assert page.contrast("#list .chat") >= 4.5
        assert driver.switch_to.active_element == page.find("#new")
        page.click("Close the list")
        assert not page.find("#side").is_displayed()
    assert page.complaints() == []


def test_wide_content_scrolls_by_itself(driver, scripted):
    page = Page(driver, scripted, PHONE)
    page.ready()
    table = "|" + "column |" * 30
    text = (
        f"```\n{'x = 1; ' * 60}\n```\n\n{table}\n{'|-' * 30}|\n{table}\n\n{'w' * 300} `{'c' * 300}`"
    )
    page.run(
        """
        const asked = current.add(null, {role: "user", text: "Go"});
        current.add(asked, {role: "assistant", text: arguments[0], end: "stop"});
        showChat();
        """,
        text,
    )
    inside = """
        const wide = [...document.querySelectorAll("pre, .scroll")];
        return wide.map((element) => element.scrollWidth > element.clientWidth);
    """
    assert page.run(inside) == [True, True]
    assert page.run("return $('log').scrollWidth <= $('log').clientWidth")


def test_the_end_stays_in_sight_when_a_keyboard_comes(driver, scripted):
    page = Page(driver, scripted, PHONE)
    page.ready()
    for name in ("guide", "think", "guide"):
        page.type(cue(name))
        page.find("#send").click()
        page.wait(lambda: not page.texts(".busy"))
    page.answered(3)
    numbers = page.driver.find_elements("css selector", ".numbers")[-1]
    height = {"width": PHONE[0], "height": 430, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", height)
    page.wait(lambda: 0 < numbers.rect["y"] < page.find("#form").rect["y"])
    assert page.find("#form").rect["y"] + page.find("#form").rect["height"] <= 430


def test_the_theme_can_be_chosen(driver, scripted):
    wanted(driver, "light")
    page = Page(driver, scripted)
    page.ready()
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.set(theme="dark")
    dark = page.run(ground)
    assert dark != light
    page.reload()
    assert page.run(ground) == dark
    wanted(driver, "dark")
    page.ready()
    page.set(theme="light")
    assert page.run(ground) == light
    page.set(theme="the system")
    assert page.run(ground) == dark


def test_keys(driver, scripted):
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, scripted)
    page.ready()
    assert driver.switch_to.active_element == page.find("#prompt")
    page.type(cue("think") + "\n")
    page.answered(1)
    log = page.find("#log")
    page.run("arguments[0].focus()", log)
    log.send_keys("?")
    assert page.find("#keys").is_displayed()
    assert "stops the answer" in page.find("#keys").text
    driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not page.find("#keys").is_displayed()
    page.run("arguments[0].focus()", log)
    log.send_keys("/")
    assert driver.switch_to.active_element == page.find("#prompt")
    assert page.prompt() == ""
    page.type(Keys.CONTROL + Keys.SHIFT + "o")
    assert not page.texts(".turn")
    assert len(page.texts("#list .chat")) == 1


def test_the_order_of_the_focus(driver, scripted):
    """The focus moves in the order of the layout: list, head, conversation, message field."""
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, scripted)
    page.ready()
    page.type(cue("think") + "\n")
    page.answered(1)
    page.run("document.activeElement.blur()")
    page.run("$('new').focus()")
    found = [driver.switch_to.active_element.accessible_name]
    while found[-1] != "Send" and len(found) < 30:
        driver.switch_to.active_element.send_keys(Keys.TAB)
        found.append(driver.switch_to.active_element.accessible_name)
    name = cue("think")
    assert found == [
        "New conversation", "Search the conversations", name, f"Rename {name}", f"Delete {name}",
        "Conversations", "Export", "Keyboard", "Settings", "Conversation",
        "Copy", "Edit", "Thinking", "Copy", "Regenerate", "Edit",
        "Attach text files", "Your message", "Send",
    ]  # fmt: skip


def test_the_page_behind_the_open_list_is_inert(driver, scripted):
    page = Page(driver, scripted, PHONE)
    page.ready()
    assert page.run("return [$('side').inert, $('page').inert]") == [True, False]
    page.click("Conversations")
    assert page.run("return [$('side').inert, $('page').inert]") == [False, True]
    page.click("New conversation")
    assert page.run("return [$('side').inert, $('page').inert]") == [True, False]


LONG = """
let last = null;
for (let i = 0; i < 100; i++) {
  const asked = current.add(last, {role: "user", text: `Question ${i}`});
  const text = `${arguments[0]}\n\nEnd of ${i}.`;
  last = current.add(asked, {role: "assistant", text, end: "stop"});
}
chats.save(current);
openChat(current);
"""
PART = "## Part\n\n" + "Some words and `code`. " * 60 + "\n\n```py\nreturn 1\n```\n\n- a\n- $x^2$"


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_long_conversation_opens_at_its_end_and_scrolls(driver, scripted, size):
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, scripted, size)
    page.ready()
    page.run(LONG, PART)
    inside = """
        const log = $("log").getBoundingClientRect();
        const box = views.at(arguments[0]).actions.getBoundingClientRect();
        return box.height > 0 && box.top >= log.top && box.bottom <= log.bottom;
    """
    page.wait(lambda: page.run(inside, -1))
    page.find("#log").send_keys(Keys.HOME)
    page.wait(lambda: page.run(inside, 0))
    assert page.find("#to-end").is_displayed()
    page.click("To the end")
    page.wait(lambda: page.run(inside, -1))


def test_one_more_token_changes_the_last_blocks_only(driver, scripted):
    page = Page(driver, scripted)
    page.ready()
    page.run(LONG, PART)
    page.wait(lambda: page.run("return !colouring.waiting.size"))
    places = page.run(
        """
        const view = views.at(-1);
        const observer = new MutationObserver(() => {});
        const all = { subtree: true, childList: true, characterData: true, attributes: true };
        observer.observe($("turns"), all);
        for (const word of [" One", " more", "\\n- item", " $y$"]) {
          view.turn.text += word;
          view.update();
        }
        const changed = [...view.body.children].slice(-2);
        changed.push(view.numbers, view.problem);
        const within = ({ target }) => changed.some((each) => each.contains(target));
        const rest = observer.takeRecords().filter((each) => !within(each));
        return rest.map(({ target }) => target.outerHTML ?? target.data);
        """
    )
    assert len(places) == 1, places  # the new list joins the answer
    assert places[0].startswith('<div class="text"')
