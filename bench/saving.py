"""Place of a saved figure: the section of ``bench/results/`` named after its command, in place of the run before.

A section's heading is the figure's name and those of its arguments that make another figure of it (``PARTS``), so that
``fidelity`` and ``fidelity --own-pace`` stand side by side. The machine writes the first part of a section: the
command, the stamp, the printed table. People wrote the text after the table, about the run before; that text stays,
under a note that says so until somebody has read it against the new figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

#: Arguments that make a figure of its own; all others vary the same one.
PARTS = frozenset({"--parts", "--own-pace", "--unequal"})
#: The file of a figure that none has a section of.
ELSEWHERE = "others.md"

NOTE = re.compile(r"^\(Written about the run of .*\)\n+", re.MULTILINE)
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d); .*?(?:; commits? (.*))?$", re.MULTILINE)
TABLE = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)


def section_of(name: str, words: Sequence[str]) -> str:
    """The heading of a figure: its name with the arguments of ``PARTS`` and their values."""
    kept, keeps = [name], False
    for word in words:
        if word.startswith("--"):
            keeps = word in PARTS
        if keeps:
            kept.append(word)
    return " ".join(kept)


def command_of(name: str, words: Sequence[str]) -> str:
    """Return the command as typed, without the paths of this machine's files."""
    return " ".join(["python -m bench", name, *("FILE" if "/" in word else word for word in words)])


def file_of(title: str, files: Mapping[str, str]) -> str:
    """The name of the file that has the section, else of one with a section of the same figure, else ``ELSEWHERE``.

    Args:
        title: As of `section_of`.
        files: Name and text of each file there is.
    """
    name = title.partition(" ")[0]
    for pattern in (rf"^## {re.escape(title)}$", rf"^## {re.escape(name)}(?: .*)?$"):
        for file, text in files.items():
            if re.search(pattern, _without_tables(text), re.MULTILINE):
                return file
    return ELSEWHERE


def saved(text: str, *, title: str, command: str, stamp: str, output: str) -> str:
    """The file with the section's figure replaced, or with a new section at its end."""
    figure = f"`{command}`\n\n{stamp}\n\n```\n{output.strip()}\n```\n"
    heading = re.search(rf"^## {re.escape(title)}\n", _without_tables(text), re.MULTILINE)
    if heading is None:
        return f"{text.rstrip()}\n\n## {title}\n\n{figure}".lstrip()
    following = re.search(r"^## ", _without_tables(text)[heading.end() :], re.MULTILINE)
    end = heading.end() + following.start() if following else len(text)
    after = text[: heading.end()] + "\n" + figure + _kept(text[heading.end() : end]) + text[end:]
    return after.rstrip() + "\n"


def _without_tables(text: str) -> str:
    """The same length, with nothing in printed tables that could pass for a heading."""
    return TABLE.sub(lambda table: re.sub(r"[^\n]", " ", table[0]), text)


def _kept(section: str) -> str:
    """Return the text behind the first table of a section, marked where it is not about that table."""
    table = TABLE.search(section)
    words = section[table.end() :].strip() if table else section.strip()
    if not words:
        return "\n"
    if not words.startswith("###") and not NOTE.match(words):
        run = STAMP.search(section)
        of = f"{run[1]}, commit {run[2]}" if run else "another day"
        words = f"(Written about the run of {of}; not yet read against the figures above.)\n\n{words}"
    return f"\n{words}\n\n"
