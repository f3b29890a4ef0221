"""docs/CONFIGURATION.md is what the configurations' types say, and they describe every key."""

from setup import configuration


def test_every_key_is_described_where_it_is_read() -> None:
    assert not list(configuration.undescribed())


def test_the_page_of_keys_is_as_it_would_be_written() -> None:
    current = configuration.DOCUMENT.read_text() == configuration.document()
    assert current, "run `python -m setup.configuration`, which writes docs/CONFIGURATION.md"
