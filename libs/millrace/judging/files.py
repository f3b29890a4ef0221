"""The files of judges, and recordings of judged answers. The only I/O of this package.

A confidence judge lies in its model's folder, as JSON (CONFIDENCE_FILE). It names the weights whose answers it was
fitted to, and is refused for others. The folder of a model that judges has its calibration (LLM_FILE), which names the
weights of the judge.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from millrace.files import replace_file
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.evidence import usable
from millrace.kvcopy.weights import weights_fingerprint

FORMAT = "millrace-judge/1"

#: Below a model's folder.
CONFIDENCE_FILE = Path("judge") / "confidence.json"
LLM_FILE = Path("judge") / "llm.json"
LLM_FORMAT = "millrace-llm-judge/1"


class JudgeUnreadable(ValueError):
    """A file that is no judge of this version, or of another model; the text names file and reason."""


class RecordingUnreadable(ValueError):
    """A file that holds no judged answers; the text names file, line and reason."""


class _JudgeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str = FORMAT
    judge: ConfidenceModel


class LlmCalibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calibration of a model that judges answers of others.

    Attributes:
        curve: From its share of "yes" to the probability of a right answer, of all models' answers together.
        curves: The same of each model's answers by themselves, which are right more or less often; others by ``curve``.
        judged: Models whose answers it was fitted to.
        answers: It was fitted to.
        area: Under the ROC curve, on answers left out of the fit.
        error: Expected calibration error, likewise.
    """

    format: str = LLM_FORMAT
    curve: IsotonicCurve
    curves: dict[str, IsotonicCurve] = {}
    judged: list[str]
    answers: int
    area: float
    error: float
    fingerprint: str


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded answer of one model.

    Attributes:
        right: The truth.
        logprobs: Of each token, thousandths.
        output_tokens: 0 for as many as there are log-probabilities.
    """

    right: bool
    logprobs: list[int]
    output_tokens: int = 0

    def values(self) -> list[float]:
        return [value / 1000 for value in self.logprobs]

    @property
    def length(self) -> int:
        """Output tokens, at least 1."""
        return max(1, self.output_tokens or len(self.logprobs))


class RecordedAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a recording.

    Attributes:
        answers: By model.
        prompt_tokens: 0 where unknown.
    """

    prompt: str
    answers: dict[str, RecordedAnswer]
    prompt_tokens: int = 0


class JudgedAnswer(msgspec.Struct, frozen=True):
    """An answer of one model with usable log-probabilities, and the truth."""

    prompt: str
    logprobs: list[float]
    right: bool


def read_judge(path: Path, *, model_folder: Path | None = None) -> ConfidenceModel:
    """Reads a judge.

    Args:
        model_folder: Folder of the model whose answers it shall judge; None for any.

    Raises:
        JudgeUnreadable: it is torn, of another version, or was fitted to answers of other weights.
        OSError: it cannot be read.
    """
    try:
        told = msgspec.json.decode(path.read_bytes(), type=_JudgeFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise JudgeUnreadable(f"{path}: {error}") from None
    if told.format != FORMAT:
        raise JudgeUnreadable(f"{path}: format {told.format}, not {FORMAT}")
    if model_folder is not None and told.judge.fingerprint != weights_fingerprint(model_folder):
        raise JudgeUnreadable(f"{path}: fitted to answers of other weights than those in {model_folder}")
    return told.judge


def write_judge(path: Path, judge: ConfidenceModel) -> None:
    """Writes a judge, atomically.

    Raises:
        OSError: it cannot be written.
    """
    _write(path, _JudgeFile(judge=judge))


def _write(path: Path, content: msgspec.Struct) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(content), indent=0) + b"\n")


def read_llm_judge(folder: Path) -> LlmCalibration | None:
    """Reads the calibration of a model that judges; None for a folder that has none.

    Raises:
        JudgeUnreadable: it is torn, of another version, or of other weights than those in the folder.
        OSError: it cannot be read.
    """
    path = folder / LLM_FILE
    if not path.is_file():
        return None
    try:
        told = msgspec.json.decode(path.read_bytes(), type=LlmCalibration)
    except (msgspec.DecodeError, ValueError) as error:
        raise JudgeUnreadable(f"{path}: {error}") from None
    if told.format != LLM_FORMAT:
        raise JudgeUnreadable(f"{path}: format {told.format}, not {LLM_FORMAT}")
    if told.fingerprint != weights_fingerprint(folder):
        raise JudgeUnreadable(f"{path}: fitted with other weights than those in {folder}")
    return told


def write_llm_judge(folder: Path, calibration: LlmCalibration) -> None:
    """Writes the calibration into the folder of the model that judges, atomically.

    Raises:
        OSError: it cannot be written.
    """
    _write(folder / LLM_FILE, calibration)


def read_answers(paths: Sequence[Path], model: str) -> list[JudgedAnswer]:
    """Answers of one model in recordings, one JSON object a line (``.jsonl``, ``.jsonl.gz``).

    Answers without usable log-probabilities, and prompts that the model was not asked, are left out.

    Raises:
        RecordingUnreadable: a line is no RecordedAnswers.
        OSError: a file cannot be read.
    """
    found: list[JudgedAnswer] = []
    for row in (row for path in paths for row in read_recording(path)):
        answer = row.answers.get(model)
        logprobs = answer.values() if answer is not None else []
        if answer is not None and usable(logprobs) is not None:
            found.append(JudgedAnswer(row.prompt, logprobs, answer.right))
    return found


def read_recording(path: Path) -> Iterator[RecordedAnswers]:
    """Lines of one recording.

    Raises:
        RecordingUnreadable: a line is no RecordedAnswers.
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(RecordedAnswers)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise RecordingUnreadable(f"{path}, line {number}: {error}") from None
