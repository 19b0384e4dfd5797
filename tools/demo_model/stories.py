"""A template grammar for short stories in plain English, past tense, third person.

`story(rng, ...)` returns the text and the facts it states, so that questions about it can be asked. Every sentence is
written to stand after any other alternative of the sentence before it; pronouns agree because the hero's are slots.
"""

from words import ANIMALS, COLOURS, CREATURES, FOODS, JOBS, NAMES_F, NAMES_M, OBJECTS, PLACES_IN, PLACES_UNDER, SETTINGS, THINGS_ADJ, TRAITS, a, cap

PLOTS = {}


def plot(fn):
    PLOTS[fn.__name__] = fn
    return fn


class Hero:
    """A character: `kind` is a noun, `name` a name, and the pronouns follow."""

    def __init__(self, rng, kind, name, female):
        self.kind, self.name = kind, name
        self.they, self.them, self.their = ("she", "her", "her") if female else ("he", "him", "his")
        self.They, self.Their = cap(self.they), cap(self.their)


def opening(rng, s):
    h, f = s["h"], s["f"]
    place, trait = s["place"], s["trait"]
    being = {"girl": "girl", "boy": "boy"}.get(h.kind, h.kind)
    first = rng.choice([
        f"Once upon a time, there was {a(trait + ' ' + being)} named {h.name} who lived {place}.",
        f"Once upon a time, {a(trait + ' ' + being)} named {h.name} lived {place}.",
        f"There once was {a(trait + ' ' + being)} called {h.name}. {h.They} lived {place}.",
        f"{h.name} was {a(trait + ' ' + being)} who lived {place}.",
        f"Long ago, {place}, there lived {a(trait + ' ' + being)} named {h.name}.",
        f"{cap(place)}, there lived {a(being)} named {h.name}. {h.They} was very {trait}.",
    ])
    second = rng.choice([
        f" {h.They} had a good friend, {a(f.kind)} named {f.name}.",
        f" {h.Their} best friend was {a(f.kind)} named {f.name}.",
        f" Every day, {h.they} played with {h.their} friend {f.name}, who was {a(f.kind)}.",
        f" {h.They} liked to spend time with {f.name} the {f.kind}.",
        f" Next door lived {a(f.kind)} named {f.name}.",
    ])
    third = rng.choice(["", "", f" {h.name} liked {rng.choice(FOODS)} and long walks.", f" {h.They} loved to sing in the morning.",
        f" {h.They} had {a(rng.choice(COLOURS) + ' ' + rng.choice(['hat', 'scarf', 'coat', 'bag']))} and wore it every day.",
        f" Everyone there knew {h.name} and liked {h.them}.", f" The days were long and full of sun."])
    return first + second + third


def when(rng):
    return rng.choice(["One day,", "One morning,", "One sunny day,", "One evening,", "One cold morning,", "One afternoon,", "One rainy day,", "One quiet night,"])


def said(rng, who, line, verb=None):
    verb = verb or rng.choice(["said", "said", "said", "cried", "whispered", "called"])
    stop = line[-1]
    if stop == ".":
        return rng.choice([f'"{line[:-1]}," {verb} {who}.', f'{cap(who)} {verb}, "{line}"'])
    if stop == "?":
        return rng.choice([f'"{line}" asked {who}.', f'{cap(who)} asked, "{line}"'])
    return rng.choice([f'"{line}" {verb} {who}.', f'{cap(who)} {verb}, "{line}"'])


def ending(rng, s):
    h, f = s["h"], s["f"]
    return rng.choice([
        f"{h.name} and {f.name} were happy, and they stayed friends for the rest of their lives.",
        f"From that day on, {h.name} and {f.name} did everything together.",
        f"That night, {h.name} went to sleep with a smile.",
        f"{h.name} never forgot that day.",
        f"And {h.name} learned that it is good to be {rng.choice(['kind', 'brave', 'patient', 'honest'])}.",
        f"After that, {h.name} was never {rng.choice(['lonely', 'afraid', 'sad'])} again.",
        f"And they all lived happily ever after.",
        f"They went home, ate {rng.choice(FOODS)}, and laughed until it was dark.",
        f"{h.name} thanked {f.name}, and the two friends walked home together.",
        f"It was the best day of {h.their} life.",
    ])


@plot
def lost(rng, s):
    h, f, o, where = s["h"], s["f"], s["object"], s["where"]
    return [
        rng.choice([f"{when(rng)} {h.name} could not find {h.their} {o}.", f"{when(rng)} {h.name} lost {h.their} {o}.", f"{when(rng)} {h.name} woke up and saw that {h.their} {o} was gone."]),
        rng.choice([f"{h.They} looked in every corner of the house, but the {o} was not there.", f"{h.They} looked here and there, but {h.they} did not see it.", f"{h.They} was so sad that {h.they} began to cry."]),
        rng.choice([said(rng, f.name, "Do not worry. I will help you."), said(rng, f.name, f"What is wrong, {h.name}?") + " " + said(rng, h.name, f"I lost my {o}."), f"{f.name} saw this and wanted to help."]),
        rng.choice([f"They looked for a long time.", f"Together they looked all day.", f"The two friends searched and searched."]),
        rng.choice([f"At last, {f.name} found the {o} {where}.", f"Then {f.name} looked {where}, and there it was!", f"In the end, they found the {o} {where}."]),
        rng.choice([said(rng, h.name, "Thank you so much!"), f"{h.name} was so happy that {h.they} jumped for joy.", f"{h.name} gave {f.name} a big hug."]),
    ]


@plot
def treasure(rng, s):
    h, f, o, where = s["h"], s["f"], s["object"], s["where"]
    return [
        rng.choice([f"{when(rng)} {h.name} found an old map.", f"{when(rng)} {f.name} came with an old map.", f"{when(rng)} an old map fell out of a book."]),
        rng.choice(["The map showed a way through the hills.", "There was a red cross on the map.", "The map was torn, but they could still read it."]),
        rng.choice([said(rng, h.name, "Let us go and find the treasure!"), said(rng, f.name, "Where does it lead?") + " " + said(rng, h.name, "We will see."), f"{h.name} and {f.name} packed some {rng.choice(FOODS)} and left at once."]),
        rng.choice(["They walked over a bridge and through a field.", "They walked for three days and slept under the stars.", "The way was long, and the wind was cold.", "They crossed a river and climbed a hill."]),
        rng.choice([f"At the end of the way, {h.they} looked {where} and found {a(s['adj'] + ' ' + o)}.", f"At last they found {a(s['adj'] + ' ' + o)} {where}.", f"There, {where}, was {a(s['adj'] + ' ' + o)}."]),
        rng.choice([f"{h.name} held it up, and it shone in the light.", f"It was more beautiful than gold.", said(rng, f.name, "This is the best treasure of all!")]),
    ]


@plot
def storm(rng, s):
    h, f = s["h"], s["f"]
    return [
        rng.choice([f"{when(rng)} the sky turned dark, and a storm came.", f"{when(rng)} a strong wind began to blow.", f"{when(rng)} it began to rain, and it did not stop."]),
        rng.choice(["The thunder was loud, and the trees shook.", "The water in the river rose higher and higher.", "The wind broke the windows and took the roof away."]),
        rng.choice([f"{h.name} was afraid, but {h.they} did not run away.", f"{f.name} was afraid and hid under a table.", said(rng, f.name, "I am so afraid!")]),
        rng.choice([said(rng, h.name, "Come with me. I know a safe place."), f"{h.name} took {f.name} by the hand and ran to a cave.", f"{h.name} lit a lamp and told {f.name} to be brave."]),
        rng.choice(["They waited until the storm was over.", "They sat close together and sang songs all night.", "They told each other stories until the morning came."]),
        rng.choice(["In the morning, the sun came out, and everything was quiet.", "When the rain stopped, a rainbow stood in the sky.", "The next day, everyone helped to mend what was broken."]),
    ]


@plot
def baking(rng, s):
    h, f = s["h"], s["f"]
    food = rng.choice(["cake", "bread", "soup", "pie", "pizza", "porridge"])
    return [
        f"{when(rng)} {h.name} wanted to make {rng.choice(['some', 'a lot of'])} {food} for {f.name}." if food in ("bread", "soup", "porridge") else f"{when(rng)} {h.name} wanted to make a {food} for {f.name}.",
        rng.choice([f"It was {f.name}'s birthday.", f"{f.name} was ill and had to stay in bed.", f"{h.They} had never made one before." if food in ("cake", "pie", "pizza") else f"{h.They} had never made it before."]),
        rng.choice(["But there was no milk in the house.", "But there were no eggs left.", "But the fire would not burn."]),
        rng.choice([f"So {h.name} went to the market and asked the {rng.choice(JOBS)} for help.", f"So {h.they} asked the neighbours, and each of them gave a little.", f"{h.They} thought for a while and had an idea."]),
        rng.choice([f"Soon the whole house smelled of {food}.", f"In the afternoon, the {food} was ready.", f"{h.They} worked all day, and in the evening the {food} was ready."]),
        rng.choice([said(rng, f.name, f"This is the best {food} in the world!"), f"{f.name} ate it all and asked for more.", f"{f.name} was so happy that {f.they} could not speak."]),
    ]


@plot
def learning(rng, s):
    h, f = s["h"], s["f"]
    skill, past = rng.choice([("swim", "swam"), ("fly a kite", "flew a kite"), ("ride a bike", "rode a bike"), ("paint", "painted"), ("dance", "danced"), ("sing", "sang"), ("read", "read"), ("skate", "skated"), ("climb trees", "climbed trees"), ("play the drum", "played the drum"), ("juggle", "juggled")])
    return [
        rng.choice([f"{h.name} wanted to learn how to {skill}.", f"More than anything, {h.name} wanted to {skill}.", f"All the others could {skill}, but {h.name} could not."]),
        rng.choice([f"{when(rng)} {h.they} tried it for the first time, but it went wrong.", f"{when(rng)} {h.they} tried and failed.", f"{when(rng)} {h.they} tried three times, and three times {h.they} failed."]),
        rng.choice([said(rng, h.name, "I will never learn it."), f"{h.name} sat down and was sad.", f"Some of the others laughed at {h.them}."]),
        rng.choice([said(rng, f.name, "Try again. I will show you how."), f"But {f.name} did not laugh. {f.They} showed {h.them} how to do it.", said(rng, f.name, "It takes time. Do not give up.")]),
        rng.choice([f"{h.name} tried again every day.", f"Day after day, {h.they} practised with {f.name}.", f"Slowly, it became easier."]),
        rng.choice([f"In the end, {h.name} {past} better than anyone.", f"One week later, {h.name} {past} all day long.", f"And then, one morning, {h.name} {past}, and everyone cheered."]),
    ]


@plot
def rescue(rng, s):
    h, f = s["h"], s["f"]
    hurt = rng.choice([x for x in ("bird", "mouse", "rabbit", "deer", "kitten", "fox", "owl", "puppy", "hedgehog") if x not in (h.kind, f.kind)])
    return [
        rng.choice([f"{when(rng)} {h.name} heard a small voice.", f"{when(rng)} {h.name} was walking home when {h.they} heard a cry.", f"{when(rng)} {h.name} and {f.name} heard someone call for help."]),
        rng.choice([f"It was a little {hurt} with a broken leg.", f"A little {hurt} had fallen into a hole.", f"A young {hurt} was caught in a net."]),
        rng.choice([said(rng, f"the {hurt}", "Please help me!"), f"The {hurt} was cold and afraid.", f"The {hurt} could not move."]),
        rng.choice([f"{h.name} did not wait. {h.They} ran to get {rng.choice(['a rope', 'a blanket', 'some water'])}.", said(rng, h.name, "We must do something."), f"{h.name} asked {f.name} to come, and together they set the {hurt} free."]),
        rng.choice([f"They took the {hurt} home and gave it {rng.choice(['warm milk', 'bread and water', 'a soft bed'])}.", f"For a week, they cared for the {hurt} every day.", f"{h.name} sat with the {hurt} all night."]),
        rng.choice([f"Soon the {hurt} was well again and thanked them both.", f"When spring came, the {hurt} could run and play again.", f"The {hurt} became their friend and came to see them every year."]),
    ]


@plot
def contest(rng, s):
    h, f = s["h"], s["f"]
    kind = rng.choice(["race", "singing contest", "cooking contest", "chess game", "dancing contest", "boat race"])
    return [
        rng.choice([f"{when(rng)} there was a {kind} in the town.", f"{when(rng)} the king called everyone to a great {kind}.", f"{when(rng)} {f.name} told {h.name} about a {kind}."]),
        rng.choice([f"The winner would get {a(s['adj'] + ' ' + s['object'])}.", f"The prize was {a(s['adj'] + ' ' + s['object'])}."]),
        rng.choice([said(rng, h.name, "I am too slow to win."), f"{h.name} had never won anything, but {h.they} wanted to try.", f"{h.name} and {f.name} both wanted to win."]),
        rng.choice([f"When the {kind} began, {h.name} was the last of all.", f"At first, everything went well.", f"Many came from far away to see it."]),
        rng.choice([f"Then {f.name} fell, and {h.name} stopped to help {f.them} up.", f"But {h.name} did not give up.", f"{h.name} thought of {h.their} friend and did {h.their} best."]),
        rng.choice([f"In the end, {h.name} won the {s['object']}, and everyone was surprised.", f"{h.name} did not win, but everyone said that {h.they} had the biggest heart.", f"In the end, {h.name} won, and {h.they} shared the prize with {f.name}."]),
    ]


@plot
def garden(rng, s):
    h, f = s["h"], s["f"]
    plant = rng.choice(["tree", "flower", "rose", "pumpkin", "sunflower", "apple tree", "bean"])
    return [
        rng.choice([f"{when(rng)} {h.name} found a small seed {s['where']}.", f"{when(rng)} {f.name} gave {h.name} a small seed.", f"{when(rng)} an old woman gave {h.name} a seed."]),
        rng.choice([f"{h.They} put it in the ground and gave it water every day.", f"{h.They} planted it in the garden, where the sun was warm.", f"{h.They} planted it next to the house."]),
        rng.choice([f"For a long time, nothing happened.", f"Days went by, but nothing came up.", said(rng, f.name, "Nothing will ever grow there.")]),
        rng.choice([f"But {h.name} was patient and waited.", said(rng, h.name, "I will wait."), f"{h.name} sang to the seed every evening."]),
        rng.choice([f"Then, one morning, there was something green.", f"Then a little green leaf came out of the ground.", f"One day, after the rain, it began to grow."]),
        rng.choice([f"By the summer, it was the most beautiful {plant} that anyone had ever seen.", f"It grew into a {plant} that was taller than the house.", f"It became a wonderful {plant}, and {h.name} shared it with everyone."]),
    ]


@plot
def secret(rng, s):
    h, f = s["h"], s["f"]
    behind = rng.choice(["a garden full of flowers", "a room full of books", "a small lake", "a hall full of mirrors", "a house made of glass", "a sleeping giant"])
    return [
        rng.choice([f"{when(rng)} {h.name} saw a little door {s['where']}.", f"{when(rng)} {f.name} showed {h.name} a secret door.", f"{when(rng)} {h.name} found a door that had not been there before."]),
        rng.choice([f"The door was locked, and there was no key.", f"It was small and {rng.choice(COLOURS)}.", f"There was a light behind it."]),
        rng.choice([said(rng, f.name, "Should we open it?") + " " + said(rng, h.name, "Yes!", "said"), f"{h.name} wanted to know what was behind it.", f"{f.name} was afraid, but {h.name} was not."]),
        rng.choice([f"With {a(s['adj'] + ' ' + s['object'])}, {h.name} opened the door.", f"{h.name} pushed as hard as {h.they} could, and the door opened."]),
        rng.choice([f"Behind it was {behind}.", f"On the other side, they saw {behind}."]),
        rng.choice([f"They stayed there until the evening and told no one about it.", f"It was their secret, and they came back every week.", said(rng, f.name, "This will be our secret.")]),
    ]


@plot
def shy(rng, s):
    h, f = s["h"], s["f"]
    fear = rng.choice(["the dark", "water", "loud noises", "high places", "the wind", "strangers", "thunder", "fire"])
    return [
        rng.choice([f"But {h.name} had a problem. {h.They} was afraid of {fear}.", f"{h.name} was afraid of {fear}, and nobody knew it."]),
        rng.choice([f"{when(rng)} {f.name} asked {h.them} to come on a trip, but {h.name} said no.", f"{when(rng)} the others went out to play, but {h.name} stayed at home."]),
        rng.choice([said(rng, f.name, "Why do you not come with us?"), f"{f.name} saw that something was wrong.", said(rng, f.name, "You can tell me everything.")]),
        rng.choice([said(rng, h.name, f"I am afraid of {fear}."), f"At last, {h.name} told {f.them} the truth."]),
        rng.choice([said(rng, f.name, "Everyone is afraid of something. I will stay with you."), f"{f.name} did not laugh. {f.They} held {h.their} hand.", f"{f.name} gave {h.them} {a(s['adj'] + ' ' + s['object'])} to make {h.them} strong."]),
        rng.choice([f"Step by step, {h.name} became brave.", f"The next time, {h.name} was not afraid at all.", f"With a friend at {h.their} side, it was not so bad."]),
    ]


@plot
def sharing(rng, s):
    h, f = s["h"], s["f"]
    food = rng.choice(FOODS)
    return [
        rng.choice([f"{when(rng)} {h.name} had a basket full of {food}.", f"{when(rng)} {h.name} found a box of {food} {s['where']}.", f"{when(rng)} {h.name} bought some {food} at the market."]),
        rng.choice([f"{h.They} wanted to eat everything alone.", f"{h.They} sat down under a tree to eat.", f"It smelled very good."]),
        rng.choice([f"Then {f.name} came by. {f.They} had nothing to eat.", f"Then {f.name} came. {f.They} was very hungry.", said(rng, f.name, "I have not eaten since yesterday.")]),
        rng.choice([f"At first, {h.name} hid the {food} behind {h.their} back.", f"{h.name} thought about it for a while.", f"{h.name} looked at the {food} and then at {f.name}."]),
        rng.choice([said(rng, h.name, "Come and eat with me. There is enough for two."), f"Then {h.they} gave {f.name} half of it.", f"Then {h.they} smiled and shared it all."]),
        rng.choice([f"It tasted better than ever, because they ate it together.", f"The next day, {f.name} came back with {a(s['adj'] + ' ' + s['object'])} for {h.name}.", said(rng, f.name, "You are a true friend.")]),
    ]


@plot
def journey(rng, s):
    h, f = s["h"], s["f"]
    goal = rng.choice(["the moon", "the sea", "the end of the rainbow", "the highest mountain", "the big city", "the island in the lake", "the stars"])
    by = rng.choice(["a boat", "a balloon", "a small plane", "an old train", "a rocket", "a wagon"])
    return [
        rng.choice([f"{h.name} had a dream. {h.They} wanted to see {goal}.", f"Every night, {h.name} dreamed of {goal}."]),
        rng.choice([f"{when(rng)} {h.they} and {f.name} built {by}.", f"{when(rng)} {f.name} came with {by}.", f"{when(rng)} they found {by} {s['where']}." if by != "an old train" else f"{when(rng)} {f.name} found {by}."]),
        rng.choice([said(rng, f.name, "Are you ready?") + " " + said(rng, h.name, "I am ready!", "said"), f"They took bread, water and {a(s['object'])} with them.", "Everyone came to say goodbye."]),
        rng.choice(["They travelled for many days.", "On the way, they met a singing bird and a sleepy bear.", "The way was long, but they told each other jokes.", "At night it was cold, and they sat close together."]),
        rng.choice([f"When they came to {goal}, they could not believe their eyes.", f"And then they saw {goal}.", f"At last they reached {goal}."]),
        rng.choice([f"It was even more beautiful than in {h.name}'s dream.", said(rng, h.name, "Now I know that dreams can come true."), f"They stayed for a week and then went home with many stories to tell."]),
    ]


@plot
def broken(rng, s):
    h, f, o = s["h"], s["f"], s["object"]
    return [
        rng.choice([f"{when(rng)} {h.name} broke {f.name}'s {o}.", f"{when(rng)} {h.name} played with {f.name}'s {o} and broke it."]),
        rng.choice([f"{h.They} hid it {s['where']} and said nothing.", f"{h.They} did not know what to do.", f"{h.They} was afraid that {f.name} would be angry."]),
        rng.choice([f"The next day, {f.name} looked for the {o}.", said(rng, f.name, f"Have you seen my {o}?"), f"{f.name} was sad because the {o} was gone."]),
        rng.choice([f"{h.name} felt bad. {h.They} could not sleep that night.", f"{h.name} could not eat, and {h.they} could not play."]),
        rng.choice([said(rng, h.name, f"I broke your {o}. I am sorry."), f"In the end, {h.name} told {f.name} the truth."]),
        rng.choice([said(rng, f.name, "Thank you for telling me. We can mend it together."), f"{f.name} was not angry. Together they mended the {o}.", f"{f.name} forgave {h.them}, and they made a new {o} together."]),
    ]


@plot
def wish(rng, s):
    h, f = s["h"], s["f"]
    return [
        rng.choice([f"{when(rng)} {h.name} found {a(s['adj'] + ' ' + s['object'])} {s['where']}.", f"{when(rng)} an old man gave {h.name} {a(s['adj'] + ' ' + s['object'])}."]),
        rng.choice([f"When {h.they} touched it, a voice spoke.", f"It began to glow in {h.their} hands."]),
        rng.choice([said(rng, "the voice", "You have one wish."), said(rng, "the voice", "Tell me your wish, and it will come true.")]),
        rng.choice([f"{h.name} could wish for gold, or for a castle.", f"{h.name} thought about it all day and all night.", f"{h.name} asked {f.name} what to do."]),
        rng.choice([f"But {h.name} only wished that {f.name} would be happy.", f"In the end, {h.they} wished for rain, because the fields were dry.", f"{h.They} wished for food for everyone in the land."]),
        rng.choice(["And so it was.", "The wish came true at once.", "The next morning, the wish came true, and there was a great feast."]),
    ]


def where_phrase(rng):
    return rng.choice([f"in the {rng.choice(PLACES_IN)}", f"under the {rng.choice(PLACES_UNDER)}", f"behind the {rng.choice(['tree', 'house', 'door', 'barn', 'wall', 'mill', 'church'])}", f"under {a(rng.choice(['old tree', 'stone', 'big rock', 'bridge', 'bush']))}", f"near the {rng.choice(['river', 'lake', 'well', 'gate', 'bridge', 'sea'])}"])


SHE = ("girl", "princess", "queen", "witch", "mermaid", "woman", "hen", "cow", "grandmother", "duck", "goose")
HE = ("boy", "prince", "king", "man", "grandfather")


def named(names, kind):
    """The next name that suits the kind."""
    for name, female in names:
        if female is None or kind not in SHE + HE or female == (kind in SHE):
            return name, kind in SHE if kind in SHE + HE else bool(female)
    raise ValueError("out of names")


def story(rng, names=None, kind=None, hero=None, thing=None, place=None, friend=None, short=False):
    """Text and facts. `names` yields unused names as (name, female); the rest fixes what the prompt asked for."""
    if names is None:
        pool = [(n, True) for n in NAMES_F] + [(n, False) for n in NAMES_M]
        rng.shuffle(pool)
        names = iter(pool)
    kinds = ANIMALS + CREATURES
    if kind is None:
        kind = rng.choice(kinds) if rng.random() < 0.65 else rng.choice(["girl", "boy"])
    fkind = friend or rng.choice([k for k in kinds if k != kind])
    hn = hero or named(names, kind)
    fn = named(names, fkind)
    s = {
        "h": Hero(rng, kind, *hn), "f": Hero(rng, fkind, *fn), "place": place or rng.choice(SETTINGS), "trait": rng.choice(TRAITS),
        "object": thing or rng.choice(OBJECTS), "adj": rng.choice(THINGS_ADJ), "where": where_phrase(rng),
    }
    name = rng.choice(["lost", "treasure", "wish", "broken", "contest"]) if thing else rng.choice(list(PLOTS))
    beats = PLOTS[name](rng, s)
    if short:
        beats = beats[:1] + beats[-2:] if name not in ("lost", "treasure", "shy") else beats[:1] + beats[-3:]
    first = opening(rng, s)
    last = ending(rng, s)
    if short or rng.random() < 0.5:
        text = " ".join([first] + beats + [last])
    else:
        cut = rng.randint(2, 4)
        text = "\n\n".join([first, " ".join(beats[:cut]), " ".join(beats[cut:] + [last])])
    facts = {"hero": s["h"].name, "kind": kind, "friend": s["f"].name, "friend_kind": fkind, "place": s["place"]}
    if name in ("lost", "treasure") and not short:
        facts["object"], facts["where"] = s["object"], s["where"]
    return text, facts


if __name__ == "__main__":
    import random
    import sys

    r = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for _ in range(5):
        print(story(r)[0], "\n----")
