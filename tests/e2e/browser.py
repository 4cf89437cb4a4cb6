"""Drives the chat page in a browser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from tests.e2e.harness import Server

DESKTOP, PHONE = (1280, 800), (390, 844)
ANSWERS = "article[aria-label='The model']"
# Records the page's requests. A test can add fields to them.
_RECORD = """
window.asked = []; window.extra = arguments[0]; const before = window.fetch;
window.fetch = (path, options = {}) => {
  if (options.body) {
    options.body = JSON.stringify({...JSON.parse(options.body), ...window.extra});
    window.asked.push(JSON.parse(options.body));
  }
  return before(path, options);
};
"""


class Page:
    """The page of one server, with empty browser storage."""

    def __init__(self, driver: Any, server: Server, size: tuple[int, int] = DESKTOP) -> None:
        self.driver = driver
        self.server = server
        self.resize(size)
        driver.get("about:blank")
        kept = {"origin": server.url, "storageTypes": "local_storage"}
        driver.execute_cdp_cmd("Storage.clearDataForOrigin", kept)
        driver.get(server.url + "/")
        driver.execute_script("sessionStorage.clear()")
        driver.get_log("browser")  # clears the log
        self.reload()

    def resize(self, size: tuple[int, int]) -> None:
        """Emulates a desktop or a phone."""
        phone = size == PHONE
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})

    def reload(self) -> None:
        self.driver.get(self.server.url + "/")
        self.driver.execute_script(_RECORD, {})

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def click(self, name: str, within: str = "body") -> None:
        """Clicks the last visible button with this name."""

        def click() -> None:
            buttons = self.driver.find_elements("css selector", f"{within} button")
            found = [b for b in buttons if b.is_displayed() and b.accessible_name == name]
            assert found, [b.accessible_name for b in buttons if b.is_displayed()]
            found[-1].click()

        self._anew(click)

    def press(self, selector: str) -> None:
        """Clicks an element."""
        self._anew(lambda: self.find(selector).click())

    def _anew(self, act: Callable[[], None]) -> None:
        """Finds elements and clicks one. If the page replaces them meanwhile, does so again."""
        from selenium.common.exceptions import StaleElementReferenceException

        def done() -> bool:
            try:
                act()
            except StaleElementReferenceException:
                return False
            return True

        self.wait(done)

    def texts(self, selector: str) -> list[str]:
        # element.text has only visible text with white space removed.
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return [text.replace("\u00a0", " ") for text in self.run(script, selector)]

    def wait(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, self.find("body").text
            time.sleep(0.02)
        return found

    def ready(self) -> None:
        self.wait(lambda: self.find("#model").text != "cpmcu")

    def type(self, text: str) -> None:
        # ChromeDriver cannot type characters outside the basic plane.
        self.find("#prompt").send_keys(text)

    def prompt(self) -> str:
        return self.find("#prompt").get_property("value")

    def set(self, **values: str) -> None:
        """Fills in settings and saves them."""
        self.click("Settings")
        for name, value in values.items():
            field = self.find(f"#settings [name={name}]")
            if field.tag_name != "select":
                field.clear()
            field.send_keys(value)
        self.click("Save", "#settings")

    def add_to_requests(self, **fields: object) -> None:
        self.run("window.extra = arguments[0]", fields)

    def asked(self) -> list[dict[str, Any]]:
        return self.run("return window.asked")

    def contents(self) -> list[str]:
        """Returns the texts of the messages in the last request."""
        return [message["content"] for message in self.asked()[-1]["messages"]]

    def answered(self, count: int) -> list[str]:
        """Waits for `count` answers and the end of the last one. Returns their texts."""
        self.wait(lambda: len(self.texts(ANSWERS)) == count)
        self.wait(lambda: not self.texts(".busy"))
        return self.texts(f"{ANSWERS} > .text")

    def begun(self) -> None:
        """Waits until an answer has some text."""
        self.wait(lambda: any(self.texts(".busy > .text")))

    def notice(self) -> str:
        return self.wait(lambda: self.find("#notice").text)

    def complaints(self) -> list[str]:
        entries = self.driver.get_log("browser")
        return [e["message"] for e in entries if e["level"] in ("WARNING", "SEVERE")]

    def contrast(self, selector: str) -> float:
        """Returns WCAG's contrast ratio of an element's text and its background."""
        colours = self.run(
            """
            let element = document.querySelector(arguments[0]);
            const found = [getComputedStyle(element).color];
            const back = () => getComputedStyle(element).backgroundColor;
            while (back() === "rgba(0, 0, 0, 0)") element = element.parentElement;
            return [...found, back()];
            """,
            selector,
        )
        low, high = sorted(map(_luminance, colours))
        return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear))
