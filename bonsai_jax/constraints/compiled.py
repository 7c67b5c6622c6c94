"""A Constraint for the tokens of one model: compiled by llguidance, and followed token by token.

llguidance has a trie of all tokens' bytes. A parser walks it from where an answer stands, and what it can
reach are the tokens that may come next. Forced tokens are those of the only text that can follow, cut as the
tokenizer would cut it; an answer always gets them, so that its tokens do not depend on how they are read.
"""

import dataclasses
import importlib.util
import json
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from bonsai_jax.constraints.constraint import Constraint
from bonsai_jax.constraints.matcher import Matcher
from bonsai_jax.tokens.calls import harmony
from bonsai_jax.tokens.calls.grammar import Rules
from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.tokens.vocabulary import CONTROL, UNKNOWN

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_COMPILED = 256  # constraints of a tokenizer that stay compiled; the least recently used go first
# Beyond these a constraint is an error: a state of the lexer takes 1 to 2 KB.
LIMITS = {"max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}
# JSON as json.dumps writes it. Where any whitespace may come, small models write nothing else.
JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# llguidance prepares a mask for each of these expressions. Where all texts of one may follow, it checks only
# the remaining tokens. They are white space, and text in a JSON string, by length because of maxLength.
IN_STRING, LENGTHS = r'[^"\\\x00-\x1F\x7F]', (4, 6, 8, 10, 12, 16, 30)
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{IN_STRING}{{1,{n}}}" for n in LENGTHS), f"{IN_STRING}+"]

_LOCK = threading.Lock()


def compile(constraint: Constraint, tokenizer: Tokenizer, vocab_size: int) -> "Compiled":
    """The constraint for these tokens, compiled or found among those that were. It may be called in any
    thread; llguidance releases the GIL.

    vocab_size   of the model, which can exceed the tokenizer's
    A constraint that leaves its thought open has none.
    Raises ValueError for a constraint that cannot be compiled, or that no text matches, and ImportError where
    llguidance is not installed.
    """
    tokens = _tokens(tokenizer, vocab_size)
    constraint = dataclasses.replace(constraint, thought=constraint.thought or "none")
    with _LOCK:
        if compiled := tokens.compiled.get(constraint):
            tokens.compiled.move_to_end(constraint)
            return compiled
    compiled = Compiled(constraint.kind, _with_thought(constraint, tokenizer), tokens)
    with _LOCK:
        tokens.compiled[constraint] = compiled
        while len(tokens.compiled) > MOST_COMPILED:
            tokens.compiled.popitem(last=False)
    return compiled


def installed() -> bool:
    """Whether llguidance is."""
    return importlib.util.find_spec("llguidance") is not None


def prepare(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Make what all constraints for these tokens need, unless it is made, or the tokenizer has no token that
    ends an answer."""
    if any(token < vocab_size for token in tokenizer.eos_ids):
        _tokens(tokenizer, vocab_size)


class Compiled:
    """A constraint for a model's tokens. `matcher` makes a Matcher for each answer."""

    def __init__(self, kind: str, grammar: str, tokens: "_Tokens"):
        from llguidance import LLMatcher, LLParserLimits

        own = LLMatcher(tokens.trie, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        self._start = Matcher(kind, tokens.words, tokens.end_tokens, own)
        self._start.find()

    def matcher(self) -> "Matcher":
        """At the beginning of an answer, with what may come first."""
        with _LOCK:
            return self._start.copy()


class _Tokens:
    """A model's tokens as llguidance has them, and the constraints that are compiled for them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        try:
            import llguidance
        except ImportError:
            raise ImportError('constraints need llguidance: pip install "bonsai-jax[constraints]"') from None
        ends = [token for token in sorted(tokenizer.eos_ids) if token < vocab_size]
        if not ends:
            raise ValueError("constraint: this model's tokenizer has no token that ends an answer")
        wrapper = llguidance.TokenizerWrapper(_Encoder(tokenizer, vocab_size, ends[0]))
        self.trie: LLTokenizer = llguidance.LLTokenizer(wrapper, eos_token=ends, slices=SLICES)
        self.words = -(-vocab_size // 32)
        self.end_tokens = ends
        self.compiled: OrderedDict[Constraint, Compiled] = OrderedDict()


class _Encoder:
    """A Tokenizer with the attributes that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        kinds = enumerate(tokenizer.kinds[:vocab_size])
        self.special_token_ids = [id for id, kind in kinds if kind in (CONTROL, UNKNOWN)]
        # Not the tokenizer itself, which goes when its model goes (_OF_TOKENIZERS).
        self._encoder, self._space_prefix = tokenizer.encoder, tokenizer.space_prefix

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text that continues another."""
        text = text.decode() if isinstance(text, bytes) else text
        if not self._space_prefix:
            return self._encoder(text, False)
        # The tokenizer puts a space before a text: let it do so before a line that is then cut off.
        ids, at = self._encoder("\n" + text, False), 0
        for i, id in enumerate(ids):
            if at >= len(b" \n"):
                return ids[i:]
            at += len(self.tokens[id])
        return []


_OF_TOKENIZERS: "weakref.WeakKeyDictionary[Tokenizer, dict[int, _Tokens]]" = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> _Tokens:
    """Made once for each tokenizer; that takes half a second for 50,000 tokens."""
    with _MAKING:
        sizes = _OF_TOKENIZERS.setdefault(tokenizer, {})
        if vocab_size not in sizes:
            sizes[vocab_size] = _Tokens(tokenizer, vocab_size)
        return sizes[vocab_size]


def _grammar(constraint: Constraint) -> str:
    """As llguidance takes it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    text = constraint.text
    if constraint.kind == "json_schema":
        try:
            return LLMatcher.grammar_from_json_schema(text, JSON)
        except ValueError as error:
            raise ValueError(f"json_schema: {error}") from None
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if constraint.kind == "choice":  # a terminal: as rules, many texts would take long
        texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # of any kind: it is not ours
        raise ValueError(f"grammar: {error}") from None


def _with_thought(constraint: Constraint, tokenizer: Tokenizer) -> str:
    """The grammar of whole answers: what comes before the text that must match, and that text, as a grammar
    of its own within the other."""
    grammar, thought = _grammar(constraint), constraint.thought
    if thought in (None, "none"):
        return grammar
    rules = Rules(tokenizer.control_ids)
    before = harmony.before(rules, thought) if tokenizer.writes_harmony else rules.thought(thought)
    own = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    whole = {"lark_grammar": rules.written(f"{before} @answer")}
    return json.dumps({"grammars": [whole, own | {"name": "answer"}]})
