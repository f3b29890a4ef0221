"""Draws spans as a tree with a time bar each. Pure: spans in, lines out."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec

from millrace.cli.field_text import cut, duration, shown_fields
from millrace.telemetry.spans import SpanLine
from millrace.telemetry.tracecontext import parse_traceparent

#: Cells of the bar, at most and where the terminal is narrow.
BAR_CELLS, BAR_CELLS_MIN = 32, 10

#: Columns of the tree with names, of the place, of offset and duration.
NAME_CELLS, PLACE_CELLS, TIME_CELLS = 22, 14, 9

#: Characters of one attribute's text: a reason and its scores are why one looks at a trace.
TEXT_MAX = 1_000

#: Links and events of one span that are drawn.
DETAILS_MAX = 20

#: That many spans of one kind under one parent are drawn as the first, the last, and one line for those in between.
FOLD_FROM = 4

#: Instances that the line of folded spans names.
FOLD_INSTANCES = 6

#: Attributes for machines: `millrace explain` tells them.
HIDDEN = frozenset({"forecasts", "attempts"})

_DIM, _BOLD, _CYAN, _RED = "2", "1", "36", "31"


class Node(msgspec.Struct, kw_only=True):
    """A span with what lies under it."""

    span: SpanLine
    children: list[Node]


def draw(spans: list[SpanLine], *, width: int, paint: bool = False) -> list[str]:
    """Lines for one or more traces; spans are sorted by start, and many alike are folded into one line."""
    lines: list[str] = []
    for trace in dict.fromkeys(span.trace for span in spans):
        own = [span for span in spans if span.trace == trace]
        lines += [""] if lines else []
        lines += _Drawing(own, width, paint).lines()
    return lines


def build(spans: list[SpanLine]) -> list[Node]:
    """Roots, each with its children in order of start. A span whose parent was not recorded here is a root."""
    nodes = {span.span: Node(span=span, children=[]) for span in spans}
    roots: list[Node] = []
    for span in spans:
        parent = nodes.get(span.parent)
        if parent is None or _below(nodes, span.parent, span.span):
            roots.append(nodes[span.span])
        else:
            parent.children.append(nodes[span.span])
    return roots


def _below(nodes: dict[str, Node], start: str, span: str) -> bool:
    """Whether ``span`` is among the ancestors of ``start``, itself included: broken ids must not make a loop."""
    seen: set[str] = set()
    while start in nodes and start not in seen:
        if start == span:
            return True
        seen.add(start)
        start = nodes[start].span.parent
    return start in seen


def bar(start_ns: int, end_ns: int, first_ns: int, last_ns: int, room: int = BAR_CELLS) -> str:
    """Draw the position of a span between ``first_ns`` and ``last_ns``; even the shortest span has a mark."""
    whole = max(1, last_ns - first_ns)
    left = min(room - 1, (start_ns - first_ns) * room // whole)
    cells = max(1, min(room - left, round((end_ns - start_ns) * room / whole)))
    mark = "▏" if (end_ns - start_ns) * room * 2 < whole else "█" * cells
    return f"{'':{left}}{mark:<{room - left}}"


class _Drawing:
    """One trace while it is being drawn."""

    def __init__(self, spans: list[SpanLine], width: int, paint: bool) -> None:
        self._spans = spans
        self._width = width
        self._paint = paint
        self._first_ns = min(span.start_ns for span in spans)
        self._last_ns = max(span.end_ns for span in spans)
        self._by_id = {span.span: span for span in spans}
        self._several = len({sequence for span in spans if (sequence := _sequence(span))}) > 1

    def lines(self) -> list[str]:
        at = datetime.fromtimestamp(self._first_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]  # noqa: DTZ006
        count = f"{len(self._spans)} span{'s' * (len(self._spans) != 1)}"
        head = f"trace {self._spans[0].trace}  {at}  {duration(self._last_ns - self._first_ns)}  {count}"
        roots = build(self._spans)
        return [self._color(_BOLD, head)] + [line for root in roots for line in self._node(root, "", "", {}, roots)]

    def _node(self, node: Node, lead: str, below: str, shown: dict[str, Any], siblings: list[Node]) -> Iterator[str]:
        span = node.span
        yield self._row(span, lead)
        inner = below + ("│ " if node.children else "  ")
        matter = telling(node, siblings, shown)
        if text := shown_fields(matter, text_max=TEXT_MAX):
            yield from self._note(inner, text, _DIM)
        if span.error:
            yield from self._note(inner, f"failed: {span.error}", _RED)
        for name, at_ns, attributes in span.events[:DETAILS_MAX]:
            text = f"· {name} at +{duration(at_ns - self._first_ns)} {shown_fields(_short(attributes))}"
            yield from self._note(inner, text.rstrip(), _CYAN)
        for link in span.links[:DETAILS_MAX]:
            yield from self._note(inner, f"↳ goes on from {self._linked(link)}", _CYAN)
        groups = folded(node.children)
        for index, group in enumerate(groups):
            last = index == len(groups) - 1
            lead, under = below + ("└ " if last else "├ "), below + ("  " if last else "│ ")
            if len(group) == 1:
                yield from self._node(group[0], lead, under, shown | matter, node.children)
            else:
                yield from self._fold([each.span for each in group], lead, under)

    def _fold(self, spans: list[SpanLine], lead: str, below: str) -> Iterator[str]:
        whole = msgspec.structs.replace(
            spans[0], name=f"{len(spans)} × {spans[0].name}", end_ns=max(span.end_ns for span in spans)
        )
        yield self._row(whole, lead)
        yield from self._note(below + "  ", f"alike, and left out here{_instances_of(spans)}", _DIM)

    def _row(self, span: SpanLine, lead: str) -> str:
        offset = f"+{duration(span.start_ns - self._first_ns)}"
        choice = f" .{_sequence(span).rsplit('.', 1)[-1]}" if self._several and _sequence(span) else ""
        name = cut(lead + span.name + choice, NAME_CELLS)
        place = cut(place_of(span), PLACE_CELLS)
        room = self._width - NAME_CELLS - PLACE_CELLS - 2 * TIME_CELLS - 4
        room = max(BAR_CELLS_MIN, min(BAR_CELLS, room))
        cells = bar(span.start_ns, span.end_ns, self._first_ns, self._last_ns, room)
        return (
            f"{self._color(_BOLD, f'{name:<{NAME_CELLS}}')} {place:<{PLACE_CELLS}} "
            f"{offset:>{TIME_CELLS}} {self._color(_RED if span.error else _CYAN, cells)} "
            f"{duration(span.end_ns - span.start_ns):>{TIME_CELLS}}"
        )

    def _note(self, indent: str, text: str, color: str) -> Iterator[str]:
        room = max(20, self._width - len(indent) - 2)
        for line in textwrap.wrap(_printable(text), room) or [""]:
            yield f"{indent}  {self._color(color, line)}"

    def _linked(self, traceparent: str) -> str:
        context = parse_traceparent(traceparent)
        if context is None:
            return f"something unreadable ({traceparent[:60]})"
        span = self._by_id.get(context.span_id)
        if span is None:
            return f"span {context.span_id} of trace {context.trace_id}, which is not here"
        return f"{span.name} on {place_of(span)} at +{duration(span.start_ns - self._first_ns)}"

    def _color(self, color: str, text: str) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if self._paint and text.strip() else text


def folded(siblings: list[Node]) -> list[list[Node]]:
    """Siblings in order, each alone, but the inner ones of FOLD_FROM or more that are alike as one group.

    Spans are alike that have the same name, sequence and error, and children of the same names: the attempts to place a
    sequence while nobody takes it differ in time and instance only. Such a group stands where its first one stood.
    """
    counts = Counter(map(_kind, siblings))
    kinds: dict[tuple[Any, ...], list[Node]] = {}
    groups: list[list[Node]] = []
    for node in siblings:
        seen = kinds.setdefault(_kind(node), [])
        seen.append(node)
        if counts[_kind(node)] < FOLD_FROM or len(seen) in (1, counts[_kind(node)]):
            groups.append([node])
        elif len(seen) == 2:
            groups.append(seen)
    for group in groups:
        if len(group) > 1:
            group[:] = group[1:-1]
    return groups


def _kind(node: Node) -> tuple[Any, ...]:
    span = node.span
    return span.name, _sequence(span), span.error, tuple(child.span.name for child in node.children)


def _instances_of(spans: list[SpanLine]) -> str:
    """``: worker-0 (20), worker-1 (17)``, the most frequent first; empty where no span names an instance."""
    names = Counter(str(name) for span in spans if (name := _short(span.attributes).get("instance")))
    said = [f"{name} ({count})" for name, count in names.most_common(FOLD_INSTANCES)]
    more = [f"{len(names) - FOLD_INSTANCES} others"] if len(names) > FOLD_INSTANCES else []
    return ": " + ", ".join(said + more) if said else ""


def telling(node: Node, siblings: list[Node], shown: dict[str, Any]) -> dict[str, Any]:
    """Attributes worth a line: what no ancestor says, nor a later phase of the same sequence and epoch."""
    attributes = _short(node.span.attributes)
    later = siblings[siblings.index(node) + 1 :] if node in siblings else []
    said = [_short(sibling.span.attributes) for sibling in later]
    same = [each for each in said if _phase_of(each) is not None and _phase_of(each) == _phase_of(attributes)]
    return {
        key: value
        for key, value in attributes.items()
        if value not in (None, "", 0, [], {})
        and key not in HIDDEN
        and not key.startswith("gen_ai.")  # said by names of our own
        and shown.get(key) != value
        and not (key in ("instance", "service") and value == place_of(node.span))
        and not any(each.get(key) == value for each in same)
    }


def place_of(span: SpanLine) -> str:
    """Return the origin of a span: the actor, as one process may host several; else the process."""
    return span.actor or span.instance or span.service


def _phase_of(attributes: dict[str, Any]) -> tuple[Any, Any] | None:
    sequence = attributes.get("sequence")
    return None if sequence is None else (sequence, attributes.get("epoch"))


def _sequence(span: SpanLine) -> str:
    return str(_short(span.attributes).get("sequence") or "")


def _short(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("millrace."): value for key, value in attributes.items()}


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "·" for character in text)
