"""Files in the chat, in a real browser."""

from base64 import b64decode

from playwright.async_api import FilePayload, expect

from tests.console.conftest import Console
from tests.fake_model import text

PIXEL = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


NOTES: FilePayload = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"one"}
DOT: FilePayload = {"name": "dot.png", "mimeType": "image/png", "buffer": PIXEL}


async def test_an_image_is_sent_and_shown(console: Console) -> None:
    console.model.script(text("It is red."))
    await console.define()
    page = await console.open("chat?agent=clerk&session=with-files")
    async with page.expect_file_chooser() as chooser:
        await page.get_by_role("button", name="Add files").click()
    await (await chooser.value).set_files([DOT, NOTES])
    await expect(page.get_by_role("listitem").filter(has_text="notes.txt")).to_contain_text("bytes")
    await page.get_by_role("button", name="Remove notes.txt").click()
    await page.get_by_label("Message").fill("What colour is it?")
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_text("It is red.")).to_be_visible()
    image = page.get_by_role("img", name="dot.png")
    await expect(image).to_be_visible()
    assert await image.evaluate("(each) => each.naturalWidth") == 1
    assert "image_url" in str(console.model.requests[-1]["messages"])


async def test_a_file_that_the_server_refuses_is_told_in_words(console: Console) -> None:
    await console.define()
    full = {"code": "file_quota", "detail": "your files take up their whole space"}
    await console.page.route("**/v1/files", lambda route: route.fulfill(status=429, json=full))
    page = await console.open("chat?agent=clerk&session=with-files")
    async with page.expect_file_chooser() as chooser:
        await page.get_by_role("button", name="Add files").click()
    await (await chooser.value).set_files([NOTES])
    refused = page.get_by_role("listitem").filter(has_text="notes.txt")
    await expect(refused).to_contain_text("your files take up their whole space")
    await expect(page.get_by_role("button", name="Send")).to_be_disabled()
    console.provoked.add("429")
