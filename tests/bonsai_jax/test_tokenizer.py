"""The tokenizer against llama.cpp's own, on SmolLM2's file and on small vocabularies trained here."""

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.tokens.vocabulary import CONTROL, NORMAL, UNKNOWN
from tests.bonsai_jax.vocabularies import (
    RANDOM_TEXT,
    TEXTS,
    LlamaCpp,
    byte_level_metadata,
    every_vocabulary,
    pair,
    smollm2,
    tokenizer_of,
    write_model,
)

# ---- encoding ----


@every_vocabulary
def test_texts_encode_as_in_llama_cpp(name):
    ours, oracle = pair(name)
    for text in TEXTS:
        for flags in ({}, {"add_special": False}, {"parse_special": False}):
            if name.startswith("sentencepiece") and flags == {"parse_special": False} and "s>" in text:
                continue  # llama.cpp merges "</s>" from its characters, we do not: see the injection test
            assert ours.encode(text, **flags) == oracle.encode(text, **flags), (text, flags)


@every_vocabulary
def test_random_text_encodes_as_in_llama_cpp(name):
    ours, oracle = pair(name)

    @settings(max_examples=250, deadline=None, derandomize=True, database=None)
    @given(RANDOM_TEXT)
    def check(text):
        assert ours.encode(text) == oracle.encode(text)

    check()


@every_vocabulary
def test_a_token_stands_for_the_bytes_that_llama_cpp_says(name):
    ours, oracle = pair(name)
    for text in TEXTS:
        for id, piece in oracle.pieces(text):
            assert ours.token_bytes(id) == piece


def test_bos_and_eos_are_added_as_the_file_says():
    ids = {
        "bos": byte_level_metadata("qwen2")["tokenizer.ggml.bos_token_id"],
        "eos": byte_level_metadata("qwen2")["tokenizer.ggml.eos_token_id"],
    }
    for flags in ({}, {"bos": True}, {"bos": True, "eos": True}):
        asked = {f"tokenizer.ggml.add_{name}_token": value for name, value in flags.items()}
        ours = Tokenizer.from_gguf(byte_level_metadata("qwen2") | asked)
        before, after = [ids["bos"]] * ("bos" in flags), [ids["eos"]] * ("eos" in flags)
        assert ours.encode("a") == [*before, *ours.encode("a", add_special=False), *after]
    assert (
        tokenizer_of("llama-bpe").add_bos
        and tokenizer_of("sentencepiece").add_bos
        and not tokenizer_of("gpt-2").add_bos
    )


@every_vocabulary
def test_no_plain_text_becomes_a_control_token(name):
    ours = tokenizer_of(name)
    controls = [id for id, kind in enumerate(ours.kinds) if kind in (CONTROL, UNKNOWN)]
    for id in controls:
        text = f"x{ours.texts[id]}y"
        assert id in ours.encode(text)
        assert not set(controls) & set(ours.encode(text, add_special=False, parse_special=False))


def test_end_ids_are_all_that_end_a_generation():
    assert {smollm2().texts[id] for id in smollm2().eos_ids} == {"<|im_end|>", "<|endoftext|>", "<reponame>"}
    metadata = byte_level_metadata("qwen2")
    metadata = metadata | {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"][:-1], "<|eot_id|>"],
    }
    ours = Tokenizer.from_gguf(metadata)
    assert {5, ours.eos_id, len(ours.texts) - 1} <= ours.eos_ids
    assert ours.kinds[-1] == CONTROL  # a user-defined token of that name is one, as in llama.cpp


def test_a_normal_token_that_looks_like_an_end_is_a_control_token_as_in_llama_cpp(tmp_path):
    """Files of Qwen2.5 and Qwen3.5 have "</s>" as a normal token, made by a merge."""
    metadata = byte_level_metadata("qwen2")
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    extra = [token for token in ("</", "</s", "</s>", "[PAD]") if token not in tokens]
    metadata = metadata | {
        "tokenizer.ggml.tokens": [*tokens, *extra],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], *[NORMAL] * len(extra)],
        "tokenizer.ggml.merges": [*merges, "< /", "</ s", "</s >"],
    }
    write_model(path := tmp_path / "model.gguf", metadata)
    ours, oracle = Tokenizer.from_gguf(metadata), LlamaCpp(path)
    end = ours.texts.index("</s>")
    for text in ("</s>", "a</s>b", " </s></s> ", "<|im_end|></s>", "<s></s", "x[PAD]y", "<p>7</s></p>"):
        assert ours.encode(text) == oracle.encode(text), text
        assert (end in ours.encode(text)) == ("</s>" in text)
        assert end not in ours.encode(text, parse_special=False)  # llama.cpp may merge it from its characters
    assert end in ours.eos_ids and ours.decode([end]) == ""


def test_equal_merges_and_unreachable_tokens_do_no_harm():
    metadata = byte_level_metadata("qwen2")
    merges = metadata["tokenizer.ggml.merges"]
    twice = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.merges": merges + merges[::-1]})
    assert twice.encode(TEXTS[3]) == tokenizer_of("qwen2").encode(TEXTS[3])


# ---- decoding ----


@functools.cache
def all_bytes(name: str) -> frozenset[bytes]:
    ours = tokenizer_of(name)
    return frozenset(ours.token_bytes(id) for id in range(ours.vocab_size))


@every_vocabulary
@settings(max_examples=60, deadline=None)
@given(text=RANDOM_TEXT)
def test_decoding_gives_the_text_back(name, text):
    ours, known = tokenizer_of(name), all_bytes(name)
    if all(bytes([byte]) in known for byte in text.encode()):  # some vocabularies lack tokens for rare bytes
        assert ours.decode(ours.encode(text, add_special=False, parse_special=False)) == text


@every_vocabulary
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_detokenizer_joins_to_decode(name, data):
    ours = tokenizer_of(name)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=30))
    emoji = ours.encode("👨‍👩‍👧 é", add_special=False)
    ids += data.draw(st.permutations(emoji * 2)) + emoji
    for flags in ({}, {"skip_special": False}, {"at_start": False}):
        detokenizer = ours.detokenizer(**flags)
        pieces = [detokenizer.push(id) for id in ids]
        text = "".join(pieces) + detokenizer.flush()
        shown = [
            ours.token_bytes(id)
            for id in ids
            if flags == {"skip_special": False}
            or id >= ours.vocab_size
            or ours.kinds[id] not in (CONTROL, UNKNOWN)
        ]
        expected = b"".join(shown)
        expected = (
            expected.removeprefix(b" ") if ours.space_prefix and flags != {"at_start": False} else expected
        )
        assert text == ours.decode(ids, **flags) == expected.decode("utf-8", errors="replace")


def test_half_a_character_is_held_back_until_it_is_whole_or_hopeless():
    ours = tokenizer_of("sentencepiece")
    byte = {id: ours.token_bytes(id) for id in range(3, 259)}
    ids = {value[0]: id for id, value in byte.items()}
    detokenizer = ours.detokenizer(at_start=False)
    control = ours.bos_id
    stream = [
        ids[0xF0],
        ids[0x9F],
        control,
        ids[0x99],
        ids[0x82],
        ids[0xF0],
        ids[0x9F],
        ids[ord("a")],
        ids[0xFF],
        ids[0xE4],
    ]
    assert [detokenizer.push(id) for id in stream] == ["", "", "", "", "🙂", "", "", "\ufffda", "\ufffd", ""]
    assert detokenizer.flush() == "\ufffd"


def test_control_tokens_are_hidden_unless_asked_for():
    ids = smollm2().encode("<|im_start|>hi<|im_end|>")
    assert smollm2().decode(ids) == "hi"
    assert smollm2().decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_the_space_before_a_text_is_taken_away_only_at_its_beginning():
    ours = tokenizer_of("sentencepiece")
    ids = ours.encode("Hello, world")
    assert ours.decode(ids) == "Hello, world" and ours.decode(ids, at_start=False) == " Hello, world"
    assert ours.decode(ours.encode("  two")) == "  two"
    assert (
        tokenizer_of("sentencepiece-bare").decode(tokenizer_of("sentencepiece-bare").encode(" one")) == " one"
    )


@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece-bare"])
def test_what_sentencepiece_writes_for_a_space_is_a_space(name):
    ours, oracle = pair(name)
    ids = ours.encode("a\u2581b \u2581c")
    assert ids == ours.encode("a b  c") == oracle.encode("a\u2581b \u2581c") == oracle.encode("a b  c")
    assert ours.decode(ids) == "a b  c"


def test_ids_outside_the_vocabulary():
    ours = smollm2()
    assert ours.decode([ours.vocab_size, 10**9]) == "" and ours.token_bytes(ours.vocab_size) == b""
    for call in (ours.token_bytes, lambda id: ours.decode([id]), lambda id: ours.detokenizer().push(id)):
        with pytest.raises(ValueError, match="-1 is negative"):
            call(-1)
    with pytest.raises(ValueError, match="surrogate"):
        ours.encode("a\ud800")


def test_llama_cpp_s_vectors_of_qwen35():
    """Its own file of texts and tokens. Of the vocabulary only what they are made of is kept, which leaves
    every merge that was made, and those before it, as they were."""
    vectors = json.loads((Path(__file__).parents[1] / "data" / "qwen35_tokens.json").read_text("utf-8"))
    ids, tokens = [int(i) for i in vectors["vocabulary"]], list(vectors["vocabulary"].values())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [*tokens, "<|im_end|>"],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL],
        "tokenizer.ggml.merges": vectors["merges"],
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert len(vectors["texts"]) == len(vectors["tokens"]) > 50
    for text, want in zip(vectors["texts"], vectors["tokens"], strict=True):
        assert [ids[token] for token in tokenizer.encode(text)] == want, text
