"""Incremental detokenizer: token ids to text, with UTF-8, special tokens and stop strings across pushes. No I/O.

A vocabulary is turned once into a table id -> bytes, for the two families of tokenizers that language models use:
byte-level BPE (every token is a byte string) and byte-fallback (``<0xE4>`` stands for one byte). Then a token costs a
list lookup, and a UTF-8 decoder holds back what is not yet a character. Any other decoder goes through
``tokenizers``' own stream, at some microseconds per token.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Protocol

import msgspec
from millrace.judging.confidence import ConfidenceModel
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\ufffd"
_NO_TEXT = ""


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Error handler: one U+FFFD per undecodable byte, as byte-fallback decoders do it."""
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("millrace.each_byte", _each_byte)


class PieceTable(msgspec.Struct, frozen=True):
    """Text and bytes of each token id.

    Attributes:
        pieces: Bytes by token id; empty for skipped special tokens and unused ids.
        texts: The same as text where the bytes are whole characters, else None.
        errors: Name of the error handler for bytes that are no UTF-8.
    """

    pieces: list[bytes]
    texts: list[str | None]
    errors: str


class TokenizerVocabulary:
    """A tokenizer's vocabulary as text and bytes. Built once per model, shared by all streams."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build the tables: some 100 ms per 100,000 tokens."""
        self.tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        family = _family(json.loads(tokenizer.to_str()).get("decoder"))
        self._full = None if family is None else _table(tokenizer, family)
        #: Bytes of the longest token; 0 where only ``tokenizers`` knows.
        self.longest_piece = max(map(len, self._full.pieces), default=0) if self._full is not None else 0
        self._spoken = None if self._full is None else _without(self._full, self.special_ids)

    def table(self, skip_special_tokens: bool) -> PieceTable | None:
        """The piece table, or None where only ``tokenizers`` knows how to decode."""
        return self._spoken if skip_special_tokens else self._full

    def piece(self, token_id: int) -> bytes:
        """Bytes of one token, special ones included; empty for an unknown id."""
        if self._full is None:
            return str(self.tokenizer.decode([token_id], skip_special_tokens=False)).encode()
        return self._full.pieces[token_id] if 0 <= token_id < len(self._full.pieces) else b""

    def piece_text(self, token_id: int) -> str:
        """Text of one token by itself, U+FFFD for what is no whole character."""
        return self.piece(token_id).decode("utf-8", "replace")


class TextModel(msgspec.Struct, frozen=True):
    """Properties of a model by which the core turns tokens into text, sees that a log has ended, and judges answers.

    Attributes:
        eos_token_ids: Ids that end a sequence unless ``ignore_eos``.
        judge: Fitted confidence judge of its answers; None for none.
    """

    vocabulary: TokenizerVocabulary
    eos_token_ids: frozenset[int] = frozenset()
    judge: ConfidenceModel | None = None


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """Result of a push.

    Attributes:
        text: Text that may be shown; nothing later changes it.
        stop_match: The stop string that ended the text, or None.
        tokens_used: Tokens of this push that count: all, or with a match those up to the one that completed it.
    """

    text: str
    stop_match: str | None
    tokens_used: int


class _Decoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class TextStream:
    """Text of one sequence as its tokens come. Chunking never changes the text.

    Held back: bytes of an incomplete character, and text that may be the start of a stop string (not with
    ``include_stop``: there it is shown whether or not it becomes one). The final push gives everything; bytes that
    never became a character are then U+FFFD, as in a decode of the whole.
    """

    __slots__ = ("_decoder", "_hold_to", "_include_stop", "_min_tokens", "_stop", "_tail")

    def __init__(
        self,
        vocabulary: TokenizerVocabulary,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """``min_tokens``: a stop string that is complete within that many tokens is no match (as vLLM has it)."""
        table = vocabulary.table(skip_special_tokens)
        self._decoder: _Decoder
        if table is None:
            self._decoder = _StreamDecoder(vocabulary.tokenizer, skip_special_tokens)
        else:
            self._decoder = _TableDecoder(table)
        self._stop = [s for s in stop if s]
        self._hold_to = max((len(s) for s in self._stop), default=1) - 1
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tail = _NO_TEXT  # may be the start of a stop string; shown already with include_stop

    def push(self, token_ids: Sequence[int], final: bool, stop_token: bool = False) -> TextDelta:
        """Take the next tokens.

        Args:
            token_ids: In order; may be empty.
            final: The sequence ended (in its engine); gives out what was held back.
            stop_token: The last of these tokens is an EOS or a stop token that ended the sequence: it gives no text
                unless ``include_stop``.
        """
        spoken = token_ids[:-1] if stop_token and not self._include_stop else token_ids
        if not self._stop:
            text = self._decoder.decode(spoken)
            return TextDelta(text + self._decoder.flush() if final else text, None, len(token_ids))
        return self._push_matching(spoken, len(token_ids), final)

    def _push_matching(self, spoken: Sequence[int], count: int, final: bool) -> TextDelta:
        shown: list[str] = []
        for used, token_id in enumerate(spoken, 1):
            stop = self._advance(self._decoder.decode((token_id,)), shown)
            if stop is not None:
                return TextDelta("".join(shown), stop, used)
        if final:
            stop = self._advance(self._decoder.flush(), shown, last=True)
            if stop is not None:
                return TextDelta("".join(shown), stop, count)
            if not self._include_stop:
                shown.append(self._tail)
            self._tail = _NO_TEXT
        return TextDelta("".join(shown), None, count)

    def _advance(self, new: str, shown: list[str], last: bool = False) -> str | None:
        """Add one token's text; appends to ``shown`` what may be shown and returns the stop string that matched."""
        closed = self._min_tokens > 0 and not last
        if closed:
            self._min_tokens -= 1
        if not new:
            return None
        whole = self._tail + new
        match = None if closed else _first_match(whole, self._stop, len(self._tail))
        if match is not None:
            return self._end(whole, match, shown)
        tail = _possible_start(whole, self._stop, self._hold_to)
        if self._include_stop:
            shown.append(new)
        elif len(tail) < len(whole):
            shown.append(whole[: len(whole) - len(tail)])
        self._tail = tail
        return None

    def _end(self, whole: str, match: tuple[int, str], shown: list[str]) -> str:
        begin, stop = match
        if self._include_stop:
            shown.append(whole[len(self._tail) : begin + len(stop)])
        else:
            shown.append(whole[:begin])
        self._tail = _NO_TEXT
        return stop


class _TableDecoder:
    """Pieces joined and read as UTF-8; keeps the bytes of an incomplete character."""

    __slots__ = ("_errors", "_pending", "_pieces", "_texts")

    def __init__(self, table: PieceTable) -> None:
        self._pieces = table.pieces
        self._texts: list[Any] = table.texts
        self._errors = table.errors
        self._pending = b""

    def decode(self, token_ids: Sequence[int]) -> str:
        if not self._pending:
            texts = self._texts
            try:
                if len(token_ids) == 1 and (text := texts[token_ids[0]]) is not None:  # nearly every time
                    return text  # type: ignore[no-any-return]
                if len(token_ids) > 1:  # half the time of a call of __getitem__ per token
                    return "".join(itemgetter(*token_ids)(texts))
            except (TypeError, IndexError):  # a piece that is no whole character, or an id beyond the vocabulary
                pass
        pieces = self._pieces
        count = len(pieces)
        joined = self._pending + b"".join([pieces[i] for i in token_ids if i < count])
        text, consumed = codecs.utf_8_decode(joined, self._errors, False)
        self._pending = joined[consumed:]
        return text

    def flush(self) -> str:
        if not self._pending:
            return _NO_TEXT
        text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return text


class _StreamDecoder:
    """``tokenizers``' own stream, for decoders that are no byte tables. What it holds back at the end is lost to it,
    so the ids since its last output are decoded again.
    """

    __slots__ = ("_held", "_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        out = []
        for token_id in token_ids:
            text = self._stream.step(self._tokenizer, token_id)
            if text is None:
                self._held.append(token_id)
            else:
                self._held.clear()
                out.append(text)
        return "".join(out)

    def flush(self) -> str:
        held, self._held = self._held, []
        return str(self._tokenizer.decode(held, skip_special_tokens=self._skip)) if held else _NO_TEXT


def _first_match(text: str, stops: list[str], known: int) -> tuple[int, str] | None:
    """The stop string that is complete first, and later than the first ``known`` characters; ties go to the order."""
    best: tuple[int, str] | None = None
    best_end = len(text) + 1
    for stop in stops:
        begin = text.find(stop, max(0, known - len(stop) + 1))
        if begin >= 0 and begin + len(stop) < best_end:
            best, best_end = (begin, stop), begin + len(stop)
    return best


def _possible_start(text: str, stops: list[str], length_max: int) -> str:
    """Longest end of ``text`` that is a proper beginning of a stop string."""
    for length in range(min(length_max, len(text)), 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return end
    return _NO_TEXT


def _family(decoder: dict[str, Any] | None) -> str | None:
    """``byte_level``, ``byte_fallback``, ``metaspace`` or None, from a tokenizer's decoder description."""
    if decoder is None:
        return None
    kinds = [d["type"] for d in decoder["decoders"]] if decoder["type"] == "Sequence" else [decoder["type"]]
    if kinds == ["ByteLevel"]:
        return "byte_level"
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return "byte_fallback"
    return "metaspace" if kinds == ["Metaspace"] else None


def _table(tokenizer: Tokenizer, family: str) -> PieceTable:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    alphabet = _byte_alphabet()
    for token, token_id in vocab.items():
        pieces[token_id] = _level_piece(token, alphabet) if family == "byte_level" else _fallback_piece(token)
    return PieceTable(
        pieces, [_whole(p) for p in pieces], "replace" if family == "byte_level" else "millrace.each_byte"
    )


def _without(table: PieceTable, ids: frozenset[int]) -> PieceTable:
    pieces = [b"" if i in ids else p for i, p in enumerate(table.pieces)]
    return PieceTable(pieces, [_whole(p) for p in pieces], table.errors)


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _level_piece(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[c] for c in token])
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return token.encode()


def _fallback_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one printable character per byte: printable Latin-1 stands for itself, the rest is moved past U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(b): b for b in printable}
    moved = [b for b in range(256) if b not in set(printable)]
    alphabet.update({chr(256 + i): b for i, b in enumerate(moved)})
    return alphabet
