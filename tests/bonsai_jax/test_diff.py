"""Two files of a model: errors of weights and divergence of predictions, against numpy in float64."""

import dataclasses
import functools
import json
import math
import re

import gguf
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.measure import differences, divergence, evaluate
from bonsai_jax.measure.differences import compare_tensors, relative_error
from checkpoints import CheckpointError, Tensor, open_checkpoint, write_gguf
from tests.bonsai_jax import test_relatives
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.test_evaluate import exact_log_softmax, text_ids
from tests.bonsai_jax.test_oracle import as_file

TEXT = bytes(np.random.default_rng(0).integers(97, 122, 200).tolist()).decode()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny Llama in F32, and its copy in Q4_0."""
    folder = tmp_path_factory.mktemp("diff")
    original = as_file("synth:tiny-llama:f32", folder / "a.gguf")
    bj.quantize_file(original, folder / "b.gguf", "q4_0", pure=True)
    return original, folder / "b.gguf"


@pytest.fixture(scope="module")
def models(files):
    return [bj.load(path, bj.RunConfig(context=64, batch_size=1)) for path in files]


def weights(path) -> dict[str, np.ndarray]:
    """By the gguf package."""
    return {
        t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64)
        for t in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("pieces", [differences.PIECES, (256, 1024)])
def test_errors_are_numpy_s(files, pieces, monkeypatch):
    monkeypatch.setattr(differences, "PIECES", pieces)
    seen = []
    compared = compare_tensors(*files, progress=lambda done, total: seen.append((done, total)))
    a, b = map(weights, files)
    assert [d.name for d in compared] == [*a]
    for d in compared:
        x, y = a[d.name], b[d.name]
        exact = np.sqrt(np.square(y - x).mean() / np.square(x).mean())
        assert d.error == pytest.approx(exact, rel=1e-6) and (d.error > 0.05) == (x.ndim == 2)
        assert d.a.shape == d.b.shape == x.shape
        assert (d.a.bits, d.b.bits) == (32, 4.5 if x.ndim == 2 else 32)
    sums = [sum(np.square(w).sum() for w in part) for part in ([b[n] - a[n] for n in a], a.values())]
    assert relative_error(compared) == pytest.approx(np.sqrt(sums[0] / sums[1]), rel=1e-6)
    total = sum(w.size for w in a.values())
    assert seen[-1] == (total, total) and seen == sorted(seen)


def test_a_file_does_not_differ_from_itself(files):
    for path in files:
        compared = compare_tensors(path, path)
        assert {d.error for d in compared} == {0.0} and relative_error(compared) == 0


def test_tensors_that_cannot_be_compared_say_why(tmp_path):
    def write(name, **arrays):
        tensors = [Tensor(n, "f32", x.shape, x.view(np.uint8)) for n, x in arrays.items()]
        write_gguf(tmp_path / name, {"general.architecture": "llama"}, tensors)
        return tmp_path / name

    one, zero = np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32)
    nan = np.full((4, 8), np.nan, np.float32)
    a = write("a.gguf", same=one, gone=one, shape=one, zeros=zero, both=zero, bad=one)
    b = write("b.gguf", new=one, shape=one[:2], both=zero, zeros=one, same=one * 1.5, bad=nan)
    compared = compare_tensors(a, b)
    assert [(d.name, d.reason) for d in compared] == [
        ("same", None), ("gone", "only in A"), ("shape", "shapes differ"), ("zeros", None), ("both", None),
        ("bad", None), ("new", "only in B"),
    ]  # fmt: skip
    errors = {d.name: d.error for d in compared}
    assert errors["same"] == 0.5 and errors["zeros"] == math.inf and errors["both"] == 0
    assert math.isnan(errors["bad"]) and errors["gone"] is errors["new"] is errors["shape"] is None
    assert relative_error([d for d in compared if d.name in ("same", "zeros", "gone")]) == np.sqrt(1.25)
    with pytest.raises(NotImplementedError, match="drawn when it is loaded"):
        compare_tensors("synth:tiny-llama:f32", b)


def test_weights_that_are_rotated_are_not_compared_with_those_that_are_not(files, tmp_path):
    checkpoint = open_checkpoint(files[0])
    folds = {
        "version": 1, "transform": "normalized-sylvester-walsh-hadamard", "axis": "input-last-dimension",
        "block_size": 32, "sign_mode": "identity", "weight_names": ["blk.0.ffn_up.weight"],
    }  # fmt: skip
    metadata = {**checkpoint.metadata, **{f"prism.hadamard.{key}": value for key, value in folds.items()}}
    folded = dataclasses.replace(checkpoint, metadata=metadata)
    reasons = {d.name: d.reason for d in compare_tensors(checkpoint, folded) if d.reason}
    assert reasons == {"blk.0.ffn_up.weight": "rotated differently"}
    assert {d.reason for d in compare_tensors(folded, folded)} == {None}


@functools.cache
def relative(name, folder):
    """A GGUF file, and the folder that it was made of."""
    return open_checkpoint(as_file(test_relatives.file(name), folder / f"{name}.gguf"))


@pytest.mark.parametrize("name", ["minicpm", "gemma", "bailingmoe2", "internlm2"])
def test_a_folder_meets_the_gguf_file_by_the_architecture_s_table(name, tmp_path):
    """Queries and keys in halves, a norm without its 1, experts one by one, three matrices in one."""
    file, folder = relative(name, tmp_path), test_relatives.folder(name)
    for compared in (compare_tensors(file, folder), compare_tensors(folder, file)):
        names = [d.name for d in compared]
        if name == "bailingmoe2":  # its file has the three in one too
            names = list(dict.fromkeys(re.sub(r"attn_[qkv]\.", "attn_qkv.", n) for n in names))
        assert names == [*file.tensors]
        assert max(d.error for d in compared) < (1e-6 if name == "gemma" else 1e-12)
    with pytest.raises(CheckpointError, match="compared if they have one architecture"):
        compare_tensors(file, test_relatives.folder("gemma" if name != "gemma" else "minicpm"))


def test_predictions_against_float64(models):
    cut = evaluate.chunks(text_ids(70), 32, None)
    seen = []
    result = divergence.compare_predictions(
        *models, cut, progress=lambda done, total: seen.append((done, total))
    )
    kl, same, losses = [], [], ([], [])
    for chunk in cut:
        p, q = (exact_log_softmax(bj.logits(model, chunk.tolist()))[16:31] for model in models)
        kl += (np.exp(p) * (p - q)).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        for log_probs, loss in zip((p, q), losses, strict=True):
            loss += (-log_probs[np.arange(15), chunk[17:]]).tolist()
    assert len(kl) == result.divergence.kl.count == 30 and min(kl) > 1e-6
    assert result.divergence.kl.mean == pytest.approx(np.mean(kl), rel=1e-4)
    assert result.divergence.kl_percentile(99) == pytest.approx(np.percentile(kl, 99), rel=1e-4)
    assert result.divergence.same_top.mean == np.mean(same)
    for nll, loss in zip((result.nll_a, result.nll_b), losses, strict=True):
        assert evaluate.perplexity(nll)[0] == pytest.approx(np.exp(np.mean(loss)), rel=1e-6)
    assert seen == [(1, 2), (2, 2)]


def test_a_model_predicts_what_it_predicts(models):
    result = divergence.compare_predictions(models[1], models[1], evaluate.chunks(text_ids(70), 32, None))
    assert (
        result.divergence.kl.mean == result.divergence.kl.largest == result.divergence.kl_percentile(99) == 0
    )
    assert result.divergence.same_top.mean == 1 and result.nll_a == result.nll_b


def test_the_command(files, models, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    table = run("diff", *files)
    assert table.exit_code == 0, table.output
    compared = compare_tensors(*files)
    header, *rows, total = table.stdout.splitlines()
    assert header.split() == ["tensor", "shape", "A", "B", "bits", "A", "bits", "B", "error"]
    assert [row.split()[0] for row in rows] == [d.name for d in compared]
    assert rows[0].split()[2:] == ["f32", "q4_0", "32.00", "4.50", f"{compared[0].error:.2e}"]
    assert f"error {relative_error(compared):.2e}" in total and "bits a weight" in total
    asked = ("diff", *files, "-f", tmp_path / "text.txt", "-c", 32, "--chunks", 2)
    out = json.loads(run(*asked, "--json").stdout)
    assert [t["error"] for t in out["tensors"]] == [d.error for d in compared]
    cut = evaluate.chunks(models[0].tokenizer.encode(TEXT), 32, None)[:2]
    result = divergence.compare_predictions(*models, cut)
    assert out["chunks"] == 2 and out["context"] == 32 and out["kl"] == result.divergence.kl.mean
    assert out["ppl_b"] == evaluate.perplexity(result.nll_b)[0]
    assert out["kl_p99"] == result.divergence.kl_percentile(99)
    lines = run(*asked).stdout.splitlines()[-3:]
    assert lines[0].startswith(f"KL(A || B) = {out['kl']:.3e} +/- ")
    assert lines[2].startswith(f"PPL = {out['ppl_a']:.4f}")


def test_two_vocabularies_are_one_clear_error(files, tmp_path):
    checkpoint = open_checkpoint(files[0])
    words = list(checkpoint.metadata["tokenizer.ggml.tokens"])
    words[7] = words[7] + "x"
    other = tmp_path / "other.gguf"
    write_gguf(
        other, {**checkpoint.metadata, "tokenizer.ggml.tokens": words}, list(checkpoint.tensors.values())
    )
    (tmp_path / "text.txt").write_text(TEXT)
    done = run("diff", files[0], other, "-f", tmp_path / "text.txt", "-c", 32)
    assert done.exit_code == 1 and not done.stdout
    assert "have different vocabularies (token 7 is " in done.stderr and "\n" not in done.stderr.strip()
    embedding = Tensor("token_embd.weight", "f32", (7, 64), np.zeros((7, 256), np.uint8))
    smaller = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, embedding.name: embedding})
    with pytest.raises(ValueError, match="and 7 tokens"):
        divergence.shared_tokenizer(checkpoint, smaller)
    (tmp_path / "text.txt").write_text("too short")
    done = run("diff", *files, "-f", tmp_path / "text.txt")
    assert done.exit_code == 1 and not done.stdout and "give a longer text" in done.stderr


def test_models_that_do_not_fit_together_can_be_run_one_after_the_other(files, tmp_path, monkeypatch):
    def load(*_, **__):
        raise MemoryError("weights of 9 GB exceed the memory")

    monkeypatch.setattr(bj, "from_checkpoint", load)
    (tmp_path / "text.txt").write_text(TEXT)
    done = run("diff", *files, "-f", tmp_path / "text.txt", "-c", 32)
    assert done.exit_code == 1 and "exceed the memory; or run one model after the other" in done.stderr
    assert "--kl-base base.npz" in done.stderr and "tensors compared" in done.stdout
