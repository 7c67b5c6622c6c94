"""Draws that wait on the device for masks: the launch that waits, and engines with constrained answers."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.engine import runner
from bonsai_jax.engine.flights import Letters
from bonsai_jax.engine.mailbox import Mailbox
from pallas_kernels import host_masks

pytestmark = pytest.mark.gpu

WORDS = bj.regex("([a-z]{1,6} ){4,8}end")
PERSON = bj.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "colour": {"enum": ["red", "green"]}},
        "required": ["name", "colour"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(("rows", "words"), [(1, 1), (3, 33), (32, 4748), (64, 8192)])
def test_masks_arrive_after_their_draw_was_dispatched(rows, words):
    """In random order, some late, some rows held and some free, a draw behind another, and then closed."""
    rng = np.random.default_rng(rows)
    places = rng.permutation(rows + 5)[:rows]
    free = rng.random(rows) < 0.2
    mailbox = Mailbox(rows + 5, words)
    at = jnp.array(places, jnp.int32), jnp.array(~free)

    @jax.jit
    def receive(count, address):
        allowed, draws = host_masks.receive(address, *at, words)
        return count + 1, allowed, draws

    count, address = jnp.zeros((), jnp.int32), jnp.array(mailbox.address, jnp.int32)
    for _ in range(20):
        count, allowed, draws = receive(count, address)
        masks = rng.integers(0, 2**32, (rows, words), dtype=np.uint32)
        holds = ~free & (rng.random(rows) < 0.3)
        for i in rng.permutation(np.flatnonzero(~free)):
            if rng.random() < 0.1:
                time.sleep(0.002)
            mailbox.hold(places[i]) if holds[i] else mailbox.allow(places[i], masks[i])
        masks[holds], masks[free] = 0, 2**32 - 1
        np.testing.assert_array_equal(draws, ~holds)
        np.testing.assert_array_equal(allowed, masks)
    *_, draws = receive(count, address)
    mailbox.close()
    np.testing.assert_array_equal(draws, free)


@pytest.mark.parametrize("source", ["tiny-llama:q4_k_m", "tiny-qwen35:pq2_0", "bonsai-1.7b:q4_k_m"])
def test_answers_are_those_whose_masks_are_sent(source, monkeypatch):
    """Rows with constraints and without, with penalties, and in a third run with random rows held."""
    pytest.importorskip("llguidance")
    model = bj.load(f"synth:{source}", bj.RunConfig(context=256, batch_size=8))
    constraints = [WORDS, PERSON, None, WORDS, PERSON, None, WORDS]

    def answers():
        with bj.Engine(model, reproducible=True) as engine:
            handles = [
                engine.submit(
                    [7 + i] * (5 + i),
                    bj.SamplingParams(seed=i, presence_penalty=0.3 * (i % 2)),
                    max_new_tokens=40,
                    constraint=one,
                )
                for i, one in enumerate(constraints)
            ]
            return [handle.result(600).tokens for handle in handles]

    posted, post, rng = answers(), Letters.post, np.random.default_rng(0)

    def hold_some(self, flight, hold=False):
        post(self, flight, hold or rng.random() < 0.3)

    monkeypatch.setattr(Letters, "post", hold_some)
    assert answers() == posted
    monkeypatch.setattr(Letters, "post", post)
    monkeypatch.setattr(runner, "has_mailbox", lambda model: False)
    assert answers() == posted
