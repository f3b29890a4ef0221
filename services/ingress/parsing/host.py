"""The parser process: ``python -m services.ingress.parsing.host FD MODELS``. It parses output with vLLM's parsers.

A process of its own beside ingress, so that a parser that is slow or stuck costs ingress's event loop nothing: ingress
ends it and starts another one. It answers in order and keeps nothing but the open calls.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from tokenizers import Tokenizer

from services.ingress.parsing.light_vllm import parser_manager
from services.ingress.parsing.messages import (
    Answer,
    CloseParser,
    OpenParser,
    OutputRead,
    ParsedModel,
    ParserOpened,
    ParsersReady,
    Parts,
    Question,
    ReadOutput,
    framed,
)

_decode = msgspec.msgpack.Decoder(Question).decode
_FAULT_MAX = 300
#: Parsers that do nothing to a stream's reasoning but look for marks; some tool parsers bring one of another class.
_MARKED = frozenset(("deepseek_v4", "glm45", "mimo", "qwen3", "seed_oss", "step3p5"))


class TokenizerView:
    """A tokenizer as vLLM's parsers use it; transformers takes seconds to import."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        special = {i: t.content for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self.all_special_ids, self.all_special_tokens = list(special), list(special.values())

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode([ids] if isinstance(ids, int) else list(ids), skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        return self._vocab.get(tokens) if isinstance(tokens, str) else [self._vocab.get(each) for each in tokens]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self._tokenizer.id_to_token(each) for each in ids]


class _Model:
    """A model's tokenizer and its composed parser class."""

    def __init__(self, manager: Any, model: ParsedModel) -> None:
        folder = Path(model.path)
        self._tokenizer = TokenizerView(folder)
        config = json.loads((folder / "config.json").read_text())
        kind = config.get("model_type", "")
        self._config = SimpleNamespace(
            hf_config=SimpleNamespace(model_type=kind), architecture=next(iter(config.get("architectures") or [""]))
        )
        self.reasons = bool(model.reasoning_parser)
        self._class = manager.get_parser(
            tool_parser_name=model.tool_call_parser or None,
            reasoning_parser_name=model.reasoning_parser or None,
            enable_auto_tools=True,
            model_name=model.name,
            is_harmony=kind == "gpt_oss",
            tokenizer=self._tokenizer,
        )
        self.marked = model.reasoning_parser in _MARKED and self._class.__name__ == "_Parser"

    def parser(self, request: Any) -> Any:
        values = dict(request.chat_template_kwargs or {})
        return self._class(self._tokenizer, request.tools, chat_template_kwargs=values, model_config=self._config)


class _OpenCall:
    """The parsers of one call's choices."""

    def __init__(self, model: _Model, question: OpenParser, request: Any) -> None:
        self._request = request
        self._whole = question.whole
        self._prompts = [ids for ids in question.prompts for _ in range(question.choices)]
        self._parsers = [model.parser(request) for _ in self._prompts]
        self._ids: list[list[int]] = [[] for _ in self._prompts]
        self._texts = [""] * len(self._prompts)
        self._reasoning = 0 if model.reasons else -1
        self._marked = model.marked and len(self._prompts) == 1 and not self._whole

    def opened(self) -> ParserOpened:
        """Demands of the first parser on the engine."""
        request, parser = self._request, self._parsers[0]
        before = request.structured_outputs
        request = self._request = parser.adjust_request(request)
        lexer = parser.reasoning_parser._parser_engine._engine._lexer if self._marked else None
        marks = re.escape("".join(lexer._literal_first_chars)) if lexer is not None else ""
        made = request.structured_outputs if request.structured_outputs is not before else None
        schema = getattr(made, "json", None) or ""
        return ParserOpened(
            "",
            json_schema=schema if isinstance(schema, str) else json.dumps(schema),
            structural_tag=getattr(made, "structural_tag", None) or "",
            special_tokens=not request.skip_special_tokens,
            reasoning_ended=request.resolve_reasoning_ended(parser, self._prompts[0]) is not False,
            plain=rf"[^{marks}]*[^{marks}\s]" if marks else "",
        )

    def read(self, outputs: list[tuple[int, str, list[int], bool]]) -> OutputRead:
        """Parse what came."""
        parts, fault = [], ""
        for choice, text, ids, finished in outputs:
            try:
                parts.append(self._read(choice, text, ids, finished))
            except Exception as error:  # noqa: BLE001 - parsers raise anything; the output is the client's anyway
                fault = f"{type(error).__name__}: {error}"[:_FAULT_MAX]
                self._parsers[choice] = None
                parts.append((self._texts[choice] or text, "", []))
        return OutputRead("", parts, self._reasoning, fault)

    def _read(self, choice: int, text: str, ids: list[int], finished: bool) -> Parts:
        parser = self._parsers[choice]
        if parser is None:
            return text, "", []
        if self._whole or self._reasoning >= 0:
            self._ids[choice] += ids
        if self._whole:
            self._texts[choice] += text
            if not finished:
                return "", "", []
            parts = self._whole_output(parser, choice)
        else:
            parts = self._delta(parser, choice, text, ids, finished)
        if self._reasoning >= 0 and finished:
            self._reasoning += _reasoning_tokens(parser, self._prompts[choice], self._ids[choice])
        if self._request.parallel_tool_calls is False:
            parts = (*parts[:2], [call for call in parts[2] if call[0] == 0])
        return parts

    def _delta(self, parser: Any, choice: int, text: str, ids: list[int], finished: bool) -> Parts:
        delta = parser.parse_delta(text, ids, self._request, prompt_token_ids=self._prompts[choice], finished=finished)
        if delta is None:
            return "", "", []
        calls = [_part(call.index, call.id, call.function) for call in delta.tool_calls or []]
        return delta.content or "", delta.reasoning or "", calls

    def _whole_output(self, parser: Any, choice: int) -> Parts:
        request = self._request
        parser.set_prompt_token_ids(self._prompts[choice])
        reasoning, content, calls = parser.parse(
            self._texts[choice], request, enable_auto_tools=True, model_output_token_ids=self._ids[choice]
        )
        parts = [_part(i, getattr(call, "id", None), call) for i, call in enumerate(calls or [])]
        return content or "", reasoning or "" if request.include_reasoning else "", parts


def _reasoning_tokens(parser: Any, prompt: list[int], ids: list[int]) -> int:
    """Tokens of the reasoning; some parsers count from its first token on, which may stand in the prompt."""
    reasoner = getattr(parser.reasoning_parser, "_parser", parser.reasoning_parser)
    start = getattr(reasoner, "start_token_id", None)
    if start is not None and start in prompt and start not in ids and not parser.is_reasoning_end(prompt):
        ids = [start, *ids]
    return int(parser.count_reasoning_tokens(ids))


def _part(index: int, identity: str | None, function: Any) -> tuple[int, str, str, str]:
    name = (function.name if function is not None else None) or ""
    own = identity if identity and name and not identity.startswith("chatcmpl-tool-") else ""
    return index, name, (function.arguments if function is not None else None) or "", own


class ParserHost:
    """Answers questions about the calls of some models."""

    def __init__(self, models: Sequence[ParsedModel]) -> None:
        manager = parser_manager()
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._request = ChatCompletionRequest
        self._calls: dict[str, _OpenCall] = {}
        self._models: dict[str, _Model] = {}
        self.faults: dict[str, str] = {}
        for model in models:
            try:
                self._models[model.name] = _Model(manager, model)
            except Exception as error:  # noqa: BLE001 - one model's fault is told, and leaves the others
                self.faults[model.name] = str(error)[:_FAULT_MAX] or type(error).__name__

    def answer(self, question: Question) -> Answer | None:
        """The answer; None where none is due."""
        match question:
            case ReadOutput(call=call, outputs=outputs):
                return msgspec.structs.replace(self._calls[call].read(outputs), call=call)
            case OpenParser(call=call):
                return msgspec.structs.replace(self._open(question), call=call)
            case CloseParser(call=call):
                self._calls.pop(call, None)
        return None

    def _open(self, question: OpenParser) -> ParserOpened:
        try:
            request = self._request.model_validate_json(question.request)
            call = _OpenCall(self._models[question.model], question, request)
            opened = call.opened()
        except Exception as error:  # noqa: BLE001 - vLLM's checks raise anything; all of it refuses this request
            return ParserOpened("", refusal=str(error)[:_FAULT_MAX] or type(error).__name__)
        self._calls[question.call] = call
        return opened


def main(make: Callable[[list[ParsedModel]], Any]) -> None:
    """Serve the socket with a host until ingress closes it."""
    logging.disable(logging.WARNING)
    ours = socket.socket(fileno=int(sys.argv[1]))
    pipe = ours.makefile("rb", buffering=1 << 16)
    host = make(msgspec.json.decode(sys.argv[2], type=list[ParsedModel]))
    ours.sendall(framed(ParsersReady(host.faults)))
    while len(head := pipe.read(4)) == 4:
        answer = host.answer(_decode(pipe.read(int.from_bytes(head, "little"))))
        if answer is not None:
            ours.sendall(framed(answer))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(ParserHost)
