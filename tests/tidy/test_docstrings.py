"""First lines of docstrings: a noun phrase or an imperative, as in the documentation of the field's libraries."""

import ast
import re

from tests.tidy.tree import nodes, python_files

QUESTION = re.compile(r"^(What|How|Whom?|Whose|Which|Where|When|Why)\b")


def test_no_docstring_opens_with_a_question_word():
    opening = [
        f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for path in python_files()
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node) or "")
        and QUESTION.match(text)
    ]
    assert not opening, "\n".join(opening)
