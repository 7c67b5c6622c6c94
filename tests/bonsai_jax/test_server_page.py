"""The server's page in headless Chromium: against a server of a tiny model, and against scripted answers,
which can be what no model would write.

SCREENSHOTS=FOLDER leaves pictures; the slow tests have those of all widths and colors."""

import base64
import hashlib
import json
import os
import re
import time
from pathlib import Path

import httpx
import jsonschema
import pytest

import bonsai_jax as bj
from bonsai_jax.engine.calls import Calls
from bonsai_jax.server import routes_page
from bonsai_jax.server.run import bound, page_url, url
from tests.bonsai_jax.command_line import TINY
from tests.bonsai_jax.page_texts import BLOCKS, HOSTILE, INLINE, MARKDOWN, RICH
from tests.bonsai_jax.serving import serving

pytest.importorskip("playwright", reason="the package playwright is not installed")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.bonsai_jax.browser import CHROMIUM, PATIENCE_MS, SCRIPTED, Upstream, chromium, event

FOLDER = Path(routes_page.__file__).parent / "page"
KEY = "a-key"
WIDTHS = {360: 740, 768: 1024, 1440: 900}  # and heights
browses = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def server():
    model = bj.load(TINY, bj.RunConfig(context=256, batch_size=4, impl="reference"))
    with serving(model, rows=2, keys=(KEY,)) as served:
        yield served
        served.idle()


@pytest.fixture(scope="module")
def browser():
    with chromium() as own:
        yield own


@pytest.fixture
def opened(server, browser):
    """A function that opens the page in a profile of its own. At the end nothing may have gone wrong in it,
    and it may have asked no other server."""
    contexts, pages, asked = [], [], []

    def open_page(key: str | None = KEY, width: int = 1440, context=None, **options) -> Page:
        if context is None:
            options |= {"viewport": {"width": width, "height": WIDTHS[width]}, "reduced_motion": "reduce"}
            context = browser.new_context(**options)
            context.set_default_timeout(PATIENCE_MS)
            context.add_init_script(SCRIPTED)
            if key is not None:
                context.add_init_script(f"sessionStorage.setItem('bonsai-jax/key', '{key}')")
            context.on("request", lambda request: asked.append(request.url))
            contexts.append(context)
        page = context.new_page()
        pages.append(page)
        page.goto(server.url)
        return page

    expect.set_options(timeout=PATIENCE_MS)
    yield open_page
    trouble = [line for page in pages for line in page.evaluate("trouble")]
    for context in contexts:
        context.close()
    assert trouble == []
    assert {url.split("/")[2] for url in asked if not url.startswith(("blob:", "data:"))} <= {
        server.url.split("/")[2]
    }


def say(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def last(page: Page, what: str = ".content"):
    """A part of the last message."""
    return page.locator("#log article").last.locator(what)


def set_fields(page: Page, **values: str) -> None:
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"#settings [name={name}]", value)
    page.click("#settings button.strong")
    expect(page.locator("#settings")).to_be_hidden()


# What is served.


def test_the_page_needs_no_key_and_names_its_parts_by_hash(server):
    with server.http() as http:
        page, head = http.get("/"), http.head("/")
        assert http.post("/").status_code == 405 and http.get("/v1/models").status_code == 401
    assert page.status_code == head.status_code == 200 and head.content == b""
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert head.headers["content-security-policy"] == policy and "unsafe" not in policy
    for name, part in (("style", "<style>(.*)</style>"), ("script", "<script [^>]*>(.*)</script>")):
        (source,) = re.findall(part, page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\son[a-z]+=|\sstyle=|\ssrc=", page.text.split("<script")[0])


def test_every_part_of_the_page_is_in_it_and_small():
    parts = {path.name for path in FOLDER.iterdir()}
    assert parts == {"page.html", "page.css", *routes_page.SCRIPTS}
    for name in parts:
        source = (FOLDER / name).read_text("utf-8")
        assert len(source.splitlines()) < 300, name
        forbidden = (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        )
        assert not any(word in source for word in forbidden), name
        if name.endswith(".js"):
            assert "</script" not in source and "<!--" not in source, name


def test_the_page_has_an_address_that_a_browser_opens():
    with bound("0.0.0.0", 0) as own:
        assert page_url(own) == f"http://127.0.0.1:{own.getsockname()[1]}"
    with bound("127.0.0.1", 0) as own:
        assert page_url(own) == url(own)


# A conversation with a model.


@browses
def test_a_conversation(server, opened):
    """The key, answers as the API gives them, cache hits, another try, a reload, an edit."""
    page = opened(key=None)
    expect(page.locator("#question")).to_be_visible()
    for key, text in (("wrong", "answers those who have a key"), (KEY, "does not know this key")):
        expect(page.locator("#question-text")).to_contain_text(text)
        page.fill("#answer", key)
        page.press("#answer", "Enter")
    expect(page.locator("#model")).to_contain_text("tiny, reads 256 tokens")

    set_fields(page, temperature="0", max_tokens="8", system="Be brief.")
    expect(page.locator("#active")).to_have_text("Set: system prompt, temperature, most tokens")
    say(page, "Hi there")
    expect(last(page, ".stats")).to_contain_text("8 tokens")
    expect(last(page, ".note")).to_contain_text("The answer was cut")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
    with server.openai(api_key=KEY) as client:
        answer = client.chat.completions.create(model="any", messages=messages, max_tokens=8, temperature=0)
    stored = "localStorage['bonsai-jax/conversation/' + location.hash.slice(1)]"
    assert page.evaluate(f"JSON.parse({stored}).messages[1].content") == answer.choices[0].message.content

    last(page, ".again").click()
    expect(last(page, ".stats")).to_contain_text(re.compile(r"prompt \d+, [1-9]\d* of it cached"))
    shown = last(page).inner_text()
    say(page, "More")
    expect(page.locator("#log article")).to_have_count(4)
    expect(last(page, ".stats")).to_contain_text("8 tokens")
    expect(page.locator("#context")).to_have_text(re.compile(r"^\d+ of 256 tokens$"))

    page.reload()
    expect(page.locator("#log article")).to_have_count(4)
    assert page.locator("#log article").nth(1).locator(".content").inner_text() == shown
    page.locator("#log .edit").first.click()
    assert "drops the 3 messages after it" in page.locator(".editor p").inner_text()
    page.fill(".editor textarea", "Good evening")
    page.press(".editor textarea", "Enter")
    expect(page.locator("#log article")).to_have_count(2)
    expect(last(page, ".stats")).to_contain_text("8 tokens")
    assert page.locator("#log article").first.locator(".content").inner_text() == "Good evening"


@browses
def test_answers_keep_to_a_schema(opened):
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "size": {"enum": [1, 2]}},
        "required": ["sure", "size"],
        "additionalProperties": False,
    }
    page = opened()
    page.click("#open-settings")
    page.fill("[name=schema]", "{nothing")
    assert page.locator("#problem-schema").inner_text().startswith("It is not JSON.")
    page.click("#settings button.strong")
    expect(page.locator("#settings")).to_be_visible()  # with the cursor in the field that is wrong
    assert page.evaluate("document.activeElement.name") == "schema"
    page.fill("[name=schema]", json.dumps(schema))
    page.click("#settings button.strong")
    say(page, "Are you sure?")
    expect(last(page, ".stats")).to_contain_text("tokens")
    jsonschema.validate(json.loads(last(page, "code").inner_text()), schema)


@browses
def test_stop_frees_the_row(server, opened, monkeypatch):
    decode = Calls.decode

    def slowly(self, *arguments):
        time.sleep(0.05)
        return decode(self, *arguments)

    monkeypatch.setattr(Calls, "decode", slowly)
    page = opened()
    say(page, "A long story")
    page.wait_for_function("() => document.querySelector('#log .assistant .content').textContent.length > 0")
    page.press("#text", "Escape")
    expect(last(page, ".note")).to_have_text("You stopped this answer.")
    server.idle(10)
    assert page.evaluate("document.activeElement.id") == "text"
    expect(page.locator("#send")).to_be_visible()


# Scripted answers.


@browses
def test_an_answer_as_it_comes(opened):
    page = opened()
    upstream = Upstream(page)
    set_fields(page, stop="one\n\ntwo", seed="7", top_p="0.5", top_k="4", min_p="0.25")
    page.click("#open-settings")
    page.select_option("[name=reasoning_effort]", "none")
    page.press("#settings", "Escape")
    say(page, "Why?")
    body = upstream.asked(1)
    expected = {"stop": ["one", "two"], "seed": 7, "top_p": 0.5, "top_k": 4, "min_p": 0.25, "model": "tiny"}
    expected |= {"reasoning_effort": "none", "stream": True, "stream_options": {"include_usage": True}}
    assert body == expected | {"messages": [{"role": "user", "content": "Why?"}]}

    upstream.begin()
    upstream.write(": still working\n\n")
    upstream.delta(role="assistant", content="")
    upstream.delta(reasoning_content="Let me see.")
    thought = last(page, ".thought")
    expect(thought.locator("summary")).to_have_text("Thinking…")
    assert not thought.locator("div").is_visible()
    thought.locator("summary").click()
    expect(thought.locator("div")).to_have_text("Let me see.")
    text = event({"choices": [{"delta": {"content": "Because of **ü** and"}}]}).replace("\\u00fc", "ü")
    upstream.write(text[:-10])  # chunks of the network end where they like
    upstream.write(text[-10:])
    expect(last(page)).to_have_text("Because of ü and")
    expect(thought.locator("summary")).to_contain_text("Thought")
    assert thought.get_attribute("open") is not None  # as the reader left it
    page.press("#text", "Enter")  # nothing is written, and an answer is coming
    upstream.delta(content=" more")
    upstream.end()
    expect(last(page, ".stats")).to_have_text(
        "412 tokens · 85 tokens/s · first after 0.24 s · prompt 1,204, 1,152 of it cached"
    )
    expect(page.locator("#status")).to_have_text("The model: Because of **ü** and more")
    say(page, "And then?")
    body = upstream.answer(2, "")
    assert body["messages"][1]["reasoning_content"] == "Let me see."
    expect(last(page, ".note")).to_have_text("The model wrote nothing.")


@browses
def test_errors_in_plain_words(opened):
    """Each with what helps: another try, the setting, or nothing. No message of the user is lost."""
    page = opened()
    upstream = Upstream(page)
    failure = page.locator(".failure")
    say(page, "Hello")
    cases = (
        (429, "queue_full", {"retry-after": "7"}, "too many requests just now: try again in 7 seconds."),
        (503, "timeout", {}, "cannot answer now: try again in a moment. It says: a reason"),
        (500, "", {}, "The server failed (status 500). It says: a reason"),
        (403, "", {}, "The server refuses this page."),
        (413, "", {}, "too large for the server"),
        (400, "context_length_exceeded", {}, "longer than the model can read. It says: a reason"),
    )
    count = 1
    for status, code, headers, words in cases:
        upstream.asked(count)
        upstream.fail(status, "a reason", headers, code=code)
        expect(failure.locator("p")).to_contain_text(words)
        assert failure.get_attribute("role") == "alert"
        count += 1
        if status in (403, 413):  # another try is of no use; an edited message is sent
            assert not failure.locator("button").is_visible()
            page.locator("#log .edit").first.click()
            page.press(".editor textarea", "Enter")
        elif status != 400:
            failure.get_by_role("button", name="Try again").click()
    say(page, "Shorter")  # after a message without an answer
    assert upstream.asked(count)["messages"] == [{"role": "user", "content": "Hello\n\nShorter"}]
    page.evaluate("asked.at(-1).lost()")
    expect(failure.locator("p")).to_contain_text("The server does not answer.")
    failure.get_by_role("button").click()
    count += 1
    upstream.asked(count)
    upstream.begin()
    upstream.delta(content="half an ans")
    page.evaluate("asked.at(-1).end()")
    expect(failure.locator("p")).to_contain_text("broke off before the answer was complete")
    expect(last(page)).to_have_text("half an ans")
    page.reload()  # what came is kept
    upstream = Upstream(page)
    expect(last(page)).to_have_text("half an ans")
    last(page, ".again").click()
    upstream.asked(1)
    upstream.begin()
    upstream.write(event({"error": {"message": "no memory"}}))
    expect(failure.locator("p")).to_contain_text("The server broke off. It says: no memory")
    failure.get_by_role("button").click()
    upstream.asked(2)
    upstream.fail(400, "is 3; too much", param="response_format.json_schema.schema")
    failure.get_by_role("button", name="Open settings").click()
    assert page.evaluate("document.activeElement.name") == "schema"


@browses
def test_an_answer_goes_on_while_another_conversation_is_shown(opened):
    page = opened()
    upstream = Upstream(page)
    say(page, "First")
    upstream.asked(1)
    upstream.begin()
    upstream.delta(content="one ")
    page.click("#new")
    expect(page.locator("#empty")).to_be_visible()
    upstream.delta(content="two")
    upstream.end()
    expect(page.locator("#list .running")).to_have_count(0)
    page.locator("#list .name").click()
    expect(last(page)).to_have_text("one two")
    say(page, "Second")
    upstream.asked(2)
    upstream.begin()
    upstream.delta(content="left")
    expect(last(page)).to_have_text("left")
    page.reload()
    expect(last(page)).to_have_text("left")
    expect(last(page, ".note")).to_have_text("The page was left before this answer was complete.")


# Markdown.


@browses
def test_markdown(opened):
    page = opened()
    upstream = Upstream(page)
    say(page, "Go on")
    upstream.answer(1, "\n\n###### =\n\n".join(MARKDOWN))
    expect(last(page, ".stats")).not_to_be_empty()
    html = re.sub(r' (?!start)[a-z-]+="[^"]*"', "", last(page).evaluate("node => node.innerHTML"))
    for shown, (text, expected) in zip(html.split("<h6>=</h6>"), MARKDOWN.items(), strict=True):
        assert shown == expected, text


@browses
def test_code_is_copied(opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    upstream = Upstream(page)
    code = "def f(x):\n    return x < 1 & **x\n\n# `end`"
    say(page, "Code")
    upstream.answer(1, f"Here:\n\n```python title=x\n{code}\n```\nand\n~~~\n```\n~~~")
    blocks = last(page, ".code-block")
    expect(blocks).to_have_count(2)
    assert (
        blocks.nth(0).locator("code").text_content() == code
        and blocks.nth(1).locator("code").text_content() == "```"
    )
    assert blocks.nth(0).locator("span").inner_text() == "python"
    button = blocks.nth(0).get_by_role("button", name="Copy code")
    button.click()
    expect(button).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == code
    page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined })"
    )  # of another machine, without TLS
    last(page, ".copy").click()
    expect(last(page, ".copy")).to_have_text("Copied")


@browses
def test_hostile_answers_are_inert(opened):
    """What a model writes, what a file that is imported holds, and what a server says of itself."""
    page = opened()
    upstream = Upstream(page)
    page.evaluate("void (window.pwned = () => trouble.push('pwned'))")
    say(page, HOSTILE)
    upstream.asked(1)
    upstream.begin()
    for part in (HOSTILE[:300], HOSTILE[300:]):
        upstream.delta(reasoning_content=part)
        upstream.delta(content=part)
    upstream.end()
    expect(last(page, ".stats")).not_to_be_empty()
    last(page, "summary").click()
    say(page, "Once more")
    upstream.asked(2)
    upstream.fail(400, HOSTILE, param="<img onerror=pwned()>", code=HOSTILE)
    expect(page.locator(".failure")).to_contain_text("<script>")
    hostile = {"id": "x", "title": HOSTILE, "updated": 1, "settings": {"system": HOSTILE}, "messages": [
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "note": HOSTILE, "stats": {"tokens": HOSTILE}},
    ]}  # fmt: skip
    file = {"format": "bonsai-jax conversations", "version": 1, "conversations": [hostile]}
    page.set_input_files(
        "#import-file", {"name": "a.json", "mimeType": "", "buffer": json.dumps(file).encode()}
    )
    page.locator("#list .name").nth(1).click()
    expect(last(page, ".note")).to_contain_text("<script>")
    names = page.evaluate(
        "[...new Set([...document.querySelectorAll('main *, nav *, header *')].map(node => node.localName))]"
    )
    assert not {*names} & {"script", "img", "iframe", "style", "base", "meta", "object", "embed", "b"}, names
    links = page.evaluate(
        "[...document.querySelectorAll('main a')]"
        ".map(a => [a.protocol, a.target, a.rel, a.getAttributeNames().join()])"
    )
    assert links and {tuple(link[1:]) for link in links} == {
        ("_blank", "noopener noreferrer nofollow", "href,title,target,rel")
    }
    assert {link[0] for link in links} == {"https:", "http:"}
    attributes = page.evaluate(
        "[...document.querySelectorAll('*')].flatMap(node => node.getAttributeNames())"
    )
    assert not any(name.startswith("on") for name in attributes)
    for button in page.locator("main article .code-block button").all():
        button.click()


@browses
@pytest.mark.parametrize(
    ("parts", "length", "seconds"),
    [(INLINE, 40_000, 6), pytest.param((*INLINE, *BLOCKS), 200_000, 20, marks=pytest.mark.slow)],
    ids=["inline", "all"],
)
def test_no_answer_holds_the_page_up(opened, parts, length, seconds):
    """Text that is searched again and again would take minutes."""
    page = opened()
    upstream = Upstream(page)
    took = {}
    for count, part in enumerate(parts, 1):
        say(page, "Go on")
        began = time.monotonic()
        upstream.answer(count, part * (length // len(part)))
        expect(last(page, ".stats")).not_to_be_empty()
        took[part] = time.monotonic() - began
        page.click("#new")
    assert max(took.values()) < seconds, took


# Conversations.


@browses
def test_conversations_are_named_deleted_exported_and_imported(opened, tmp_path):
    page = opened()
    upstream = Upstream(page)
    set_fields(page, temperature="0.5")
    for count, name in enumerate(("First\nwith more lines", "Second"), 1):
        say(page, name)
        upstream.answer(count, f"answer {count}")
        expect(last(page, ".stats")).not_to_be_empty()
        page.click("#new")
    names = page.locator("#list .name")
    assert names.all_inner_texts() == ["Second", "First"]
    page.get_by_role("button", name="Rename First").click()
    page.fill("#answer", "The <b>first</b>")
    page.press("#answer", "Enter")
    expect(names.nth(1)).to_have_text("The <b>first</b>")
    with page.expect_download() as download:
        page.click("#export-all")
    assert re.fullmatch(r"conversations-\d{4}-\d\d-\d\d\.json", download.value.suggested_filename)
    path = tmp_path / "all.json"
    download.value.save_as(path)

    page.get_by_role("button", name="Delete Second").click()
    page.press("#question", "Escape")
    expect(names).to_have_count(2)
    page.get_by_role("button", name="Delete Second").click()
    page.click("#confirm")
    expect(names).to_have_text(["The <b>first</b>"])
    names.click()
    with page.expect_download() as download:
        page.click("#export")
    (one,) = json.loads(Path(download.value.path()).read_text())["conversations"]
    assert [message["content"] for message in one["messages"]] == ["First\nwith more lines", "answer 1"]

    other = opened()  # another browser
    other.set_input_files("#import-file", path)
    expect(other.locator("#list .name")).to_have_text(["Second", "The <b>first</b>"])
    other.locator("#list .name").nth(0).click()
    expect(last(other)).to_have_text("answer 2")
    expect(other.locator("#active")).to_have_text("Set: temperature")
    other.set_input_files("#import-file", path)  # again: beside those that are there
    expect(other.locator("#list .name")).to_have_count(4)


@browses
def test_wrong_files_and_a_full_browser(opened, tmp_path):
    page = opened()
    upstream = Upstream(page)
    page.evaluate("localStorage.setItem('bonsai-jax/conversation/broken', '{')")
    page.reload()
    upstream = Upstream(page)
    head = {"format": "bonsai-jax conversations", "version": 1}
    whole = {"id": "x", "updated": 1, "messages": []}
    wrong = {
        "not JSON": "{",
        "was not exported by this page": "[]",
        "not an object": json.dumps(head | {"conversations": [1]}),
        "its id": json.dumps(head | {"conversations": [whole | {"id": "../x"}]}),
        "neither the user's nor": json.dumps(
            head | {"conversations": [whole | {"messages": [{"role": "system"}]}]}
        ),
        "content of a message is not a text": json.dumps(
            head | {"conversations": [whole | {"messages": [{"role": "user", "content": 1}]}]}
        ),
        "larger than 16 MB": " " * (2**24 + 1),
    }  # fmt: skip
    for words, text in wrong.items():
        (tmp_path / "a.json").write_text(text)
        page.set_input_files("#import-file", tmp_path / "a.json")
        expect(page.locator("#banner")).to_contain_text(words)
    expect(page.locator("#list li")).to_have_count(0)

    page.evaluate("localStorage.setItem('other', 'x'.repeat(4_499_000))")
    say(page, "y" * 2000)
    expect(page.locator("#banner")).to_contain_text("no more room")
    upstream.answer(1, "It goes on all the same")
    expect(last(page)).to_have_text("It goes on all the same")
    page.evaluate("localStorage.removeItem('other')")
    say(page, "Now")
    upstream.answer(2, "Kept")
    expect(page.locator("#banner")).to_be_empty()
    page.reload()
    expect(last(page)).to_have_text("Kept")


@browses
def test_two_tabs_see_each_others_conversations(opened):
    page = opened()
    other = opened(context=page.context)
    upstream = Upstream(page)
    say(page, "Hello")
    upstream.answer(1, "Good day")
    other.locator("#list .name").click()
    expect(last(other)).to_have_text("Good day")
    say(page, "More")
    upstream.answer(2, "Yes")
    expect(last(other)).to_have_text("Yes")
    other.locator("#list .delete").click()
    other.click("#confirm")
    expect(page.locator("#list li")).to_have_count(0)


# Keyboard, screen readers, colors, widths.


@browses
def test_keyboard_alone(opened):
    page = opened(width=360)
    upstream = Upstream(page)
    focused = "document.activeElement.id || document.activeElement.className"
    assert page.evaluate(focused) == "text"
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Enter")
    assert upstream.answer(1, "Yes")["messages"][0]["content"] == "One\nTwo"
    expect(last(page, ".stats")).not_to_be_empty()
    for key, where in (
        ("Shift+Tab", "again plain"),
        ("Shift+Tab", "copy plain"),
        ("Shift+Tab", "edit plain"),
    ):
        page.keyboard.press(key)
        assert page.evaluate(focused) == where
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(page.locator(".editor textarea")).to_be_focused()
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "edit plain"
    page.focus("#menu")
    page.keyboard.press("Enter")
    expect(page.locator("#new")).to_be_focused()
    assert page.locator("#menu").get_attribute("aria-expanded") == "true"
    for where in ("name", "icon rename", "icon delete"):
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == where
    page.keyboard.press("Enter")
    expect(page.locator("#cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#list .delete")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#menu")).to_be_focused()
    expect(page.locator("#side")).to_be_hidden()
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    expect(page.locator("[name=system]")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#open-settings")).to_be_focused()


@browses
def test_colors_are_the_systems_until_the_user_chooses(opened):
    page = opened(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    switch = page.get_by_role("button", name="Dark colors")
    assert switch.get_attribute("aria-pressed") == "true"
    switch.click()
    assert page.evaluate(ground) != dark and switch.get_attribute("aria-pressed") == "false"
    page.reload()
    assert page.evaluate(ground) != dark
    page.emulate_media(color_scheme="light")
    switch.click()
    assert page.evaluate(ground) == dark


def rich(page: Page) -> None:
    """A conversation with everything that a page can show at once."""
    upstream = Upstream(page)
    set_fields(page, temperature="0.5")
    say(page, "How?\n" + "y" * 200)
    upstream.asked(1)
    upstream.begin()
    upstream.delta(reasoning_content="Let me **see**.")
    upstream.delta(content=RICH)
    upstream.end()
    expect(last(page, ".stats")).not_to_be_empty()
    last(page, "summary").click()
    say(page, "Again")
    upstream.asked(2)
    upstream.fail(429, "full")
    expect(page.locator(".failure")).to_be_visible()


def serious(page: Page) -> list[str]:
    """What axe-core finds that matters."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{one['id']}: {[node['html'][:200] for node in one['nodes']]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def look(page: Page, name: str) -> None:
    """Nothing is wider than the window, and axe-core has nothing to say. Leaves a screenshot if asked to."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    main = page.evaluate("(node => node.scrollWidth <= node.clientWidth)(document.querySelector('main'))")
    assert main, name
    assert serious(page) == [], name


LOOKS = [(width, theme) for width in WIDTHS for theme in ("light", "dark")]
FEW = {(360, "light"), (1440, "dark")}


@browses
@pytest.mark.parametrize(
    ("width", "theme"),
    [pytest.param(*one, marks=[] if one in FEW else pytest.mark.slow) for one in LOOKS],
)
def test_looks(opened, width, theme):
    """At every width, in both colors: an empty page, a conversation, the settings, the list, a question."""
    page = opened(width=width, color_scheme=theme)
    expect(page.locator("#model")).to_contain_text("tiny")
    if (width, theme) not in FEW:
        look(page, f"empty-{width}-{theme}")
    rich(page)
    look(page, f"conversation-{width}-{theme}")
    page.click("#open-settings")
    page.fill("[name=top_p]", "2")
    look(page, f"settings-{width}-{theme}")
    page.fill("[name=top_p]", "")
    page.press("#settings", "Escape")
    if width < 960:
        page.click("#menu")
        look(page, f"list-{width}-{theme}")
    if (width, theme) not in FEW:
        page.click("#list .rename")
        look(page, f"question-{width}-{theme}")


def test_a_server_that_is_elsewhere_has_its_page_there(server):
    """A proxy may give the server a path of its own: no address of the page begins at the root."""
    text = httpx.get(server.url).text
    assert not re.search(r"""(fetch|request)\(\s*["'`]/""", text)
