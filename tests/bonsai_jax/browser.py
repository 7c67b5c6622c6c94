"""Chromium, for tests of the server's page (Debian: apt-get install chromium)."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--renderer-process-limit=1",
)  # fmt: skip
PATIENCE_MS = 30_000  # after which a wait fails

# In place of the network of a page: requests for answers wait in `asked`, and a test writes the answer.
SCRIPTED = """
window.asked = [];
window.trouble = [];
addEventListener("securitypolicyviolation", (event) =>
  trouble.push(`${event.violatedDirective} ${event.blockedURI}`));
addEventListener("error", (event) => trouble.push(event.message));
addEventListener("unhandledrejection", (event) => trouble.push(String(event.reason)));
const network = window.fetch;
window.fetch = (path, options = {}) => {
  if (!String(path).endsWith("chat/completions") || !window.scripted) return network(path, options);
  return new Promise((resolve, reject) => {
    let stream;
    const body = new ReadableStream({ start: (controller) => (stream = controller) });
    const one = { body: JSON.parse(options.body), headers: options.headers, aborted: false };
    one.begin = (status = 200, headers = {}) => resolve(new Response(body, { status, headers }));
    one.write = (text) => stream.enqueue(new TextEncoder().encode(text));
    one.end = () => stream.close();
    one.lost = () => reject(new TypeError("Failed to fetch"));
    options.signal?.addEventListener("abort", () => {
      one.aborted = true;
      reject(options.signal.reason);
      try { stream.error(options.signal.reason); } catch {}
    });
    asked.push(one);
  });
};
"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, with a new and empty profile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


class Upstream:
    """Answers to the requests of a page that was opened with SCRIPTED: the last one that was sent."""

    def __init__(self, page: Page):
        self._page = page
        page.evaluate("window.scripted = true")

    def asked(self, count: int) -> dict[str, Any]:
        """The body of request number `count`, which is waited for."""
        self._page.wait_for_function("count => asked.length >= count", arg=count, timeout=PATIENCE_MS)
        return self._page.evaluate("asked.at(-1).body")

    def begin(self, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._page.evaluate(
            "([status, headers]) => asked.at(-1).begin(status, headers)", [status, headers or {}]
        )

    def write(self, text: str) -> None:
        self._page.evaluate("text => asked.at(-1).write(text)", text)

    def delta(self, finish: str | None = None, **delta: str) -> None:
        """A chunk of the answer."""
        self.write(event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))

    def end(self, usage: dict[str, Any] | None = None, timings: dict[str, Any] | None = None) -> None:
        """The last chunks. usage, timings: as the server has them."""
        self.delta("stop")
        self.write(
            event({"choices": [], "usage": usage or USAGE, "timings": timings or TIMINGS})
            + "data: [DONE]\n\n"
        )
        self._page.evaluate("asked.at(-1).end()")

    def answer(self, count: int, text: str) -> dict[str, Any]:
        """Answer request number `count`, all at once. Returns its body."""
        body = self.asked(count)
        self.begin()
        self.delta(content=text)
        self.end()
        return body

    def fail(self, status: int, message: str, headers: dict[str, str] | None = None, **error: Any) -> None:
        """Answer with an error's status."""
        self.begin(status, headers)
        self.write(json.dumps({"error": {"message": message, **error}}))
        self._page.evaluate("asked.at(-1).end()")


USAGE = {
    "prompt_tokens": 1204,
    "completion_tokens": 412,
    "prompt_tokens_details": {"cached_tokens": 1152},
}
TIMINGS = {"predicted_per_second": 85.34, "prompt_ms": 240.0}


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
