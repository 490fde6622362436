"""`Tokenizer` encodes and decodes text. `load_tokenizer` reads it from a
Hugging Face folder or a GGUF file.
"""

import copy
import functools
from collections.abc import Iterable
from pathlib import Path

from jaxflow.text.control_tokens import ControlTokens, encode_text
from jaxflow.text.gguf_vocabulary import read_gguf_vocabulary
from jaxflow.text.hf_vocabulary import read_hf_vocabulary
from jaxflow.text.vocabulary import TextStream, TokenizerError, TokenPieces, Vocabulary

PIECE_CHARS = 1 << 16  # a longer text is counted in pieces of this size before it is tokenized whole


class TooManyTokens(TokenizerError):
    """A text that is longer than the accepted number of tokens."""


class Tokenizer:
    """A tokenizer. Threads may share it, because calls change only caches.

    Attributes:
      source: the folder or file of the vocabulary.
      vocab_size: the largest token id plus one. The vocabulary of the model may be larger. Ids past
        `vocab_size` have no text.
      text_vocab_size: number of tokens without the added ones.
      bos_token_id, eos_token_id: ids of the tokenizer's own tokens, or None.
      eos_token_ids: every end-of-sequence token, `eos_token_id` first.
      special_ids: tokens that are not text (`<s>`, `<|im_end|>`). `skip_special_tokens` leaves them out.
      special_tokens: token texts by their names in chat templates (`bos_token`, ...).
      chat_template: the Jinja source, or None.

    Raises:
      TokenizerError: the decoder of the vocabulary is not supported.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._backend = vocabulary.backend
        self.source = vocabulary.source
        self.vocab_size = vocabulary.vocab_size
        self.text_vocab_size = self._backend.get_vocab_size(with_added_tokens=False)
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        self.eos_token_id = next(iter(vocabulary.eos_token_ids), None)
        self.special_tokens = vocabulary.special_tokens
        self.chat_template = vocabulary.chat_template
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        try:
            self._pieces = {
                False: TokenPieces(self._backend),
                True: TokenPieces(self._backend, hidden=self.special_ids),
            }
        except TokenizerError as error:
            raise TokenizerError(f"{self.source}: {error}") from error

    def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text. The text of a special token (`<|im_start|>`) becomes this token.

        Args:
          add_special_tokens: add a BOS token if the vocabulary has this setting. A chat template writes its
            own special tokens.
          max_tokens: see `check_length`; None for any length.

        Raises:
          TooManyTokens: see `check_length`.
          TokenizerError: the text has a lone surrogate, which is not valid Unicode.
        """
        check_text(text)
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        return encode_text(self._backend, text, add_special_tokens)

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Return the number of characters of the longest token, or of its bytes where these are more."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def check_chars(self, chars: int, max_tokens: int) -> None:
        """Check a number of characters.

        Raises: TooManyTokens for more than `max_tokens` of the longest tokens.
        """
        most = max_tokens * self.max_token_chars
        if chars > most:
            raise TooManyTokens(f"at most {max_tokens} tokens, and at most {most} characters")

    def check_length(self, text: str, max_tokens: int) -> None:
        """Check that a text can have at most about `max_tokens` tokens, at a bounded cost.

        No text passes that has more than twice `max_tokens` tokens and more than `PIECE_CHARS`
        bytes. The cost is that of tokenizing about `2 * max_tokens` tokens, however long the text
        is. The text is valid Unicode.

        Raises:
          TooManyTokens: the text has more characters than `max_tokens` of the longest tokens, or its first
            pieces have more than twice `max_tokens` tokens.
        """
        self.check_chars(len(text), max_tokens)
        if len(text.encode()) <= max(PIECE_CHARS, 2 * max_tokens):
            return  # a token has at least a byte
        counted = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            counted += len(self._backend.encode_batch_fast([piece], add_special_tokens=False)[0])
            # Cuts between pieces change the count a little, so the limit of the count is twice the maximum.
            if counted > 2 * max_tokens:
                raise TooManyTokens(f"at most {max_tokens} tokens")

    @functools.cached_property
    def special_texts(self) -> frozenset[str]:
        """Return the texts of the special tokens."""
        return frozenset(map(self.token_text, self.special_ids))

    @functools.cached_property
    def control_tokens(self) -> ControlTokens:
        """The encoding of text in which a user's control tokens stay plain text."""
        return ControlTokens(self._backend)

    def with_chat_template(self, source: str) -> "Tokenizer":
        """Return a tokenizer of the same vocabulary with another chat template."""
        other = copy.copy(self)
        other.chat_template = source
        return other

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, with U+FFFD for invalid bytes.

        Raises:
          TokenizerError: a negative id.
        """
        stream = TextStream(self.pieces(skip_special_tokens))
        return stream.push(token_ids) + stream.finish()

    def token_text(self, token_id: int) -> str:
        """Return the readable text of one token.

        Special tokens appear by name, a leading space is kept, and U+FFFD stands for a part of a character.
        """
        piece = self._pieces[False][token_id]
        return piece.decode(errors="replace") if isinstance(piece, bytes) else piece or ""

    def pieces(self, skip_special_tokens: bool) -> TokenPieces:
        """Return the table from token id to text for `decode` and the detokenizer."""
        return self._pieces[bool(skip_special_tokens)]


def check_text(text: str) -> None:
    """Check that a text can be encoded in UTF-8. Raises: TokenizerError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = text[error.start]
        raise TokenizerError(
            f"the text has a lone surrogate U+{ord(lone):04X} at character {error.start}: not valid Unicode"
        ) from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder or of a `.gguf` file.

    Raises:
      TokenizerError: the file is missing or its vocabulary is not supported. The error names the file.
    """
    path = Path(path)
    if path.is_dir():
        return Tokenizer(read_hf_vocabulary(path))
    if path.suffix == ".gguf" and path.is_file():
        return Tokenizer(read_gguf_vocabulary(path))
    raise TokenizerError(f"{path} is neither a folder with a tokenizer.json nor a .gguf file")
