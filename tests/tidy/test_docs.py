"""Documents keep to the code: links lead somewhere, commands exist, every key of a scenario is described."""

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from millrace.cli.verbs import VERBS
from millrace.enginemodel.parameters import EngineParameters

from simulator.scenarios.spec import ScenarioSpec
from tests.tidy.tree import ROOT, tracked_files

DOCUMENTS = [path for path in tracked_files() if path.suffix == ".md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
#: A command at the beginning of a line of code, or in back quotes.
MILLRACE = re.compile(r"(?:^ {4,}|`|venv/bin/)millrace ([a-z]+(?:-[a-z]+)*)\b", re.MULTILINE)
TASK = re.compile(r"\./task ([a-z][a-z:-]*[a-z])\b")
BENCH = re.compile(r"python -m bench ([a-z_0-9]+)\b")
TEST_FILE = re.compile(r"`(tests/[\w/]+\.py)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def text_of(path: Path) -> str:
    return (ROOT / path).read_text()


def anchors(text: str) -> set[str]:
    """As GitHub makes them: lower case, words and hyphens kept, spaces to hyphens."""
    titles = HEADING.findall(FENCE.sub("", text))
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def broken(path: Path, link: str) -> str:
    """Explain why a link leads nowhere; empty where it leads somewhere, or out of the repository."""
    if "://" in link or link.startswith("mailto:"):
        return ""
    name, _, anchor = link.partition("#")
    target = (ROOT / path).parent / name if name else ROOT / path
    if not target.exists():
        return f"{path}: {link}: no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
        return f"{path}: {link}: no such heading"
    return ""


def test_every_link_leads_somewhere() -> None:
    links = [(path, link) for path in DOCUMENTS for link in LINK.findall(FENCE.sub("", text_of(path)))]
    assert len(links) > 50
    assert not [why for path, link in links if (why := broken(path, link))]


def verbs_of_the_taskfile() -> set[str]:
    return set(re.findall(r"^  ([a-z][a-z:-]*):$", text_of(Path("Taskfile.yml")), re.MULTILINE))


def benches() -> set[str]:
    folders = (
        path for path in tracked_files() if path.suffix == ".py" and "bench" in (path.parts[0], path.parent.name)
    )
    return {path.stem for path in folders}


@pytest.mark.parametrize(
    ("pattern", "known"),
    [
        pytest.param(MILLRACE, {verb.name for verb in VERBS}, id="millrace"),
        pytest.param(TASK, verbs_of_the_taskfile() | {verb.name for verb in VERBS}, id="task"),
        pytest.param(BENCH, benches(), id="bench"),
    ],
)
def test_every_command_that_a_document_names_exists(pattern: re.Pattern[str], known: set[str]) -> None:
    written = [path for path in DOCUMENTS if not text_of(path).startswith("<!-- Generated")]  # records of earlier runs
    named = [(path, verb) for path in written for verb in pattern.findall(text_of(path))]
    assert named
    assert not [f"{path}: {verb}" for path, verb in named if verb not in known]


def test_every_verb_is_in_some_document() -> None:
    named = {verb for path in DOCUMENTS for verb in MILLRACE.findall(text_of(path))}
    assert {verb.name for verb in VERBS} - named == set()


def test_every_test_that_a_document_names_exists_and_each_threat_names_one() -> None:
    named = [(path, test) for path in DOCUMENTS if path.parts[0] == "docs" for test in TEST_FILE.findall(text_of(path))]
    assert not [f"{path}: {test}" for path, test in named if not (ROOT / test).is_file()]
    text = text_of(Path("docs/SECURITY.md"))
    section = text[text.index("## Who might attack") : text.index("## NATS: what each role may do")]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert not [row for row in rows if not TEST_FILE.findall(row)]


def keys(struct: type) -> Iterator[str]:
    """Names of all keys below a struct, those of engines apart: they have a document of their own."""
    for name, kind in typing.get_type_hints(struct).items():
        if name.startswith("__"):
            continue
        yield name
        for part in parts(kind):
            if isinstance(part, type) and issubclass(part, msgspec.Struct) and part is not EngineParameters:
                yield from keys(part)


def parts(kind: object) -> Iterator[object]:
    """The type itself, or those that a union or tuple is made of."""
    inner = typing.get_args(kind)
    if not inner:
        yield kind
    for part in inner:
        yield from parts(part)


def test_every_key_of_a_scenario_is_described() -> None:
    text = text_of(Path("docs/SIMULATION.md"))
    table = text[text.index("## The scenario file") : text.index("## Workloads")]
    words = set(re.findall(r"[a-z0-9_]+", table))
    found = set(keys(ScenarioSpec))
    assert {"rate_per_s", "cold_start_s", "default_output_tokens"} <= found
    assert found - words == set()


def test_the_tutorial_of_a_service_shows_its_code_whole() -> None:
    shown = re.findall(r"^```python\n(.*?)^```", text_of(Path("docs/SERVICE.md")), re.MULTILINE | re.DOTALL)
    source = text_of(Path("tests/census.py"))
    code = re.sub(r"^# \w+\.py\n", "", source[source.index("from __future__") :], flags=re.MULTILINE)
    assert stripped("".join(shown)) == stripped(code)


def stripped(code: str) -> list[str]:
    """Lines without their indentation: the formatter moves a method that stands alone to the left."""
    return [line.strip() for line in code.splitlines() if line.strip()]


#: Files in the first cell of a table, such as `actor.py` in a module's README.
ROW = re.compile(r"^\| *(`[^|]+?) *\|", re.MULTILINE)
FILE_NAME = re.compile(r"`([\w./-]+\.(?:py|md|json|toml|cpp|hpp|yaml))`")


def test_every_file_that_a_table_of_a_readme_names_exists() -> None:
    readmes = [path for path in DOCUMENTS if path.name == "README.md"]
    named = [(path, name) for path in readmes for row in ROW.findall(text_of(path)) for name in FILE_NAME.findall(row)]
    assert len(named) > 100
    missing = [f"{path}: {name}" for path, name in named if not any((ROOT / path.parent).rglob(name.rsplit("/")[-1]))]
    assert not missing, "\n".join(missing)


def test_llms_txt_lists_every_guide() -> None:
    listed = LINK.findall(text_of(Path("llms.txt")))
    assert not [link for link in listed if not (ROOT / link).exists()]
    guides = {str(path) for path in DOCUMENTS if path.parent == Path("docs")} - {"docs/README.md"}
    assert guides <= set(listed)
