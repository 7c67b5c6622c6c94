"""Folders as GGUF files and back: names, values and settings, llama.cpp's answers, options and errors."""

import dataclasses
import errno
import json
import os
import re
import shutil

import gguf
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.making import convert, streaming, stretched, transformers_keys
from bonsai_jax.network import architectures
from checkpoints import CheckpointError, Streamed, Tensor, open_checkpoint, write_folder
from tests.agreement import agreement
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.converting import CASES, assert_one_model, drawn, with_tokenizer
from tests.bonsai_jax.test_oracle import answers, as_file
from tests.bonsai_jax.tiny_files import logits

SLOW = pytest.mark.slow
NOT_IN_LLAMA_CPP = ("deepseek2: V2 Lite, two layers",)  # which knows it by its 27 layers
PROMPT = np.random.default_rng(40).integers(0, 256, 40).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny Llama as a folder and as a GGUF file, in BF16."""
    folder = tmp_path_factory.mktemp("convert")
    source = as_file("synth:tiny-llama:bf16", folder / "source.gguf")
    convert(source, folder / "folder")
    convert(folder / "folder", folder / "tiny.gguf")
    return folder


# Relatives of these run daily.
SIMILAR = (
    *("minicpm", "dots1", "olmoe", "qwen2vl", "granitemoe", "hunyuan-moe", "31b", "tiny-gemma2", "V2 Lite"),
    *("tiny-exaone4", "tiny-olmo2", "tiny-qwen2moe", "tiny-glm4moe", "tiny-minimax-m2", "qwen3moe: qwen3moe"),
)
FOLDERS = [pytest.param(name, marks=[SLOW] * any(own in name for own in SIMILAR)) for name in CASES]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_becomes_the_gguf_file_and_comes_back(name, tmp_path):
    case = CASES[name]
    folder, original = with_tokenizer(case.folder(), tmp_path / "folder"), case.gguf()
    made = convert(folder, tmp_path / "tiny.gguf")
    assert made.naming == "gguf" and made.architecture == original.metadata["general.architecture"]
    new = open_checkpoint(tmp_path / "tiny.gguf")
    assert_one_model(original, new)
    assert_names_of_llama_cpp(folder, made, new)
    convert(new, tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    if "falcon" in name:  # its multipliers are in the GGUF file's weights
        np.testing.assert_allclose(logits(back, PROMPT), logits(folder, PROMPT), atol=2e-5)
    else:
        assert_one_model(folder, back)


def assert_names_of_llama_cpp(folder, made, new) -> None:
    """Names are those of its converter, by the gguf package's table, which knows the folder's."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == made.architecture)
    table, known = gguf.get_tensor_name_map(kind, 80), 0
    for own in folder.tensors:
        plain = re.sub(r"experts\.\d+\.", "experts.", own.replace("language_model.", ""))
        each = (plain, plain.removeprefix("transformer."))
        theirs = next((t for one in each if (t := table.get_name(one, (".weight", ".bias")))), None)
        # Matrices that a converter cuts into two, and one that nobody reads.
        if (
            theirs is None
            or own.endswith(("kv_b_proj.weight", "gate_up_proj"))
            or "3.self_attn.k_proj" in own
        ):
            continue
        known += 1
        assert {theirs, f"{theirs}.weight", f"{theirs}.bias"} & new.tensors.keys(), own
    assert known > 0.4 * len(folder.tensors)


ORACLE = [pytest.param(name, marks=[] if "internlm2" in name else SLOW) for name in CASES]


@pytest.mark.parametrize("name", ORACLE)
def test_logits_are_those_of_the_folder_and_of_llama_cpp(name, tmp_path):
    folder = with_tokenizer(CASES[name].folder(), tmp_path / "folder")
    convert(folder, path := tmp_path / "tiny.gguf")
    new = open_checkpoint(path)
    np.testing.assert_allclose(logits(new, PROMPT), logits(folder, PROMPT), atol=1e-5)
    model = bj.from_checkpoint(new, bj.RunConfig(impl="reference", page_size=16))
    if name in NOT_IN_LLAMA_CPP:
        return
    rows = answers(path, model.tokenizer, [PROMPT], 4)
    got = agreement(model, rows, padded=True)
    # llama.cpp rounds what it multiplies with MXFP4.
    assert got.kl < (1e-3 if "gpt-oss" in name else 1e-6) and got.same_top == 1


SYNTH = {
    "llama": [], "qwen35": [], "mistral3": [], "phi4": [SLOW], "arcee": [SLOW], "qwen3": [SLOW],
    "qwen2": [SLOW], "smollm3": [SLOW], "granite": [SLOW], "seed-oss": [SLOW], "glm4": [SLOW],
    "ernie4.5": [SLOW], "hunyuan": [SLOW], "maple": [SLOW], "qwen35moe": [SLOW], "qwen3next": [SLOW],
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in SYNTH.items()])
def test_a_gguf_file_becomes_a_folder_and_comes_back(name, tmp_path, monkeypatch):
    """Its settings and its values, and llama.cpp reads what came back."""
    if name == "maple":
        monkeypatch.setattr(
            architectures.get("maple"), "LIMIT", 0.5
        )  # the tiny model's, which no folder says
    original = drawn(open_checkpoint(f"synth:tiny-{name}:f32"))
    convert(as_file(original, tmp_path / "a.gguf"), tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "b.gguf")
    new = open_checkpoint(tmp_path / "b.gguf")
    assert_one_model(original, new)
    folder = open_checkpoint(tmp_path / "folder")
    np.testing.assert_allclose(logits(folder, PROMPT), logits(original, PROMPT), atol=2e-5)
    if name == "phi4":
        return  # a file of phi3 needs Phi-3's special tokens in llama.cpp
    model = bj.from_checkpoint(new, bj.RunConfig(impl="reference", page_size=16))
    got = agreement(model, answers(tmp_path / "b.gguf", model.tokenizer, [PROMPT], 4), padded=True)
    assert got.kl < 1e-6 and got.same_top == 1


def values(t) -> np.ndarray:
    return np.ascontiguousarray(t.data).view(np.uint8)


def test_bf16_is_copied(tiny):
    """In a folder small arrays are BF16 too where that is exact; the GGUF file's are F32."""
    folder, back = open_checkpoint(tiny / "folder"), open_checkpoint(tiny / "tiny.gguf")
    source = open_checkpoint(tiny / "source.gguf")
    assert {t.format for t in back.tensors.values()} == {"f32", "bf16"}
    for name, t in source.tensors.items():
        np.testing.assert_array_equal(values(back.tensors[name]), values(t))
    matrices = {name: t for name, t in folder.tensors.items() if len(t.shape) == 2}
    assert {t.format for t in matrices.values()} == {"bf16"}
    assert folder.metadata["model_type"] == "llama" and folder.metadata["torch_dtype"] == "bfloat16"
    assert folder.metadata["rms_norm_eps"] == 1e-5 and folder.metadata["tie_word_embeddings"] is False


@pytest.mark.parametrize("format", ["f16", "f32", "q8_0"])
def test_the_format_of_matrices(format, tiny, tmp_path):
    """By the gguf package's rounding; Q8_0 as `quantize` writes it."""
    convert(tiny / "folder", tmp_path / "a.gguf", format=format)
    made, source = open_checkpoint(tmp_path / "a.gguf"), open_checkpoint(tiny / "source.gguf")
    kind = gguf.GGMLQuantizationType[format.upper()]
    for name, t in source.tensors.items():
        if len(t.shape) == 2:
            wide = (values(t).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(t.shape)
            want = np.ascontiguousarray(gguf.quants.quantize(wide, kind)).view(np.uint8)
            np.testing.assert_array_equal(values(made.tensors[name]).reshape(-1), want.reshape(-1))
            assert made.tensors[name].format == format
    file_type = {"f16": 1, "f32": 0, "q8_0": 7}[format]
    assert made.metadata["general.file_type"] == file_type


def test_a_quantized_file_becomes_f16(tmp_path):
    """Q1_0's values are exact in it."""
    source = as_file("synth:tiny-qwen3:q1_0", tmp_path / "a.gguf")
    convert(source, tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    assert folder.tensors["model.layers.0.self_attn.q_proj.weight"].format == "f16"
    np.testing.assert_array_equal(logits(folder, PROMPT), logits(open_checkpoint(source), PROMPT))


def test_experts_in_mxfp4_stay_so(tmp_path):
    source = as_file("synth:tiny-gpt-oss:mxfp4", tmp_path / "a.gguf")
    convert(source, tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "b.gguf")
    before, after = (open_checkpoint(tmp_path / f"{name}.gguf") for name in "ab")
    for name, t in before.tensors.items():
        if t.format == "mxfp4" and "_exps" in name:
            np.testing.assert_array_equal(values(after.tensors[name]), values(t))
    with pytest.raises(NotImplementedError, match=r"is f16; a folder of .* has its experts in mxfp4"):
        convert(as_file("synth:tiny-gpt-oss:f16", tmp_path / "c.gguf"), tmp_path / "other")


def test_weights_that_f16_cannot_hold_are_named(tmp_path):
    file = drawn(open_checkpoint("synth:tiny-llama:f32"))
    t = file.tensors["blk.1.ffn_up.weight"]
    large = np.array(t.data.view(np.float32)) * 1e6
    file.tensors[t.name] = Tensor(t.name, "f32", t.shape, large.view(np.uint8))
    source = as_file(file, tmp_path / "a.gguf")
    with pytest.raises(
        CheckpointError, match=r"a\.gguf: blk\.1\.ffn_up\.weight has weights .* larger than F16 holds"
    ):
        convert(source, tmp_path / "folder", format="f16")
    assert sorted(os.listdir(tmp_path)) == ["a.gguf"]


def test_large_tensors_are_made_in_pieces(tiny, monkeypatch):
    """Of a few million weights at most, whatever their size; here of less."""
    monkeypatch.setattr(streaming, "PIECES", (1 << 10, 1 << 12))
    sizes, total = [], []

    def watch(done, of_all):
        sizes.append(done - sum(sizes))
        total.append(of_all)

    convert(tiny / "folder", tiny / "pieces.gguf", format="q8_0", progress=watch)
    assert max(sizes) <= 1 << 12 and sum(sizes) == total[-1]
    assert len({*total}) == 1
    whole = convert(tiny / "folder", tiny / "whole.gguf", format="q8_0")
    assert sum(change.weights for change in whole.changes) == total[0]
    assert (tiny / "pieces.gguf").read_bytes() == (tiny / "whole.gguf").read_bytes()


def test_many_gigabytes_become_several_files(tmp_path):
    tensors = [
        Streamed(f"t{i}", "f16", (4, 8), lambda i=i: [np.full((4, 16), i, np.uint8)]) for i in range(5)
    ]
    write_folder(tmp_path / "folder", {"config.json": {}}, tensors, most_bytes=150)
    names = sorted(path.name for path in (tmp_path / "folder").glob("*.safetensors"))
    assert names == [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    read = open_checkpoint(tmp_path / "folder").tensors
    assert [int(read[f"t{i}"].data[0, 0]) for i in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("to_folder", [False, True])
def test_what_fails_leaves_nothing_and_replaces_nothing(to_folder, tiny, tmp_path):
    """An interrupted run, a full disk; and what is there is kept without --overwrite."""
    source, path = (tiny / "tiny.gguf" if to_folder else tiny / "folder"), tmp_path / "out"

    def interrupt(done, total):
        raise KeyboardInterrupt

    def fill(done, total):
        raise OSError(errno.ENOSPC, "No space left on device")

    for failure, error in ((interrupt, KeyboardInterrupt), (fill, OSError)):
        with pytest.raises(error) as raised:
            convert(source, path, progress=failure)
        assert os.listdir(tmp_path) == []
        assert error is not OSError or raised.value.filename == str(path)
    convert(source, path)
    with pytest.raises(FileExistsError, match="is there already; name another, or replace it: --overwrite"):
        convert(source, path)
    with pytest.raises(KeyboardInterrupt):
        convert(source, path, overwrite=True, progress=interrupt)
    assert os.listdir(tmp_path) == ["out"] and open_checkpoint(path).tensors
    convert(source, path, overwrite=True, format="f32")
    formats = {t.format for t in open_checkpoint(path).tensors.values()}
    assert os.listdir(tmp_path) == ["out"] and formats <= {"f32", "bf16"}


def test_errors_of_paths_and_of_what_cannot_be_said(tiny, tmp_path):
    def refused(error, message, *arguments, **options):
        with pytest.raises(error, match=message):
            convert(*arguments, **options)

    refused(CheckpointError, "no such file", tmp_path / "none", tmp_path / "x.gguf")
    refused(
        FileNotFoundError, "there is no folder .*/no; make it first", tiny / "folder", tmp_path / "no" / "x"
    )
    refused(
        FileNotFoundError,
        "there is no folder .*/no; make it first",
        tiny / "tiny.gguf",
        tmp_path / "no" / "x",
    )
    refused(IsADirectoryError, "is a folder; name a file in it", tiny / "folder", tmp_path)
    (tmp_path / "file").write_text("")
    refused(
        FileExistsError, "is a file, and a GGUF file becomes a folder", tiny / "tiny.gguf", tmp_path / "file"
    )
    refused(FileExistsError, "has no config.json", tiny / "tiny.gguf", tmp_path, overwrite=True)
    refused(ValueError, "format is 'q4_0'; one of auto, f16", tiny / "folder", tmp_path / "x", format="q4_0")
    refused(ValueError, "q8_0 is for GGUF files", tiny / "tiny.gguf", tmp_path / "x", format="q8_0")
    refused(NotImplementedError, "is no file: its weights are drawn", "synth:tiny-llama:f32", tmp_path / "x")
    bitnet = as_file("synth:tiny-bitnet:f32", tmp_path / "bitnet.gguf")
    refused(NotImplementedError, "has the weights of its training", bitnet, tmp_path / "x")

    folder = tmp_path / "folder"
    convert(tiny / "tiny.gguf", folder)
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"model_type": "gpt_neox"}, "architecture 'gpt_neox'"),
        (
            {"sliding_window": 64, "layer_types": None},
            "a GGUF file of llama cannot say what this model is: window is 64",
        ),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        refused(NotImplementedError, message, folder, tmp_path / "x")
    (folder / "config.json").write_text(json.dumps(config))
    inside = as_file("synth:tiny-llama:f16", folder / "model.gguf")
    refused(FileExistsError, "in it, which would be replaced too", inside, folder, overwrite=True)
    (folder / "tokenizer.json").unlink()
    refused(ValueError, "tokenizer.json is missing", folder, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_ropes_of_which_some_are_stretched_are_refused():
    """No architecture that runs has such layers in both kinds of file."""
    config = architectures.config_of(open_checkpoint("synth:tiny-llama:f32"))

    def llama3(rope):
        return dataclasses.replace(rope, scaling="llama3", factor=8.0, original_context=64)

    all_layers = stretched.with_ropes(config, llama3)
    some = dataclasses.replace(config, layers=(all_layers.layers[0], *config.layers[1:]))
    stretched.check_divided("folder", all_layers, config)
    stretched.check_divided("folder", config, config)
    with pytest.raises(NotImplementedError, match="folder: some of its layers' ropes are stretched"):
        stretched.check_divided("folder", some, config)


def test_the_scaling_of_llama_3_is_a_tensor_in_gguf_files(tiny, tmp_path):
    """Divisors, of which its settings come back."""
    folder = tmp_path / "folder"
    shutil.copytree(tiny / "folder", folder)
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 1024
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    convert(folder, tmp_path / "a.gguf")
    divisors = open_checkpoint(tmp_path / "a.gguf").tensors["rope_freqs.weight"].data.view(np.float32)
    assert divisors.shape == (32,) and divisors[0] == 1 and divisors[-1] == pytest.approx(32)
    convert(tmp_path / "a.gguf", tmp_path / "back")
    assert open_checkpoint(tmp_path / "back").metadata["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_moe", "Qwen3Moe"),
        ("qwen3_5_moe_text", "Qwen3_5Moe"),
        ("ernie4_5", "Ernie4_5"),
        ("falcon_h1", "FalconH1"),
        ("hunyuan_v1_moe", "HunYuanMoEV1"),
        ("gemma4_text", "Gemma4"),
    ],
)
def test_the_class_of_transformers_is_named(model_type, name):
    assert transformers_keys.architectures(model_type) == [f"{name}ForCausalLM"]


def test_a_folder_says_what_only_transformers_asks_for(tiny):
    """Its own defaults would be of other models; test_transformers_convert.py has it read the folders."""
    config = json.loads((tiny / "folder" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["sliding_window"] is None and {*config["layer_types"]} == {"full_attention"}
    assert {"bos_token_id", "eos_token_id", "pad_token_id"} <= config.keys()
    assert transformers_keys.architectures("maple") is None


def test_the_command(tiny, tmp_path):
    made = run("convert", tiny / "folder", tmp_path / "a.gguf", "--format", "Q8_0")
    assert made.exit_code == 0, made.output
    assert re.search(r"a\.gguf: a GGUF file of llama, 30 tensors \(23 q8_0, 7 f32\), .* MB in", made.stdout)
    figures = json.loads(run("convert", tmp_path / "a.gguf", tmp_path / "folder", "--json").stdout)
    assert figures["naming"] == "huggingface" and figures["architecture"] == "llama"
    assert figures["tensors_by_format"].keys() <= {"f16", "f32"}
    again = run("convert", tiny / "folder", tmp_path / "a.gguf")
    assert again.exit_code == 1 and again.stderr.count("\n") == 1 and "--overwrite" in again.stderr
