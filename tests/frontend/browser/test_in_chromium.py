"""The pages in Chromium: hostile outputs, accessibility, frames a second, and what a reader does.

They need Debian's chromium (`apt install chromium`) and the extra `browser` (`pip install -e '.[browser]'`).
"""

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from importlib.resources import files
from typing import Any

import pytest

from penstock.messages import GenerateRequest, TokenDelta
from tests.frontend.conftest import Site, live
from tests.patience import PATIENCE

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt install chromium"),
]
HOSTILE = {
    "script": "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'><iframe srcdoc='x'></iframe>",
    "links": (
        "[a](javascript:window.hit=1) [b](data:text/html,<script>hit=1</script>) [c](JaVaScRiPt:hit=1) "
        "[d](vbscript:x) [e](&#106;avascript:hit=1) ![f](javascript:hit=1) <javascript:hit=1> [g](https://ok.example) "
        "![h](https://tracker.example/pixel.png) [i](java\nscript:hit=1) [j](//evil.example)"
    ),
    "unclosed fence": "```python\n" + "x = '<b>' # comment\n" * 400,
    "fence with a strange name": '```<img/onerror=hit=1>\ntext\n```\n\n~~~"><script>\nmore',
    "huge table": "|a|b|c|\n|---|:-:|--:|\n" + "|<b>1</b>|`x`|**y**|\n" * 1500,
    "wide table": "|" + "a|" * 3000 + "\n|" + "-|" * 3000 + "\n|" + "b|" * 3000,
    "deep quotes": ">" * 3000 + " deep",
    "deep lists": "\n".join("  " * depth + "- item" for depth in range(300)),
    "stars": "*" * 20000 + " a " + "**a " * 4000,
    "brackets": "[" * 20000 + "](" * 2000,
    "backticks": "`" * 9999 + " a ``b " * 2000,
    "one long line": "wörd " * 12000,
    "braces in a line of code": "```js\n" + '"' * 1500 + "\\" * 3000 + "/*" * 3000,
}
ANSWER = """## A heading

Some *prose* with **bold** words, `code` and a [link](https://example.com), of two sentences. It goes on for a while.

- a list
- of several items, with `code`

```python
def reverse(items: list[int]) -> list[int]:
    # a comment
    return [items[-1 - i] for i in range(len(items))]
```

| name | value |
|---|---:|
| one | 1 |
| two | 2 |

"""
OPEN_FIELDS = """() => {
  const some = document.querySelectorAll("#post-v1-chat-completions details, #get-v1-files details");
  some.forEach((one) => { one.open = true });
}"""
# The elements that a reader must scroll sideways, without long lines of code.
WIDE = """() => [...document.querySelectorAll("html, main, main *")].filter((one) => one.tagName !== "PRE" &&
  one.scrollWidth > one.clientWidth + 1 && (one.tagName === "HTML" || getComputedStyle(one).overflowX === "auto")
).map((one) => `${one.tagName}.${one.className} ${one.clientWidth} ${one.scrollWidth}`)"""
FRAMES = """() => {
  window.frames_at = [];
  const frame = (now) => { window.frames_at.push(now); requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
}"""


@contextlib.asynccontextmanager
async def opened(
    site: Site,
    *,
    path: str = "/",
    ready: str = ".top .model",
    keyless: bool = True,
    strict: bool = True,
    refused: bool = False,
    **options: Any,
) -> AsyncIterator[Any]:
    """A page of the site in Chromium. Messages on its console that are errors fail the test, but those of requests
    without a key unless `keyless`, and those that the server may refuse with `refused`."""
    playwright = pytest.importorskip("playwright.async_api", reason="pip install -e '.[browser]'")
    async with live(site) as port, playwright.async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = await browser.new_context(base_url=f"http://127.0.0.1:{port}", bypass_csp=not strict, **options)
        page = await context.new_page()
        problems: list[str] = []
        page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        try:
            await page.goto(path)
            await page.wait_for_selector(ready)
            yield page
        finally:
            await browser.close()
    expected = [status for status, expects in (("401", not keyless), ("400", refused)) if expects]
    assert [problem for problem in problems if not any(status in problem for status in expected)] == []


async def ask(page: Any, text: str = "hello") -> None:
    await page.fill("#ask", text)
    await page.keyboard.press("Enter")


def long_site(make_site: Callable[..., Site]) -> Site:
    return make_site(max_model_len=200_000)


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_outputs_are_only_text(make_site: Callable[..., Site], name: str) -> None:
    site = long_site(make_site)
    site.says(HOSTILE[name], cuts=(97,))
    async with opened(site) as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        await ask(page)
        async with asyncio.timeout(PATIENCE):
            await page.wait_for_selector(".stats")
        assert await page.evaluate("window.hit") is None
        unsafe = "script, img, iframe, object, embed, style, link, form[action], svg [onload], b"
        assert await page.locator(f".markdown :is({unsafe})").count() == 0
        links = await page.eval_on_selector_all(".markdown a", "links => links.map(link => link.href)")
        assert all(link.startswith(("https://", "mailto:")) for link in links)
        assert len(links) == (2 if name == "links" else 0)
        assert all(url.startswith(page.url) for url in requests)
        assert await page.evaluate("1 + 1") == 2  # it still answers
        await page.fill("#ask", "more")


async def test_an_answer_of_4000_tokens_keeps_30_frames_a_second(make_site: Callable[..., Site]) -> None:
    site = long_site(make_site)
    ids = site.tokenizer.encode(ANSWER, add_special_tokens=False)
    size = -(-len(ids) // (len(ANSWER) // 4))  # of the tests' short tokens, as many as have four characters
    total = 4000 * size
    eos = site.engine.info.eos_token_ids[0]
    site.engine.output = lambda request, choice: [*(ids * (total // len(ids) + 1))[:total], eos]
    site.engine.cuts = (size,)
    generate = site.engine.generate

    async def paced(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        loop = asyncio.get_running_loop()
        start, sent = loop.time(), 0
        async for delta in generate(request):
            sent += 1
            await asyncio.sleep(max(0.0, start + sent / 400 - loop.time()))
            yield delta

    site.engine.generate = paced  # type: ignore[method-assign]
    async with opened(site, viewport={"width": 1360, "height": 860}) as page:
        await page.evaluate(FRAMES)
        await ask(page)
        await page.wait_for_selector(".message.assistant")
        begin = await page.evaluate("performance.now()")
        await page.wait_for_selector(".stats", timeout=60_000)
        end = await page.evaluate("performance.now()")
        frames = [at for at in await page.evaluate("window.frames_at") if begin <= at <= end]
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(frames))
    slowest = min(sum(start <= at < start + 1000 for at in frames) for start in frames if start + 1000 <= end)
    print(f"{end - begin:.0f} ms, {len(frames)} frames, slowest second {slowest}, longest frames {gaps[-3:]}")
    assert end - begin > 5000
    assert slowest >= 30


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious(make_site: Callable[..., Site], scheme: str) -> None:
    axe = files(pytest.importorskip("axe_playwright_python")).joinpath("axe.min.js").read_text()
    site = long_site(make_site)
    site.says(ANSWER)

    async def check(page: Any, what: str) -> None:
        await page.evaluate(axe)
        found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [
            (what, entry["id"], [node["target"] for node in entry["nodes"]])
            for entry in found["violations"]
            if entry["impact"] in ("serious", "critical")
        ]
        assert serious == []

    async with opened(site, strict=False, color_scheme=scheme, viewport={"width": 1360, "height": 900}) as page:
        await check(page, "empty")
        for summary in await page.query_selector_all(".group summary"):
            if not await summary.evaluate("element => element.parentElement.open"):
                await summary.click()
        await page.check("text=Record probabilities")
        await ask(page)
        await page.wait_for_selector(".stats")
        await check(page, "tokens")
        await page.click('[data-token="4"]')
        await check(page, "alternatives")
        await page.keyboard.press("Escape")
        await page.keyboard.press("Alt+t")
        await page.wait_for_selector(".markdown")
        await check(page, "answer")
        await page.keyboard.press("Alt+c")
        await page.wait_for_selector("dialog")
        await check(page, "code")
        await page.keyboard.press("Escape")
        await page.click("text=Completion")
        await check(page, "completion")
        await page.set_viewport_size({"width": 390, "height": 800})
        await check(page, "narrow")
        for path, ready in (("/dashboard", ".figures"), ("/docs", ".operation")):
            await page.goto(path)
            await page.wait_for_selector(ready)
            await check(page, path)
        await page.evaluate(OPEN_FIELDS)
        await check(page, "fields")


@pytest.mark.parametrize(("path", "ready"), [("/", ".composer"), ("/dashboard", ".latency"), ("/docs", ".operation")])
async def test_a_narrow_window_shows_the_whole_width(make_site: Callable[..., Site], path: str, ready: str) -> None:
    async with opened(long_site(make_site), path=path, ready=ready, viewport={"width": 390, "height": 800}) as page:
        await page.evaluate("document.querySelectorAll('main details').forEach((one) => { one.open = true })")
        assert await page.evaluate(WIDE) == []


async def test_the_key_is_asked_for_and_kept_for_the_tab(make_site: Callable[..., Site]) -> None:
    playwright = pytest.importorskip("playwright.async_api", reason="pip install -e '.[browser]'")
    site = make_site(api_key="secret")
    site.says("hello")
    async with live(site) as port, playwright.async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(f"http://127.0.0.1:{port}/")
        await page.fill("#api-key", "secret")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".top .model")
        await ask(page)
        await page.wait_for_selector(".stats")
        kept = await page.evaluate("JSON.stringify(localStorage)")
        assert "hello" in kept and "secret" not in kept
        await page.goto(f"http://127.0.0.1:{port}/dashboard")
        await page.wait_for_selector(".figures")
        await browser.close()


async def test_a_low_window_scrolls_its_panels_and_not_the_page(make_site: Callable[..., Site]) -> None:
    async with opened(long_site(make_site), viewport={"width": 1100, "height": 500}) as page:
        await page.evaluate("document.querySelectorAll('.group').forEach((group) => { group.open = true })")
        assert await page.evaluate("document.querySelector('.groups').scrollHeight") > 500
        assert await page.evaluate("document.documentElement.scrollHeight") == 500
        assert await page.evaluate("document.body.scrollHeight") == 500


async def test_conversations_are_kept_edited_and_deleted(make_site: Callable[..., Site]) -> None:
    site = long_site(make_site)
    site.says("hello world")
    async with opened(site, viewport={"width": 1360, "height": 860}) as page:
        await ask(page, "first question")
        await page.wait_for_selector(".stats")
        await page.keyboard.press("Alt+r")
        await page.wait_for_selector(".versions")
        assert "2 / 2" in await page.inner_text(".versions")
        await page.reload()
        await page.wait_for_selector(".versions")
        await page.hover(".message.user")
        await page.click('[aria-label="Edit and send again"]')
        await page.fill(".editor textarea", "second question")
        await page.keyboard.press("Control+Enter")
        await page.wait_for_selector(".bubble:has-text('second question')")
        await page.wait_for_selector(".stats")
        assert site.tokenizer.decode(site.engine.requests[-1].prompt_ids).count("question") == 1
        async with page.expect_download() as download:
            await page.click("text=Export")
        saved = await (await download.value).path()
        await page.hover(".sidebar li")
        await page.click('.sidebar [aria-label^="Delete"]')
        await page.wait_for_selector("text=New conversation >> nth=1")
        await page.click("text=Undo")
        await page.wait_for_selector(".bubble:has-text('second question')")
        await page.set_input_files('.sidebar input[type="file"]', str(saved))
        assert await page.locator(".sidebar li").count() >= 2


async def test_a_chat_that_is_longer_than_the_context_goes_on(make_site: Callable[..., Site]) -> None:
    site = make_site(max_model_len=160)
    site.says("hello world")
    async with opened(site, refused=True) as page:
        for turn in range(12):
            await ask(page, f"question {turn}")
            await page.locator(".stats").nth(turn).wait_for()
        assert await page.locator(".problem").count() == 0
        assert "left out" in (await page.locator(".stats").all_inner_texts())[-1]
        sent = site.tokenizer.decode(site.engine.requests[-1].prompt_ids)
        assert "question 11" in sent and "question 0" not in sent
        site.engine.output = lambda request, choice: [20] * 1000
        await ask(page, "a long answer")
        await page.wait_for_selector(".stats li:has-text('the context is full')")
        await ask(page, "x" * 2000)
        await page.wait_for_selector(".problem:has-text('160')")


async def test_a_server_that_goes_is_named(make_site: Callable[..., Site]) -> None:
    site = long_site(make_site)
    async with opened(site) as page:
        await page.evaluate("""() => {
          const cut = new ReadableStream({ pull: (stream) => stream.error(new TypeError("network error")) });
          window.fetch = async () => new Response(cut);
        }""")
        await ask(page)
        await page.wait_for_selector(".problem:has-text('Is the server running?')")


async def test_stop_ends_the_request(make_site: Callable[..., Site]) -> None:
    site = long_site(make_site)
    site.engine.gate = asyncio.Event()
    site.engine.output = lambda request, choice: [20] * 1000
    async with opened(site) as page:
        await ask(page)
        await page.wait_for_selector(".message.assistant .markdown")
        await page.keyboard.press("Escape")
        await page.wait_for_selector(".stats li:has-text('stopped')")
        async with asyncio.timeout(PATIENCE):
            while not site.engine.aborted:
                await asyncio.sleep(0.01)


async def test_a_page_chats_over_a_websocket_with_its_key(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="browser-key")
    site.says("hello world")
    async with opened(site, path="/version", ready="body", keyless=False) as page:
        events = await page.evaluate(
            """(key) => new Promise((resolve, reject) => {
              const offered = ["chat", "openai-insecure-api-key." + key];
              const socket = new WebSocket(`ws://${location.host}/v1/chat/ws`, offered);
              const events = [];
              socket.onerror = () => reject(new Error("the handshake failed"));
              socket.onopen = () => socket.send(JSON.stringify(
                {id: "a", body: {messages: [{role: "user", content: "hello"}], stream: true}}));
              socket.onmessage = (message) => {
                events.push(JSON.parse(message.data));
                if (events.at(-1).type !== "chunk") resolve([socket.protocol, events]);
              };
            })""",
            "browser-key",
        )
    protocol, got = events
    assert protocol == "chat" and got[-1]["type"] == "done"
    text = "".join(event["chunk"]["choices"][0]["delta"].get("content", "") for event in got[:-1])
    assert text == "hello world"
