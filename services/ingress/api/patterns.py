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
#: One item of a pattern: an escape, a class, a group's begin or end, a quantifier, or a character.
_ITEM = re.compile(
    r"\\(?P<escape>.)|(?P<set>\[\^?(?:\\.|[^\]\\])*(?:\]|\Z))|(?P<open>\((?:\?(?::|P?<\w+>|<?[=!]|.?))?)|(?P<close>\))"
    r"|(?P<times>[*+?]\??|\{(?P<least>\d{1,9})(?:,(?P<most>\d{0,9}))?\}\??)|(?P<anchor>[\^$])|(?P<other>.)",
    re.DOTALL,
)
_LOOKS = {"(?=": "lookahead", "(?!": "lookahead", "(?<=": "lookbehind", "(?<!": "lookbehind"}
_ESCAPES = {
    **dict.fromkeys("bB", "word boundary"),
    **dict.fromkeys("k123456789", "backreference"),
    **dict.fromkeys("pP", "Unicode class"),
    **dict.fromkeys("0AZzGQE", "escape"),
}


def pattern_fault(pattern: str) -> str:
    """The first construct of a pattern that cannot be enforced, as part of a sentence; empty for none."""
    open_groups = [(1, "")]  # of each, the most repetitions that a part of it stands for, and their outer quantifier
    last = (1, "")
    before = ""
    for item in _ITEM.finditer(pattern):
        fault = _unenforced(item, before, pattern[item.end() : item.end() + 1])
        if fault:
            return f"{fault} is not enforced"
        if item["open"]:
            open_groups.append((1, ""))
            if len(open_groups) > GROUPS_MAX:
                return f"groups are nested more than {GROUPS_MAX} deep"
        elif item["times"]:
            most = max(int(item["least"] or 1), int(item["most"] or 1), 1)
            repeats = (last[0] * most, item["times"] if item["least"] else last[1])
            if last[1] and repeats[0] > max(REPETITIONS_MAX, last[0]):
                return (
                    f"repetition `{last[1]}` nested in `{repeats[1]}` stands for {repeats[0]} repetitions, "
                    f"at most {REPETITIONS_MAX} are taken"
                )
            open_groups[-1] = max(open_groups[-1], repeats, key=lambda part: part[0])
        elif item["close"] and len(open_groups) > 1:
            last = open_groups.pop()
            open_groups[-1] = max(open_groups[-1], last, key=lambda part: part[0])
        else:
            last = (1, "")
        before = item[0]
    return ""


def _unenforced(item: re.Match[str], before: str, after: str) -> str:
    """The name of an item that is not enforced between its neighbours; empty for one that is."""
    opened, held = item["open"] or "", item["set"] or ""
    if len(opened) > 1 and opened != "(?:" and not opened.endswith(">"):
        return f"{_LOOKS.get(opened, 'group modifier')} `{opened}`"
    if item["anchor"] == "^" and before and before[0] not in "(|^":
        return f"anchor `^` in the middle (at {item.start()})"
    if item["anchor"] == "$" and after and after not in ")|$":
        return f"anchor `$` in the middle (at {item.start()})"
    if "[:" in held[1:]:
        return f"class `{held}`"
    escape = item["escape"] or next((letter for letter in re.findall(r"\\(.)", held) if letter in _ESCAPES), "")
    return f"{_ESCAPES[escape]} `\\{escape}`" if escape in _ESCAPES else ""
