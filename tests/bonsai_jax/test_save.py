"""Generation states in files: by save_state, flax, orbax and jax.export, and what comes of them."""

import dataclasses
import functools
import json
import os
import re
import struct as binary
import subprocess
import sys
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import serialization

import bonsai_jax as bj
from pallas_kernels import pytree

ROOT = Path(__file__).parents[2]
SAMPLING = bj.SamplingParams(seed=7, repetition_penalty=1.1, frequency_penalty=0.2, logit_bias={5: 1.0})
NEW = 12


@functools.cache
def tiny(cache_dtype="float32", source="tiny-llama:q8_0", impl="reference") -> bj.Model:
    run = bj.RunConfig(page_size=16, weights="packed", cache_dtype=cache_dtype, impl=impl)
    return bj.load(f"synth:{source}", run)


@functools.cache
def begun():
    """A state of two rows in the middle of their answers, and the tokens that follow."""
    model = tiny()
    state = bj.new_state(model, 2, 64, SAMPLING, NEW, ignore_eos=True)
    prefill = jax.jit(bj.prefill, static_argnames="config")
    tokens = jnp.array([[1, 2, 3, 4], [9, 8, 0, 0]])
    state = prefill(model.params, state, tokens, jnp.array([4, 2]), model.config).state
    state = go_on(model, state, 3).state
    return state, go_on(model, state, NEW).tokens


@functools.partial(jax.jit, static_argnames=("config", "size"))
def decode(params, state, limit, config, size=NEW):
    return bj.decode(params, state, config, limit=limit, size=size)


def go_on(model, state, steps):
    return decode(model.params, state, steps, model.config)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        a, b = (
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in (a, b)
        )
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_generation_goes_on_as_if_it_had_never_stopped(tmp_path):
    """Sampled, with penalties and a bias."""
    state, want = begun()
    bj.save_state(tmp_path / "state", state)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    back = bj.load_state(tmp_path / "state", tiny())
    same(back, state)
    np.testing.assert_array_equal(go_on(tiny(), back, NEW)[1], want)


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "float16", "int8"])
def test_caches_of_every_dtype_come_back_bit_for_bit(cache_dtype, tmp_path):
    model, rng = tiny(cache_dtype), np.random.default_rng(0)
    cache = bj.new_cache(model, 2, 64)
    filled = jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 40, a.shape).astype(a.dtype)), cache.states)
    cache = cache.replace(lengths=jnp.array([5, 7], jnp.int32), states=filled)
    bj.save_state(tmp_path / "cache", cache)
    # what another reader sees
    arrays = safetensors.numpy.load_file(tmp_path / "cache")
    keys = [a for name, a in arrays.items() if name.endswith("k.numbers" if cache_dtype == "int8" else "k")]
    assert [str(a.dtype) for a in keys] == [cache_dtype] and keys[0].any()
    assert [5, 7] in [a.tolist() for name, a in arrays.items() if name.endswith("lengths")]
    same(bj.load_state(tmp_path / "cache", model), cache)


@pytest.mark.parametrize(("dtype", "other"), [("float16", "float32"), ("float32", "float16")])
def test_states_of_delta_nets_come_back_into_a_model_that_has_their_type(dtype, other, tmp_path):
    model, rng = tiny(source="tiny-qwen35:f32"), np.random.default_rng(0)
    own, another = (
        dataclasses.replace(model, run=dataclasses.replace(model.run, state_dtype=name))
        for name in (dtype, other)
    )
    cache = bj.new_cache(own, 2, 64)
    filled = jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 40, a.shape).astype(a.dtype)), cache.states)
    cache = cache.replace(lengths=jnp.array([5, 7], jnp.int32), states=filled)
    bj.save_state(tmp_path / "cache", cache)
    arrays = safetensors.numpy.load_file(tmp_path / "cache")  # what another reader sees
    stored = {name.split(".")[-1]: str(a.dtype) for name, a in arrays.items() if "delta_net" in name}
    assert stored == {"s": dtype, "tail": "float32"}
    same(bj.load_state(tmp_path / "cache", own), cache)
    message = f"cache: the states of its delta nets are {dtype}, but this model runs with {other}; load it "
    with pytest.raises(ValueError, match=re.escape(f'{message}with RunConfig(state_dtype="{dtype}")')):
        bj.load_state(tmp_path / "cache", another)


def test_a_cache_alone_and_the_kernels_of_this_process(tmp_path):
    cache, model = begun()[0].cache, tiny(impl="auto")

    def with_kernels(impl: str, prefill_impl: str):
        (stored,) = cache.states["attention"]
        return cache.with_state("attention", 0, stored.replace(impl=impl, prefill_impl=prefill_impl))

    bj.save_state(tmp_path / "prefix", with_kernels("decode", "prefill_sm90"))  # as a GPU would have it
    (own,) = bj.new_cache(model, 2, 64).states["attention"]
    assert own.impl != cache.states["attention"][0].impl
    same(bj.load_state(tmp_path / "prefix", model), with_kernels(own.impl, own.prefill_impl))


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    state, path = begun()[0], tmp_path / "state"
    bj.save_state(path, state)
    before = path.read_bytes()

    def cut_off(arrays, target, metadata):
        Path(target).write_bytes(before[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr("bonsai_jax.save.save_file", cut_off)
    with pytest.raises(OSError, match="No space left"):
        bj.save_state(path, state)
    assert [p.name for p in tmp_path.iterdir()] == ["state"] and path.read_bytes() == before


def with_fields(**changes):
    return lambda config: dataclasses.replace(config, **changes)


def layers(count: int):
    return lambda config: dataclasses.replace(config, layers=config.layers[:1] * count)


def attention(**changes):
    """Every layer's attention with other settings."""

    def edit(config):
        mixer = dataclasses.replace(config.attention, **changes)
        every = tuple(dataclasses.replace(layer, mixer=mixer) for layer in config.layers)
        return dataclasses.replace(config, layers=every)

    return edit


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"config": layers(9)},
            "this state has layers 3, but the model 9; load the model that it was made with",
        ),
        ({"config": attention(num_kv_heads=1)}, "this state has KV heads 2, but the model 1; load"),
        ({"config": attention(head_dim=128)}, "this state has head_dim 64, but the model 128; load"),
        ({"config": with_fields(vocab_size=999)}, "this state has vocabulary .*, but the model 999; load"),
        (
            {"run": with_fields(cache_dtype="float16")},
            'the cache is float32, but .* float16; load it .*cache_dtype="float32"',
        ),
    ],
    ids=["layers", "kv_heads", "head_dim", "vocabulary", "cache_dtype"],
)
def test_another_model(change, message, tmp_path):
    model = tiny()
    other = dataclasses.replace(model, **{name: edit(getattr(model, name)) for name, edit in change.items()})
    bj.save_state(tmp_path / "state", begun()[0])
    with pytest.raises(ValueError, match=f"state: {message}"):
        bj.load_state(tmp_path / "state", other)


def test_files_that_are_no_states(tmp_path):
    path = tmp_path / "state"
    bj.save_state(path, begun()[0])
    whole = path.read_bytes()
    (size,) = binary.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size])
    for damaged, message in {
        b"": "no state that bj.save_state wrote",
        b"\x00" * 100: "no state that bj.save_state wrote",
        whole[:-1]: "no state that bj.save_state wrote",
        _renamed(header, "sampler.bias", "sampler.prejudice")
        + whole[8 + size :]: "lacks a field, or has one too many",
        _renamed(header, "tokens", "cache.tokens") + whole[8 + size :]: "lacks a field, or has one too many",
    }.items():
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            bj.load_state(path, tiny())
    safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    with pytest.raises(ValueError, match="its metadata does not say so"):
        bj.load_state(path, tiny())
    with pytest.raises(FileNotFoundError):
        bj.load_state(tmp_path / "nowhere", tiny())
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        bj.load_state(tmp_path, tiny())


def test_what_cannot_be_saved_and_where(tmp_path):
    with pytest.raises(TypeError, match="save_state: a dict was given; State and KVCache"):
        bj.save_state(tmp_path / "state", {})
    with pytest.raises(FileNotFoundError, match=r"'.*nowhere'$"):
        bj.save_state(tmp_path / "nowhere" / "state", begun()[0])


def _renamed(header, name, new):
    text = json.dumps({new if key == name else key: value for key, value in header.items()}).encode()
    return binary.pack("<Q", len(text)) + text


def test_flax_serialization():
    state = begun()[0]
    empty = jax.tree.map(jnp.copy, bj.new_state(tiny(), 2, 64, SAMPLING, NEW, ignore_eos=True))
    same(serialization.from_state_dict(empty, serialization.to_state_dict(state)), state)
    back = jax.tree.map(jnp.asarray, serialization.from_bytes(empty, serialization.to_bytes(state)))
    same(back, state)
    np.testing.assert_array_equal(go_on(tiny(), back, NEW)[1], begun()[1])


def test_orbax(tmp_path):
    state = begun()[0]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, state))
    same(back, state)


IN_ANOTHER_PROCESS = """
import sys
import jax, numpy as np
import bonsai_jax as bj
folder = sys.argv[1]
model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(page_size=16, weights="packed", impl="reference"))
read = lambda name: jax.export.deserialize(bytearray(open(f"{folder}/{name}", "rb").read()))
state = bj.load_state(f"{folder}/state", model)
logits = read("forward").call(model.params, np.array([[1, 2, 3, 4]], np.int32), np.array([4], np.int32))
np.save(f"{folder}/logits.npy", logits)
bj.save_state(f"{folder}/stepped", read("step").call(model.params, state))
"""


def test_exported_functions_of_params_and_state_in_another_process(tmp_path):
    model, state = tiny(), begun()[0]
    bj.save_state(tmp_path / "state", state)
    forward = jax.jit(lambda params, tokens, lengths: bj.forward(params, tokens, lengths, model.config)[0])
    step = jax.jit(lambda params, state: bj.step(params, state, model.config).state)
    prompt = jnp.array([[1, 2, 3, 4]]), jnp.array([4])
    for name, function, arguments in (("forward", forward, prompt), ("step", step, (state,))):
        exported = jax.export.export(function)(model.params, *arguments)
        (tmp_path / name).write_bytes(exported.serialize())
    command = [sys.executable, "-W", "error", "-c", IN_ANOTHER_PROCESS, str(tmp_path)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), forward(model.params, *prompt), atol=1e-5)
    stepped, want = bj.load_state(tmp_path / "stepped", model), go_on(model, state, 1).state
    np.testing.assert_array_equal(stepped.tokens, want.tokens)
    np.testing.assert_allclose(
        stepped.cache.states["attention"][0].k, want.cache.states["attention"][0].k, atol=1e-5
    )


def test_weights_of_many_formats_are_exported():
    """Static fields too: kernels, layouts and what is joined with what."""
    params = tiny(source="tiny-qwen3:q4_k_m").params
    exported = jax.export.export(jax.jit(lambda params: params))(params)
    again = jax.export.deserialize(exported.serialize())
    assert again.in_tree == exported.in_tree
    same(again.call(params), params)


def test_a_mesh_is_not_exported():
    model = bj.load("synth:tiny-llama:q8_0", mesh=bj.make_mesh(data=1))
    exported = jax.export.export(jax.jit(lambda params: params.final_norm))(model.params)
    with pytest.raises(NotImplementedError, match=r"a Mesh cannot be written .* loaded without a mesh"):
        exported.serialize()


def test_every_pytree_of_ours_can_be_exported():
    nodes = [
        node
        for node in flax.struct.PyTreeNode.__subclasses__()
        if node.__module__.startswith(("bonsai_jax", "pallas"))
    ]
    assert len(nodes) >= 8
    for node in nodes:
        with pytest.raises(ValueError, match="Duplicate serialization"):
            pytree.serializable(node)
