"""Hadamard-folded weights: a model folded here, row by row, by a function of the test, is the model itself;
and what is not known of the contract is refused."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.making import Importance
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, CheckpointError, Tensor, folding, open_checkpoint
from pallas_kernels import Rotation
from tests.bonsai_jax.test_speculation import two_layers

BLOCK = 128
PLAIN = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_conv1d.weight")


def transform(size: int) -> np.ndarray:
    """Sylvester's construction, normalized: [[H, H], [H, -H]]."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(size)


def array(t) -> np.ndarray:
    return np.asarray(blocks(t)).view(np.float32).reshape(t.shape).astype(np.float64)


def as_tensor(name: str, values: np.ndarray) -> Tensor:
    values = np.ascontiguousarray(values, np.float32)
    return Tensor(name, "f32", values.shape, values.view(np.uint8).reshape(*values.shape[:-1], -1))


@functools.cache
def plain(model: str) -> Checkpoint:
    """With its tensors drawn; of a hybrid a layer of each kind."""
    drawn = open_checkpoint(f"synth:{model}:f32")
    drawn = two_layers(drawn) if model == "tiny-qwen35" else drawn
    return dataclasses.replace(drawn, tensors={n: as_tensor(n, array(t)) for n, t in drawn.tensors.items()})


@functools.cache
def folded(model: str, block: int = BLOCK) -> Checkpoint:
    source, rng = plain(model), np.random.default_rng(5)
    named = [n for n, t in source.tensors.items() if len(t.shape) > 1 and not n.endswith(PLAIN)]
    widths = sorted({source.tensors[name].shape[-1] for name in named})
    signs = {width: rng.choice([-1, 1], width) for width in widths}
    tensors = dict(source.tensors)
    for name in named:
        w = array(tensors[name])
        if name.endswith("ssm_out.weight"):  # columns of v heads 0, 1, 2, 3 of k heads 0, 1, 0, 1: grouped
            w = w.reshape(len(w), 4, -1)[:, [0, 2, 1, 3]].reshape(w.shape)
        w = (w * signs[w.shape[-1]]).reshape(len(w), -1, block) @ transform(block)
        tensors[name] = as_tensor(name, w.reshape(tensors[name].shape))
    tied = "output.weight" not in tensors
    contract = {
        "version": 2 if tied else 1,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "block_size": block,
        "sign_mode": "explicit",
        "sign_widths": np.array(widths, np.int32),
        "sign_values": np.concatenate([signs[width] for width in widths]).astype(np.int32),
        "weight_names": [name for name in named if name != "token_embd.weight"],
        "inverse_weight_names": ["token_embd.weight"],
        "gdn_v_grouped": True,
    } | ({"tied_output": True} if tied else {})
    contract = {f"prism.hadamard.{key}": value for key, value in contract.items()}
    return dataclasses.replace(source, metadata=dict(source.metadata) | contract, tensors=tensors)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3", "tiny-qwen35", "tiny-qwen3moe"])
def test_a_folded_model_is_the_model(model):
    """Tied (qwen3) and not, with k and v in the same matrix as folded ones and beside plain ones (qwen35)."""
    prompt = np.random.default_rng(1).integers(0, 300, 12).tolist()
    run = bj.RunConfig(impl="reference")
    want, got = (bj.logits(bj.from_checkpoint(c, run), prompt) for c in (plain(model), folded(model)))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3", "tiny-qwen35", "tiny-qwen3moe"])
def test_a_file_that_quantize_folds_is_the_model(model, tmp_path):
    """In F32: the rotated rows in numpy, and the same logits. Embeddings and routers stay."""
    source, path = plain(model), tmp_path / "folded.gguf"
    changes = {change.name: change for change in bj.quantize_file(source, path, "f32", fold=BLOCK)}
    new = open_checkpoint(path)
    how = folding(new)
    assert how.block == BLOCK and how.weights == {name for name, change in changes.items() if change.rotated}
    assert not how.tables and not any("embd" in name or "gate_inp" in name for name in how.weights)
    for name, tensor in source.tensors.items():
        w = array(tensor)
        if name in how.weights:
            w = ((w * how.signs[w.shape[-1]]).reshape(-1, BLOCK) @ transform(BLOCK)).reshape(w.shape)
        np.testing.assert_allclose(array(new.tensors[name]), w, atol=1e-6)
    prompt, run = [5, 7, 11, 13, 17], bj.RunConfig(impl="reference")
    want, got = (bj.logits(bj.from_checkpoint(c, run), prompt) for c in (source, new))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    with pytest.raises(ValueError, match="its weights are rotated already"):
        bj.quantize_file(new, tmp_path / "twice.gguf", "f32", fold=BLOCK)


@pytest.mark.parametrize("block", [0, 1, 96, 1 << 20, 128.0, True])
def test_a_fold_that_does_not_fit_is_refused(block, tmp_path):
    with pytest.raises(ValueError, match="fold is "):
        bj.quantize_file(plain("tiny-llama"), tmp_path / "x.gguf", "q8_0", fold=block)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_folded(tmp_path):
    with pytest.raises(NotImplementedError, match=r"rotated weights are for llama, .*; this is gemma3"):
        bj.quantize_file(plain("tiny-gemma3"), tmp_path / "x.gguf", "q8_0", fold=64)
    importance = Importance("matrix.gguf", {})
    with pytest.raises(ValueError, match=r"matrix\.gguf: an importance matrix .* leave one of the two out"):
        bj.quantize_file(plain("tiny-llama"), tmp_path / "x.gguf", "q8_0", fold=64, importance=importance)


def test_the_same_codes_in_both_ternary_formats_are_the_same_model():
    """Each weight -1, 0 or 1 times a scale that both hold."""
    rng, pairs = np.random.default_rng(3), {}
    source = folded("tiny-qwen35")
    for name, t in source.tensors.items():
        if not source.tensors[name].name.endswith(PLAIN) and len(t.shape) == 2:
            codes = rng.integers(0, 3, (t.shape[0], t.shape[1] // 128, 128))
            scale = np.full((*codes.shape[:2], 1), 0.03, np.float16).view(np.uint8)
            by_place = codes.reshape(*codes.shape[:2], 32, 4) << np.array([0, 2, 4, 6])
            two_bits = np.concatenate([scale, by_place.sum(-1).astype(np.uint8)], axis=-1)
            pairs[name] = two_bits, np.concatenate([_base_3(codes), scale], axis=-1)
    logits = []
    for which, format in enumerate(("pq2_0", "ptq1_0")):
        tensors = dict(source.tensors)
        for name, both in pairs.items():
            shape = tensors[name].shape
            tensors[name] = Tensor(name, format, shape, both[which].reshape(shape[0], -1))
        model = bj.from_checkpoint(
            dataclasses.replace(source, tensors=tensors), bj.RunConfig(impl="reference", weights="decoded")
        )
        logits.append(bj.logits(model, [1, 2, 3, 4, 5]))
    np.testing.assert_array_equal(*logits)


def _base_3(codes: np.ndarray) -> np.ndarray:
    """Bytes of PTQ1_0: the smallest whose five (of the last two, four) highest base-3 digits are these."""
    parts = [(codes[..., :80].reshape(*codes.shape[:2], 5, 16), 5)]
    parts += [(codes[..., 80:120].reshape(*codes.shape[:2], 5, 8), 5)]
    parts += [(codes[..., 120:].reshape(*codes.shape[:2], 4, 2), 4)]
    found = []
    for digits, count in parts:
        number = sum(digits[..., t, :] * 3 ** (4 - t) for t in range(count))
        found.append(-(-number * 256 // 243))
    return np.concatenate(found, axis=-1).astype(np.uint8)


def test_a_rotation_is_its_formula_and_its_own_inverse():
    rng = np.random.default_rng(0)
    x, signs = rng.standard_normal((3, 256)), rng.choice([-1.0, 1.0], 256)
    rotation = Rotation(jnp.asarray(signs, jnp.float32), 64)
    want = ((x * signs).reshape(3, 4, 64) @ transform(64)).reshape(3, 256)
    np.testing.assert_allclose(rotation(jnp.asarray(x)), want, atol=1e-5)
    np.testing.assert_allclose(rotation.back(rotation(jnp.asarray(x))), x, atol=1e-5)


def test_a_file_without_a_contract_is_not_folded():
    assert folding(plain("tiny-llama")) is None
    found = folding(folded("tiny-qwen35"))
    assert found.block == BLOCK and found.v_grouped and "blk.0.ssm_out.weight" in found.weights
    assert sorted(found.signs) == [256, 512] and found.tables == {"token_embd.weight"}


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("version", 3, "version is 3; supported: 1, 2"),
        ("transform", "dct", "transform is 'dct'; supported: normalized-sylvester"),
        ("axis", "output", "axis is 'output'; supported: input-last-dimension"),
        ("sign_mode", "random", "sign_mode is 'random'; supported: identity, explicit"),
        ("block_size", 96, "block_size is 96; a power of two"),
        ("block_size", 1024, "block_size is 1024; it must divide the 256 inputs of blk.0"),
        ("sign_widths", [256, 128], r"sign_widths is \[256, 128\]; .* has 512 inputs"),
        ("sign_values", np.ones(5, np.int32), r"sign_values is \[5\]; 768 values"),
        ("sign_values", np.full(768, 2, np.int32), "sign_values is 2.0; each must be 1 or -1"),
        ("weight_names", ["blk.0.nothing.weight"], "weight_names is 'blk.0.nothing.weight'; each must name"),
        ("inverse_weight_names", ["blk.0.ffn_up.weight"], "inverse_weight_names is 'blk.0.ffn_up.weight'"),
        ("tied_output", True, "tied_output is True; version 2 and tied_output go with"),
        ("gdn_v_grouped", "yes", "gdn_v_grouped is 'yes'; true or false"),
        ("rows", 3, "rows is 3; an unknown key"),
        ("version", True, "version is True; supported: 1, 2"),
        ("sign_mode", "identity", "sign_mode is 'identity'; with it sign_values are absent, or all 1"),
        ("sign_widths", 768, "sign_widths is 768; a list of widths"),
        ("sign_widths", [512, 512], r"sign_widths is \[512, 512\]; each width must be given once"),
        ("sign_values", ["+"] * 768, r"sign_values is \['\+', .*; a list of numbers is expected"),
        ("weight_names", "blk.0.ffn_up.weight", "weight_names is 'blk.0.ffn_up.weight'; a list of names"),
        ("axis", None, "axis is missing"),
    ],
)
def test_a_contract_that_is_not_known_in_every_detail_is_refused(key, value, says):
    source = folded("tiny-qwen35")
    metadata = dict(source.metadata) | {f"prism.hadamard.{key}": value}
    if key == "sign_widths":
        metadata["prism.hadamard.sign_values"] = np.ones(np.sum(value), np.int32)
    metadata = {name: v for name, v in metadata.items() if v is not None}
    with pytest.raises(CheckpointError, match=rf"prism\.hadamard\.{says}"):
        bj.from_checkpoint(dataclasses.replace(source, metadata=metadata))
