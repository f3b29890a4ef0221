"""Elements of a workload: requests by their lengths and times, without any text."""

from __future__ import annotations

from pathlib import Path

import msgspec

#: No language model takes more; a length above it is an error in the trace.
TOKENS_MAX = 4_000_000


class WorkloadError(ValueError):
    """A trace or its description is wrong. The message names the file and the line where there are any."""

    def __init__(self, complaint: str, *, path: Path | str = "", line: int = 0) -> None:
        where = f"{path}:{line}: " if line else f"{path}: " if path else ""
        super().__init__(f"{where}{complaint}")


class RequestShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The lengths of one request.

    Attributes:
        prompt_tokens: At least 1.
        output_tokens: At least 1: what the model will say, its end of sequence included.
        prefix: Names of the prompt's leading parts of ``prefix_tokens`` each: equal leading names are equal prompts.
            Empty where the prompt shares nothing.
        prefix_tokens: Tokens of each part but the last, which may be shorter.
    """

    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    prefix_tokens: int = 0


class AskedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Facts about a recorded request beside its shape.

    Attributes:
        outputs: Tokens of each choice.
        max_tokens: The client's bound; 0 where unknown.
        expected: Output tokens that were expected when it was placed; None if unknown.
    """

    model: str
    outputs: tuple[int, ...]
    max_tokens: int = 0
    expected: float | None = None

    @property
    def stated(self) -> bool:
        """Whether the client fixed the length."""
        return self.expected is not None and self.expected == self.max_tokens == max(self.outputs)


class Arrival(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request and when it comes, ns from the beginning of the workload. ``asked``: None where it is made up."""

    at_ns: int
    shape: RequestShape
    asked: AskedRequest | None = None


def tokens(text: object, *, column: str, path: Path | str, line: int, least: int = 1) -> int:
    """A length out of a trace.

    Raises:
        WorkloadError: it is no whole number, below ``least``, or absurd.
    """
    try:
        number = float(str(text))
    except ValueError:
        raise WorkloadError(f"{column} is {text!r}, which is no number", path=path, line=line) from None
    if not number.is_integer():
        raise WorkloadError(f"{column} is {text}, which is no whole number of tokens", path=path, line=line)
    if not least <= number <= TOKENS_MAX:
        raise WorkloadError(f"{column} is {text}; it must be {least} to {TOKENS_MAX:,} tokens", path=path, line=line)
    return int(number)
