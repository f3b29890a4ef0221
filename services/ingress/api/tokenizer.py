"""A model's tokenizer and chat template, read from its folder in Hugging Face's layout; no transformers."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from millrace.actor.errors import ConfigError
from millrace.cluster.model_folders import context_length_of
from millrace.cluster.model_parsers import chat_template, folder_json
from tokenizers import Tokenizer

from services.ingress.api.model_schema_bounds import NO_BOUNDS, SchemaBounds, read_bounds
from services.ingress.tokens.detokenizer import TokenizerVocabulary

#: Prompts longer than this are tokenised in a thread. Tokenising runs at 2 to 5 MB/s: this much costs the loop 10 to
#: 25 ms, about one engine step.
LOOP_CHARACTERS_MAX = 50_000

#: A batch of one must not go to a pool of threads; read by ``tokenizers`` with each batch.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


#: What a template's own expressions can raise on values that it does not expect.
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the model says, for training; here its content stands as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefused(Exception):
    """The chat template raised, or fails on these messages; the text is the template's own."""


class TemplateTraits(msgspec.Struct, frozen=True):
    """Features that a chat template uses.

    Attributes:
        tools: It mentions ``tools``.
        hermes_calls: It writes tool calls as JSON between ``<tool_call>`` tags.
        content_parts: It walks over a message's content, so it wants a list of parts, not a string.
        developer: It knows the role ``developer``.
    """

    tools: bool
    hermes_calls: bool
    content_parts: bool
    developer: bool


class ChatTemplate:
    """A compiled chat template in a sandbox: it can reach nothing but the values given to it."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compile the template.

        Raises:
            ConfigError: it is no valid template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
            autoescape=False,
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: {error}") from None
        # Each rendering copies the globals; jinja2's own chain of maps takes twice the time of all else to copy.
        self._template.globals = dict(self._template.globals)
        self._special = dict(special)
        self.traits = TemplateTraits(
            tools=re.search(r"\btools\b", source) is not None,
            hermes_calls="<tool_call>" in source,
            content_parts=re.search(r"for\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])", source) is not None,
            developer="developer" in source,
        )

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The prompt's text.

        Raises:
            TemplateRefused: the template raised, or cannot cope with these messages.
        """
        try:
            return self._template.render(messages=messages, **self._special, **values)
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise TemplateRefused(str(error) or type(error).__name__) from None


class ModelTokenizer:
    """Text to ids and chat to text for one model. Reading is thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_model_len: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        fingerprint: str = "",
        schema_bounds: SchemaBounds = NO_BOUNDS,
        settings: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        max_model_len: Positions the model was made for; 0 where its folder does not say.
        eos_token_ids: Ids that end a sequence.
        fingerprint: Equal for models whose prompts are rendered and tokenised alike; empty where unknown.
        schema_bounds: Bounds on what a request's schema leaves open.
        settings: Content of ``tokenizer_config.json``, with the chat template.
        config: Content of ``config.json``.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.template = template
        self.vocabulary = TokenizerVocabulary(tokenizer)
        self.characters_per_token_max = _characters_per_token_max(tokenizer, self.vocabulary)
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.fingerprint = fingerprint
        self.schema_bounds = schema_bounds
        self.settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(settings or {})}
        config = config or {}
        #: Of classes, in their order.
        self.labels = _labels(config)
        #: Whether the model tells two texts of a pair apart by token types.
        self.token_types = config.get("type_vocab_size", 0) > 1
        #: Whether the model sees images.
        self.images = "vision_config" in config
        #: Whether its tokenizer puts something between them: not where vLLM makes the classifier of a language model.
        self.pairs_apart = bool(config.get("use_sep_token", not config.get("classifier_from_token")))

    @classmethod
    def load(cls, folder: str | Path) -> ModelTokenizer:
        """Read the tokenizer's files, ``chat_template.jinja``, ``config.json`` and ``schema_bounds.json``.

        Raises:
            ConfigError: the folder has no ``tokenizer.json``, or a file is unreadable.
        """
        home = Path(folder)
        file = home / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{home}: no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception for a bad file
            raise ConfigError(f"{file}: {error}") from None
        settings = folder_json(home / "tokenizer_config.json")
        source = chat_template(home)
        special = _special_tokens(settings)
        config, generation = folder_json(home / "config.json"), folder_json(home / "generation_config.json")
        bounds = read_bounds(home)
        ends = _ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
        return cls(
            tokenizer,
            ChatTemplate(source, special) if source else None,
            max_model_len=context_length_of(config),
            eos_token_ids=ends | _ids(tokenizer.token_to_id(special.get("eos_token", ""))),
            fingerprint=_fingerprint(file.read_bytes(), source, special, bounds),
            schema_bounds=bounds,
            settings=settings | ({"chat_template": source} if source else {}),
            config=config,
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts around a text (BOS)."""
        # A batch of one, since only batches can do without each token's place in the text, a third of the time.
        encoded: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return encoded

    def encode_within(
        self, text: str | tuple[str, str], *, special: bool, length: int | None, side: str
    ) -> tuple[list[int], int]:
        """Token ids of a text or a pair, cut so that they are no more than ``length`` with what stands around them.

        Args:
            side: Where it is cut, ``left`` or ``right``; of a pair the longer text.

        Returns:
            The ids, and the place of the second text's first one.
        """
        texts = (text,) if isinstance(text, str) else text
        parts = [self._tokenizer.encode(each, add_special_tokens=False) for each in texts]
        if length is not None:
            around = self._tokenizer.num_special_tokens_to_add(len(parts) > 1) if special else 0
            for part, kept in zip(parts, _shares([len(each) for each in parts], max(0, length - around)), strict=True):
                part.truncate(kept, direction=side)
        second = parts[1] if len(parts) > 1 else None
        whole = self._tokenizer.post_process(parts[0], second, add_special_tokens=special)
        return whole.ids, whole.type_ids.index(1) if 1 in whole.type_ids else len(whole.ids)

    async def encode_off_loop(self, text: str, *, special: bool) -> list[int]:
        """The same in a thread (the library gives up the GIL)."""
        return await asyncio.to_thread(self.encode, text, special=special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included, as vLLM's ``/detokenize`` gives it."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def token_string(self, token_id: int) -> str:
        """The vocabulary's own name of a token; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""


def _labels(config: Mapping[str, Any]) -> list[str]:
    tokens = config.get("classifier_from_token")  # of a language model: a class for each, or one of two
    count = 2 if not tokens else 1 if config.get("method") == "from_2_way_softmax" else len(tokens)
    named = None if tokens else config.get("id2label")
    labels = named or {str(i): f"LABEL_{i}" for i in range(config.get("num_labels", count))}
    return [labels[name] for name in sorted(labels, key=int)]


def _shares(lengths: list[int], room: int) -> list[int]:
    """Tokens of each text that stay: as the library cuts, the longer one first."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(lengths)
    longer = max(shorter, room - shorter) if shorter <= room else shorter
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]


def _fingerprint(tokenizer: bytes, template: str, special: Mapping[str, str], bounds: SchemaBounds) -> str:
    digest = blake2b(tokenizer, digest_size=16)
    digest.update(msgspec.json.encode((template, sorted(special.items()), bounds)))
    return digest.hexdigest()


def _characters_per_token_max(tokenizer: Tokenizer, vocabulary: TokenizerVocabulary) -> int:
    """Characters that one token stands for at most; 0 where a token can stand for any number (text that is normalised
    away or unknown, blanks that an added token swallows).
    """
    greedy = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    return 0 if greedy or tokenizer.normalizer is not None else vocabulary.longest_piece


def _ids(value: Any) -> frozenset[int]:
    """Configurations have one id, a list of ids, or none."""
    return frozenset(value) if isinstance(value, list) else frozenset() if value is None else frozenset((value,))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    out = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            out[name] = value
    return out
