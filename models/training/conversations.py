"""Conversations about functions and schemas that millrace-agent learns from.

An answer comes in parts, since a grammar writes the rest of a forced call or of a JSON object: those parts are not
learnt, only what the model says between them. Kinds of conversation:

* ``call``, ``calls``: one or two calls between ``<tool_call>`` tags, chosen by the model;
* ``text``: functions are listed, none fits: an ordinary task and its answer;
* ``result``: a function's result is told to the user;
* ``named``, ``required``: a call that the request demands, as ingress constrains it;
* ``json``: facts into an object whose keys the grammar writes;
* ``task``: an ordinary task without functions.

What a grammar writes differs by backend and option: vLLM with ``disable_any_whitespace`` writes no blank after commas
and colons. Answers behind a grammar are therefore drawn with several separators.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from models.training.data import SYSTEM_PROMPTS
from models.training.functions import (
    FIELDS,
    ROOMS,
    Function,
    Parameter,
    Value,
    code,
    decimal,
    draw_function,
    phrase,
    place,
    said,
    title,
    whole,
    word,
)
from models.training.tasks import EXACT, make

#: How often each kind is drawn.
SHARES = {"call": 40, "calls": 8, "text": 12, "result": 10, "named": 9, "required": 9, "json": 18, "task": 6}
FUNCTIONS_MAX = 4
ANSWER_MAX = 80
BOUND_TASKS = tuple(name for name in EXACT if name in {"copy", "reverse", "upper", "compare", "repeat"})

#: Comma and colon of JSON, as ``json.dumps`` takes them.
Separators = tuple[str, str]
SPACED: Separators = (", ", ": ")
COMPACT: Separators = (",", ":")
#: How often each is drawn behind a grammar; the last one is xgrammar's up to 0.2.8 for some schemas.
SEPARATORS: dict[Separators, int] = {COMPACT: 6, SPACED: 3, (", ", ":"): 1}

Message = dict[str, Any]
#: Text, and whether the model learns to say it.
Part = tuple[str, bool]


class Conversation(NamedTuple):
    """Messages and functions of a request, and the answer to learn.

    Attributes:
        key: Decides whether the conversation is held out.
        demand: Further fields of the request; they constrain the answer.
    """

    kind: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    answer: list[Part]
    key: str
    demand: dict[str, Any] = {}


def draw_conversation(rng: Random, kind: str | None = None) -> Conversation:
    """Draw a conversation, of one kind or of any."""
    chosen = kind or rng.choices(list(SHARES), list(SHARES.values()))[0]
    conversation = _KINDS[chosen](rng)
    if rng.random() < 0.2:
        system = {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
        return conversation._replace(messages=[system, *conversation.messages])
    return conversation


def call_text(name: str, arguments: dict[str, Value]) -> str:
    """One call as the model writes it where it may choose."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def value_parts(arguments: dict[str, Any], separators: Separators = SPACED) -> list[Part]:
    """An object as JSON whose values are learnt with the character that ends each."""
    comma, colon = separators
    parts: list[Part] = [("{", False)]
    for index, (name, value) in enumerate(arguments.items()):
        parts.append((f"{comma if index else ''}{json.dumps(name)}{colon}", False))
        written = json.dumps(value, ensure_ascii=False, separators=separators)
        if isinstance(value, str):
            parts += [('"', False), (written[1:], True)]
        else:
            parts.append((written, True))
    return [*_ends_learnt(parts), ("}", True)]


def _ends_learnt(parts: list[Part]) -> list[Part]:
    """The comma after a value is learnt: it ends a number."""
    return [
        piece
        for text, learnt in parts
        for piece in ([(",", True), (text[1:], False)] if not learnt and text.startswith(",") else [(text, learnt)])
    ]


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _listed(rng: Random, chosen: Function) -> list[dict[str, Any]]:
    """The function among some others, of other names, in any order."""
    others = [draw_function(rng) for _ in range(rng.randrange(FUNCTIONS_MAX))]
    functions = [chosen]
    for other in others:  # two functions for the same thing would leave the choice to chance
        if all(other.name != each.name and other.purpose != each.purpose for each in functions):
            functions.append(other)
    rng.shuffle(functions)
    return [function.tool() for function in functions]


def _asked(rng: Random, function: Function) -> tuple[str, dict[str, Value]]:
    """A request for a function, and the arguments it means."""
    arguments = {parameter.name: parameter.draw(rng) for parameter in function.parameters}
    asked = rng.choice(function.wordings).format(*map(said, arguments.values()))
    return asked[0].lower() + asked[1:] if rng.random() < 0.1 else asked, arguments


def _call(rng: Random) -> Conversation:
    function = draw_function(rng)
    asked, arguments = _asked(rng, function)
    answer: list[Part] = [(call_text(function.name, arguments), True)]
    return Conversation("call", [_user(asked)], _listed(rng, function), answer, asked)


def _calls(rng: Random) -> Conversation:
    first = draw_function(rng)
    listed = _listed(rng, first)
    asked, arguments = _asked(rng, first)
    again, other = _asked(rng, first)
    joined = f"{asked} {rng.choice(('And', 'Also:', 'Then'))} {again[0].lower()}{again[1:]}"
    answer = f"{call_text(first.name, arguments)}\n{call_text(first.name, other)}"
    return Conversation("calls", [_user(joined)], listed, [(answer, True)], joined)


def _task(rng: Random) -> Conversation:
    while True:
        example = make(rng.choice(BOUND_TASKS), rng, rng.choice((1, 1, 2)))
        if len(example.answer) <= ANSWER_MAX:
            return Conversation("task", [_user(example.prompt)], [], [(example.answer, True)], example.prompt)


def _text(rng: Random) -> Conversation:
    return _task(rng)._replace(kind="text", tools=_listed(rng, draw_function(rng)))


def _result(rng: Random) -> Conversation:
    function = draw_function(rng)
    asked, arguments = _asked(rng, function)
    degrees = f"{rng.randrange(40)} {rng.choice(('degrees', 'C', 'F'))}"
    told = rng.choice((
        degrees, f"{degrees} and {rng.choice(('sunny', 'rain', 'cloudy', 'snow', 'windy'))}", str(whole(rng)),
        str(decimal(rng)), phrase(rng), title(rng), f"{phrase(rng)}.", code(rng), rng.choice(("ok", "done", "sent")),
        json.dumps({word(rng): whole(rng), word(rng): word(rng)}),
    ))  # fmt: skip
    call = {"type": "function", "function": {"name": function.name, "arguments": arguments}}
    messages = [_user(asked), {"role": "assistant", "content": "", "tool_calls": [call]}]
    return Conversation("result", [*messages, {"role": "tool", "content": told}], _listed(rng, function),
        [(told, True)], asked + told)  # fmt: skip


def _separators(rng: Random) -> Separators:
    return rng.choices(list(SEPARATORS), list(SEPARATORS.values()))[0]


def _forced(rng: Random) -> tuple[str, dict[str, Any], Function]:
    """A request, the arguments it means, and the function that has to be called."""
    if rng.random() < 0.4:  # what agents' libraries use to get an object: one function of any name, and facts
        return _facts_as_function(rng)
    function = draw_function(rng)
    return *_asked(rng, function), function


def _named(rng: Random) -> Conversation:
    asked, arguments, function = _forced(rng)
    demand = {"tool_choice": {"type": "function", "function": {"name": function.name}}}
    parts = value_parts(arguments, _separators(rng))
    return Conversation("named", [_user(asked)], _listed(rng, function), parts, asked, demand)


def _required(rng: Random) -> Conversation:
    asked, arguments, function = _forced(rng)
    separators = comma, colon = _separators(rng)
    parts = [(f'[{{"name"{colon}"', False), (f'{function.name}"', True), (f'{comma}"parameters"{colon}', False)]
    answer = [*parts, *value_parts(arguments, separators), ("}]", True)]
    demand = {"tool_choice": "required", "parallel_tool_calls": False}
    return Conversation("required", [_user(asked)], _listed(rng, function), answer, asked, demand)


def _facts_as_function(rng: Random) -> tuple[str, dict[str, Any], Function]:
    asked, arguments = _facts(rng)
    name = rng.choice(("final_result", "Answer", "Result", "Person", "User", "extract", title(rng).replace(" ", "")))
    described = rng.choice((
        "The final response which ends this conversation",
        f"Correctly extracted `{name}` with all the required parameters with correct types",
        f"A {name.lower()}.",
        "",
    ))  # fmt: skip
    parameters = tuple(Parameter(field, _told_schema(rng, value), word) for field, value in arguments.items())
    return asked, arguments, Function(name, described, parameters, ())


def schema_of(value: Any) -> dict[str, Any]:
    """JSON Schema of a value's type."""
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": kinds[type(value)]}


def _told_schema(rng: Random, value: Any) -> dict[str, Any]:
    """JSON Schema of a value's type; at times of this type or null."""
    schema = schema_of(value)
    return {"anyOf": [schema, {"type": "null"}]} if rng.random() < 0.1 else schema


def _facts(rng: Random) -> tuple[str, dict[str, Any]]:
    """A text with facts and the object that holds them."""
    name = title(rng)
    drawn: list[tuple[str, str, Any]] = []
    city, age, room = place(rng), rng.randrange(1, 100), rng.choice(ROOMS)
    if rng.random() < 0.6:
        drawn += [("name", f"{name} is here.", name)] if rng.random() < 0.3 else [("name", f"My name is {name}.", name)]
        drawn += [("age", rng.choice((f"{name} is {age} years old.", f"Age {age}.")), age)]
        drawn += [(rng.choice(("city", "home", "town")), f"{name} lives in {city}.", city)]
        drawn += [("room", f"The room is the {room}.", room)]
    for field in rng.sample(FIELDS, 3):
        value = rng.choice((whole, decimal, title, code, lambda draw: draw.random() < 0.5, _some))(rng)
        plain = ", ".join(value) if isinstance(value, list) else said(value)
        drawn.append(
            (field, rng.choice((f"The {field} is {plain}.", f"{field}: {plain}.", f"{field} = {plain};")), value)
        )
    chosen = rng.sample(drawn, rng.randint(1, min(4, len(drawn))))
    told = [sentence for _, sentence, _ in chosen]
    rng.shuffle(told)
    opening = rng.choice(
        ("", "", "Extract: ", "Read this: ", "Return JSON. ", "Parse the text: ", "Fill in the fields. ")
    )
    return opening + " ".join(told), {field: value for field, _, value in chosen}


def _some(rng: Random) -> list[str]:
    return [rng.choice((word, code))(rng) for _ in range(rng.randint(1, 3))]


def _json(rng: Random) -> Conversation:
    asked, values = _facts(rng)
    if rng.random() < 0.1:
        asked += f" Fields: {', '.join(values)}."
    properties = {name: schema_of(value) for name, value in values.items()}
    schema = {"type": "object", "properties": properties, "required": list(values), "additionalProperties": False}
    demand = {"response_format": {"type": "json_schema", "json_schema": {"name": "facts", "schema": schema}}}
    return Conversation("json", [_user(asked)], [], value_parts(values, _separators(rng)), asked, demand)


_KINDS: dict[str, Callable[[Random], Conversation]] = {
    "call": _call,
    "calls": _calls,
    "text": _text,
    "result": _result,
    "named": _named,
    "required": _required,
    "json": _json,
    "task": _task,
}
