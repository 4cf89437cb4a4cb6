"""The chat page: response headers, and answers, settings, keys and errors in a browser."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from tests.e2e.browser import PHONE, Page
from tests.e2e.conftest import SCRIPTS
from tests.e2e.harness import cue, start, write_scripted

STORY = SCRIPTS["story"]


def test_the_page_is_one_file_that_needs_nothing_but_its_server(server):
    reply = server.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    text = re.sub(r"(?s)<script>.*?</script>", "", reply.text)
    loads = r"""(?:https?:)?//\w|@import|url\(|<link (?!rel="icon" href="data:,")|\bsrc="""
    assert not re.findall(loads, text)
    assert "sourceMappingURL" not in reply.text
    policy = dict(
        part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    for kind in ("script", "style"):
        hashes = policy[f"{kind}-src"].split()
        assert all(re.fullmatch(r"'sha256-\S{44}'", each) for each in hashes)
        assert len(hashes) == reply.text.count(f"<{kind}>") > 0


def test_the_page_needs_no_key(limited):
    assert limited.get("/").status_code == 200
    assert limited.get("/v1/models").status_code == 401


def test_a_conversation(driver, scripted):
    page = Page(driver, scripted)
    page.ready()
    assert page.find("#model").text == "scripted"
    page.type(cue("story") + "\n")
    assert page.answered(1) == [STORY]
    tokens, speed, accepted, first = page.texts(".answer .numbers")[0].split(" · ")
    # The model is its own draft of four tokens: five tokens a step, except the last step.
    assert re.fullmatch(r"\d+ tokens", tokens)
    assert re.fullmatch(r"\d+(\.\d)? tokens/s", speed)
    assert 4 < float(re.fullmatch(r"mean accept length (\d\.\d\d)", accepted)[1]) <= 5
    assert re.fullmatch(r"first token \d+ ms", first)
    page.type("and now " + cue("think"))
    page.find("#send").click()
    assert page.answered(2)[1] == "Four, 四."
    assert page.texts(".thought > .text") == ["So, 🤔 two\nand two."]
    assert not page.find(".thought > .text").is_displayed()  # a thought is folded at first
    page.find(".thought > summary").click()
    assert page.find(".thought > .text").is_displayed()
    assert page.contents() == [cue("story"), STORY, f"and now {cue('think')}"]
    assert page.find("#state").get_property("textContent") == "The answer has ended."
    assert page.complaints() == []


def test_markdown_is_streamed_and_heard(driver, scripted):
    page = Page(driver, scripted)
    page.ready()
    page.type(cue("guide") + "\n")
    page.answered(1)
    assert page.texts(".answer h3") == ["Sums"]
    assert page.texts(".answer ol > li > ul > li") == ["ints"]
    assert page.texts(".answer li > em, .answer li > code, .answer strong") == [
        "Add",
        "+",
        "really",
    ]
    assert page.texts(".code-head span") == ["python"]
    assert page.texts("pre > code") == ["x = 2 + 2"]
    # Each block is read out once.
    heard = page.texts("#live p")
    assert [heard[0], *heard[2:]] == ["Sums", "x = 2 + 2", "Done, really."]
    assert page.find("#live").aria_role == "log"


def test_lines_and_settings(driver, scripted):
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, scripted)
    page.ready()
    low = page.find("#prompt").size["height"]
    page.find("#prompt").send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b", cue("call"))
    assert page.prompt() == f"a\nb{cue('call')}"
    assert page.find("#prompt").size["height"] > low
    values = {"temperature": "0", "top_p": "0.5", "top_k": "7", "seed": "11", "max_tokens": "3"}
    values |= {"min_p": "0.1", "presence_penalty": "-0.5", "frequency_penalty": "0.25"}
    values["repetition_penalty"] = "1.5"
    page.set(system="Be brief.\n", **values)
    page.type("\n")
    page.answered(1)
    asked = page.asked()[0]
    assert {name: asked[name] for name in values} == {k: float(v) for k, v in values.items()}
    system, user = asked["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"] == f"a\nb{cue('call')}"
    assert page.texts(".answer .numbers")[0].startswith("3 tokens · ")
    assert page.texts(".answer .numbers")[0].endswith(" · token limit reached")
    page.reload()
    page.ready()
    page.click("Settings")
    for name, value in values.items():
        assert page.find(f"#settings [name={name}]").get_property("value") == value
    page.find("[name=top_p]").clear()
    page.find("[name=top_p]").send_keys("2\n")
    assert page.find("#wrong").text == "Top p must be a number from 0.01 to 1."
    assert driver.switch_to.active_element == page.find("[name=top_p]")
    page.find("[name=top_p]").send_keys(Keys.ESCAPE)
    assert not page.find("#settings").is_displayed()
    assert page.run("return settings.values.top_p") == "0.5"


def test_an_empty_setting_is_left_to_the_server(driver, scripted):
    page = Page(driver, scripted)
    page.ready()
    page.type(cue("story") + "\n")
    page.answered(1)
    names = {"temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "chat_template_kwargs"}
    names |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert not names & page.asked()[0].keys()
    assert [message["role"] for message in page.asked()[0]["messages"]] == ["user"]


def test_thinking_can_be_switched_off(driver, scripted, server):
    page = Page(driver, scripted)
    page.ready()
    page.set(thinking="off")
    page.type(cue("story") + "\n")
    page.answered(1)
    assert page.asked()[0]["chat_template_kwargs"] == {"enable_thinking": False}
    page = Page(driver, server)  # this server's template cannot think
    page.ready()
    page.click("Settings")
    assert not page.find("#settings [name=thinking]").is_displayed()


def test_stop_frees_the_slot_and_the_answer_goes_on(driver, server):
    page = Page(driver, server)
    page.ready()
    page.add_to_requests(ignore_eos=True, max_tokens=1900)
    page.type("def f():\n")
    page.begun()
    assert not page.find("#send").is_displayed()
    assert server.metric("vllm:num_requests_running") == 1
    page.find("#stop").click()
    (text,) = page.answered(1)
    assert text
    numbers = page.texts(".answer .numbers")[0]
    assert numbers.endswith(" · stopped")
    assert int(numbers.split()[0]) < 1900
    assert page.find("#state").get_property("textContent") == "The answer was stopped."
    server.wait_left()
    assert page.find("#send").is_displayed()
    assert driver.switch_to.active_element == page.find("#prompt")
    page.add_to_requests(max_tokens=5, ignore_eos=True)
    before = page.run("return current.turns.at(-1).text")
    page.click("Go on")
    page.wait(lambda: page.texts(".answer .numbers")[0].endswith("token limit reached"))
    assert page.contents() == ["def f():", before]
    assert page.asked()[-1]["continue_final_message"] is True
    after = page.run("return current.turns.at(-1).text")
    assert after.startswith(before)
    assert len(after) > len(before)
    assert int(page.texts(".answer .numbers")[0].split()[0]) == int(numbers.split()[0]) + 5


def test_escape_stops(driver, server):
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, server)
    page.ready()
    page.add_to_requests(ignore_eos=True, max_tokens=1900)
    page.type("class A:\n")
    page.begun()
    page.type(Keys.ESCAPE)
    page.answered(1)
    server.wait_left()
    assert page.texts(".answer .numbers")[0].endswith(" · stopped")


def test_key(driver, limited):
    page = Page(driver, limited)
    page.wait(lambda: page.find("#key").is_displayed())
    assert page.find("#hint").text == "This server needs an API key."
    assert driver.switch_to.active_element == page.find("#key")
    page.find("#key").send_keys("wrong\n")
    assert page.notice() == "The server does not know this API key."
    page.find("#key").clear()
    page.find("#key").send_keys("second\n")
    page.ready()
    assert not page.find("#notice").is_displayed()
    assert not page.find("#key").is_displayed()
    page.add_to_requests(max_tokens=4)
    page.type("x = \n")
    page.answered(1)
    page.reload()
    page.ready()  # the key is kept, but for this tab only
    kept = "return [sessionStorage, localStorage].map((each) => Object.values(each).join())"
    here, everywhere = page.run(kept)
    assert "second" in here
    assert "second" not in everywhere
    assert page.run("return document.cookie") == ""
    page.click("Settings")
    page.click("Forget the API key")
    page.wait(lambda: page.find("#key").is_displayed())
    assert "second" not in page.run(kept)[0]


def test_a_refusal_is_shown_as_one_and_loses_nothing(driver, limited):
    page = Page(driver, limited)
    page.run("sessionStorage.setItem('cpmcu.key', 'first')")
    page.reload()
    page.ready()
    words = "word " * 300
    page.run("document.querySelector('#prompt').value = arguments[0]", words)
    page.find("#send").click()
    assert "prompt and output together can have 128" in page.notice()
    assert page.find("#state").get_property("textContent") == ""
    assert page.find("#notice").get_attribute("role") == "alert"
    assert page.prompt() == words
    assert not page.texts(".turn")
    assert not page.texts("#list .chat")
    # The text typed meanwhile is kept too.
    page.run("window.fetch = () => new Promise((done, fail) => { window.fail = fail; })")
    page.find("#send").click()
    page.wait(lambda: page.prompt() == "")
    page.type("next")
    page.run("window.fail(new TypeError('failed'))")
    page.wait(lambda: page.find("#notice").text == "The server cannot be reached.")
    assert page.prompt() == f"{words}\n\nnext"


def test_an_error_within_an_answer_is_shown_with_it(driver, scripted):
    """The text before the error and its reason remain, also after a reload."""
    page = Page(driver, scripted)
    page.ready()
    said = "The server failed to answer this request; its log says why."
    usage = {"completion_tokens": 2}
    events = [
        {"choices": [{"delta": {"content": "Half an"}, "index": 0}], "usage": usage},
        {"error": {"message": said, "type": "server_error"}},
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.run("const text = arguments[0]; window.fetch = async () => new Response(text)", stream)
    page.type("Go\n")
    assert page.answered(1) == ["Half an"]
    for _ in range(2):
        assert page.find(".answer .problem").text == said
        assert page.texts(".answer .numbers")[0].split(" · ")[-1] == "broken off"
        page.reload()
        page.ready()
    assert page.find("#model").text == "scripted"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model without chat template."""
    folder = tmp_path_factory.mktemp("plain")
    directory = write_scripted(folder, {"go": " on and on", "end": " fin"}, "")
    config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    with start("--model", str(directory), "--served-model-name", "plain") as server:
        yield server


def test_a_model_without_chat_template_completes(driver, plain):
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, plain)
    page.ready()
    assert page.find("#hint").text.startswith("Write the beginning of a text")
    assert page.find("#prompt").get_attribute("placeholder") == "Text to complete"
    assert not page.find("#attach").is_displayed()
    assert not page.find("#modes").is_displayed()
    page.type(f"x\n{cue('go')}")  # Enter begins a line
    assert page.prompt() == f"x\n{cue('go')}"
    page.type(Keys.CONTROL + Keys.ENTER)
    assert page.answered(1) == [f"x\n{cue('go')} on and on"]
    assert page.asked()[0]["prompt"] == f"x\n{cue('go')}"
    assert page.asked()[0]["max_tokens"] == 512
    page.click("Edit the text")
    field = page.find(".editor textarea")
    assert field.get_property("value") == f"x\n{cue('go')} on and on"
    field.send_keys(cue("end"))
    page.click("Send", ".editor")
    assert page.answered(1) == [f"x\n{cue('go')} on and on{cue('end')} fin"]
    assert page.texts(".count") == ["2/2"]
    page.click("Previous version")
    assert page.answered(1) == [f"x\n{cue('go')} on and on"]
    page.click("Regenerate")
    page.wait(lambda: page.texts(".count") == ["3/3"])


def test_completing_with_a_model_that_chats(driver, scripted):
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, scripted)
    page.ready()
    page.click("Complete a text")
    page.type(cue("story") + Keys.CONTROL + Keys.ENTER)
    assert page.answered(1) == [cue("story") + STORY]
    assert "messages" not in page.asked()[0]


def test_enter_on_a_phone_begins_a_line(driver, scripted):
    page = Page(driver, scripted, PHONE)
    page.ready()
    page.type("a\nb")
    assert page.prompt() == "a\nb"
    page.find("#send").click()
    page.answered(1)


def test_it_waits_for_the_model(driver):
    """A page opened while the server loads becomes ready by itself."""
    with start(ready=False) as server:
        page = Page(driver, server)
        page.ready()
        assert httpx.get(server.url + "/health", timeout=60).status_code == 200


def test_a_server_that_is_lost_and_comes_back(driver):
    """The received text remains, and the page reconnects by itself."""
    with start() as server:
        page = Page(driver, server)
        page.ready()
        page.add_to_requests(ignore_eos=True, max_tokens=1900)
        page.type("import os\n")
        page.begun()
    text = page.answered(1)[0]
    assert text
    assert page.find(".answer .problem").text == "The connection to the server was lost."
    assert page.find("#state").get_property("textContent").startswith("The answer broke off: ")
    page.type("y\n")
    assert page.notice() == "The server cannot be reached."
    assert page.prompt() == "y"
    with start("--port", str(server.port)):
        page.wait(lambda: not page.find("#notice").is_displayed())
        page.reload()
        page.ready()
        assert page.answered(1) == [text]
        assert page.prompt() == "y"
