"""Llamas with something else: ropes of a part of a head or in some layers, scales, temperatures, norms after
the rope, tensors that hold rows of several. Each beside llama.cpp, in F32, through the engine.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.network import params as network_params
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from checkpoints import CheckpointError, open_checkpoint
from pallas_kernels import device
from tests.agreement import top_kl
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file
from tests.bonsai_jax.test_params import huggingface_folder

MODELS = (
    *("tiny-smollm3", "tiny-granite", "tiny-mistral3", "tiny-seed-oss", "tiny-glm4", "tiny-phi4"),
    *("tiny-ernie4.5", "tiny-hunyuan"),
)
LENGTHS, NEW = (1, 63, 65, 300), 6
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("llamas")


@functools.cache
def tiny(name: str, context: int = 512) -> bj.Model:
    return bj.load(f"synth:{name}:f32", bj.RunConfig(context=context))


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


@pytest.mark.parametrize(
    "name, lengths, context", [*((name, LENGTHS, 512) for name in MODELS), ("tiny-phi4", (65,), 256)]
)
def test_prompts_of_every_length_are_answered_as_by_llama_cpp(name, lengths, context, folder):
    """In chunks of one size, then steps of all rows. Phi-4's factors are those of the context."""
    path = as_file(f"synth:{name}:f32", folder / f"{name}.gguf")
    model, prompts = tiny(name, context), [prompt(length) for length in lengths]
    rows, size = answers(path, model.tokenizer, prompts, NEW, context), model.config.vocab_size
    asked = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": size}
    how = {"max_batch_size": len(prompts), "context": min(context, 320), "prefill_tokens": 256}
    with bj.Engine(model, reproducible=True, logprobs=size, **how) as engine:
        outputs = [handle.result() for handle in [engine.submit(p, GREEDY, **asked) for p in prompts]]
    kl = []
    for row, output in zip(rows, outputs, strict=True):
        assert output.tokens == row["tokens"]
        log_p = np.empty((NEW, size))
        np.put_along_axis(log_p, np.asarray(output.logprobs.ids), np.asarray(output.logprobs.top), 1)
        kl.append(top_kl(np.array(row["top_ids"]), np.array(row["top_logprobs"]), log_p).mean())
    print(f"{name}: KL by length of prompt: {dict(zip(lengths, kl, strict=True))}")
    assert max(kl) < 1e-6


def config_json(name: str) -> dict:
    """What config.json says that is not in every Llama's."""
    factors = {
        f"{length}_factor": np.asarray(blocks(t)).view(np.float32).tolist()
        for length in ("short", "long")
        if (t := open_checkpoint(f"synth:{name}:f32").tensors.get(f"rope_factors_{length}.weight"))
    }
    return {
        "tiny-smollm3": {"no_rope_layers": [1, 1, 1, 0, 1]},
        "tiny-granite": {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25,
            "logits_scaling": 1.5,
        },
        "tiny-mistral3": {
            "model_type": "ministral3",
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        "tiny-glm4": {"permuted": False},
        "tiny-phi4": {
            "original_max_position_embeddings": 256, "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope"} | factors,
        },
        "tiny-ernie4.5": {"permuted": False},
        "tiny-hunyuan": {
            "model_type": "hunyuan_v1_dense", "rope_theta": 1e4,
            "rope_scaling": {"type": "dynamic", "alpha": 100 ** (126 / 128), "factor": 1.0},
        },
    }.get(name, {})  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_hugging_face_folder_is_the_same_model_as_the_gguf_file(name, tmp_path):
    path = huggingface_folder(f"synth:{name}:f32", tmp_path / "hf", **config_json(name))
    ours, ids = bj.load(str(path), bj.RunConfig(context=512)), prompt(290)
    if name == "tiny-mistral3":
        checkpoint = open_checkpoint(path)
        text = {f"language_model.{own}": t for own, t in checkpoint.tensors.items()}
        said = {"model_type": "mistral3", "text_config": checkpoint.metadata}
        sees = dataclasses.replace(checkpoint, tensors=text, metadata=said)
        assert dataclasses.replace(architectures.describe(sees).config, skipped=()) == dataclasses.replace(
            ours.config, skipped=()
        )
    np.testing.assert_allclose(bj.logits(ours, ids), bj.logits(tiny(name), ids), atol=3e-4)


@pytest.mark.parametrize(
    "name",
    [
        "tiny-granite",
        *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "tiny-granite"),
    ],
)
def test_taps_add_up_and_gradients_are_differences(name):
    """Of the reference, from vectors in place of tokens."""
    model, tokens = tiny(name), jnp.array([prompt(24)])
    lengths = jnp.array([24])
    sites = ("input", "attention", "middle", "mlp", "output")
    _, read = bj.jitted.forward(model.params, tokens, lengths, model.config, taps=bj.Taps(sites))
    np.testing.assert_allclose(read["input"] + read["attention"], read["middle"], atol=1e-5)
    np.testing.assert_allclose(read["middle"] + read["mlp"], read["output"], atol=1e-5)

    @jax.jit
    def score(vectors):
        logits, _ = bj.forward(model.params, vectors, lengths, model.config)
        return jax.nn.log_softmax(logits[0, -1])[7]

    vectors = bj.embed(model.params, tokens)
    way = jax.random.normal(jax.random.key(0), vectors.shape) * vectors.std()
    slope = jnp.vdot(jax.jit(jax.grad(score))(vectors), way)
    step = 1e-2
    difference = (score(vectors + step * way) - score(vectors - step * way)) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=2e-2)


@pytest.mark.parametrize(
    "name, q1_0, q4_k",
    [
        ("tiny-smollm3", "launches", "layer_products"),  # attention has launches of its own
        ("tiny-granite", "launches", "launches"),  # a residual scale
        ("tiny-mistral3", "launches", "layer_products"),  # a temperature
        ("tiny-seed-oss", "one_launch", "one_launch"),
        ("tiny-glm4", "launches", "layer_products"),  # norms of what is added
        ("tiny-phi4", "launches", "layer_products"),  # a part of each head
        ("tiny-ernie4.5", "one_launch", "one_launch"),
        ("tiny-hunyuan", "launches", "layer_products"),  # norms after the rope
    ],
)
def test_on_a_gpu_no_fused_launch_runs_what_it_was_not_written_for(name, q1_0, q4_k, monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    for format, schedule in (("q1_0", q1_0), ("q4_k", q4_k)):
        plan = load_plans.plan(
            architectures.describe(open_checkpoint(f"synth:{name}:{format}")), bj.RunConfig()
        )
        assert network_params.schedules.step_plan(plan).schedule(1) == schedule


def test_rows_that_do_not_add_up_are_refused():
    checkpoint = open_checkpoint("synth:tiny-phi4:f32")
    tensors, name = dict(checkpoint.tensors), "blk.1.attn_qkv.weight"
    odd = {"shape": (500, 256)}
    tensors[name] = dataclasses.replace(tensors[name], **odd)
    asked = r"attn_qkv.weight has shape \(500, 256\); the metadata asks for 512 rows, some of which"
    with pytest.raises(CheckpointError, match=asked):
        architectures.describe(dataclasses.replace(checkpoint, tensors=tensors))
    del tensors[name]
    lacks = r"blk.1.attn_q.weight \(or blk.1.attn_qkv.weight, with its rows\) is missing"
    with pytest.raises(CheckpointError, match=lacks):
        architectures.describe(dataclasses.replace(checkpoint, tensors=tensors))


@pytest.mark.parametrize(
    "name, change, error",
    [
        (
            "tiny-glm4",
            {"glm4.rope.dimension_sections": np.array([8, 12, 12, 0])},
            "sections is .8, 12, 12, 0.",
        ),
        ("tiny-mistral3", {"mistral3.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ("tiny-granite", {"granite.expert_count": 8}, "expert_count is 8"),
    ],
)
def test_what_is_not_read_is_refused(name, change, error):
    checkpoint = open_checkpoint(f"synth:{name}:f32")
    with pytest.raises(NotImplementedError, match=error):
        architectures.config_of(dataclasses.replace(checkpoint, metadata={**checkpoint.metadata, **change}))
