"""Explaining a pasted out-of-memory error: every wording, never more certain than its figures."""

import io
import json
from dataclasses import replace

import pytest
from test_speed import NAMES, footprint, profile

from grpo_lite.cards.card import Budget
from grpo_lite.cards.oom_text import FailureKind, read_oom_text, tensor_range
from grpo_lite.commands.main import main
from grpo_lite.errors import UsageError
from grpo_lite.explain import Certainty, explain
from grpo_lite.plan import Category, Phase, Plan, Workload
from grpo_lite.predict.footprint import Instant, Term
from grpo_lite.report.explained import explanation_to_json, explanation_to_text
from grpo_lite.search import Question
from grpo_lite.suspects import Planned, Setting, WeightShape
from grpo_lite.units import GIB, MIB

TORCH_2 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total "
    "capacity of 15.73 GiB of which 1.28 GiB is free. Process 1234 has 1.10 GiB memory in use. "
    "Including non-PyTorch memory, this process has 13.30 GiB memory in use. Of the allocated "
    "memory 11.82 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting ..."
)
TORCH_2_PRIVATE_POOLS = TORCH_2.replace(
    "allocated by PyTorch, and",
    "allocated by PyTorch, with 24.00 MiB allocated in private pools (e.g., CUDA Graphs), and",
)
TORCH_2_0 = TORCH_2.replace("capacity", "capacty").replace(
    "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"
)
TORCH_1_13 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB (GPU 0; 15.73 GiB "
    "total capacity; 11.82 GiB already allocated; 1.28 GiB free; 13.02 GiB reserved in total by "
    "PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb"
)
VIRTUAL = (
    "torch.OutOfMemoryError: VirtualCard out of memory. Tried to allocate 4.64 GiB. Of 3.00 GiB in "
    "all, 2.50 GiB is allocated, 512 MiB is free (4978634752 bytes asked, 536870912 free)."
)
QWEN_ISH = Setting(
    weights=(
        WeightShape(name="embed.weight", dimensions=(151936, 896), count=1),
        WeightShape(name="layers.*.up.weight", dimensions=(4864, 896), count=24),
    ),
    vocabulary=151936,
    num_heads=14,
)


def planned():
    """A run of grpo-lite whose head makes one float32 logits tensor for each chunk."""
    logits = Term(
        category=Category.LOGITS,
        operation="_to_copy",
        dimensions=("chunk", "50000"),
        item_bytes=4,
        bytes={(0, 0, 0, 1, 0): 200_000.0},
    )
    instant = Instant(where="head", counts={0: 1}, bytes=dict(logits.bytes))
    names = [*NAMES, *(f"{name}/accumulating" for name in NAMES[2:])]
    stage = replace(footprint().stages["backward"], instants=(instant,))
    workload = Workload(
        method="lora",
        dtype="float32",
        prompts_per_step=1,
        num_generations=4,
        max_prompt_length=64,
        max_completion_length=256,
    )
    plan = Plan(
        micro_batch=4,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        logprob_chunk_tokens=1024,
        rollout_batch=4,
    )
    question = Question(
        footprint=replace(footprint(), terms=(logits,), stages=dict.fromkeys(names, stage)),
        profile=profile("measured"),
        budget=Budget(card_bytes=GIB, total_bytes=GIB),
    )
    return Planned(question=question, workload=workload, plan=plan)


def known(rows, prompt, completion):
    return Setting(
        weights=QWEN_ISH.weights,
        vocabulary=151936,
        num_heads=14,
        rows=rows,
        prompt_tokens=prompt,
        completion_tokens=completion,
    )


@pytest.mark.parametrize("text", [TORCH_2, TORCH_2_PRIVATE_POOLS, TORCH_2_0, TORCH_1_13])
def test_every_wording_of_torch_gives_the_same_figures(text):
    oom = read_oom_text(text)
    assert oom.kind is FailureKind.CARD
    assert oom.asked_bytes == round(4.64 * GIB)
    assert oom.total_bytes == round(15.73 * GIB)
    assert oom.free_bytes == round(1.28 * GIB)
    assert oom.allocated_bytes == round(11.82 * GIB)
    assert abs(oom.cached_bytes - 1.20 * GIB) < 2


def test_the_last_error_of_a_log_counts():
    """A rescued run logs earlier errors; the one that ended it is the question."""
    earlier = TORCH_1_13.replace("4.64", "1.00")
    assert read_oom_text(f"{earlier}\nretrying\n{TORCH_2}").asked_bytes == round(4.64 * GIB)


def test_a_process_limit_is_what_was_missing_and_not_the_free_card():
    text = (
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
        "of which 20.00 GiB is free. Including non-PyTorch memory, this process has 4.00 GiB "
        "memory in use. 4.00 GiB allowed; Of the allocated memory 3.50 GiB is allocated by "
        "PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )
    explanation = explain(read_oom_text(text), QWEN_ISH)
    assert explanation.missing_bytes == GIB // 2


def test_the_virtual_cards_own_error_is_read_to_the_byte():
    oom = read_oom_text(VIRTUAL)
    assert (oom.asked_bytes, oom.free_bytes) == (4978634752, 536870912)
    assert oom.tensor_bytes.low_bytes == oom.tensor_bytes.high_bytes == 4978634752


@pytest.mark.parametrize(
    ("printed", "num_bytes", "is_held"),
    [
        ("130.00 MiB", 3584 * 18944 * 2, True),  # 129.5 MiB, rounded up to 2 MiB
        ("130.00 MiB", 130 * MIB + 1, False),
        ("130.00 MiB", 128 * MIB, False),
        ("9.27 GiB", 16384 * 151936 * 4, True),
        ("9.27 GiB", 9_946_000_000, False),
        ("20.00 MiB", 3 * MIB, True),  # any tensor of 1 to 10 MiB is asked for as 20 MiB
        ("2.00 MiB", 4096, True),
        ("2.00 MiB", 2 * MIB, False),
        ("1000 B", 1000, True),
    ],
)
def test_a_printed_size_stands_for_the_tensors_that_round_to_it(printed, num_bytes, is_held):
    assert tensor_range(printed).holds(num_bytes) is is_held


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might", FailureKind.DRIVER),
        (
            'File "torch/utils/data/_utils/pin_memory.py"\nRuntimeError: CUDA error: out of memory',
            FailureKind.PINNED,
        ),
        ("cudaHostAlloc failed with error 2", FailureKind.PINNED),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED", FailureKind.DRIVER),
        ("RuntimeError: CUDA driver error: out of memory", FailureKind.DRIVER),
        (
            "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4978634752 bytes. Error code 12",
            FailureKind.HOST,
        ),
        ("numpy: Unable to allocate 7.45 GiB for an array with shape", FailureKind.HOST),
        ("MemoryError", FailureKind.HOST),
        ("./run.sh: line 3:  4242 Killed                  python train.py", FailureKind.KILLED),
        ("Killed", FailureKind.KILLED),
        (
            "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)",
            FailureKind.KILLED,
        ),
        ("exitcode  : -9 (pid: 4242)", FailureKind.KILLED),
        ("Out of memory: Killed process 4242 (python) total-vm:81G", FailureKind.KILLED),
    ],
)
def test_what_is_not_about_the_cards_tensors_is_said_to_be_something_else(text, kind):
    """The danger: advice about VRAM for a host that ran out."""
    oom = read_oom_text(text)
    assert oom.kind is kind
    explanation = explain(oom, known(8, 512, 512))
    assert explanation.certainty is Certainty.CANNOT_TELL
    assert explanation.changes
    assert "tensor:" not in explanation_to_text(explanation)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nothing was pasted"),
        (" \n\t", "nothing was pasted"),
        ("\x7fELF\x00\x01\x00 Tried to allocate", "binary"),
        ("\ufffd\ufffd\ufffd\ufffdabc", "binary"),
        ("KeyError: 'labels'", "no out-of-memory error"),
        ("the run was killed by a bug", "no out-of-memory error"),
    ],
)
def test_a_paste_that_is_no_error_is_refused_with_a_cure(text, words):
    with pytest.raises(UsageError, match=words) as caught:
        read_oom_text(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("frame", "phase"),
    [
        (
            'File "trainer.py", line 9, in training_step\n self.accelerator.backward(loss)',
            "backward",
        ),
        ('File "torch/optim/adam.py", in _multi_tensor_adam', "step"),
        ('File "grpo_trainer.py", in compute_loss\n in _get_per_token_logps', "forward"),
        ('File "grpo_trainer.py", in _get_per_token_logps', "logprob"),
        ('File "grpo_trainer.py", in x\n  unwrapped_model.generate(', "rollout"),
        ("model = AutoModel.from_pretrained(name)", "load"),
        ("model.save_pretrained(folder)", "save"),
        ("in something else", None),
    ],
)
def test_the_phase_is_read_from_the_traceback(frame, phase):
    oom = read_oom_text(f"{frame}\n{TORCH_2}")
    assert oom.phase == (None if phase is None else Phase(phase))


def test_logits_of_known_rows_and_tokens_are_named_with_the_smallest_change():
    explanation = explain(read_oom_text(TORCH_2), known(8, 512, 512))
    assert explanation.certainty is Certainty.NAMED
    assert explanation.matches[0].arithmetic == "8 rows x 1,024 tokens x 151,936 x 4 bytes"
    assert explanation.missing_bytes == round(4.64 * GIB) - round(1.28 * GIB)
    fewer = next(c for c in explanation.changes if "8 -> 2" in c.what)
    assert fewer.covers
    assert fewer.frees_bytes >= explanation.missing_bytes


def test_without_rows_nothing_is_named_although_some_number_of_tokens_would_match():
    """Any size is some number of tokens' logits: that is no explanation, and must not be one."""
    explanation = explain(read_oom_text(TORCH_2), QWEN_ISH)
    assert explanation.certainty is Certainty.CANNOT_TELL
    assert any("8,205 tokens would be" in note for note in explanation.notes)


def test_a_weights_shape_alone_is_never_called_certain():
    text = TORCH_2.replace("4.64 GiB", "10.00 MiB")  # 4864 x 896 x 2 is 8.3 MiB: a shared block
    assert explain(read_oom_text(text), QWEN_ISH).certainty is Certainty.CANNOT_TELL
    text = TORCH_2.replace("4.64 GiB", "520.00 MiB")  # 151936 x 896 x 4 is 519.3 MiB
    assert explain(read_oom_text(text), QWEN_ISH).certainty is Certainty.LIKELY


def test_two_tensors_of_nearly_one_size_are_both_told():
    setting = Setting(
        weights=(
            WeightShape(name="a", dimensions=(4096, 8192), count=1),
            WeightShape(name="b", dimensions=(4095, 8192), count=1),
        )
    )
    explanation = explain(read_oom_text(TORCH_2.replace("4.64 GiB", "128.00 MiB")), setting)
    assert explanation.certainty is Certainty.SEVERAL
    assert len(explanation.matches) == 2


def test_a_small_request_is_not_blamed():
    """At 20 MiB the last drop is asked for; naming a 20 MiB tensor would mislead."""
    explanation = explain(read_oom_text(TORCH_2.replace("4.64 GiB", "20.00 MiB")), QWEN_ISH)
    assert explanation.certainty is Certainty.CANNOT_TELL
    assert any("any small tensor" in note for note in explanation.notes)


def test_a_tensor_of_another_phase_is_ruled_out_by_the_traceback():
    text = f"model.save_pretrained(folder)\n{TORCH_2}"
    assert explain(read_oom_text(text), known(8, 512, 512)).matches == ()


def test_the_holders_add_up_to_the_card():
    explanation = explain(read_oom_text(TORCH_2), QWEN_ISH)
    total_bytes = sum(holder.num_bytes for holder in explanation.holders)
    assert abs(total_bytes - 15.73 * GIB) < MIB
    assert any(holder.who == "process 1234" for holder in explanation.holders)


def test_an_old_message_does_not_tell_context_and_others_apart_and_says_so():
    holders = explain(read_oom_text(TORCH_1_13), QWEN_ISH).holders
    assert any("does not tell them apart" in holder.who for holder in holders)


def test_gaps_that_were_large_enough_are_the_first_thing_to_close():
    text = TORCH_2.replace("4.64 GiB", "1.90 GiB")
    changes = explain(read_oom_text(text), QWEN_ISH).changes
    assert any("expandable_segments" in change.what for change in changes)
    wsl = explain(read_oom_text(f"Linux 5.15 microsoft-standard-WSL2\n{text}"), QWEN_ISH).changes
    assert not any("expandable_segments" in change.what for change in wsl)


def test_the_command_reads_stdin_and_writes_json_that_can_be_read(monkeypatch, capsys):
    stdin = io.TextIOWrapper(io.BytesIO(TORCH_2.encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["explain", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == 1
    assert data["certainty"] == "cannot tell"
    assert data["oom"]["asked_bytes"] == round(4.64 * GIB)


def test_the_command_refuses_an_empty_file_and_a_missing_one(tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert main(["explain", str(empty)]) == 2
    assert main(["explain", str(tmp_path / "none.txt")]) == 2
    assert "hint:" in capsys.readouterr().err


def test_a_run_of_grpo_lite_is_explained_by_its_own_trace_and_its_own_next_plan():
    """The danger: blaming whole logits, which this loop never makes."""
    text = (
        "share.loss.backward()\ntorch.OutOfMemoryError: VirtualCard out of memory. Tried to "
        "allocate 195 MiB. Of 1.00 GiB in all, 900 MiB is allocated, 124 MiB is free "
        f"({1024 * 200_000} bytes asked, {124 * MIB} free)."
    )
    explanation = explain(read_oom_text(text), known(4, 64, 256), planned())
    assert explanation.certainty is Certainty.NAMED
    assert explanation.matches[0].arithmetic == "1,024 tokens of a chunk x 50000 x 4 bytes"
    first = explanation.changes[0]
    assert first.what.startswith("logprob_chunk_tokens 1024 -> ")
    assert first.covers
    assert first.frees_bytes >= explanation.missing_bytes


def test_json_lists_phases_as_words():
    data = json.loads(explanation_to_json(explain(read_oom_text(TORCH_2), known(8, 512, 512))))
    assert data["matches"][0]["phases"] == ["backward", "forward", "logprob"]
