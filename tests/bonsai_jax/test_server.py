"""A server and OpenAI's own client: answers are those of `generate`, whole and streamed."""

import asyncio
import base64
import dataclasses
import json
import queue
import time

import httpx
import numpy as np
import openai
import pytest
from anthropic import Anthropic, BadRequestError
from prometheus_client.parser import text_string_to_metric_families

import bonsai_jax as bj
from bonsai_jax.engine import engine as engine_file
from bonsai_jax.protocols import openai_chat, openai_completions
from bonsai_jax.server.answering import Answering
from tests.bonsai_jax.command_line import TINY
from tests.bonsai_jax.serving import GREEDY, HI, Served, serving
from tests.bonsai_jax.vocabularies import smollm2_path

ONCE = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> bj.Model:
    return bj.load(TINY, bj.RunConfig(context=256, batch_size=4, impl="reference"))


@pytest.fixture(scope="module")
def server(model):
    with serving(model) as served:
        yield served
        served.idle()


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as client:
        yield client


def streamed_text(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_chat_is_generates_answer_whole_and_streamed(model, client):
    ids = model.tokenizer.encode_chat(HI)
    expected = bj.generate(model, [ids], max_new_tokens=12, sampling=bj.SamplingParams(0.0))[0]
    whole = client.chat.completions.create(model="any", messages=HI, max_tokens=12, **GREEDY)
    (choice,) = whole.choices
    assert choice.message.content == expected.text and choice.finish_reason == expected.finish_reason
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), len(expected.tokens))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(
        client.chat.completions.create(
            model="any", messages=HI, max_completion_tokens=12, **GREEDY, **options
        )
    )
    assert streamed_text(chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0  # the second time
    assert chunks[-1].timings["predicted_n"] == len(expected.tokens)


def prefills(server: Served, monkeypatch) -> list[int]:
    """From now on the number of prompts in each prefill. Who waits for requests that arrive, waits long."""
    settle(server.service.engine)
    counts, calls = [], server.service.engine._loop.runner.calls
    prefill = calls.prefill

    def counting(reads, *how, **options):
        counts.append(sum(map(len, reads)))
        return prefill(reads, *how, **options)

    monkeypatch.setattr(calls, "prefill", counting)
    monkeypatch.setattr(engine_file, "ARRIVAL_S", 30)
    return counts


def settle(engine: bj.Engine):
    """Wait until the engine has read what other tests left on its way. Before, it begins with the first
    request that comes."""
    loop, settled = engine._loop, queue.SimpleQueue()
    while True:
        engine._send(lambda: settled.put(not loop._flying and not loop.scheduler.waiting))
        if settled.get(timeout=60):
            return


@pytest.mark.parametrize("protocol", [openai_completions, openai_chat])
def test_requests_of_one_turn_of_the_event_loop_are_read_together(server, monkeypatch, protocol):
    """Completions are submitted by the loop, chats by threads."""
    counts = prefills(server, monkeypatch)

    async def all_answers() -> list[dict]:
        texts = [f"Number {i}" for i in range(4)]
        bodies = [{"prompt": text, "messages": [{"role": "user", "content": text}]} for text in texts]
        # Greedy: a draw may be the end of the text.
        requests = [protocol.request(body | {"max_tokens": 2, "temperature": 0}) for body in bodies]
        asked = [Answering(server.service, protocol, request, "") for request in requests]
        async with asyncio.timeout(60):
            return await asyncio.gather(*[one.whole() for one in asked])

    answers = asyncio.run(all_answers())
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [2] * 4 and counts == [4]


def test_a_request_alone_waits_for_nobody(server, monkeypatch):
    counts = prefills(server, monkeypatch)
    began = time.monotonic()
    assert server.post("/v1/completions", prompt=ONCE, max_tokens=2).status_code == 200
    assert counts == [1] and time.monotonic() - began < 25


def test_a_request_that_takes_long_to_arrive_holds_nobody_up(server):
    with server.service.engine.arriving():
        assert server.post("/v1/completions", prompt=ONCE, max_tokens=2).status_code == 200


def test_the_body_is_what_openais_types_say(server):
    """Strictly: the clients themselves accept anything."""
    from openai.types import Completion, CreateEmbeddingResponse
    from openai.types.chat import ChatCompletion

    chat = server.post("/v1/chat/completions", messages=HI, max_tokens=4, logprobs=True, top_logprobs=3, n=2)
    text = server.post("/v1/completions", prompt=ONCE, max_tokens=4, logprobs=3)
    vectors = server.post("/v1/embeddings", input=[ONCE], encoding_format="float")
    for kind, answer in ((ChatCompletion, chat), (Completion, text), (CreateEmbeddingResponse, vectors)):
        body = answer.json()
        for own in ("timings", "pooling"):  # not OpenAI's
            body.pop(own, None)
        kind.model_validate(body, strict=True, extra="forbid")
    assert len(chat.json()["choices"]) == 2 and chat.headers["content-type"] == "application/json"


def test_n_answers_and_several_prompts_are_those_of_their_seeds(model, client):
    how = {"temperature": 0.9, "max_tokens": 6, "seed": 5, "extra_body": {"top_k": 20, "min_p": 0.01}}
    prompts = [ONCE, "Two"]
    got = client.completions.create(model="any", prompt=prompts, n=2, **how)
    params = bj.SamplingParams(0.9, top_k=20, min_p=0.01, seed=5, temperature_first=True)
    each = [dataclasses.replace(params, seed=5 + i) for i in range(4)]
    asked = [ONCE, ONCE, "Two", "Two"]
    expected = bj.generate(model, asked, max_new_tokens=6, sampling=each)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in got.choices] == [output.text for output in expected]
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model="any", prompt=prompts, n=2, stream=True, **how):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [output.text for output in expected]
    ids = [model.tokenizer.encode(text) for text in prompts]
    again = client.completions.create(model="any", prompt=ids, n=2, **how)
    assert [choice.text for choice in again.choices] == [output.text for output in expected]


def test_a_seed_of_minus_one_is_a_new_one_whatever_the_servers_is(model):
    hot = bj.SamplingParams(1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, temperature_first=True)
    with serving(model, sampling=hot) as served:

        def text(**more) -> str:
            body = {"prompt": ONCE, "max_tokens": 16, "ignore_eos": True, **more}
            return served.post("/v1/completions", **body).json()["choices"][0]["text"]

        assert text() == text() == text(seed=3) == text(seed=None)
        assert len({text(seed=-1), text(seed=-1), text()}) == 3


def test_penalties_biases_and_stops_reach_the_engine(model, client):
    free = client.completions.create(model="any", prompt=ONCE, max_tokens=8, **GREEDY).choices[0].text
    stop = free[2:4]
    cut = client.completions.create(model="any", prompt=ONCE, max_tokens=8, stop=stop, **GREEDY)
    assert cut.choices[0].text == free[: free.index(stop)] and cut.choices[0].finish_reason == "stop"
    banned = bj.generate(model, [ONCE], max_new_tokens=8, sampling=bj.SamplingParams(0.0))[0].tokens[0]
    how = {"frequency_penalty": 0.5, "presence_penalty": 0.2, "logit_bias": {str(banned): -100}}
    more = {"repetition_penalty": 1.3}
    got = client.completions.create(model="any", prompt=ONCE, max_tokens=8, **GREEDY, **how, extra_body=more)
    params = bj.SamplingParams(
        0.0, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.3, logit_bias={banned: -100}
    )
    expected = bj.generate(model, [ONCE], max_new_tokens=8, sampling=params)[0].text
    assert got.choices[0].text == expected != free
    more = {"repeat_penalty": 1.3}  # llama.cpp's name
    got = client.completions.create(model="any", prompt=ONCE, max_tokens=8, **GREEDY, **how, extra_body=more)
    assert got.choices[0].text == expected


def test_logprobs_are_those_of_generate(model, client):
    ids = model.tokenizer.encode_chat(HI)
    (expected,) = bj.generate(model, [ids], max_new_tokens=5, sampling=bj.SamplingParams(0.0), logprobs=2)
    how = {"model": "any", "messages": HI, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**how).choices[0].logprobs.content
    pieces = [c.choices[0].logprobs for c in client.chat.completions.create(**how, stream=True)]
    streamed = [token for piece in pieces if piece for token in piece.content]
    for content in (whole, streamed):
        np.testing.assert_allclose([t.logprob for t in content], expected.logprobs.token, atol=1e-4)
        top = [[own.logprob for own in t.top_logprobs] for t in content]
        np.testing.assert_allclose(top, expected.logprobs.top, atol=1e-4)
        assert b"".join(bytes(t.bytes) for t in content).decode(errors="replace") == expected.text


def test_sixty_four_at_once_get_their_own_answers(model, server):
    prompts = [f"Number {n}" for n in range(64)]
    expected = bj.generate(model, prompts, max_new_tokens=4, sampling=bj.SamplingParams(0.0))

    async def all_answers() -> list[str]:
        async def whole(prompt: str) -> str:
            got = await client.completions.create(model="any", prompt=prompt, max_tokens=4, **GREEDY)
            return got.choices[0].text

        async def streamed(prompt: str) -> str:
            how = {"max_tokens": 4, "stream": True, **GREEDY}
            chunks = await client.completions.create(model="any", prompt=prompt, **how)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        ask = (whole, streamed)
        async with server.async_openai() as client:
            return await asyncio.gather(*(ask[i % 2](prompt) for i, prompt in enumerate(prompts)))

    assert asyncio.run(all_answers()) == [output.text for output in expected]
    server.idle()


def test_an_answer_may_fill_the_context_and_a_prompt_may_not_exceed_it(client):
    long = client.completions.create(
        model="any", prompt=[5] * 250, max_tokens=30_000, extra_body={"top_k": -1}
    )
    assert long.choices[0].finish_reason in ("length", "stop") and long.usage.total_tokens <= 256
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="any", prompt=[5] * 256)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="characters of prompt are more than 256 tokens"):
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "word " * 10**6}])


def test_echo_has_the_logprobs_of_the_prompt(model, client):
    """As evaluation harnesses ask."""
    ids = model.tokenizer.encode("The sky is blue today")
    logits = np.asarray(bj.logits(model, ids), np.float64)
    probabilities = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    probabilities -= logits.max(-1, keepdims=True)
    own = [probabilities[i, token] for i, token in enumerate(ids[1:])]
    for most in (0, 1):
        got = client.completions.create(
            model="any", prompt=[ids, ids[:3]], echo=True, logprobs=1, max_tokens=most, **GREEDY
        )
        scores = got.choices[0].logprobs
        count = len(ids) + most
        assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == count
        assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
        np.testing.assert_allclose(scores.token_logprobs[1 : len(ids)], own, atol=1e-3)
        best = [max(top.values()) for top in scores.top_logprobs[1 : len(ids)]]
        np.testing.assert_allclose(best, probabilities[: len(ids) - 1].max(-1), atol=1e-3)
        assert got.choices[0].text.startswith(model.tokenizer.decode(ids))
        assert len(got.choices[1].logprobs.tokens) == 3 + most
        assert got.usage.completion_tokens == 2 * most
    text = client.completions.create(model="any", prompt=ONCE, echo=True, max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in text).startswith(ONCE)


def test_embeddings_are_those_of_embed_texts(model, server, client):
    texts = [ONCE, "Two", "A longer text about many things"]
    for pooling in ("mean", "last"):
        expected = bj.embed_texts(model, texts, pooling=pooling)
        got = client.embeddings.create(model="any", input=texts, extra_body={"pooling": pooling})  # base64
        np.testing.assert_allclose([one.embedding for one in got.data], expected, atol=1e-5)
        assert got.pooling == pooling
        assert got.usage.prompt_tokens == sum(len(model.tokenizer.encode(text)) for text in texts)
    ids = [model.tokenizer.encode(text) for text in texts]
    plain = server.post("/v1/embeddings", input=ids, encoding_format="float").json()
    np.testing.assert_allclose(
        [one["embedding"] for one in plain["data"]], bj.embed_texts(model, ids), atol=1e-5
    )
    packed = server.post("/v1/embeddings", input=ONCE, encoding_format="base64").json()["data"][0][
        "embedding"
    ]
    assert len(np.frombuffer(base64.b64decode(packed), "<f4")) == model.config.hidden
    for wrong, param in (({"input": ""}, "input"), ({"input": [5] * 300}, "input"), ({}, "input")):
        assert server.post("/v1/embeddings", **wrong).json()["error"]["param"] == param
    assert server.post("/v1/embeddings", input="a", dimensions=3).status_code == 400


def test_tokens_and_templates(model, server):
    tokens = server.post("/tokenize", content=ONCE).json()["tokens"]
    assert tokens == model.tokenizer.encode(ONCE, add_special=False)
    assert server.post("/detokenize", tokens=tokens).json() == {"content": ONCE, "prompt": ONCE}
    vllms = server.post("/tokenize", prompt=ONCE, add_special_tokens=True).json()
    assert vllms["tokens"] == model.tokenizer.encode(ONCE) and vllms["count"] == len(vllms["tokens"])
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    assert info["eos_token"] == model.tokenizer.texts[model.tokenizer.eos_id]
    assert info["chat_template"] == model.tokenizer.chat_template
    prompt = server.post("/apply-template", messages=HI).json()["prompt"]
    assert prompt == model.tokenizer.apply_chat_template(HI)
    assert server.post("/tokenize").json()["error"]["param"] == "content"


def test_tokens_with_their_pieces_and_back(model, server):
    """As llama-server has them: bytes where a piece is no text."""
    text = ONCE + " é漢"
    ids = model.tokenizer.encode(text, add_special=False)
    got = server.post("/tokenize", content=text, with_pieces=True).json()
    assert [one["id"] for one in got["tokens"]] == ids and got["count"] == len(ids)
    pieces = [one["piece"] for one in got["tokens"]]
    assert {type(piece) for piece in pieces} == {str, list}
    whole = b"".join(bytes(piece) if isinstance(piece, list) else piece.encode() for piece in pieces)
    assert whole.decode().lstrip() == text
    assert server.post("/tokenize", content=text, with_pieces=False).json()["tokens"] == ids
    assert server.post("/detokenize", tokens=[]).json() == {"content": "", "prompt": ""}
    size = model.config.vocab_size
    assert server.post("/detokenize", tokens=[5, size - 1]).status_code == 200
    error = server.post("/detokenize", tokens=[5, size]).json()["error"]
    assert error["message"] == f"tokens: token {size} is beyond the vocabulary of {size}"


def test_an_answers_number_is_in_the_headers_of_both_clients(server):
    for path in ("/v1/messages", "/v1/completions"):
        headers = server.post(path).headers
        assert headers["request-id"] == headers["x-request-id"]
    with (
        Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(BadRequestError) as caught,
    ):
        client.messages.create(model="any", max_tokens=1, messages=[])
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]


def test_models_are_listed_in_both_forms(server):
    with server.http() as http:
        (own,) = http.get("/v1/models").json()["data"]
        assert own["id"] == "tiny" and own["context_length"] == 256
        anthropic = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert anthropic["data"][0]["type"] == "model" and anthropic["first_id"] == "tiny"
        with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            assert [one.display_name for one in client.models.list()] == ["tiny"]
            assert client.models.retrieve("tiny").created_at.year >= 2026
        assert http.get("/v1/models/tiny").json()["id"] == "tiny"
        assert http.get("/v1/models/other").status_code == 404
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").json() == {"version": bj.__version__}
        assert http.get("/v1/chat/completions").status_code == 405
        assert http.get("/nowhere").json()["error"]["type"] == "not_found_error"


def test_reasoning_effort_and_template_variables(model, server):
    """The tiny model's template gets them; a model that thinks would obey."""
    template = "{{ enable_thinking }}/{{ reasoning_effort }}/{{ style }}:{{ messages[0].content }}"
    own = dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, chat_template=template))
    before = server.service.model
    server.service.engine.model = own
    try:
        for body, text in (
            ({"reasoning_effort": "none"}, "False//"),
            ({"reasoning_effort": "high", "chat_template_kwargs": {"style": "x"}}, "True/high/x"),
        ):
            got = server.post("/v1/chat/completions", messages=HI, max_tokens=1, **body).json()
            ids = own.tokenizer.encode(f"{text}:{HI[0]['content']}", add_special=False)
            assert got["usage"]["prompt_tokens"] == len(ids), got
        got = server.post("/v1/chat/completions", messages=HI, chat_template_kwargs={"messages": []}).json()
        assert got["error"]["param"] == "chat_template_kwargs.messages"
    finally:
        server.service.engine.model = before


def test_metrics_can_be_parsed_and_count(server):
    def read() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {s.name: s.value for s in samples if not s.labels}

    before = read()
    server.post("/v1/completions", prompt=ONCE, max_tokens=5, **GREEDY)
    server.idle()
    after = read()
    new = {name: after[name] - before[name] for name in after}
    assert new["bonsai_new_tokens_total"] == 5
    assert new["bonsai_prompt_tokens_total"] == len(server.model.tokenizer.encode(ONCE))
    assert new["bonsai_time_to_first_token_seconds_count"] == 1
    assert after["bonsai_running"] == 0 and after["bonsai_up"] == 1
    assert after["bonsai_free_pages"] + after["bonsai_cached_pages"] == after["bonsai_pages"]


def test_open_webuis_request(server: Served):
    """Its shape, with fields of its own that the server does not know."""
    body = {
        "stream": True, "model": "tiny", "messages": HI, "stream_options": {"include_usage": True},
        "features": {"web_search": False}, "chat_id": "1", "session_id": "2", "max_tokens": 3, "tool_ids": [],
    }  # fmt: skip
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 3


def test_smollm2s_chats_at_once_are_generates(optimized):
    """A real model, four of whose chats run at the same time."""
    model = bj.load(str(smollm2_path()), bj.RunConfig(context=128, batch_size=4))
    questions = ["What is a tree?", "Name a colour.", "What is 2 + 2?", "Say hello."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    ids = [model.tokenizer.encode_chat(chat) for chat in chats]
    expected = bj.generate(model, ids, max_new_tokens=12, sampling=bj.SamplingParams(0.0))

    async def all_answers(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            body = {"max_tokens": 12, "temperature": 0}
            asked = [http.post("/v1/chat/completions", json={"messages": chat, **body}) for chat in chats]
            answers = [answer.json() for answer in await asyncio.gather(*asked)]
        return [answer["choices"][0]["message"]["content"] for answer in answers]

    with serving(model) as served:
        texts = asyncio.run(all_answers(served.url))
    assert texts == [output.text for output in expected]
    assert len(set(texts)) == 4 and all(len(text.split()) > 1 for text in texts)


def test_lm_evals_requests(model, server):
    """local-completions: prompts as ids, each with its continuation, whose score is `bj.score`'s."""
    context, continuations = model.tokenizer.encode("The sky is"), ([5, 6, 7], [9, 8])
    prompts = [context + own for own in continuations]
    body = {"model": "any", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = server.post("/v1/completions", **body, echo=True).json()
    for choice, own, known in zip(
        sorted(answer["choices"], key=lambda choice: choice["index"]),
        continuations,
        bj.score(model, [context], [list(continuations)])[0],
        strict=True,
    ):
        scores, at = choice["logprobs"], len(context)
        tokens, top = scores["token_logprobs"][at:-1], scores["top_logprobs"][at:-1]
        assert len(tokens) == len(own)
        assert sum(tokens) == pytest.approx(known.logprob, abs=1e-3)
        greedy = all(token == max(best.values()) for token, best in zip(tokens, top, strict=True))
        assert greedy == known.is_greedy
