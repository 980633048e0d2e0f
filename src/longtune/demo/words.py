"""The words of the demo's tickets: every list is a pair (for training, for held-out rows) without a common entry.

Only lists; how they make a row is the work of `tickets`.
"""

from __future__ import annotations

FIRST_NAMES = (
    "Adam Aisha Alice Amir Andrea Anna Bella Boris Carla Carlos Chen Clara Daniel Dora Elena Elif Emma Erik Fatima "
    "Felix Finn Grace Hana Hugo Ines Ivan Jack Jana Joao Julia Karim Lars Laura Leo Lina Lucas Maja Marco Maria Mateo "
    "Mei Mina Nadia Nils Nora Omar Oscar Paula Pedro Petra Rosa Ruben Samir Sara Sofia Tariq Theo Tina Victor "
    "Yuki Zoe".split(),
    "Agnes Bruno Camila Dimitri Esther Farid Greta Henrik Isabel Jonas Keiko Lorenzo Miriam Nikolai Olga Pablo "
    "Ramona Stefan Teresa Viktoria".split(),
)

LAST_NAMES = (
    "Ahmed Anders Baker Bauer Berg Brown Carter Castro Costa Cruz Dahl Diaz Evans Fischer Foster Garcia Gomez Gray "
    "Green Hall Hansen Hill Hughes Ito Jensen Jones Kaya Kelly Khan Kim King Klein Kumar Lee Lopez Martin Meyer Mills "
    "Moore Morris Nguyen Novak Olsen Ortiz Park Patel Perez Reed Rossi Sato Silva Singh Smith Stone Torres Turner "
    "Walker Weber White Wong Young".split(),
    "Alvarez Becker Bianchi Cooper Duarte Fraser Haas Ibrahim Jansen Kowalski Lindberg Mendes Nakamura Okafor Porter "
    "Quinn Romero Schmidt Tanaka Vargas".split(),
)

PRODUCTS = (
    (
        "desk lamp|coffee maker|office chair|phone case|garden hose|yoga mat|rice cooker|winter coat|"
        "wall clock|bike helmet|toaster|blender|backpack|tent|keyboard|monitor|printer|kettle|hair dryer|"
        "guitar|camera bag|water bottle|bookshelf|mirror|suitcase|rain jacket|shoe rack|hand mixer|"
        "tool box|night light|baby monitor|towel rack|floor lamp|power drill|picture frame|laptop stand|"
        "frying pan|tea set|sleeping bag|wool scarf|alarm clock|paper shredder|air fryer|vacuum cleaner|"
        "electric razor|puzzle|board game|lawn mower|fish tank|flower pot|memory card|wireless mouse|"
        "tennis racket|ski helmet|bread knife|pillow|mattress|curtain rod|doorbell|heater"
    ).split("|"),
    (
        "headset|standing desk|espresso machine|camping stove|leather wallet|soup bowl|digital scale|"
        "garden chair|piano bench|smart watch|sewing machine|ceiling fan|travel mug|table lamp|waffle iron|"
        "dog bed|wool blanket|label maker|ice cream maker|bluetooth speaker"
    ).split("|"),
)

# {d} day, {th} day with its ending, {m} month's name, {mon} its first three letters, {y} year.
DATES = (
    ["{m} {d}, {y}", "{d} {m} {y}", "{mon} {d}, {y}", "{m} {th}, {y}", "{d} {mon} {y}", "{th} of {m} {y}"],
    ["the {th} of {m}, {y}", "{mon} {th}, {y}", "{m} {d} {y}"],
)

# {name}, {product} and {date} stand in every frame; {a} is a or an; {problem} and {wish} are sentences.
FRAMES = (
    [
        "Hi, I'm {name}. I bought {a} {product} on {date}. {problem} {wish}",
        "Hello, my name is {name}. On {date} I ordered {a} {product}. {problem} {wish}",
        "{problem} It is the {product} from {date}. {wish} {name}",
        "My {product}, ordered on {date}: {problem} {wish} Regards, {name}",
        "Good morning! {name} here. This is about the {product} I ordered on {date}. {problem} {wish}",
        "Order date {date}, {product}. {problem} {wish} Thanks, {name}",
        "I ordered {a} {product} from you on {date}. {problem} {wish} My name is {name}.",
        "To whom it may concern: on {date} I bought {a} {product}. {problem} {wish} Sincerely, {name}",
        "Hey, it's {name}, I got {a} {product} from your shop, order of {date}. {problem} {wish}",
        "{name} writing about {a} {product}. {problem} {wish} I ordered it on {date}.",
        "Customer: {name}. Item: {product}. Bought: {date}. {problem} {wish}",
        "{wish} {problem} I mean the {product} of {date}. Yours, {name}",
        "On {date} I paid for {a} {product} in your store. {problem} {wish} - {name}",
        "Dear team, {problem} The order is {a} {product}, placed on {date} by {name}. {wish}",
    ],
    [
        "Dear support, I am {name} and I purchased {a} {product} on {date}. {problem} {wish}",
        "Problem with {a} {product}. {problem} {wish} It was ordered {date}. Best wishes, {name}",
        "This is {name}. My order of {date} was {a} {product}. {problem} {wish}",
        "Hello there, {a} {product} was ordered on {date} under the name {name}. {problem} {wish}",
        "{problem} {wish} The {product} was bought on {date}. Kind regards, {name}",
    ],
)

PROBLEMS = {
    "damaged": (
        [
            "It arrived broken.",
            "There is a big crack in it.",
            "It came with scratches all over.",
            "The box was crushed and so is the item.",
            "One side is dented.",
            "It was smashed when I opened the parcel.",
            "It has a hole in it.",
            "It was bent and torn on arrival.",
        ],
        ["It was cracked when it got here.", "I found it badly scratched.", "It arrived in broken pieces."],
    ),
    "late": (
        [
            "It has not arrived yet.",
            "I am still waiting for it.",
            "The parcel never came.",
            "Delivery is two weeks late.",
            "It should have been here days ago.",
            "Nothing has been delivered so far.",
            "The tracking has not moved for a week.",
            "Where is my parcel?",
        ],
        ["I have not received it yet.", "The delivery is very late.", "It still has not been delivered."],
    ),
    "wrong": (
        [
            "You sent me the wrong one.",
            "I got something else.",
            "The color is not the one I chose.",
            "It is the wrong size.",
            "This is a different model than I ordered.",
            "Someone else's order was in the box.",
            "I received another product instead.",
            "It is not what I ordered.",
        ],
        ["You shipped the wrong model.", "I received a different item.", "The size is not what I ordered."],
    ),
    "missing": (
        [
            "A part is missing.",
            "The screws were not in the box.",
            "There is no manual in it.",
            "The cable is missing.",
            "One piece was not included.",
            "It came without its cover.",
            "The box lacks a few parts.",
            "I can't find the charger in the package.",
        ],
        ["Some parts are missing.", "The cable was not included.", "It came without the screws."],
    ),
    "faulty": (
        [
            "It does not work.",
            "It won't turn on.",
            "It stopped working after a day.",
            "Nothing happens when I use it.",
            "It makes a noise and then dies.",
            "It fails every time I try it.",
            "It no longer works at all.",
            "It is defective.",
        ],
        ["It doesn't work at all.", "It will not start.", "After an hour it stopped working."],
    ),
}

# {amount} is written as $12.50.
REFUND = (
    [
        "Please refund {amount}.",
        "I want my {amount} back.",
        "Give me back the {amount} I paid.",
        "I ask for a refund of {amount}.",
        "Return the {amount} to my card.",
        "I paid {amount} and want it back.",
    ],
    ["I would like a refund of {amount}.", "Please pay back the {amount}.", "I want {amount} refunded."],
)

NO_REFUND = (
    [
        "Please send a new one.",
        "What can you do?",
        "Can you fix this?",
        "Please help.",
        "Tell me what to do.",
        "I would like a replacement.",
        "",
    ],
    ["Can you help me?", "Please replace it.", "How do we solve this?"],
)
