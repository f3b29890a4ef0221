"""The task family: what the models are asked, the right answer, and how an answer is checked.

Exact tasks have one right answer; noisy tasks (`noisy.py`) have many, of lengths that vary by chance around something
that the prompt tells. Each exact task is a function (rng, level) -> (subject of the instruction, answer), with levels
1 to 3: a small model should fail where a larger one succeeds. The prompt wraps the subject in one of several wordings.

`held_out` splits prompts by a checksum, so training and evaluation agree on which prompts were never trained on.
"""

import string
import zlib
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from models.training import noisy
from models.training.words import OBJECTS, number_in_words

LEVELS = (1, 2, 3)


class Example(NamedTuple):
    """One instruction with a right answer and the check that any answer must pass."""

    task: str
    level: int
    prompt: str
    answer: str
    check: Callable[[str], bool]


def held_out(prompt: str) -> bool:
    """Whether this prompt is kept for evaluation: one in eight, fixed by the text alone."""
    return zlib.crc32(prompt.encode()) % 8 == 0


def make(task: str, rng: Random, level: int | None = None) -> Example:
    """Draws an example of a task. Raises KeyError when there is no such task."""
    chosen = level or rng.choice(LEVELS)
    if task in noisy.TASKS:
        prompt, answer, check = noisy.TASKS[task](rng, chosen)
        return Example(task, chosen, prompt, answer, check)
    prompt, answer = EXACT[task](rng, chosen)
    return Example(task, chosen, prompt, answer, lambda text: text.strip() == answer)


def log_uniform(rng: Random, low: int, high: int) -> int:
    """A whole number in [low, high] whose logarithm is uniform: short lists are common, long ones happen."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


def _letters(rng: Random, count: int, alphabet: str = string.ascii_lowercase) -> str:
    return "".join(rng.choice(alphabet) for _ in range(count))


def _up_to_digits(rng: Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def count(rng: Random, level: int) -> tuple[str, str]:
    """Count from a to b, up, down or in steps; level 3 reaches 500 numbers."""
    span = log_uniform(rng, *((2, 10), (10, 60), (60, 500))[level - 1])
    first = rng.randrange(1, (20, 200, 500)[level - 1])
    kind = rng.choice(("up", "up", "up", "down", "steps"))
    if kind == "steps":
        step = rng.randrange(2, 10)
        span = min(span, 60)
        numbers = range(first, first + span * step + 1, step)
        return f"Count from {first} to {numbers[-1]} in steps of {step}.", _spaced(numbers)
    last = first + span
    if kind == "down":
        return f"Count down from {last} to {first}.", _spaced(range(last, first - 1, -1))
    wording = rng.choice(("Count from {} to {}.", "Please count from {} to {}.", "Write the numbers from {} to {}."))
    return wording.format(first, last), _spaced(range(first, last + 1))


def _spaced(numbers: range | list[int]) -> str:
    return " ".join(map(str, numbers))


def words(rng: Random, level: int) -> tuple[str, str]:
    """Count in words."""
    span = log_uniform(rng, *((2, 6), (6, 20), (20, 100))[level - 1])
    first = rng.randrange(0, (14, 80, 99)[level - 1])
    numbers = range(first, min(199, first + span) + 1)
    return f"Count from {numbers[0]} to {numbers[-1]} in words.", ", ".join(map(number_in_words, numbers))


def multiples(rng: Random, level: int) -> tuple[str, str]:
    """The first n multiples of k, or the squares from a to b."""
    many = log_uniform(rng, *((2, 8), (8, 16), (16, 40))[level - 1])
    if rng.random() < 0.4:
        first = rng.randrange(1, (10, 30, 60)[level - 1])
        last = first + many - 1
        return f"List the squares from {first} to {last}.", _spaced([n * n for n in range(first, last + 1)])
    factor = rng.randrange(2, (10, 13, 26)[level - 1])
    return f"List the first {many} multiples of {factor}.", _spaced([factor * n for n in range(1, many + 1)])


def copy(rng: Random, level: int) -> tuple[str, str]:
    """Copy random letters and digits."""
    length = log_uniform(rng, *((3, 10), (10, 40), (40, 250))[level - 1])
    text = _letters(rng, length, string.ascii_lowercase + string.digits)
    return rng.choice(("Copy this text: {}", "Repeat this text: {}", "Please copy: {}")).format(text), text


def reverse(rng: Random, level: int) -> tuple[str, str]:
    """Reverse random letters."""
    text = _letters(rng, rng.randint(*((3, 6), (7, 12), (13, 24))[level - 1]))
    return rng.choice(("Reverse this text: {}", "Please reverse: {}", "Reverse the letters of {}")).format(text), text[
        ::-1
    ]


def sort(rng: Random, level: int) -> tuple[str, str]:
    """Sort numbers; level 3 mixes numbers of one to three digits."""
    many = rng.randint(*((3, 5), (6, 9), (10, 16))[level - 1])
    numbers = [rng.randrange(100 if level < 3 else 1000) for _ in range(many)]
    wording = rng.choice(("Sort these numbers: {}", "Please sort: {}", "Put these numbers in ascending order: {}"))
    return wording.format(_spaced(numbers)), _spaced(sorted(numbers))


def add_steps(rng: Random, level: int) -> tuple[str, str]:
    """Addition with every column written out, lowest first."""
    a, b = (_up_to_digits(rng, rng.randint(*((1, 2), (3, 4), (5, 8))[level - 1])) for _ in range(2))
    width = max(len(str(a)), len(str(b)))
    carry, steps = 0, []
    for place in range(width):
        left, right = a // 10**place % 10, b // 10**place % 10
        total = left + right + carry
        steps.append(f"{left}+{right}+{carry}={total}")
        carry = total // 10
    return f"Add {a} and {b} with steps.", " ".join(steps) + f" answer {a + b}"


def add(rng: Random, level: int) -> tuple[str, str]:
    """Addition in one go."""
    a, b = (_up_to_digits(rng, rng.randint(*((1, 1), (2, 2), (3, 4))[level - 1])) for _ in range(2))
    return rng.choice(("What is {} plus {}?", "Add {} and {}.")).format(a, b), str(a + b)


def times(rng: Random, level: int) -> tuple[str, str]:
    """Multiplication in one go: mostly memory."""
    a = rng.randrange(*((0, 10), (10, 30), (30, 100))[level - 1])
    b = rng.randrange(2, 10)
    return f"What is {a} times {b}?", str(a * b)


def _runs(rng: Random, level: int) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for _ in range(rng.randint(*((2, 4), (5, 8), (9, 16))[level - 1])):
        letter = rng.choice([c for c in string.ascii_lowercase if not runs or c != runs[-1][0]])
        runs.append((letter, rng.randint(1, 5 if level == 1 else 9)))
    return runs


def encode(rng: Random, level: int) -> tuple[str, str]:
    """Run-length encoding."""
    runs = _runs(rng, level)
    wording = rng.choice(("Compress the runs in {}", "Encode the runs in {}"))
    return wording.format("".join(c * n for c, n in runs)), "".join(f"{c}{n}" for c, n in runs)


def decode(rng: Random, level: int) -> tuple[str, str]:
    """Run-length decoding."""
    runs = _runs(rng, level)
    wording = rng.choice(("Expand the runs in {}", "Decode the runs in {}"))
    return wording.format("".join(f"{c}{n}" for c, n in runs)), "".join(c * n for c, n in runs)


def repeat(rng: Random, level: int) -> tuple[str, str]:
    """Repeat a word n times: counting without numbers to hold on to."""
    word, many = rng.choice(OBJECTS), rng.randint(*((2, 5), (6, 12), (13, 30))[level - 1])
    wording = rng.choice(("Repeat the word {} {} times.", "Say the word {} {} times."))
    return wording.format(word, many), " ".join([word] * many)


def lines(rng: Random, level: int) -> tuple[str, str]:
    """Numbered lines of one word; level 3 reaches 300 lines."""
    word, many = rng.choice(OBJECTS), log_uniform(rng, *((2, 8), (8, 50), (50, 300))[level - 1])
    answer = "\n".join(f"{n} {word}" for n in range(1, many + 1))
    return f"Write {many} numbered lines with the word {word}.", answer


def upper(rng: Random, level: int) -> tuple[str, str]:
    """Upper case."""
    many = rng.randint(*((1, 1), (2, 4), (5, 12))[level - 1])
    text = " ".join(_letters(rng, rng.randint(3, 6)) for _ in range(many))
    return rng.choice(("Write in upper case: {}", "Write in capitals: {}")).format(text), text.upper()


def letters(rng: Random, level: int) -> tuple[str, str]:
    """Count one letter in a text."""
    text = _letters(rng, rng.randint(*((3, 7), (8, 15), (16, 30))[level - 1]), "abcde")
    letter = rng.choice("abcde")
    return f"How many times does the letter {letter} occur in {text}?", str(text.count(letter))


def compare(rng: Random, level: int) -> tuple[str, str]:
    """Compare two numbers; the one-token answer of the family."""
    digits = rng.randint(*((1, 2), (3, 4), (5, 8))[level - 1])
    a, b = _up_to_digits(rng, digits), _up_to_digits(rng, digits)
    if rng.random() < 0.5:  # share the leading digits, so that the first one does not decide
        kept = 10 ** rng.randrange(1, digits + 1)
        b = a // kept * kept + rng.randrange(kept)
    if rng.random() < 0.5:
        return f"Is {a} greater than {b}?", "yes" if a > b else "no"
    return f"Is {a} less than {b}?", "yes" if a < b else "no"


def fizz_buzz(rng: Random, level: int) -> tuple[str, str]:
    """Fizz buzz from a to b."""
    first = rng.randrange(1, (10, 80, 400)[level - 1])
    last = first + log_uniform(rng, *((3, 10), (10, 40), (40, 120))[level - 1])
    said = ("fizz buzz" if n % 15 == 0 else "fizz" if n % 3 == 0 else "buzz" if n % 5 == 0 else str(n)
            for n in range(first, last + 1))  # fmt: skip
    return f"Play fizz buzz from {first} to {last}.", " ".join(said)


def collatz(rng: Random, level: int) -> tuple[str, str]:
    """The Collatz sequence: its length depends on the prompt in a way that no short rule gives."""
    number = rng.randrange(*((2, 20), (20, 100), (100, 400))[level - 1])
    sequence = [number]
    while sequence[-1] != 1:
        sequence.append(3 * sequence[-1] + 1 if sequence[-1] % 2 else sequence[-1] // 2)
    return f"Give the Collatz sequence starting at {number}.", _spaced(sequence)


EXACT: dict[str, Callable[[Random, int], tuple[str, str]]] = {
    "count": count,
    "words": words,
    "multiples": multiples,
    "copy": copy,
    "reverse": reverse,
    "sort": sort,
    "add_steps": add_steps,
    "add": add,
    "times": times,
    "encode": encode,
    "decode": decode,
    "repeat": repeat,
    "lines": lines,
    "upper": upper,
    "letters": letters,
    "compare": compare,
    "fizz_buzz": fizz_buzz,
    "collatz": collatz,
}
TASKS = (*EXACT, *noisy.TASKS)
