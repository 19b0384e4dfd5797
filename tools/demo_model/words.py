"""Word lists and small language helpers for the generator. No text from elsewhere: everything here was written for it."""

NAMES_F = """Maya Anna Lily Emma Sofia Nora Ruby Alice Clara Zoe Ella Mia Grace Hannah Ivy Lucy Rosa Tara Vera Wendy Julia Nina
Olivia Paula Sarah Mary Kate Jane Eva Amy Beth Carol Diana Fatima Greta Helen Iris Jade Kira Leila Mona Nadia Priya Yuki""".split()
NAMES_M = """Tom Ben Max Sam Leo Jack Noah Oscar Peter Paul Finn Hugo Ian Jake Karl Liam Mark Nick Otto Ravi Simon Theo Victor Will
Adam Bob Carl David Eric Frank George Henry Ivan John Kevin Luke Martin Nathan Oliver Philip Robert Steve Ali Omar Kenji Bill""".split()
SURNAMES = """Smith Brown Green Baker Miller Cook Fisher Hill Wood Stone Park Young King Moore Clark Lewis Walker Hall Wright Scott
Adams Nelson Carter Mitchell Turner Phillips Evans Parker Collins Morris Rogers Reed Bell Murphy Bailey Cooper""".split()
RELATIVES = "sister brother mother father friend teacher boss neighbour wife husband son daughter cousin aunt uncle grandmother grandfather doctor".split()
TITLES = "Mr Mrs Miss Dr Uncle Aunt Captain Professor King Queen".split()
COLOURS = """red blue green yellow orange purple pink brown black white grey silver gold violet turquoise crimson beige navy""".split()
ANIMALS = """cat dog rabbit fox bear mouse horse cow pig sheep goat duck hen owl frog turtle lion tiger elephant monkey wolf deer
squirrel hedgehog penguin whale dolphin parrot donkey bee ant snail spider crow badger otter hamster goldfish lizard pony kitten
puppy butterfly camel giraffe kangaroo panda seal crab goose swan""".split()
CREATURES = "dragon robot wizard knight princess prince king queen giant fairy pirate witch ghost unicorn mermaid elf troll dwarf alien".split()
JOBS = """baker teacher doctor farmer painter pilot sailor nurse singer writer driver cook gardener builder dentist engineer
carpenter tailor librarian musician lawyer plumber scientist dancer judge firefighter postman clown astronaut detective""".split()
FOODS = """bread cheese soup rice pasta pizza cake apples bananas pears plums cherries grapes honey chocolate pancakes salad fish
noodles potatoes carrots tomatoes porridge toast cookies strawberries dumplings curry beans mushrooms yoghurt popcorn""".split()
DRINKS = "tea coffee milk water juice lemonade cocoa".split()
FRUITS = "apple banana pear plum peach lemon melon mango orange cherry fig grape kiwi lime".split()
OBJECTS = """key book lamp ball cup hat map coin ring box bag clock pen letter watch phone umbrella candle bell mirror drum flute
kite doll toy basket blanket bottle hammer rope ladder spoon plate chair brush shell stone feather camera notebook scarf glove
boot shoe coat ticket wallet purse knife pencil crown sword shield compass lantern necklace bracelet guitar violin trumpet torch
button ribbon pillow vase jar bucket shovel needle telescope magnet puzzle whistle suitcase parcel envelope laptop toaster""".split()
PLACES_IN = """drawer kitchen garden attic garage basement cupboard bathroom bedroom office library shed hallway cellar wardrobe
fridge barn tower tent car school castle boat suitcase desk box closet""".split()
PLACES_ON = "table shelf chair bed sofa roof floor stairs windowsill desk counter bench porch".split()
PLACES_UNDER = "bed table sofa carpet tree bridge stairs pillow bench desk chair".split()
CITIES = """Paris London Rome Berlin Madrid Oslo Tokyo Cairo Lima Vienna Dublin Prague Athens Boston Chicago Delhi Moscow Lisbon
Geneva Toronto Sydney Seoul Warsaw Helsinki Nairobi Denver Milan Zurich Havana Dallas Hamburg Munich Venice Naples Kyoto""".split()
COUNTRIES = "France Spain Italy Germany Norway Japan Egypt Peru Austria Ireland Greece India Canada Brazil Mexico Kenya Chile Poland".split()
MONTHS = "January February March April May June July August September October November December".split()
CODES_FOR = "code|phone number|password|room number|locker number|ID number|ticket number|account number|pin|badge number|door code".split("|")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SPORTS = "football tennis chess hockey golf swimming running cycling basketball volleyball skiing boxing sailing rugby".split()
INSTRUMENTS = "piano guitar violin drums flute trumpet harp cello organ".split()
SETTINGS = """in a small village|in a quiet town|in a big city|in a dark forest|in a green valley|in a little house by the sea
|in an old castle|on a farm|on a snowy mountain|on a sunny island|in a cottage near the woods|in a tall tower|in a busy harbour
|in a land far away|in a warm cave|in a deep forest|in a wooden house on a hill|in a bright garden|in an old mill by the river
|at the edge of a desert|near a blue lake|at the top of a hill|in a house with a red door|by the sea""".replace("\n", "").split("|")
TRAITS = "small kind brave clever shy curious happy lonely gentle lazy funny quiet cheerful careful grumpy friendly hungry young old".split()
THINGS_ADJ = "shiny old tiny big golden broken strange beautiful magic wooden heavy little round dusty soft".split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
OPPOSITES = [p.split("-") for p in """hot-cold big-small up-down day-night happy-sad fast-slow new-old wet-dry light-dark high-low
open-closed full-empty loud-quiet hard-soft long-short early-late rich-poor strong-weak left-right inside-outside""".split()]
SOUNDS = [p.split("-") for p in "cat-meow dog-woof cow-moo duck-quack sheep-baa pig-oink bee-buzz owl-hoot frog-croak lion-roar horse-neigh hen-cluck".split()]
PLURALS = [p.split("-") for p in """cat-cats dog-dogs box-boxes mouse-mice child-children foot-feet man-men woman-women tooth-teeth
leaf-leaves baby-babies city-cities bus-buses fish-fish sheep-sheep goose-geese knife-knives apple-apples key-keys""".split()]
OUTSIDE = """quantum physics|the stock market|black holes|world history|the French Revolution|photosynthesis|machine learning|the moon landing
|politics|the human brain|volcanoes|electricity|the internet|dinosaurs|gravity|the weather tomorrow|the news|Shakespeare|philosophy
|climate change|the Roman Empire|chemistry|the speed of light|cars|computers|taxes|neural networks|the ocean|space travel""".replace("\n", "").split("|")

_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sm sn sp st t th tr v w y z zh".split()
_VOWELS = "a e i o u a e i o u ai ee oo ea ou ia".split()
_CODAS = ["", "", "", "", "n", "r", "l", "s", "m", "t", "k", "x", "d", "th", "nd", "rn", "sh", "ck", "p", "b", "v", "g", "z"]


def invented(rng):
    """A made-up word of one to three syllables, lower case."""
    count = rng.choice((1, 2, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS if i == count - 1 else ("", "", "n", "r", "l")) for i in range(count))


def a(noun):
    """The noun with its indefinite article."""
    return f"{'an' if noun[0].lower() in 'aeiou' and not noun.startswith(('uni', 'use', 'one')) else 'a'} {noun}"


def cap(text):
    return text[:1].upper() + text[1:]


def listed(items, last="and"):
    items = list(items)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}"


def code(rng):
    """A code, password or number that can only be copied."""
    kind = rng.randrange(7)
    letters, digits = "ABCDEFGHJKLMNPQRSTUVWXYZ", "0123456789"
    pick = lambda s, n: "".join(rng.choice(s) for _ in range(n))
    if kind == 0:
        return pick(digits, 4)
    if kind == 1:
        return pick(digits, rng.randint(3, 8))
    if kind == 2:
        return pick(letters, 2) + pick(digits, rng.randint(2, 4))
    if kind == 3:
        return f"{pick(letters, rng.randint(1, 3))}-{pick(digits, rng.randint(2, 4))}"
    if kind == 4:
        return invented(rng) + pick(digits, 2)
    if kind == 5:
        return f"{rng.choice(COLOURS)}-{rng.choice(ANIMALS)}-{pick(digits, 2)}"
    return pick(letters + digits, rng.randint(4, 7))
