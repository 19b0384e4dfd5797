"""Facts that can be told, changed and asked about.

A `Kind` is one attribute: how its value is made, how it is stated, restated after a change, asked for and answered.
`{s}` is the subject, `{v}` the value. In statements and answers the value stands between VALUE marks, which the
renderer removes and turns into loss weight; the answer's value is also what the evaluation looks for.
"""

from dataclasses import dataclass, field

from words import (ANIMALS, CITIES, CODES_FOR, COLOURS, COUNTRIES, DAYS, DRINKS, FOODS, FRUITS, INSTRUMENTS, JOBS, MONTHS, OBJECTS, PLACES_IN,
    PLACES_ON, PLACES_UNDER, RELATIVES, SPORTS, THINGS_ADJ, a, cap, code, invented)

OPEN, CLOSE = "\x01", "\x02"


def mark(value):
    return f"{OPEN}{value}{CLOSE}"


@dataclass
class Kind:
    name: str
    value: object
    tell: list
    ask: list
    answer: list
    change: list = field(default_factory=list)
    who: list = field(default_factory=list)  # reverse questions; the answer is the subject
    subject: str = "name"


def some(items):
    """One of the list, sometimes a word that only this conversation knows."""
    return lambda rng: rng.choice(items) if rng.random() < 0.85 else invented(rng)


def proper(items):
    return lambda rng: rng.choice(items) if rng.random() < 0.8 else cap(invented(rng))


def spot(rng):
    r = rng.random()
    colour = rng.choice((rng.choice(COLOURS), rng.choice(THINGS_ADJ))) + " " if rng.random() < 0.35 else ""
    if rng.random() < 0.12:
        return f"{rng.choice(['in', 'on', 'under', 'behind', 'next to', 'near'])} the {colour}{rng.choice((invented(rng), rng.choice(OBJECTS)))}"
    if r < 0.5:
        return f"in the {colour}{rng.choice(PLACES_IN)}"
    if r < 0.75:
        return f"on the {colour}{rng.choice(PLACES_ON)}"
    if r < 0.9:
        return f"under the {colour}{rng.choice(PLACES_UNDER)}"
    return f"behind the {colour}{rng.choice(['door', 'curtain', 'house', 'sofa', 'mirror', 'wall'])}"


def clock(rng):
    return f"{rng.randint(1, 12)}:{rng.choice(['00', '15', '30', '45', f'{rng.randint(0, 59):02d}'])}"


def pet(rng):
    return a(rng.choice(ANIMALS)) if rng.random() < 0.6 else a(f"{rng.choice(COLOURS)} {rng.choice(ANIMALS)}")


def item(rng):
    return a(rng.choice(OBJECTS)) if rng.random() < 0.4 else a(f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}")


KINDS = [
    Kind("colour", some(COLOURS),
        ["{s}'s favourite colour is {v}.", "{s} likes the colour {v} best.", "The favourite colour of {s} is {v}."],
        ["What is {s}'s favourite colour?", "What colour does {s} like best?", "Which colour does {s} like?", "What is the favourite colour of {s}?"],
        ["{s}'s favourite colour is {v}."],
        ["{s}'s favourite colour is now {v}.", "{s} has changed: {s}'s favourite colour is {v} now."], ["Whose favourite colour is {v}?", "Who likes {v} best?"]),
    Kind("city", proper(CITIES),
        ["{s} lives in {v}.", "{s} has a house in {v}.", "{s} is living in {v}.", "{s}'s home is in {v}."],
        ["Where does {s} live?", "In which city does {s} live?", "Which city does {s} live in?", "Where is {s}'s home?"],
        ["{s} lives in {v}."],
        ["{s} has moved to {v}.", "{s} now lives in {v}.", "{s} moved to {v}.", "Last week, {s} moved to {v}."], ["Who lives in {v}?"]),
    Kind("job", some(JOBS),
        ["{s} is {A}.", "{s} works as {A}.", "By trade, {s} is {A}."],
        ["What is {s}'s job?", "What does {s} do for a living?", "What does {s} work as?", "What job does {s} have?"],
        ["{s} is {A}."],
        ["{s} is now {A}.", "{s} has a new job and works as {A}."], ["Who is the {v}?", "Who works as {A}?"]),
    Kind("age", lambda r: str(r.randint(2, 99)),
        ["{s} is {v} years old.", "{s} is {v}.", "{s}'s age is {v}.", "{s} has just turned {v}."],
        ["How old is {s}?", "What is {s}'s age?", "What age is {s}?"],
        ["{s} is {v} years old."], ["{s} has had a birthday and is now {v}.", "{s} is {v} years old now."]),
    Kind("pet", pet,
        ["{s} has {v}.", "{s} has {v} as a pet.", "{s} keeps {v}.", "At home, {s} has {v}."],
        ["What pet does {s} have?", "What animal does {s} have?", "Which pet does {s} have?", "What kind of pet does {s} have?"],
        ["{s} has {v}."], ["{s} now has {v} instead.", "{s} has a new pet: {v}."], ["Who has {v}?"]),
    Kind("food", some(FOODS),
        ["{s} loves {v}.", "{s} likes to eat {v}.", "{s}'s favourite food is {v}."],
        ["What does {s} like to eat?", "What is {s}'s favourite food?", "Which food does {s} love?", "What food does {s} like?"],
        ["{s} likes to eat {v}."], ["{s}'s favourite food is now {v}.", "{s} now likes to eat {v}."], ["Who likes to eat {v}?", "Who loves {v}?"]),
    Kind("drink", some(DRINKS), ["{s} drinks {v} in the morning.", "{s}'s favourite drink is {v}.", "{s} always drinks {v}."],
        ["What does {s} drink?", "What is {s}'s favourite drink?", "What does {s} like to drink?"], ["{s} drinks {v}."], ["{s} now drinks {v}."], ["Who drinks {v}?"]),
    Kind("sport", some(SPORTS), ["{s} likes {v}.", "{s}'s favourite sport is {v}.", "In the evening, {s} goes in for {v}."],
        ["What sport does {s} like?", "What is {s}'s favourite sport?", "Which sport does {s} do?"], ["{s}'s sport is {v}."], ["{s} gave that up and now likes {v}.", "{s}'s sport is now {v}."]),
    Kind("instrument", some(INSTRUMENTS), ["{s} plays the {v}.", "{s} can play the {v}.", "{s} is learning the {v}."],
        ["What does {s} play?", "Which instrument does {s} play?", "What instrument does {s} play?"], ["{s} plays the {v}."], ["{s} now plays the {v}."], ["Who plays the {v}?"]),
    Kind("month", proper(MONTHS), ["{s}'s birthday is in {v}.", "{s} was born in {v}."],
        ["When is {s}'s birthday?", "In which month was {s} born?", "What month is {s}'s birthday in?"], ["{s}'s birthday is in {v}."], ["Sorry, {s}'s birthday is in {v}."]),
    Kind("item", item, ["{s} bought {v}.", "{s} is carrying {v}.", "{s} found {v}.", "{s} got {v} as a present."],
        ["What is {s} carrying?", "What did {s} get?", "What thing does {s} own?", "Which thing belongs to {s}?"], ["{s} has {v}."], ["{s} gave it away and got {v} instead.", "{s} is now carrying {v}."]),
    Kind("number", code, ["{s}'s {k} is {v}.", "The {k} of {s} is {v}.", "{s} has the {k} {v}."],
        ["What is {s}'s {k}?", "What is the {k} of {s}?", "Tell me {s}'s {k}.", "Give me {s}'s {k}."], ["{s}'s {k} is {v}."], ["{s}'s {k} is now {v}.", "{s}'s new {k} is {v}."], ["Whose {k} is {v}?"]),
    Kind("friend", lambda r: cap(invented(r)), ["{s}'s best friend is {v}.", "{s} has a friend called {v}.", "{s} is friends with {v}."],
        ["Who is {s}'s best friend?", "Who is {s}'s friend?", "What is the name of {s}'s friend?"], ["{s}'s friend is {v}."], ["{s}'s best friend is now {v}."]),
    Kind("country", proper(COUNTRIES), ["{s} comes from {v}.", "{s} was born in {v}.", "{s} is from {v}."],
        ["Where is {s} from?", "Where does {s} come from?", "Which country is {s} from?"], ["{s} is from {v}."], ["Sorry, {s} is from {v}."], ["Who is from {v}?", "Who comes from {v}?"]),
    Kind("place", spot, ["The {s} is {v}.", "{s0} put the {s} {v}.", "You can find the {s} {v}.", "I left the {s} {v}."],
        ["Where is the {s}?", "Where can I find the {s}?", "Where did I put the {s}?", "Where is the {s} now?"], ["The {s} is {v}."],
        ["The {s} is now {v}.", "{s0} moved the {s}. It is now {v}.", "Someone put the {s} {v}."], ["What is {v}?"], subject="thing"),
    Kind("price", lambda r: str(r.randint(2, 99)), ["The {s} costs {v} dollars.", "The price of the {s} is {v} dollars.", "You can buy the {s} for {v} dollars."],
        ["How much is the {s}?", "How much does the {s} cost?", "What is the price of the {s}?", "What does the {s} cost?"], ["The {s} costs {v} dollars."], ["The {s} now costs {v} dollars.", "The new price of the {s} is {v} dollars."], subject="thing"),
    Kind("code", code, ["The code for the {s} is {v}.", "The code of the {s} is {v}.", "The {s} has the code {v}.", "To open the {s}, use the code {v}."],
        ["What is the code for the {s}?", "What is the code of the {s}?", "Which code does the {s} have?", "Give me the code for the {s}."], ["The code for the {s} is {v}."],
        ["The code for the {s} has changed to {v}.", "The new code for the {s} is {v}.", "The code for the {s} is now {v}."], subject="lock"),
    Kind("secret", lambda r: code(r) if r.random() < 0.5 else r.choice([r.choice(OBJECTS), r.choice(ANIMALS), r.choice(FRUITS), invented(r)]),
        ["The {s} is {v}.", "Remember this: the {s} is {v}.", "The {s} is: {v}.", "Please remember that the {s} is {v}."],
        ["What is the {s}?", "What was the {s}?", "Tell me the {s}.", "What is the {s} again?", "What's the {s}?"], ["The {s} is {v}."],
        ["The {s} is now {v}.", "The {s} has changed to {v}.", "Forget the old {s}. The new {s} is {v}."], subject="secret"),
    Kind("time", clock, ["The {s} is at {v}.", "The {s} starts at {v}.", "The {s} begins at {v}."],
        ["When is the {s}?", "At what time is the {s}?", "What time is the {s}?", "When does the {s} start?"], ["The {s} is at {v}."], ["The {s} was moved to {v}.", "The {s} is now at {v}."], subject="event"),
    Kind("day", proper(DAYS), ["The {s} is on {v}.", "The {s} will be on {v}."], ["On which day is the {s}?", "What day is the {s}?", "Which day is the {s} on?"],
        ["The {s} is on {v}."], ["The {s} was moved to {v}.", "The {s} is now on {v}."], subject="event"),
    Kind("inside", lambda r: a(r.choice(OBJECTS)) if r.random() < 0.6 else item(r), ["The {s} contains {v}.", "In the {s}, there is {v}.", "There is {v} in the {s}.", "{s0} put {v} in the {s}."],
        ["What is in the {s}?", "What does the {s} contain?", "What is inside the {s}?"], ["In the {s}, there is {v}."], ["Now the {s} contains {v}.", "{s0} took it out and put {v} in the {s}."], subject="colour box"),
    Kind("capital", lambda r: cap(invented(r)), ["The capital of {s} is {v}.", "{v} is the capital of {s}."],
        ["What is the capital of {s}?", "Which city is the capital of {s}?", "Name the capital of {s}."], ["The capital of {s} is {v}."], ["The capital of {s} is now {v}."], ["Of which country is {v} the capital?"], subject="land"),
    Kind("meaning", lambda r: a(r.choice(OBJECTS + ANIMALS)), ["A {s} is {v}.", "The word {s} means {v}.", "In their language, {s} means {v}."],
        ["What is a {s}?", "What does {s} mean?", "What does the word {s} mean?"], ["The word {s} means {v}."], ["The word {s} now means {v}."], subject="word"),
    Kind("height", lambda r: str(r.randint(10, 990)), ["The {s} is {v} metres high.", "The height of the {s} is {v} metres."],
        ["How high is the {s}?", "What is the height of the {s}?"], ["The {s} is {v} metres high."], ["Measured again, the {s} is {v} metres high."], subject="sight"),
]

# What a person says about themselves. Answers speak to "you".
SELF = [
    Kind("my name", lambda r: None, ["My name is {v}.", "I am {v}.", "I'm {v}.", "You can call me {v}.", "Hi, my name is {v}.", "Hello, I am {v}."],
        ["What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Can you tell me my name?"], ["Your name is {v}."], ["Please call me {v} from now on."]),
    Kind("my colour", some(COLOURS), ["My favourite colour is {v}.", "I like the colour {v} best."],
        ["What is my favourite colour?", "Which colour do I like best?", "What's my favourite colour?"], ["Your favourite colour is {v}."], ["My favourite colour is now {v}."]),
    Kind("my city", proper(CITIES), ["I live in {v}.", "My home is in {v}."], ["Where do I live?", "In which city do I live?", "Which city do I live in?"], ["You live in {v}."], ["I have moved to {v}.", "I now live in {v}."]),
    Kind("my job", some(JOBS), ["I am {A}.", "I work as {A}."], ["What is my job?", "What do I do for a living?", "What do I work as?"], ["You are {A}."], ["I am now {A}."]),
    Kind("my age", lambda r: str(r.randint(5, 99)), ["I am {v} years old.", "I'm {v} years old.", "My age is {v}."], ["How old am I?", "What is my age?"], ["You are {v} years old."], ["I am now {v} years old."]),
    Kind("my pet", lambda r: None, ["I have a {p} named {v}.", "My {p} is called {v}.", "My {p}'s name is {v}.", "I have a {p} called {v}."],
        ["What is my {p}'s name?", "What is the name of my {p}?", "What is my {p} called?", "What's my {p}'s name?"], ["Your {p}'s name is {v}."]),
    Kind("my food", some(FOODS), ["I like to eat {v}.", "My favourite food is {v}.", "I love {v}."], ["What do I like to eat?", "What is my favourite food?"], ["You like to eat {v}."], ["My favourite food is now {v}."]),
    Kind("my code", code, ["My {k} is {v}.", "Remember my {k}: {v}.", "Please remember that my {k} is {v}."], ["What is my {k}?", "What's my {k}?", "Tell me my {k}.", "Do you remember my {k}?"], ["Your {k} is {v}."], ["My {k} is now {v}.", "My new {k} is {v}."]),
    Kind("my place", spot, ["I put my {t} {v}.", "My {t} is {v}.", "I left my {t} {v}."], ["Where is my {t}?", "Where did I put my {t}?", "Where did I leave my {t}?"], ["Your {t} is {v}."], ["I moved my {t}. It is now {v}.", "My {t} is now {v}."]),
]


class Fact:
    """One subject's attribute, with its current value. `key` is free of `taken` unless that was not to be had."""

    def __init__(self, rng, kind, taken, name):
        self.kind, self.slots = kind, {}
        self.name = name
        pick = {
            "name": lambda: name(rng), "thing": lambda: rng.choice(OBJECTS) if rng.random() < 0.88 else invented(rng), "lock": lambda: rng.choice(LOCKS) if rng.random() < 0.9 else invented(rng), "secret": lambda: rng.choice(SECRETS),
            "event": lambda: rng.choice(EVENTS), "colour box": lambda: f"{rng.choice(COLOURS)} {rng.choice(CONTAINERS)}", "land": lambda: cap(invented(rng)),
            "word": lambda: invented(rng), "sight": lambda: rng.choice(SIGHTS),
        }[kind.subject]
        for _ in range(50):
            self.subject = pick()
            extra = " " + rng.choice(COLOURS if rng.random() < 0.7 else THINGS_ADJ) if kind.subject in ("thing", "lock") and rng.random() < 0.35 else ""
            if extra:
                self.subject = f"{extra.strip()} {self.subject}"
            self.slots = {"k": rng.choice(CODES_FOR), "p": rng.choice(ANIMALS if rng.random() < 0.6 else RELATIVES), "t": rng.choice(OBJECTS), "s0": rng.choice(["Someone", "He", "She", "They"])}
            if kind.name.startswith("my"):
                self.subject = {"my pet": self.slots["p"], "my code": self.slots["k"], "my place": self.slots["t"]}.get(kind.name, "")
            if kind.name == "number":
                key = (kind.name, self.subject, self.slots["k"])
            elif kind.name == "place":
                key = ("place", self.subject.split()[-1] if not extra else self.subject)
            else:
                key = (kind.name, self.subject)
            if key not in taken:
                break
        self.key = key
        self.value = None
        self.renew(rng)

    def renew(self, rng):
        old = self.value
        while self.value == old:
            if self.kind.name in ("my name", "my pet"):
                self.value = self.name(rng)
            else:
                self.value = self.kind.value(rng)

    def say(self, rng, templates, marked=False, template=None, subject=None):
        v = mark(self.value) if marked else self.value
        article = a(self.value)
        A = article[: len(article) - len(self.value)] + v
        t = template or rng.choice(templates)
        return cap(t.format(s=subject or self.subject, v=v, A=A, **self.slots))

    def tell(self, rng):
        return self.say(rng, self.kind.tell)

    def change(self, rng):
        self.renew(rng)
        return self.say(rng, self.kind.change)

    def answer(self, marked=True):
        """The reply of the assistant, to whom "my sister" is "your sister"."""
        yours = "your" + self.subject[2:] if self.subject.startswith("my ") else self.subject
        return self.say(None, None, marked, self.kind.answer[0], yours)


LOCKS = """door|gate|safe|garage|office|front door|back door|locker|bank card|tower|box|vault|printer|alarm|elevator|museum|archive|cellar
|laboratory|boat house|main gate|server room|chest|car|shed|library|kitchen door|treasure chest""".replace("\n", "").split("|")
SECRETS = """secret word|magic number|password|secret code|code word|secret number|special number|magic word|access code|secret key|lucky number
|wifi password|hidden word|key phrase|order number|room number|flight number|ticket number|passcode|lucky word""".replace("\n", "").split("|")
EVENTS = """meeting|concert|party|match|lesson|dinner|train|bus|flight|film|wedding|exam|lunch|race|class|show|picnic|interview|appointment
|football game|swimming lesson|piano lesson|school play|market""".replace("\n", "").split("|")
CONTAINERS = "box bag drawer basket chest jar bucket suitcase crate pot envelope".split()
SIGHTS = "tower bridge mountain hill tree castle church wall lighthouse statue temple windmill chimney".split()

UNKNOWN = ["I don't know. You have not told me that.", "I don't know that. Nobody has told me."]
