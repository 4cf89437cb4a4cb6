"""Markdown on the chat page: rendered to elements, as a whole text or while it streams."""

from __future__ import annotations

import random
import re

import pytest

from tests.e2e.browser import Page

SHOW = """
const root = make("div");
const markdown = new Markdown(root);
for (const text of arguments[0]) markdown.show(text);
return root.innerHTML;
"""
H1, H2 = '<h2 class="level-1">', '<h3 class="level-2">'
PRE = '<pre tabindex="0"><code>'
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


@pytest.fixture(scope="module")
def page(driver, scripted):
    found = Page(driver, scripted)
    found.ready()
    return found


def shown(page: Page, *texts: str) -> str:
    """The HTML of a text that arrives in steps. Omits the frame of code blocks."""
    html = page.run(SHOW, list(texts))
    html = re.sub(
        r'<div class="code-head"><span>(.*?)</span><button.*?</button></div>', r"[\1]", html
    )
    return html.replace('<div class="code">', "").replace("</code></pre></div>", "</code></pre>")


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a\nb  \nc", "<p>a<br>b<br>c</p>"),
        ("if a:\n    b\n\tc", "<p>if a:<br>    b<br>\tc</p>"),
        ("if a:\n\n    b\n    c", f"<p>if a:</p>[text]{PRE}b\nc</code></pre>"),
        ("# One\n## Two ##\n####### no", f"{H1}One</h2>{H2}Two</h3><p>####### no</p>"),
        ("One\n===\nTwo\n---", f"{H1}One</h2>{H2}Two</h3>"),
        ("a\n\n---\n* * *", "<p>a</p><hr><hr>"),
        (
            "> a\n> > b\n\nc",
            "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
        ),
        ("- a\n- b\n\n* c", "<ul><li>a</li><li>b</li></ul><ul><li>c</li></ul>"),
        (
            "1. a\n   - b\n     - c\n2. d",
            "<ol><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ol>",
        ),
        (
            "1. a\n  - b\n2. c",
            '<ol><li>a</li></ol><ul><li>b</li></ul><ol start="2"><li>c</li></ol>',
        ),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("- a\n\n  b\n- c", "<ul><li><p>a</p><p>b</p></li><li><p>c</p></li></ul>"),
        ("- a\nb", "<ul><li>a<br>b</li></ul>"),
        (
            "1. a\n```\nx\n```\n2. b",
            f'<ol><li>a</li></ol>[text]{PRE}x</code></pre><ol start="2"><li>b</li></ol>',
        ),
        (
            "- a\n  ```sh\n  ls\n    -l\n  ```",
            f"<ul><li>a[sh]{PRE}ls\n  -l</code></pre></li></ul>",
        ),
        (
            "- [x] a\n- [ ] b",
            '<ul><li class="task"><span role="img" aria-label="done">☑ </span>a</li>'
            '<li class="task"><span role="img" aria-label="to do">☐ </span>b</li></ul>',
        ),
        ("In 1999. was\n1999. x", "<p>In 1999. was<br>1999. x</p>"),
        (
            "```c++ title\n<b>&\n\n\tx\n```\ny",
            f"[c++]{PRE}&lt;b&gt;&amp;\n\n\tx</code></pre><p>y</p>",
        ),
        ("````\n```\n````", f"[text]{PRE}```</code></pre>"),
        ("~~~\n```\n~~~", f"[text]{PRE}```</code></pre>"),
        ("```py\nx = 1", f"[py]{PRE}x = 1</code></pre>"),
        ("a ``` b\nc", "<p>a ``` b<br>c</p>"),
        (
            "x\n|a|b|\n|:-:|-:|\n|1 \\| 2|*3*|\n|4|",
            '<p>x</p><div class="scroll" tabindex="0"><table><thead><tr>'
            '<th class="center">a</th><th class="right">b</th></tr></thead><tbody><tr>'
            '<td class="center">1 | 2</td><td class="right"><em>3</em></td></tr><tr>'
            '<td class="center">4</td><td class="right"></td></tr></tbody></table></div>',
        ),
        ("a | b\nc | d", "<p>a | b<br>c | d</p>"),
        (
            "*a* _b_ **c** __d__ ***e*** ~~f~~ ~g~",
            "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> "
            "<em><strong>e</strong></em> <s>f</s> ~g~</p>",
        ),
        (
            "**a *b* c** *d **e***",
            "<p><strong>a <em>b</em> c</strong> <em>d <strong>e</strong></em></p>",
        ),
        ("snake_case_name 2 * 3 * 4 **open", "<p>snake_case_name 2 * 3 * 4 **open</p>"),
        ("**你好。**世界，*“对”*吗", "<p><strong>你好。</strong>世界，<em>“对”</em>吗</p>"),
        (
            "`a*b*` ``c ` d`` `open *e*",
            "<p><code>a*b*</code> <code>c ` d</code> `open <em>e</em></p>",
        ),
        (r"\*a\* \\", "<p>*a* \\</p>"),
        ("$5 and $6, $HOME/$USER.", "<p>$5 and $6, $HOME/$USER.</p>"),
        ("**你好。**世界*“对”*吗", "<p><strong>你好。</strong>世界<em>“对”</em>吗</p>"),
        (
            "&lt;b&gt; &amp; &nbsp;&copy; a<br>b",
            "<p>&lt;b&gt; &amp; &nbsp;© a<br>b</p>",
        ),
        (
            "[a *b*](https://x.org/a_(b)_c 'T')",
            f'<p><a href="https://x.org/a_(b)_c" {LINK}>a <em>b</em></a></p>',
        ),
        (
            "see (https://x.org/a_b?c=d), <http://y.org>",
            f'<p>see (<a href="https://x.org/a_b?c=d" {LINK}>https://x.org/a_b?c=d</a>), '
            f'<a href="http://y.org/" {LINK}>http://y.org</a></p>',
        ),
        ("<a@b.org>", f'<p><a href="mailto:a@b.org" {LINK}>a@b.org</a></p>'),
        ("![cat](https://x.org/c.png)", f'<p><a href="https://x.org/c.png" {LINK}>cat</a></p>'),
        ("[a](b) [c] ![d] [e](", "<p>[a](b) [c] ![d] [e](</p>"),
    ],
)
def test_markdown(page, text, html):
    assert shown(page, text) == html
    # The page shows the same if the text comes letter by letter.
    assert shown(page, *(text[:end] for end in range(1, len(text) + 1))) == html


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        "data:text/html,x",
        "vbscript:x",
        "file:///etc",
        "//x.org",
        "java&#10;script:x",
        " javascript:x",
        "blob:null/1",
        "ftp://x.org",
    ],
)
def test_links_lead_to_web_pages_and_mail_only(page, address):
    html = shown(page, f"[a]({address}) [b](<{address}>) <{address}> ![c]({address})")
    assert "<a" not in html
    assert page.run("return webAddress(arguments[0])", address) is None


def test_html_of_the_model_is_text(page):
    page.run("window.harm = 0")
    for text in (
        "<script>window.harm = 1</script>",
        "<img src=x onerror='window.harm = 1'>",
        "**<svg onload=harm=1>**\n\n- <iframe srcdoc='x'>\n\n|<b>|\n|-|\n|<i>|",
        '[<img src=x onerror=harm=1>](https://x.org/"onclick="harm=1)',
        "```<img src=x>\n</code></pre><script>window.harm = 1</script>\n```",
    ):
        elements = set(re.findall(r"<([a-z]+)", shown(page, text)))
        assert not elements & {"script", "img", "svg", "iframe", "b", "i"}, elements
    assert page.run("return window.harm") == 0
    # The browser, too, refuses to make elements of a text.
    with pytest.raises(Exception, match="TrustedHTML"):
        page.run("document.createElement('div').innerHTML = '<b>a</b>'")


def test_any_text_is_the_same_in_pieces(page):
    """Random texts of Markdown marks give the same HTML for every division into pieces."""
    signs = ["# ", "- ", "1. ", "> ", "```", "\n", "\n\n", "  ", "|", "|-|\n", "*", "**", "_", "`"]
    signs += [
        "a",
        "b c",
        "---",
        "~~",
        "\\",
        "é",
        "。",
        "$$",
        "===",
        "\t",
        "[",
        "]",
        "[x](https://y.org)",
    ]
    rng = random.Random(5)
    for _ in range(150):
        text = "".join(rng.choice(signs) for _ in range(rng.randint(1, 40)))
        ends = sorted(rng.sample(range(1, len(text) + 1), min(len(text), 12)) + [len(text)])
        assert shown(page, *(text[:end] for end in ends)) == shown(page, text), repr(text)


@pytest.mark.parametrize(
    ("text", "rest", "displayed"),
    [
        (r"so \(x_1 * y_1\).", ["so ", "."], False),
        ("so $a_1*b_1$, $c$", ["so ", ", ", ""], False),
        ("so $$a*b*c$$.", ["so ", "."], True),
        ("$$\n\\frac{a}{b}\n- 2\n$$\n\nDone", ["Done"], True),
        ("so\n\\[ x^2\n= 4 \\]\nand", ["so", "and"], True),
        ("- a\n  $$x$$\n- b", ["a", "b"], True),
        ("|a|\n|-|\n|$x$|", ["a"], False),
    ],
)
def test_formulas_become_mathml(page, text, rest, displayed):
    found = page.run(
        """
        const root = make("div");
        new Markdown(root).show(arguments[0]);
        const formulas = [...root.querySelectorAll(".math")];
        return formulas.map((e) => {
          const [math] = e.children;
          const read = e.textContent !== e.dataset.source;
          return [math.namespaceURI, math.getAttribute("display"), read];
        });
        """,
        text,
    )
    kind = "block" if displayed else None
    assert found
    assert all(each == ["http://www.w3.org/1998/Math/MathML", kind, True] for each in found)
    html = re.sub(r'(?s)<span class="math.*?</math></span>', "\n", shown(page, text))
    words = re.sub("<[^>]*>", "\n", html).split("\n")
    assert [word for word in words if word.strip()] == [word for word in rest if word.strip()]
    assert shown(page, *(text[:end] for end in range(1, len(text) + 1))) == shown(page, text)


@pytest.mark.parametrize(
    "text",
    [
        r"\(\frac{a\)",
        r"$$\unknown$$",
        "$$a *b* c",
        r"\[ a",
        r"$$\href{javascript:alert(1)}{x}$$",
        r"$$\def\a{\a\a}\a$$",
        f"$${'x' * 6000}$$",
        "$$" + "{" * 2000 + "x" + "}" * 2000 + "$$",
    ],
    ids=lambda text: text[:12],
)
def test_a_formula_that_cannot_be_read_stays_as_written(page, text):
    html = shown(page, text)
    assert "<a" not in html
    assert (
        page.run("const e = make('p'); new Markdown(e).show(arguments[0]); return textOf(e)", text)
        == text
    )


def test_styles_of_formulas_keep_to_the_policy(page):
    page.complaints()
    tex = r"\pmb{a}\fcolorbox{red}{blue}{b}"
    page.run("$('turns').append(formulaElement('p', arguments[0], true))", tex)
    style = "return document.querySelector('.math [style]').style.length"
    assert page.run(style) > 0
    page.run("document.querySelector('.math').remove()")
    assert page.complaints() == []


def coloured(page: Page, text: str) -> dict[str, list[str]]:
    """The coloured words of a text's code, by the kind that highlight.js finds."""
    page.run(
        """
        window.root = make("div");
        $("turns").append(root);
        new Markdown(root).show(arguments[0]);
        """,
        text,
    )
    page.wait(lambda: page.run("return !colouring.waiting.size"))
    found = page.run(
        """
        const all = [...root.querySelectorAll("code span")];
        root.remove();
        return all.map((e) => [e.className, e.textContent]);
        """
    )
    return {kind: [text for each, text in found if each == kind] for kind, _ in found}


def test_code_is_coloured(page):
    found = coloured(page, "```python\ndef f(x):\n    return '<b>' # 1\n```")
    assert found["hl-keyword"] == ["def", "return"]
    assert found["hl-string"] == ["'<b>'"]
    assert found["hl-comment"] == ["# 1"]
    assert coloured(page, "```c++\nint x;\n```")["hl-type"] == ["int"]
    assert "hl-keyword" in coloured(page, "- a\n\n  ```cuda\n  if (x) return;\n  ```")
    assert "hl-name" in coloured(page, "```html\n<b>x</b>\n```")
    assert not coloured(page, "```klingon\nif x\n```")
    assert not coloured(page, "```\nif x\n```")


def test_long_code_is_coloured_at_its_beginning(page):
    found = coloured(page, "```python\n" + "return 1\n" * 4000 + "```")
    assert 1000 < len(found["hl-keyword"]) < 2000


def test_coloured_code_that_grows_keeps_its_coloured_words(page):
    page.run(
        """
        window.root = make("div");
        $("turns").append(root);
        window.grown = new Markdown(root);
        grown.show("- a\\n  ```py\\n  return 1\\n");
        """
    )
    page.wait(lambda: page.run("return root.querySelector('.hl-keyword')"))
    page.run("window.word = root.querySelector('.hl-keyword')")
    page.run('grown.show("- a\\n  ```py\\n  return 1\\n  return 2\\n  ```\\n- b")')
    page.wait(lambda: page.run("return root.querySelectorAll('.hl-keyword').length") == 2)
    assert page.run("return word.isConnected && root.querySelector('code').textContent") == (
        "return 1\nreturn 2"
    )
    page.run("root.remove()")


def test_code_that_grows_keeps_its_element(page):
    """The element of a growing code block stays, so its selection and scroll position stay, too."""
    same = page.run(
        """
        const root = make("div");
        const markdown = new Markdown(root);
        markdown.show("```py\\nx = 1");
        const code = root.querySelector("code");
        markdown.show("```py\\nx = 1\\ny = 2\\n```\\n\\nDone.");
        return [root.querySelector("code") === code, code.textContent];
        """
    )
    assert same == [True, "x = 1\ny = 2"]


@pytest.mark.parametrize(
    "text",
    [
        *(
            part * 20000
            for part in ("> ", "- ", "*a ", "[[", "[a](", "**a_", "\\(", "$a", "<", "#")
        ),
        *(part * 20000 for part in ("h", "$$\n", "$a$ ", "a_", "~~", "\n$$a\n")),
        "`" * 200 + "a`" * 20000,
        "|" * 20000 + "\n" + "|-" * 20000,
        " " * 40000 + "x",
        "# " + " " * 40000 + "x",
        "![[" * 20000 + "](https://x.org)",
        "https://" + "a)" * 20000,
        "1. a\n" * 5000,
        "".join(" " * 2 * i + "- a\n" for i in range(300)),
    ],
    ids=lambda text: repr(text[:9]),
)
def test_texts_made_to_be_slow_are_shown(page, text):
    """Time and depth of nesting are bounded for hostile texts."""
    page.driver.set_script_timeout(10)
    depth = page.run(
        """
        const root = make("div");
        new Markdown(root).show(arguments[0]);
        let [depth, level] = [0, [root]];
        for (; level.length && depth < 200; depth++) level = level.flatMap((e) => [...e.children]);
        return depth;
        """,
        text,
    )
    assert depth < 100
