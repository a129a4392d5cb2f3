"""Format teaching: supervised steps on the calls of a careless clerk.

The clerk always writes well-formed calls and mostly works in a sensible order, but picks filters, rows and orders
carelessly, so a model taught by him knows the form of the work and only some of its sense. What is left - use the right
filter, go down the list, order only what has seats - is for reinforcement to find. Invariant: the loss covers the
assistant's tokens only. Run once, before the demo's engine starts: `python -m examples.flight_desk.teach`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from . import recipe, tiny_model
from .desk import DEPTH_MIX, LIMITS, LISTED_ROWS, SORTS, FlightDesk

BATCH_SIZE: Final = 16
PEAK_RATE: Final = 3e-3
"""Learning rate at the start of the linear decay; 1e-2 ends in a worse model."""

FIRST_SEED: Final = 2**40
"""Seeds of the taught desks start here; rollouts use smaller ones, so no desk is both taught and played."""

Message = dict[str, object]


@dataclass(slots=True)
class Clerk:
    """Plays one desk with valid calls and a careless strategy; each probability is that of the sensible choice."""

    rng: random.Random
    right_limit: float = 0.55
    right_sort: float = 0.6
    top_row: float = 0.45
    heeds_seats: float = 0.8
    """Orders a row that has seats; otherwise looks at another one."""
    heeds_sold_out: float = 0.8
    """Goes on to another row after a sold-out one; otherwise orders it all the same."""
    next_row: float = 0.6
    """Takes the row below, when going on; otherwise any row."""
    _row: int = field(default=1, init=False)

    def play(self, desk: FlightDesk) -> list[Message]:
        """Play to the end and return the chat messages."""
        messages: list[Message] = [{"role": "user", "content": desk.task}]
        observation = self._say(messages, desk, "search", {})
        observation = self._say(messages, desk, "filter", self._filter())
        observation = self._say(messages, desk, "check_seat", {"row": self._first_row()})
        while not desk.is_done:
            if self.rng.random() < self._order_rate(observation):
                observation = self._say(messages, desk, "order", {"row": self._row})
            else:
                observation = self._say(messages, desk, "check_seat", {"row": self._other_row()})
        return messages

    def _filter(self) -> dict[str, object]:
        limit = LIMITS[0] if self.rng.random() < self.right_limit else self.rng.choice(LIMITS[1:])
        sort = SORTS[0] if self.rng.random() < self.right_sort else self.rng.choice(SORTS[1:])
        return {"before": limit, "sort": sort}

    def _first_row(self) -> int:
        self._row = 1 if self.rng.random() < self.top_row else self.rng.randint(1, LISTED_ROWS)
        return self._row

    def _order_rate(self, observation: str) -> float:
        if observation.endswith("has seats"):
            return self.heeds_seats
        if observation.endswith("sold out"):
            return 1 - self.heeds_sold_out
        return 0.3

    def _other_row(self) -> int:
        others = [row for row in range(1, LISTED_ROWS + 1) if row != self._row]
        is_next = self._row < LISTED_ROWS and self.rng.random() < self.next_row
        self._row = self._row + 1 if is_next else self.rng.choice(others)
        return self._row

    def _say(self, messages: list[Message], desk: FlightDesk, name: str, arguments: dict[str, object]) -> str:
        observation = desk.call(name, arguments)
        call_id = f"call-{len(messages)}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": observation})
        return observation


@dataclass(frozen=True, slots=True)
class Lesson:
    """One demonstration as tokens."""

    ids: list[int]
    is_taught: list[bool]
    """True on the tokens that the assistant writes, the end mark included; same length as `ids`."""


def make_lesson(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> Lesson:
    """Render the messages and mark what the assistant wrote."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    start, head = (
        tokenizer.convert_tokens_to_ids("<|im_start|>"),
        tokenizer.encode("assistant\n", add_special_tokens=False),
    )
    is_taught, is_inside = [], False
    for index, token in enumerate(ids):
        is_inside = is_inside or ids[index - 1 - len(head) : index] == [start, *head]
        is_taught.append(is_inside)
        is_inside = is_inside and token != tokenizer.eos_token_id
    return Lesson(ids, is_taught)


def teach(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> float:
    """Teach the model in place and return the mean loss of the last tenth of the steps.

    Args:
        seed: of the clerk and his choice of desks.
        steps: optimizer steps of `BATCH_SIZE` demonstrations each.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.02))
    losses: list[float] = []
    model.train()
    for lessons in itertools.islice(_batches(tokenizer, rng), steps):
        loss = _loss(model, lessons, tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    tail = losses[-max(steps // 10, 1) :]
    return sum(tail) / len(tail)


def _batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[list[Lesson]]:
    """Endless batches of lessons of similar length, in random order; little padding saves a quarter of the time."""
    while True:
        # Every depth equally often: the tiny model must have met each answer, however rare it is in the task.
        desks = [
            FlightDesk(FIRST_SEED + rng.randrange(2**31), depth=rng.randrange(len(DEPTH_MIX)))
            for _ in range(16 * BATCH_SIZE)
        ]
        lessons = sorted(
            (make_lesson(tokenizer, Clerk(rng).play(desk)) for desk in desks), key=lambda one: len(one.ids)
        )
        batches = [lessons[start : start + BATCH_SIZE] for start in range(0, len(lessons), BATCH_SIZE)]
        rng.shuffle(batches)
        yield from batches


def _loss(model: Qwen2ForCausalLM, lessons: list[Lesson], pad: int) -> torch.Tensor:
    longest = max(len(lesson.ids) for lesson in lessons)
    ids_BT = torch.tensor([lesson.ids + [pad] * (longest - len(lesson.ids)) for lesson in lessons])
    mask_BT = torch.tensor([lesson.is_taught + [False] * (longest - len(lesson.ids)) for lesson in lessons])
    hidden_BTH = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTH[mask_BT[:, 1:]])
    return torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:][mask_BT[:, 1:]])


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the taught model.")
@click.option("--seed", type=int, required=True, help="Decides the first weights and the demonstrations.")
def main(out: Path, seed: int) -> None:
    """Make the tiny model, teach it the form of the calls and save it."""
    torch.set_num_threads(1)
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(tokenizer, seed)
    loss = teach(model, tokenizer, seed, recipe.TEACH_STEPS)
    tiny_model.save(model, tokenizer, out)
    print(f"loss={loss:.4f}")


if __name__ == "__main__":
    main()
