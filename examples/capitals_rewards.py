"""Rewards for examples/capitals.jsonl: name the capital, and say little else.

In a recipe: rewards = ["examples/capitals_rewards.py:names_capital",
"examples/capitals_rewards.py:is_short"], weights = [1.0, 0.2]
"""


def names_capital(completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 where the completion names the capital: each column of the file is an argument."""
    return [
        float(capital.lower() in completion.lower())
        for completion, capital in zip(completions, answer, strict=True)
    ]


def is_short(completions: list[str]) -> list[float | None]:
    """Return 1 for one word, less for more; None (does not apply) for an empty completion."""
    counts = [len(completion.split()) for completion in completions]
    return [1 / count if count else None for count in counts]
