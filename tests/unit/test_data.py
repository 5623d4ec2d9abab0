"""Tasks: what is trained on, what is held out, in which order, and what is refused."""

import json
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lite.errors import UsageError
from grpo_lite.grpo.data import Example, Message, PromptStream, load_task

ONE_DIGIT_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def write_task(folder, *rows):
    path = folder / "sums.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def numbered(count):
    return [Example(index=index, prompt=f"p{index}", columns={}) for index in range(count)]


def test_a_file_gives_its_prompts_and_all_other_columns(tmp_path):
    path = write_task(tmp_path, {"prompt": "2 + 3 =", "answer": 5, "level": "easy"}, "")
    task = load_task(str(path))
    assert task.name == "sums"
    assert task.train == (
        Example(index=0, prompt="2 + 3 =", columns={"answer": 5, "level": "easy"}),
    )
    assert task.held_out == ()
    assert task.columns == ("answer", "level")


def test_a_chat_is_kept_as_messages_and_read_as_text_by_rewards(tmp_path):
    chat = [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 3?"}]
    (example,) = load_task(str(write_task(tmp_path, {"prompt": chat}))).train
    assert example.prompt == (
        Message(role="system", content="Count."),
        Message(role="user", content="2 + 3?"),
    )
    assert example.prompt_text == "Count.\n\n2 + 3?"


def test_a_column_that_a_line_lacks_is_none_there(tmp_path):
    """A reward with an argument for the column would otherwise fail in some updates only."""
    path = write_task(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b", "level": 2})
    first, second = load_task(str(path)).train
    assert first.columns == {"answer": 1, "level": None}
    assert second.columns == {"answer": None, "level": 2}


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path):
    path = write_task(tmp_path, json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False))
    assert load_task(str(path)).train[0].prompt == "a\u2028b"


@given(
    numbers=st.lists(st.integers(0, 12), min_size=2, max_size=40),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_no_held_out_prompt_is_ever_trained_on(tmp_path_factory, numbers, seed, data):
    """A prompt that stands twice in the file must not land on both sides."""
    held_out = data.draw(st.integers(0, len(set(numbers)) - 1))
    rows = [{"prompt": f"p{number}", "line": line} for line, number in enumerate(numbers)]
    path = write_task(tmp_path_factory.mktemp("task"), *rows)
    task = load_task(str(path), held_out=held_out, seed=seed)
    kept_out = [example.prompt for example in task.held_out]
    assert len(set(kept_out)) == len(kept_out) == held_out
    trained = [example.prompt for example in task.train]
    expected = [row["prompt"] for row in rows if row["prompt"] not in kept_out]
    assert trained == expected


def test_the_split_depends_on_the_seed_alone(tmp_path):
    path = str(write_task(tmp_path, *({"prompt": f"p{index}"} for index in range(40))))
    splits = [load_task(path, held_out=10, seed=seed) for seed in (1, 1, 2)]
    assert splits[0] == splits[1]
    kept_out = [{example.prompt for example in split.held_out} for split in splits]
    assert kept_out[0] != kept_out[2]


def test_a_limit_shortens_training_and_leaves_the_held_out_problems(tmp_path):
    path = str(write_task(tmp_path, *({"prompt": f"p{index}"} for index in range(40))))
    whole, short = (load_task(path, held_out=10, limit=limit) for limit in (None, 5))
    assert short.held_out == whole.held_out
    assert short.train == whole.train[:5]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', '{"prompt": '], r"sums\.jsonl:2: not JSON: .* at column"),
        (['{"question": "a", "answer": 1}'], r"sums\.jsonl:1: no column 'prompt'.*question, answ"),
        (['{"prompt": 3}'], r"sums\.jsonl:1: prompt is 3"),
        (['{"prompt": [{"role": "user"}]}'], r"sums\.jsonl:1: prompt is \[\{"),
        (['{"prompt": []}'], r"sums\.jsonl:1: prompt is \[\]"),
        (['["a"]'], r"sums\.jsonl:1: a list, not an object"),
        (['{"prompt": "a", "completions": 1}'], r"sums\.jsonl:1: column 'completions'"),
        (
            ['{"id": 7, "prompt": "a"}', "", '{"id": 7, "prompt": "b"}'],
            r"sums\.jsonl:3: id 7 was already used in line 1",
        ),
        (["", ""], "holds no prompts"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, lines, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_task(str(write_task(tmp_path, *lines)))
    assert caught.value.hint


def test_a_missing_file_says_what_a_task_may_be(tmp_path):
    with pytest.raises(UsageError, match=r"absent\.jsonl is not a file\nhint: .*reasoning_gym"):
        load_task(str(tmp_path / "absent.jsonl"))


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="as UTF-8 text"):
        load_task(str(path))


def test_settings_for_a_file_are_refused_rather_than_ignored(tmp_path):
    path = write_task(tmp_path, {"prompt": "a"})
    with pytest.raises(UsageError, match="takes no settings; got min_terms"):
        load_task(str(path), settings={"min_terms": 2})


def test_holding_out_every_prompt_is_refused_with_the_count(tmp_path):
    path = write_task(tmp_path, {"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(UsageError, match="hold out 2 of the 2 distinct prompts"):
        load_task(str(path), held_out=2)
    with pytest.raises(UsageError, match="limit is 0"):
        load_task(str(path), limit=0)


@given(
    count=st.integers(1, 30),
    per_step=st.integers(1, 30),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_an_epoch_visits_no_example_twice_and_leaves_less_than_a_step(count, per_step, seed, epoch):
    if per_step > count:
        return
    stream = PromptStream(examples=numbered(count), seed=seed)
    steps = count // per_step
    visits = Counter(
        example.index
        for step in range(epoch * steps, (epoch + 1) * steps)
        for example in stream.next_prompts(step, per_step)
    )
    assert set(visits.values()) == {1}
    assert count - len(visits) < per_step


def test_the_order_is_a_function_of_seed_and_step():
    """A resumed run has no state to restore: it asks a new stream for its step."""
    first, again, other = (PromptStream(examples=numbered(64), seed=seed) for seed in (3, 3, 4))
    steps = [first.next_prompts(step, 8) for step in range(20)]
    assert [again.next_prompts(step, 8) for step in reversed(range(20))] == steps[::-1]
    assert [other.next_prompts(step, 8) for step in range(20)] != steps
    assert steps[:8] != steps[8:16], "each epoch has an order of its own"


def test_fewer_prompts_than_a_step_needs_are_refused_with_both_numbers():
    stream = PromptStream(examples=numbered(5), seed=0)
    with pytest.raises(
        UsageError, match=r"needs 8 different prompts, the task has 5(.|\n)*-step 5"
    ):
        stream.next_prompts(0, 8)


def test_few_shot_sums_show_two_solved_lines_and_a_bare_expression():
    """The sentence around an expression costs a small model nearly all of its accuracy."""
    task = load_task(
        "reasoning_gym:chain_sum",
        settings={**ONE_DIGIT_SUMS, "prompt_style": "few_shot"},
        held_out=64,
    )
    assert len(task.held_out) == 64
    assert 120 <= len(task.train) <= 136, "200 problems exist; 1000 draws find nearly all"
    shots = {example.prompt.rpartition("\n")[0] for example in task.train + task.held_out}
    assert len(shots) == 1
    solved = [line.partition(" = ") for line in shots.pop().split("\n")]
    assert [eval(left) for left, _, _ in solved] == [int(right) for *_, right in solved]
    asked = [example.prompt.rpartition("\n")[2] for example in task.train + task.held_out]
    assert len(set(asked)) == len(asked)
    assert not {f"{left} =" for left, _, _ in solved} & set(asked)
    for example in task.train:
        expression = example.prompt.rpartition("\n")[2].removesuffix(" =")
        assert eval(expression) == int(example.columns["answer"])


def test_solved_lines_do_not_change_with_the_seed():
    """Runs with several seeds would otherwise start from different accuracies."""
    starts = {
        load_task(
            "reasoning_gym:chain_sum", settings={"prompt_style": "few_shot", "size": 5}, seed=seed
        )
        .train[0]
        .prompt.rpartition("\n")[0]
        for seed in range(3)
    }
    assert len(starts) == 1


def test_other_prompt_styles_keep_the_question():
    chat, plain = (
        load_task("reasoning_gym:chain_sum", settings={"prompt_style": style, "size": 3}).train[0]
        for style in ("chat", "plain")
    )
    assert plain.prompt == plain.columns["question"] == chat.columns["question"]
    assert [message.role for message in chat.prompt] == ["user"]
    assert chat.prompt_text.startswith(plain.prompt)
    assert "<answer>" in chat.prompt_text


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("chian_sum", {}, r"unknown reasoning_gym task 'chian_sum'.*chain_sum"),
        ("chain_sum", {"min_trms": 2}, r"unknown setting .*'min_trms'.*min_terms"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, r"refuses its settings.*min_terms = 5"),
        ("chain_sum", {"prompt_style": "fewshot"}, r"unknown prompt_style 'fewshot'.*few_shot"),
        ("gcd", {"prompt_style": "few_shot"}, r"needs a bare expression, which .*gcd"),
    ],
)
def test_names_and_settings_of_reasoning_gym_are_checked(name, settings, message):
    with pytest.raises(UsageError, match=message):
        load_task(f"reasoning_gym:{name}", settings=settings)


def test_without_reasoning_gym_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match=r"hint: pip install \"grpo-lite\[demo\]\""):
        load_task("reasoning_gym:chain_sum")
