"""Every tiny synthetic model on a GPU, as users run it but for its 16-bit activations: steps and prompts
against the exact definition.

test_gpu_models.py looks closer at a few. This file finds what a setting of one architecture does to kernels
that its neighbours do not have: a sink, a window, a shared expert, two groups of layers, a head of 96.
"""

import dataclasses

import numpy as np
import pytest

import bonsai_jax as bj
from checkpoints import synth
from tests.agreement import divergence, log_softmax, padded_logits
from tests.gpu.steps import log_p_of_steps

pytestmark = pytest.mark.gpu

NAMES = sorted(name for name in synth.MODELS if name.startswith("tiny-"))
FORMATS = {"tiny-gpt-oss": "mxfp4"}  # others q4_k_m, which has superblocks of 256 and gpt-oss rows of 288
TOKENS = 150  # beyond 129 keys blocks of attention share a row's keys out; windows are 24 to 64
# Mean KL. Steps keep 16 bits of each activation, and prompts of these formats go through GEMMs in float16.
# An expert chosen by a near-tie may be another one: a tenth of a token's KL over a whole text.
MOST = {"steps": 2e-4, "prompts": 5e-4}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_steps_and_prompts_are_near_the_exact_definition(name, rows):
    ids = np.random.default_rng(len(name)).integers(0, 256, (rows, TOKENS))
    run = bj.RunConfig(cache_dtype="float32", activation_bits=16)
    fast, exact = (
        bj.load(f"synth:{name}:{FORMATS.get(name, 'q4_k_m')}", dataclasses.replace(run, impl=impl))
        for impl in ("auto", "reference")
    )
    expected = log_softmax(np.stack(padded_logits(exact, ids.tolist())))
    found = {
        "steps": log_p_of_steps(fast, ids),
        "prompts": log_softmax(np.stack(padded_logits(fast, ids.tolist()))),
    }
    kl = {of: float(divergence(expected, log_p).mean()) for of, log_p in found.items()}
    print(f"{name}, {rows} rows: KL {kl}")
    assert expected.std() > 0.5  # of a model that tells tokens apart
    assert all(kl[of] < MOST[of] for of in MOST), kl
