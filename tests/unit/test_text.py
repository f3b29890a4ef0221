"""Detokenising and stop strings: any chunking gives the text of a decode of the whole."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.ingress.tokens.detokenizer import TextStream, TokenizerVocabulary

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Grüße aus Köln, naïve café, 日本語のテキスト, 你好世界",
    "🙂🙃 emoji 👩‍👩‍👧 and цифры 12345 \n\ttabs",
]


def byte_level(merges: int = 120) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    for word in ["▁hello", "▁", "a", "b", "▁wör", "ld", "日", "本"]:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


LEVEL = byte_level()
LEVEL_VOCABULARY = TokenizerVocabulary(LEVEL)
FALLBACK = byte_fallback()
FALLBACK_VOCABULARY = TokenizerVocabulary(FALLBACK)
LEVEL_IDS = st.lists(st.integers(0, LEVEL.get_vocab_size() - 1), max_size=60)


def chunks(ids: Sequence[int], cuts: random.Random) -> list[list[int]]:
    parts, at = [], 0
    while at < len(ids):
        step = cuts.choice([1, 1, 1, 2, 3, 7])
        parts.append(list(ids[at : at + step]))
        at += step
    return parts


def stream_text(stream: TextStream, parts: list[list[int]]) -> tuple[str, str | None, int]:
    """Text, stop match and number of tokens used, pushing until a match or the end."""
    text, used = "", 0
    for i, part in enumerate([*parts, []]):
        delta = stream.push(part, final=i == len(parts))
        text += delta.text
        used += delta.tokens_used
        if delta.stop_match is not None:
            return text, delta.stop_match, used
    return text, None, used


@given(ids=LEVEL_IDS, seed=st.integers(), skip=st.booleans())
@settings(max_examples=400)
def test_byte_level_text_equals_the_full_decode_for_random_tokens_in_any_chunking(ids, seed, skip):
    stream = TextStream(LEVEL_VOCABULARY, skip_special_tokens=skip)
    text, match, used = stream_text(stream, chunks(ids, random.Random(seed)))
    assert text == LEVEL.decode(ids, skip_special_tokens=skip)
    assert (match, used) == (None, len(ids))


@given(text=st.text(alphabet="hello wörld日本語🙂ab", max_size=60), seed=st.integers())
@settings(max_examples=200)
def test_byte_fallback_text_equals_the_full_decode_apart_from_the_leading_space(text, seed):
    ids = FALLBACK.encode("a" + text.replace(" ", "▁")).ids
    out, _, _ = stream_text(TextStream(FALLBACK_VOCABULARY), chunks(ids, random.Random(seed)))
    assert out == FALLBACK.decode(ids)


def test_byte_fallback_gives_one_replacement_per_undecodable_byte():
    ids = [0xE4 + 1, 0xBD + 1, FALLBACK.token_to_id("a")]
    out, _, _ = stream_text(TextStream(FALLBACK_VOCABULARY), [[i] for i in ids])
    assert out == FALLBACK.decode(ids) == "\ufffd\ufffda"


LEVEL_BYTES = {LEVEL_VOCABULARY.piece(i)[0]: i for i in range(256) if len(LEVEL_VOCABULARY.piece(i)) == 1}


def spelled(text: str) -> list[int]:
    return [LEVEL_BYTES[b] for b in text.encode()]


def reference(text_by_token: list[str], stop: list[str], include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    """One token at a time over the whole text so far: slow and plain."""
    text = ""
    for count, piece in enumerate(text_by_token, 1):
        before = len(text)
        text += piece
        if count <= min_tokens or not piece:
            continue
        found = [(text.find(s, max(0, before - len(s) + 1)), i, s) for i, s in enumerate(stop)]
        ends = sorted((at + len(s), i, at, s) for at, i, s in found if at >= 0)
        if ends:
            end, _, at, match = ends[0]
            return text[: end if include else at], match, count
    return text, None, len(text_by_token)


@given(
    text=st.text(alphabet="ab日 ", max_size=30),
    stop=st.lists(st.text(alphabet="ab日 ", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
    seed=st.integers(),
)
@settings(max_examples=800)
def test_stop_strings_end_the_text_where_a_plain_search_would_in_any_chunking(text, stop, include, min_tokens, seed):
    ids = spelled(text)
    by_token = [b if i == len(c.encode()) - 1 else "" for c in text for i, b in enumerate([c] * len(c.encode()))]
    stream = TextStream(LEVEL_VOCABULARY, stop, include_stop=include, min_tokens=min_tokens)
    assert stream_text(stream, chunks(ids, random.Random(seed))) == reference(by_token, stop, include, min_tokens)


@pytest.mark.parametrize(("include", "expected"), [(False, "ab"), (True, "ab!")])
def test_the_token_that_stopped_a_sequence_gives_text_only_with_include_stop(include, expected):
    stream = TextStream(LEVEL_VOCABULARY, include_stop=include)
    assert stream.push(spelled("ab!"), final=True, stop_token=True).text == expected


def test_special_tokens_are_skipped_unless_asked_for_and_other_added_tokens_never():
    end, call = LEVEL.token_to_id("<|end|>"), LEVEL.token_to_id("<tool call>")
    assert TextStream(LEVEL_VOCABULARY).push([call, end], final=True).text == "<tool call>"
    shown = TextStream(LEVEL_VOCABULARY, skip_special_tokens=False).push([call, end], final=True)
    assert shown.text == "<tool call><|end|>"


def test_an_id_beyond_the_vocabulary_gives_no_text():
    assert TextStream(LEVEL_VOCABULARY).push([10**6, *spelled("a")], final=True).text == "a"


def test_a_tokenizer_of_another_family_is_decoded_by_its_own_stream():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    vocabulary = TokenizerVocabulary(tokenizer)
    assert vocabulary.table(True) is None
    text, _, _ = stream_text(TextStream(vocabulary), [[1], [2], [3]])
    assert text == tokenizer.decode([1, 2, 3])
