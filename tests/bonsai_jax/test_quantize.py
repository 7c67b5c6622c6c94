"""Files in other formats: mixes, bytes, errors, and what llama.cpp makes of them."""

import functools
import json

import gguf
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.making import planned, quantize_file, recipes
from checkpoints import CheckpointError, Tensor, open_checkpoint, write_gguf
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.test_oracle import as_file
from tests.pallas_kernels import ggml_quantize
from tests.pallas_kernels.test_encoders import ONE_RULE


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A tiny Qwen 3 in F32: three layers, rows of 256 and 512."""
    return as_file("synth:tiny-qwen3:f32", tmp_path_factory.mktemp("quantize") / "tiny.gguf")


def named(layers: int, *, tied: bool = False) -> list[Tensor]:
    """Tensors of a Llama, without their weights."""

    def one(name, *shape):
        return Tensor(name, "f16", shape, np.zeros(0, np.uint8))

    tensors = [one("token_embd.weight", 512, 256), one("output_norm.weight", 256)]
    tensors += [] if tied else [one("output.weight", 512, 256)]
    for i in range(layers):
        matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        tensors += [one(f"blk.{i}.{name}.weight", 256, 256) for name in matrices]
        tensors += [one(f"blk.{i}.attn_norm.weight", 256), one(f"blk.{i}.ffn_gate_inp.weight", 8, 256)]
    return tensors


METADATA = {
    "general.architecture": "llama", "llama.block_count": 32,
    "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8,
}  # fmt: skip


def mix(name: str, *, tied: bool = False, **how) -> dict[str, str]:
    return recipes.formats_of(named(32, tied=tied), METADATA, recipes.recipe(name), **how)


# Layers whose values (attn_v) and down matrices are better than the rest, by llama.cpp's rules for a model
# with 32 layers, in which 4 heads share one of keys and values (Llama 3 8B).
MORE_BITS = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
ALL, FIRST, TWO, MIDDLE = range(32), range(4), range(2), range(4, 28)
# Of the output matrix and of embeddings, where they are not Q6_K and the mix's own format.
OUTPUTS = dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_S", "IQ2_M", "IQ3_XXS"), "q5_k")
EMBEDDINGS = {"TQ2_0": "q4_k", **dict.fromkeys(("IQ1_S", "IQ2_XXS"), "q2_k")}
EMBEDDINGS |= dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "iq3_s")


def layers(*given) -> dict[int, str]:
    """{layer: format} of (layers, format)."""
    return {layer: format for some, format in given for layer in some}


FIVE_AND_FOUR = layers((ALL, "q4_k"), (TWO, "q5_k"))
BETTER = {
    "Q4_K_M": ("q4_k", dict.fromkeys(("attn_v", "ffn_down"), layers((MORE_BITS, "q6_k")))),
    "Q5_K_M": ("q5_k", dict.fromkeys(("attn_v", "ffn_down"), layers((MORE_BITS, "q6_k")))),
    "Q4_K_S": ("q4_k", dict.fromkeys(("attn_v", "ffn_down"), layers((FIRST, "q5_k")))),
    "Q3_K_M": ("q3_k", {
        "attn_v": FIVE_AND_FOUR, "ffn_down": FIVE_AND_FOUR, "attn_output": layers((ALL, "q4_k")),
    }),
    "Q2_K": ("q2_k", {
        "attn_v": layers((ALL, "q4_k")), "ffn_down": layers((ALL, "q3_k")),
        "attn_output": layers((ALL, "q3_k")),
    }),
    "IQ4_XS": ("iq4_xs", {"attn_v": layers((ALL, "q5_k")), "ffn_down": layers((FIRST, "q5_k"))}),
    "IQ1_S": ("iq1_s", {
        "attn_v": layers((ALL, "q4_k")), "ffn_down": layers((FIRST, "q2_k")),
        "attn_output": layers((ALL, "iq2_xxs")),
    }),
    "IQ2_XXS": ("iq2_xxs", {"attn_v": layers((ALL, "q4_k")), "ffn_down": layers((FIRST, "q2_k"))}),
    "IQ2_S": ("iq2_xs", {
        "attn_v": layers((ALL, "q4_k")), "ffn_down": layers((FIRST, "iq3_s")),
        "attn_output": layers((ALL, "iq3_s")),
    }),
    "IQ2_M": ("iq2_s", {
        "attn_v": layers((ALL, "q4_k")), "ffn_down": layers((FIRST, "iq3_s")),
        "attn_output": layers((ALL, "iq3_s")),
    }),
    "IQ3_XXS": ("iq3_xxs", {
        "attn_q": layers((ALL, "iq2_s")), "attn_k": layers((ALL, "iq2_s")), "attn_v": layers((ALL, "q4_k")),
        "ffn_down": layers((ALL, "q3_k"), (FIRST, "q4_k")), "attn_output": layers((ALL, "iq3_s")),
    }),
    "IQ3_XS": ("iq3_s", {
        "attn_q": layers((ALL, "iq3_xxs")), "attn_k": layers((ALL, "iq3_xxs")),
        "attn_v": layers((ALL, "q4_k")),
        "ffn_gate": layers((MIDDLE, "iq3_xxs")), "ffn_up": layers((MIDDLE, "iq3_xxs")),
    }),
    "IQ3_S": ("iq3_s", {"attn_v": layers((ALL, "q4_k"))}),
    "IQ3_M": ("iq3_s", {
        "attn_v": layers((ALL, "q4_k")), "ffn_down": layers((FIRST, "q4_k")),
        "attn_output": layers((ALL, "q4_k")),
    }),
    "Q6_K": ("q6_k", {}),
    "TQ2_0": ("tq2_0", {}),
    "Q1_0": ("q1_0", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BETTER)
def test_mixes_are_llama_cpp_s(name):
    base, better = BETTER[name]
    found = mix(name)
    assert found["output.weight"] == OUTPUTS.get(name, "q6_k")
    assert found["token_embd.weight"] == EMBEDDINGS.get(name, base)
    assert (
        found["output_norm.weight"]
        == found["blk.0.attn_norm.weight"]
        == found["blk.3.ffn_gate_inp.weight"]
        == "f16"
    )
    for layer in range(32):
        for matrix in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            expected = better.get(matrix, {}).get(layer, base)
            assert found[f"blk.{layer}.{matrix}.weight"] == expected, (layer, matrix)


def test_embeddings_that_are_the_output_matrix_too_are_better():
    assert mix("q4_k_m", tied=True)["token_embd.weight"] == "q6_k"
    assert mix("q8_0", tied=True)["token_embd.weight"] == "q8_0"


def test_pure_and_chosen_formats():
    found = mix("q4_k_m", pure=True)
    assert (
        {found[f"blk.0.{name}.weight"] for name in ("attn_v", "ffn_down")}
        == {found["output.weight"]}
        == {"q4_k"}
    )
    found = mix(
        "q4_k_m", chosen=[(r"blk\.[01]\.attn_v", "Q8_0"), ("attn_v", "q5_0"), ("output_norm", "q4_0")]
    )
    assert [found[f"blk.{i}.attn_v.weight"] for i in range(3)] == ["q8_0", "q8_0", "q5_0"]
    assert found["output_norm.weight"] == "f16"


def test_one_name_for_a_format_and_for_a_mix_with_another():
    found = mix("q4_k_m", chosen=[("attn_q", "IQ2_S"), ("attn_k", "q2_0"), ("ffn_up", "q5_k_m")])
    assert [found[f"blk.9.{name}.weight"] for name in ("attn_q", "attn_k", "ffn_up")] == [
        "iq2_s",
        "q2_0_g64",
        "q5_k",
    ]


def test_an_importance_matrix_changes_the_mix_of_iq3_xxs():
    found = mix("iq3_xxs", weighted=True)
    assert {found[f"blk.{i}.ffn_down.weight"] for i in ALL} == {"iq3_xxs"}


def test_rows_that_blocks_do_not_divide_get_smaller_blocks():
    odd = [Tensor(f"blk.0.{name}.weight", "f32", (64, columns), np.zeros(0, np.uint8))
           for name, columns in (("attn_q", 96), ("attn_k", 24), ("ffn_up", 256))]  # fmt: skip
    for name, expected in {
        "q4_k_s": ("q5_0", "f16", "q4_k"), "q5_k_s": ("q5_1", "f16", "q5_k"), "q6_k": ("q8_0", "f16", "q6_k"),
        "q2_k": ("q4_0", "f16", "q2_k"), "iq4_xs": ("iq4_nl", "f16", "iq4_xs"),
        "iq2_xxs": ("iq4_nl", "f16", "iq2_xxs"), "iq3_s": ("iq4_nl", "f16", "iq3_s"),
        "q1_0": ("q4_0", "f16", "q1_0"),
    }.items():  # fmt: skip
        found = recipes.formats_of(odd, METADATA, recipes.recipe(name))
        assert tuple(found.values()) == expected, name


@pytest.mark.parametrize("format", ["Q8_0", "q4_k_m", "q1_0"])
def test_a_file_has_ggml_s_blocks_and_the_metadata(original, tmp_path, format):
    changes = quantize_file(original, tmp_path / "new.gguf", format)
    before, after = open_checkpoint(original), open_checkpoint(tmp_path / "new.gguf")
    assert [(t.name, t.shape, t.format) for t in after.tensors.values()] == [
        (c.name, c.shape, c.after) for c in changes
    ]
    for name, tensor in after.tensors.items():
        stored = before.tensors[name]
        if tensor.format == "f32":
            np.testing.assert_array_equal(tensor.data, stored.data)
            continue
        x = np.asarray(stored.data).view(np.float32)
        same = (ggml_quantize.quantize(x, tensor.format) == tensor.data).mean()
        assert same == 1 if tensor.format in ONE_RULE else same > 0.98, (name, same)
    own = {"general.file_type", "general.quantization_version"}
    assert {k: v for k, v in after.metadata.items() if k not in own}.keys() >= before.metadata.keys() - own
    assert after.metadata["general.file_type"] == {"Q8_0": 7, "q4_k_m": 15, "q1_0": 40}[format]
    assert after.metadata["general.quantization_version"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["new.gguf"]


def test_others_open_it_and_answers_are_near_the_original_s(original, tmp_path):
    """Opened by the gguf package, run by llama.cpp (which ends this process for a file that it does not
    like), and by us."""
    from tests.bonsai_jax.llama_cpp import LlamaCpp

    quantize_file(original, tmp_path / "new.gguf", "q6_k")
    reader = gguf.GGUFReader(tmp_path / "new.gguf")
    assert {t.tensor_type.name for t in reader.tensors} == {"Q6_K", "F32"}
    row = LlamaCpp(tmp_path / "new.gguf").greedy([5, 6, 7, 8], 4, readable=300)
    assert len(row["tokens"]) == 4
    ids = np.random.default_rng(0).integers(0, 256, 40).tolist()
    exact, near = (
        bj.logits(bj.load(str(path), bj.RunConfig(impl="reference", cache_dtype="float32")), ids)
        for path in (original, tmp_path / "new.gguf")
    )
    error = np.square(exact - near).mean() / exact.var()
    assert 0 < error < 0.01


def test_weights_that_are_quantized_already_are_taken_only_if_asked(tmp_path):
    source = as_file("synth:tiny-llama:q8_0", tmp_path / "old.gguf")
    with pytest.raises(ValueError, match=r"is q8_0 already.*--allow-requantize"):
        quantize_file(source, tmp_path / "new.gguf", "q4_0")
    quantize_file(source, tmp_path / "new.gguf", "q4_0", requantize=True)
    assert open_checkpoint(tmp_path / "new.gguf").tensors["blk.0.attn_q.weight"].format == "q4_0"
    quantize_file(source, tmp_path / "same.gguf", "q8_0")  # nothing changes
    assert open_checkpoint(tmp_path / "same.gguf").tensors.keys() == open_checkpoint(source).tensors.keys()


def with_weights(original, path, change):
    checkpoint = open_checkpoint(original)

    def tensors():
        for t in checkpoint.tensors.values():
            data = np.array(t.data)
            if t.name == "blk.1.ffn_up.weight":
                change(data.view(np.float32))
            yield Tensor(t.name, t.format, t.shape, data)

    write_gguf(path, checkpoint.metadata, tensors())
    return path


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_named_and_no_file_is_left(original, tmp_path, bad):
    def change(x):
        x[7, 9] = bad

    source = with_weights(original, tmp_path / "bad.gguf", change)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight has weights that are NaN or infinite"):
        quantize_file(source, tmp_path / "new.gguf", "q4_k_m")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_what_cannot_be_read_or_written_is_told(original, tmp_path):
    (tmp_path / "there.gguf").write_bytes(b"mine")
    write = functools.partial(quantize_file, original)
    with pytest.raises(FileExistsError, match=r"is there already.*--overwrite"):
        write(tmp_path / "there.gguf", "q8_0")
    assert (tmp_path / "there.gguf").read_bytes() == b"mine"
    with pytest.raises(FileNotFoundError, match="no folder"):
        write(tmp_path / "nowhere" / "new.gguf", "q8_0")
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        write(tmp_path, "q8_0")
    with pytest.raises(ValueError, match="'q9_k' is not known; known are bf16"):
        write(tmp_path / "new.gguf", "q9_k")
    with pytest.raises(
        ValueError, match=r"attn_q\.weight: iq2_xs needs an .* `bonsai-jax imatrix` .* --imatrix"
    ):
        write(tmp_path / "new.gguf", "IQ2_XS")
    with pytest.raises(ValueError, match="no regular expression"):
        write(tmp_path / "new.gguf", "q8_0", tensor_formats=[("(", "q8_0")])
    with pytest.raises(NotImplementedError, match="drawn when it is loaded"):
        quantize_file("synth:tiny-llama:f32", tmp_path / "new.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["there.gguf"]
    quantize_file(original, tmp_path / "there.gguf", "q8_0", overwrite=True)
    assert open_checkpoint(tmp_path / "there.gguf").metadata["general.file_type"] == 7


def test_the_command(original, tmp_path):
    path = tmp_path / "new.gguf"
    dry = run("quantize", original, path, "q4_k_m", "--dry-run", "--json", "--tensor-type", "attn_q=q8_0")
    assert dry.exit_code == 0, dry.stderr
    figures = json.loads(dry.stdout)
    assert not path.exists()
    done = run("quantize", original, path, "q4_k_m", "--tensor-type", "attn_q=q8_0")
    assert done.exit_code == 0, done.stderr
    assert "bits a weight" in done.stdout and str(path) in done.stdout
    stored = open_checkpoint(path).tensors
    assert {t["name"]: t["after"] for t in figures["tensors"]} == {
        name: t.format for name, t in stored.items()
    }
    assert figures["bytes_after"] == sum(t.nbytes for t in stored.values())
    assert stored["blk.0.attn_q.weight"].format == "q8_0"
    again = run("quantize", original, path, "q4_k_m")
    assert again.exit_code == 1 and "--overwrite" in again.stderr and "\n" not in again.stderr.strip()
    wrong = run("quantize", original, path, "q4_k_m", "--tensor-type", "attn_q")
    assert wrong.exit_code == 2 and "REGEX=FORMAT" in wrong.stderr


def test_progress_counts_every_weight(original, tmp_path):
    seen = []
    quantize_file(
        original, tmp_path / "new.gguf", "q8_0", progress=lambda done, total: seen.append((done, total))
    )
    total = sum(change.weights for change in planned(original, "q8_0"))
    assert seen[-1] == (total, total) and seen == sorted(seen)
