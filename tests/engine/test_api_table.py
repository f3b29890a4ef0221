"""docs/API.md says of every route and field of vLLM's server what becomes of it here."""

from pathlib import Path

from tests.testbed.programs import output_of


def test_the_table_of_vllms_api_is_up_to_date() -> None:
    status, said = output_of("setup.api_table", ["--check"], limit_s=300)
    assert status == 0, said
    assert "no: " in (Path(__file__).parents[2] / "docs" / "API.md").read_text()
