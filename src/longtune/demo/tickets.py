"""The demo's task: a customer's message -> a JSON ticket. Rows come from a seeded generator, no file and no network.

Held-out rows share no name, product, date or wording with training rows: what is measured on them was learned, not
remembered. The words are in `words`, rows of ordinary questions in `ordinary`.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longtune.demo import words

INSTRUCTION = (
    "Write the customer's message as a JSON ticket: "
    "name, product, date, issue (damaged/late/wrong/missing/faulty), refund."
)
"""The system message of every ticket, so that the untrained model is asked for the same thing in the same words."""

FIELDS = ("name", "product", "date", "issue", "refund")

_MONTHS = "January February March April May June July August September October November December".split()
_FIRST_DAY = datetime.date(2022, 1, 1)
_DAYS = 4 * 365


@dataclass(frozen=True, slots=True)
class Ticket:
    """A message and what it says.

    Attributes:
        message: the customer's text.
        fields: name, product, date (ISO), issue (a key of `words.PROBLEMS`), refund (amount or
            None).
    """

    message: str
    fields: dict[str, Any]

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The conversation up to the answer."""
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": self.message}]

    @property
    def answer(self) -> str:
        return json.dumps(self.fields)


def tickets(count: int, *, seed: int, held_out: bool = False) -> list[Ticket]:
    """`count` tickets, all different, the same for the same seed."""
    rng = random.Random(f"tickets:{seed}:{held_out}")
    found: dict[str, Ticket] = {}
    for ticket in _endless(rng, int(held_out)):
        found.setdefault(ticket.message, ticket)
        if len(found) == count:
            break
    return list(found.values())


def _endless(rng: random.Random, side: int) -> Iterator[Ticket]:
    """Tickets from the words of one side: 0 for training, 1 for held-out rows."""
    issues = list(words.PROBLEMS)
    while True:
        rng.shuffle(issues)
        # Every issue equally often.
        for issue in issues:
            yield _ticket(rng, side, issue, wants_refund=rng.random() < 0.5)


def _ticket(rng: random.Random, side: int, issue: str, *, wants_refund: bool) -> Ticket:
    name = f"{rng.choice(words.FIRST_NAMES[side])} {rng.choice(words.LAST_NAMES[side])}"
    product = rng.choice(words.PRODUCTS[side])
    date = _date(rng, side)
    amount = _amount(rng)
    wish = rng.choice((words.REFUND if wants_refund else words.NO_REFUND)[side]).format(amount=f"${amount:.2f}")
    message = rng.choice(words.FRAMES[side]).format(
        name=name,
        a="an" if product[0] in "aeiou" else "a",
        product=product,
        date=_written(date, rng.choice(words.DATES[side])),
        problem=rng.choice(words.PROBLEMS[issue][side]),
        wish=wish,
    )
    fields = {
        "name": name,
        "product": product,
        "date": date.isoformat(),
        "issue": issue,
        "refund": amount if wants_refund else None,
    }
    return Ticket(" ".join(message.split()), fields)


def _date(rng: random.Random, side: int) -> datetime.date:
    """Every fifth day belongs to the held-out rows."""
    while True:
        day = rng.randrange(_DAYS)
        if (day % 5 == 0) == bool(side):
            return _FIRST_DAY + datetime.timedelta(days=day)


def _amount(rng: random.Random) -> float:
    """A price that reads the same in a message ($12.95) and in JSON (12.95): its last digit isn't 0."""
    return rng.randrange(5, 300) + rng.choice([0.25, 0.49, 0.75, 0.95, 0.99])


def _written(date: datetime.date, form: str) -> str:
    ending = "th" if 10 < date.day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(date.day % 10, "th")
    month = _MONTHS[date.month - 1]
    return form.format(d=date.day, th=f"{date.day}{ending}", m=month, mon=month[:3], y=date.year)


def wrong(ticket: Ticket, *, seed: int) -> str:
    """The ticket's answer with one field wrong: what a preference pair rejects.

    Dates and amounts are often copied as the message writes them, and the issue is mistaken for another: a model that
    only copies well prefers many of these to the right answer. Names and products are plain mistakes.
    """
    rng = random.Random(f"wrong:{seed}:{ticket.message}")
    fields = dict(ticket.fields)
    field = rng.choice([*FIELDS, "date", "issue", "refund"])
    if field == "name":
        first, last = fields["name"].split(" ", 1)
        fields["name"] = rng.choice([first, last, f"{last} {first}"])
    elif field == "product":
        others = [product for side in words.PRODUCTS for product in side if product != fields["product"]]
        fields["product"] = rng.choice(others)
    elif field == "date":
        date = datetime.date.fromisoformat(fields["date"])
        forms = [_written(date, form) for side in words.DATES for form in side]
        fields["date"] = max((form for form in forms if form in ticket.message), key=len)
    elif field == "issue":
        fields["issue"] = rng.choice([issue for issue in words.PROBLEMS if issue != fields["issue"]])
    else:
        fields["refund"] = "no" if fields["refund"] is None else f"${fields['refund']:.2f}"
    return json.dumps(fields)


def chat_row(ticket: Ticket) -> dict[str, Any]:
    """A training row of `method: sft`."""
    return {"messages": [*ticket.prompt, {"role": "assistant", "content": ticket.answer}]}


def preference_row(ticket: Ticket, *, seed: int) -> dict[str, Any]:
    """A training row of `method: dpo`, `orpo` or `simpo`: the right ticket against one with a wrong field."""
    return {
        "prompt": ticket.prompt,
        "chosen": [{"role": "assistant", "content": ticket.answer}],
        "rejected": [{"role": "assistant", "content": wrong(ticket, seed=seed)}],
    }


def parse(answer: str) -> dict[str, Any] | None:
    """The answer as a JSON object, or None. Nothing may stand around it."""
    try:
        value = json.loads(answer.strip())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def is_ticket(answer: str) -> bool:
    """Whether an answer is, or begins like, a ticket (to see that ordinary questions don't get one)."""
    value = parse(answer)
    return value is not None or answer.lstrip().startswith("{")


def is_right(answer: str, ticket: Ticket) -> bool:
    """Exact match: a JSON object with these fields and values, no more and no fewer."""
    return parse(answer) == ticket.fields
