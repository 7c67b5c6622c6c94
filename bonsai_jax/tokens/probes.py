"""Texts by which two tokenizers are compared: words, endings, numbers, white space, code, scripts, signs."""

from bonsai_jax.tokens.vocabulary import Vocabulary

TEXTS = (
    "Hello world, it's 12345 o'clock! We'll see what they've done; I'm here, you'd say.",
    " leading space,  two spaces,   three\tand tabs\t\t, end  ",
    "lines\n\nmore lines\n\n\nthree\r\n  indented\n\t- item\n",
    "def f(x, y=1):\n    return x**2 + 3.14159 * y  # a/b and c\\d\n",
    "Привет, мир! Ελληνικά κείμενα. 日本語のテキスト、中文字符。 한국어 문장 ไทย हिन्दी العربية",
    "CamelCase HTTPServer snake_case a1b2c3 007 1,000,000.50 2024-11-26 x=y+z",
    "(brackets) [and] {braces} <tags/> “quotes” — dash… €100 ½ © 🙂🚀",
)


def first_difference(a: Vocabulary, b: Vocabulary) -> str | None:
    """The first text that becomes other tokens, or None."""
    return next((text for text in TEXTS if a.encoder(text, True) != b.encoder(text, True)), None)
