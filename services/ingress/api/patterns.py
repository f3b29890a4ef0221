"""Patterns of constraints: constructs that grammar compilers drop or cannot bound, found before they see any.

xgrammar matches a whole string and has no assertions: it leaves a lookahead out with a line in its log. The patterns of
JSON Schema are ECMA-262's; what means the same without an assertion (an anchor at an end) is fine.
"""

from __future__ import annotations

import re

#: Most repetitions that repetitions within one another may stand for: xgrammar unfolds them while it compiles.
REPETITIONS_MAX = 10_000
#: Deepest groups: parsers of patterns are recursive.
GROUPS_MAX = 50
#: Letters that mean something after a backslash.
_ESCAPES = frozenset("dDwWsStnrfvuxc")
_NAMES = {"b": "word boundary", "B": "word boundary", "k": "backreference", "p": "Unicode class", "P": "Unicode class"}
#: What a group begins with -> what that is, where it is not enforced.
_GROUPS = {
    **dict.fromkeys(("?<=", "?<!"), "lookbehind"),
    **dict.fromkeys(("?=", "?!"), "lookahead"),
    **dict.fromkeys(("?:", "?<", "?P<"), ""),
}
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d+),?(\d*)\})\??")


class _Unenforced(Exception):
    """A construct that is not enforced."""


class _Group:
    """An open group, or the pattern itself.

    Attributes:
        repeats, by: Repetitions that its most repeated part stands for, and the outermost quantifier of that part.
        begins: Nothing that matches characters stands before it.
        empty: Nothing that matches characters stands in its present alternative yet.
        ends: An anchor demands that nothing follows it.
    """

    def __init__(self, *, begins: bool) -> None:
        self.repeats, self.by = 1, ""
        self.begins = begins
        self.empty = True
        self.ends = False


def pattern_fault(pattern: str) -> str:
    """The first construct of a pattern that cannot be enforced, as part of a sentence; empty for none."""
    try:
        _Scan(pattern).run()
    except _Unenforced as fault:
        return str(fault)
    except IndexError:  # a class or an escape that does not end: the compiler says so in its own words
        return ""
    return ""


class _Scan:
    """One pass over a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._open = [_Group(begins=True)]

    def run(self) -> None:
        """Raises _Unenforced."""
        while self._at < len(self._pattern):
            group = self._open[-1]
            match self._pattern[self._at]:
                case "(":
                    self._begin_group(group)
                case "|":
                    group.empty = True
                    self._at += 1
                case "^":
                    if not (group.begins and group.empty):
                        raise _Unenforced(f"anchor `^` in the middle (at {self._at}) is not enforced")
                    self._at += 1
                case "$":
                    self._at += 1
                    self._end_here(group)
                case ")" if len(self._open) > 1:
                    self._at += 1
                    self._end_group(self._open.pop())
                case _:
                    self._skip_atom()
                    self._repeat(_Group(begins=False))

    def _begin_group(self, outer: _Group) -> None:
        begin = self._at + 1
        head = next((head for head in _GROUPS if self._pattern.startswith(head, begin)), "")
        if _GROUPS.get(head) or (not head and self._pattern[begin] == "?"):
            name = _GROUPS.get(head) or "group modifier"
            raise _Unenforced(f"{name} `{self._pattern[self._at : begin + 3]}` is not enforced")
        if len(self._open) > GROUPS_MAX:
            raise _Unenforced(f"groups are nested more than {GROUPS_MAX} deep")
        self._open.append(_Group(begins=outer.begins and outer.empty))
        self._at = begin + len(head)
        if head.endswith("<"):
            self._at = (self._pattern.find(">", self._at) + 1) or len(self._pattern)

    def _end_group(self, group: _Group) -> None:
        if group.ends:
            self._end_here(self._open[-1])
        self._repeat(group)

    def _end_here(self, group: _Group) -> None:
        if self._pattern[self._at : self._at + 1] not in ("", "|", ")", "$"):
            raise _Unenforced(f"anchor `$` in the middle (before {self._at}) is not enforced")
        group.ends = True

    def _repeat(self, item: _Group) -> None:
        """Takes the quantifier behind an item, and counts for what it stands."""
        outer = self._open[-1]
        outer.empty = False
        repeats, by = item.repeats, item.by
        quantifier = _QUANTIFIER.match(self._pattern, self._at)
        if quantifier is not None:
            self._at = quantifier.end()
            if quantifier[1] is not None:
                repeats *= max(int(quantifier[1][:9]), int(quantifier[2][:9] or 0), 1)
                by = quantifier[0]
        if item.by and repeats > max(REPETITIONS_MAX, item.repeats):
            raise _Unenforced(
                f"repetition `{item.by}` nested in `{by}` stands for {repeats} repetitions, "
                f"at most {REPETITIONS_MAX} are taken"
            )
        if repeats > outer.repeats:
            outer.repeats, outer.by = repeats, by

    def _skip_atom(self) -> None:
        if self._pattern[self._at] == "\\":
            self._skip_escape()
        elif self._pattern[self._at] == "[":
            self._at += 2 if self._pattern[self._at + 1] == "^" else 1
            while self._pattern[self._at] != "]":
                self._skip_in_class()
            self._at += 1
        else:
            self._at += 1

    def _skip_in_class(self) -> None:
        if self._pattern.startswith("[:", self._at):
            raise _Unenforced(f"class `{self._pattern[self._at : self._at + 9]}` is not enforced")
        if self._pattern[self._at] == "\\":
            self._skip_escape()
        else:
            self._at += 1

    def _skip_escape(self) -> None:
        char = self._pattern[self._at + 1]
        if char.isascii() and char.isalnum() and char not in _ESCAPES:
            name = "backreference" if char in "123456789" else _NAMES.get(char, "escape")
            raise _Unenforced(f"{name} `\\{char}` is not enforced")
        self._at += 2
