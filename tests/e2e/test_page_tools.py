"""The chat page's tools: search, export, attached files, own settings, context meter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.browser import DESKTOP, PHONE, Page
from tests.e2e.conftest import SCRIPTS
from tests.e2e.harness import cue

STORY = SCRIPTS["story"]


@pytest.fixture
def page(driver, scripted) -> Page:
    found = Page(driver, scripted)
    found.ready()
    return found


def ask(page: Page, *texts: str) -> None:
    for text in texts:
        page.type(text + "\n")
        page.wait(lambda: not page.texts(".busy") and not page.prompt())


def listed(page: Page) -> list[str]:
    return page.texts("#list .chat")


# ---- search


def test_search_finds_words_of_titles_and_messages(page):
    from selenium.webdriver.common.keys import Keys

    assert not page.find("#search").is_displayed()
    for text in (
        "Apples and " + cue("story"),
        "Pears " + cue("think"),
        "apples, pears" + cue("call"),
    ):
        ask(page, text)
        page.click("New conversation")
    page.type(Keys.CONTROL + "k")
    search = page.find("#search")
    assert page.driver.switch_to.active_element == search
    search.send_keys("APPLES")
    page.wait(lambda: len(listed(page)) == 2)
    search.send_keys(" pears")
    page.wait(lambda: listed(page) == ["apples, pears" + cue("call")])
    search.clear()
    search.send_keys("einmal")
    page.wait(lambda: len(listed(page)) == 1)
    assert page.texts("#list .excerpt") == [STORY[:80]]
    search.clear()
    search.send_keys("plums")
    page.wait(lambda: page.find("#none-found").is_displayed())
    assert page.find("#none-found").text == "No conversation has these words."
    search.send_keys(Keys.ESCAPE)
    assert len(listed(page)) == 3
    assert search.get_property("value") == ""
    search.send_keys("einmal")
    page.wait(lambda: len(listed(page)) == 1)
    page.press("#list .chat")
    assert page.answered(1) == [STORY]


# ---- titles and drafts


def test_the_title_follows_an_edit_of_the_first_message(page):
    ask(page, "first " + cue("story"))
    page.click("Edit", ".mine")
    field = page.find(".editor textarea")
    field.clear()
    field.send_keys("second " + cue("think"))
    page.click("Send", ".editor")
    page.answered(1)
    assert listed(page) == ["second " + cue("think")]
    page.click("Previous version", ".mine")
    assert listed(page) == ["first " + cue("story")]
    page.click(f"Rename first {cue('story')}")
    page.driver.switch_to.active_element.send_keys("Mine\n")
    page.click("Next version", ".mine")
    assert listed(page) == ["Mine"]


def test_a_draft_is_listed_when_it_is_left(page):
    page.type("not sent")
    page.wait(lambda: page.run("return chats.all.size") == 1)
    assert listed(page) == []
    page.click("New conversation")
    assert listed(page) == ["not sent"]
    page.press("#list .chat")
    assert page.prompt() == "not sent"


# ---- settings of a conversation


def test_a_conversation_can_have_its_own_settings(page):
    page.set(temperature="0.5", system="Common.")
    page.click("Settings")
    page.find("label:has(#scope-own)").click()
    assert page.find("[name=temperature]").get_property("value") == "0.5"
    page.find("[name=temperature]").clear()
    page.find("[name=temperature]").send_keys("0.25")
    page.find("[name=system]").clear()
    page.click("Save", "#settings")
    ask(page, cue("story"))
    assert page.asked()[0]["temperature"] == 0.25
    assert [each["role"] for each in page.asked()[0]["messages"]] == ["user"]
    page.click("New conversation")
    ask(page, cue("think"))
    assert page.asked()[1]["temperature"] == 0.5
    assert page.asked()[1]["messages"][0]["content"] == "Common."
    page.reload()
    page.ready()
    page.press("#list li:last-child .chat")
    page.click("Settings")
    assert page.find("#scope-own").is_selected()
    assert page.find("[name=temperature]").get_property("value") == "0.25"
    page.find("label:has(#scope-common)").click()  # shows the settings of all conversations
    assert page.find("[name=temperature]").get_property("value") == "0.5"
    page.click("Save", "#settings")
    page.click("Regenerate")
    page.wait(lambda: page.texts(".count") == ["2/2"])
    page.answered(1)
    assert page.asked()[-1]["temperature"] == 0.5


def test_changed_settings_stay_when_the_scope_changes(page):
    page.click("Settings")
    page.find("[name=min_p]").send_keys("0.2")
    page.find("label:has(#scope-own)").click()
    assert page.find("[name=min_p]").get_property("value") == "0.2"
    page.click("Cancel", "#settings")
    assert page.run("return [current.settings, settings.values.min_p]") == [None, ""]


# ---- attached files


def test_a_text_file_goes_into_the_message(page, tmp_path):
    text = "def f():\n    return '```'\n"
    (tmp_path / "sum.py").write_text(text, "utf-8")
    page.find("#file").send_keys(str(tmp_path / "sum.py"))
    page.wait(lambda: page.texts("#files li"))
    assert page.texts("#files .name") == ["sum.py"]
    page.reload()
    page.ready()
    assert page.texts("#files .name") == ["sum.py"]
    ask(page, "What is it? " + cue("story"))
    assert page.answered(1)
    sent = f"What is it? {cue('story')}\n\nFile `sum.py`:\n````py\n{text}````"
    assert page.contents() == [sent]
    assert not page.find("#files").is_displayed()
    assert page.texts(".mine summary") == ["sum.py · 26 B"]
    assert page.texts(".mine .file pre") == [text]
    assert not page.find(".mine .file pre").is_displayed()
    assert listed(page) == [f"What is it? {cue('story')}"]


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("photo.png", b"\x89PNG\r\n\x1a\n\0\0", "is not a text in UTF-8. Only text files"),
        ("latin.txt", b"caf\xe9", "is not a text in UTF-8. Only text files"),
        ("nul.txt", b"a\0b", "is not a text in UTF-8. Only text files"),
        ("empty.txt", b"\n", "is empty. Attach a file that has text."),
        ("big.log", b"a" * (300 << 10), "has 300 KiB, but at most 256 KiB can be attached."),
    ],
)
def test_a_file_that_cannot_be_attached_gets_a_sentence(page, tmp_path, name, body, said):
    (tmp_path / name).write_bytes(body)
    page.find("#file").send_keys(str(tmp_path / name))
    assert page.notice().startswith(f"“{name}” {said}")
    assert page.texts("#files li") == []


def test_pasted_files_are_attached_and_pasted_text_is_text(page):
    """A copied picture gets a sentence. If text comes with a picture, the text is pasted."""
    paste = """
    const data = new DataTransfer();
    for (const [name, type, body] of arguments[0]) data.items.add(new File([body], name, {type}));
    if (arguments[1]) data.setData("text/plain", arguments[1]);
    const event = new ClipboardEvent(
      "paste", {clipboardData: data, bubbles: true, cancelable: true});
    return document.getElementById("prompt").dispatchEvent(event);
    """
    note, picture = ["notes.txt", "text/plain", "two"], ["image.png", "image/png", "\0"]
    assert page.run(paste, [note], "") is False
    page.wait(lambda: page.texts("#files .name") == ["notes.txt"])
    assert page.run(paste, [picture], "a copied cell") is True
    assert page.run(paste, [], "text") is True
    assert not page.find("#notice").text
    assert page.run(paste, [picture], "") is False
    assert page.notice().startswith("“image.png” is not a text in UTF-8. Only text files")
    assert page.texts("#files .name") == ["notes.txt"]


def test_a_refused_message_keeps_its_files(driver, limited, tmp_path):
    page = Page(driver, limited)
    page.run("sessionStorage.setItem('cpmcu.key', 'first')")
    page.reload()
    page.ready()
    (tmp_path / "long.txt").write_text("word " * 300, "utf-8")
    page.find("#file").send_keys(str(tmp_path / "long.txt"))
    page.wait(lambda: page.texts("#files li"))
    page.type("Read\n")
    assert "prompt and output together can have 128" in page.notice()
    assert page.prompt() == "Read"
    assert page.texts("#files .name") == ["long.txt"]
    assert listed(page) == []
    page.click("Remove long.txt")
    assert page.texts("#files li") == []


# ---- export


def exported(page: Page, folder: Path, kind: str) -> tuple[str, str]:
    """Returns name and text of an exported file."""
    folder.mkdir(exist_ok=True)
    where = {"behavior": "allow", "downloadPath": str(folder)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    page.click("Export")
    page.click(kind, "#export")
    ending = {"Markdown": ".md", "JSON": ".json"}[kind]
    page.wait(lambda: [each for each in folder.iterdir() if each.name.endswith(ending)])
    (found,) = folder.glob(f"*{ending}")
    return found.name, found.read_text("utf-8")


def test_a_conversation_is_exported(page, tmp_path):
    assert not page.find("#open-export").is_enabled()
    page.set(system="Be brief.", temperature="0")
    ask(page, "Tell: " + cue("story"), cue("think"))
    page.answered(2)
    name, text = exported(page, tmp_path, "Markdown")
    assert name == "Tell-story.md"
    assert text == (
        f"# Tell: {cue('story')}\n\n## System\n\nBe brief.\n\n## You\n\nTell: {cue('story')}\n\n"
        f"## scripted\n\n{STORY}\n\n## You\n\n{cue('think')}\n\n"
        "## scripted\n\n> So, 🤔 two\n> and two.\n\nFour, 四.\n"
    )
    name, text = exported(page, tmp_path, "JSON")
    assert name == "Tell-story.json"
    found = json.loads(text)
    assert found["model"] == "scripted"
    assert found["settings"] == {"temperature": 0}
    assert [each["role"] for each in found["messages"]] == ["system", *["user", "assistant"] * 2]
    assert found["messages"][-1]["content"] == "Four, 四."
    assert found["messages"][-1]["reasoning_content"].strip() == "So, 🤔 two\nand two."
    assert [turn["id"] for turn in found["turns"]][-1] == found["leaf"]
    assert page.complaints() == []


# ---- context meter


def test_the_context_meter_counts_prompt_and_answer(page, scripted):
    assert not page.find("#context").is_displayed()
    ask(page, cue("story"))
    page.answered(1)
    longest = scripted.get("/v1/models").json()["data"][0]["max_model_len"]
    used = page.run("return current.turns.at(-1).numbers.context")
    tokens = int(page.texts(".answer .numbers")[0].split()[0])
    assert used > tokens
    assert page.find("#context").text == f"{used} of {longest:,} tokens"
    bar = page.find("#context .bar")
    assert bar.aria_role == "meter"
    assert bar.get_attribute("aria-valuenow") == str(used)
    ask(page, cue("think"))
    assert page.run("return current.turns.at(-1).numbers.context") > used
    page.run("model.context = 100; showContext()")
    assert page.find("#context").text.endswith(" of 100 tokens: nearly full")
    page.click("New conversation")
    assert not page.find("#context").is_displayed()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_control_shows_its_focus(driver, scripted, size):
    """Each focused control has an outline, or lies in a frame that changes its colour."""
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, scripted, size)
    page.ready()
    page.type(cue("guide"))
    page.find("#send").click()
    page.answered(1)
    page.run("$('show-side').focus()")
    seen = set()
    for _ in range(40):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        name, outline = page.run(
            """
            const element = document.activeElement;
            return [element.id || element.outerHTML, getComputedStyle(element).outlineStyle];
            """
        )
        assert outline != "none" or name == "prompt", name
        seen.add(name)
        if name == "send":
            break
    assert {"attach", "prompt", "send", "open-settings"} <= seen
