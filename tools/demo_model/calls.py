"""Conversations in which tools are offered: a call, its result, the answer from the result; also questions that need no call.

A tool is shown as the chat template in `tokenizer.py` shows it, and a call is written as there: `export.py` checks both.
A clock, a calculator, a look-up and the weather come with many names and descriptions; made-up tools, with random names and
parameters, teach to copy both from the description. Most requests of the training text come from the grammars of `phrasings.py`.
Values under `HELD` and the phrasings in `..._TEST` are kept from the training text, also inside longer sentences: `kept_phrasing`
refuses them while it is made, and `python calls.py --check` counts what came through.
"""

import json
import random
import re
from dataclasses import dataclass, field

import phrasings
from facts import CLOSE, OPEN, mark
from generate import SYSTEMS, Conversation
from phrasings import expand, sentence, strange
from tasks import OUT_ANSWER, WORDS, casual
from words import (ANIMALS, CITIES, COLOURS, COUNTRIES, CREATURES, DAYS, FOODS, JOBS, NAMES_F, NAMES_M, OBJECTS, OUTSIDE, RELATIVES, SURNAMES, a, cap, code, invented)

FAMILIES = ["clock", "calculator", "look_up", "weather", "made_up"]

HELD = {
    "city": """Reykjavik|Samarkand|Buenos Aires|Kuala Lumpur|Quito|Ankara|Bogota|Stockholm|Lagos|Manila|Auckland|Honolulu|Tbilisi|Zagreb|Bergen|Antwerp|Cape Town
|Rio de Janeiro|Salt Lake City|Ulm|Porto|Krakow|Marrakesh|Jakarta|Perth|Calgary|Memphis|Osaka|Leipzig|Valencia|Baghdad|Kabul|Tunis|Riga""".replace("\n", "").split("|"),
    "person": "Zbigniew Priscilla Ludmila Tanaka Rodriguez Gertrude Ingrid Pedro Xenia Bartholomew Svetlana Kowalski Aisha Giovanni Chloe Dmitri Ursula Fergus".split(),
    "thing": "stapler teapot bicycle backpack tractor microphone blender keyboard hammock canoe thermos calculator wheelbarrow tripod skateboard".split(),
    "topic": """Mount Everest|the Great Wall|jellyfish|Marie Curie|the Amazon river|sourdough|Nikola Tesla|origami|the Bermuda triangle|saxophones|the northern lights|Mozart
|bitcoin|the Eiffel tower|glaciers|Napoleon|kombucha|the Titanic|vaccines|Saturn|samurai|Cleopatra|tulips|the Suez canal|haiku""".replace("\n", "").split("|"),
}
TOWNS = ["New York", "San Marino", "Los Angeles", "Hong Kong", "Tel Aviv", "San Francisco", "Saint Louis", "El Paso", "Addis Ababa", "Santa Cruz", "Mexico City", "Las Vegas"]
TOPICS = """cheese|the moon|the Eiffel family|bridges|Albert Einstein|the sun|the Nile|Mount Fuji|the Black Sea|tea|trains|castles|the Rhine|Isaac Newton|gold|coffee|the pyramids|robots|whales
|Queen Victoria|the Alps|honey|iron|Leonardo da Vinci|Mars|the piano|chess|the steam engine|the wheel|rainbows|Lake Geneva|the North Pole|paper|salt|silk""".replace("\n", "").split("|")


# `wide`: also values of more kinds. Held-out questions that need no tool are drawn without, as they always were.


def place(rng, test, wide=True):
    if test:
        return rng.choice(HELD["city"])
    if wide and rng.random() < 0.55:
        if rng.random() < 0.45:
            return rng.choice(phrasings.PLACES)
        return " ".join(cap(strange(rng) if rng.random() < 0.8 else rng.choice(WORDS)) for _ in range(rng.choice((1, 1, 1, 1, 2, 3))))
    r = rng.random()
    if r < 0.4:
        return rng.choice(CITIES)
    if r < 0.5:
        return rng.choice(COUNTRIES)
    if r < 0.6:
        return rng.choice(TOWNS)
    words = [cap(invented(rng)) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    if len(words) > 1 and rng.random() < 0.4:
        words.insert(1, rng.choice("la del am of upon sur le da di dos".split()))
    return " ".join(words)


def person(rng, test, wide=True):
    if test:
        return rng.choice(HELD["person"])
    if wide and rng.random() < 0.5:
        return rng.choice(phrasings.PEOPLE) if rng.random() < 0.5 else cap(strange(rng))
    r = rng.random()
    n = rng.choice(NAMES_F + NAMES_M) if r < 0.5 else cap(invented(rng))
    return f"{n} {rng.choice(SURNAMES)}" if rng.random() < 0.15 else n


def thing(rng, test):
    if test:
        return rng.choice(HELD["thing"])
    if rng.random() < 0.5:
        return rng.choice(phrasings.THINGS) if rng.random() < 0.6 else strange(rng)
    r = rng.random()
    return rng.choice(OBJECTS) if r < 0.5 else f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}" if r < 0.65 else invented(rng)


def topic(rng, test, wide=True):
    if test:
        return rng.choice(HELD["topic"])
    if wide and rng.random() < 0.4:
        return rng.choice(phrasings.SUBJECTS) if rng.random() < 0.5 else ("the " if rng.random() < 0.4 else "") + " ".join(strange(rng) if rng.random() < 0.6 else rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2))))
    r = rng.random()
    if r < 0.3:
        return rng.choice(TOPICS + OUTSIDE)
    if r < 0.45:
        return rng.choice(ANIMALS + FOODS + CREATURES + JOBS) + rng.choice(["", "s"])
    if r < 0.65:
        return person(rng, test, wide)
    if r < 0.8:
        return place(rng, test, wide)
    return ("the " if rng.random() < 0.3 else "") + " ".join(invented(rng) for _ in range(rng.choice((1, 1, 2))))


@dataclass
class Tool:
    name: str
    about: str
    parameters: dict  # name -> schema
    optional: list = field(default_factory=list)

    def json(self):
        """As OpenAI's API takes it."""
        schema = {"type": "object", "properties": self.parameters, "required": [p for p in self.parameters if p not in self.optional]}
        return {"type": "function", "function": {"name": self.name, "description": self.about, "parameters": schema}}


@dataclass
class Request:
    """What a user asks, the call that it needs, what a tool says then and what the answer is. `answer`: with its value marked."""

    tool: Tool
    ask: str
    arguments: dict
    result: str
    answer: str
    value: str = ""  # what a right answer must contain
    exact: bool = True  # a reply without a call has to be `answer`
    said: tuple = ()  # the parts of `ask` that are values, or that stand for a made-up tool
    does: str = ""  # verb and noun, or the property, of a made-up tool


def shown(tools):
    """What the chat template makes of tools."""

    def kind(schema):
        return "|".join(json.dumps(v) for v in schema["enum"]) if "enum" in schema else schema["type"]

    lines = ["Tools:"]
    for t in tools:
        types = ", ".join(f"{json.dumps(p)}: {kind(s)}{'?' if p in t.optional else ''}" for p, s in t.parameters.items())
        about = t.about.strip().split("\n")[0].split(". ")[0]
        lines.append(f'{about + " " if about else ""}{{"name": {json.dumps(t.name)}, "arguments": {{{types}}}}}')
    return "\n".join(lines)


def call(name, arguments, marks=True):
    """The text of a call; the name and the values are what counts."""
    m = mark if marks else str
    inner = ", ".join(f"{json.dumps(k)}: {m(json.dumps(v, ensure_ascii=False))}" for k, v in arguments.items())
    return f'<tool_call>\n{{"name": "{m(name)}", "arguments": {{{inner}}}}}\n</tool_call>'


def with_tools(messages, tools):
    """The messages with the tools in front, as the chat template puts them."""
    lead = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    return [{"role": "system", "content": lead + shown(tools)}, *messages[1 if lead else 0 :]]


def describe(rng, texts):
    """One of the descriptions, as people write them; sometimes none."""
    text = rng.choice(texts)
    r = rng.random()
    if r < 0.08:
        return ""
    if r < 0.4:
        text += "."
    if r > 0.93:
        text = text[0].lower() + text[1:]
    if r > 0.85 and text.split()[0] in ("Get", "Tell", "Find", "Look", "Compute", "Calculate", "Return", "Search", "Show", "Give"):
        first, rest = text.split(" ", 1)
        text = f"{first}{'es' if first.endswith('h') else 's'} {rest}"
    return text


MORE_KEYS = """place_name city_name the_city name where_to area region spot input value arg argument param data target point village state province district x p s str query_text item entry field what which label tag loc geo position destination_name
for_city in_city of at_place search_text request prompt line word words content statement task problem details info object""".split()


def key_of(rng, keys, test):
    """The name of a parameter."""
    key, r = rng.choice(keys), test or rng.random()
    return key if test or r < 0.55 else rng.choice(MORE_KEYS) if r < 0.8 else rng.choice(WORDS).lower() if r < 0.87 else invented(rng) if r < 0.95 else strange(rng)


def name_of(rng, names, rule, test):
    """The name of a tool, also in camel case and with hyphens."""
    if test or rng.random() < 0.4:
        return rng.choice(names)
    name = expand(rng, f"<{rule}>")
    r = rng.random()
    if r < 0.2:
        first, *rest = name.split("_")
        name = first + "".join(cap(w) for w in rest)
    elif r < 0.28:
        name = name.replace("_", "-")
    elif r < 0.36:
        name = "".join(cap(w) for w in name.split("_"))
    elif r < 0.42:
        name = f"{invented(rng)}_{name}"
    return name


def about_of(rng, texts, rule, test):
    return describe(rng, texts if test or rng.random() < 0.5 else [expand(rng, f"<{rule}>")])


CONTRACTED = [("what's", "what is"), ("whats", "what is"), ("how's", "how is"), ("hows", "how is"), ("i'd", "i would"), ("i'm", "i am")]


def frame(text, said, full=False):
    """A question's words with its values as one sign, lower case and without punctuation; `full`: with contractions written out."""
    text = text.lower()
    for value in sorted(said, key=len, reverse=True):
        text = text.replace(value.lower(), " \3 ")
    for short, long in CONTRACTED if full else []:
        text = re.sub(rf"\b{short}\b", long, text)
    return " ".join(re.findall(r"[\w\3]+", text.replace("'", "")))


def kept_phrasing(family, ask, said):
    """Whether a question holds one of the phrasings that are kept for tests."""
    short, full = f" {frame(ask, said)} ", f" {frame(ask, said, True)} "
    return any(f" {k} " in (full if k.count(" ") > 2 else short) for k in KEPT[family])


def asked(rng, family, base, rule, **slots):
    """A request in words: one of the list or of the grammar, none that is kept for tests."""
    while True:
        ask = rng.choice(base).format(**slots, r=rng.choice(RELATIVES)) if base and rng.random() < 0.2 else sentence(rng, rule, **slots, n=any_name(rng), r=rng.choice(RELATIVES))
        if not kept_phrasing(family, ask, [str(v) for v in slots.values()]):
            return ask


def any_name(rng):
    return rng.choice(NAMES_F + NAMES_M) if rng.random() < 0.5 else cap(invented(rng))


STRING, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}

# ---- a clock ----

CLOCK = ["get_time", "get_current_time", "current_time", "clock", "time", "get_clock", "time_in", "what_time", "world_clock", "now", "local_time", "getTime", "time_now", "read_clock"]
CLOCK_ABOUT = ["Get the current time", "Get the time in a city", "Tell the time", "Current time", "The time in a place", "Return the current time", "Current local time of a city", "A clock", "Get the current time in a given timezone", "Show what time it is", "Look at the clock"]
PLACE_KEYS = ["city", "place", "location", "timezone", "town", "where", "zone", "country"]
CLOCK_IN = ["What time is it in {c}?", "What time is it in {c} now?", "What is the time in {c}?", "Tell me the time in {c}.", "Time in {c}?", "time in {c}", "Do you know the time in {c}?", "How late is it in {c}?", "Current time in {c}",
    "Can you tell me what time it is in {c}?", "I need the time in {c}.", "Check the time in {c}.", "What is the current time in {c}?", "Give me the time in {c}", "Please tell me the current time in {c}.", "Get the time in {c}.", "It is night here. What time is it in {c}?",
    "What time do they have in {c}?", "My {r} lives in {c}. What time is it there?", "I have to call {c}. What time is it there?", "Is it late in {c}? Tell me the time.", "{c}: what time is it?", "Show me the clock in {c}.", "What does the clock say in {c}?", "Use the clock for {c}.", "In {c}, how late is it?", "Say what time it is in {c}.", "{c}, what time?", "Is it already morning in {c}? Give me the time.", "Tell me how late it is in {c} now.", "Time of day in {c} just now?", "At what time are we in {c}?", "The clock in {c} shows what?", "Find the time that {c} has now.", "I want the time for {c} here.", "My friends are in {c} today. What time do they have?", "Will you tell me the time of {c}?", "Let me know the time in {c} soon.", "Could you say what time it is in {c}?", "What hour is it in {c}?", "I would like to know the time in {c}.", "Could you find out how late it is in {c}?", "In {c}, what is the time today?", "Hm, what time would it be in {c} now?", "Please check how late it is over in {c}.", "We land in {c} soon, what time is it?", "Look up what time they have in {c}.", "Look for the time in {c}.", "{c}, time?", "{c} clock now", "The {c} time, now.", "Search the time of {c}."]
CLOCK_IN_TEST = ["Could you check the clock in {c}?", "I'm phoning someone in {c}, what time is it over there?", "{c} time please", "What's the local time in {c} right now?", "In {c}, what time is it at the moment?", "hey what time is it in {c}", "Please look up the time for {c}.",
    "I wonder what time it is in {c}.", "Would you tell me how late it is in {c}?", "Quick question, what is the time in {c}?"]
CLOCK_HERE = ["What time is it?", "What time is it now?", "What is the time?", "Tell me the time.", "time?", "Do you know the time?", "How late is it?", "Current time", "Can you tell me what time it is?", "I need the time.", "Check the time.", "What is the current time?", "Give me the time", "what time is it", "Look at the clock.", "What does the clock say?", "Is it late? Tell me the time.", "Say what time it is.", "what's the time", "Please tell me the current time.", "Is it already morning? Give me the time.", "Tell me how late it is now.", "Time of day just now?", "The clock shows what?", "Will you tell me the time?", "Let me know the time.", "Time, now.", "The time, quickly.", "Clock?"]
CLOCK_HERE_TEST = ["Could you check the clock?", "Time please", "What's the local time right now?", "what time is it at the moment", "I wonder what time it is.", "Would you tell me how late it is?", "Quick question, what is the time?", "Have you got the time?"]




def clock(rng, test=False):
    here, key = rng.random() < 0.3, key_of(rng, PLACE_KEYS, test)
    optional = [key] if rng.random() < 0.25 else []
    parameters = {} if here and rng.random() < 0.7 else {key: STRING}
    tool = Tool(name_of(rng, CLOCK, "clock_name", test), about_of(rng, CLOCK_ABOUT, "clock_about", test), parameters, [key] if here and parameters else optional if parameters else [])
    c = place(rng, test)
    if test:
        ask = rng.choice(CLOCK_HERE_TEST if here else CLOCK_IN_TEST).format(c=c, r=rng.choice(RELATIVES))
    else:
        ask = asked(rng, "clock", CLOCK_HERE if here else CLOCK_IN, "clock_here" if here else "clock_in", c=c)
    t = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}" if rng.random() < 0.7 else f"{rng.randint(1, 12)}:{rng.randint(0, 59):02d} {rng.choice(['am', 'pm', 'AM', 'PM'])}"
    result = t if rng.random() < 0.5 else json.dumps({"time": t}) if here or rng.random() < 0.6 else json.dumps({parameters and key or "city": c, "time": t})
    answer = f"It is {mark(t)}." if here else f"It is {mark(t)} in {mark(c)}."
    if not here and not test and rng.random() < 0.1:
        ask += rng.choice([" Answer as JSON with city and time.", " Give me JSON with city and time.", " Write it as JSON with city and time."])
        answer = mark(json.dumps({"city": c, "time": t}, ensure_ascii=False))
    return Request(tool, ask, {} if here else {key: c}, result, answer, t, said=() if here else (c,))


# ---- a calculator ----

CALC = ["calculator", "calculate", "calc", "evaluate", "compute", "math", "do_math", "eval", "arithmetic", "run_calculation", "evaluate_expression"]
CALC_ABOUT = ["Calculate an expression", "A calculator", "Compute the value of an expression", "Evaluate a math expression", "Do arithmetic", "Return the result of a calculation", "Compute sums and products", "Calculator for numbers", "Solve a calculation"]
CALC_KEYS = ["expression", "expr", "formula", "input", "calculation", "sum", "text", "e"]
CALC_ASK = ["What is {e}?", "What is {e}?", "Calculate {e}.", "Compute {e}", "How much is {e}?", "what's {e}", "{e} = ?", "{e}", "{e} =", "Please calculate {e}.", "Tell me what {e} is.", "Can you calculate {e}?", "Use the calculator: {e}", "I need the result of {e}.", "What does {e} make?", "Solve {e}", "calculate {e}", "What do I get for {e}?", "The value of {e}, please.", "Give me {e}.", "Tell me how much {e} gives.", "{e} makes what?", "If I compute {e}, what do I get?", "I have {e} here. What is it?", "The sum {e} comes to what?", "Is {e} a large number? Calculate it.", "Let me know what {e} is in the end.", "Will you compute {e} now?", "How large is {e} in total?", "Do the sum {e} with the calculator", "Take {e} and tell me the result.", "What number is {e} in the end?", "what is {e} the same as", "Is {e} more than ten? Calculate.", "{e} comes out as what", "Say how much {e} is worth", "If I have {e} what is that", "What would {e} give us?", "Could {e} be computed please", "My teacher wrote {e} on the board. What is it?", "so {e} leads to which number", "We need {e} for the shop.", "What do {e} come to altogether?", "Check {e} with the calculator please", "{e} as one number", "Is it true that {e} is large? Compute it."]
CALC_ASK_TEST = ["Could you work out {e}?", "Hey, how much would {e} be?", "I need to know {e}.", "Evaluate {e} for me.", "whats {e} equal to", "Quick: {e}?", "Find the result of {e}.", "What comes out of {e}?"]
TWO = {"add": ("+", ["Add {x} and {y}.", "What is {x} plus {y}?", "What is {x} + {y}?", "Add {x} to {y}", "Sum of {x} and {y}?"], ["Please add up {x} and {y}.", "How much are {x} and {y} together?"], "Add two numbers"),
    "subtract": ("-", ["What is {x} minus {y}?", "What is {x} - {y}?", "{x} minus {y}", "{x} - {y} = ?"], ["Please work out {x} minus {y}.", "How much is left of {x} - {y}?"], "Subtract two numbers"),
    "multiply": ("*", ["Multiply {x} and {y}.", "What is {x} times {y}?", "What is {x} * {y}?", "Multiply {x} by {y}", "Product of {x} and {y}?"], ["Please multiply {x} with {y}.", "How much is {x} times {y}?"], "Multiply two numbers"),
    "divide": ("/", ["Divide {x} by {y}.", "What is {x} divided by {y}?", "What is {x} / {y}?"], ["Please divide {x} by {y} for me.", "How much is {x} over {y}?"], "Divide two numbers")}
SPOKEN = {"+": ["plus"], "-": ["minus", "minus", "less"], "*": ["times", "times", "multiplied by", "x"], "/": ["divided by"]}
SIGNS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def kept(n):
    """One number of three digits and more in eleven is kept from the training text."""
    return n >= 100 and n % 11 == 3


def number(rng, test=False):
    """With `test`, a kept one, or a short one."""
    r = rng.random()
    if r < 0.1:
        return f"{rng.randint(0, 99)}.{rng.randint(1, 99)}"
    digits = rng.choice((2, 3, 3, 4, 5) if test else (1, 2, 2, 3, 3, 4, 5))
    n = rng.randint(10 ** (digits - 1), 10**digits - 1)
    while n >= 100 and kept(n) != test:
        n = rng.randint(10 ** (digits - 1), 10**digits - 1)
    return str(n)


def value_of(expression):
    try:
        v = eval(expression, {"__builtins__": {}})  # of digits and signs, made here
    except ZeroDivisionError:
        return "0"
    return f"{v:.4f}".rstrip("0").rstrip(".") if isinstance(v, float) else str(v)


def calculator(rng, test=False):
    if rng.random() < 0.2:
        return two_numbers(rng, test)
    n = rng.choice((2, 2, 2, 2, 3, 3))
    signs = [rng.choice("+-*+-*/") for _ in range(n - 1)]
    numbers = [number(rng, test) for _ in range(n)]
    while test and not any(x.isdigit() and kept(int(x)) for x in numbers):
        numbers[rng.randrange(n)] = number(rng, test)
    spoken = n == 2 and rng.random() < 0.35
    tight = not spoken and rng.random() < 0.2
    gap = "" if tight else " "
    parts, said = [numbers[0]], [numbers[0]]
    for s, x in zip(signs, numbers[1:]):
        parts += [s, x]
        said += [(SIGNS[s] if test else rng.choice(SPOKEN[s])) if spoken else s, x]
    if n == 3 and not tight and rng.random() < 0.35:
        i, j = rng.choice(((0, 3), (2, 5)))
        for p in (parts, said):
            p[i], p[j - 1] = "(" + p[i], p[j - 1] + ")"
    e, text = gap.join(parts), (" " if spoken else gap).join(said)
    tool = Tool(name_of(rng, CALC, "calc_name", test), about_of(rng, CALC_ABOUT, "calc_about", test), {key_of(rng, CALC_KEYS, test): STRING})
    v = value_of(e)
    result = v if rng.random() < 0.6 else json.dumps({"result": float(v) if "." in v else int(v)})
    ask = rng.choice(CALC_ASK_TEST).format(e=text) if test else asked(rng, "calculator", CALC_ASK, "calc_ask", e=text)
    return Request(tool, ask, {next(iter(tool.parameters)): e}, result, f"{e} = {mark(v)}", v, said=(text,))


def two_numbers(rng, test=False):
    name = rng.choice(list(TWO))
    sign, asks, asks_test, about = TWO[name]
    x, y = number(rng, test), number(rng, test)
    keys = rng.choice([("a", "b"), ("x", "y"), ("first", "second"), ("number1", "number2"), ("left", "right"), ("n", "m")])
    if not test and rng.random() < 0.4:
        keys = rng.choice([("num_a", "num_b"), ("arg1", "arg2"), ("p", "q"), ("one", "two"), ("value", "by"), ("lhs", "rhs"), ("u", "v"), ("from", "with"), ("base", "other"), ("i", "j"), (invented(rng), strange(rng))])
    tool = Tool(name + rng.choice(["", "", "_numbers", "_two_numbers"] if test or rng.random() < 0.6 else ["_values", "_ints", "_tool", "Numbers", "_them", "_a_b", "_floats", "Two", "_pair"]), describe(rng, [about]), dict.fromkeys(keys, rng.choice([NUMBER, INTEGER])))
    v = value_of(f"{x} {sign} {y}")
    plain = lambda n: float(n) if "." in n else int(n)
    ask = rng.choice(asks_test).format(x=x, y=y) if test else asked(rng, "calculator", asks, name, x=x, y=y)
    return Request(tool, ask, {keys[0]: plain(x), keys[1]: plain(y)}, v if rng.random() < 0.6 else json.dumps({"result": plain(v)}), f"{x} {sign} {y} = {mark(v)}", v, said=(x, y))


# ---- a look-up ----

LOOK = ["lookup", "look_up", "search", "wikipedia", "encyclopedia", "find", "search_web", "web_search", "query", "ask", "knowledge_base", "get_article", "find_facts", "research"]
LOOK_ABOUT = ["Look something up", "Look up a topic", "Search for a topic", "Search the web", "Find facts about a topic", "Search an encyclopedia", "Find out about something", "Get an article", "Returns what is known about a topic", "Search the knowledge base"]
LOOK_KEYS = ["query", "topic", "q", "term", "subject", "text", "keyword", "title", "question"]
LOOK_ASK = ["Look up {t}.", "Look up {t}", "Search for {t}.", "search {t}", "What is known about {t}?", "Tell me about {t}.", "What do you know about {t}?", "Find out about {t}.", "Look for {t}", "Find something about {t}.", "I want to know about {t}.", "Can you look up {t}?", "Please look up {t} for me.", "Explain {t}.", "What does the encyclopedia say about {t}?", "Give me facts about {t}.", "Who or what is {t}?", "I need information about {t}.", "Search the web for {t}", "Can you search for {t}?", "What can you find about {t}?", "Read about {t} and tell me.", "Teach me about {t} today.", "Do you have facts about {t} for my homework?", "Let me know what {t} is.", "Look for {t} in the encyclopedia.", "I have to write about {t}. Search for it.", "Say something about {t}.", "Will you look up {t} now?", "About {t}: what do you find?", "My teacher asked about {t}. Look it up.", "Help me to understand {t}.", "Have a look for {t}", "Learn about {t} and tell me.", "Show me something on {t}.", "I'd love to read about {t}.", "I would be glad to hear about {t}.", "I want to find out about {t}.", "I need to know more about {t}.", "I am interested in {t}.", "Could you tell us what {t} is?", "Do you know anything about {t}?", "Any news on {t}?", "Information on {t} please", "I heard of {t}. What is it?", "What should one know about {t}?", "Could you read up on {t}?", "What is there to say about {t}?", "Please find out more on {t} for us.", "Which facts are there on {t}?"]
LOOK_ASK_TEST = ["Could you find some facts about {t}?", "I would like to learn about {t}.", "Please search for {t} for me", "What can you tell me about {t}?", "Get me some information on {t}.", "hey, look up {t}", "Do a search for {t}.", "I'm curious about {t}."]
OF_ASK = ["What is the {t}?", "what is the {t}", "Look up the {t}.", "Find the {t}.", "Tell me the {t}.", "Do you know the {t}?", "Search for the {t}.", "I want to know the {t}."]
OF_ASK_TEST = ["Could you find the {t}?", "What's the {t}?", "hey, look up the {t}"]
OF = "capital population president history currency language area flag king mayor height age weight length colour price owner".split()




def look_up(rng, test=False):
    tool = Tool(name_of(rng, LOOK, "look_name", test), about_of(rng, LOOK_ABOUT, "look_about", test), {key_of(rng, LOOK_KEYS, test): STRING})
    if rng.random() < 0.25:
        p, c = rng.choice(OF), place(rng, test)
        if not test and rng.random() < 0.5:
            p = rng.choice(phrasings.MORE_PROPERTIES) if rng.random() < 0.7 else invented(rng)
        t = f"{p} of {c}"
        v = str(rng.randint(100, 9999999)) if p in ("population", "area", "height", "age", "weight", "length", "price") else cap(invented(rng))
        ask = rng.choice(OF_ASK_TEST).format(t=t) if test else asked(rng, "look_up", OF_ASK, "of_ask", t=t)
        result = v if rng.random() < 0.5 else f"The {t} is {v}."
        return Request(tool, ask, {next(iter(tool.parameters)): t}, result, f"The {t} is {mark(v)}.", v, said=(t,))
    t = topic(rng, test)
    subject = cap(t)
    facts = [f"{subject} is {a(rng.choice(['big', 'small', 'famous', 'old', 'new', 'strange']) + ' ' + rng.choice(['town', 'animal', 'river', 'word', 'song', 'plant', 'book', 'machine', 'idea', 'person', 'game']))} in {rng.choice(COUNTRIES)}.",
        f"{subject} was found in {rng.randint(1200, 2020)}.", f"{subject} is known for its {rng.choice(FOODS)}.", f"{subject} has {rng.randint(2, 900)} {rng.choice(OBJECTS)}s.", f"{subject} comes from {cap(invented(rng))}.", f"Many people like {t}.", f"{subject} costs {rng.randint(2, 900)} coins."]
    text = " ".join(rng.sample(facts, rng.choice((1, 1, 2))))
    result = text if rng.random() < 0.75 else json.dumps({rng.choice(["result", "text", "summary", "answer"]): text}, ensure_ascii=False)
    ask = rng.choice(LOOK_ASK_TEST).format(t=t) if test else asked(rng, "look_up", LOOK_ASK, "look_ask", t=t)
    return Request(tool, ask, {next(iter(tool.parameters)): t}, result, mark(text), text, said=(t,))


# ---- the weather ----

WEATHER = ["get_weather", "weather", "get_current_weather", "weather_in", "forecast", "current_weather", "getWeather", "check_weather", "weather_report"]
WEATHER_ABOUT = ["Get the weather", "Current weather", "Get the current weather in a city", "The weather in a place", "Tell the weather", "Weather of a city", "Return the weather for a location", "Weather report", "Get the current weather in a given location"]
WEATHER_ASK = ["What is the weather in {c}?", "What is the weather like in {c}?", "How is the weather in {c}?", "weather in {c}", "Tell me the weather in {c}.", "Is it raining in {c}?", "Is it warm in {c}?", "Check the weather in {c}.", "What's the weather in {c}", "Weather for {c}, please.", "How warm is it in {c}?", "I am going to {c}. How is the weather there?", "Do I need an umbrella in {c}?", "Get the weather in {c}.", "Is it cold in {c} today?", "current weather {c}", "How is it in {c}, sunny or rainy?", "I will visit {c} tomorrow. Will it rain?", "Is {c} warm today?", "Tell me if it is cold in {c} now.", "{c}, how is the weather?", "Weather of {c} today", "Show me the weather for {c} here.", "Will it be windy in {c}?", "We fly to {c} on Monday. What is the weather there?", "Let me know how warm {c} is.", "Does it snow in {c} at the moment?", "In {c}, is the sky clear?", "My aunt lives in {c}. Does it rain there?", "Could you find out how the weather is in {c}?", "I would like to know the weather in {c}.", "Is it nice outside in {c}?", "We drive to {c} today, how is the weather?", "Does one need a jacket in {c}?", "Please tell me if it is dry in {c}.", "How hot is {c} at the moment?", "Any rain in {c}?"]
WEATHER_ASK_TEST = ["What's it like outside in {c} today?", "I'm flying to {c}, what will the weather be?", "{c} weather please", "Could you check the weather for {c}?", "Is it sunny in {c} right now?", "Should I take a coat to {c}? Check the weather.", "hey how's the weather in {c}"]
SKY = "sunny rainy cloudy windy snowy foggy clear stormy dry wet".split()


UNITS = [("celsius", "fahrenheit")] * 4 + [("metric", "imperial"), ("celsius", "kelvin"), ("fahrenheit", "celsius"), ("C", "F"), ("celsius", "fahrenheit", "kelvin")]


def weather(rng, test=False):
    key, c = key_of(rng, PLACE_KEYS[:5], test), place(rng, test)
    parameters, arguments, optional = {key: STRING}, {key: c}, []
    ask = rng.choice(WEATHER_ASK_TEST).format(c=c) if test else asked(rng, "weather", WEATHER_ASK, "weather_ask", c=c)
    said = [c]
    if not test and rng.random() < 0.45:
        unit, units = rng.choice(["unit", "unit", "units", "units", "scale", "temperature_unit", "degrees", "system", "format", "u"]), rng.choice(UNITS)
        if unit != key:
            parameters[unit] = {"type": "string", "enum": list(units)} if rng.random() < 0.75 else STRING
            optional = [unit]
            if rng.random() < 0.55:
                u = rng.choice(units)
                arguments[unit] = u
                said.append(u)
                end = expand(rng, "<unit>").format(u=u)
                ask = ask.rstrip(".?!") + ("" if end[0] in ".,?" else " ") + end
    if test and rng.random() < 0.3:
        parameters["unit" if rng.random() < 0.7 else "units"] = {"type": "string", "enum": ["celsius", "fahrenheit"]} if rng.random() < 0.8 else STRING
        unit = list(parameters)[1]
        optional = [unit]
        if rng.random() < 0.35:
            u = rng.choice(["celsius", "fahrenheit"])
            ask += f" In {u}{rng.choice(['.', '', ', please.'])}" if ask[-1] in ".?" else f" in {u}"
            arguments[unit] = u
    tool = Tool(name_of(rng, WEATHER, "weather_name", test), about_of(rng, WEATHER_ABOUT, "weather_about", test), parameters, optional)
    sky, warm = rng.choice(SKY), rng.randint(-9, 39)
    r = rng.random()
    if r < 0.35:
        return Request(tool, ask, arguments, json.dumps({rng.choice(["temperature", "temp", "degrees"]): warm, rng.choice(["condition", "sky", "weather"]): sky}), f"It is {mark(sky)} and {mark(warm)} degrees in {mark(c)}.", sky, said=tuple(said))
    if r < 0.65:
        return Request(tool, ask, arguments, rng.choice([f"{sky}, {warm} degrees", f"{warm} degrees, {sky}", f"{sky} {warm}"]), f"It is {mark(sky)} and {mark(warm)} degrees in {mark(c)}.", sky, said=tuple(said))
    if r < 0.8:
        return Request(tool, ask, arguments, sky, f"It is {mark(sky)} in {mark(c)}.", sky, said=tuple(said))
    return Request(tool, ask, arguments, rng.choice([f"{warm} degrees", str(warm), json.dumps({"temperature": warm})]), f"It is {mark(warm)} degrees in {mark(c)}.", str(warm), said=tuple(said))


# ---- made-up tools ----

VERBS = "book send open close start stop order buy play find show create delete move print reserve cancel call check clean paint draw get fetch count translate convert update repair weigh measure read write save load copy build sell join test".split()
VERBS_TEST = "schedule rent download archive lock unlock deliver pause upload share".split()
NOUNS = "table room ticket taxi parcel letter alarm song car window door light lamp file list note order report meal seat house page photo film message email job task game device user box train flight bill".split()
NOUNS_TEST = "thermostat invoice drone meeting playlist shuttle locker printer account backup".split()
# kind of value -> (names of its parameter, names kept for tests, what stands before it in a question)
SLOTS = {
    "place": (["city", "place", "location", "town", "destination", "address", "where"], ["municipality", "site"], ["in {v}", "in {v}", "at {v}"]),
    "person": (["name", "person", "user", "who", "contact", "customer", "owner", "recipient"], ["client", "member"], ["for {v}", "for {v}", "with {v}", "by {v}"]),
    "day": (["day", "date", "when", "on"], ["weekday"], ["on {v}"]),
    "time": (["time", "at", "hour", "start_time"], ["begin"], ["at {v}"]),
    "code": (["code", "id", "number", "key", "ticket_id", "order_id", "reference"], ["serial"], ["with code {v}", "with the code {v}", "number {v}", "with id {v}"]),
    "count": (["count", "amount", "quantity", "times", "size", "people", "n"], ["total"], ["{v} times", "with {v} seats", "for {v} people", "of size {v}"]),
    "colour": (["color", "colour", "paint"], ["shade"], ["in the colour {v}", "in {v}"]),
    "text": (["text", "message", "content", "body", "title", "note", "subject"], ["caption"], ['saying "{v}"', 'with the text "{v}"', 'called "{v}"']),
}


SLOTS_WIDE = {
    "place": (SLOTS["place"][0] + "room venue station region target from_where to_where spot building".split(), [], SLOTS["place"][2] + ["from {v}", "to {v}", "near {v}", "over in {v}", "({v})"]),
    "person": (SLOTS["person"][0] + "guest friend sender author holder assignee patient student to_whom employee full_name".split(), [], SLOTS["person"][2] + ["to {v}", "from {v}", "of {v}", "on behalf of {v}", "together with {v}"]),
    "day": (SLOTS["day"][0] + "on_day day_of_week deadline_day starts".split(), [], ["on {v}", "on {v}", "by {v}", "next {v}", "this {v}", "for {v}", "until {v}"]),
    "time": (SLOTS["time"][0] + "clock_time at_time until from_time moment when_exactly".split(), [], ["at {v}", "at {v}", "by {v}", "before {v}", "from {v}", "until {v}", "at exactly {v}"]),
    "code": (SLOTS["code"][0] + "pin token ref tracking_number item_number no account_number".split(), [], SLOTS["code"][2] + ["({v})", "no. {v}", "code {v}", "id {v}", "using code {v}", "under {v}", "whose id is {v}", "with number {v}"]),
    "count": (SLOTS["count"][0] + "how_many number_of_people copies seats pieces limit units".split(), [], SLOTS["count"][2] + ["with {v} chairs", "for {v} guests", "of {v} pieces", "{v} times in all", "with {v} copies", "at size {v}", "in {v} parts"]),
    "colour": (SLOTS["colour"][0] + "tint paint_color hue tone".split(), [], SLOTS["colour"][2] + ["painted {v}", "in {v} colour", "coloured {v}", "with {v} paint"]),
    "text": (SLOTS["text"][0] + "words description comment label heading line remark".split(), [], SLOTS["text"][2] + ["that says \"{v}\"", "with the title \"{v}\"", "named \"{v}\"", "reading \"{v}\"", "with the words \"{v}\"", "titled \"{v}\"", "and write \"{v}\""]),
    "thing": (["item", "thing", "object", "product", "tool", "article", "what"], [], ["with the {v}", "for the {v}", "using the {v}", "near the {v}", "under the {v}"]),
    "email": (["email", "mail", "address", "to", "email_address"], [], ["to {v}", "for {v}", "with the address {v}"]),
    "minutes": (["minutes", "duration", "length", "minutes_long"], [], ["for {v} minutes", "lasting {v} minutes", "of {v} minutes"]),
    "price": (["price", "amount", "cost", "limit", "money"], [], ["for {v} coins", "at a price of {v}", "costing {v} coins", "worth {v}"]),
}
NUMERIC = ("count", "minutes", "price")


def slot_value(rng, kind, test):
    if kind == "thing":
        return thing(rng, test)
    if kind == "email":
        return f"{rng.choice(NAMES_F + NAMES_M).lower() if rng.random() < 0.5 else invented(rng)}@{invented(rng)}.{rng.choice(['com', 'org', 'net'])}"
    if kind == "minutes":
        return rng.randint(1, 120)
    if kind == "price":
        return rng.randint(1, 99) if rng.random() < 0.5 else round(rng.randint(100, 9999) / 100, 1)
    if kind == "place":
        return place(rng, test)
    if kind == "person":
        return person(rng, test)
    if kind == "day":
        return rng.choice(DAYS)
    if kind == "time":
        return f"{rng.randint(0, 23)}:{rng.choice(['00', '15', '30', '45'])}"
    if kind == "code":
        return code(rng)
    if kind == "count":
        return rng.randint(2, 99)
    if kind == "colour":
        return rng.choice(COLOURS)
    if not test and rng.random() < 0.4:
        text = " ".join(rng.choice(WORDS) if rng.random() < 0.5 else strange(rng) if rng.random() < 0.6 else rng.choice(NAMES_F + DAYS + "the a my to is on we for and with it not".split()) for _ in range(rng.randint(1, 6)))
        return cap(text) if rng.random() < 0.3 else text
    return " ".join(rng.choice(WORDS) if rng.random() < 0.6 else invented(rng) for _ in range(rng.choice((1, 2, 3, 4))))


def tool_name(rng, verb, noun):
    r = rng.random()
    if r < 0.55:
        return f"{verb}_{noun}"
    if r < 0.65:
        return verb + cap(noun)
    if r < 0.75:
        return f"{noun}_{verb}"
    if r < 0.82:
        return f"{verb}_{rng.choice(['new', 'my', 'the', 'one'])}_{noun}"
    if r < 0.9:
        return f"{invented(rng)}_{verb}"
    return invented(rng) + rng.choice(["", "_" + invented(rng), cap(invented(rng))])


DO_ASK = ["{V} {a}{s}.", "{V} {a}{s}.", "Please {v} {a}{s}.", "{v} {a}{s}", "Can you {v} {a}{s}?", "I want to {v} {a}{s}.", "Help me {v} {a}{s}.", "It is time to {v} {a}{s}.", "Will you {v} {a}{s}?", "We have to {v} {a}{s}.", "Go and {v} {a}{s}.", "Let us {v} {a}{s}.", "You should {v} {a}{s} now.", "I would be glad if you {v} {a}{s}.", "I would like you to {v} {a}{s}.", "I would love to {v} {a}{s}.", "I'd be happy to {v} {a}{s}.", "I have to {v} {a}{s}.", "My wish is to {v} {a}{s}.", "Could we {v} {a}{s}?", "Would it be possible to {v} {a}{s}?", "I'd love to {v} {a}{s}.", "May I {v} {a}{s}?", "{V} the {n}{s}.", "I need you to {v} {a}{s}.", "Please {v} the {n}{s}"]
DO_ASK_TEST = ["Could you {v} {a}{s}?", "I'd like to {v} {a}{s}.", "Would you please {v} {a}{s}?", "hey, {v} {a}{s}"]


def some_words(rng):
    """A few verbs and nouns: tools made of them share parts of their names."""
    verbs = [rng.choice(VERBS + phrasings.VERBS * 2) if rng.random() < 0.7 else rng.choice(("un", "re", "over", "out", "pre", "")) + (rng.choice(VERBS) if rng.random() < 0.5 else invented(rng)) for _ in range(3)]
    nouns = [rng.choice(NOUNS + phrasings.NOUNS * 2) if rng.random() < 0.7 else rng.choice((rng.choice(OBJECTS), invented(rng), strange(rng))) for _ in range(3)]
    verbs = [invented(rng) if v in VERBS_TEST else v for v in verbs]
    return verbs, nouns


def made_up(rng, test=False, words=None):
    if rng.random() < 0.3:
        return property_of(rng, test)
    if test:
        verb, noun = rng.choice(VERBS_TEST), rng.choice(NOUNS_TEST)
    else:
        verbs, nouns = words or some_words(rng)
        verb, noun = rng.choice(verbs), rng.choice(nouns)
    slots = SLOTS if test else SLOTS_WIDE
    kinds = rng.sample(list(slots), rng.choice((0, 1, 1, 1, 2, 2, 3)))  # in the order in which they are named
    if "place" in kinds and "colour" in kinds:
        kinds.remove("colour")
    parameters, arguments, said = {}, {}, []
    for kind in kinds:
        keys, keys_test, phrases = slots[kind]
        r = rng.random()
        key = rng.choice(keys_test) if test and r < 0.5 else rng.choice(keys)
        if len(kinds) == 1 and r > 0.85:
            key = invented(rng)
        elif not test and r < 0.25:
            key = rng.choice((invented(rng), strange(rng), rng.choice(WORDS), f"{noun}_{key}", rng.choice(MORE_KEYS)))
        if key in parameters:
            continue
        v = slot_value(rng, kind, test)
        parameters[key], arguments[key] = (INTEGER if rng.random() < 0.7 and isinstance(v, int) else NUMBER) if kind in NUMERIC else STRING, v
        said.append(rng.choice(phrases).format(v=v))
    optional = []
    if parameters and rng.random() < 0.2:  # one more, of which nobody speaks
        kind = rng.choice([k for k in slots if k not in kinds])
        key = rng.choice(slots[kind][0])
        if key not in parameters:
            parameters[key], optional = (INTEGER if kind in NUMERIC else STRING), [key]
    about = rng.choice(["{V} {a}", "{V} the {n}", "{V} {a}", "Use this to {v} {a}", "A tool to {v} {a}", "{V} {n}s"]).format(V=cap(verb), v=verb, a=a(noun), n=noun)
    tool = Tool(tool_name(rng, verb, noun), describe(rng, [about]) or about, parameters, optional)
    details = "".join(" " + x for x in said)
    if test:
        ask = rng.choice(DO_ASK_TEST).format(V=cap(verb), v=verb, a=a(noun), n=noun, s=details)
        said = ()
    else:
        what = a(noun) if rng.random() < 0.65 else f"{rng.choice(['the', 'the', 'my', 'our', 'this', 'one', 'that'])} {noun}"
        said = (f"{verb} {what}{details}",)
        ask = asked(rng, "made_up", [t.replace("{v} {a}{s}", "{d}").replace("{V} {a}{s}", "{d}") for t in DO_ASK if "{a}" in t], "do", d=said[0])
    r = rng.random()
    if r < 0.4:
        return Request(tool, ask, arguments, rng.choice(["ok", "done", "OK", "Done.", '{"status": "ok"}', '{"ok": true}', "success", '{"success": true}']), "Done.", "Done", said=said, does=f"{verb} {noun}")
    if r < 0.5:
        return Request(tool, ask, arguments, rng.choice(["error", "failed", '{"error": "failed"}', "error: not possible", '{"ok": false}', "not found", '{"error": "not found"}']), mark("I am sorry, that did not work."), "did not work", said=said, does=f"{verb} {noun}")
    v = code(rng) if rng.random() < 0.6 else rng.choice(WORDS)
    k = rng.choice(["result", "id", "number", "value", "code", "answer"])
    return Request(tool, ask, arguments, v if rng.random() < 0.5 else json.dumps({k: v}), f"Done. The result is {mark(v)}.", v, said=said, does=f"{verb} {noun}")


PROPERTIES = "price|weight|size|owner|status|phone number|email|address|stock|balance|score|age|birthday|rating|length|speed|distance|room|manager|salary".split("|")
PROPERTIES_TEST = "serial number|postal code|departure gate|deadline|battery level|voltage|diameter|nickname".split("|")


PROPERTY_ASK = ["What is the {p} of {x}?", "Tell me the {p} of {x}.", "the {p} of {x}?", "Find the {p} of {x}.", "Please get the {p} of {x}.", "Do you know the {p} of {x}?", "What {p} does {x} have?", "Check the {p} of {x}", "Show me the {p} of {x}.", "Let me know the {p} of {x}.", "I want the {p} of {x} now.", "Will you find the {p} of {x}?", "Which {p} has {x}?", "{x}: what {p}?", "For {x}, what is the {p}?", "Help me to find the {p} of {x}."]
PROPERTY_ASK_TEST = ["Could you find the {p} of {x}?", "I need to know the {p} of {x}.", "hey, what's the {p} of {x}"]


def property_of(rng, test=False):
    p = rng.choice(PROPERTIES_TEST if test else PROPERTIES + phrasings.MORE_PROPERTIES * 2) if test or rng.random() < 0.7 else rng.choice((invented(rng), strange(rng), f"{invented(rng)} {rng.choice(PROPERTIES)}"))
    kind = rng.choice(["thing", "person", "code", "place"])
    if kind == "thing":
        x, keys, said = thing(rng, test), ["item", "product", "thing", "article", "object", "name"], "the {x}"
    elif kind == "person":
        x, keys, said = person(rng, test), ["name", "person", "user", "employee", "customer", "who"], "{x}"
    elif kind == "code":
        x, keys, said = code(rng), ["id", "code", "order_id", "key", "number"], rng.choice(["order {x}", "number {x}", "{x}"])
    else:
        x, keys, said = place(rng, test), ["city", "place", "location", "shop", "station"], "{x}"
    key, slug = key_of(rng, keys, test), p.replace(" ", "_")
    name = rng.choice([f"get_{slug}", f"get_{slug}", slug, f"find_{slug}", f"{slug}_of", f"lookup_{slug}", f"get_{key}_{slug}", invented(rng)])
    about = rng.choice([f"Get the {p} of {a(key)}", f"Find the {p}", f"The {p} of {a(kind)}", f"Returns the {p}", f"Look up the {p} of {a(key)}"])
    said = said.format(x=x)
    ask = rng.choice(PROPERTY_ASK_TEST).format(p=p, x=said) if test else asked(rng, "made_up", PROPERTY_ASK, "property", p=p, x=said)
    v = code(rng) if rng.random() < 0.5 else str(rng.randint(1, 9999)) if rng.random() < 0.5 else rng.choice(WORDS)
    result = v if rng.random() < 0.5 else json.dumps({slug if rng.random() < 0.7 else "result": v})
    return Request(Tool(name, describe(rng, [about]) or about, {key: STRING}), ask, {key: x}, result, f"The {p} of {said} is {mark(v)}.", v, said=(p, said), does=p)


TEXTS = {"clock": CLOCK_IN_TEST + CLOCK_HERE_TEST, "calculator": CALC_ASK_TEST + [t for _, _, asks, _ in TWO.values() for t in asks], "look_up": LOOK_ASK_TEST + OF_ASK_TEST, "weather": WEATHER_ASK_TEST,
    "made_up": [t.replace("{v} {a}{s}", "{d}") for t in DO_ASK_TEST] + PROPERTY_ASK_TEST}
KEPT = {family: {(lambda f: frame(f, ["\3"], f.count(" ") > 2))(re.sub(r"\{\w\}", "\3", t)) for t in texts} for family, texts in TEXTS.items()}

MAKE = {"clock": clock, "calculator": calculator, "look_up": look_up, "weather": weather, "made_up": made_up}
# What is asked in vain where no tool of that family is offered.
VAIN = [(n, asks) for n, asks in (("clock", CLOCK_IN), ("weather", WEATHER_ASK), ("look_up", LOOK_ASK))]
VAIN_RULES = {"clock": "clock_in", "weather": "weather_ask", "look_up": "look_ask"}


def offer(rng, wanted, most, test=False):
    """Requests of the wanted families and of others beside them, no two tools with one name: (family, request)."""
    out, names = [], set()
    words = None if test or rng.random() < 0.5 else some_words(rng)
    families = list(wanted)
    for _ in range(rng.randint(0, most)):
        family = rng.choice(FAMILIES + ["made_up"] * 2)
        if family == "made_up" or family not in families:
            families.append(family)
    for family in families:
        for _ in range(20):
            request = made_up(rng, test, words) if family == "made_up" else MAKE[family](rng, test)
            if request.tool.name not in names and (test or not request.does or all(request.does != other.does for _, other in out)):
                break
        else:
            continue
        names.add(request.tool.name)
        out.append((family, request))
    return out


def same_tool(rng, family, tool, test=False):
    """Another request for a tool that is already there: its name, description and parameters stay."""
    if family == "made_up":
        return None
    for _ in range(30):
        r = MAKE[family](rng, test)
        if len(r.tool.parameters) != len(tool.parameters) or [list(s) for s in r.tool.parameters.values()] != [list(s) for s in tool.parameters.values()] or len(r.tool.optional) != len(tool.optional):
            continue
        if family == "calculator" and len(tool.parameters) == 2:
            return None
        renamed = dict(zip(r.tool.parameters, tool.parameters))
        r.arguments = {renamed[k]: v for k, v in r.arguments.items()}
        r.tool = tool
        return r
    return None


def idle(rng, c, offered, test=False):
    """A turn that needs none of the tools. Says whether only one answer is right."""
    families = {f for f, _ in offered}
    r = rng.random()
    if r < 0.27:
        able = [(f, asks) for f, asks in VAIN if f not in families and "look_up" not in families]
        if able:
            family, asks = rng.choice(able)
            text, v = rng.choice(asks), {"c": place(rng, False, not test), "t": topic(rng, False, not test)}
            ask = casual(rng, text.format(**v, r=rng.choice(RELATIVES)))
            if not test and (rng.random() < 0.7 or kept_phrasing(family, ask, v.values())):
                ask = asked(rng, family, asks, VAIN_RULES[family], **v)
            c.add("user", ask)
            c.add("assistant", OUT_ANSWER)
            return True
    if r < 0.4:
        c.tell(rng.choice((1, 1, 2, 3)))
        return False
    if r < 0.52 and c.facts:
        c.ask()
        return True
    if r < 0.58 and c.room(250):
        c.tell_story(by_user=False)
        return False
    else:
        names = ["copy", "copy", "sort", "list", "json", "json", "talk", "talk", "knowledge"]
        if "calculator" not in families:
            names += ["arithmetic", "word_problem"]
        if not families & {"look_up", "weather"}:
            names.append("outside")
        name = rng.choice(names)
        c.task(name)
        return name in ("sort", "knowledge", "arithmetic", "outside")


LEADS = ["Hello, ", "Hi! ", "Excuse me, ", "Good morning. ", "Sorry, ", "One thing: ", "Listen, ", "Well, ", "Dear model, ", "So ", "And then: ", "Thanks. ", "My {r} wants to know: ", "I am in a hurry. ", "Next: ", "By the way, ", "Something else, ", "Now then, ", "One short thing, ", "Number two, ", "Before I forget, ", "My dear friend, ", "A small request, ", "Maybe you know: ", "{n} asks: "]
TAILS = [" now", " today", " please", " right away", " for me", " for my {r}", " if you can", ", thanks", ", thank you", " again", " soon", " this time", ", okay", " my dear", " then", " at once", " when you can", ", will you", " as {n} said"]


def wrapped(rng, ask):
    """With words around it that mean nothing to the call."""
    r = rng.random()
    fill = lambda text: text.format(r=rng.choice(RELATIVES), n=rng.choice(NAMES_F + NAMES_M) if rng.random() < 0.5 else cap(invented(rng)))
    if r > 0.45:
        return casual(rng, ask) if r < 0.8 else ask
    if r > 0.25:
        lead = sentence(rng, "lead", n=any_name(rng)).rstrip(".?!") if rng.random() < 0.1 else expand(rng, "<lead>").replace("{n}", any_name(rng))
        return (cap(lead) if rng.random() < 0.7 else lead) + ("" if lead[-1].isspace() else " ") + (ask if rng.random() < 0.5 else ask[0].lower() + ask[1:])
    if r < 0.25 and ask[-1] not in "=":
        stop = ask[-1] if ask[-1] in ".?!" else ""
        ask = ask[: len(ask) - len(stop)] + fill(rng.choice(TAILS)) + stop
    if r > 0.15:
        ask = fill(rng.choice(LEADS)) + (ask if rng.random() < 0.5 else ask[0].lower() + ask[1:])
    return ask


def worded(rng, family, request):
    """The request with words around it, unless these make it one of the phrasings that are kept, or change a value."""
    for _ in range(5):
        ask = wrapped(rng, request.ask)
        if all(str(v) in ask for v in request.arguments.values() if str(v) in request.ask) and not kept_phrasing(family, ask, request.said):
            return ask
    return request.ask


def add_request(rng, c, family, request):
    ask = worded(rng, family, request)
    c.requests.append((family, ask, request.said))
    c.add("user", ask)
    c.add("assistant", call(request.tool.name, request.arguments))
    c.add("tool", request.result)
    c.add("assistant", request.answer)


def add_two(rng, c, family, one, other_family, other):
    """Two calls in one turn: the same of two places, or one request after another."""
    same = family == other_family in ("clock", "weather") and len(one.arguments) == 1 == len(other.arguments) and one.ask.count(one.said[0]) == 1 and not one.answer.startswith(OPEN + "{")
    ask = worded(rng, family, one)
    if same and other.said[0] != one.said[0] and not other.answer.startswith(OPEN + "{"):
        here, there = one.said[0], other.said[0]
        joined = rng.choice([f"{here} and {there}", f"{here} and {there}", f"both {here} and {there}", f"{here} and in {there}" if f"in {here}" in ask else f"{here} and {there}", f"{here} and also {there}", f"{here}, {there}", f"{here} & {there}"])
        ask = ask.replace(here, joined)
    else:
        second = worded(rng, other_family, other)
        ask = rng.choice([f"{ask.rstrip('.?!')}{rng.choice([' and ', ', and ', ' and also ', '; ', ', then ', ' and then '])}{second if second.startswith(other.said) else second[0].lower() + second[1:]}", f"{ask} {second}", f"{ask}\n{second}", f"{ask} And {second}", f"{ask} Also: {second}"])
        if not all(str(v) in ask for r in (one, other) for v in r.arguments.values() if str(v) in r.ask):
            ask = f"{one.ask} {other.ask}"
    c.requests += [(family, ask, one.said), (other_family, ask, other.said)]
    c.add("user", ask)
    c.add("assistant", call(one.tool.name, one.arguments) + "\n" + call(other.tool.name, other.arguments))
    c.add("tool", one.result)
    c.add("tool", other.result)
    c.add("assistant", f"{one.answer} {other.answer}")


def conversation(rng, budget, count=None):
    """A conversation of about `budget` tokens in which tools are offered."""
    c = Conversation(rng, budget, count)
    c.requests = []  # (family, what was asked, the values in it)
    most = 1 if budget < 300 else 3 if budget < 600 else 6
    wanted = [rng.choice(FAMILIES)] if rng.random() < 0.9 else []
    offered = offer(rng, wanted, most) or offer(rng, ["made_up"], most)
    rng.shuffle(offered)
    lead = rng.choice(SYSTEMS) + "\n\n" if rng.random() < 0.35 else ""
    c.add("system", lead + shown([r.tool for _, r in offered]))
    open_requests = offered[:]
    if rng.random() < 0.25:
        idle(rng, c, offered)
    while c.room(60):
        if rng.random() < 0.68:
            family, first = rng.choice(open_requests or offered)
            if (family, first) in open_requests:
                open_requests.remove((family, first))
                request = first
            else:
                request = same_tool(rng, family, first.tool)
            if request and rng.random() < 0.07 and c.room(160):
                second, other = rng.choice(offered)
                other = same_tool(rng, second, other.tool)
                if other and request.said and other.said:
                    add_two(rng, c, family, request, second, other)
                    continue
            if request:
                add_request(rng, c, family, request)
                continue
        idle(rng, c, offered)
    return c


# ---- held-out questions ----


def held_out(rng, family, count=None):
    """(tools, messages, request): the last message asks for a call of `request.tool`, or for none where `family` is `none`."""
    c = Conversation(rng, 10**6, count)
    wanted = [family] if family != "none" else [rng.choice(FAMILIES)]
    offered = offer(rng, wanted, 3, test=True)
    request = offered[0][1]
    rng.shuffle(offered)
    if rng.random() < 0.3:
        c.add("user", "Hello!")
        c.add("assistant", "Hello! How can I help you?")
    if family == "none":
        exact = idle(rng, c, offered, test=True)
        answer = c.messages.pop()[1].replace(OPEN, "").replace(CLOSE, "")
        request = Request(None, c.messages[-1][1], {}, "", answer, exact=exact)
    else:
        c.add("user", request.ask)
    messages = [{"role": r, "content": t.replace(OPEN, "").replace(CLOSE, "")} for r, t, _ in c.messages]
    return [r.tool for _, r in offered], messages, request


def held_out_two(rng):
    """(tools, messages, requests): the time or the weather of two places, which takes two calls of one tool."""
    while True:
        family = rng.choice(["clock", "weather"])
        offered = offer(rng, [family], 2, test=True)
        one = offered[0][1]
        other = same_tool(rng, family, one.tool, test=True)
        here = next(iter(one.arguments.values()), "")
        if other and len(one.arguments) == len(other.arguments) == 1 and one.arguments != other.arguments and one.ask.count(here) == 1:
            break
    there = next(iter(other.arguments.values()))
    joined = f"{here} and in {there}" if f"in {here}" in one.ask and rng.random() < 0.5 else f"{here} and {there}"
    rng.shuffle(offered)
    return [r.tool for _, r in offered], [{"role": "user", "content": one.ask.replace(here, joined)}], [one, other]


def check(rows):
    """What of the kept values and phrasings is in the training text: none should be."""
    found, asks, different = [], 0, set()
    values = re.compile(r"\b(" + "|".join(re.escape(v) for vs in HELD.values() for v in vs if v not in CALC) + r")\b", re.I)
    for i in range(rows):
        length = (256, 512, 1024)[i % 3]
        c = conversation(random.Random(f"train/calls/{length}/{i}"), length)
        for family, ask, said in c.requests:
            asks += 1
            different.add((family, frame(ask, said)))
            slot = "(" + "|".join(re.escape(s) for s in said) + ")"
            for text in TEXTS[family] if said else CLOCK_HERE_TEST:
                pattern = re.sub(r"\\{\w\\}", lambda _: slot, re.escape(text.rstrip(".?")))
                if re.search(rf"(^|\W){pattern}($|\W)", ask, re.I):
                    found.append(f"phrasing: {ask!r} has {text!r}")
        found += [f"value: {m[0]} in {text!r}" for role, text, _ in c.messages if role != "tool" for m in values.finditer(text.replace(OPEN, "").replace(CLOSE, ""))]
    print(*found[:20], f"{len(found)} kept values or phrasings in {asks} requests, which have {len(different)} different phrasings", sep="\n")
    return not found


if __name__ == "__main__":
    import sys

    if "--check" in sys.argv:
        sys.exit(not check(6000))
    for i in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        for role, text, _ in conversation(random.Random(f"show/{i}"), 512).messages:
            print(f"[{role}] {text.replace(OPEN, '').replace(CLOSE, '')}")
        print()
    for family in FAMILIES + ["none"]:
        tools, messages, request = held_out(random.Random(f"show/{family}"), family)
        print(shown(tools), messages, request.tool and call(request.tool.name, request.arguments, False), request.result, "=>", request.answer, "\n")
