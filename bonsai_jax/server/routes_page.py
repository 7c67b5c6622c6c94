"""GET /: a page to talk to the model. page/ has its parts; it is served as one file that asks nobody else.

Its security policy names the page's own style and script by their hashes, so that no text of a model can
become either, and lets it ask this server alone. The scripts are formatted by `prettier --print-width 110`.
"""

import base64
import functools
import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from bonsai_jax.server.service import Service

# In this order: each may use the functions of those before it as soon as it is read, and all others later.
SCRIPTS = (
    "dom.js", "inline.js", "markdown.js", "storage.js", "client.js", "messages.js", "answers.js", "app.js",
    "settings.js",
)  # fmt: skip


async def page(service: Service, request: Request) -> Response:
    """GET /, also without a key: the page has no data of its own."""
    text, headers = page_and_headers()
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


@functools.cache
def page_and_headers() -> tuple[str, dict[str, str]]:
    """The page, and the headers that keep it to itself."""
    folder = resources.files("bonsai_jax.server") / "page"
    style = (folder / "page.css").read_text("utf-8")
    script = "\n".join((folder / name).read_text("utf-8") for name in SCRIPTS)
    text = (folder / "page.html").read_text("utf-8")
    text = text.replace("<style>page.css</style>", f"<style>{style}</style>")
    text = text.replace('<script type="module">page.js<', f'<script type="module">{script}<')
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return text, headers


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
