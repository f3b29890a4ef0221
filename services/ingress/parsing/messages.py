"""Messages between an ingress and its parser process: length-prefixed MessagePack, answered in order."""

from __future__ import annotations

import msgspec

Parts = tuple[str, str, list[tuple[int, str, str, str]]]


class OpenParser(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call begins. Answered by ParserOpened.

    Attributes:
        request: JSON of vLLM's ChatCompletionRequest, messages left out.
        prompts: Token ids.
        choices: Per prompt.
        whole: Each choice is parsed once, when it is complete.
    """

    call: str
    model: str
    request: bytes
    prompts: list[list[int]]
    choices: int
    whole: bool


class ParserOpened(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Demands of a call's parser on the engine.

    Attributes:
        refusal: Why it takes no such call; empty where it does.
        json_schema, structural_tag: Constraint that makes its tool calls; empty for none.
        special_tokens: The text that it reads has them.
        reasoning_ended: A constraint holds from the first token, not only after the reasoning.
        plain: Pattern of text that is all reasoning behind such text that was; empty where only the parser knows.
    """

    call: str
    refusal: str = ""
    json_schema: str = ""
    structural_tag: str = ""
    special_tokens: bool = False
    reasoning_ended: bool = True
    plain: str = ""


class ReadOutput(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """New output: (choice, text, token ids, whether it has ended). Answered by OutputRead."""

    call: str
    outputs: list[tuple[int, str, list[int], bool]]


class OutputRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Parts of these outputs: (text, reasoning, parts of calls: index, name, arguments, id) for each.

    Attributes:
        reasoning_tokens: Of the choices that have ended; -1 where the model has no reasoning.
        fault: What went wrong in a parser, whose choice is text from here on; empty for nothing.
    """

    call: str
    parts: list[Parts]
    reasoning_tokens: int = -1
    fault: str = ""


class CloseParser(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The call is over. Not answered."""

    call: str


class ExpandImages(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for a prompt with as many tokens for each image as it takes. Answered by ImagesExpanded.

    Attributes:
        prompt: Token ids with one placeholder for each image.
        images: Their files.
    """

    call: str
    model: str
    prompt: list[int]
    images: list[bytes]


class ImagesExpanded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The token ids. ``refusal``: why there are none; empty where there are."""

    prompt: list[int]
    refusal: str = ""


class ParsersReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First message of the process. ``faults``: why a model's parsers cannot be used, by the model's name."""

    faults: dict[str, str]


Question = OpenParser | ReadOutput | CloseParser | ExpandImages
Answer = ParsersReady | ParserOpened | OutputRead | ImagesExpanded


def framed(message: Question | Answer) -> bytes:
    """The message behind its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


class ParsedModel(msgspec.Struct, frozen=True):
    """A model whose output is parsed, or whose images are expanded; the process's configuration is a list of these as
    JSON.
    """

    name: str
    path: str
    reasoning_parser: str = ""
    tool_call_parser: str = ""
