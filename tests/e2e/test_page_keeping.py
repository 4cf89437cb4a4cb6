"""The chat page: stored conversations, branches, edits, several tabs."""

from __future__ import annotations

import json

from tests.e2e.browser import ANSWERS, DESKTOP, Page
from tests.e2e.conftest import SCRIPTS
from tests.e2e.harness import cue

STORY = SCRIPTS["story"]
THOUGHT = "Four, 四."


def ready(driver, server) -> Page:
    page = Page(driver, server)
    page.ready()
    return page


def listed(page: Page) -> list[str]:
    return page.texts("#list .chat")


def test_a_reload_loses_nothing(driver, scripted):
    page = ready(driver, scripted)
    page.type(cue("story") + "\n")
    page.answered(1)
    page.type(cue("think") + "\n")
    page.answered(2)
    page.type("not sent yet")
    numbers = page.texts(".answer .numbers")
    page.reload()
    page.ready()
    assert page.answered(2) == [STORY, THOUGHT]
    assert page.texts(".mine > .text") == [cue("story"), cue("think")]
    assert page.texts(".thought > .text") == ["So, 🤔 two\nand two."]
    assert page.texts(".answer .numbers") == numbers
    assert page.prompt() == "not sent yet"
    page.find("#prompt").clear()
    page.type("and " + cue("story") + "\n")
    page.answered(3)
    assert page.contents() == [cue("story"), STORY, cue("think"), THOUGHT, f"and {cue('story')}"]


def test_a_reload_in_the_middle_keeps_what_arrived(driver, server):
    page = ready(driver, server)
    page.add_to_requests(ignore_eos=True, max_tokens=1900)
    page.type("def f():\n")
    page.begun()
    page.reload()
    page.ready()
    (text,) = page.answered(1)
    assert text
    assert page.texts(".answer .numbers")[0].endswith(" · unfinished")
    server.wait_left()
    page.add_to_requests(max_tokens=3, ignore_eos=True)
    page.click("Go on")
    page.wait(lambda: page.texts(".answer .numbers")[0].endswith("token limit reached"))


def test_conversations_are_listed_renamed_and_deleted(driver, scripted):
    from selenium.webdriver.common.keys import Keys

    page = ready(driver, scripted)
    page.type("first " + cue("story") + "\n")
    page.answered(1)
    page.click("New conversation")
    assert not page.texts(".turn")
    page.type("second " + cue("think") + "\n")
    page.answered(1)
    assert page.contents() == [f"second {cue('think')}"]
    first, second = f"first {cue('story')}", f"second {cue('think')}"
    assert listed(page) == [second, first]
    page.press("#list li:last-child .chat")
    assert page.answered(1) == [STORY]
    page.click(f"Rename {first}")
    driver.switch_to.active_element.send_keys("My story", Keys.ENTER)
    assert listed(page) == [second, "My story"]
    page.click("Rename My story")
    page.find("#list input").send_keys("not this", Keys.ESCAPE)
    page.reload()
    page.ready()
    assert listed(page) == [second, "My story"]
    assert page.answered(1) == [STORY]  # the branch shown before the reload
    page.click("Delete My story")
    assert listed(page) == [second]
    assert not page.texts(".turn")
    assert page.notice().startswith("“My story” was deleted.")
    page.click("Undo")
    assert listed(page) == [second, "My story"]
    assert page.answered(1) == [STORY]
    page.click("Delete My story")
    page.reload()
    page.ready()
    assert listed(page) == [second]


def test_regenerate_keeps_the_former_answer(driver, server):
    page = ready(driver, server)
    page.set(temperature="1", max_tokens="20")
    page.add_to_requests(seed=1)
    page.type("def f(x):\n")
    (first,) = page.answered(1)
    page.add_to_requests(seed=2)
    page.click("Regenerate")
    page.wait(lambda: page.texts(".count") == ["2/2"])
    (second,) = page.answered(1)
    assert second != first
    assert page.contents() == ["def f(x):"]
    page.click("Previous version")
    assert page.answered(1) == [first]
    page.reload()
    page.ready()
    assert page.answered(1) == [first]
    assert page.texts(".count") == ["1/2"]
    page.click("Next version")
    assert page.answered(1) == [second]


def test_an_edited_message_begins_a_branch(driver, scripted):
    from selenium.webdriver.common.keys import Keys

    page = ready(driver, scripted)
    for text in ("a" + cue("story"), "b" + cue("think")):
        page.type(text + "\n")
        page.wait(lambda: not page.texts(".busy"))
    page.answered(2)
    page.click("Edit", ".mine:first-child")
    field = page.find(".editor textarea")
    assert field.get_property("value") == "a" + cue("story")
    assert driver.switch_to.active_element == field
    field.send_keys("x", Keys.ESCAPE)
    assert page.texts(".mine > .text")[0] == "a" + cue("story")
    page.click("Edit", ".mine:first-child")
    page.find(".editor textarea").send_keys(
        Keys.CONTROL + "a", Keys.NULL, "c" + cue("think") + "\n"
    )
    assert page.answered(1) == [THOUGHT]
    assert page.contents() == ["c" + cue("think")]
    page.click("Previous version", ".mine")
    assert page.answered(2) == [STORY, THOUGHT]
    page.type(Keys.ARROW_UP)  # edits the last message
    assert page.find(".editor textarea").get_property("value") == "b" + cue("think")


def test_an_edited_answer_is_sent_to_the_model(driver, scripted):
    page = ready(driver, scripted)
    page.type(cue("think") + "\n")
    page.answered(1)
    page.click("Edit", ANSWERS)
    field = page.find(".editor textarea")
    field.clear()
    field.send_keys("Five.")
    page.click("Save", ".editor")
    assert page.answered(1) == ["Five."]
    assert page.texts(".answer .numbers")[0].startswith("edited")
    page.type(cue("story") + "\n")
    page.answered(2)
    assert page.contents() == [cue("think"), "Five.", cue("story")]


def test_an_edit_that_is_refused_is_still_there(driver, limited):
    page = Page(driver, limited)
    page.run("sessionStorage.setItem('cpmcu.key', 'first')")
    page.reload()
    page.ready()
    page.add_to_requests(max_tokens=4)
    page.type("x = 1\n")
    (answer,) = page.answered(1)
    page.click("Edit", ".mine")
    words = "word " * 300
    page.run("document.querySelector('.editor textarea').value = arguments[0]", words)
    page.click("Send", ".editor")
    assert "prompt and output together can have 128" in page.notice()
    assert page.find(".editor textarea").get_property("value") == words
    page.click("Cancel", ".editor")
    assert page.answered(1) == [answer]
    assert page.texts(".mine > .text") == ["x = 1"]


def test_an_answer_goes_on_while_another_conversation_is_shown(driver, server):
    page = ready(driver, server)
    page.add_to_requests(ignore_eos=True, max_tokens=300)
    page.type("import os\n")
    page.begun()
    page.click("New conversation")
    assert page.find("#send").is_displayed()
    assert len(page.texts("#list .dot")) == 1
    page.wait(lambda: not page.texts("#list .dot"))
    page.press("#list .chat")
    page.answered(1)
    assert page.texts(".answer .numbers")[0].startswith("300 tokens")


def test_copy(driver, scripted):
    page = ready(driver, scripted)
    page.type(cue("guide") + "\n")
    page.answered(1)
    for secure in (True, False):
        page.run(
            "window.copied = [];"
            "document.oncopy = () => copied.push(document.activeElement.value);"
            "Object.defineProperty(navigator, 'clipboard', {configurable: true, value: arguments[0]"
            " ? {writeText: async (text) => { copied.push(text); }} : undefined});",
            secure,
        )
        page.click("Copy", ANSWERS)
        page.wait(lambda: page.run("return copied.length") == 1)
        page.click("Copy code", ANSWERS)
        page.wait(lambda: page.run("return copied.length") == 2)
        assert page.run("return copied") == [SCRIPTS["guide"], "x = 2 + 2"]
        page.wait(lambda: not page.texts("button[aria-label=Copied]"))


def test_a_full_or_damaged_storage(driver, scripted):
    page = ready(driver, scripted)
    page.run(
        "localStorage.setItem('cpmcu.chat.x', '{\"id\": 3');"
        "localStorage.setItem('cpmcu.settings', '[');"
        "const chat = {id: 'y', title: '', draft: '', leaf: 'a', turns: [{id: 1}]};"
        "localStorage.setItem('cpmcu.chat.y', JSON.stringify(chat));"
        "chat.turns = [{id: 'a', parent: 'a', text: 'its own parent'}];"
        "localStorage.setItem('cpmcu.chat.z', JSON.stringify(chat));"
    )
    page.reload()
    page.ready()
    assert listed(page) == []
    page.run(
        "for (let size = 1 << 22; size; size >>= 1)"
        " try { for (;;) localStorage.setItem(`full${Math.random()}`, 'x'.repeat(size)); } catch {}"
    )
    page.type(cue("story") + "\n")
    assert page.answered(1) == [STORY]
    assert page.notice().startswith("The browser's storage is full")
    page.type(cue("think") + "\n")
    assert page.answered(2) == [STORY, THOUGHT]
    page.run(
        "for (const key of Object.keys(localStorage))"
        " if (/^full/.test(key)) localStorage.removeItem(key);"
    )
    page.type("x")
    page.reload()
    page.ready()
    assert page.answered(2) == [STORY, THOUGHT]


def test_tabs_share_conversations(driver, scripted):
    page = ready(driver, scripted)
    page.type(cue("story") + "\n")
    page.answered(1)
    here = driver.current_window_handle
    driver.switch_to.new_window("tab")
    try:
        page.resize(DESKTOP)
        driver.get(scripted.url + "/")
        page.ready()
        assert listed(page) == [cue("story")]
        page.press("#list .chat")
        page.type(cue("think") + "\n")
        page.answered(2)
        there = driver.current_window_handle
        driver.switch_to.window(here)
        page.wait(lambda: len(page.texts(ANSWERS)) == 2)
        assert page.answered(2) == [STORY, THOUGHT]
        page.click(f"Delete {cue('story')}")
        driver.switch_to.window(there)
        page.wait(lambda: not page.texts(".turn"))
        assert listed(page) == []
    finally:
        driver.close()
        driver.switch_to.window(here)


def test_the_format_of_a_stored_conversation(driver, scripted):
    """Each stored conversation is one entry.

    Its turns form a tree, in which each turn names its parent.
    """
    page = ready(driver, scripted)
    page.type(cue("story") + "\n")
    page.answered(1)
    (entry,) = page.run("return Object.entries(localStorage)")
    assert entry[0].startswith("cpmcu.chat.")
    chat = json.loads(entry[1])
    asked, answer = chat["turns"]
    assert (asked["parent"], answer["parent"], chat["leaf"]) == (None, asked["id"], answer["id"])
    assert (asked["text"], answer["text"]) == (cue("story"), STORY)
