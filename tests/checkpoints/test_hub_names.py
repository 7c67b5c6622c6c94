"""Which file of a repository a name picks, for files as their makers name them."""

import pytest

from checkpoints import CheckpointError
from checkpoints.hub import is_hub_name, names

GB = 10**9


def split(stem, count):
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]


def each(pattern, quants):
    return [pattern.format(quant) for quant in quants.split()]


BONSAI_2 = each("Ternary-Bonsai-2-27B-{}.gguf", "PQ2_0 PTQ1_0 mmproj-Q8_0")
TERNARY = each(
    "Ternary-Bonsai-27B-{}.gguf", "F16 Q2_0 Q2_g64 dspark-Q4_1 dspark-bf16 mmproj-BF16 mmproj-Q8_0"
)
BONSAI_8B = ["Bonsai-8B-Q1_0.gguf", "README.md", "config.json"]
BONSAI_OLD = ["Bonsai-8B.gguf", "Bonsai-8B-mmproj-F16.gguf"]
UNSLOTH = [
    *each("Qwen3-30B-A3B-{}.gguf", "IQ4_NL IQ4_XS Q2_K Q2_K_L Q3_K_M Q4_0 Q4_1 Q4_K_M Q4_K_S Q6_K Q8_0"),
    *each("Qwen3-30B-A3B-UD-{}.gguf", "IQ1_M IQ2_XXS Q2_K_XL Q4_K_M Q4_K_XL"),
    *split("BF16/Qwen3-30B-A3B-BF16", 2),
    *split("UD-Q8_K_XL/Qwen3-30B-A3B-UD-Q8_K_XL", 3),
    *["imatrix_unsloth.dat", "imatrix_unsloth.gguf", "mmproj-BF16.gguf", "mtp-Qwen3-30B-A3B-Q8_0.gguf"],
]
GGML_ORG = ["gpt-oss-20b-mxfp4.gguf"]
GGML_ORG_VISION = ["mmproj-Qwen2.5-VL-3B-Instruct-f16.gguf", "Qwen2.5-VL-3B-Instruct-Q4_K_M.gguf"]
BARTOWSKI = [
    *each("Qwen_Qwen3-235B-A22B-{}.gguf", "IQ2_M Q4_K"),
    *split("Qwen_Qwen3-235B-A22B-Q4_K_M/Qwen_Qwen3-235B-A22B-Q4_K_M", 4),
    *split("Qwen_Qwen3-235B-A22B-Q4_K_L/Qwen_Qwen3-235B-A22B-Q4_K_L", 4),
    *["Qwen_Qwen3-235B-A22B-bf16.gguf", "Qwen_Qwen3-235B-A22B-imatrix.gguf"],
]
QWEN_OLD = [
    *each("qwen2.5-7b-instruct-{}.gguf", "q2_k q3_k_m"),
    *split("qwen2.5-7b-instruct-q4_k_m", 2),
    *split("qwen2.5-7b-instruct-q4_0", 2),
    *split("qwen2.5-7b-instruct-fp16", 4),
]
QWEN = ["Qwen3-0.6B-Q8_0.gguf"]
DOTS = each("Mistral-7B.{}.gguf", "i1-IQ1_S i1-Q4_K_M Q4_K_S")
GROUPS = each("m-{}.gguf", "Q1_0_g128 Q4_K Q4_K_M")
TWO = each("{}-Q4_K_M.gguf", "a b") + each("{}/c-Q8_0.gguf", "x y")
LISTINGS = {name: files for name, files in globals().items() if name.isupper() and isinstance(files, list)}


def chosen(listing, quant=None):
    return names.choose(f"user/repo{f':{quant}' if quant else ''}", dict.fromkeys(listing, GB))


@pytest.mark.parametrize(
    ("listing", "quant", "files"),
    [
        ("BONSAI_2", "ptq1_0", ["Ternary-Bonsai-2-27B-PTQ1_0.gguf"]),
        ("BONSAI_2", "PQ2_0", ["Ternary-Bonsai-2-27B-PQ2_0.gguf"]),
        ("TERNARY", "Q2_0", ["Ternary-Bonsai-27B-Q2_0.gguf"]),
        ("TERNARY", "Q2_g64", ["Ternary-Bonsai-27B-Q2_g64.gguf"]),
        ("BONSAI_8B", "Q1_0", ["Bonsai-8B-Q1_0.gguf"]),
        ("BONSAI_8B", None, ["Bonsai-8B-Q1_0.gguf"]),
        ("BONSAI_OLD", None, ["Bonsai-8B.gguf"]),
        ("UNSLOTH", "UD-Q4_K_XL", ["Qwen3-30B-A3B-UD-Q4_K_XL.gguf"]),
        ("UNSLOTH", "q4_k_xl", ["Qwen3-30B-A3B-UD-Q4_K_XL.gguf"]),
        ("UNSLOTH", "Q4_K_M", ["Qwen3-30B-A3B-Q4_K_M.gguf"]),
        ("UNSLOTH", "UD-Q4_K_M", ["Qwen3-30B-A3B-UD-Q4_K_M.gguf"]),
        ("UNSLOTH", "Q2_K", ["Qwen3-30B-A3B-Q2_K.gguf"]),
        ("UNSLOTH", "Q8_0", ["Qwen3-30B-A3B-Q8_0.gguf"]),
        ("UNSLOTH", "bf16", split("BF16/Qwen3-30B-A3B-BF16", 2)),
        ("UNSLOTH", "UD-Q8_K_XL", split("UD-Q8_K_XL/Qwen3-30B-A3B-UD-Q8_K_XL", 3)),
        ("GGML_ORG", "MXFP4", GGML_ORG),
        ("GGML_ORG", None, GGML_ORG),
        ("GGML_ORG_VISION", None, ["Qwen2.5-VL-3B-Instruct-Q4_K_M.gguf"]),
        ("BARTOWSKI", "Q4_K", ["Qwen_Qwen3-235B-A22B-Q4_K.gguf"]),
        (
            "BARTOWSKI",
            "Q4_K_L",
            split("Qwen_Qwen3-235B-A22B-Q4_K_L/Qwen_Qwen3-235B-A22B-Q4_K_L", 4),
        ),
        ("QWEN_OLD", "Q4_K_M", split("qwen2.5-7b-instruct-q4_k_m", 2)),
        ("QWEN_OLD", "fp16", split("qwen2.5-7b-instruct-fp16", 4)),
        ("QWEN", "q8_0", QWEN),
        ("QWEN", QWEN[0], QWEN),
        ("QWEN_OLD", "qwen2.5-7b-instruct-q4_0-00001-of-00002.gguf", split("qwen2.5-7b-instruct-q4_0", 2)),
        ("DOTS", "Q4_K_M", ["Mistral-7B.i1-Q4_K_M.gguf"]),
        ("GROUPS", "q1_0", ["m-Q1_0_g128.gguf"]),
        ("GROUPS", "Q4_K", ["m-Q4_K.gguf"]),
        ("TWO", "b-Q4_K_M", ["b-Q4_K_M.gguf"]),
        ("TWO", "y/c-Q8_0", ["y/c-Q8_0.gguf"]),
    ],
)
def test_a_quant_picks_its_file(listing, quant, files):
    assert chosen(LISTINGS[listing], quant) == files


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_label_picks_its_model_and_labels_name_all_of_them(listing):
    """Labels are what errors and `bonsai-jax list` print."""
    models = names.models(LISTINGS[listing])
    for label, files in models.items():
        assert chosen(LISTINGS[listing], label) == chosen(LISTINGS[listing], label.lower()) == files
        assert is_hub_name(f"user/repo:{label}")
    rest = {f for f in LISTINGS[listing] if f.endswith(".gguf")} - {
        f for files in models.values() for f in files
    }
    assert all(any(word in name for word in ("mmproj", "imatrix", "mtp-", "dspark")) for name in rest)


def test_labels_are_the_quants():
    assert list(names.models(TERNARY)) == ["F16", "Q2_0", "Q2_g64"]
    assert list(names.models(QWEN_OLD)) == ["fp16", "q2_k", "q3_k_m", "q4_0", "q4_k_m"]
    assert list(names.models(BARTOWSKI)) == ["IQ2_M", "Q4_K", "Q4_K_L", "Q4_K_M", "bf16"]
    assert list(names.models(BONSAI_OLD)) == ["Bonsai-8B"] and list(names.models(GGML_ORG)) == ["mxfp4"]
    assert list(names.models(TWO)) == ["a-Q4_K_M", "b-Q4_K_M", "x/c-Q8_0", "y/c-Q8_0"]


@pytest.mark.parametrize(
    ("listing", "quant", "message"),
    [
        (
            "BONSAI_2",
            None,
            "2 models match: PQ2_0 (1.00 GB), PTQ1_0 (1.00 GB); name one, as user/repo:",
        ),
        (
            "BONSAI_2",
            "Q2_0",
            "no file matches 'Q2_0'; there are: PQ2_0 (1.00 GB), PTQ1_0 (1.00 GB); name one",
        ),
        (
            "QWEN_OLD",
            None,
            "5 models match: fp16 (4.00 GB), q2_k (1.00 GB), q3_k_m (1.00 GB), q4_0 (2",
        ),
        ("QWEN_OLD", "Q4_K", "no file matches 'Q4_K'; there are: fp16 (4.00 GB)"),
        (
            "TWO",
            "Q4_K_M",
            "2 models match: a-Q4_K_M (1.00 GB), b-Q4_K_M (1.00 GB); name one, as ",
        ),
        ("BONSAI_OLD", "Q1_0", "no file matches 'Q1_0'; there are: Bonsai-8B (1.00 GB); name one"),
    ],
)
def test_what_is_not_one_file_is_listed_with_sizes(listing, quant, message):
    with pytest.raises(CheckpointError) as raised:
        chosen(LISTINGS[listing], quant)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_part_with_an_impossible_number_is_a_file_of_its_own():
    assert list(names.models(["m-Q8_0-00005-of-00003.gguf", "m-Q4_0.gguf"])) == ["Q4_0", "Q8_0"]


@pytest.mark.parametrize("name", ["user/repo", "user/repo:Q1_0", "prism-ml/Bonsai-1.7B-gguf:q1_0", "a/b:c/d"])
def test_names_of_the_hub(name):
    assert is_hub_name(name)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf.co/user/repo", "user/repo"),
        ("hf.co/user/repo:Q4_K_M", "user/repo:Q4_K_M"),
        ("https://huggingface.co/user/repo/", "user/repo"),
        ("https://huggingface.co/user/repo/tree/main", "user/repo"),
        ("HTTPS://HuggingFace.co/user/repo/blob/main/x-Q4_K_M.gguf", "user/repo:x-Q4_K_M.gguf"),
        ("https://hf.co/user/repo/resolve/main/BF16/x.gguf?download=true", "user/repo:BF16/x.gguf"),
    ],
)
def test_addresses_of_the_hub(address, name):
    assert is_hub_name(address) and names.is_address(address)
    assert names.parse(address) == names.parse(name)
    files = dict.fromkeys([*UNSLOTH, "x-Q4_K_M.gguf", "BF16/x.gguf"], GB)
    if name.endswith(".gguf"):
        assert names.choose(address, files) == [name.partition(":")[2]]


@pytest.mark.parametrize("address", ["hf.co/user", "https://huggingface.co/user/repo/tree/dev", "hf.co/"])
def test_other_addresses_of_the_hub_are_refused(address):
    with pytest.raises(CheckpointError, match=r"not a name on the Hub; .* in its branch main"):
        names.parse(address)


@pytest.mark.parametrize(
    "name",
    ["repo", "../repo", "/user/repo", "a/b/c", "user/repo:", "user/..", "a b/c", "./x", "~/x", "a/b:/c"],
)
def test_other_names(name):
    assert not is_hub_name(name)
    with pytest.raises(CheckpointError, match="not a name on the Hub"):
        names.parse(name)
