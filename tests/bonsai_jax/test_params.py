"""From files to Params: what is strict, what mixes, and one model from a GGUF file and from a folder."""

import dataclasses
import functools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.network import params as network_params
from bonsai_jax.weights import drawing
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights import read as weights_read
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, CheckpointError, RandomTensor, Tensor, open_checkpoint, write_gguf
from pallas_kernels import dequantize, device, formats, from_blocks
from pallas_kernels.qtensor import Rows

ROOT = Path(__file__).parents[2]


@functools.cache
def tiny(source="synth:tiny-llama:f32") -> Checkpoint:
    return open_checkpoint(source)


def changed(**tensors) -> Checkpoint:
    """tiny-llama with tensors replaced, added or (None) removed, by names with "__" for "."."""
    edits = {name.replace("__", "."): t for name, t in tensors.items()}
    merged = {**tiny().tensors, **edits}
    return dataclasses.replace(tiny(), tensors={name: t for name, t in merged.items() if t is not None})


@pytest.mark.parametrize("source", ["synth:tiny-qwen2:q4_k_m", "synth:tiny-llama:q8_0"])
def test_a_file_s_blocks_are_copied_on_a_cpu_and_nothing_is_compiled_for_it(source, tmp_path):
    """As on a GPU a program makes them of blocks: every array is compared."""
    from tests.bonsai_jax.test_oracle import as_file

    with mock.patch.object(load_plans, "_is_as_in_file", lambda *_: False):
        made = bj.load(source)
    path = as_file(source, tmp_path / "model.gguf")
    compiled = []
    listener = lambda event, seconds, **_: compiled.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    shapes = []

    def on_shapes(model):
        assert not released.called  # nothing of the file's matrices is read for shapes
        shapes.append(model.params)

    with mock.patch.object(weights_read, "_released", wraps=weights_read._released) as released:
        read = bj.load(str(path), on_shapes=on_shapes)
    assert released.called
    jax.monitoring.unregister_event_duration_listener(listener)
    assert not [event for event in compiled if event.endswith("backend_compile_duration")]
    assert shapes == [jax.eval_shape(lambda: read.params)]
    assert jax.tree.structure(read.params) == jax.tree.structure(made.params)
    for ours, theirs in zip(jax.tree.leaves(read.params), jax.tree.leaves(made.params), strict=True):
        assert ours.dtype == theirs.dtype and np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize(
    "format",
    ["f32", "q4_k", "tq1_0", *(pytest.param(name, marks=pytest.mark.slow) for name in ("q8_0", "iq4_nl"))],
)
def test_random_tensors_of_many_shapes_are_drawn_by_one_program(format):
    """The same blocks as by a program for each shape."""
    module, draw, programs = formats.get(format), jax.jit(formats.random_fields, static_argnums=(0, 2)), []
    for seed, shape in enumerate([(3, 256), (7, 2, 512)]):
        t = RandomTensor("w", format, shape, seed, 0.5, 0.02, 0)
        lead = (*shape[:-1], shape[-1] // module.WEIGHTS)
        fields = draw(format, jax.random.key(seed), lead, 0.5, 0.02)
        np.testing.assert_array_equal(drawing.Drawn(t).data, formats.pack(format, fields))
        programs.append(drawing._fields._cache_size())
    assert programs[0] == programs[1]


def test_a_missing_tensor_is_named():
    with pytest.raises(
        CheckpointError, match=r"tensor blk\.1\.attn_k\.weight is missing; a llama model of 3 layers"
    ):
        bj.from_checkpoint(changed(blk__1__attn_k__weight=None))


def test_an_extra_tensor_is_named():
    extra = dataclasses.replace(tiny().tensors["output_norm.weight"], name="blk.0.attn_q_norm.weight")
    with pytest.raises(CheckpointError, match=r"llama has no place for tensor blk\.0\.attn_q_norm\.weight"):
        bj.from_checkpoint(changed(blk__0__attn_q_norm__weight=extra))


def test_a_misshapen_tensor_is_named():
    wrong = dataclasses.replace(tiny().tensors["blk.2.attn_k.weight"], name="blk.2.attn_q.weight")
    with pytest.raises(
        CheckpointError,
        match=r"blk\.2\.attn_q\.weight has shape \(128, 256\); .* \(256, 256\) \(q_rows, hid",
    ):
        bj.from_checkpoint(changed(blk__2__attn_q__weight=wrong))


def test_a_format_without_a_decoder_is_named():
    odd = dataclasses.replace(tiny().tensors["blk.0.attn_q.weight"], format="q8_k")
    with pytest.raises(
        NotImplementedError, match=r"blk\.0\.attn_q\.weight: format 'q8_k' is not supported; supported: bf16"
    ):
        bj.from_checkpoint(changed(blk__0__attn_q__weight=odd))


def test_a_mixed_file_keeps_a_stack_for_each_format():
    dense = jax.jit(dequantize)  # outside of jit each operation would be compiled alone
    model = bj.load("synth:tiny-llama:q4_k_m", bj.RunConfig(weights="packed"))
    (wqkv,) = model.params.layers["attention"][0].qkv
    assert len(wqkv.parts) == 2 and len(wqkv.where) == 3  # all of q4_k, and values of q6_k
    for layer, (part, index) in enumerate(wqkv.where):
        weights = wqkv.parts[part]
        pieces = weights.pieces if isinstance(weights, Rows) else (weights,)
        assert [piece.format for piece in pieces] in (["q4_k"], ["q4_k", "q6_k"])
        want = []
        for name in "qkv":
            t = open_checkpoint("synth:tiny-llama:q4_k_m").tensors[f"blk.{layer}.attn_{name}.weight"]
            want.append(dense(from_blocks(np.asarray(blocks(t)), t.format)))
        got = [dense(jax.device_get(piece)[index]) for piece in pieces]
        np.testing.assert_array_equal(np.concatenate(got), np.concatenate(want))


def test_packed_and_decoded_weights_give_the_same_logits():
    ids = list(range(3, 40))
    packed, decoded = (
        bj.logits(bj.load("synth:tiny-qwen3:q4_k_m", bj.RunConfig(impl="reference", weights=w)), ids)
        for w in ("packed", "decoded")
    )
    np.testing.assert_allclose(packed, decoded, atol=2e-4)


def test_a_synthetic_model_is_the_same_from_its_file_as_from_its_seed(tmp_path):
    from tests.bonsai_jax.test_oracle import as_file

    path = as_file("synth:tiny-qwen3:q4_k_m", tmp_path / "tiny.gguf")
    drawn, read = bj.load("synth:tiny-qwen3:q4_k_m"), bj.load(str(path))
    assert drawn.config == read.config
    for one, other in zip(jax.tree.leaves(drawn.params), jax.tree.leaves(read.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_loading_reports_progress():
    seen = []
    bj.load("synth:tiny-llama:q8_0", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] == sum(
        t.nbytes for t in tiny("synth:tiny-llama:q8_0").tensors.values()
    )


def huggingface_folder(source: str, folder: Path, *, permuted: bool = True, **more) -> Path:
    """A synthetic model as the Hugging Face folder that it would be, in two safetensors shards.

    permuted   whether rows of q and k that are interleaved in GGUF files are in halves
    more       what else config.json says
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    checkpoint = open_checkpoint(source)
    config = architectures.config_of(checkpoint)
    specs = architectures.get(config.architecture).TENSORS
    named = {}
    for spec in specs:
        for layer in range(config.num_layers if "{}" in spec.gguf else 1):
            named_by = spec if spec.fused is None else spec.fused
            gguf, huggingface = str(named_by.gguf), named_by.huggingface
            if huggingface is None or (t := checkpoint.tensors.get(gguf.format(layer))) is None:
                continue
            values = np.asarray(blocks(t)).view(np.float32).reshape(t.shape)
            pairs = config.attention.rope.interleaved and spec.field in ("q", "k")
            if pairs and permuted:  # (0, 1), (2, 3) ... to halves
                heads = values.reshape(-1, config.attention.head_dim // 2, 2, config.hidden)
                values = heads.swapaxes(1, 2).reshape(t.shape)
            named[huggingface.format(layer)] = values
    folder.mkdir()
    names, weight_map = list(named), {}
    for shard, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        header, at = {}, 0
        for name in part:
            header[name] = {
                "dtype": "F32",
                "shape": named[name].shape,
                "data_offsets": [at, at + named[name].nbytes],
            }
            at += named[name].nbytes
            weight_map[name] = f"model-0000{shard}-of-00002.safetensors"
        text = json.dumps(header).encode()
        data = b"".join(named[name].tobytes() for name in part)
        (folder / f"model-0000{shard}-of-00002.safetensors").write_bytes(
            struct.pack("<Q", len(text)) + text + data
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    rope = {"rope_theta": config.attention.rope.base}
    if config.attention.rope.scaling == "yarn":
        scaling = {"rope_type": "yarn", "factor": config.attention.rope.factor}
        rope["rope_scaling"] = scaling | {
            "original_max_position_embeddings": config.attention.rope.original_context
        }
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": config.architecture,
                "num_hidden_layers": config.num_layers,
                "hidden_size": config.hidden,
                "intermediate_size": config.layers[0].channels.ffn,
                "num_attention_heads": config.attention.num_heads,
                "num_key_value_heads": config.attention.num_kv_heads,
                "head_dim": config.attention.head_dim,
                "max_position_embeddings": config.context_length,
                "rms_norm_eps": config.rms_norm_eps,
                "hidden_act": "silu" if config.mlp else "relu2",
                **rope,
                **more,
            }
        )
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-qwen2", "tiny-arcee"])
def test_a_hugging_face_folder_is_the_same_model_as_the_gguf_file(name, tmp_path):
    folder = huggingface_folder(f"synth:{name}:f32", tmp_path / "hf")
    ids = np.random.default_rng(0).integers(0, 256, 50).tolist()
    ours = bj.load(str(folder))
    assert not ours.config.attention.rope.interleaved
    np.testing.assert_allclose(bj.logits(ours, ids), bj.logits(bj.load(f"synth:{name}:f32"), ids), atol=2e-4)
    assert ours.tokenizer.decode(ours.tokenizer.encode("Ahoy, wörld")) == "Ahoy, wörld"


def test_a_folder_that_lacks_its_output_matrix_is_refused(tmp_path):
    """Untied, by its own word; without the word the embedding is the output matrix, as in Gemma."""
    folder = huggingface_folder("synth:tiny-llama:f32", tmp_path / "hf")
    config, path = json.loads((folder / "config.json").read_text()), folder / "config.json"
    checkpoint = open_checkpoint(folder)
    tensors = {name: t for name, t in checkpoint.tensors.items() if name != "lm_head.weight"}
    for says in ({"tie_word_embeddings": False}, {"text_config": {"tie_word_embeddings": False}}):
        untied = dataclasses.replace(checkpoint, tensors=tensors, metadata=checkpoint.metadata | says)
        with pytest.raises(CheckpointError, match=r"tensor lm_head.weight is missing; .*tie_word_embeddings"):
            architectures.describe(untied)
    for says in ({"tie_word_embeddings": True}, {}):
        tied = dataclasses.replace(checkpoint, tensors=tensors, metadata=checkpoint.metadata | says)
        architectures.describe(tied)
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}))
    architectures.describe(open_checkpoint(folder))


def test_a_damaged_tokenizer_is_a_damaged_checkpoint(tmp_path):
    folder = huggingface_folder("synth:tiny-qwen3:f32", tmp_path / "hf")
    (folder / "tokenizer.json").write_text('{"normalizer": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer cannot be read: .*tokenizer.json cannot be read"):
        bj.load(str(folder))
    tokens = tiny().metadata | {"tokenizer.ggml.tokens": []}
    with pytest.raises(CheckpointError, match=r"tokenizer cannot be read: tokenizer.ggml.tokens is empty"):
        bj.from_checkpoint(dataclasses.replace(tiny(), metadata=tokens))


@functools.cache
def plain_logits(*ids: int) -> np.ndarray:
    return bj.logits(bj.from_checkpoint(tiny()), ids)


@pytest.mark.parametrize(
    "change",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
        {"rope_freqs.weight": True},
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.original_context_length": 128,
        },
        {"llama.rope.freq_base": 5e5, "llama.attention.layer_norm_rms_epsilon": 1e-3},
    ],
    ids=lambda change: (
        next(iter(change.values())) if isinstance(next(iter(change.values())), str) else next(iter(change))
    ),
)
def test_rope_scaling_agrees_with_llama_cpp(change, tmp_path):
    """linear, Llama 3's divisors, yarn on an interleaved rope: each is wrong at once if read wrongly."""
    from tests.agreement import agreement
    from tests.bonsai_jax.test_oracle import answers

    tensors = {
        t.name: Tensor(t.name, t.format, t.shape, np.asarray(blocks(t))) for t in tiny().tensors.values()
    }
    if "rope_freqs.weight" in change:
        divisors = np.linspace(1, 8, 32, dtype=np.float32)
        tensors["rope_freqs.weight"] = Tensor("rope_freqs.weight", "f32", (32,), divisors.view(np.uint8))
        change = {}
    path = tmp_path / "scaled.gguf"
    write_gguf(path, {**tiny().metadata, **change}, tensors.values())
    model = bj.load(str(path))
    ids = [np.random.default_rng(1).integers(0, 256, 200).tolist()]
    found = agreement(model, answers(path, model.tokenizer, ids, 12))
    assert found.kl < 1e-6 and found.same_top == 1.0
    if change or "rope_freqs.weight" in tensors:  # and it matters
        assert np.abs(plain_logits(*ids[0]) - bj.logits(model, ids[0])).max() > 1e-2


@pytest.mark.slow  # on_eight_devices.py: pmap and shard_map draw one device's tokens
def test_rows_can_be_sharded_over_devices():
    """generate_tokens under shard_map on two fake CPU devices: each row as on one device."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import bonsai_jax as bj

model = bj.load("synth:tiny-llama:q8_0")
tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 16)), jnp.int32)
lengths = jnp.array([16, 9], jnp.int32)
mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
rows = P("rows")

def generate(params, tokens, lengths):
    greedy = bj.SamplingParams(temperature=0.0)
    state = bj.new_state(model, tokens.shape[0], 64, greedy, 12, ignore_eos=True)
    return bj.generate_tokens(params, state, tokens, lengths, model.config, size=12).tokens

sharded = jax.shard_map(generate, mesh=mesh, in_specs=(P(), rows, rows), out_specs=rows, check_vma=False)
one, two = (jax.jit(f)(model.params, tokens, lengths) for f in (generate, sharded))
np.testing.assert_array_equal(one, two)
in_pmap = jax.pmap(lambda t, n: generate(model.params, t, n))(tokens[:, None], lengths[:, None])
np.testing.assert_array_equal(one, in_pmap[:, 0])
print(len(jax.devices()), "devices agree")
"""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.stdout.strip() == "2 devices agree", done.stderr


def test_synthetic_weights_have_the_logits_that_they_promise():
    for source in ("synth:tiny-qwen3:q4_k_m", "synth:tiny-llama:q1_0", "synth:tiny-qwen2:tq2_0"):
        model = bj.load(source, bj.RunConfig(impl="reference", weights="packed"))
        scores = bj.logits(model, np.random.default_rng(2).integers(0, 512, 64).tolist())
        assert scores.std() >= 2 and jax.numpy.isfinite(scores).all()


@pytest.mark.parametrize("source", ["synth:tiny-qwen3moe:q4_k_m", "synth:tiny-qwen35:q1_0"])
def test_threads_that_load_a_gpu_s_layout_make_the_same_arrays(source, monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    run = bj.RunConfig(weights="packed")
    plan = load_plans.plan(architectures.describe(open_checkpoint(source)), run)
    one, eight = network_params.load(plan), network_params.load(plan, threads=8)
    assert jax.tree.structure(one) == jax.tree.structure(eight)
    assert any(part.tiled for part in one.layers["attention"][0].o.parts)
    for own, other in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
        np.testing.assert_array_equal(own, other)
