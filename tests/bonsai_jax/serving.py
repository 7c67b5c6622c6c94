"""A server in a thread of the tests' process, and clients of it."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import httpx
from openai import AsyncOpenAI, OpenAI

import bonsai_jax as bj
from bonsai_jax import server
from bonsai_jax.server.service import Service

GREEDY = {"temperature": 0}
HI = [{"role": "user", "content": "Hi there"}]


@dataclasses.dataclass
class Served:
    """A running server. idle() waits until no answer runs, and all pages are back."""

    service: Service
    url: str

    @property
    def model(self) -> bj.Model:
        return self.service.model

    def openai(self, **options) -> OpenAI:
        options = {"api_key": "none", "max_retries": 0, **options}
        return OpenAI(base_url=f"{self.url}/v1", **options)

    def async_openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def http(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def load(self):
        return self.service.engine.load()

    def idle(self, seconds: float = 20) -> None:
        ends = time.monotonic() + seconds
        while True:
            load = self.load()
            back = load.free_pages + load.cached_pages == load.pages
            if back and not (load.running or load.waiting or self.service.answers):
                return
            assert time.monotonic() < ends, (load, self.service.answers)
            time.sleep(0.01)


@contextlib.contextmanager
def serving(model: bj.Model, *, rows: int = 4, engine: dict | None = None, **settings) -> Iterator[Served]:
    """A server of this model at a free port. settings: of Settings."""
    made = bj.Engine(model, max_batch_size=rows, logprobs=20, max_wait_s=0.02, **(engine or {}))
    with server.running(made, server.Settings(**{"name": "tiny", **settings})) as own:
        yield Served(own.service, own.url)
