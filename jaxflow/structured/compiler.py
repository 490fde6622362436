"""The compiler of forms: JSON schemas, regular expressions, choices and grammars."""

import collections
import functools
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxflow.request import InvalidRequest, StructuredOutputsParams
from jaxflow.structured.constraint import TokenConstraint
from jaxflow.text.reasoning import Begin, Marks, begin_of
from jaxflow.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # the import takes a tenth of a second, and only requests with a form need it
    import llguidance

# Between the tokens of JSON: a space, or a new line with an indent. Without a
# bound a model may write white space only, until its answer is cut.
WHITESPACE = r"[ ]?|\n[ ]{0,16}"
# All schemas have these rules. An unknown keyword is refused, and oneOf is not read as anyOf.
JSON_RULES = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
CACHED_FORMS = 64
END_TOKENS = 32  # the end of a prompt that may hold the marks of reasoning
MAX_LEXER_STATES = 50_000  # 1 to 2 KB each


class FormCompiler:
    """Compiles the forms of answers for one model. Threads may share it.

    Args:
      tokenizer: of the model; None refuses every form.
      vocab_size: of the model.
      eos_token_ids: the model's end tokens, which may follow where a form may end.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = tuple(dict.fromkeys(eos_token_ids))
        self._lock = threading.Lock()
        self._matchers: collections.OrderedDict[tuple[str, object], llguidance.LLMatcher] = (
            collections.OrderedDict()
        )

    def compile(
        self,
        wanted: StructuredOutputsParams,
        stop_token_ids: Sequence[int] = (),
        prompt_token_ids: Sequence[int] = (),
    ) -> Callable[[], TokenConstraint]:
        """Return the maker of the constraints of a request's sequences.

        prompt_token_ids: their end tells if the answer begins within reasoning.

        Raises:
          InvalidRequest: a form that is wrong, that is too large, or that uses what is not supported.
        """
        tokenizer = self._tokenizer
        if tokenizer is None or not self._eos:
            lacks = "tokenizer" if tokenizer is None else "end token"
            accepted = f"null, because this model has no {lacks}"
            raise InvalidRequest("structured_outputs", wanted.form, accepted)
        matcher = self._matcher(wanted)
        reasoning = wanted.reasoning
        if reasoning is not None:
            end = tokenizer.decode(prompt_token_ids[-END_TOKENS:], skip_special_tokens=False)
            otherwise = Begin.REASONING if reasoning.begun else Begin.ANSWER
            marks = Marks(reasoning.opening, reasoning.closing)
            begin = begin_of(end, reasoning.continued, otherwise, marks)
            reasoning = reasoning._replace(begun=begin is Begin.REASONING)
            reasoning = None if begin is Begin.CONTENT else reasoning
        make = functools.partial(TokenConstraint, reasoning=reasoning, tokenizer=tokenizer)
        return lambda: make(matcher.deep_copy(), stop_token_ids)

    def _matcher(self, wanted: StructuredOutputsParams) -> "llguidance.LLMatcher":
        """Return the matcher of a form, at its start. Nobody may advance it."""
        import llguidance

        key = wanted.form, wanted.choice or wanted.text
        with self._lock:
            if key in self._matchers:
                self._matchers.move_to_end(key)
                return self._matchers[key]
        try:
            grammar = _grammar_of(wanted)
            made = llguidance.LLMatcher(self._vocabulary, grammar, limits=_limits(), log_level=0)
            made.compute_bitmask()  # the first mask takes longest, and its copies know its states
            problem = made.get_error() if made.is_error() else ""
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if problem:
            problem = " ".join(problem.removesuffix("<non-verbose/>").split())
            raise InvalidRequest(f"structured_outputs.{wanted.form}", wanted.text, problem[:300])
        with self._lock:
            self._matchers[key] = made
            while len(self._matchers) > CACHED_FORMS:
                self._matchers.popitem(last=False)
        return made

    @functools.cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        """The tokens as the matchers see them. Making it takes a third of a second for 50,000 tokens."""
        import llguidance

        assert self._tokenizer is not None
        vocabulary = llguidance.TokenizerWrapper(_Tokens(self._tokenizer, self._vocab_size, self._eos[0]))
        return llguidance.LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=list(self._eos))


class _Tokens:
    """A tokenizer as `llguidance.TokenizerWrapper` takes it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        self._encode = tokenizer.encode
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_token_id
        self.special_token_ids = [token for token in sorted(tokenizer.special_ids) if token < vocab_size]
        pieces = tokenizer.pieces(False)
        found = (pieces[token] for token in range(vocab_size))
        self.tokens = [piece.encode() if isinstance(piece, str) else piece or b"" for piece in found]
        special = {*self.special_token_ids, eos_token_id}
        self._token_of = {text: token for token, text in enumerate(self.tokens) if token not in special}
        self._most = max(map(len, self._token_of))

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text within an answer, where SentencePiece adds no space before it.

        An exception would end the process: `llguidance` takes it for a fault of its own.
        """
        data = text.encode()
        for before in ("", "\n"):
            try:
                ids = self._encode(before + text, False)
            except Exception:
                continue
            left = len(data)
            for first in range(len(ids), -1, -1):
                if left == 0 and self._bytes(ids[first:]) == data:
                    return ids[first:]
                left -= len(self._bytes(ids[first - 1 : first]))
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """Return the longest token that begins the bytes, then that of the rest."""
        ids: list[int] = []
        while data:
            ends = range(min(len(data), self._most), 0, -1)
            end = next((end for end in ends if data[:end] in self._token_of), None)
            if end is None:
                break
            ids.append(self._token_of[data[:end]])
            data = data[end:]
        return ids

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[token] for token in ids)


@functools.cache
def _limits() -> "llguidance.LLParserLimits":
    """Return the limits of the work of a form, and of each of its tokens."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=200_000,  # about 14 ms
        step_max_items=50_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _grammar_of(wanted: StructuredOutputsParams) -> str:
    """Return a form as a grammar of `llguidance`. Raises: ValueError."""
    import llguidance

    match wanted.form:
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(wanted.text)
        case "choice":
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted.choice or ())
            return llguidance.LLMatcher.grammar_from_lark(f"start: {texts}\n")
        case "grammar":
            return llguidance.grammar_from("grammar", wanted.text)
    rules: Any = JSON_RULES
    return llguidance.LLMatcher.grammar_from_json_schema(wanted.text, overrides=rules)
