"""``millrace train``: files for the models that ship, what is refused, and what the judge is trained on."""

import gzip
from pathlib import Path

import pytest
from jinja2 import Environment
from millrace.cascade.entry_files import ENTRY_FILE, read_entry
from millrace.cli.__main__ import main
from millrace.judging.question import judging_question

from models.training.judge_documents import Answered, judged
from models.training.tokenizer import BOS, CHAT_TEMPLATE, EOS, build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "bench" / "judged" / "recordings" / "answers.jsonl.gz"
FOLDERS = [ROOT / "models" / f"millrace-{name}" for name in ("nano", "micro", "mini")]


def _train(output: Path, *words: str, recording: Path = RECORDING) -> int:
    folders = [str(folder) for folder in FOLDERS]
    return main(["train", "entry", "--from", str(recording), "--model-path", *folders, "--output", str(output), *words])


def test_the_file_that_ships_belongs_to_the_models_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = read_entry(FOLDERS[-1] / ENTRY_FILE, folders=FOLDERS).file
    assert _train(tmp_path / "entry.json") == 0
    told = capsys.readouterr().out
    assert "saves enough" in told
    again = read_entry(tmp_path / "entry.json", folders=FOLDERS).file
    assert (again.models, again.value) == (shipped.models, pytest.approx(shipped.value))
    assert again.costs == pytest.approx(shipped.costs)


def test_a_recording_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tmp_path / "few.jsonl"
    few.write_bytes(b"\n".join(gzip.decompress(RECORDING.read_bytes()).splitlines()[:50]))
    assert _train(tmp_path / "entry.json", recording=few) != 0
    assert "needs 50 answers" in capsys.readouterr().err
    assert not (tmp_path / "entry.json").exists()


def test_costs_that_do_not_fit_the_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path / "entry.json", "--costs", "1", "2") != 0
    assert "3 models and 2 costs" in capsys.readouterr().err


# The judge that ships was trained on the very tokens that it is asked with.


PROMPT = "<|bos|><|user|>Count from 1 to 4.<|eos|><|assistant|>"


def _asked(answer: str) -> list[int]:
    """Tokens of the judge service's question, by the chat template."""
    messages = [{"role": "user", "content": judging_question(PROMPT, answer)}]
    template = Environment().from_string(CHAT_TEMPLATE)
    text = template.render(messages=messages, bos_token=BOS, eos_token=EOS, tools=None, add_generation_prompt=True)
    return list(build_tokenizer().encode(text, add_special_tokens=False).ids)


def test_a_document_of_training_is_the_question_that_is_asked() -> None:
    for answer in ("1 2 3 4", "cat", "", "1\n2"):
        row = Answered(PROMPT, answer, right=True, expected="1 2 3 4")
        assert judged(build_tokenizer(), row).tokens == _asked(answer)


def test_an_answer_is_right_up_to_its_first_wrong_token() -> None:
    document = judged(build_tokenizer(), Answered(PROMPT, "1 2 4 4", right=False, expected="1 2 3 4"))
    assert [value for value in document.so_far if value >= 0] == [1, 1, 1, 1, 0, 0, 0]
    assert not document.right
    open_ended = judged(build_tokenizer(), Answered(PROMPT, "1 2", right=True, expected=""))
    assert set(open_ended.so_far) == {-1}
