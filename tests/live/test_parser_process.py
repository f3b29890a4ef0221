"""The parser process reads each family's output with vLLM's parsers: whole, cut at every token, and killed at each."""

from __future__ import annotations

import asyncio
import codecs
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.cluster.model_parsers import ModelParsers, model_parsers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.ingress.calls.messages import ChoiceDelta
from services.ingress.parsing.messages import Answer, OpenParser, ParsedModel, ParsersReady, ReadOutput
from services.ingress.parsing.process import ParserProcess, ProcessReader
from services.ingress.tokens.detokenizer import TokenizerVocabulary
from tests.testbed.waiting import until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

V3_BEGIN, V3_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
V3_CALL, V3_CALLED = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
V3_SEP = "<\uff5ctool\u2581sep\uff5c>"
PARIS = '{"city": "Paris"}'
#: A process imports vLLM first, whatever else this machine does.
PATIENCE_S = 180.0
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Family(msgspec.Struct, frozen=True):
    """A family: what its folder says, and an output by hand from its documented format.

    Attributes:
        parts: Reasoning, text and names with arguments of that output.
        prompt: Text at the prompt's end.
        values: ``chat_template_kwargs``.
    """

    kind: str
    template: str
    special: list[str]
    output: str
    parts: tuple[str, str, list[tuple[str, Any]]]
    prompt: str = ""
    values: dict[str, Any] = {}


CALL = [("weather", {"city": "Paris"})]
THINK = ["<think>", "</think>"]
FAMILIES = {
    "qwen3": Family(
        "qwen3",
        "{{ tools }}<tool_call>{% if enable_thinking %}<think>{% endif %}",
        ["<|im_start|>", "<|im_end|>", *THINK, "<tool_call>", "</tool_call>"],
        f'<think>\nWhere?\n</think>\n\nI look.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
        ("Where?", "I look.", CALL),
    ),
    "deepseek-r1": Family(
        "deepseek_v3", "{{ '<think>' }}", THINK, "Where?\n</think>\n\nParis.", ("Where?", "Paris.", []), "<think>\n"
    ),
    "deepseek-v3.1": Family(
        "deepseek_v3",
        "{{ tools }}{% if thinking %}<think>{% endif %}" + V3_BEGIN,
        [*THINK, V3_BEGIN, V3_END, V3_CALL, V3_CALLED, V3_SEP],
        f"Where?</think>I look.{V3_BEGIN}{V3_CALL}weather{V3_SEP}{PARIS}{V3_CALLED}{V3_END}",
        ("Where?", "I look.", CALL),
        "<think>",
        {"thinking": True},
    ),
    "llama-3.1": Family(
        "llama",
        "{{ tools }}<|python_tag|>",
        ["<|eot_id|>", "<|python_tag|>"],
        f'{{"name": "weather", "parameters": {PARIS}}}',
        ("", "", CALL),
    ),
    "mistral": Family(
        "mistral",
        "{{ tools }}[TOOL_CALLS]",
        ["[INST]", "[/INST]", "[TOOL_CALLS]"],
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}]',
        ("", "", CALL),
    ),
    "glm-4.5": Family(
        "glm4_moe",
        "{{ tools }}<arg_key><think>",
        [*THINK, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        "<think>Where?</think>I look."
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        ("Where?", "I look.", CALL),
    ),
    "kimi-k2": Family(
        "kimi_k2",
        "{{ tools }}<|tool_calls_section_begin|><think>",
        [
            *THINK, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
            "<|tool_call_end|>", "<|tool_call_argument_begin|>",
        ],
        "<think>Where?</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_calls_section_end|>",
        ("Where?", "I look.", CALL),
    ),
    "hermes": Family(
        "llama",
        "{{ tools }}<tool_call>",
        ["<|im_end|>", "<tool_call>", "</tool_call>"],
        f'I look.<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
        ("", "I look.", CALL),
    ),
}  # fmt: skip
CHOSEN = {
    "qwen3": ("qwen3", "hermes"),
    "deepseek-r1": ("deepseek_r1", ""),
    "deepseek-v3.1": ("deepseek_v3", "deepseek_v31"),
    "llama-3.1": ("", "llama3_json"),
    "mistral": ("", "mistral"),
    "glm-4.5": ("glm45", "glm45"),
    "kimi-k2": ("kimi_k2", "kimi_k2"),
    "hermes": ("", "hermes"),
}


class Speaker:
    """The tokens of one family: a byte-level tokenizer with its special tokens."""

    def __init__(self, folder: Path, family: Family) -> None:
        folder.mkdir(parents=True)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken(each, special=True) for each in family.special])
        self.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"model_type": family.kind}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": family.template}))
        self.folder = folder

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))

    def bytes(self, token: int) -> bytes:
        return TokenizerVocabulary(self.tokenizer).piece(token)


class Host:
    """One parser process for all families, asked one question after the other."""

    def __init__(self, found: dict[str, ParsedModel]) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(PATIENCE_S)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "services.ingress.parsing.host", str(theirs.fileno()),
             msgspec.json.encode(list(found.values())).decode()],
            pass_fds=(theirs.fileno(),),
        )  # fmt: skip
        theirs.close()
        self._pipe = self._ours.makefile("rwb")
        self.ready = self.read()

    def ask(self, question: Any) -> Answer:
        body = msgspec.msgpack.encode(question)
        self._pipe.write(len(body).to_bytes(4, "little") + body)
        self._pipe.flush()
        return self.read()

    def read(self) -> Answer:
        return msgspec.msgpack.decode(self._pipe.read(int.from_bytes(self._pipe.read(4), "little")), type=Answer)

    def close(self) -> None:
        self._pipe.close()
        self._ours.close()
        assert self._child.wait(10) == 0


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Speaker]:
    home = tmp_path_factory.mktemp("families")
    return {name: Speaker(home / name, family) for name, family in FAMILIES.items()}


def parsed_models(speakers: dict[str, Speaker]) -> dict[str, ParsedModel]:
    return {
        name: ParsedModel(name, str(speaker.folder), found.reasoning, found.tool_calls)
        for name, speaker in speakers.items()
        if (found := model_parsers(speaker.folder))
    }


@pytest.fixture(scope="module")
def host(speakers: dict[str, Speaker]) -> Iterator[Host]:
    host = Host(parsed_models(speakers))
    assert host.ready == ParsersReady({})
    yield host
    host.close()


def question(name: str, speaker: Speaker, *, whole: bool = False, choice: Any = "auto", **fields: Any) -> OpenParser:
    family = FAMILIES[name]
    body = {"messages": [], "tools": [TOOL], "tool_choice": choice, "chat_template_kwargs": family.values} | fields
    return OpenParser("c", name, json.dumps(body).encode(), [speaker.ids(family.prompt) or [1]], 1, whole)


def put_together(parts: list[tuple[str, str, list[tuple[int, str, str, str]]]]) -> tuple[str, str, list[Any]]:
    text, reasoning, calls = "", "", list[list[str]]()
    for content, thought, called in parts:
        text, reasoning = text + content, reasoning + thought
        for index, name, arguments, _ in called:
            if index == len(calls):
                calls.append([name, ""])
            calls[index][1] += arguments
    return reasoning.strip(), text.strip(), [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_calls_for_its_familys_parsers(name: str, speakers: dict[str, Speaker]):
    found = model_parsers(speakers[name].folder)
    assert (found.reasoning, found.tool_calls) == CHOSEN[name]
    assert model_parsers(speakers[name].folder, reasoning="none", tool_calls="xlam") == ModelParsers(
        "", "xlam", "configured", "configured"
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("whole", [True, False])
def test_an_output_is_told_apart_whole_and_cut_at_every_token(
    name: str, whole: bool, host: Host, speakers: dict[str, Speaker]
):
    family, speaker = FAMILIES[name], speakers[name]
    assert host.ask(question(name, speaker, whole=whole)).refusal == ""
    ids = speaker.ids(family.output)
    pieces = [ids] if whole else [[each] for each in ids]
    parts = []
    for number, piece in enumerate(pieces, 1):
        text = "".join(map(speaker.text, piece))
        answer = host.ask(ReadOutput("c", [(0, text, piece, number == len(pieces))]))
        assert answer.fault == ""
        parts += answer.parts
    assert put_together(parts) == family.parts
    assert whole or (answer.reasoning_tokens > 0) == bool(family.parts[0]) == bool(CHOSEN[name][0])


def test_reasoning_can_be_left_out_and_calls_be_one(host: Host, speakers: dict[str, Speaker]):
    family, speaker = FAMILIES["qwen3"], speakers["qwen3"]
    twice = family.output + family.output.partition("I look.")[2]
    for fields in ({"include_reasoning": False}, {"parallel_tool_calls": False}):
        host.ask(question("qwen3", speaker, whole=True, **fields))
        answer = host.ask(ReadOutput("c", [(0, twice, speaker.ids(twice), True)]))
        reasoning, _, calls = put_together(answer.parts)
        assert (reasoning, len(calls)) == (("", 2) if "include_reasoning" in fields else ("Where?", 1))


def test_a_forced_call_is_constrained_after_the_reasoning(host: Host, speakers: dict[str, Speaker]):
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        opened = host.ask(question("qwen3", speakers["qwen3"], choice=choice))
        assert "weather" in opened.structural_tag
        assert (opened.reasoning_ended, opened.special_tokens) == (False, True)


def test_a_request_that_vllm_does_not_take_is_refused(host: Host, speakers: dict[str, Speaker]):
    opened = host.ask(question("qwen3", speakers["qwen3"], choice={"type": "function", "function": {"name": "none"}}))
    assert opened.refusal


@pytest.mark.skipif("TIKTOKEN_ENCODINGS_BASE" not in os.environ, reason="needs the vocabulary: ./task test:clients")
@pytest.mark.parametrize(
    ("output", "parts"),
    [
        ("<|start|>assistant<|channel|>final<|message|>Paris.<|return|>", ("Where?", "Paris.", [])),
        (
            f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>",
            ("Where?", "", CALL),
        ),
    ],
)
def test_gpt_oss_speaks_harmony(tmp_path: Path, output: str, parts: Any):
    """Its tokens are those of OpenAI's library, whatever tokenizer stands in its folder."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    speaker = Speaker(tmp_path / "m", Family("gpt_oss", "{{ tools }}", [], "", ("", "", [])))
    found, encoding = model_parsers(speaker.folder), load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    assert (found.reasoning, found.tool_calls) == ("openai_gptoss", "openai")
    ids = encoding.encode(f"<|channel|>analysis<|message|>Where?<|end|>{output}", allowed_special="all")
    prompt = encoding.encode("<|start|>user<|message|>hi<|end|><|start|>assistant", allowed_special="all")
    host = Host({"m": ParsedModel("m", str(speaker.folder), found.reasoning, found.tool_calls)})
    body = json.dumps({"messages": [], "tools": [TOOL], "tool_choice": "auto"}).encode()
    for size in (len(ids), 1):
        host.ask(OpenParser("c", "m", body, [prompt], 1, size > 1))
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        told = [
            host.ask(ReadOutput("c", [(0, encoding.decode(piece), piece, piece is pieces[-1])])) for piece in pieces
        ]
        assert [answer.fault for answer in told] == [""] * len(told)
        assert put_together([part for answer in told for part in answer.parts]) == parts
    host.close()


@asynccontextmanager
async def running(
    speakers: dict[str, Speaker],
    name: str = "qwen3",
    told: Callable[..., None] = lambda event, **fields: None,
    **more: Any,
) -> AsyncIterator[ParserProcess]:
    """The process for one family, as ingress runs it."""
    process = ParserProcess([parsed_models(speakers)[name]], told, **({"answer_s": PATIENCE_S} | more))
    task = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_process_that_is_killed_at_any_token_changes_nothing(speakers: dict[str, Speaker]):
    """In the reasoning, in the text and in the call: a stream for each token of the output after which it happens.

    Each goes on in the next process, where its parser is built again from the output so far.
    """
    family, speaker = FAMILIES["qwen3"], speakers["qwen3"]
    ids = speaker.ids(family.output)
    told: list[str] = []
    async with running(speakers, told=lambda event, **fields: told.append(event)) as process:
        streams = [await opened_stream(process, speaker, f"c{number}") for number in range(len(ids))]
        for number, stream in enumerate(streams):
            stream.feed(ids[:number], False)
            await stream.idle()
        os.kill(process._child.pid, 9)
        for number, stream in enumerate(streams):
            stream.feed(ids[number:], True)
            await stream.idle()
        assert {(*map(str, s.parts()), s.deltas[-1].finish_reason) for s in streams} == {
            (*map(str, family.parts), "tool_calls")
        }
    assert "parsers_lost" in told


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5"])
async def test_reasoning_without_marks_is_told_at_once_and_as_the_process_tells_it(
    name: str, host: Host, speakers: dict[str, Speaker]
):
    """Marks, their beginnings, special tokens, blanks, half characters, more than is held at once, a process killed."""
    speaker = speakers[name]
    family, thought = FAMILIES[name], "Wo? <b> a>b \n\n é </thin k " + "lala" * 45 + "</think"
    output = family.output.replace("Where?", f"{thought}{family.special[0]} and <")
    ids, asked = speaker.ids(output), list[Any]()
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces = [decoder.decode(speaker.bytes(each)) for each in ids]
    host.ask(question(name, speaker))
    told = [
        host.ask(ReadOutput("c", [(0, text, [token], at == len(ids) - 1)]))
        for at, (text, token) in enumerate(zip(pieces, ids, strict=True))
    ]
    async with running(speakers, name) as process:
        stream = await opened_stream(process, speaker, "c", name)
        for at, (text, token) in enumerate(zip(pieces, ids, strict=True)):
            delta = ChoiceDelta(0, text, 1, "stop" if at == len(ids) - 1 else "", token_ids=[token])
            stream.reader.read([delta], stream.took)
            asked.append(stream.reader.busy)
            if at == 60:  # of its thought the process has no more than the beginning
                assert stream.reader._held[2]
                os.kill(process._child.pid, 9)
            await stream.idle()
    assert [(d.text, d.reasoning) for d in stream.deltas] == [answer.parts[0][:2] for answer in told]
    assert stream.parts() == put_together([part for answer in told for part in answer.parts])
    assert stream.reasoning == [answer.reasoning_tokens for answer in told]
    assert (asked.count(False) > 100, asked[0], asked[-1]) == (True, True, True)


async def test_what_comes_after_a_call_was_closed_costs_the_other_calls_nothing(speakers: dict[str, Speaker]):
    family, speaker, lost = FAMILIES["qwen3"], speakers["qwen3"], list[str]()
    ids = speaker.ids(family.output)
    async with running(speakers, told=lambda event, **fields: lost.append(event)) as process:
        closed, other = [await opened_stream(process, speaker, name) for name in ("closed", "other")]
        closed.reader.close()
        closed.feed(ids[:5], False)
        other.feed(ids, True)
        await other.idle()
        assert (other.parts(), lost) == (family.parts, [])


async def test_a_process_that_hangs_is_replaced_and_who_hung_two_is_not_asked_about_again(
    speakers: dict[str, Speaker], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("services.ingress.parsing.process.LOOK_S", 0.05)
    family, speaker = FAMILIES["qwen3"], speakers["qwen3"]
    ids, lost = speaker.ids(family.output), list[list[str]]()

    def told(event: str, **fields: Any) -> None:
        lost.append([fields["how"], *fields["requests"]])

    async with running(speakers, told=told, answer_s=1.0) as process:
        stream = await opened_stream(process, speaker, "goes on")
        stream.feed(ids[:20], False)
        await stream.idle()
        stop(process)
        stream.feed(ids[20:], True)
        await stream.idle()
        assert stream.parts() == family.parts
        assert lost == [["hangs"]]
        stream.reader.close()

        send, answered = process._send, asyncio.get_running_loop().create_future()

        def send_to_a_stopped_one(reader: ProcessReader, frame: bytes) -> None:
            stop(process)
            send(reader, frame)

        monkeypatch.setattr(process, "_send", send_to_a_stopped_one)
        ProcessReader(process, msgspec.structs.replace(question("qwen3", speaker), call="hung"), answered.set_result)
        assert await asyncio.wait_for(answered, PATIENCE_S) is None
        assert lost[1:] == [["hangs"], ["hangs", "hung"]]


def stop(process: ParserProcess) -> None:
    os.kill(process._child.pid, signal.SIGSTOP)


class Stream:
    """One call's output, read by the process."""

    def __init__(self, speaker: Speaker) -> None:
        self.reader: ProcessReader
        self.deltas: list[ChoiceDelta] = []
        self.reasoning: list[int | None] = []
        self._speaker = speaker

    def feed(self, ids: list[int], final: bool) -> None:
        text = "".join(map(self._speaker.text, ids))
        delta = ChoiceDelta(0, text, len(ids), "stop" if final else "", token_ids=ids)
        self.reader.read([delta], self.took)

    def took(self, deltas: list[ChoiceDelta], reasoning: int | None) -> None:
        self.deltas += deltas
        self.reasoning.append(reasoning)

    async def idle(self) -> None:
        await until(lambda: not self.reader.busy, PATIENCE_S)

    def parts(self) -> tuple[str, str, list[Any]]:
        return put_together(
            [(d.text, d.reasoning, [(c.index, c.name, c.arguments, c.id) for c in d.calls]) for d in self.deltas]
        )


async def opened_stream(process: ParserProcess, speaker: Speaker, call: str, name: str = "qwen3") -> Stream:
    stream, opened = Stream(speaker), asyncio.Event()
    asked = msgspec.structs.replace(question(name, speaker), call=call)
    stream.reader = ProcessReader(process, asked, lambda answer: opened.set())
    await asyncio.wait_for(opened.wait(), PATIENCE_S)
    return stream
