"""Recipes: what `fit` writes `train` reads, and a wrong key is named with its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_lite.errors import UsageError
from grpo_lite.plan import Plan, Workload
from grpo_lite.recipe import Recipe, read_recipe, recipe_to_toml, write_recipe

RECIPE = Recipe(
    model="some/model",
    card="virtual:3GiB",
    workload=Workload(prompts_per_step=2, num_generations=4),
    plan=Plan(
        micro_batch=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        logprob_chunk_tokens=64,
        rollout_batch=8,
        reasons={"micro_batch": "8 rows do not fit"},
    ),
)


def test_a_recipe_comes_back_as_it_was_written_with_reasons_as_comments(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    write_recipe(RECIPE, path)
    assert read_recipe(path) == RECIPE
    assert "# 8 rows do not fit\nmicro_batch = 4" in path.read_text()
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("micro_batch = 4", "micro_bach = 4", ["plan", "micro_bach", "micro_batch"]),
        ("micro_batch = 4", "micro_batch = true", ["plan", "micro_batch", "int"]),
        ("micro_batch = 4", "micro_batch = 3", ["6 rows", "8"]),
        ("micro_batch = 4", "micro_batch = 0", ["micro_batch", "at least 1"]),
        ('loss_type = "dapo"', 'loss_type = "ppo"', ["loss_type", "dapo"]),
        ("steps = 100", 'steps = "many"', ["training", "steps", "int"]),
        ("steps = 100", "steps = -1", ["steps", "above 0"]),
        ('reserve = "0"', 'reserve = "lots"', ["reserve", "lots"]),
        ("schema = 1", "schema = 9", ["schema", "9"]),
        ('model = "some/model"', "", ["model is missing"]),
        ("[plan]", "[plan", ["no valid TOML"]),
        ("functions = []", "functions = [1]", ["functions", "str"]),
    ],
)
def test_a_malformed_recipe_names_file_key_and_what_was_expected(
    tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    """Somebody edits by hand at midnight: the message must be enough to mend it."""
    text = recipe_to_toml(RECIPE)
    assert old in text
    path = tmp_path / "recipe.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    for word in ["recipe.toml", *words]:
        assert word in str(caught.value)


scalars = st.one_of(st.integers(-5, 99), st.booleans(), st.text(max_size=5), st.floats(0, 1))
keys = st.sampled_from(
    ["model", "card", "workload", "plan", "task", "reward", "training", "micro_batch", "beta"]
) | st.text("abc_", min_size=1, max_size=4)  # fmt: skip
tables = st.recursive(
    scalars, lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=8,
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.dictionaries(keys, tables, max_size=5))
def test_any_toml_is_a_recipe_or_a_clear_error(tmp_path: Path, data: dict[str, object]) -> None:
    path = tmp_path / "fuzzed.toml"
    path.write_text(tomli_w.dumps(data))
    with pytest.raises(UsageError, match=r"fuzzed\.toml"):
        read_recipe(path)


def test_a_plan_must_make_the_rows_of_its_workload() -> None:
    with pytest.raises(UsageError, match="8 rows"):
        replace(RECIPE, workload=Workload(prompts_per_step=3, num_generations=4))
