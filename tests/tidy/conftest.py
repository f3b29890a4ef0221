"""Syntax trees of the whole repository are kept while these tests run, and no longer."""

import gc
from collections.abc import Iterator

import pytest

from tests.tidy.tree import nodes, parsed


@pytest.fixture(scope="package", autouse=True)
def _trees() -> Iterator[None]:
    """The collector stands still meanwhile: it would look at millions of nodes again and again, and find nothing."""
    gc.disable()
    yield
    nodes.cache_clear()
    parsed.cache_clear()
    gc.enable()
