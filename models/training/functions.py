"""Functions that conversations of millrace-agent are about, and requests that ask for them.

A function of a *domain* has handwritten names, parameters and wordings, each drawn from several; a *made-up* one has a
drawn name and drawn parameters, so that names have to be read from the request's list, not remembered.
"""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from models.training import words

Value = str | int | float | bool

CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
CITIES = "Paris Rome Oslo Lima Cairo Tokyo Berlin Madrid Boston Vienna Delhi Accra London Dublin Prague Austin".split()
LANGUAGES = "French German Spanish Italian Japanese Greek Dutch Polish".split()
CURRENCIES = "USD EUR GBP JPY CHF SEK INR BRL".split()
ROOMS = "kitchen bedroom bathroom office hall cellar attic".split()
#: Made-up functions are a verb and a noun of these.
ACTIONS = (
    "create delete update find open close start stop send check order book move rename list show print load".split()
)
THINGS = "ticket order task report file user account invoice event table server image message booking job page".split()
FIELDS = "id title owner email status count size price level date color path code label team group year key".split()


class Parameter(NamedTuple):
    """One parameter: its name, JSON Schema and a way to draw a value."""

    name: str
    schema: dict[str, Any]
    draw: Callable[[Random], Value]


class Function(NamedTuple):
    """A function as a request lists it.

    Attributes:
        wordings: Requests with ``{}`` for the values of the parameters, in their order.
        purpose: Functions of one purpose answer the same requests.
    """

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    wordings: tuple[str, ...]
    purpose: str = ""

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        properties = {parameter.name: parameter.schema for parameter in self.parameters}
        return {"type": "object", "properties": properties, "required": list(properties)}

    def tool(self) -> dict[str, Any]:
        """The entry of a request's ``tools``."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema()}
        return {"type": "function", "function": function}


def word(rng: Random) -> str:
    """A made-up word of one to four syllables."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 4))) + rng.choice(
        ("", "", rng.choice(CONSONANTS))
    )


def title(rng: Random) -> str:
    """A capitalised name: known, or made up; of two words at times."""
    known = (*words.NAMES, *CITIES)
    first = rng.choice(known) if rng.random() < 0.4 else word(rng).capitalize()
    return f"{first} {word(rng).capitalize()}" if rng.random() < 0.15 else first


def phrase(rng: Random) -> str:
    """One to five words."""
    pool = (*words.ANIMALS, *words.FOODS, *words.OBJECTS, *words.PLACES, *words.COLOURS, *THINGS)
    return " ".join(rng.choice(pool) if rng.random() < 0.6 else word(rng) for _ in range(rng.randint(1, 5)))


def code(rng: Random) -> str:
    """Letters and digits."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(3, 9)))


def whole(rng: Random) -> int:
    """A whole number of one to four digits."""
    return rng.randrange(10 ** rng.randint(1, 4))


def decimal(rng: Random) -> float:
    """A number with one or two digits after the point, none of them a trailing zero."""
    return round(rng.randrange(100) + rng.choice((0.5, 0.25, 0.75, rng.randrange(1, 10) / 10)), 2)


def place(rng: Random) -> str:
    """A city, known or made up."""
    return rng.choice(CITIES) if rng.random() < 0.5 else title(rng)


def text(name: str, draw: Callable[[Random], Value] = title) -> Parameter:
    """A parameter of type string."""
    return Parameter(name, {"type": "string"}, draw)


def integer(name: str) -> Parameter:
    """A parameter of type integer."""
    return Parameter(name, {"type": "integer"}, whole)


def number(name: str) -> Parameter:
    """A parameter of type number: whole in half of the cases."""
    return Parameter(name, {"type": "number"}, lambda rng: whole(rng) if rng.random() < 0.5 else decimal(rng))


def one_of(name: str, options: list[str]) -> Parameter:
    """A string out of some."""
    return Parameter(name, {"type": "string", "enum": options}, lambda rng: rng.choice(options))


def said(value: Value) -> str:
    """A value as a person writes it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _city(rng: Random) -> Parameter:
    return text(rng.choice(("city", "location", "place", "town")), place)


def _weather(rng: Random) -> Function:
    name = rng.choice(("get_weather", "weather", "get_current_weather", "fetch_weather", "weather_forecast"))
    parameters, wordings = (
        [_city(rng)],
        [
            "What is the weather in {}?",
            "How is the weather in {}?",
            "Weather in {}?",
            "Tell me the weather in {}.",
            "What's the weather like in {}?",
            "Will it rain in {}?",
        ],
    )
    drawn = rng.random()
    if drawn < 0.25:
        parameters += [one_of("unit", ["celsius", "fahrenheit"])]
        wordings = ["What is the weather in {} in {}?", "Weather in {}, in {}.", "Tell me the weather in {} in {}."]
    elif drawn < 0.4:
        parameters += [integer("days")]
        wordings = ["What is the weather in {} for {} days?", "Weather of {} for the next {} days."]
    description = rng.choice(
        ("Get the weather of a city.", "Current weather of a place.", "Weather for a location", "")
    )
    return Function(name, description, tuple(parameters), tuple(wordings))


def _arithmetic(rng: Random) -> Function:
    kind, stem, wordings = rng.choice(
        (
            (
                "Add two numbers.",
                ("add", "sum", "add_numbers", "plus"),
                ("What is {} plus {}?", "Add {} and {}.", "{} + {}"),
            ),
            (
                "Multiply two numbers.",
                ("multiply", "times", "mul"),
                ("What is {} times {}?", "Multiply {} by {}.", "{} * {}"),
            ),
            ("Subtract b from a.", ("subtract", "minus"), ("What is {} minus {}?", "{} - {}")),
            ("Divide a by b.", ("divide", "ratio"), ("Divide {} by {}.", "What is {} divided by {}?")),
        )
    )
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    make = integer if rng.random() < 0.6 else number
    return Function(rng.choice(stem), rng.choice((kind, "")), (make(first), make(second)), wordings)


def _search(rng: Random) -> Function:
    name = rng.choice(("search", "web_search", "search_web", "google", "lookup", "search_documents"))
    wordings = ("Search for {}.", "Find information about {}.", "Look up {}.", "Search the web for {}", "What is {}?")
    return Function(
        name,
        rng.choice(("Search the web.", "Search for something.", "")),
        (text(rng.choice(("query", "q", "text", "question")), phrase),),
        wordings,
    )


def _time(rng: Random) -> Function:
    name = rng.choice(("get_time", "current_time", "get_current_time", "time_in"))
    return Function(
        name,
        rng.choice(("Get the time of a city.", "Current time of a place.", "")),
        (_city(rng),),
        ("What time is it in {}?", "What is the time in {}?", "Time in {}?"),
    )


def _message(rng: Random) -> Function:
    name = rng.choice(("send_email", "send_message", "send_mail", "notify", "send_text"))
    body = rng.choice(("text", "body", "message", "content"))
    return Function(
        name,
        rng.choice(("Send a message to somebody.", "Send an email.", "")),
        (text(rng.choice(("to", "recipient", "user", "name"))), text(body, phrase)),
        ("Send {} the message: {}", "Write to {}: {}", "Tell {} this: {}", "Send an email to {} saying {}"),
    )


def _timer(rng: Random) -> Function:
    name, unit = rng.choice(("set_timer", "start_timer", "timer", "set_alarm")), rng.choice(("minutes", "seconds"))
    return Function(
        name,
        rng.choice(("Set a timer.", "")),
        (integer(unit),),
        (f"Set a timer for {{}} {unit}.", f"Start a timer of {{}} {unit}.", f"Wake me in {{}} {unit}."),
    )


def _flight(rng: Random) -> Function:
    name = rng.choice(("book_flight", "search_flights", "find_flight", "find_train", "book_train"))
    start, end = rng.choice((("origin", "destination"), ("from_city", "to_city"), ("start", "end"), ("from", "to")))
    kind = "train" if "train" in name else "flight"
    return Function(
        name,
        rng.choice((f"Find a {kind}.", f"Book a {kind} between two cities.", "")),
        (text(start, place), text(end, place)),
        (
            f"Book a {kind} from {{}} to {{}}.",
            f"I need a {kind} from {{}} to {{}}.",
            f"Find a {kind} from {{}} to {{}}.",
        ),
    )


def _translate(rng: Random) -> Function:
    return Function(
        rng.choice(("translate", "translate_text")),
        rng.choice(("Translate a text.", "")),
        (
            text("text", phrase),
            text(rng.choice(("language", "target", "target_language")), lambda draw: draw.choice(LANGUAGES)),
        ),
        ("Translate {} to {}.", "Translate {} into {}.", "How do you say {} in {}?"),
    )


def _convert(rng: Random) -> Function:
    def pick(draw: Random) -> str:
        return draw.choice(CURRENCIES)

    return Function(
        rng.choice(("convert", "convert_currency", "exchange")),
        rng.choice(("Convert money.", "")),
        (number("amount"), text(rng.choice(("source", "from_currency")), pick), text("target", pick)),
        ("Convert {} {} to {}.", "How much is {} {} in {}?"),
    )


def _light(rng: Random) -> Function:
    state = Parameter("on", {"type": "boolean"}, lambda draw: draw.random() < 0.5)
    room = text("room", lambda draw: draw.choice(ROOMS))
    return Function(
        rng.choice(("set_light", "switch_light", "light")),
        rng.choice(("Switch a light.", "")),
        (room, state),
        ("Light in the {}: {}", "Should the light of the {} be on? {}"),
    )


def _record(rng: Random) -> Function:
    thing = rng.choice(THINGS)
    name = rng.choice(("get", "read", "fetch", "load", "show")) + f"_{thing}"
    key = Parameter(f"{thing}_id", {"type": "string"}, code) if rng.random() < 0.5 else integer(f"{thing}_id")
    return Function(
        name,
        rng.choice((f"Get a {thing}.", f"Read one {thing} by its id.", "")),
        (key,),
        (f"Show me {thing} {{}}.", f"Get the {thing} with id {{}}.", f"What is in {thing} {{}}?"),
    )


DOMAINS: tuple[Callable[[Random], Function], ...] = (
    _weather,
    _arithmetic,
    _search,
    _time,
    _message,
    _timer,
    _flight,
    _translate,
    _convert,
    _light,
    _record,
)


def made_up(rng: Random) -> Function:
    """A function with a drawn name and one to three drawn parameters."""
    action = rng.choice(ACTIONS) if rng.random() < 0.6 else word(rng)
    thing = rng.choice(THINGS) if rng.random() < 0.6 else word(rng)
    name = rng.choice((f"{action}_{thing}", f"{action}{thing.capitalize()}", action, f"{thing}_{action}"))
    drawn = [field if rng.random() < 0.8 else word(rng) for field in rng.sample(FIELDS, rng.randint(1, 3))]
    parameters = tuple(draw_parameter(rng, field) for field in dict.fromkeys(drawn))
    with_values = rng.choice((", ", " and ")).join(f"{parameter.name} {{}}" for parameter in parameters)
    wordings = (
        f"{action.capitalize()} the {thing} with {with_values}.",
        f"Call {name} with {with_values}.",
        f"Please {action} a {thing}, {with_values}.",
        f"{name}: {with_values}",
    )
    return Function(name, rng.choice((f"{action.capitalize()} a {thing}.", phrase(rng), "")), parameters, wordings)


def draw_parameter(rng: Random, name: str) -> Parameter:
    """A parameter of that name and any type."""
    options = list(dict.fromkeys(word(rng) for _ in range(3)))
    flag = Parameter(name, {"type": "boolean"}, lambda draw: draw.random() < 0.5)
    return rng.choice(
        (integer(name), number(name), text(name), text(name, code), text(name, phrase), flag, one_of(name, options))
    )


def draw_function(rng: Random) -> Function:
    """A function of a domain, or a made-up one."""
    domain = rng.choice(DOMAINS)
    if rng.random() < 0.55:
        return domain(rng)._replace(purpose=domain.__name__)
    function = made_up(rng)
    return function._replace(purpose=function.name)
