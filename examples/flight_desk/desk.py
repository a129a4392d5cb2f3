"""The flight desk: a small stateful task with four tools and one right answer.

Eight flights, five of them early. The traveller wants the cheapest early flight that still has seats. The desk answers
every call from its state: `search` finds the flights, `filter` lists rows, `check_seat` looks at one row of that list,
`order` books a row that was checked. Some of the cheapest early flights are sold out (`depth` of them), so the rows
must be tried in turn and the answers read. Invariant: a bad call is answered with a text, never with an exception, and
the same seed always makes the same desk. Called by the agent loop and by the demonstrations in `teach.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

MAX_TURNS: Final = 7
"""Calls a rollout may make. The right plan needs 4 to 6; one is left over, because without slack deep desks teach
nothing."""

DEPTH_MIX: Final = (0.45, 0.40, 0.15)
"""Probability of 0, 1 or 2 sold-out rows before the right one. The best policy that ignores every observation can
only bet on one depth, so it succeeds at most 45 % of the time."""

LIMITS: Final = ("09:00", "12:00", "18:00")
"""Times that `filter` accepts as `before`. The task is about the first."""

SORTS: Final = ("price", "departure")
"""Orders that `filter` accepts."""

LISTED_ROWS: Final = 3
"""Rows that `filter` shows, numbered from 1."""

EARLY_FLIGHTS: Final = 5
LATER_FLIGHTS: Final = 3
"""More early flights than listed rows: a list by departure misses the right one in two desks of five. With three early
flights it never did, and one seed in five settled for that list and for guessing."""

CITIES: Final = (
    "Beijing",
    "Chengdu",
    "Hangzhou",
    "Kunming",
    "Osaka",
    "Shanghai",
    "Shenzhen",
    "Tokyo",
    "Wuhan",
    "Xiamen",
)
AIRLINES: Final = ("CA", "CZ", "HU", "MU")
EARLY_TIMES: Final = ("06:00", "06:30", "07:00", "07:15", "07:30", "07:45", "08:00", "08:30")
LATER_TIMES: Final = ("09:30", "10:00", "10:30", "11:00", "11:30", "13:00", "14:00", "15:00", "16:00", "17:00")
EARLY_PRICES: Final = tuple(range(500, 1000, 20))
LATER_PRICES: Final = tuple(range(200, 500, 20))
"""Later flights are always cheaper, so a list that is not limited to early ones is a trap."""


def _tool(name: str, description: str, properties: dict[str, object]) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_ROW: Final[dict[str, object]] = {"type": "integer", "minimum": 1, "maximum": LISTED_ROWS}

TOOLS: Final[list[dict[str, object]]] = [
    _tool("search", "Find the flights of the traveller's route.", {}),
    _tool(
        "filter",
        "List the first rows of the flights that leave before a time.",
        {"before": {"type": "string", "enum": list(LIMITS)}, "sort": {"type": "string", "enum": list(SORTS)}},
    ),
    _tool("check_seat", "Ask whether a row of the last list has seats.", {"row": _ROW}),
    _tool("order", "Book a row of the last list; it must have been checked.", {"row": _ROW}),
]
"""The tools in the form of the OpenAI `tools` parameter."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One flight of the inventory."""

    name: str
    departure: str
    """Local time as HH:MM, so that text order is time order."""
    price: int
    has_seats: bool


class FlightDesk:
    """One traveller at the desk; the state lives from the first call to the order."""

    def __init__(self, seed: int, depth: int | None = None) -> None:
        """Set up the desk. Args: depth: None draws it from `DEPTH_MIX`."""
        rng = random.Random(seed)
        drawn = rng.choices(range(len(DEPTH_MIX)), weights=DEPTH_MIX)[0]
        self.depth: int = drawn if depth is None else depth
        """How many of the cheapest early flights are sold out."""
        origin, target = rng.sample(CITIES, 2)
        self.task: str = f"{origin} to {target}: book the cheapest flight before {LIMITS[0]}"
        """The traveller's wish: the text of the user message."""
        self.turns: int = 0
        """Calls made so far, refused ones included."""
        self.reward: int = 0
        """1 once the right flight is booked, else 0."""
        self.is_done: bool = False
        """True after an order of a checked row, or when the turns are used up."""
        self._flights = _make_flights(rng, self.depth)
        early = [flight for flight in self._flights if flight.departure < LIMITS[0] and flight.has_seats]
        self._right = min(early, key=lambda flight: flight.price)
        self._has_searched = False
        self._rows: list[Flight] = []
        self._checked: set[Flight] = set()

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Answer one tool call and count the turn.

        Args:
            name: the tool; an unknown one is answered with an error text.
            arguments: the decoded JSON object; missing, surplus or ill-typed values are answered with an error text.
        """
        if self.is_done:
            return "desk closed"
        self.turns += 1
        observation = self._answer(name, arguments)
        self.is_done = self.is_done or self.turns >= MAX_TURNS
        return observation

    def give_up(self) -> None:
        """End the rollout without a booking: the agent answered without calling a tool."""
        self.is_done = True

    def _answer(self, name: str, arguments: Mapping[str, object]) -> str:
        if name == "search":
            return self._search() if not arguments else "bad arguments"
        if name == "filter":
            return self._filter(arguments)
        actions: dict[str, Callable[[int], str]] = {"check_seat": self._check_seat, "order": self._order}
        if name not in actions:
            return "unknown tool"
        row = arguments.get("row")
        if set(arguments) != {"row"} or type(row) is not int:
            return "bad arguments"
        if not self._rows:
            return "filter first"
        if not 1 <= row <= len(self._rows):
            return "no such row"
        return actions[name](row)

    def _search(self) -> str:
        self._has_searched = True
        return f"{len(self._flights)} flights"

    def _filter(self, arguments: Mapping[str, object]) -> str:
        before, sort = arguments.get("before"), arguments.get("sort")
        if set(arguments) != {"before", "sort"} or before not in LIMITS or sort not in SORTS:
            return "bad arguments"
        if not self._has_searched:
            return "search first"
        found = [flight for flight in self._flights if flight.departure < str(before)]
        found.sort(
            key=lambda flight: (flight.price, flight.name) if sort == "price" else (flight.departure, flight.name)
        )
        self._rows = found[:LISTED_ROWS]
        return "\n".join(f"{row} {f.name} {f.departure} {f.price}" for row, f in enumerate(self._rows, 1))

    def _check_seat(self, row: int) -> str:
        flight = self._rows[row - 1]
        if flight in self._checked:
            return f"{row} checked already"
        self._checked.add(flight)
        return f"{row} has seats" if flight.has_seats else f"{row} sold out"

    def _order(self, row: int) -> str:
        flight = self._rows[row - 1]
        if flight not in self._checked:
            return f"check {row} first"
        self.is_done = True
        if not flight.has_seats:
            return f"{row} sold out, desk closed"
        self.reward = int(flight == self._right)
        return f"booked {flight.name}"


def _make_flights(rng: random.Random, depth: int) -> list[Flight]:
    """Early flights, the `depth` cheapest of them sold out, and later ones with seats, in random order."""
    times = rng.sample(EARLY_TIMES, EARLY_FLIGHTS) + rng.sample(LATER_TIMES, LATER_FLIGHTS)
    prices = sorted(rng.sample(EARLY_PRICES, EARLY_FLIGHTS)) + rng.sample(LATER_PRICES, LATER_FLIGHTS)
    names = [f"{airline}{number}" for airline in AIRLINES for number in range(10, 20)]
    flights = [
        Flight(name, departure, price, has_seats=rank >= depth)
        for rank, (name, departure, price) in enumerate(
            zip(rng.sample(names, len(times)), times, prices, strict=True)
        )
    ]
    rng.shuffle(flights)
    return flights
