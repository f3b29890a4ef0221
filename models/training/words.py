"""The words that the tasks speak with; the tokenizer gives each of them a token of its own."""

ANIMALS = (
    "cat dog fox owl bear wolf frog goat horse mouse sheep tiger whale eagle snake camel otter panda rabbit donkey "
    "spider turtle monkey badger"
).split()
COLOURS = "red blue green white black brown pink gold silver purple orange yellow".split()
FOODS = "bread cheese apple soup honey rice cake plum salt butter lemon onion pear corn bean melon".split()
OBJECTS = "lamp stone bell boat key rope drum hat book cup coin map box kite wheel candle".split()
PLACES = "river forest village tower garden harbour market mountain bridge castle field island".split()
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo June Kai Lena".split()
ADJECTIVES = "old small bright quiet brave clever lazy happy lost tall strange golden".split()
VERBS = "found carried painted followed sold hid washed dropped borrowed mended watched gave".split()
UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
OPENERS = "Then Later Soon Next Meanwhile".split()

# Everything that a category task can be asked to list.
CATEGORIES = {
    "animals": ANIMALS,
    "colours": COLOURS,
    "foods": FOODS,
    "objects": OBJECTS,
    "places": PLACES,
    "names": NAMES,
}

# The fixed words of instructions and answers: those that open a text, and those that follow another word.
OPENING_WORDS = (
    "Count List Copy Repeat Reverse Sort Put Add What Compress Encode Expand Decode Write Say How Is Play Give Tell "
    "Name Please Roll Once Hello Hi Who You Goodbye Bye Thank Good yes no fizz buzz"
).split()
INNER_WORDS = (
    "from to down in steps of words the first multiples squares this text order letters letter numbers ascending copy "
    "reverse sort count list copying with and is plus times answer runs word lines numbered upper case capitals many "
    "does occur greater less than fizz buzz Collatz sequence starting at me story stories about sentences short very "
    "long some few several or die sides until it shows there was who lived near The end went saw am are Millrace model "
    "trained for tasks such as counting sorting can you do help small welcome fine thank hundred add tell "
    "names animals colours foods objects places these"
).split()


def number_in_words(number: int) -> str:
    """Spells a number from 0 to 199 as English does, without hyphens."""
    if number >= 100:
        rest = number - 100
        return "one hundred" + (f" and {number_in_words(rest)}" if rest else "")
    if number < 20:
        return UNITS[number]
    tens, unit = divmod(number, 10)
    return TENS[tens - 2] + (f" {UNITS[unit]}" if unit else "")
