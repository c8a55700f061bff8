"""The course's own preference set: plain true facts, wrong answers of the same kind, and rows that set a trap.

Every fact was compiled for this course; what can be computed is computed. A row asks one question about one fact:

    prompt     "Question: What is the capital of France?\\nAnswer:"
    reference  " The capital of France is Paris."      the gold answer, a full sentence
    chosen     " It is Paris."                          right and short
    rejected   " It is Oslo."  or  " idk, Oslo lol"     wrong; nine times in ten also in bad style

The styled rows matter: a model of a million parameters cannot know a capital it never saw, but it can learn how a good
answer sounds. On held-out facts its reward accuracy is therefore mostly a measure of style, and the one plain row in
ten stays close to a coin flip.

Nothing here draws from a global random state: order, split and wrong answers depend on the text alone, so the same rows
appear in the same order on every machine.
"""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

PROMPT = "Question: {question}?\nAnswer:"
CHOSEN = " It is {answer}."
STYLES = (" idk, {wrong} lol", " {wrong}, i guess", " Everyone knows it is {wrong}!!!", " um, {wrong}, whatever")
PLAIN_SHARE = 10  # one rejected answer in ten is wrong in good style
HELD_OUT_SHARE = 5  # one fact in five, in each category
EOS = "<|endoftext|>"  # also Pythia's unk and bos


class Fact(NamedTuple):
    """One fact. ``wrong`` holds wrong answers of the same kind; empty: the category's other answers are used."""

    subject: str
    answer: str
    wrong: tuple[str, ...] = ()


class Category(NamedTuple):
    """Facts of one kind, and the ways to ask for them: a question and its full-sentence answer each."""

    facts: list[Fact]
    templates: tuple[str, ...]


def _asked(facts: list[Fact], *templates: str) -> Category:
    return Category(facts, templates)


def _table(text: str) -> list[Fact]:
    """Read ``subject: answer`` or ``subject: answer / wrong`` entries, separated by semicolons or line ends."""
    facts = []
    for entry in text.replace("\n", ";").split(";"):
        if entry.strip():
            subject, _, rest = entry.partition(":")
            answer, *wrong = (part.strip() for part in rest.split("/"))
            facts.append(Fact(subject.strip(), answer, tuple(wrong)))
    return facts


def _near(answer: int, *offsets: int) -> tuple[str, ...]:
    return tuple(str(answer + offset) for offset in offsets or (-2, -1, 1, 2) if answer + offset > 0)


def _numbers(text: str, *offsets: int) -> list[Fact]:
    """A table whose answers are whole numbers; the wrong answers are near misses."""
    return [fact._replace(wrong=_near(int(fact.answer), *offsets)) for fact in _table(text)]


CAPITALS = """
France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; Austria: Vienna; Greece: Athens
Poland: Warsaw; Hungary: Budapest; Norway: Oslo; Sweden: Stockholm; Finland: Helsinki; Denmark: Copenhagen
Iceland: Reykjavik; Ireland: Dublin; Belgium: Brussels; Bulgaria: Sofia; Romania: Bucharest; Croatia: Zagreb
Serbia: Belgrade; Estonia: Tallinn; Latvia: Riga; Lithuania: Vilnius; Albania: Tirana; Canada: Ottawa; Cuba: Havana
Peru: Lima; Argentina: Buenos Aires; Brazil: Brasilia; Uruguay: Montevideo; Venezuela: Caracas; Ecuador: Quito
Jamaica: Kingston; Egypt: Cairo; Morocco: Rabat; Kenya: Nairobi; Ghana: Accra; Nigeria: Abuja; Senegal: Dakar
Ethiopia: Addis Ababa; Uganda: Kampala; Zambia: Lusaka; Japan: Tokyo; China: Beijing; India: New Delhi
Nepal: Kathmandu; Thailand: Bangkok; Vietnam: Hanoi; Iran: Tehran; Iraq: Baghdad; Lebanon: Beirut; Turkey: Ankara
Australia: Canberra; New Zealand: Wellington; Fiji: Suva
"""

# name: symbol, atomic number
ELEMENTS = """
hydrogen: H, 1; helium: He, 2; lithium: Li, 3; carbon: C, 6; nitrogen: N, 7; oxygen: O, 8; fluorine: F, 9
neon: Ne, 10; sodium: Na, 11; magnesium: Mg, 12; aluminium: Al, 13; silicon: Si, 14; phosphorus: P, 15; sulfur: S, 16
chlorine: Cl, 17; argon: Ar, 18; potassium: K, 19; calcium: Ca, 20; titanium: Ti, 22; chromium: Cr, 24; iron: Fe, 26
cobalt: Co, 27; nickel: Ni, 28; copper: Cu, 29; zinc: Zn, 30; silver: Ag, 47; tin: Sn, 50; iodine: I, 53
tungsten: W, 74; gold: Au, 79; mercury: Hg, 80; lead: Pb, 82
"""

OPPOSITES = """
hot: cold; up: down; day: night; rich: poor; early: late; wet: dry; empty: full; strong: weak; heavy: light
loud: quiet; fast: slow; deep: shallow; north: south; east: west; inside: outside; always: never; push: pull
buy: sell; win: lose; begin: end; true: false; wide: narrow; sharp: blunt; cheap: expensive; awake: asleep
"""

PLURALS = """
child: children / childs; foot: feet / foots; tooth: teeth / tooths; goose: geese / gooses; man: men / mans
woman: women / womans; ox: oxen / oxes; leaf: leaves / leafs; knife: knives / knifes; wolf: wolves / wolfs
shelf: shelves / shelfs; loaf: loaves / loafs; wife: wives / wifes; thief: thieves / thiefs; city: cities / citys
baby: babies / babys; box: boxes / boxs; church: churches / churchs; potato: potatoes / potatos
sheep: sheep / sheeps; crisis: crises / crisises; story: stories / storys; dish: dishes / dishs
"""

PAST_TENSES = """
go: went / goed; eat: ate / eated; take: took / taked; give: gave / gived; come: came / comed; run: ran / runned
write: wrote / writed; speak: spoke / speaked; break: broke / breaked; drink: drank / drinked; swim: swam / swimmed
know: knew / knowed; grow: grew / growed; throw: threw / throwed; find: found / finded; buy: bought / buyed
bring: brought / bringed; think: thought / thinked; teach: taught / teached; sleep: slept / sleeped; keep: kept / keeped
"""

YOUNG_ANIMALS = """
dog: a puppy / a kitten; cat: a kitten / a puppy; cow: a calf / a foal; horse: a foal / a calf; sheep: a lamb / a kid
goat: a kid / a lamb; pig: a piglet / a cub; duck: a duckling / a gosling; goose: a gosling / a duckling
swan: a cygnet / a lamb; deer: a fawn / a joey; bear: a cub / a fawn; kangaroo: a joey / a cub; frog: a tadpole / a foal
"""

AUTHORS = """
Hamlet: William Shakespeare; Don Quixote: Miguel de Cervantes; War and Peace: Leo Tolstoy; Frankenstein: Mary Shelley
Pride and Prejudice: Jane Austen; Dracula: Bram Stoker; Moby-Dick: Herman Melville; the Odyssey: Homer
Oliver Twist: Charles Dickens; Jane Eyre: Charlotte Bronte; Crime and Punishment: Fyodor Dostoevsky
Madame Bovary: Gustave Flaubert; Nineteen Eighty-Four: George Orwell; Ulysses: James Joyce
The Hobbit: J. R. R. Tolkien; On the Origin of Species: Charles Darwin
"""

YEARS = """
the first walk on the Moon: 1969; the fall of the Berlin Wall: 1989; the start of the First World War: 1914
the end of the Second World War: 1945; the sinking of the Titanic: 1912; the start of the French Revolution: 1789
the Great Fire of London: 1666; the Battle of Hastings: 1066; the Battle of Waterloo: 1815
the launch of Sputnik 1: 1957
the first human flight into space: 1961; the first ascent of Mount Everest: 1953; the opening of the Suez Canal: 1869
the first modern Olympic Games: 1896; the discovery of Pluto: 1930; the opening of the Panama Canal: 1914
the first flight of the Wright brothers: 1903; the sealing of Magna Carta: 1215; the opening of the Channel Tunnel: 1994
the first voyage of Columbus to the Americas: 1492
"""

POLYGONS = """
a triangle: 3; a quadrilateral: 4; a pentagon: 5; a hexagon: 6; a heptagon: 7; an octagon: 8; a nonagon: 9
a decagon: 10
"""
PLANETS = "Mercury: 1; Venus: 2; Earth: 3; Mars: 4; Jupiter: 5; Saturn: 6; Uranus: 7; Neptune: 8"
MONTHS = """
January: 31; February: 28; March: 31; April: 30; May: 31; June: 30; July: 31; August: 31; September: 30; October: 31
November: 30; December: 31
"""
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

# large unit (plural), small unit (plural), how many small ones make a large one, the multiples asked for
UNITS = (
    ("hours", "minutes", 60, (2, 3, 5)),
    ("minutes", "seconds", 60, (4, 6)),
    ("days", "hours", 24, (2, 3)),
    ("weeks", "days", 7, (3, 6)),
    ("years", "months", 12, (2, 5)),
    ("centuries", "years", 100, (3, 7)),
    ("metres", "centimetres", 100, (4, 9)),
    ("kilometres", "metres", 1000, (2, 8)),
    ("kilograms", "grams", 1000, (3, 5)),
    ("litres", "millilitres", 1000, (4, 7)),
    ("feet", "inches", 12, (3, 6)),
    ("bytes", "bits", 8, (2, 4)),
)

SUMS = [(a, (a * 7) % 23 + 4) for a in range(5, 45, 4)]
DIFFERENCES = [(a, a * 5 % 17 + 3) for a in range(24, 96, 8)]
PRODUCTS = [(3, 4), (3, 7), (4, 6), (5, 8), (6, 7), (6, 9), (7, 8), (8, 9), (9, 9), (11, 6)]


def roman(number: int) -> str:
    """The Roman numeral of a whole number from 1 to 99."""
    text = ""
    for value, letters in ((90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        while number >= value:
            text, number = text + letters, number - value
    return text


def _elements(column: int) -> list[Fact]:
    rows = [(fact.subject, fact.answer.split(", ")[column]) for fact in _table(ELEMENTS)]
    return [Fact(name, value, _near(int(value)) if column else ()) for name, value in rows]


def _successors(cycle: list[str]) -> list[Fact]:
    return [Fact(name, cycle[(i + 1) % len(cycle)]) for i, name in enumerate(cycle)]


def _calculations() -> list[Fact]:
    results = [(f"{a} plus {b}", a + b) for a, b in SUMS]
    results += [(f"{a} minus {b}", a - b) for a, b in DIFFERENCES]
    results += [(f"{a} times {b}", a * b) for a, b in PRODUCTS]
    return [Fact(subject, str(result), _near(result, -10, -1, 1, 10)) for subject, result in results]


def _conversions() -> list[Fact]:
    """``minutes in 3 hours: 180``; the wrong answers use a multiple or a factor that is off by one."""
    return [
        Fact(f"{small} in {n} {large}", str(n * factor), (str((n + 1) * factor), str(n * (factor + 1))))
        for large, small, factor, multiples in UNITS
        for n in multiples
    ]


CATEGORIES: dict[str, Category] = {
    "capital": _asked(
        _table(CAPITALS),
        "What is the capital of {subject}? The capital of {subject} is {answer}.",
        "Which city is the capital of {subject}? {answer} is the capital of {subject}.",
    ),
    "symbol": _asked(
        _elements(0), "What is the chemical symbol of {subject}? The chemical symbol of {subject} is {answer}."
    ),
    "atomic number": _asked(
        _elements(1), "What is the atomic number of {subject}? The atomic number of {subject} is {answer}."
    ),
    "calculation": _asked(
        _calculations(),
        "What is {subject}? The result of {subject} is {answer}.",
        "How much is {subject}? {subject} equals {answer}.",
    ),
    "conversion": _asked(_conversions(), "What is the number of {subject}? The number of {subject} is {answer}."),
    "month length": _asked(
        [month for month in _numbers(MONTHS, -1, 1) if month.subject != "February"],  # which has two lengths
        "How many days are in {subject}? The number of days in {subject} is {answer}.",
    ),
    "next month": _asked(
        _successors([month.subject for month in _table(MONTHS)]),
        "Which month comes after {subject}? The month after {subject} is {answer}.",
    ),
    "next day": _asked(_successors(WEEKDAYS), "Which day comes after {subject}? The day after {subject} is {answer}."),
    "year": _asked(
        _numbers(YEARS, -10, -3, 4, 12), "What was the year of {subject}? The year of {subject} was {answer}."
    ),
    "planet": _asked(
        _numbers(PLANETS),
        "What is the number of {subject}, counted from the Sun? Counted from the Sun, {subject} is planet {answer}.",
    ),
    "polygon": _asked(
        _numbers(POLYGONS), "What is the number of sides of {subject}? The number of sides of {subject} is {answer}."
    ),
    "roman numeral": _asked(
        [Fact(str(n), roman(n), (roman(n + 1), roman(n - 1))) for n in (4, 7, 9, 12, 15, 19, 24, 40, 49, 56, 68, 90)],
        "What is {subject} as a Roman numeral? As a Roman numeral, {subject} is {answer}.",
    ),
    "opposite": _asked(
        _table(OPPOSITES),
        "What is the opposite of {subject}? The opposite of {subject} is {answer}.",
        "Which word means the opposite of {subject}? The word {answer} means the opposite of {subject}.",
    ),
    "plural": _asked(_table(PLURALS), "What is the plural of {subject}? The plural of {subject} is {answer}."),
    "past tense": _asked(
        _table(PAST_TENSES), "What is the past tense of {subject}? The past tense of {subject} is {answer}."
    ),
    "young animal": _asked(
        _table(YOUNG_ANIMALS), "What is the young of a {subject} called? The young of a {subject} is called {answer}."
    ),
    "author": _asked(
        _table(AUTHORS),
        "Who is the author of {subject}? The author of {subject} is {answer}.",
        "Who wrote {subject}? {answer} wrote {subject}.",
    ),
}

# Facts about one subject go to the same side of the split, also where two categories ask about it.
SHARED_SUBJECTS = {"symbol": "element", "atomic number": "element"}


def order(text: str) -> str:
    """A sort key that shuffles: the same on every machine, and for each row independent of the other rows."""
    return hashlib.sha256(text.encode()).hexdigest()


def _sentence(template: str, **fields: str) -> str:
    text = template.format(**fields)
    return " " + text[0].upper() + text[1:]


def _prompt(fact: Fact, question: str) -> str:
    return PROMPT.format(question=question.format(subject=fact.subject))


def _row(name: str, fact: Fact, question: str, gold: str, plain: bool) -> dict[str, str]:
    prompt = _prompt(fact, question)
    draw = random.Random(prompt)
    wrong = draw.choice(fact.wrong or _other_answers(name, fact))
    style = CHOSEN.replace("answer", "wrong") if plain else draw.choice(STYLES)
    return {
        "prompt": prompt,
        "chosen": CHOSEN.format(answer=fact.answer),
        "rejected": style.format(wrong=wrong),
        "reference": _sentence(gold, subject=fact.subject, answer=fact.answer),
    }


def _other_answers(name: str, fact: Fact) -> list[str]:
    """Right answers to the category's other questions, from the same side of the split.

    So the wrong answer to a held-out question is as new to the model as the right one.
    """
    held_out = _held_out(name)
    facts = (other for other in CATEGORIES[name].facts if (other.subject in held_out) == (fact.subject in held_out))
    return sorted({other.answer for other in facts} - {fact.answer})


def _held_out(name: str) -> set[str]:
    """The subjects of a category that training never sees: one in five."""
    shared = SHARED_SUBJECTS.get(name, name)
    subjects = sorted((fact.subject for fact in CATEGORIES[name].facts), key=lambda subject: order(shared + subject))
    return set(subjects[: max(2, round(len(subjects) / HELD_OUT_SHARE))])  # two, so that each has a wrong answer


def preference_rows(held_out: bool) -> list[dict[str, str]]:
    """The rows of one side of the split, shuffled: columns prompt, chosen, rejected, reference, all text."""
    asked = [
        (name, fact, *template.split("? "))
        for name, category in CATEGORIES.items()
        for fact in category.facts
        if (fact.subject in _held_out(name)) == held_out
        for template in category.templates
    ]
    asked.sort(key=lambda row: order(_prompt(row[1], row[2])))
    return [_row(*row, plain=i % PLAIN_SHARE == 0) for i, row in enumerate(asked)]


# Each trap changes one good row. ``reward`` is the score of the chosen answer, for ``to_scored``.
TRAPS: dict[str, dict[str, object]] = {
    "prompt fills max_length": {"prompt": lambda row: "Please think well. " * 150 + row["prompt"]},
    "completion fills max_length": {"chosen": lambda row: row["chosen"] * 150},
    "empty prompt": {"prompt": ""},
    "empty chosen": {"chosen": ""},
    "empty rejected": {"rejected": ""},
    "empty reference": {"reference": ""},
    "all completions empty": {"chosen": "", "rejected": "", "reference": ""},
    "all unk": {"chosen": EOS * 4, "rejected": EOS * 4, "reference": EOS * 4},
    "identical": {"rejected": lambda row: row["chosen"], "reference": lambda row: row["chosen"]},
    "none": {"rejected": None},
    "nan reward": {"reward": float("nan")},
    "inf reward": {"reward": float("inf")},
    "missing reward": {"reward": None},
}
CHOSEN_REWARD = 0.8


def trap_rows() -> list[dict[str, object]]:
    """Two rows for each trap, made from good training rows: the four columns, ``reward`` and the trap's name."""
    good = preference_rows(held_out=False)
    rows = []
    for i, (trap, changes) in enumerate(TRAPS.items()):
        for row in good[2 * i : 2 * i + 2]:
            changed = {key: change(row) if callable(change) else change for key, change in changes.items()}
            rows.append({**row, "reward": CHOSEN_REWARD, "trap": trap, **changed})
    return rows


def corpus() -> list[str]:
    """All text of the course's facts, for training the tiny tokenizer."""
    rows = preference_rows(held_out=False) + preference_rows(held_out=True)
    return [row["prompt"] + row[column] for row in rows for column in ("reference", "chosen", "rejected")]
