"""The demo's rows: seeded, right, and disjoint between training and held-out rows."""

import json
import re

import pytest

from longtune.demo import words
from longtune.demo.ordinary import CHECK, answers_right, ordinary_rows
from longtune.demo.tickets import FIELDS, chat_row, is_right, is_ticket, parse, preference_row, tickets, wrong

TRAIN = tickets(300, seed=0)
HELD_OUT = tickets(300, seed=0, held_out=True)


def test_rows_are_a_function_of_the_seed():
    assert tickets(50, seed=1) == tickets(50, seed=1) != tickets(50, seed=2)
    assert tickets(50, seed=1) == tickets(80, seed=1)[:50]
    assert ordinary_rows(50, seed=1) == ordinary_rows(50, seed=1) != ordinary_rows(50, seed=2)
    assert len({ticket.message for ticket in TRAIN}) == len(TRAIN)


@pytest.mark.parametrize("field", ["name", "product", "date"])
def test_held_out_rows_share_no_name_product_or_date(field):
    known = {ticket.fields[field] for ticket in TRAIN}
    assert not known & {ticket.fields[field] for ticket in HELD_OUT}


def test_first_and_last_names_are_disjoint_too():
    for part in (0, -1):
        assert not {t.fields["name"].split()[part] for t in TRAIN} & {t.fields["name"].split()[part] for t in HELD_OUT}


@pytest.mark.parametrize(
    "pair",
    [
        words.FIRST_NAMES,
        words.LAST_NAMES,
        words.PRODUCTS,
        words.DATES,
        words.FRAMES,
        words.REFUND,
        words.NO_REFUND,
        *words.PROBLEMS.values(),
    ],
)
def test_wordings_are_disjoint(pair):
    train, held_out = pair
    assert train and held_out and not set(train) & set(held_out)
    assert len(set(held_out)) == len(held_out)


@pytest.mark.parametrize("rows", [TRAIN, HELD_OUT])
def test_every_field_can_be_read_from_the_message(rows):
    for ticket in rows:
        fields = ticket.fields
        assert tuple(fields) == FIELDS and json.loads(ticket.answer) == fields
        assert fields["name"] in ticket.message and fields["product"] in ticket.message
        assert fields["date"][:4] in ticket.message and re.search(rf"\b{int(fields['date'][8:])}", ticket.message)
        amount = re.search(r"\$(\d+\.\d\d)", ticket.message)
        assert (amount is None) == (fields["refund"] is None)
        assert amount is None or str(fields["refund"]) == amount[1]
        assert not re.search(r"\b[Aa] [aeiou]|\ban (?!hour)[^aeiou]|[{}]", ticket.message)
    issues = [ticket.fields["issue"] for ticket in rows]
    assert all(issues.count(issue) == len(rows) / len(words.PROBLEMS) for issue in words.PROBLEMS)


def test_a_rejected_ticket_has_one_wrong_field():
    changed = set()
    for ticket in TRAIN:
        fields = json.loads(wrong(ticket, seed=0))
        assert tuple(fields) == FIELDS
        different = [field for field in FIELDS if fields[field] != ticket.fields[field]]
        assert len(different) == 1
        changed.update(different)
    assert changed == set(FIELDS)


def test_rows_have_the_shapes_of_their_methods():
    row = preference_row(TRAIN[0], seed=0)
    assert row["prompt"] == chat_row(TRAIN[0])["messages"][:2]
    assert row["chosen"] == chat_row(TRAIN[0])["messages"][2:] != row["rejected"]


def test_exact_match_is_strict():
    ticket = next(t for t in TRAIN if t.fields["refund"] is None)
    assert is_right(ticket.answer, ticket) and is_right(json.dumps(ticket.fields, indent=1), ticket)
    assert not is_right(ticket.answer + " Done.", ticket)
    assert not is_right(ticket.answer.replace("null", "0"), ticket)
    assert not is_right(json.dumps({**ticket.fields, "more": 1}), ticket)
    assert parse("[1]") is None and parse("no") is None and parse("") is None


def test_questions_that_are_asked_are_not_trained_on():
    trained = ordinary_rows(400, seed=0)
    questions = {question for question, _ in trained}
    assert not questions & {check.question for check in CHECK}
    for check in CHECK[:4]:
        assert not any(answers_right(check, answer) for question, answer in trained if question in check.question)
    assert not any("France" in question or "Shakespeare" in answer for question, answer in trained)


def test_a_ticket_is_no_answer_to_a_question():
    assert answers_right(CHECK[0], "It is Paris.")
    assert not answers_right(CHECK[0], '{"name": "Paris"}')
    assert is_ticket('{"name": "Paris"') and not is_ticket("It is Paris.")
