"""Answers as Markdown in a real browser; what they contain is hostile."""

import pytest
from playwright.async_api import Page, expect

from tests.console.accessibility import violations
from tests.console.conftest import Console
from tests.fake_model import text

ANSWER = """# Result

The **sum** is `18`; see [the page](https://example.com/a).

| step | value |
|---|---|
| 9+9 | 18 |

```python
print(9 + 9)
```

- [x] done
"""
HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2">
<svg onload="window.hit = 3"><style>* { display: none }</style></svg>
<form action="https://evil.example/"><input name="key"><button>Send</button></form>
<iframe src="https://evil.example/"></iframe>

<a href="javascript:window.hit = 4">one</a> [two](javascript:window.hit=5) [three](#/approvals?id=1)
[four](https://evil.example/ "seen")
![a pixel](https://evil.example/pixel.png) ![data](data:image/svg+xml;base64,PHN2Zy8+)
![own](nowhere.png) [five](https://evil.example/"onmouseover="window.hit=6) <b onclick=alert(7)>

<math><mtext><table><mglyph><style><!--</style><img
title="--&gt;&lt;img src=1 onerror=alert(1)&gt;">

This is<br><sub>shown</sub>.
"""


async def answered(console: Console, said: str) -> Page:
    """Show a run's page with this answer."""
    console.model.script(text(said))
    page = await console.open(f"runs/{await console.run()}")
    await expect(page.locator(".answer")).to_be_visible()
    return page


@pytest.mark.deep
async def test_an_answer_is_rendered_and_its_source_one_click_away(console: Console) -> None:
    page = await answered(console, ANSWER)
    answer = page.locator(".answer")
    await expect(answer.get_by_role("heading", name="Result", level=3)).to_be_visible()
    await expect(answer.get_by_role("cell", name="18")).to_be_visible()
    head, cell = (answer.get_by_text(each, exact=True) for each in ("value", "18"))
    above, below = await head.bounding_box(), await cell.last.bounding_box()
    assert above is not None
    assert below is not None
    assert below["y"] - above["y"] < 2 * above["height"]  # one table, without lines in between
    link = answer.get_by_role("link", name="the page")
    assert await link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert await link.get_attribute("target") == "_blank"
    await page.evaluate("navigator.clipboard.writeText = async (text) => { window.kept = text }")
    await answer.get_by_role("button", name="Copy").click()
    assert await page.evaluate("window.kept") == "print(9 + 9)\n"
    assert await violations(page) == []
    await page.set_viewport_size({"width": 320, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await answer.get_by_role("button", name="Raw").press("Enter")
    await expect(answer.locator("pre")).to_have_text(ANSWER.strip())
    await answer.get_by_role("button", name="Raw").click()
    await expect(answer.get_by_role("cell", name="18")).to_be_visible()


async def test_an_answer_does_nothing_but_show_text(console: Console) -> None:
    asked: list[str] = []
    console.page.on("request", lambda request: asked.append(request.url))
    page = await answered(console, HOSTILE)
    answer = page.locator(".answer .markdown")
    await expect(answer.locator("sub")).to_have_text("shown")
    await expect(answer).to_contain_text("<script>window.hit = 1</script>")
    await expect(answer.locator("[src], [style], [id], [onclick], [onmouseover]")).to_have_count(0)
    await expect(answer.locator("script, style, svg, form, input, iframe, math, b")).to_have_count(
        0
    )
    links = answer.locator("a[href]")
    found = [await each.get_attribute("href") for each in await links.all()]
    addresses = ["https://evil.example/", "https://evil.example/pixel.png"]
    assert found == [*addresses, "https://evil.example/%22onmouseover=%22window.hit=6"]
    assert {await each.get_attribute("target") for each in await links.all()} == {"_blank"}
    await expect(answer).to_contain_text("a pixel (an image of evil.example)")
    assert await page.evaluate("window.hit") is None
    assert not [each for each in asked if "evil" in each]


async def test_what_cannot_be_rendered_is_shown_as_it_is(console: Console) -> None:
    page = await console.open()
    found = await page.evaluate(
        """async (texts) => {
            const { rendered } = await import("./js/parts/markdown.js");
            return texts.map(([part, times]) => rendered(part.repeat(times)) === null);
        }""",
        [
            ["a ", 26_000],
            [">", 20_000],
            ['{"a": 1}', 1],
            ["[", 2_000],
            ["*a **", 2_000],
            ["a.", 2_500],
            ["*", 5_000],
            ["a.a ", 2_500],
        ],
    )
    assert found == [*[True] * 3, *[False] * 2, *[True] * 2, False]


async def test_images_come_from_this_server_with_the_callers_key(console: Console) -> None:
    picture = bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
        "0000000d49444154789c63606060f80f00010401005fe5c34b0000000049454e44ae426082"
    )
    sent = {"file": ("dot.png", picture, "image/png")}
    stored = await console.server.client.post("/v1/files", files=sent)
    page = await answered(console, f"![dot](/v1/files/{stored.json()['id']}/content)")
    await expect(page.locator(".answer img")).to_have_js_property("naturalWidth", 1)


SLOW = [
    "*a_ ",
    "**。a ",
    "é*",
    "- a\n",
    "1. a\n",
    "# a\n",
    "> ",
    "``a` ",
    "<a ",
    "[*a](b ",
    "|a|b|\n|-|-|\n",
]
"""Parts of texts that take marked 1 to 60 s at a length of 50,000."""


@pytest.mark.deep
async def test_a_long_hostile_text_takes_no_longer_than_a_bound(console: Console) -> None:
    page = await console.open()
    took = await page.evaluate(
        """async (parts) => {
            const { rendered } = await import("./js/parts/markdown.js");
            return parts.map((part) => {
                const text = part.repeat(50000 / part.length);
                const began = performance.now();
                rendered(text);
                return performance.now() - began;
            });
        }""",
        SLOW,
    )
    assert max(took) < 3000, "ten times the bound, for a busy machine"
