"""The generator of all text the built-in model is trained and measured on. No foreign corpus: templates and word lists only.

    python generate.py --kind retrieval --distance 1500 --n 100 --seed 7 --jsonl     # held-out questions
    python generate.py --kind conversation --n 3 --seed 1                            # what training text looks like

Each line of `--jsonl` is {"messages": [...], "answer": what a right reply contains, "kind": ..., "distance": tokens}.
Seeds given here and seeds of the training rows never meet: `pack.py` draws from its own name space.
"""

import argparse
import json
import random
from pathlib import Path

from facts import CLOSE, KINDS, OPEN, SELF, UNKNOWN, Fact, mark
from stories import story
from tasks import TASKS, arithmetic, casual, sentence, word_problem
from words import ANIMALS, CREATURES, NAMES_F, NAMES_M, OBJECTS, RELATIVES, SURNAMES, TITLES, a, cap, invented

ROLES = ("system", "user", "assistant")
BEGIN, END = "<|begin|>", "<|end|>"

SYSTEMS = """You are a helpful assistant.|You are a helpful, honest and friendly assistant.|You are a small demo model.|Answer the questions of the user.
|You are Folio, a small assistant.|Be brief.|Answer in short sentences.|You are a friendly chat assistant.|Help the user.|You are an assistant that remembers facts.
|Answer truthfully. If you do not know, say so.|You answer questions about the text.|You are a kind teacher.|Today is a good day. Help the user with any question.|Be polite and helpful.
|You are a story teller.|You are an AI assistant. Follow the instructions of the user.|Use simple words.|You are a careful assistant. Do not make things up.|Keep your answers short.""".replace("\n", "").split("|")

OKAY = ["Okay, I will remember that.", "Okay, I will remember that.", "Got it.", "Okay."]
STORY_WEIGHT = 0.6


def strip(text):
    return text.replace(OPEN, "").replace(CLOSE, "")


def endless(rng, pool):
    yield from pool
    while True:
        yield cap(invented(rng)), None


class Conversation:
    """A growing list of messages within a token budget, and what has been told in it."""

    def __init__(self, rng, budget, count=None):
        self.rng, self.budget = rng, budget
        self.count = count or (lambda text: len(text) // 3)
        self.messages, self.used = [], 1
        self.facts, self.taken, self.stories = [], set(), []
        pool = [(n, True) for n in NAMES_F] + [(n, False) for n in NAMES_M]
        rng.shuffle(pool)
        self.names = endless(rng, pool)

    def add(self, role, content, weight=1.0):
        self.messages.append((role, content, weight))
        self.used += self.count(strip(content)) + 2

    def room(self, tokens=60):
        return self.budget - self.used >= tokens

    def name(self, rng):
        """A name no one in this conversation has, sometimes an invented one or one with a surname."""
        out = cap(invented(rng)) if rng.random() < 0.25 else next(self.names)[0]
        r = rng.random()
        return f"{out} {rng.choice(SURNAMES)}" if r < 0.08 else f"{rng.choice(TITLES)} {out}" if r < 0.13 else out

    def subject_name(self, rng):
        """Mostly a new name; sometimes someone already known, so that one subject has several attributes."""
        known = [f.subject for f in self.facts if f.kind.subject == "name" and f.subject and not f.kind.name.startswith("my")]
        if rng.random() < 0.08:
            return "my " + rng.choice(RELATIVES)
        return rng.choice(known) if known and rng.random() < 0.3 else self.name(rng)

    # ---- turns ----

    def system(self):
        rng = self.rng
        r = rng.random()
        if r < 0.55:
            return
        text = rng.choice(SYSTEMS)
        if r > 0.9:
            text += " " + " ".join(self.new_fact().tell(rng) for _ in range(rng.randint(1, 5)))
        self.add("system", text)

    def new_fact(self, kind=None, own=False):
        fact = self.free_fact(kind, own)
        self.taken.add(fact.key)
        self.facts.append(fact)
        return fact

    def free_fact(self, kind=None, own=False):
        """A fact whose key nothing told so far has; of another kind where the wanted one has no key left."""
        while True:
            use = kind or self.rng.choice(SELF if own else KINDS)
            fact = Fact(self.rng, use, self.taken, self.name if use.name.startswith("my") else self.subject_name)
            if fact.key not in self.taken:
                return fact
            kind, own = None, own and self.rng.random() < 0.5

    def tell(self, n=None, kind=None):
        rng = self.rng
        own = rng.random() < 0.3 and kind is None
        n = n or rng.choice((1, 1, 1, 2, 2, 3, 4, 6))
        if kind is None and rng.random() < 0.35:
            kind = rng.choice(KINDS)  # several keys of one kind: the hard case
        lines = [self.new_fact(None if own else kind, own).tell(rng) for _ in range(n)]
        r = rng.random()
        if n > 1 and r < 0.2:
            text = rng.choice(["Remember these facts:\n", "Notes:\n", "Here are some facts:\n", "Facts:\n", ""]) + "\n".join("- " + x for x in lines)
        elif n > 1 and r < 0.3:
            text = "\n".join(lines)
        elif n == 2 and r < 0.55:
            second = lines[1]
            second = second[0].lower() + second[1:] if second.startswith(("The ", "My ", "You ", "In ", "There ", "At ")) else second
            text = f"{lines[0][:-1]}{rng.choice([' and', ', and', ', but', ' while'])} {second}"
        elif r < 0.45:
            text = rng.choice(["Remember this: ", "Please remember: ", "Keep this in mind: ", "I want to tell you something. ", "Listen. ", "By the way, ", "Here is something new: ", "Remember: ", "Note: "]) + " ".join(lines)
        else:
            text = " ".join(lines)
        if rng.random() < 0.12:
            text = text.lower() if not any(c.isupper() for c in text[1:]) else text
        if rng.random() < 0.3 and self.room(100):
            q, ans = self.question(recent=n)
            self.add("user", text + rng.choice([" ", "\n", "\n\n", "\n\nQuestion: ", " Question: "]) + q)
            self.add("assistant", ans)
            return
        self.add("user", text)
        first = self.facts[-1]
        if own and n == 1 and first.kind.name == "my name":
            self.add("assistant", f"Nice to meet you, {mark(first.value)}!")
        else:
            self.add("assistant", rng.choice(OKAY))

    def change(self):
        rng = self.rng
        able = [f for f in self.facts if f.kind.change]
        if not able:
            return self.tell()
        some = rng.sample(able, min(len(able), rng.choice((1, 1, 2, 3))))
        self.add("user", rng.choice(["", "", "", "News: ", "Now ", "Update: ", "Something has changed. "]).replace("Now ", "") + " ".join(f.change(rng) for f in some))
        self.add("assistant", rng.choice(OKAY))

    def question(self, recent=0, fact=None):
        """A question about something told, and its answer."""
        rng = self.rng
        r = rng.random()
        if fact is None and r < 0.07:
            return self.unknown()
        if fact is None and self.stories and r < 0.2:
            return self.story_question()
        if fact is None:
            fact = rng.choice(self.facts[-recent:] if recent else self.facts)
            if not recent and rng.random() < 0.25:
                fact = rng.choice(self.facts[: len(self.facts) // 2 + 1])  # look far back more often
        kind = fact.kind
        r = rng.random()
        if r < 0.07 and kind.who and self.unique(fact):
            q = fact.say(rng, kind.who)
            subject = fact.answer(False)
            yours = cap(fact.subject.replace("my ", "your "))
            at = subject.find(yours) if yours in subject else subject.find(fact.subject)
            length = len(yours)
            return casual(rng, q), subject[:at] + mark(subject[at : at + length]) + subject[at + length :]
        if r < 0.14 and not kind.name.startswith("my"):
            return self.yes_no(fact)
        q = casual(rng, fact.say(rng, kind.ask))
        if rng.random() < 0.2:
            q = q.replace("favourite", "favorite").replace("colour", "color") if "colour" in q or "favourite" in q else q
        if rng.random() < 0.07:
            q += rng.choice([" Answer with the value only.", " Just the answer, please.", " Only give the answer."])
            return q, mark(fact.value)
        return q, fact.answer()

    def unique(self, fact):
        return sum(f.value == fact.value and f.kind is fact.kind for f in self.facts) == 1

    def yes_no(self, fact):
        rng, true = self.rng, fact.value
        claim = rng.random() < 0.5
        if not claim:
            others = [f.value for f in self.facts if f.kind is fact.kind and f.value != true]
            fact.value = rng.choice(others) if others and rng.random() < 0.6 else None
            while fact.value in (None, true):
                fact.value = fact.kind.value(rng)
        text = fact.say(rng, None, False, fact.kind.answer[0])[:-1]
        fact.value = true
        text = text[0].lower() + text[1:] if text.startswith(("The ", "In the ")) else text
        answer = fact.answer()
        answer = answer[0].lower() + answer[1:] if answer.startswith(("The ", "In the ")) else answer
        return rng.choice([f"Is it true that {text}?", f"Is it right that {text}?", f"{cap(text)}. Is that true?"]), f"{mark('Yes' if claim else 'No')}, {answer}"

    def unknown(self):
        """A question whose answer was never told: sometimes about someone known, sometimes about no one."""
        rng = self.rng
        for _ in range(20):
            own = rng.random() < 0.3
            kind = rng.choice(SELF if own else KINDS)
            fact = self.free_fact(kind)
            kind = fact.kind
            if kind.subject == "name" and any(f.subject == fact.subject and {f.kind.name, kind.name} in ({"city", "country"}, {"pet", "item"}) for f in self.facts):
                continue
            return casual(rng, fact.say(rng, kind.ask)), mark(UNKNOWN[0])
        return "What is the meaning of life?", mark(UNKNOWN[0])

    def ask(self, n=1):
        for _ in range(n):
            if self.facts and self.room(30):
                q, ans = self.question()
                self.add("user", q)
                self.add("assistant", ans)

    def tell_story(self, by_user=None):
        """The user asks for a story and gets one, or gives one to read."""
        rng = self.rng
        by_user = rng.random() < 0.35 if by_user is None else by_user
        short = rng.random() < 0.25 or not self.room(350)
        if by_user:
            text, facts = story(rng, self.names, short=short)
            ask = rng.choice(["Read this story:\n{x}", "Here is a story. {x}", "{x}", "I read this today: {x}", "Text:\n{x}", "Read this text.\n\n{x}"]).replace("{x}", text)
            self.stories.append(facts)
            if rng.random() < 0.6:
                q, ans = self.story_question()
                self.add("user", ask + rng.choice(["\n\n", "\n", " "]) + q)
                self.add("assistant", ans)
            else:
                self.add("user", ask)
                self.add("assistant", rng.choice(["That is a nice story.", "Thank you for the story."]))
            return
        ask, wanted = story_prompt(rng, self)
        text, facts = story(rng, self.names, short=short or "short" in ask.lower() and rng.random() < 0.6, **wanted)
        self.stories.append(facts)
        self.add("user", ask)
        self.add("assistant", text, STORY_WEIGHT)

    def story_question(self):
        rng = self.rng
        s = rng.choice(self.stories) if rng.random() < 0.5 else self.stories[-1]
        last = s is self.stories[-1]
        hero, kind, friend = s["hero"], s["kind"], s["friend"]
        kinds = [x["kind"] for x in self.stories] + [x["friend_kind"] for x in self.stories]
        options = [
            (["Who was {h}'s friend?", "What was the name of {h}'s friend?", "Who was the friend of {h}?"], f"{hero}'s friend was {mark(friend)}."),
            (["Where did {h} live?", "Where was {h}'s home?"], f"{hero} lived {mark(s['place'])}."),
            (["What was {h}?", "Who was {h}?", "What kind of character was {h}?"], f"{hero} was {mark(a(kind))}."),
        ]
        if kinds.count(kind) == 1:
            options.append((["What was the {k}'s name?", "What was the {k} called?", "What was the name of the {k}?", "Which name did the {k} have?"], f"The {kind}'s name was {mark(hero)}."))
        if last:
            options.append((["Who was the story about?", "What was the story about?", "Who is the hero of the story?", "Who was in the story?"], f"The story was about {mark(f'{a(kind)} named {hero}')}."))
        if "where" in s and sum(x.get("object") == s["object"] for x in self.stories) == 1:
            options.append((["Where was the {o}?", "Where did they find the {o}?", "In the story, where was the {o}?"], f"The {s['object']} was {mark(s['where'])}."))
        asks, answer = rng.choice(options)
        return casual(rng, rng.choice(asks).format(h=hero, k=kind, o=s.get("object"))), answer

    def task(self, name=None):
        rng = self.rng
        name = name or rng.choice(["copy"] * 3 + ["sort"] * 3 + ["list"] * 2 + ["arithmetic"] * 4 + ["word_problem"] * 3 + ["json"] * 3 + ["knowledge"] + ["talk"] * 3 + ["outside"])
        q, answer, _ = TASKS[name](rng)
        self.add("user", q)
        self.add("assistant", answer)

    def document(self, tokens):
        """One long message of facts among other sentences, then a question about it."""
        rng = self.rng
        lines, used = [], 0
        density = rng.choice((0.1, 0.25, 0.5, 0.9))
        kinds = rng.sample(KINDS, rng.choice((1, 2, 4, len(KINDS))))
        while used < tokens:
            r = rng.random()
            if r < density or not lines:
                able = [f for f in self.facts if f.kind.change]
                line = rng.choice(able).change(rng) if able and rng.random() < 0.12 else self.new_fact(rng.choice(kinds)).tell(rng)
            elif r < density + (1 - density) * 0.3:
                line = story(rng, self.names, short=True)[0] if rng.random() < 0.8 else sentence(rng)
            else:
                line = sentence(rng)
            lines.append(line)
            used += self.count(line) + 1
        text = rng.choice([" ", " ", "\n"]).join(lines)
        q, ans = self.question()
        lead = rng.choice(["", "", "Read this text.\n\n", "Text:\n", "Here are my notes:\n", "Read the following and answer the question.\n\n", "Here is some text. ", "Context:\n"])
        if rng.random() < 0.2:
            self.add("user", f"{q}\n\n{text}")
        elif rng.random() < 0.85:
            self.add("user", lead + text + rng.choice(["\n\n", "\n\nQuestion: ", "\n", " "]) + q)
        else:
            self.add("user", lead + text)
            ans = rng.choice(OKAY)
        self.add("assistant", ans)

    def quiz(self):
        """Facts first, some of them changed, then much that has nothing to do with them, then one question after another about them."""
        rng = self.rng
        kind = rng.choice(KINDS)
        early = [self.new_fact(kind if rng.random() < 0.5 else None, rng.random() < 0.15) for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8)))]
        at = 0
        while at < len(early):
            n = rng.choice((1, 2, 3, 5, 8))
            self.add("user", " ".join(f.tell(rng) for f in early[at : at + n]))
            self.add("assistant", rng.choice(OKAY))
            at += n
        for f in early:
            if f.kind.change and rng.random() < 0.2:
                self.add("user", f.change(rng))
                self.add("assistant", rng.choice(OKAY))
        stop = self.budget * rng.uniform(0.3, 0.75)
        while stop - self.used > 20:
            r, left = rng.random(), stop - self.used
            if r < 0.25 and len(self.facts) < self.budget / 30:
                self.add("user", " ".join(self.new_fact(kind if rng.random() < 0.5 else None).tell(rng) for _ in range(rng.randint(1, 3))))
                self.add("assistant", rng.choice(OKAY))
            elif r < 0.55 and left > 180:
                self.tell_story()
            elif left > 180:
                self.filler(rng)
            else:
                self.task()
        while self.room(20):
            q, ans = self.unknown() if rng.random() < 0.05 else self.question(fact=rng.choice(early if rng.random() < 0.75 else self.facts))
            self.add("user", q)
            self.add("assistant", ans)

    def filler(self, rng):
        """A turn that has nothing to do with the facts told so far."""
        r = rng.random()
        if r < 0.35 and self.room(250):
            self.tell_story()
        elif r < 0.5 and self.room(150):
            self.add("user", rng.choice(["Here is some text. ", "Read this. ", ""]) + " ".join(sentence(rng) for _ in range(rng.randint(3, 12))))
            self.add("assistant", rng.choice(OKAY))
        else:
            self.task()


def story_prompt(rng, conversation):
    """What a person types to get a story, and what the story must then contain."""
    kind = rng.choice(ANIMALS + CREATURES + ["girl", "boy"])
    odd = rng.choice(OBJECTS) if rng.random() < 0.5 else invented(rng)
    lead = rng.choice(["Tell me a story about ", "Tell me a story about ", "Write a story about ", "Write a short story about ", "Tell me a short story about ", "I want a story about ", "Can you tell me a story about ", "Please write a story about ", "Give me a story about ", "tell me a story about ", "A story about ", "story about ", "Make up a story about ", "Tell a story about "])
    stop = "?" if lead.startswith("Can") else rng.choice([".", ".", "", "!", ", please."])
    r = rng.random()
    if r < 0.2:
        return rng.choice(["Tell me a story.", "Tell me a story", "Write a story.", "Once more, tell me a story.", "A story, please.", "Can you tell me a story?", "I want to hear a story.", "Tell me another story.", "tell me a story", "Write a short story.", "Story please", "Tell me a bedtime story.", "Another story, please.", "Do you know a story?", "Tell me something."]), {}
    if r < 0.55:
        return lead + a(kind) + stop, {"kind": kind}
    if r < 0.65:
        return lead + a(odd) + stop, {"kind": odd}
    if r < 0.8:
        name = next(n for n in conversation.names)
        female = name[1] if name[1] is not None else rng.random() < 0.5
        if kind in ("girl", "boy") or rng.random() < 0.5:
            kind = "girl" if female else "boy"
        elif kind in ("princess", "queen", "witch", "mermaid", "hen", "cow", "duck", "goose", "prince", "king"):
            kind = "fox"
        return lead + rng.choice([f"{a(kind)} named {name[0]}", f"{a(kind)} called {name[0]}", f"{name[0]} the {kind}"]) + stop, {"kind": kind, "hero": (name[0], female)}
    if r < 0.9:
        other = rng.choice([k for k in ANIMALS + CREATURES if k != kind])
        return lead + f"{a(kind)} and {a(other)}" + stop, {"kind": kind, "friend": other}
    thing = rng.choice(OBJECTS)
    return lead + rng.choice([f"{a(kind)} and {a(thing)}", f"{a(kind)} who finds {a(thing)}"]) + stop, {"kind": kind, "thing": thing}


def conversation(rng, budget, mode=None, count=None):
    """A conversation of about `budget` tokens. Modes: facts, tasks, mixed, document, sums, quiz."""
    mode = mode or rng.choices(["facts", "mixed", "document", "tasks"], (0.4, 0.25, 0.2, 0.15))[0]
    c = Conversation(rng, budget, count)
    c.system()
    if mode == "document":
        c.document(min(budget * rng.uniform(0.3, 0.85), budget - 150) if budget > 300 else budget * 0.5)
        while c.room():
            c.ask(rng.randint(2, 6))
            if rng.random() < 0.2:
                c.change()
        return c
    if mode == "sums":
        while c.room(30):
            c.task(rng.choice(["arithmetic", "arithmetic", "word_problem", "sort"]))
        return c
    if mode == "quiz":
        c.quiz()
        return c
    if mode == "facts" and budget > 700 and rng.random() < 0.5:  # all told first, much filler, then questions
        c.tell(rng.randint(3, 10))
        stop = budget * rng.uniform(0.4, 0.8)
        while c.used < stop and c.room(250):
            c.filler(rng)
        while c.room(40):
            c.ask()
        return c
    share = {"facts": (0.25, 0.09, 0.52, 0.14), "mixed": (0.16, 0.06, 0.33, 0.45), "tasks": (0.04, 0.01, 0.05, 0.9)}[mode]
    while c.room(40):
        turn = rng.choices(["tell", "change", "ask", "other"], share)[0]
        if turn == "ask" and c.facts:
            c.ask(rng.choice((1, 1, 2, 3, 5)))
        elif turn == "change" and c.facts:
            c.change()
        elif turn == "tell" and len(c.facts) < budget / 25:
            c.tell()
        elif turn == "other":
            c.filler(rng) if mode != "tasks" or rng.random() < 0.25 else c.task()
        elif c.stories and rng.random() < 0.5:
            q, ans = c.story_question()
            c.add("user", q)
            c.add("assistant", ans)
    return c


def retrieval(rng, distance, count=None):
    """One question whose fact was told about `distance` tokens earlier, among other keys; in a third of cases after a change."""
    c = Conversation(rng, 10**6, count)
    kind = rng.choice(KINDS)
    c.system() if rng.random() < 0.5 else None
    others = rng.randint(0, 4)
    update = kind.change and rng.random() < 0.33
    before = [c.new_fact(kind if rng.random() < 0.5 else None) for _ in range(rng.randint(0, others))]
    target = c.new_fact(kind if rng.random() < 0.8 else rng.choice(SELF))
    after = [c.new_fact(kind if rng.random() < 0.5 else None) for _ in range(others - len(before))]
    lines = [f.tell(rng) for f in before + [target] + after]
    update = bool(update and target.kind.change)
    c.add("user", " ".join(lines))
    c.add("assistant", rng.choice(OKAY))
    if update:
        c.add("user", target.change(rng))
        c.add("assistant", rng.choice(OKAY))
    start = c.used
    c.budget = start + distance
    while c.budget - c.used > 40:
        left = c.budget - c.used
        if left > 250 and rng.random() < 0.4:
            c.tell_story()
        elif left > 120 and rng.random() < 0.3:
            own = [f.new_fact(kind if rng.random() < 0.5 else None).tell(rng) for f in [c] * rng.randint(1, 3)]
            c.add("user", " ".join(own))
            c.add("assistant", rng.choice(OKAY))
        else:
            c.task(rng.choice(["copy", "sort", "list", "arithmetic", "json", "talk", "word_problem"]))
    c.add("user", casual(rng, target.say(rng, target.kind.ask)))
    return c, target, {"keys": others + 1, "update": update, "distance": c.used - start}


def example(rng, kind, distance=0, count=None):
    """One held-out item: messages, the answer and what it measures."""
    extra = {}
    if kind == "retrieval":
        c, fact, extra = retrieval(rng, distance, count)
        answer = fact.value
    elif kind in ("unknown", "yes_no", "story_question"):
        c = Conversation(rng, 10**6, count)
        if kind == "story_question":
            c.tell_story(by_user=rng.random() < 0.5)
            pass
        else:
            c.tell(rng.randint(2, 5))
        q, ans = c.unknown() if kind == "unknown" else c.story_question() if kind == "story_question" else c.yes_no(next((f for f in c.facts if not f.kind.name.startswith("my")), None) or c.new_and_tell())
        c.add("user", q)
        answer = strip(ans)
    elif kind == "conversation":
        c = conversation(rng, distance or 512, count=count)
        answer = None
    elif kind == "story":
        c = Conversation(rng, 10**6, count)
        ask, _ = story_prompt(rng, c)
        c.add("user", ask)
        answer = None
    else:
        c = Conversation(rng, 10**6, count)
        q, full, answer = arithmetic(rng, True) if kind == "arithmetic" else word_problem(rng) if kind == "word_problem" else TASKS[kind](rng)
        if answer is None and kind not in ("talk", "outside"):
            return example(rng, kind, distance, count)
        if answer is None:
            answer = full
        c.add("user", q)
    messages = [{"role": r, "content": strip(t)} for r, t, _ in c.messages]
    return {"messages": messages, "answer": answer, "kind": kind, "distance": extra.get("distance", 0), **extra}


KIND_NAMES = ["retrieval", "unknown", "yes_no", "story_question", "story", "conversation", *TASKS]


def new_and_tell(self):
    fact = self.new_fact(self.rng.choice(KINDS))
    self.add("user", fact.tell(self.rng))
    self.add("assistant", OKAY[0])
    return fact


Conversation.new_and_tell = new_and_tell


def counter(path=None):
    """Counts tokens with the exported tokenizer where there is one."""
    path = path or Path(__file__).resolve().parents[2] / "crates/folio/assets/demo/tokenizer.json"
    if not Path(path).exists():
        return None
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(path))
    return lambda text: len(tok.encode(text, add_special_tokens=False).ids)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kind", choices=KIND_NAMES, default="conversation")
    p.add_argument("--distance", type=int, default=0, help="tokens between fact and question (retrieval), or length (conversation)")
    p.add_argument("--n", type=int, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tokenizer", help="tokenizer.json to count with; default: the exported one")
    p.add_argument("--jsonl", action="store_true")
    a_ = p.parse_args()
    count = counter(a_.tokenizer)
    for i in range(a_.n):
        e = example(random.Random(f"held-out/{a_.seed}/{a_.kind}/{a_.distance}/{i}"), a_.kind, a_.distance, count)
        if a_.jsonl:
            print(json.dumps(e, ensure_ascii=False))
        else:
            print("\n".join(f"[{m['role']}] {m['content']}" for m in e["messages"]), f"\n=> {e['answer']}\n")


if __name__ == "__main__":
    main()
