"""Rewards: found by name, called by keyword, and stopped when they break their contract."""

import math
import sys
from pathlib import Path

import pytest

from grpo_lite.errors import RewardError, UsageError
from grpo_lite.grpo.builtin_rewards import first_integer, reasoning_gym
from grpo_lite.grpo.data import Example, load_task
from grpo_lite.grpo.rewards import Reward, RewardSet, load_rewards

EXAMPLES = [
    Example(index=4, prompt="2 + 3 =", columns={"answer": "5"}),
    Example(index=4, prompt="2 + 3 =", columns={"answer": "5"}),
    Example(index=9, prompt="1 - 4 =", columns={"answer": "-3"}),
]
COMPLETIONS = [" 5", " 6", " -3"]


def score(*functions, weights=(1.0, 1.0)):
    rewards = tuple(
        Reward(name=function.__name__, function=function, weight=weight)
        for function, weight in zip(functions, weights, strict=False)
    )
    return RewardSet(rewards=rewards).score(EXAMPLES, COMPLETIONS)


def test_a_reward_gets_prompts_completions_and_columns_as_lists_by_keyword():
    seen = {}

    def look(**arguments):
        seen.update(arguments)
        return [0.0] * 3

    score(look)
    assert seen == {
        "prompts": ["2 + 3 =", "2 + 3 =", "1 - 4 ="],
        "completions": COMPLETIONS,
        "answer": ["5", "5", "-3"],
    }


def test_a_reward_need_not_name_arguments_that_it_does_not_use():
    def length(completions):
        return [len(text) for text in completions]

    assert score(length).totals == (2.0, 2.0, 3.0)


def test_the_total_is_the_weighted_sum_of_the_rewards_that_apply():
    def right(completions, answer):
        return [text.strip() == wanted for text, wanted in zip(completions, answer, strict=True)]

    def sometimes(completions):
        return [None, 4, 0.5]

    scores = score(right, sometimes, weights=(2.0, -1.0))
    assert scores.totals == (2.0, -4.0, 1.5)
    assert scores.by_reward == {"right": (1.0, 0.0, 1.0), "sometimes": (None, 4.0, 0.5)}
    assert scores.means == {"right": pytest.approx(2 / 3), "sometimes": 2.25}


def test_a_completion_to_which_no_reward_applies_has_no_total():
    """0 would be a verdict, and would pull its group's mean down."""

    def never(completions):
        return [None, None, None]

    scores = score(never)
    assert scores.totals == (None, None, None)
    assert math.isnan(scores.means["never"])


def test_a_reward_that_raises_is_named_with_the_prompt_and_the_completion():
    def half(completions, answer):
        return [
            int(text) / (int(wanted) + 3) for text, wanted in zip(completions, answer, strict=True)
        ]

    with pytest.raises(
        RewardError, match=r"half raised ZeroDivisionError.*prompt 9: '1 - 4 ='.* -3"
    ):
        score(half)


def test_a_reward_that_raises_only_on_the_whole_is_named_with_all_prompts():
    def one_at_a_time(completions):
        if len(completions) > 1:
            raise ValueError("too many")
        return [1.0]

    with pytest.raises(
        RewardError, match=r"one_at_a_time raised ValueError: too many.*prompts 4, 9"
    ):
        score(one_at_a_time)


def test_an_interrupt_inside_a_reward_stays_an_interrupt():
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, 0.0], "returned 2 values for 3 completions .prompts 4, 9"),
        (None, "returned NoneType None"),
        ("110", "returned str '110'"),
        (1.0, "returned float 1.0"),
        ([1.0, 1.0, math.nan], r"returned float nan for prompt 9 \('1 - 4 ='\)"),
        ([1.0, -math.inf, 1.0], "returned float -inf for prompt 4"),
        ([10**400, 1.0, 1.0], "returned int 1000.* for prompt 4"),
        ([1.0, "0", 1.0], "returned str '0' for prompt 4"),
    ],
)
def test_what_is_no_list_of_finite_numbers_is_refused_with_what_was_got(returned, message):
    def broken(completions):
        return returned

    with pytest.raises(RewardError, match=message) as caught:
        score(broken)
    assert "reward broken" in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_column_that_a_reward_cannot_do_without_is_asked_for_before_the_run():
    rewards = load_rewards(["first_integer"])
    rewards.require_columns(("answer", "level"))
    with pytest.raises(UsageError, match=r"first_integer needs a column 'answer'.* task: level"):
        rewards.require_columns(("level",))


def test_rewards_come_from_modules_files_and_the_builtin_names(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "loaded = []\n"
        "@dataclass\n"
        "class Judge:\n"
        "    name: 'str' = 'j'\n"
        "def length(completions):\n    loaded.append(1)\n    return [len(loaded)]\n"
        "def first_integer(completions):\n    loaded.append(1)\n    return [len(loaded)]\n"
    )
    specs = [
        "first_integer",
        f"{path}:length",
        f"{path}:first_integer",
        "grpo_lite.grpo.builtin_rewards:first_integer",
    ]
    rewards = load_rewards(specs, [1, 2, 3, 4])
    assert [reward.name for reward in rewards.rewards] == [specs[0], "length", specs[2], specs[3]]
    assert [reward.weight for reward in rewards.rewards] == [1, 2, 3, 4]
    scores = rewards.score(EXAMPLES[:1], [" 5"])
    assert scores.by_reward[specs[0]] == (1.0,)
    assert scores.by_reward["length"] == (1.0,)
    assert scores.by_reward[specs[2]] == (2.0,), "a file is executed once for all its functions"


@pytest.mark.parametrize(
    ("specs", "weights", "message"),
    [
        ([], None, "no reward is given"),
        (["first_integr"], None, "unknown reward 'first_integr'; nearest known: first_integer"),
        (
            ["grpo_lite.grpo.builtin_rewards:first_int"],
            None,
            "unknown function of .*builtin_rewards 'first_int'; nearest known: first_integer",
        ),
        (
            ["no_such_module:f"],
            None,
            "cannot import reward module 'no_such_module': ModuleNotFound",
        ),
        (["absent.py:f"], None, r"absent\.py does not exist; the current folder is"),
        (["first_integer", "first_integer"], None, "listed twice"),
        (["first_integer"], [1.0, 2.0], "2 weights for 1 rewards"),
        (["first_integer"], [math.nan], "weight of reward first_integer is nan"),
        (["math:hypot"], None, "does not tell its arguments"),
    ],
)
def test_a_reward_that_cannot_be_found_says_what_can(specs, weights, message):
    with pytest.raises(UsageError, match=message):
        load_rewards(specs, weights)


def test_a_file_that_fails_while_it_is_imported_is_named_with_its_error(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def length(:\n")
    before = set(sys.modules)
    with pytest.raises(UsageError, match=r"cannot import reward file .*broken\.py: SyntaxError"):
        load_rewards([f"{path}:length"])
    assert not [name for name in set(sys.modules) - before if "broken" in name]


def test_a_module_that_lies_in_the_current_folder_is_told_to_be_named_as_a_file(
    tmp_path, monkeypatch
):
    """An installed program does not import from the current folder: the usual first mistake."""
    monkeypatch.chdir(tmp_path)
    Path("my_first_reward.py").write_text("def f(completions):\n    return [1.0]\n")
    with pytest.raises(UsageError, match=r"hint: my_first_reward\.py:FUNCTION"):
        load_rewards(["my_first_reward:f"])


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (" 5", "5", 1.0),
        (" -3\n4 - 1 = 3", "-3", 1.0),
        (" 3", "-3", 0.0),
        (" 15", "5", 0.0),
        (" 4 5", "5", 0.0),
        ("The answer is +05.", 5, 1.0),
        ("", "0", 0.0),
        ("five", "5", 0.0),
        ("9" * 5000, "9", 0.0),
    ],
)
def test_first_integer_pays_for_the_first_signed_integer_alone(completion, answer, reward):
    assert first_integer([completion], [answer]) == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("{answer}", 1.0),
        ("Well: <answer> {answer} </answer>", 1.0),
        ("<answer>1</answer> no, <answer>{answer}</answer>", 1.0),
        ("<answer>{answer}</answer> no, <answer>x</answer>", 0.0),
        ("The answer is {answer}", 0.0),
        ("<answer>{answer} or 7 or 8</answer>", 0.0),
        ("", 0.0),
    ],
)
@pytest.mark.parametrize("name", ["letter_counting", "prime_factorization"])
def test_reasoning_gym_pays_for_an_exact_answer_alone(name, completion, reward):
    """Its own scorers pay for each text that contains the answer, and some raise on free text."""
    (example,) = load_task(f"reasoning_gym:{name}", settings={"size": 1}).train
    text = completion.format(answer=example.columns["answer"])
    columns = {column: [value] for column, value in example.columns.items()}
    assert reasoning_gym(completions=[text], **columns) == [reward]


def test_the_shipped_example_task_and_its_rewards_work_together():
    folder = Path(__file__).parents[2] / "examples"
    task = load_task(str(folder / "capitals.jsonl"), held_out=4)
    rewards = load_rewards(
        [f"{folder}/capitals_rewards.py:{name}" for name in ("names_capital", "is_short")],
        [1.0, 0.5],
    )
    rewards.require_columns(task.columns)
    answer = task.train[0].columns["answer"]
    scores = rewards.score([task.train[0]] * 3, [answer, "No idea", ""])
    assert scores.totals == (1.5, 0.25, 0.0)
