"""The chat page: what it is served with, and in headless Chromium where that is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Server, cue, start, write_scripted

PAGE = Path(__file__).parents[2] / "cpmcu" / "serving" / "page.html"
DESKTOP, PHONE = (1200, 800), (360, 740)
# Keeps what the page asks for, and lets a test add to it.
RECORD = """
window.asked = []; window.extra = arguments[0]; const before = window.fetch;
window.fetch = (path, options = {}) => {
  if (options.body) {
    options.body = JSON.stringify({...JSON.parse(options.body), ...window.extra});
    window.asked.push(JSON.parse(options.body));
  }
  return before(path, options);
};
"""


def test_the_page_needs_nothing_but_its_server(server):
    reply = server.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.text == PAGE.read_text("utf-8")
    assert not re.findall(
        r"""(?:https?:)?//\w|@import|url\(|(?:src|href)="(?!data:,")""", reply.text
    )
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert re.search(r"script-src 'sha256-\S{44}'(;|$)", policy)


def test_the_page_needs_no_key(limited):
    assert limited.get("/").status_code == 200
    assert limited.get("/v1/models").status_code == 401


# ---- in a browser


class Page:
    """The page of one server in the browser."""

    def __init__(self, driver: Any, server: Server, size: tuple[int, int] = DESKTOP) -> None:
        self.driver = driver
        width, height = size
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": size == PHONE,
        }
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(server.url + "/")
        driver.execute_script("sessionStorage.clear()")
        driver.get_log("browser")  # forgets it
        driver.get(server.url + "/")
        driver.execute_script(RECORD, {})

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        # Not element.text, which is what can be seen, with white space gone.
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.driver.execute_script(script, selector)

    def wait(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, self.find("body").text
            time.sleep(0.02)
        return found

    def ready(self) -> None:
        self.wait(lambda: self.find("#model").text != "cpmcu")

    def type(self, text: str) -> None:
        # ChromeDriver cannot type what is outside the basic plane; the rest goes by key.
        self.find("#prompt").send_keys(text)

    def add_to_requests(self, **fields: object) -> None:
        self.driver.execute_script("window.extra = arguments[0]", fields)

    def asked(self) -> list[dict[str, Any]]:
        return self.driver.execute_script("return window.asked")

    def answered(self, count: int) -> list[str]:
        """The model's texts, once there are `count` and the last has ended."""
        self.wait(lambda: len(self.texts("article[aria-label='The model']")) == count)
        self.wait(lambda: not self.texts(".busy"))
        return self.texts("article[aria-label='The model'] > .text")

    def complaints(self) -> list[str]:
        entries = self.driver.get_log("browser")
        return [e["message"] for e in entries if e["level"] in ("WARNING", "SEVERE")]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    tool = shutil.which("chromedriver")
    if browser is None or tool is None:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(tool)
    with webdriver.Chrome(options=options, service=service) as running:
        yield running


def test_a_conversation(driver, scripted):
    page = Page(driver, scripted)
    page.ready()
    assert page.find("#model").text == "scripted"
    page.type(cue("story") + "\n")
    story = "Es war 🙂 einmal: 你好，世界！ 👩‍👩‍👧 naïve café. Ende"
    assert page.answered(1) == [story]
    tokens, speed, accepted = page.texts(".numbers")[0].split(" · ")
    # Drafted by itself with four tokens ahead: five a step, but for the end.
    assert re.fullmatch(r"\d+ tokens", tokens)
    assert re.fullmatch(r"\d+(\.\d)? tokens/s", speed)
    assert 4 < float(re.fullmatch(r"mean accept length (\d\.\d\d)", accepted)[1]) <= 5
    page.type("and now " + cue("think"))
    page.find("#send").click()
    assert page.answered(2)[1] == "Four, 四."
    assert page.texts(".thought > .text") == ["So, 🤔 two\nand two."]
    asked = page.asked()
    assert [[m["content"] for m in each["messages"]] for each in asked] == [
        [cue("story")],
        [cue("story"), story, f"and now {cue('think')}"],
    ]
    page.find("#clear").click()
    assert not page.texts(".turn")
    page.type(cue("story") + "\n")
    assert page.answered(1) == [story]
    assert len(page.asked()[-1]["messages"]) == 1
    assert page.complaints() == []


def test_lines_and_settings(driver, scripted):
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, scripted)
    page.ready()
    prompt = page.find("#prompt")
    low = prompt.size["height"]
    prompt.send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b", cue("call"))
    assert prompt.get_property("value") == f"a\nb{cue('call')}"
    assert prompt.size["height"] > low
    page.find("#more").click()
    for name, value in (("#limit", "3"), ("#temperature", "0")):
        page.find(name).clear()
        page.find(name).send_keys(value)
    prompt.send_keys("\n")
    page.answered(1)
    asked = page.asked()[0]
    assert (asked["max_tokens"], asked["temperature"]) == (3, 0)
    assert page.texts(".numbers")[0].startswith("3 tokens · ")
    assert page.texts(".numbers")[0].endswith(" · most tokens reached")
    page.find("#limit").clear()
    page.type("x\n")
    assert page.find("#error").text == "Most new tokens must be a whole number of at least 1."
    assert len(page.asked()) == 1


def test_stop_frees_the_slot(driver, server):
    page = Page(driver, server)
    page.ready()
    page.add_to_requests(ignore_eos=True, max_tokens=1900)
    page.type("def f():\n")
    page.wait(lambda: page.texts(".numbers") and "tokens/s" in page.texts(".numbers")[0])
    assert not page.find("#send").is_displayed()
    assert server.metric("vllm:num_requests_running") == 1
    page.find("#stop").click()
    (text,) = page.answered(1)
    assert text
    assert page.texts(".numbers")[0].endswith(" · stopped")
    assert int(page.texts(".numbers")[0].split()[0]) < 1900
    assert server.wait_idle() < 5
    assert page.find("#send").is_displayed()
    assert driver.switch_to.active_element == page.find("#prompt")
    page.add_to_requests(max_tokens=2)
    page.type("more\n")
    page.answered(2)
    assert [m["content"] for m in page.asked()[1]["messages"]] == ["def f():", text, "more"]


def test_key(driver, limited):
    page = Page(driver, limited)
    page.wait(lambda: page.find("#key").is_displayed())
    assert page.find("#hint").text == "This server needs an API key."
    page.find("#key").send_keys("wrong\n")
    page.wait(lambda: page.find("#error").is_displayed())
    assert page.find("#error").text == "The server does not know this API key."
    page.find("#key").clear()
    page.find("#key").send_keys("second\n")
    page.ready()
    assert not page.find("#error").is_displayed()
    page.add_to_requests(max_tokens=4)
    page.type("x = \n")
    page.answered(1)
    driver.refresh()
    page.ready()  # it is kept
    script = "return [Object.values(sessionStorage), localStorage.length, document.cookie]"
    assert driver.execute_script(script) == [["second"], 0, ""]


def test_errors_are_a_sentence_and_lose_nothing(driver, limited):
    page = Page(driver, limited)
    driver.execute_script("sessionStorage.setItem('cpmcu-key', 'first')")
    driver.refresh()
    page.ready()
    words = "word " * 300
    driver.execute_script("document.querySelector('#prompt').value = arguments[0]", words)
    page.find("#send").click()
    page.wait(lambda: page.find("#error").is_displayed())
    assert "prompt and output together can have 128" in page.find("#error").text
    assert page.find("#prompt").get_property("value") == words
    assert not page.texts(".turn")
    driver.execute_script("window.fetch = () => Promise.reject(new TypeError('failed'))")
    page.find("#send").click()
    page.wait(lambda: page.find("#error").text == "The server cannot be reached.")
    assert page.find("#prompt").get_property("value") == words


def test_a_model_without_chat_template_completes(driver, tmp_path):
    directory = write_scripted(tmp_path, {"go": " on and on"}, "")
    config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    with start("--model", str(directory), "--served-model-name", "plain") as server:
        page = Page(driver, server)
        page.ready()
        assert page.find("#mode").get_property("value") == "complete"
        assert page.find("#hint").text.startswith("Write the beginning of a text")
        page.type(f"x{cue('go')}\n")
        assert page.answered(1) == [f"x{cue('go')} on and on"]
    page.type("y\n")  # nobody is there any more
    page.wait(lambda: page.find("#error").text == "The server cannot be reached.")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_looks(driver, server, size, scheme):
    """Nothing is cut off or too small to be touched, text stands out, controls have names.

    With CPMCU_SCREENSHOTS=DIR, pictures go there.
    """
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    page = Page(driver, server, size)
    page.ready()
    page.add_to_requests(seed=3)
    page.find("#more").click()
    page.find("#limit").clear()
    page.find("#limit").send_keys("90")
    page.type(f"{'long' * 40} import sys\n")
    page.answered(1)
    page.type("class Stack:\n")
    page.answered(2)
    for picture, shown in (("settings", True), ("chat", False)):
        if not shown:
            page.find("#more").click()
        width, inner = driver.execute_script(
            "return [document.documentElement.scrollWidth, window.innerWidth]"
        )
        assert width <= inner == size[0]
        for control in driver.find_elements("css selector", "button, input, select, textarea"):
            if control.is_displayed():
                box = control.rect
                assert box["width"] >= 44 and box["height"] >= 44
                assert box["x"] >= 0 and box["x"] + box["width"] <= size[0]
                assert box["y"] >= 0 and box["y"] + box["height"] <= size[1]
                assert control.accessible_name
        if folder := os.environ.get("CPMCU_SCREENSHOTS"):
            driver.save_screenshot(f"{folder}/{picture}-{scheme}-{size[0]}.png")
    for selector in (".mine", ".numbers", "#clear", "#model"):
        assert contrast(driver, selector) >= 4.5
    assert page.complaints() == []


def contrast(driver: Any, selector: str) -> float:
    """WCAG's contrast ratio of an element's text and what is behind it."""
    colours = driver.execute_script(
        """
        let element = document.querySelector(arguments[0]);
        const found = [getComputedStyle(element).color];
        const clear = "rgba(0, 0, 0, 0)";
        while (getComputedStyle(element).backgroundColor === clear) element = element.parentElement;
        return [...found, getComputedStyle(element).backgroundColor];
        """,
        selector,
    )
    low, high = sorted(luminance(colour) for colour in colours)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear))


def test_it_waits_for_the_model(driver, tmp_path):
    """Opened while the server is still loading, it gets ready by itself."""
    with start(ready=False) as server:
        page = Page(driver, server)
        page.ready()
        assert httpx.get(server.url + "/health").status_code == 200
