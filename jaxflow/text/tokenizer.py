"""Text to token ids and back (`Tokenizer`), from a Hugging Face folder or a GGUF file (`load_tokenizer`)."""

from collections.abc import Iterable
from pathlib import Path

from jaxflow.text.gguf_vocabulary import read_gguf_vocabulary
from jaxflow.text.hf_vocabulary import read_hf_vocabulary
from jaxflow.text.text_stream import Pieces, TextStream
from jaxflow.text.vocabulary import TokenizerError, Vocabulary


class Tokenizer:
    """A vocabulary in use. Holds no state that a call changes but caches: threads may share it.

    Attributes:
      vocab_size: the largest token id plus one. A model's own vocabulary may be larger: ids past it are no
      text. bos_token_id, eos_token_id: the tokenizer's own, or None. eos_token_ids: every token that ends an
      answer, `eos_token_id` first. special_ids: tokens that are not text (`<s>`, `<|im_end|>`), which
      `skip_special_tokens` leaves out. special_tokens: name in chat templates (`bos_token`, ...) -> text.
      chat_template: Jinja source, or None.

    Raises:
      TokenizerError: a vocabulary whose decoder is not supported.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._backend = vocabulary.backend
        self.source = vocabulary.source
        self.vocab_size = vocabulary.vocab_size
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        self.eos_token_id = next(iter(vocabulary.eos_token_ids), None)
        self.special_tokens = vocabulary.special_tokens
        self.chat_template = vocabulary.chat_template
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        try:
            self._pieces = {
                False: Pieces(self._backend),
                True: Pieces(self._backend, hidden=self.special_ids),
            }
        except TokenizerError as error:
            raise TokenizerError(f"{self.source}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text. The names of special tokens in it (`<|im_start|>`) become those
        tokens.

        `add_special_tokens` puts a BOS before the text where the vocabulary says so; a chat template writes
        its own.

        Raises:
          TokenizerError: a lone surrogate, which is no Unicode text; names its place.
        """
        check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; U+FFFD stands for bytes that are no character. Raises:
        TokenizerError for a negative id.
        """
        stream = TextStream(self.pieces(skip_special_tokens))
        return stream.push(token_ids) + stream.finish()

    def token_text(self, token_id: int) -> str:
        """Returns one token as one can read it: special tokens by name, its own space kept, U+FFFD for a part
        of a character.
        """
        piece = self._pieces[False][token_id]
        return piece.decode(errors="replace") if isinstance(piece, bytes) else piece or ""

    def pieces(self, skip_special_tokens: bool) -> Pieces:
        """The table from token id to text that `decode` and the detokenizer use."""
        return self._pieces[bool(skip_special_tokens)]


def check_text(text: str) -> None:
    """Refuses a string that has no UTF-8. Raises: TokenizerError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = text[error.start]
        raise TokenizerError(
            f"the text has a lone surrogate U+{ord(lone):04X} at character {error.start}: not valid Unicode"
        ) from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder or of a `.gguf` file.

    Raises:
      TokenizerError: nothing there, or not a vocabulary that is supported; names the file.
    """
    path = Path(path)
    if path.is_dir():
        return Tokenizer(read_hf_vocabulary(path))
    if path.suffix == ".gguf" and path.is_file():
        return Tokenizer(read_gguf_vocabulary(path))
    raise TokenizerError(f"{path} is not a folder with a tokenizer.json, nor a .gguf file")
