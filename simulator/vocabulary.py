"""The vocabulary of simulated models: one token per byte, and an end of sequence."""

from __future__ import annotations

from string import ascii_lowercase

from millrace.enginemodel.tokens import Vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.ingress.tokens.detokenizer import TokenizerVocabulary as TextVocabulary

#: Token id of the end of sequence: behind the 256 bytes.
EOS = 256


def byte_vocabulary() -> TextVocabulary:
    """One token per byte, and an end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    assert tokenizer.token_to_id("<eos>") == EOS
    return TextVocabulary(tokenizer)


def spoken_vocabulary(vocabulary: TextVocabulary) -> Vocabulary:
    """Return the vocabulary of modelled engines: letters and spaces, each token a character that clients tell apart."""
    ids = {vocabulary.piece_text(token): token for token in range(EOS)}
    return Vocabulary(
        size=EOS + 1, eos_token_id=EOS, letters=tuple(ids[letter] for letter in ascii_lowercase), spaces=(ids[" "],)
    )
