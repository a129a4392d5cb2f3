"""The flight desk: the environment is honest, the template echoes token for token, the step weighs tokens as told."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import click
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.flight_desk import desk, grpo, report, run, teach, tiny_model


def _play(seed: int, *rows: int) -> desk.FlightDesk:
    one = desk.FlightDesk(seed)
    one.call("search", {})
    one.call("filter", {"before": "09:00", "sort": "price"})
    for row in rows[:-1]:
        one.call("check_seat", {"row": row})
    one.call("order", {"row": rows[-1]})
    return one


@pytest.mark.parametrize("seed", range(50))
def test_desk_rewards_the_cheapest_early_flight_with_seats(seed: int) -> None:
    """Going down the list to the first row with seats is right at every depth."""
    depth = desk.FlightDesk(seed).depth
    right = depth + 1

    played = _play(seed, *range(1, right + 1), right)

    assert played.is_done
    assert played.reward == 1
    assert played.turns == depth + 4


def test_desk_refuses_an_order_before_a_check() -> None:
    """A row must be checked; the refusal costs a turn and ends nothing."""
    played = _play(0, 1)

    assert not played.is_done
    assert played.call("order", {"row": 2}) == "check 2 first"


def test_desk_ends_without_reward_when_a_sold_out_row_is_ordered() -> None:
    """An agent that does not read the answer of the check cannot order its way down the list."""
    seed = next(s for s in range(100) if desk.FlightDesk(s).depth == 1)

    played = _play(seed, 1, 1)

    assert played.is_done
    assert played.reward == 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fly", {}),
        ("search", {"row": 1}),
        ("filter", {"before": "09:00"}),
        ("filter", {"before": ["09:00"], "sort": {}}),
        ("check_seat", {}),
        ("check_seat", {"row": "1"}),
        ("check_seat", {"row": True}),
        ("order", {"row": 99}),
    ],
)
def test_desk_answers_a_bad_call_with_a_text(name: str, arguments: dict[str, object]) -> None:
    """Nothing that a model may write raises."""
    one = desk.FlightDesk(0)
    one.call("search", {})
    one.call("filter", {"before": "09:00", "sort": "price"})

    observation = one.call(name, arguments)

    assert observation in ("unknown tool", "bad arguments", "no such row")
    assert not one.is_done


def test_desk_closes_when_the_turns_are_used_up() -> None:
    """A rollout is never longer than the limit."""
    one = desk.FlightDesk(0)

    for _ in range(desk.MAX_TURNS):
        one.call("search", {})

    assert one.is_done
    assert one.call("search", {}) == "desk closed"


def test_desk_gives_a_blind_policy_less_than_half() -> None:
    """Of all fixed plans - which rows to check, which to order - none succeeds more often than the likeliest depth."""
    plans = [
        (*checks, order) for n in (1, 2, 3) for checks in itertools.permutations((1, 2, 3), n) for order in checks
    ]

    best = max(sum(_play(seed, *plan).reward for seed in range(600)) / 600 for plan in plans)

    assert best == pytest.approx(max(desk.DEPTH_MIX), abs=0.06)


@pytest.mark.parametrize("arguments_form", ["text", "object"])
def test_template_makes_each_call_a_prefix_of_the_next_prompt(arguments_form: str) -> None:
    """Prompt and output of a call, end mark included, begin the next prompt, however the arguments are echoed."""
    tokenizer = tiny_model.make_tokenizer()
    clerk = teach.Clerk(random.Random(0))
    for seed in range(30):
        messages = clerk.play(desk.FlightDesk(seed))
        before: list[int] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            function = message["tool_calls"][0]["function"]
            sampled = f'<tool_call>{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}</tool_call>'
            prompt = tokenizer.apply_chat_template(
                messages[:index], tools=desk.TOOLS, add_generation_prompt=True, return_dict=False
            )

            assert prompt[: len(before)] == before
            assert len(prompt) < 150

            before = prompt + tokenizer.encode(sampled + tiny_model.END, add_special_tokens=False)
            if arguments_form == "object":
                function["arguments"] = json.loads(function["arguments"])


@pytest.mark.parametrize("text", ["héllo 你好 🙂\n\t<tool_call>{'a': 1}", "12:34 CA1 CA10 MU190", " <|im_end|>x", ""])
def test_tokenizer_gives_any_text_back(text: str) -> None:
    """What is not a word falls back to bytes."""
    tokenizer = tiny_model.make_tokenizer()

    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_saved_model_loads_by_the_auto_classes(tmp_path: Path) -> None:
    """The folder gives the same ids and the same numbers to whoever loads it."""
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(tokenizer, seed=0).eval()
    text = tokenizer.apply_chat_template(teach.Clerk(random.Random(0)).play(desk.FlightDesk(0)), tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)

    tiny_model.save(model, tokenizer, tmp_path)

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(text, add_special_tokens=False) == ids
    assert loaded.chat_template == tokenizer.chat_template
    same = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(same(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)


def test_lesson_teaches_the_assistants_tokens_only() -> None:
    """What is taught is exactly what a model would sample."""
    tokenizer = tiny_model.make_tokenizer()
    messages = teach.Clerk(random.Random(0)).play(desk.FlightDesk(0))

    lesson = teach.make_lesson(tokenizer, messages)

    taught = tokenizer.decode(
        [token for token, is_taught in zip(lesson.ids, lesson.is_taught, strict=True) if is_taught]
    )
    calls = [message["tool_calls"][0]["function"] for message in messages if message["role"] == "assistant"]
    expected = "".join(
        f'<tool_call>{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}</tool_call><|im_end|>'
        for call in calls
    )
    assert taught == expected


def _batch(rows: int, advantage: float) -> grpo.Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (rows, 12), generator=generator)
    mask = torch.zeros(rows, 12)
    mask[:, 4:8] = 1
    logprobs = torch.full((rows, 12), -5.99)
    return grpo.Batch(ids, mask, logprobs, torch.full((rows, 12), advantage), torch.ones(rows, 12))


def test_step_raises_the_likelihood_of_tokens_with_positive_advantage() -> None:
    """One step moves the policy the right way."""
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(tokenizer, seed=0)
    batch = _batch(4, advantage=1.0)

    def likelihood() -> float:
        logprobs = torch.log_softmax(model(batch.input_ids).logits, -1)[:, 3:7]
        return float(logprobs.gather(2, batch.input_ids[:, 4:8, None]).sum().detach())

    before = likelihood()

    stats = grpo.train_step(
        model, grpo.make_optimizer(model, 1e-3), batch, epochs=1, minibatch_rows=2, clip=grpo.Clip(0.2, 0.28)
    )

    assert stats.rows == 4
    assert likelihood() > before


def test_step_leaves_the_model_alone_when_no_row_has_an_advantage() -> None:
    """A batch without spread teaches nothing, not even entropy."""
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(tokenizer, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    stats = grpo.train_step(
        model, grpo.make_optimizer(model, 1e-3), _batch(4, 0.0), epochs=2, minibatch_rows=2, clip=grpo.Clip(0.2, 0.28)
    )

    assert stats == grpo.StepStats()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_demo_starts_without_what_an_earlier_one_left(tmp_path: Path) -> None:
    """A store of the last run would be counted with this one's."""
    out = tmp_path / "demo"
    run.empty(out)
    (out / "clickhouse").mkdir()
    (out / "clickhouse" / "row").write_text("old")

    run.empty(out)

    assert [out / "logs"] == list(out.iterdir())


def test_demo_deletes_no_folder_that_is_not_its_own(tmp_path: Path) -> None:
    """`--out` with a slip must not cost anybody's files."""
    (tmp_path / "thesis.tex").write_text("years")

    with pytest.raises(click.UsageError, match="is no folder of this demo"):
        run.empty(tmp_path)

    assert (tmp_path / "thesis.tex").exists()


def test_live_table_shows_success_by_version_and_no_figures_of_steps_to_come() -> None:
    """Version 0 was trained by no step, version 2 by none yet."""
    played = [{"version": v, "reward": r, "turns": 4, "at_s": 2.0} for v, r in ((0, 0), (0, 1), (1, 1), (2, 1))]
    trained = [{"version": 1, "staleness": 0.5, "entropy": 1.25}]

    table = report.live_table(played, trained)

    shown = [list(column.cells) for column in table.columns]
    assert [["0", "1", "2"], ["2", "1", "1"], ["50%", "100%", "100%"]] == shown[:3]
    assert [["", "0.5", ""], ["", "1.25", ""]] == shown[4:]
    assert "4 rollouts, 16 calls, 8 calls/s, 1 steps" in str(table.title)
