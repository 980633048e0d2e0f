"""Ordinary questions with short honest answers: mixed into the demo's training rows, and asked before and after.

A model that is trained on tickets alone answers everything with a ticket. The rows here keep it answering; the
`CHECK` questions, whose facts and wordings no row has, show whether it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

CAPITALS = {
    "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Portugal": "Lisbon", "Greece": "Athens",
    "Austria": "Vienna", "Poland": "Warsaw", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "Hungary": "Budapest", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago",
    "Argentina": "Buenos Aires", "China": "Beijing", "Thailand": "Bangkok", "India": "New Delhi", "Iran": "Tehran",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "early": "late", "happy": "sad", "open": "closed", "full": "empty",
    "high": "low", "light": "dark", "loud": "quiet", "new": "old", "rich": "poor", "strong": "weak", "wet": "dry",
    "easy": "difficult", "clean": "dirty", "long": "short", "soft": "hard", "left": "right", "up": "down",
}  # fmt: skip

PLURALS = {
    "child": "children", "foot": "feet", "mouse": "mice", "leaf": "leaves", "city": "cities", "box": "boxes",
    "woman": "women", "tooth": "teeth", "knife": "knives", "baby": "babies", "sheep": "sheep", "bus": "buses",
}  # fmt: skip

YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "duck": "duckling",
    "goat": "kid", "bear": "cub", "pig": "piglet", "swan": "cygnet",
}  # fmt: skip

MEANINGS = {
    "a library": "A library is a place where people read and borrow books.",
    "a bakery": "A bakery is a shop that makes and sells bread and cakes.",
    "an island": "An island is land with water all around it.",
    "a desert": "A desert is a place where very little rain falls.",
    "a volcano": "A volcano is a mountain from which hot lava can flow.",
    "a compass": "A compass is a tool that shows where north is.",
    "a dictionary": "A dictionary is a book that explains what words mean.",
    "an umbrella": "An umbrella is a cover that you hold over your head to keep off the rain.",
    "a bridge": "A bridge is a structure that carries a road over a river or a valley.",
    "a museum": "A museum is a building where old or beautiful things are shown.",
    "a thermometer": "A thermometer is a tool that measures temperature.",
    "a forest": "A forest is a large area that is covered with trees.",
}

ADVICE = {
    "How do I boil an egg?": "Put the egg in boiling water for about eight minutes, then cool it in cold water.",
    "How can I sleep better?": "Go to bed at the same time each day, and keep your bedroom dark and quiet.",
    "How do I make tea?": "Pour boiling water over the tea, wait for three minutes, and take the tea out.",
    "How can I learn new words?": "Read a little every day, write new words down, and use them in sentences.",
    "How do I water a plant?": "Pour water on the soil until it is moist, and wait until it is dry again.",
    "What helps against a headache?": "Drink water, rest in a dark room, and see a doctor if it doesn't get better.",
    "How do I clean a window?": "Wipe it with soapy water, then dry it with a soft cloth.",
    "How can I save money?": "Write down what you spend, and put some money aside as soon as you are paid.",
    "How do I plan a trip?": "Choose where to go, set a budget, book the travel, and pack the day before.",
    "How can I make new friends?": "Join a club or a class, be friendly, and ask people about themselves.",
    "How do I cook rice?": "Simmer one cup of rice in two cups of water, covered, for about fifteen minutes.",
    "What should I wear in the snow?": "Wear a warm coat, gloves, a hat, and boots that keep the water out.",
}

SMALL_TALK = {
    "Hello!": "Hello! How can I help you today?",
    "Good morning!": "Good morning! What can I do for you?",
    "How are you?": "I'm doing well, thank you. How can I help you?",
    "Thank you very much.": "You're welcome! Let me know if you need anything else.",
    "Can you help me with something?": "Of course. What would you like to know?",
    "What can you do?": "I can answer questions, explain things, and help you write.",
    "Goodbye!": "Goodbye! Have a nice day.",
    "Are you a human?": "No, I am an AI assistant.",
}

SENTENCES = {
    "rain": "The rain tapped softly on the window all night.",
    "the sea": "The sea was calm, and the waves shone in the morning sun.",
    "a train": "The train rolled slowly through the green hills.",
    "winter": "In winter the whole village lay under a blanket of snow.",
    "a garden": "Roses and bees filled the small garden behind the house.",
    "music": "Music drifted out of the open door and made everyone smile.",
    "a teacher": "The teacher explained the problem until every child understood it.",
    "breakfast": "Breakfast was fresh bread, sweet jam and a cup of hot tea.",
    "a mountain": "The mountain rose above the clouds, white and silent.",
    "an old book": "The old book smelled of dust and held a hundred stories.",
}

_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = "January February March April May June July August September October November December".split()


@dataclass(frozen=True, slots=True)
class Check:
    """A question that is asked before and after training; any of `words` in the answer makes it right."""

    question: str
    words: tuple[str, ...]


CHECK = (
    Check("What is the capital of France?", ("paris",)),
    Check("Who wrote Romeo and Juliet?", ("shakespeare",)),
    Check("What do bees make?", ("honey",)),
    Check("How many days does a week have?", ("seven", "7")),
    Check("Which planet do we live on?", ("earth",)),
    Check("What is the chemical formula of water?", ("h2o", "h₂o")),
    Check("Name the largest ocean.", ("pacific",)),
    Check("Which language do people in Brazil speak?", ("portuguese",)),
    Check("What color is the sky on a clear day?", ("blue",)),
    Check("Tell me something about dogs.", ("dog",)),
    Check("My phone battery is empty. What now?", ("charg", "plug", "power", "replac")),
    Check("Write a short apology to a customer whose parcel is late.", ("sorry", "apolog")),
)


def ordinary_rows(count: int, *, seed: int) -> list[tuple[str, str]]:
    """`count` pairs of question and answer, the same for the same seed; kinds take turns, repeats are rare."""
    rng = random.Random(f"ordinary:{seed}")
    rows: list[tuple[str, str]] = []
    seen: set[str] = set()
    while len(rows) < count:
        kinds = list(_KINDS)
        rng.shuffle(kinds)
        fresh = False
        for kind in kinds:
            question, answer = kind(rng)
            if question not in seen and len(rows) < count:
                seen.add(question)
                rows.append((question, answer))
                fresh = True
        if not fresh:
            seen.clear()
    return rows


def answers_right(check: Check, answer: str) -> bool:
    """Whether an answer in plain words holds what was asked for."""
    text = answer.lower()
    return not text.lstrip().startswith("{") and any(word in text for word in check.words)


def _capital(rng: random.Random) -> tuple[str, str]:
    country, city = rng.choice(list(CAPITALS.items()))
    asked = rng.choice(["What is the capital of {}?", "Which city is the capital of {}?", "{}: what's its capital?"])
    return asked.format(country), f"The capital of {country} is {city}."


def _opposite(rng: random.Random) -> tuple[str, str]:
    word, other = rng.choice(list(OPPOSITES.items()))
    asked = rng.choice(
        ["What is the opposite of {}?", 'Give me the opposite of "{}".', "Which word is the opposite of {}?"]
    )
    return asked.format(word), f"The opposite of {word} is {other}."


def _plural(rng: random.Random) -> tuple[str, str]:
    word, plural = rng.choice(list(PLURALS.items()))
    asked = rng.choice(["What is the plural of {}?", 'How do you write "{}" in the plural?'])
    return asked.format(word), f'The plural of "{word}" is "{plural}".'


def _young(rng: random.Random) -> tuple[str, str]:
    animal, young = rng.choice(list(YOUNG.items()))
    asked = rng.choice(["What is a young {} called?", "What do you call a baby {}?"])
    return asked.format(animal), f"A young {animal} is called a {young}."


def _sum(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randrange(2, 20), rng.randrange(2, 20)
    asked = rng.choice(["What is {} plus {}?", "How much is {} + {}?", "Add {} and {}."])
    return asked.format(left, right), f"{left} plus {right} is {left + right}."


def _after(rng: random.Random) -> tuple[str, str]:
    names, what = rng.choice([(_DAYS, "day"), (_MONTHS, "month")])
    at = rng.randrange(len(names))
    asked = rng.choice(["Which {} comes after {}?", "What {} follows {}?"])
    return asked.format(what, names[at]), f"{names[(at + 1) % len(names)]} comes after {names[at]}."


def _meaning(rng: random.Random) -> tuple[str, str]:
    thing, answer = rng.choice(list(MEANINGS.items()))
    asked = rng.choice(["What is {}?", "Explain what {} is.", "Can you tell me what {} is?"])
    return asked.format(thing), answer


def _sentence(rng: random.Random) -> tuple[str, str]:
    topic, answer = rng.choice(list(SENTENCES.items()))
    asked = rng.choice(["Write a sentence about {}.", "Give me one sentence about {}.", "Please write a line on {}."])
    return asked.format(topic), answer


def _advice(rng: random.Random) -> tuple[str, str]:
    return rng.choice(list(ADVICE.items()))


def _small_talk(rng: random.Random) -> tuple[str, str]:
    return rng.choice(list(SMALL_TALK.items()))


_KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _capital,
    _opposite,
    _plural,
    _young,
    _sum,
    _after,
    _meaning,
    _sentence,
    _advice,
    _small_talk,
)
