"""The chat page's libraries: unchanged files of their packages, with version and licence."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

import cpmcu

PAGE = Path(cpmcu.__file__).parent / "serving" / "page"
VENDOR = PAGE / "vendor"
LIBRARIES = json.loads((VENDOR / "vendor.json").read_text("utf-8"))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda each: each["package"])
def test_a_library_is_the_file_of_its_package(library):
    body = (VENDOR / library["file"]).read_bytes()
    assert hashlib.sha256(body).hexdigest() == library["sha256"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", library["version"])
    assert "Copyright" in (VENDOR / library["licence_file"]).read_text("utf-8")


def test_every_file_is_listed():
    listed = {each[key] for each in LIBRARIES for key in ("file", "licence_file")}
    assert {each.name for each in VENDOR.iterdir()} == {*listed, "README.md", "vendor.json"}


def test_the_page_loads_every_script():
    """Each script of the folder is loaded once, and no other one."""
    loaded = re.findall(r'<script src="(.+?)">', (PAGE / "index.html").read_text("utf-8"))
    scripts = [each.relative_to(PAGE).as_posix() for each in PAGE.rglob("*.js")]
    assert sorted(loaded) == sorted(scripts)


def test_the_pages_own_scripts_make_no_html_of_strings():
    own = "".join(each.read_text("utf-8") for each in PAGE.glob("*.js"))
    assert not re.findall("innerHTML|outerHTML|insertAdjacentHTML|document.write", own)
