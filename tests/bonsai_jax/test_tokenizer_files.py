"""Files of tokenizers: what is wrong in GGUF metadata, and Hugging Face folders against GGUF files."""

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from bonsai_jax.tokens.pre_tokenizers import PRE_TOKENIZERS
from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.tokens.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED
from tests.bonsai_jax.vocabularies import TEXTS, byte_level_metadata, sentencepiece_metadata, tokenizer_of

# ---- GGUF metadata ----


def test_each_inconsistency_is_named():
    good, spm = byte_level_metadata("qwen2"), sentencepiece_metadata()
    tokens, merges = good["tokenizer.ggml.tokens"], good["tokenizer.ggml.merges"]
    cases = [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": 3}, "tokenizer.ggml.model = '3': expected str"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokens": [*tokens[:-1], 7]}, "tokenizer.ggml.tokens has entries of type int"),
        ({"tokens": [*tokens[:-1], tokens[300]]}, "tokenizer.ggml.tokens: .* is both 300 and"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries, .* has"),
        ({"token_type": [9] * len(tokens)}, r"tokenizer.ggml.token_type\[0\] = 9"),
        ({"token_type": ["x"]}, "tokenizer.ggml.token_type: expected a list of numbers"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges: 'ab' is not two tokens"),
        ({"merges": [*merges, "a Ġnowhere"]}, "tokenizer.ggml.merges: .*Ġnowhere"),
        (
            {"eos_token_id": len(tokens)},
            f"tokenizer.ggml.eos_token_id = {len(tokens)}, but there are {len(tokens)}",
        ),
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id = -1"),
        ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id = '2': expected int"),
        ({"add_bos_token": True, "bos_token_id": None}, "tokenizer.ggml.bos_token_id is not"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token = 'yes': expected bool"),
    ]
    cases = [(good, change, message) for change, message in cases] + [
        (spm, {"scores": None}, "tokenizer.ggml.scores is missing"),
        (spm, {"scores": [0.0]}, "tokenizer.ggml.scores has 1 entries"),
        (
            spm,
            {"scores": [float("nan")] * len(spm["tokenizer.ggml.tokens"])},
            r"tokenizer.ggml.scores\[0\] is not a number",
        ),
        (
            spm,
            {"tokens": ["a" * 5000, *spm["tokenizer.ggml.tokens"][1:]]},
            r"tokens\[0\] has 5000 characters",
        ),
        (
            spm,
            {"token_type": [BYTE] * len(spm["tokenizer.ggml.tokens"])},
            r"tokens\[0\] = '<unk>' has type byte",
        ),
    ]
    for base, change, message in cases:
        changed = base | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_gguf({key: value for key, value in changed.items() if value is not None})
    for change, message in [
        ({"model": "bert"}, "'bert' is not supported.*'gpt2', 'llama', 'gemma4'"),
        ({"pre": "x"}, "'x' is not supported; supported: " + ", ".join(sorted(PRE_TOKENIZERS))),
        ({"pre": "afmoe"}, "'afmoe' is not supported.*qwen2"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            Tokenizer.from_gguf(good | {f"tokenizer.ggml.{key}": value for key, value in change.items()})


def test_empty_and_unused_tokens_stand_for_nothing():
    metadata = byte_level_metadata("qwen2")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    more = {
        "tokenizer.ggml.tokens": [*tokens, "", "", "[PAD]x"],
        "tokenizer.ggml.token_type": np.array([*types, 1, 1, UNUSED]),
    }
    ours = Tokenizer.from_gguf(metadata | more)
    assert [ours.token_bytes(len(tokens) + i) for i in range(3)] == [b"", b"", b""]
    assert ours.encode(TEXTS[3]) == tokenizer_of("qwen2").encode(TEXTS[3])


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (("<|end|>", "<|return|>", "<|call|>"), ["<|call|>", "<|return|>"]),  # gpt-oss
        (("<|end|>", "<|calls|>", "<|flush|>"), ["<|calls|>", "<|flush|>"]),  # Solar Open
        (("<|end|>", "<|endoftext|>"), ["<|endoftext|>", "<|end|>"]),  # Phi-3
        (("</s>", "<turn|>", "<|tool_response>"), ["<turn|>", "<|tool_response>"]),  # Gemma 4
    ],
)
def test_tokens_that_end_an_answer(tmp_path, names, ends):
    metadata = byte_level_metadata("qwen2")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    more = {"tokenizer.ggml.tokens": [*tokens, *names]}
    more["tokenizer.ggml.token_type"] = [*types, *[CONTROL] * len(names)]
    eos = metadata["tokenizer.ggml.eos_token_id"]
    ours = Tokenizer.from_gguf(metadata | more)
    assert sorted(ours.texts[id] for id in ours.eos_ids - {eos}) == ends
    hugging_face_folder(tmp_path, metadata | more, add_bos=False)
    assert Tokenizer.from_folder(tmp_path).eos_ids == ours.eos_ids | {7}


# ---- Hugging Face folders ----


def hugging_face_folder(folder: Path, metadata: dict, *, add_bos: bool) -> None:
    """The same byte-level vocabulary as a qwen2 GGUF has, as tokenizer.json and its kin."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    normal = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(normal, merges))
    cut = tokenizers.Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split, byte_level = (
        tokenizers.pre_tokenizers.Split(cut, "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False),
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(
        [
            tokenizers.AddedToken(t, special=k == CONTROL, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k != NORMAL
        ]
    )
    if add_bos:
        bos = metadata["tokenizer.ggml.bos_token_id"]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", bos)]
        )
    backend.enable_truncation(5)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
        "pad_token": None,
        "chat_template": "{{ bos_token }}x",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps(
            {
                "eos_token_id": [
                    7,
                    True,
                    "x",
                    {},
                    None,
                    -1,
                    1.5,
                    2**31,
                    metadata["tokenizer.ggml.eos_token_id"],
                ]
            }
        )
    )


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_folder_is_read_as_the_gguf_file_of_the_same_vocabulary(tmp_path, add_bos):
    metadata = byte_level_metadata("qwen2") | {"tokenizer.ggml.add_bos_token": add_bos}
    hugging_face_folder(tmp_path, metadata, add_bos=add_bos)
    folder, file = Tokenizer.from_folder(tmp_path), Tokenizer.from_gguf(metadata)
    for text in TEXTS:
        for flags in ({}, {"add_special": False}, {"parse_special": False}):
            if flags == {"parse_special": False} and "<|im_start|>" in text:
                continue  # tokenizers then overlooks our user-defined "<|im_start" inside of it
            ids = folder.encode(text, **flags)
            assert ids == file.encode(text, **flags), text
            assert folder.decode(ids) == file.decode(ids)
            assert folder.decode(ids, skip_special=False) == file.decode(ids, skip_special=False)
    for field in ("vocab_size", "bos_id", "eos_id", "pad_id", "add_bos", "add_eos"):
        assert getattr(folder, field) == getattr(file, field), field
    assert folder.eos_ids == file.eos_ids | {7}
    assert folder.apply_chat_template([]) == "<|im_start|>x"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}y")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "<|im_end|>y"


def test_a_sentencepiece_folder_decodes_to_bytes(tmp_path):
    metadata = sentencepiece_metadata()
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    steps = [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = tokenizers.decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    for text in ("Hello, world", " 字", "🙂\n"):
        assert ours.decode(ours.encode(text)) == backend.decode(backend.encode(text).ids) == text
    assert (ours.kinds[0], ours.kinds[1], ours.kinds[3]) == (UNKNOWN, CONTROL, BYTE)


def test_broken_folders_name_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    hugging_face_folder(tmp_path, byte_level_metadata("qwen2"), add_bos=False)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    with pytest.raises(ValueError, match=r"eos_token = '<nowhere>' is not in tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


# With the first the package tokenizers panics when it reads the file, with the second at the first text.
BROKEN_NORMALIZERS = ["/////wAA", "BAAAAP////8AAA=="]


@pytest.mark.parametrize("charsmap", BROKEN_NORMALIZERS)
def test_a_panic_of_the_package_tokenizers_is_a_value_error(tmp_path, charsmap):
    """PanicException is no Exception; one ended the whole process."""
    hugging_face_folder(tmp_path, byte_level_metadata("qwen2"), add_bos=False)
    path = tmp_path / "tokenizer.json"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read: PanicException"):
        Tokenizer.from_folder(tmp_path).encode("text")


def test_a_damaged_tokenizer_json_is_a_value_error(tmp_path):
    """Each value of the file, at any depth, replaced by values of other types, or removed."""
    hugging_face_folder(tmp_path, byte_level_metadata("qwen2"), add_bos=True)
    path = tmp_path / "tokenizer.json"
    good = json.loads(path.read_text())
    rng = np.random.default_rng(0)

    def places(value, way=()):
        yield way
        entries = dict(enumerate(value)) if isinstance(value, list) else value
        for key, item in [*entries.items()][:8] if isinstance(entries, dict) else ():
            yield from places(item, (*way, key))

    ways = [way for way in places(good) if way]
    assert len(ways) > 40
    for way in ways:
        broken = json.loads(json.dumps(good))
        inside = broken
        for key in way[:-1]:
            inside = inside[key]
        damages = [None, 2**31, -1, "\u0000", [], {}, 1.5, True, "remove"]
        if (damage := damages[rng.integers(len(damages))]) == "remove":
            del inside[way[-1]]
        else:
            inside[way[-1]] = damage
        path.write_text(json.dumps(broken))
        try:
            Tokenizer.from_folder(tmp_path).encode("Hello <|im_start|> 123")
        except (ValueError, NotImplementedError) as error:
            assert "tokenizer" in str(error), way


@pytest.mark.parametrize("kind", ["gpt2", "llama", "folder"])
def test_tokenizers_are_pickled(tmp_path, kind):
    if kind == "folder":
        hugging_face_folder(tmp_path, byte_level_metadata("qwen2"), add_bos=True)
        ours = Tokenizer.from_folder(tmp_path)
    else:
        ours = Tokenizer.from_gguf(
            byte_level_metadata("qwen2") if kind == "gpt2" else sentencepiece_metadata()
        )
    ours.encode("<|im_start|>", parse_special=False)
    for other in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        for text in TEXTS:
            for parse_special in (True, False):
                ids = ours.encode(text, parse_special=parse_special)
                assert other.encode(text, parse_special=parse_special) == ids
                assert other.decode(ids) == ours.decode(ids)
