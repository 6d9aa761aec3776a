"""Text to tokens and back: bytes, or any tokenizer.json of the Hugging Face `tokenizers` library.

Called by jobs.data.tokenize and jobs.data.inspect. Adds nothing to a text: what ends a document is the caller's to add.
"""
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jobs.spec.load import Problem, SpecError
from jobs.spec.tokens import TEXT_VOCABULARY

BYTES = "bytes"
EOD_BYTE = 0


class Tokenizer(Protocol):
    name: str  # identity: equal names mean equal tokens
    path: str | None
    vocab_size: int
    eod: int | None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]: ...
    def decode(self, tokens: np.ndarray) -> str: ...


class ByteTokenizer:
    """UTF-8, one token per byte; byte 0 ends a document and may not be part of one."""

    name, path, vocab_size, eod = BYTES, None, TEXT_VOCABULARY, EOD_BYTE

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")


class HubTokenizer:
    """A tokenizer.json. Raises SpecError where it cannot be read, or what ends a document is not clear."""

    def __init__(self, path: Path, *, eod_token: str | None, needs_eod: bool) -> None:
        library = _library()
        try:
            content = path.read_bytes()
            self._tokenizer = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
            raise _refusal(path, f"cannot be read as a tokenizer: {error}; give `bytes` or a tokenizer.json") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.path = str(path.resolve())
        self.name = f"{path.name} sha256:{hashlib.sha256(content).hexdigest()[:16]}"
        # ids may have gaps: the largest counts, not their number
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eod = self._find_eod(path, eod_token) if needs_eod else None

    def _find_eod(self, path: Path, token: str | None) -> int:
        special = [added.content for added in self._tokenizer.get_added_tokens_decoder().values() if added.special]
        if token is None and len(special) == 1:
            token = special[0]
        if token is None:
            raise _refusal(path, f"has {len(special)} special tokens: name with --eod-token the one that ends a "
                                 f"document ({', '.join(special[:12]) or 'or any other'}), or give --no-append-eod")
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise _refusal(path, f"does not know the --eod-token {token!r}; special tokens: {', '.join(special[:12])}")
        return found

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in found]

    def decode(self, tokens: np.ndarray) -> str:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def load_tokenizer(name: str, *, eod_token: str | None = None, needs_eod: bool = False) -> Tokenizer:
    """`name`: "bytes", or the path of a tokenizer.json."""
    if name != BYTES:
        return HubTokenizer(Path(name), eod_token=eod_token, needs_eod=needs_eod)
    if eod_token is not None:
        raise SpecError([Problem(where="--eod-token", value=eod_token, message="is for tokenizer files; byte 0 ends "
                                 "a document of bytes")])
    return ByteTokenizer()


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise SpecError([Problem(where="--tokenizer", value=None, message="a tokenizer file needs the `tokenizers` "
                                 "library: pip install tokenizers")]) from None
    return tokenizers


def _refusal(path: Path, message: str) -> SpecError:
    return SpecError([Problem(where="--tokenizer", value=str(path), message=message)])
