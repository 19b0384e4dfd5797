"""The tasks that need no memory: small talk, copying, sorting, arithmetic, JSON, small knowledge. Each returns (question, answer, checked).

`checked` is what a right answer must equal, or None where many answers are right. Values that carry the answer stand
between marks, as in `facts.py`.
"""

import json

from facts import UNKNOWN, mark
from words import (ANIMALS, CITIES, COLOURS, COUNTRIES, CREATURES, DAYS, FOODS, FRUITS, INSTRUMENTS, JOBS, MONTHS, NAMES_F, NAMES_M, NUMBER_WORDS, OBJECTS,
    OPPOSITES, OUTSIDE, PLURALS, SETTINGS, SOUNDS, SPORTS, SURNAMES, TRAITS, a, cap, code, invented, listed)

WORDS = sorted(set(ANIMALS + COLOURS + FOODS + FRUITS + OBJECTS + JOBS + TRAITS + CREATURES + SPORTS))


def casual(rng, text):
    """The same question as a stranger might type it."""
    r = rng.random()
    if r < 0.55:
        return text
    if text.startswith("What is ") and rng.random() < 0.4:
        text = "What's " + text[8:]
    if rng.random() < 0.35 and text.endswith("?"):
        lead = rng.choice(["Can you tell me: ", "Please tell me: ", "Question: ", "Tell me, ", "So, ", "And ", "Now, ", "Okay, ", "One more question: ", "Do you remember? ", "Remember: ", "Hey, ", "Please answer: "])
        text = lead + (text if lead.endswith((": ", "? ")) else text[0].lower() + text[1:])
    if rng.random() < 0.3:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text = text.lower() if not any(ch.isupper() for ch in text[1:]) else text
    if rng.random() < 0.25 and text[-1] in "?.":
        text = text[:-1]
    if rng.random() < 0.06:
        text += " Please." if text[-1] in "?." else " please"
    return text


def held_out(x, y):
    """One pair of two-digit numbers in ten is kept from the training text."""
    return x >= 10 and y >= 10 and (x * 31 + y * 17) % 10 == 3


def name(rng):
    return rng.choice(NAMES_F + NAMES_M)


# ---- copying ----

SUBJECTS = ["The {a}", "A {a}", "The {t} {a}", "My {a}", "The {j}", "{n}", "Our {j}", "Every {a}"]
VERBS = ["likes {f}", "sees {o2}", "has {o2}", "went to {c}", "is very {t}", "sleeps on the {o}", "wants {f} and {f2}", "plays {s}", "lives in {c}", "sat next to the {o}", "cannot find the {o}"]


def sentence(rng):
    slots = {"a": rng.choice(ANIMALS), "t": rng.choice(TRAITS), "j": rng.choice(JOBS), "n": name(rng), "f": rng.choice(FOODS), "f2": rng.choice(FOODS), "o": rng.choice(OBJECTS),
        "o2": a(rng.choice(COLOURS) + " " + rng.choice(OBJECTS)), "c": rng.choice(CITIES), "s": rng.choice(SPORTS)}
    out = (rng.choice(SUBJECTS) + " " + rng.choice(VERBS)).format(**slots)
    if rng.random() < 0.3:
        out += " " + rng.choice(["today", "in the morning", "every day", "at night", f"with {name(rng)}", f"on {rng.choice(DAYS)}"])
    return out + rng.choice(".....!?")


def copy_text(rng):
    r = rng.random()
    if r < 0.4:
        return sentence(rng)
    if r < 0.5:
        return sentence(rng) + " " + sentence(rng)
    if r < 0.6:
        return code(rng)
    if r < 0.7:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 10)))
    if r < 0.8:
        return ", ".join(rng.choice([lambda: rng.choice(WORDS), lambda: code(rng), lambda: str(rng.randint(0, 999))])() for _ in range(rng.randint(2, 8)))
    if r < 0.9:
        return " ".join((cap(invented(rng)) if rng.random() < 0.2 else invented(rng)) for _ in range(rng.randint(1, 8)))
    if r < 0.95:
        return " ".join(str(rng.randint(0, 9999)) for _ in range(rng.randint(1, 7)))
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") for _ in range(rng.randint(4, 16)))


def copying(rng):
    if rng.random() < 0.1:
        word, n = rng.choice(WORDS) if rng.random() < 0.7 else invented(rng), rng.randint(2, 6)
        q = rng.choice([f"Say {word} {NUMBER_WORDS[n]} times.", f"Repeat the word {word} {NUMBER_WORDS[n]} times.", f"Write {word} {n} times.", f"Say the word {word} {n} times."])
        return q, mark(" ".join([word] * n)), " ".join([word] * n)
    text = copy_text(rng)
    q = rng.choice(["Repeat after me: {x}", "Copy this: {x}", "Repeat this text exactly: {x}", "Say: {x}", "Echo: {x}", "Write this again: {x}", "Please repeat: {x}", "Copy the following text:\n{x}",
        'Repeat the following: "{x}"', 'Say "{x}"', "Please say this: {x}", "Repeat: {x}", "Copy exactly: {x}", "{x}\n\nRepeat the text above.", "repeat after me: {x}", "Repeat the text: {x}", "Can you repeat this? {x}", "Type this: {x}"])
    return q.format(x=text), mark(text), text


# ---- sorting and lists ----

def sorting(rng):
    n = rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 7, 8))
    join = rng.choice([", ", ", ", ", ", " "])
    if rng.random() < 0.62:
        top = rng.choice((9, 20, 99, 99, 99, 999))
        items = rng.sample(range(0, top + 1), n) if top >= n else list(range(n))
        down = rng.random() < 0.25
        right = sorted(items, reverse=down)
        ask = rng.choice(["Sort these numbers from largest to smallest: {x}", "Sort in descending order: {x}", "Put these numbers in descending order: {x}", "Sort from high to low: {x}"] if down else
            ["Sort: {x}", "Sort these numbers: {x}", "Sort the numbers {x}.", "Put these numbers in order: {x}", "Sort from smallest to largest: {x}", "Sort in ascending order: {x}", "Please sort {x}", "Sort this list: {x}", "Sort these numbers from smallest to largest: {x}", "sort {x}", "Order these numbers: {x}", "Please sort these for me: {x}", "Sort these: {x}", "sort the numbers {x}", "Can you sort {x}?", "sort: {x}"])
    else:
        n = min(n, 5)
        letters = rng.sample("abcdefghijklmnoprstw", n)
        pool = {c: [w for w in WORDS if w[0] == c] for c in letters}
        items = [rng.choice(pool[c]) for c in letters if pool[c]]
        right = sorted(items)
        ask = rng.choice(["Sort these words: {x}", "Sort the words in alphabetical order: {x}", "Put these words in alphabetical order: {x}", "Sort alphabetically: {x}", "Sort: {x}", "Sort this list of words: {x}", "Order these words alphabetically: {x}", "sort the words {x}", "Please sort these words for me: {x}", "Sort these: {x}"])
    out = ", ".join(map(str, right))
    end = "." if rng.random() < 0.15 and not ask.endswith(".") else ""
    return ask.format(x=join.join(map(str, items))) + end, mark(out), out


def lists(rng):
    kind = rng.randrange(7)
    if kind == 0:
        items = rng.sample(range(1, 100), rng.randint(2, 6))
        big = rng.random() < 0.5
        v = str(max(items) if big else min(items))
        w = "largest" if big else "smallest"
        q = rng.choice([f"Which number is the {w}: {', '.join(map(str, items))}?", f"What is the {w} of these numbers: {', '.join(map(str, items))}?", f"Find the {w} number: {', '.join(map(str, items))}"])
        return q, f"The {w} number is {mark(v)}.", v
    if kind == 1:
        items = [rng.choice(WORDS) for _ in range(rng.randint(2, 8))]
        v = str(len(items))
        return rng.choice([f"How many words are in this list: {', '.join(items)}?", f"Count the words: {', '.join(items)}"]), f"There are {mark(v)} words.", v
    if kind == 2:
        items = rng.sample(WORDS, rng.randint(3, 6))
        at = rng.randrange(3)
        which, v = [("first", items[0]), ("last", items[-1]), ("second", items[1])][at]
        return rng.choice([f"What is the {which} word in this list: {', '.join(items)}?", f"Tell me the {which} word: {', '.join(items)}"]), f"The {which} word is {mark(v)}.", v
    if kind == 3:
        items = rng.sample(WORDS, rng.randint(2, 5)) if rng.random() < 0.6 else [str(x) for x in rng.sample(range(1, 100), rng.randint(2, 6))]
        v = ", ".join(reversed(items))
        return rng.choice([f"Reverse this list: {', '.join(items)}", f"Write this list backwards: {', '.join(items)}"]), mark(v), v
    if kind == 4:
        start = rng.randint(1, 20)
        stop = start + rng.randint(2, 9)
        v = ", ".join(map(str, range(start, stop + 1)))
        return rng.choice([f"Count from {start} to {stop}.", f"count from {start} to {stop}", f"Can you count from {start} to {stop}?"]), mark(v), v
    pool, word = rng.choice([(COLOURS[:12], "colours"), (ANIMALS[:30], "animals"), (FRUITS, "fruits"), (FOODS, "foods"), (JOBS, "jobs"), (SPORTS, "sports"), (CITIES, "cities"), (DAYS, "days"), (MONTHS, "months"), (INSTRUMENTS, "instruments"), (COUNTRIES, "countries")])
    n = rng.randint(2, 6)
    items = pool[:n] if word in ("days", "months") else rng.sample(pool, n)
    word = "colors" if word == "colours" and rng.random() < 0.4 else word
    if kind == 5:
        return rng.choice([f"Name {NUMBER_WORDS[n]} {word}.", f"Give me {n} {word}.", f"List {NUMBER_WORDS[n]} {word}.", f"Tell me {n} {word}.", f"Name {n} {word}"]), f"{cap(listed(items))}.", None
    items = [cap(x) for x in items]
    return rng.choice([f"Make a list of {NUMBER_WORDS[n]} {word}.", f"List {n} {word} with bullet points.", f"Write a numbered list of {n} {word}."]) , "\n".join(f"{i + 1}. {x}" for i, x in enumerate(items)), None


# ---- arithmetic ----

def arithmetic(rng, test=False):
    """A sum, a difference or a small product. With `test`, a sum or difference of a kept pair."""
    op = "+" if test and rng.random() < 0.5 else "-" if test else rng.choice("+++---**")
    while True:
        if test:
            x, y = rng.randint(10, 99), rng.randint(10, 99)
        else:
            hi = rng.choice((10, 20, 99, 99))
            x, y = rng.randint(0, hi), rng.randint(0, rng.choice((10, hi)))
        if op == "*":
            x, y = rng.randint(0, 10), rng.randint(0, 10)
        if op == "-" and x < y:
            x, y = y, x
        if held_out(x, y) == test or op == "*":
            break
    v = {"+": x + y, "-": x - y, "*": x * y}[op]
    word = {"+": "plus", "-": "minus", "*": "times"}[op]
    sign = rng.choice(["x", "*", "×"]) if op == "*" else op
    e = rng.choice([f"{x} {sign} {y}", f"{x} {sign} {y}", f"{x}{sign}{y}", f"{x} {word} {y}"])
    q = rng.choice([f"What is {e}?", f"What is {e}?", f"{e} = ?", f"{e} =", f"How much is {e}?", f"Calculate {e}.", f"what's {e}", f"What's {e}?", f"{e}", f"{e}?", f"whats {e}", f"{e}=", f"what is {e}", f"Tell me what {e} is.", f"Add up: {e}" if op == "+" else f"Compute {e}", f"Compute {e}.", f"Please calculate {e}."])
    return q, f"{x} {sign if sign != '×' else 'x'} {y} = {mark(v)}", str(v)


MORE = ["finds {n} more", "buys {n} more", "gets {n} more", "is given {n} more"]
LESS = ["loses {n}", "gives away {n}", "sells {n}", "uses {n}", "gives {n} to a friend"]


def word_problem(rng, test=False):
    """One or two steps, worked out line by line; the answer is the last number."""
    who, female = (rng.choice(NAMES_F), True) if rng.random() < 0.5 else (rng.choice(NAMES_M), False)
    they = "She" if female else "He"
    plural = rng.choice(["apples", "coins", "books", "pens", "stones", "cookies", "balls", "pears", "keys", "boxes", "cards", "shells", "eggs", "cups", "toys", "stickers", "marbles", "oranges", "flowers", "cows", "sheep", "balloons", "pencils", "hats", "dogs", "birds", "trees"])
    if rng.random() < 0.18:
        j = rng.choice(JOBS)
        first, who = f"A {j}" if j[0] not in "aeiou" else f"An {j}", f"the {j}"
    else:
        first = who
    while True:
        x = rng.randint(2, rng.choice((12, 20, 60)))
        steps, total, work = [], x, []
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            up = rng.random() < 0.55
            n = rng.randint(1, rng.choice((9, 20))) if up else rng.randint(1, max(1, min(total - 1, rng.choice((9, 20)))))
            after = total + n if up else total - n
            steps.append((up, n))
            work.append((total, "+" if up else "-", n, after))
            total = after
        if total > 0 and total < 100 and any(held_out(w[0], w[2]) for w in work) == test:
            break
    if len(work) == 1 and rng.random() < 0.35:
        other, n = name(rng), work[0][2]
        if work[0][1] == "+":
            q = f"{first} has {x} {plural}. {other} has {n} {plural}. How many {plural} do they have together?"
            return q, f"{x} + {n} = {mark(x + n)}. They have {x + n} {plural} together. The answer is {x + n}.", str(x + n)
        if x > n:
            q = f"{first} has {x} {plural}. {other} has {n} {plural}. How many more {plural} does {who} have than {other}?"
            return q, f"{x} - {n} = {mark(x - n)}. {cap(who)} has {x - n} more {plural}. The answer is {x - n}.", str(x - n)
    if rng.random() < 0.15:
        n, each = rng.randint(2, 10), rng.randint(2, 10)
        container = rng.choice(["bags", "boxes", "baskets"])
        q = f"{first} has {n} {container}. There are {each} {plural} in each one. How many {plural} does {who} have?"
        return q, f"{n} x {each} = {mark(n * each)}. {cap(who)} has {n * each} {plural}. The answer is {n * each}.", str(n * each)
    text = [rng.choice([f"{first} has {x} {plural}.", f"{first} has {x} {plural} at home.", f"There are {x} {plural} on the table. {first} takes them all."])]
    for i, (up, n) in enumerate(steps):
        text.append(("Then " + they.lower() if i else they) + " " + rng.choice(MORE if up else LESS).format(n=n) + ".")
    ask = rng.choice([f"How many {plural} does {who} have now?", f"How many {plural} does {they.lower()} have now?", f"How many {plural} are left?" if not steps[-1][0] else f"How many {plural} does {who} have in the end?"])
    lines = " ".join(f"{p} {s} {n} = {mark(r)}." for p, s, n, r in work)
    return " ".join(text) + " " + ask, f"{lines} {cap(who)} has {total} {plural}. The answer is {total}.", str(total)


# ---- JSON ----

def person(rng):
    n = name(rng) if rng.random() < 0.8 else cap(invented(rng))
    if rng.random() < 0.2:
        n += " " + rng.choice(SURNAMES)
    return {"name": n, "age": rng.randint(2, 99), "city": rng.choice(CITIES), "job": rng.choice(JOBS), "colour": rng.choice(COLOURS), "pet": rng.choice(ANIMALS), "food": rng.choice(FOODS)}


ABOUT = {"age": ["{n} is {v} years old.", "{n} is {v}.", "{n}'s age is {v}."], "city": ["{n} lives in {v}.", "{n} is from {v}."], "job": ["{n} is {A}.", "{n} works as {A}."],
    "colour": ["{n} likes the colour {v}.", "{n}'s favourite colour is {v}."], "pet": ["{n} has {A}.", "{n}'s pet is {A}."], "food": ["{n} likes {v}.", "{n} likes to eat {v}."]}


def json_task(rng):
    r = rng.random()
    if r < 0.62:
        p = person(rng)
        told = rng.sample(list(ABOUT), rng.randint(1, 4))
        keys = [k for k in told if rng.random() < 0.85] or told[:1]
        text = []
        for i, k in enumerate(told):
            subject = p["name"] if i == 0 or rng.random() < 0.6 else None
            line = rng.choice(ABOUT[k]).format(n=subject or p["name"], v=p[k], A=a(str(p[k])))
            text.append(line)
        rename = {"colour": rng.choice(["colour", "color", "favourite_colour"]), "job": rng.choice(["job", "job", "profession"]), "city": rng.choice(["city", "city", "home"]), "age": "age", "pet": "pet", "food": "food"}
        names = ["name"] + [rename[k] for k in keys]
        out = json.dumps({"name": p["name"], **{rename[k]: p[k] for k in keys}}, ensure_ascii=False)
        fields = listed(names)
        ask = rng.choice([f"Write this as JSON with {fields}: {{t}}", f"{{t}} Give me a JSON object with {fields}.", f"{{t}}\nReturn JSON with the keys {fields}.", f"Make JSON with the keys {', '.join(names)}. {{t}}",
            f"Turn this into JSON with {fields}: {{t}}", f"{{t}} Answer in JSON with the fields {', '.join(names)}.", f"Extract {fields} as JSON: {{t}}"])
        return ask.replace("{t}", " ".join(text)), mark(out), out
    if r < 0.75:
        people = [person(rng) for _ in range(rng.randint(2, 3))]
        k = rng.choice(["age", "city", "job"])
        text = " ".join(rng.choice(ABOUT[k]).format(n=p["name"], v=p[k], A=a(str(p[k]))) for p in people)
        out = json.dumps([{"name": p["name"], k: p[k]} for p in people], ensure_ascii=False)
        return rng.choice([f"Write this as a JSON list of objects with name and {k}: {text}", f"{text} Make a JSON array with name and {k}.", f"Give me a JSON list with the name and {k} of each person. {text}"]), mark(out), out
    if r < 0.87:
        items = rng.sample(WORDS, rng.randint(2, 6)) if rng.random() < 0.6 else rng.sample(range(100), rng.randint(2, 6))
        out = json.dumps(items)
        s = ", ".join(map(str, items))
        return rng.choice([f"Write this as a JSON array: {s}", f"Make a JSON list of these: {s}", f"JSON array of {s}", f"Turn this list into JSON: {s}"]), mark(out), out
    p = person(rng)
    what = rng.choice([["name", "age"], ["name", "age", "city"], ["name", "job"], ["name", "city", "colour"], ["name", "age", "pet"]])
    out = json.dumps({k: p[k] for k in what}, ensure_ascii=False)
    return rng.choice([f"Give me an example of JSON with {listed(what)}.", f"Make up a person as JSON with the keys {', '.join(what)}.", f"Write a JSON object with {listed(what)} for a person."]), out, None


# ---- small knowledge ----

def knowledge(rng):
    kind = rng.randrange(8)
    if kind == 0:
        i = rng.randrange(7)
        return rng.choice([f"What day comes after {DAYS[i]}?", f"Which day is after {DAYS[i]}?"]), f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}.", DAYS[(i + 1) % 7]
    if kind == 1:
        i = rng.randrange(12)
        return rng.choice([f"What month comes after {MONTHS[i]}?", f"Which month is after {MONTHS[i]}?"]), f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}.", MONTHS[(i + 1) % 12]
    if kind == 2:
        x, y = rng.choice(OPPOSITES)
        if rng.random() < 0.5:
            x, y = y, x
        return rng.choice([f"What is the opposite of {x}?", f"Opposite of {x}?", f"What's the opposite of {x}?"]), f"The opposite of {x} is {mark(y)}.", y
    if kind == 3:
        x, y = rng.choice(SOUNDS)
        return rng.choice([f"What sound does {a(x)} make?", f"What does {a(x)} say?", f"Which sound does the {x} make?"]), f"{cap(a(x))} says {mark(y)}.", y
    if kind == 4:
        x, y = rng.choice(PLURALS)
        return rng.choice([f"What is the plural of {x}?", f"Plural of {x}?"]), f"The plural of {x} is {mark(y)}.", y
    if kind == 5:
        v, q = rng.choice([("seven", "How many days are in a week?"), ("twelve", "How many months are in a year?"), ("blue", "What colour is the sky?"), ("green", "What colour is grass?"), ("yellow", "What colour is the sun?"), ("white", "What colour is snow?"), ("red", "What colour is blood?"), ("four", "How many legs does a dog have?"), ("two", "How many legs does a bird have?"), ("eight", "How many legs does a spider have?"), ("six", "How many legs does an ant have?"), ("yellow", "What colour is a banana?")])
        full = {"How many days are in a week?": "There are seven days in a week.", "How many months are in a year?": "There are twelve months in a year."}.get(q)
        if full is None:
            words = q[:-1].split()
            full = f"{cap(' '.join(words[3:]))} is {v}." if q.startswith("What colour") else f"{cap(' '.join(words[4:-1]))} has {v} legs."
        return q.replace("colour", rng.choice(["colour", "color"])), full, v
    if kind == 6:
        x = rng.choice(WORDS)
        v = x.upper() if rng.random() < 0.0 else cap(x)
        return rng.choice([f"Write {x} with a capital letter.", f"Capitalise the word {x}."]), mark(v), v
    x, y = rng.randint(1, 99), rng.randint(1, 99)
    if x == y:
        y += 1
    return rng.choice([f"Which is larger, {x} or {y}?", f"Which number is bigger, {x} or {y}?", f"Is {x} larger than {y}?"]), *(lambda q: q)((f"{mark(max(x, y))} is larger than {min(x, y)}.", str(max(x, y))))


# ---- small talk ----

WHO = ["I am the small demo model that is built into Folio. I can tell stories and answer questions about what you tell me."]
CAN = ["I can tell short stories, remember what you tell me, copy text, sort lists, do small sums and write JSON."]
TALK = [
    (["Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Hey", "hey", "Hi there", "Hello there!", "Good morning", "Good morning!", "Good evening", "Good day", "Hey there!", "Hiya", "Greetings", "hello!", "Hi, how can you help me?"],
        ["Hello! How can I help you?", "Hi! What can I do for you?"]),
    (["How are you?", "How are you doing?", "how are you", "How do you do?", "How is it going?", "Are you well?", "How are you today?", "What's up?", "Hello, how are you?", "Hi, how are you?"], ["I am fine, thank you. How can I help you?"]),
    (["Who are you?", "What are you?", "who are you", "What is your name?", "What's your name?", "Tell me about yourself.", "Introduce yourself.", "Which model are you?", "What model is this?", "What model are you?", "who are you?", "Are you a model?", "Are you an AI?", "Are you a robot?", "Are you ChatGPT?", "Who am I talking to?", "what is your name"], WHO),
    (["What can you do?", "what can you do", "How can you help me?", "Help", "help", "What are you good at?", "Help me.", "What do you know?", "What should I ask you?", "Can you help me?", "What are your skills?"], CAN),
    (["Who made you?", "Who trained you?", "Where do you come from?", "Who created you?", "Who built you?"], ["I was made by the people who make Folio, and I was trained on text from a small generator."]),
    (["What is Folio?", "What's Folio?", "Tell me about Folio.", "what is folio", "What is folio?"], ["Folio is an engine that serves language models. I am its small built-in demo model."]),
    (["How big are you?", "How many parameters do you have?", "Are you a large model?", "How large are you?", "Are you small?"], ["I am very small. I have about two million parameters."]),
    (["Are you human?", "Are you a person?", "Are you real?", "Are you alive?"], ["No, I am not a person. I am a small language model."]),
    (["Thanks", "Thank you", "Thanks!", "Thank you!", "thanks", "thank you", "Thank you very much.", "Great, thanks.", "Thanks a lot!", "thx", "Well done!", "Good job!", "Great!", "Nice!", "Cool", "Perfect."], ["You are welcome!"]),
    (["Goodbye", "Bye", "Bye!", "bye", "Good night", "See you later.", "Goodbye!", "See you!", "Good night!"], ["Goodbye! It was nice to talk to you."]),
    (["Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Make me laugh.", "A joke, please.", "joke", "Can you tell me a joke?", "Say something funny."],
        ["Why did the book go to the doctor? Because it had a broken spine.", "What did the big clock say to the small clock? It is about time you grew up.", "Why was the broom late? It overslept.", "What is brown and sticky? A stick."]),
    (["How old are you?", "When were you born?", "What is your age?"], ["I am a small model, and I have no age."]),
    (["Where do you live?", "Where are you?"], ["I live inside the Folio program on this computer."]),
    (["Do you like music?", "What is your favourite colour?", "Do you like cats?", "What do you like?", "What is your favourite food?", "What do you like to eat?"], ["I am a model, so I have no favourites. But I like to tell stories."]),
    (["I am happy.", "I am happy today.", "I had a good day.", "Today was a great day!"], ["That is good to hear!"]),
    (["I am sad.", "I feel sad.", "I had a bad day.", "I am tired.", "I am lonely.", "I'm bored."], ["I am sorry to hear that. Shall I tell you a story?"]),
    (["Yes", "Yes.", "yes", "Ok", "Okay", "ok", "Sure.", "I see.", "All right."], ["Good. What would you like to do next?"]),
    (["No", "No.", "no", "No, thanks."], ["All right. Tell me if you need anything."]),
    (["I love you", "I like you.", "You are nice.", "You are great!", "You are funny."], ["Thank you! That is very kind of you."]),
    (["Are you there?", "Can you hear me?", "Test", "test", "This is a test.", "ping", "testing"], ["Yes, I am here. How can I help you?"]),
    (["Say hello.", "Say hello", "Say hi.", "say hi"], ["Hello!"]),
    (["Do you understand me?", "Do you speak English?", "Can you read this?"], ["Yes, I understand short and simple English."]),
]


def small_talk(rng):
    asks, answers = rng.choice(TALK)
    if rng.random() < 0.25:
        asks, answers = TALK[rng.randrange(5)]
    return rng.choice(asks), rng.choice(answers), None


def outside(rng):
    """Questions beyond the model: it says so."""
    topic = rng.choice(OUTSIDE) if rng.random() < 0.6 else rng.choice([rng.choice(COUNTRIES), rng.choice(CITIES), rng.choice(JOBS) + "s", invented(rng)])
    q = rng.choice(["Explain {t}.", "What do you know about {t}?", "What do you think about {t}?", "Write an essay about {t}.", "Tell me everything about {t}.", "How does {t} work?", "Why is {t} important?", "Write code about {t}.",
        "Who invented {t}?", "Explain {t} to a child.", "Write a Python program for {t}.", "What happened in {y}?", "Who won the world cup in {y}?", "Translate this into French: {t}", "What is the history of {t}?", "Who is the president of {c}?", "What is the capital of {c}?", "Who wrote {t}?", "Can you explain {t}?", "How do I learn about {t}?", "Summarise {t}.", "What is the weather in {c}?", "What is the best {j} in {c}?"])
    return q.format(t=topic, y=rng.randint(1500, 2030), c=rng.choice(COUNTRIES), j=rng.choice(JOBS)), OUT_ANSWER, None


OUT_ANSWER = "I don't know. I am only a small demo model."

TASKS = {"copy": copying, "sort": sorting, "list": lists, "arithmetic": arithmetic, "word_problem": word_problem, "json": json_task, "knowledge": knowledge, "talk": small_talk, "outside": outside}
__all__ = ["TASKS", "casual", "UNKNOWN", "SETTINGS"]
