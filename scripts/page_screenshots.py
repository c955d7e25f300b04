"""Makes the screenshots of the pages in docs/images: `python scripts/page_screenshots.py http://127.0.0.1:8000`.

It needs a server with the default model, chromium, and `pip install -e '.[browser,dev]'`.
"""

import asyncio
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.async_api import Browser, async_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "images"
MOST_BYTES = 120_000
LOAD_SECONDS = 40


async def save(page: Any, name: str) -> None:
    """Writes a screenshot with as many colours as its size allows."""
    await page.wait_for_timeout(400)
    shot = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    for colours in (256, 128, 64, 32):
        shot.quantize(colours, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)
        if (FOLDER / f"{name}.png").stat().st_size < MOST_BYTES:
            return
    raise SystemExit(f"{name}.png has more than {MOST_BYTES} bytes; show less in it")


async def open_page(browser: Browser, address: str, scheme: str, width: int = 1360, height: int = 820) -> Any:
    page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    await page.goto(address)
    await page.wait_for_selector(".top .model", state="attached")
    return page


async def ask(page: Any, text: str) -> None:
    await page.fill("#ask", text)
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".stats", timeout=120_000)
    await page.evaluate("document.activeElement.blur()")


async def chats(browser: Browser, server: str) -> None:
    page = await open_page(browser, server, "light")
    await ask(page, "Write a Python function that reverses a list, and explain it in a short list.")
    await save(page, "playground-light")
    page = await open_page(browser, server, "light", 390, 780)
    await ask(page, "Explain what a penstock is, in two sentences.")
    await save(page, "playground-narrow")


async def tokens(browser: Browser, server: str) -> None:
    page = await open_page(browser, server, "light")
    await page.click("summary:has-text('Tokens')")
    await page.check("text=Record probabilities")
    for name, value in (("temperature", "0.7"), ("seed", "11"), ("max_tokens", "110")):
        await page.fill(f"#set-{name}", value)
    await ask(page, "Name three rivers and say where they flow.")
    await page.click('[data-token="12"]')
    await save(page, "playground-tokens")


async def tools(browser: Browser, server: str) -> None:
    page = await open_page(browser, server, "dark")
    for title in ("Sampling", "Length", "Tools"):
        await page.click(f"summary:has-text('{title}')")
    await page.click("text=Use an example")
    await page.select_option("#set-tool_choice", "required")
    await page.click("text=Check with the server")
    await page.wait_for_selector("text=The server accepts it")
    await ask(page, "What is the weather in Paris?")
    await page.wait_for_selector(".call .checked")
    await save(page, "playground-tools")


async def dashboard(browser: Browser, server: str) -> None:
    page = await open_page(browser, f"{server}/dashboard", "dark", 1360, 1140)

    async def request(client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(number * 1.4)
        prompt = "Once upon a time, " * (1 + number * 7 % 23 * 3)
        body = {"prompt": f"{prompt}{number % 4}", "max_tokens": 60 + number * 37 % 160, "ignore_eos": True}
        await client.post(f"{server}/v1/completions", json=body)

    async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as group:
        for number in range(round(LOAD_SECONDS / 1.4)):
            group.create_task(request(client, number))
        await page.wait_for_timeout(LOAD_SECONDS * 1000)
        await save(page, "dashboard")


async def api(browser: Browser, server: str) -> None:
    page = await open_page(browser, f"{server}/docs", "light", 1240, 760)
    await page.wait_for_selector(".operation")
    await save(page, "api")


async def main(server: str) -> None:
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for shots in (chats, tokens, tools, dashboard, api):
            await shots(browser, server)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1].rstrip("/")))
