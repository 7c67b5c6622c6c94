"""The files that "user/repo[:quant]" means, chosen by the names of a repository's files."""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable

from ..checkpoint import CheckpointError
from ..gguf import part_paths

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<quant>[\w.-]+(/[\w.-]+)*))?", re.ASCII)
_HOST = re.compile(r"(https?://)?(www\.)?(hf\.co|huggingface\.co)/", re.IGNORECASE)
# Q4_K_M, IQ4_XS, PTQ1_0, UD-Q4_K_XL, Q1_0_g128, BF16, fp16, mxfp4: what makers of GGUF files put into names.
_QUANT = re.compile(
    r"(?<![a-z0-9])(ud-)?([a-z]{0,2}q\d\w*|bf16|fp?(8|16|32)|[a-z]{2}fp4\w*)(?![a-z0-9])", re.IGNORECASE
)
# GGUF files beside the model that are none: vision projectors, importance matrices, drafters.
_BESIDE = re.compile(r"mmproj|imatrix|^mtp-|(?<![a-z])(dspark|dflash|draft)", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# What a repository without GGUF files is made of: the folder that safetensors.py opens, and its tokenizer.
_FOLDER_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
]


def is_address(source: str) -> bool:
    """Whether `source` begins as an address of the Hub does: "hf.co/", "https://huggingface.co/"."""
    return _HOST.match(source) is not None


def is_hub_name(source: str) -> bool:
    """Whether `source` has the form "user/repo" or "user/repo:quant", or is an address of the Hub."""
    return is_address(source) or _NAME.fullmatch(source) is not None


def parse(source: str) -> tuple[str, str | None]:
    """ "user/repo:quant" -> ("user/repo", "quant"); without a quant, None. An address of a repository or of a
    file in it means the same: "https://huggingface.co/user/repo/blob/main/x.gguf" is "user/repo:x.gguf".
    CheckpointError for other text."""
    name = _HOST.sub("", source)
    if name != source:  # an address
        name = re.sub(r"[?#].*$", "", name).rstrip("/")
        name = re.sub(r"/(blob|resolve|raw)/main/", ":", re.sub(r"/tree/main$", "", name), count=1)
    match = _NAME.fullmatch(name)
    if not match:
        raise CheckpointError(
            f'{source}: not a name on the Hub; write "user/repo" or "user/repo:quant", or the address of a '
            "repository or of a GGUF file in its branch main"
        )
    return match["repo"], match["quant"]


def folder_files(names: Iterable[str]) -> list[str]:
    """The files of a repository that make up a Hugging Face folder."""
    return [
        name
        for name in names
        if "/" not in name
        and not name.startswith("consolidated")
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in _FOLDER_FILES)
    ]


def readable(nbytes: int) -> str:
    """ "1.16 GB", "0.30 MB"."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def models(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among files: label -> its file, or all its parts in order.

    The label is the quant in the name ("UD-Q4_K_XL"). If the name has none, or another model has the same, it
    is the name itself. "user/repo:label" names exactly this model.
    """
    files: dict[str, list[str]] = {}
    for name in sorted(names):
        if _is_model(name):
            files.setdefault(_first_part(name), []).append(name)
    labels = {first: _label(first) for first in files}
    count = Counter(label.lower() for label in labels.values())
    return {
        label if count[label.lower()] == 1 else _stem(first): files[first] for first, label in labels.items()
    }


def choose(source: str, sizes: dict[str, int]) -> list[str]:
    """The names of the one file, or of all parts of the one split file, that `source` means.

    The quant is a label, or else whole words of a name, in either case: "q4_k" is not "Q4_K_M", "Q4_K_XL"
    finds "UD-Q4_K_XL", "q1_0" finds "Q1_0_g128". Raises CheckpointError, with labels and sizes, if no model
    or several match, or if there are several and the source names none.
    """
    repo, quant = parse(source)
    by_label = models(sizes)
    if not by_label:
        raise CheckpointError(f"{source}: the repository has no GGUF file; leave out :{quant}")
    matches = list(by_label)
    if quant is not None:
        asked = _stem(quant)
        word = re.compile(rf"(?<![a-z0-9]){re.escape(asked)}(_g\d+)?(?![a-z0-9_])", re.IGNORECASE)
        matches = [label for label in by_label if label.lower() == asked.lower()] or [
            label for label, files in by_label.items() if word.search(_stem(files[0]))
        ]
    if len(matches) == 1:
        return by_label[matches[0]]
    listing = ", ".join(
        f"{label} ({readable(sum(sizes[name] for name in by_label[label]))})" for label in matches or by_label
    )
    example = f"name one, as {repo}:{(matches or list(by_label))[-1]}"
    if matches:
        raise CheckpointError(f"{source}: {len(matches)} models match: {listing}; {example}")
    raise CheckpointError(f"{source}: no file matches {quant!r}; there are: {listing}; {example}")


def _is_model(name: str) -> bool:
    return name.lower().endswith(".gguf") and not _BESIDE.search(name.rsplit("/", 1)[-1])


def _first_part(name: str) -> str:
    try:
        return part_paths(name)[0].as_posix()
    except CheckpointError:  # "part 5 of 3": opening it says what is wrong
        return name


def _stem(name: str) -> str:
    return _PART.sub("", re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE))


def _label(name: str) -> str:
    """The last quant in a file's path, as makers write it; its stem if there is none."""
    quants = [match[0] for match in _QUANT.finditer(_stem(name))]
    return quants[-1] if quants else _stem(name)
