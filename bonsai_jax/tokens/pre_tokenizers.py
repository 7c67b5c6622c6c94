"""How byte-level BPE cuts text into words before it merges: tokenizer.ggml.pre, as llama.cpp reads it.

A pre-tokenizer is a list of regular expressions in Oniguruma's syntax. Each cuts its matches out of the
pieces that the one before it left; the text between matches is a piece too.

If llama.cpp and the original tokenizer.json cut a text differently, we follow llama.cpp, whose ids users of a
GGUF file expect. So in patterns with upper and lower case only ASCII letters have a case (any other letter
counts as both), and a range of characters does not match the spaces in it.

tests/bonsai_jax/test_pre_tokenizers.py compares every name with llama.cpp. Not supported are names whose
words llama.cpp finds with special code (afmoe), and those that are not byte-level (mmbert, sarvam-moe,
whitespace; Gemma 4's, which cuts at line breaks only, is in tokenizer_gguf.py).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words.

    patterns       applied in order, each to the pieces that the one before it left
    ignore_merges  a word that is a token becomes that token, even if merges would give other tokens
    add_bos        whether BOS is put before a text if the file does not say
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# The parts of most patterns: an English ending, a word, signs, white space.
_ENDING = r"'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL]"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = f"{_ENDING}|{_WORD}|{_DIGIT}|{_SIGNS}|{_SPACE}"
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_LLAMA3 = f"{_ENDING}|{_WORD}|{_THREE_DIGITS}|{_SIGNS}|{_SPACE}"


def _cased(upper: str, lower: str, ending: str, digits: str) -> str:
    """Patterns like GPT-4o's: a word ends where a capital follows a small letter, and includes its ending."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
    return f"{words}|{digits}|{_PATHS}|{_SPACE}"


_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_TEKKEN = _cased(_UPPER, _LOWER, "", _DIGIT)
_GPT4O = _cased(_UPPER, _LOWER, f"(?:{_ENDING})?", _THREE_DIGITS)
_GRANITE = _cased(r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]", f"(?:{_ENDING})?", _THREE_DIGITS)
_MARKED = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{_ENDING})?"

_KANA_AND_HAN = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_TO_HANGUL = r"[\u0800-\u9fa5\uac00-\ud7ff&&\S]+"
_DEEPSEEK3 = (
    _THREE_DIGITS,
    _KANA_AND_HAN,
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACE,
)
# DeepSeek LLM lists the letters that have a case, but not all of them: Georgian and others are missing.
_OLD_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C8F\u2D00-\u2D2F\uA78F-\uA7FF\uAB30-\uAB6F"
    r"\x{10570}-\x{105BF}\x{10D40}-\x{10D8F}\x{16E40}-\x{1DFFF}]]"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_OLD_CASED}+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
    r"\s+\z",
    _TO_HANGUL,
    r"\p{N}+",
)
_YOUTU = (
    r"[\uac00-\ud7a3\u3131-\u318e]+"
    r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    rf"|[\u3105-\u312f]+|{_KANA_AND_HAN}"
)
# Words of Han characters alone, as llama.cpp counts them; letters are all others.
_HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}\x{2f800}-\x{2fa1f}"
_KIMI = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_ENDING})?|{_THREE_DIGITS}|{_SIGNS}|{_SPACE}"
)
_NO_POINTS = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"  # between commas and full stops
_SPACE_BY_POWERS_OF_2 = "".join(rf"\s{{{2**i}}}(?!\S)|" for i in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}"

_KINDS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 jina-es jina-de jina-v2-es jina-v2-de"
    " jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((_DIGIT, _GPT2)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer(
        (_QWEN2,)
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(f"{_ENDING}|"),)),
    "seed-coder": PreTokenizer((_QWEN2.replace(_SIGNS, r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer((_THREE_DIGITS, _LLAMA3), ignore_merges=True),
    # A long s ends a word as an s does, and joiners are letters.
    "k2-horizon": PreTokenizer(
        (_LLAMA3.replace("'[s", r"'[\u017Fs").replace(r"\p{L}+", r"[\p{L}\p{M}\u200C\u200D]+"),)
    ),
    "jais-2": PreTokenizer((_LLAMA3.replace(r"\s+(?!\S)|\s+", _SPACE_BY_POWERS_OF_2),)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GRANITE,), ignore_merges=True),
    # Groups of three digits, counted from the end; in llama.cpp the first has the text before it.
    "tiny_aya cohere2moe": PreTokenizer(
        (
            r"\P{N}*+(?:\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\z)",
            f"{_MARKED}|{_THREE_DIGITS}|{_PATHS}|{_SPACE}",
        )
    ),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))")),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _TO_HANGUL, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(_DEEPSEEK3),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "youtu": PreTokenizer((_YOUTU, f"{_MARKED}|{_DIGIT}|{_PATHS}|{_SPACE}"), ignore_merges=True),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_NO_POINTS,)),
    "viking": PreTokenizer((_NO_POINTS, _DIGIT)),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
}
PRE_TOKENIZERS = {name: kind for names, kind in _KINDS.items() for name in names.split()}
