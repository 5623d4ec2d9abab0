"""Recipes: what `fit` writes `train` reads, and a wrong key is named with its file."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import plans, workloads

from grpo_lite.errors import UsageError
from grpo_lite.plan import Plan, Workload
from grpo_lite.recipe import (
    Recipe,
    RewardSettings,
    TaskSettings,
    TrainingSettings,
    read_recipe,
    recipe_to_toml,
    write_recipe,
)

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
        ("learning_rate = 1e-06", "learning_rate = nan", ["training", "learning_rate", "finite"]),
        ("learning_rate = 1e-06", f"learning_rate = {10**400}", ["learning_rate", "finite"]),
        ("temperature = 1.0", "temperature = inf", ["workload", "temperature", "finite"]),
        ("weights = []", "weights = [1.0, nan]", ["reward", "weights", "finite"]),
        ("epsilon = 0.2", "epsilon = -0.5", ["workload", "epsilon", "from 0 to 1"]),
        ('reserve = "0"', f'reserve = "{10**400}GiB"', ["reserve", "bytes"]),
        ("steps = 100", "steps = " + "9" * 5000, ["no valid TOML"]),
        ("steps = 100", "steps = " + "[" * 3000 + "]" * 3000, ["no valid TOML"]),
        ("[plan]", "[[plan]]", ["plan", "table"]),
        ("[task.settings]", "[[task.settings]]", ["settings", "dict"]),
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


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
reasons = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]) | st.just("\n"))
numbers = st.floats(1e-9, 1e3)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), workload=workloads)
def test_any_recipe_comes_back_whole(
    tmp_path: Path, data: st.DataObject, workload: Workload
) -> None:
    """What `fit` decided must be what `train` obeys, whatever stands in its words and reasons."""
    plan = data.draw(plans(workload)).with_reasons(
        micro_batch=data.draw(reasons), rollout_batch=data.draw(reasons)
    )
    recipe = Recipe(
        model=data.draw(names),
        card=data.draw(names),
        reserve=data.draw(st.integers(0, 2**40).map(lambda n: f"{n}KB")),
        workload=workload,
        plan=plan,
        task=TaskSettings(
            name=data.draw(names),
            settings=data.draw(st.dictionaries(names, names | st.integers(0, 9) | st.booleans())),
        ),
        reward=RewardSettings(
            functions=data.draw(st.lists(names, max_size=3)),
            weights=data.draw(st.lists(numbers, max_size=3)),
        ),
        training=TrainingSettings(learning_rate=data.draw(numbers)),
    )
    path = tmp_path / "drawn.toml"
    write_recipe(recipe, path)
    assert read_recipe(path) == recipe


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_recipe_with_any_line_changed_is_a_recipe_or_a_clear_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Random tables hardly ever get past the first key: here all others are right."""
    lines = recipe_to_toml(RECIPE).splitlines()
    index = data.draw(st.integers(0, len(lines) - 1))
    name, _, _ = lines[index].partition(" = ")
    value = data.draw(
        st.sampled_from(["nan", "-inf", "1e999", "0", "-1", "true", '""', "[]", "{}", "1979-05-27"])
        | st.integers().map(str)
        | st.floats().map(repr)
        | names.map(repr)
    )
    changes = [f"{name} = {value}", value, "", lines[index] + value]
    lines[index] = data.draw(st.sampled_from(changes))
    path = tmp_path / "changed.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    recipe = None
    with suppress(UsageError):  # anything else is a bug
        recipe = read_recipe(path)
    if recipe is not None:
        assert recipe.plan.num_rows == recipe.workload.num_rows
        rewritten = tmp_path / "again.toml"
        write_recipe(recipe, rewritten)
        assert read_recipe(rewritten) == recipe


def test_bytes_that_are_no_text_and_a_folder_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("binary.toml", ".", "missing.toml"):
        with pytest.raises(UsageError):
            read_recipe(tmp_path / name)
    with pytest.raises(UsageError, match="cannot be written"):
        write_recipe(RECIPE, tmp_path / "no folder" / "recipe.toml")


def test_a_plan_must_make_the_rows_of_its_workload() -> None:
    with pytest.raises(UsageError, match="8 rows"):
        replace(RECIPE, workload=Workload(prompts_per_step=3, num_generations=4))
