"""Streamed output with tool calls: pieces come early, and add up to what the whole output says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.api.tool_call_parser import ToolCallParser
from services.ingress.api.tools import ToolMode, ToolPlan
from services.ingress.calls.messages import CallPart

TAGGED, REQUIRED = ToolPlan(ToolMode.TAGGED), ToolPlan(ToolMode.REQUIRED)
SINGLE, NAMED = ToolPlan(ToolMode.TAGGED, single=True), ToolPlan(ToolMode.NAMED, "f")
ROME = '<tool_call>{"name": "weather", "arguments": {"city": "Rome {\\"}", "days": [1, {}]}}</tool_call>'
OSLO = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


def read(plan: ToolPlan, chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of a stream, put together as a client does it."""
    reader = ToolCallParser(plan)
    text, calls = "", list[list[str]]()
    for i, chunk in enumerate(chunks):
        said, parts = reader.push(chunk, finished=i == len(chunks) - 1)
        text += said
        for part in parts:
            if part.name:
                assert part.index == len(calls)
                calls.append([part.name, ""])
            calls[part.index][1] += part.arguments
    assert reader.calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    places = st.lists(st.integers(0, len(text)), max_size=12).map(sorted)
    return places.map(lambda at: [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])


IN_ROME, IN_OSLO = ("weather", '{"city": "Rome {\\"}", "days": [1, {}]}'), ("weather", "{}")
WHOLE: dict[str, tuple[ToolPlan, str, str, list[tuple[str, str]]]] = {
    "one call": (TAGGED, ROME, "", [IN_ROME]),
    "text and two calls": (TAGGED, f"Let me see. {ROME}\n{OSLO}", "Let me see. ", [IN_ROME, IN_OSLO]),
    "text behind": (TAGGED, f"{OSLO} done", " done", [IN_OSLO]),
    "only the first": (SINGLE, f"{ROME}\n{OSLO}", "", [IN_ROME]),
    "fields the other way round": (
        TAGGED, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a":1}')],
    ),
    "no arguments": (TAGGED, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "no call": (TAGGED, "a <b> <tool <tool_cal", "a <b> <tool <tool_cal", []),
    "tags without a call": (TAGGED, "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    "required": (
        REQUIRED, '[{"name": "f", "parameters": {"a": "]}"}}, {"name": "g", "parameters": {}}]', "",
        [("f", '{"a": "]}"}'), ("g", "{}")],
    ),
    "cut off before a name": (TAGGED, '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    "cut off in arguments": (TAGGED, '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    "named": (NAMED, '{"a": 1}', "", [("f", '{"a": 1}')]),
    "required, compact": (REQUIRED, '[{"name":"f","parameters":{"a":[1]}}]', "", [("f", '{"a":[1]}')]),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
@given(data=st.data())
def test_a_stream_adds_up_to_the_whole_output_however_it_is_cut(case: str, data: st.DataObject) -> None:
    plan, output, text, calls = WHOLE[case]
    assert read(plan, data.draw(cuts(output))) == (text, calls)


def test_name_and_arguments_come_before_the_call_has_ended() -> None:
    reader = ToolCallParser(TAGGED)
    assert reader.push('<tool_call>{"name": "f", "arg') == ("", [])
    assert reader.push('uments": {"city": "Ro') == ("", [CallPart(0, "f", '{"city": "Ro')])
    assert reader.push('me"}') == ("", [CallPart(0, "", 'me"}')])
    assert reader.push("}</tool_call>", finished=True) == ("", [])


def test_text_before_a_tag_comes_at_once() -> None:
    reader = ToolCallParser(TAGGED)
    assert reader.push("Let me see <tool") == ("Let me see ", [])
    assert reader.push("box") == ("<toolbox", [])


@pytest.mark.parametrize(
    ("plan", "output", "calls"),
    [
        (NAMED, "", []),
        (NAMED, '{"', [("f", '{"')]),
        (REQUIRED, "[{", []),
        (REQUIRED, '[{"name": "f"', []),
        (REQUIRED, '[{"name": "f", "parameters": {"', [("f", '{"')]),
        (REQUIRED, '[{"name": "f", "parameters": {}}, {"na', [("f", "{}")]),
        (
            REQUIRED,
            '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"a": 1',
            [("f", "{}"), ("g", '{"a": 1')],
        ),
    ],
)
def test_a_forced_call_that_is_cut_off_is_what_was_written_of_it_and_never_text(
    plan: ToolPlan, output: str, calls: list[tuple[str, str]]
) -> None:
    assert read(plan, [output]) == ("", calls)


@given(st.text(alphabet='<tool_cal>/{}":, nmergus[]\\', max_size=60), st.integers(1, 7))
def test_no_text_is_lost_where_there_is_no_call(output: str, size: int) -> None:
    text, calls = read(TAGGED, [output[i : i + size] for i in range(0, len(output), size)])
    assert calls or text == output
