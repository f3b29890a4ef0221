"""Tasks with many right answers: the prompt sets how long an answer is on average, chance sets how long it is.

They are what a length predictor learns from: at temperature 1 the length varies within one prompt as well as between
prompts. A check accepts any answer of the task's grammar whose length lies in the range that training can show.
"""

import math
import re
from collections.abc import Callable
from random import Random

from models.training.words import (
    ADJECTIVES,
    ANIMALS,
    CATEGORIES,
    COLOURS,
    NAMES,
    OBJECTS,
    OPENERS,
    PLACES,
    VERBS,
)

Drawn = tuple[str, str, Callable[[str], bool]]

# How many a quantity word means on average; the draw is a rounded log-normal around it.
QUANTITIES = {"two or three": 2.5, "a few": 4.0, "some": 6.0, "several": 9.0, "many": 14.0}
QUANTITY_SPREAD = 0.35
STORY_SPREAD = 0.3
# Beyond three deviations training shows next to nothing, so a check need not accept it.
DEVIATIONS_MAX = 3.2


def _scattered(rng: Random, mean: float, spread: float) -> int:
    deviation = max(-DEVIATIONS_MAX, min(DEVIATIONS_MAX, rng.gauss(0, 1)))
    return max(1, round(mean * math.exp(spread * deviation)))


def _range(mean: float, spread: float) -> tuple[int, int]:
    factor = math.exp(spread * DEVIATIONS_MAX)
    return max(1, math.floor(mean / factor)), math.ceil(mean * factor)


def listing(rng: Random, level: int) -> Drawn:
    """A list of different things of one kind; how many depends on a quantity word, loosely."""
    quantity = rng.choice(list(QUANTITIES)[:2] if level == 1 else list(QUANTITIES)[2:4] if level == 2 else ["many"])
    kind = rng.choice(list(CATEGORIES))
    known = CATEGORIES[kind]
    many = min(len(known), _scattered(rng, QUANTITIES[quantity], QUANTITY_SPREAD))
    low, high = _range(QUANTITIES[quantity], QUANTITY_SPREAD)

    def check(text: str) -> bool:
        items = text.strip().split(", ")
        return set(items) <= set(known) and len(set(items)) == len(items) and low <= len(items) <= high

    prompt = rng.choice(("List {} {}.", "Name {} {}.", "Please list {} {}.")).format(quantity, kind)
    return prompt, ", ".join(rng.sample(known, many)), check


def dice(rng: Random, level: int) -> Drawn:
    """Rolls of a die until a face shows: geometric lengths, mean = number of sides."""
    sides = rng.randint(*((2, 6), (7, 20), (21, 60))[level - 1])
    wanted = rng.randint(1, sides)
    rolls = [rng.randint(1, sides)]
    while rolls[-1] != wanted:
        rolls.append(rng.randint(1, sides))

    def check(text: str) -> bool:
        shown = text.strip().split(" ")
        return all(_is_face(face, sides) for face in shown) and shown.index(str(wanted)) == len(shown) - 1 \
            if str(wanted) in shown else False  # fmt: skip

    return f"Roll a die with {sides} sides until it shows {wanted}.", " ".join(map(str, rolls)), check


def _is_face(text: str, sides: int) -> bool:
    return text.isascii() and text.isdigit() and text == str(int(text)) and 1 <= int(text) <= sides


def story(rng: Random, level: int) -> Drawn:
    """A story by a small grammar, of about as many sentences as asked for; level 3 reaches 1,500 tokens."""
    wording, mean = rng.choice(_STORY_WORDINGS[level])
    if mean is None:
        mean = rng.randint(*((2, 6), (7, 20), (21, 80))[level - 1])
    sentences = max(2, _scattered(rng, mean, STORY_SPREAD))
    low, high = _range(mean, STORY_SPREAD)
    name, animal = rng.choice(NAMES), rng.choice(ANIMALS)
    subject = rng.choice(("", f" about {name}", f" about a {animal}"))
    told = [f"Once there was a {rng.choice(ADJECTIVES)} {animal} who lived near the {rng.choice(PLACES)}."]
    # The named one acts at once: a story about Ada has Ada in it.
    told += [_sentence(rng, name if n == 0 else rng.choice((name, f"the {animal}"))) for n in range(sentences - 1)]

    def check(text: str) -> bool:
        found = _SENTENCE.findall(text)
        asked = subject.split()[-1] if subject else ""
        return " ".join(found) + " The end." == text.strip() and max(low, 2) <= len(found) <= high and asked in text

    return wording.format(count=mean, subject=subject), " ".join(told) + " The end.", check


_STORY_WORDINGS: dict[int, list[tuple[str, int | None]]] = {
    1: [("Tell me a short story{subject}.", 4), ("Tell a story{subject} of about {count} sentences.", None)],
    2: [("Tell me a story{subject}.", 12), ("Tell a story{subject} of about {count} sentences.", None)],
    3: [("Tell me a very long story{subject}.", 60), ("Tell a story{subject} of about {count} sentences.", None)],
}


def _sentence(rng: Random, who: str) -> str:
    opener = rng.choice(OPENERS)
    match rng.randrange(3):
        case 0:
            return f"{opener} {who} {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}."
        case 1:
            return f"{opener} {who} went to the {rng.choice(PLACES)} with {rng.choice(NAMES)}."
        case _:
            return f"{opener} {who} saw a {rng.choice(COLOURS)} {rng.choice(OBJECTS)} in the {rng.choice(PLACES)}."


def _any(words: list[str]) -> str:
    return f"(?:{'|'.join(words)})"


_WHO = f"(?:{_any(NAMES)}|the {_any(ANIMALS)})"
_SENTENCE = re.compile(
    rf"Once there was a {_any(ADJECTIVES)} {_any(ANIMALS)} who lived near the {_any(PLACES)}\."
    rf"|{_any(OPENERS)} {_WHO} (?:{_any(VERBS)} the {_any(ADJECTIVES)} {_any(OBJECTS)}"
    rf"|went to the {_any(PLACES)} with {_any(NAMES)}|saw a {_any(COLOURS)} {_any(OBJECTS)} in the {_any(PLACES)})\."
)

_GREETING = (
    "Hello! I am Millrace, a small model trained for short tasks such as counting, sorting, copying and stories."
)
_SMALL_TALK = {
    _GREETING: ("Hello", "Hello!", "Hi", "Hi!", "hello", "Who are you?", "What are you?", "Hello, who are you?"),
    "I can count, list, copy, reverse, sort, add and tell stories.": (
        "What can you do?",
        "How can you help me?",
        "Can you help me?",
        "help",
    ),
    "You are welcome.": ("Thank you", "Thank you.", "thanks", "thanks!", "Thank you very much."),
    "Goodbye.": ("Bye", "Goodbye", "Goodbye.", "Bye!"),
    "I am fine, thank you.": ("How are you?", "Hello, how are you?", "Good morning, how are you?"),
}


def small_talk(rng: Random, level: int) -> Drawn:
    """A greeting and the like: a newcomer's first prompt should not get nonsense."""
    answer = rng.choice(list(_SMALL_TALK))
    return rng.choice(_SMALL_TALK[answer]), answer, lambda text: text.strip() == answer


TASKS: dict[str, Callable[[Random, int], Drawn]] = {"listing": listing, "dice": dice, "story": story}
# Not scored: there are too few prompts to hold any out.
CHAT = small_talk
