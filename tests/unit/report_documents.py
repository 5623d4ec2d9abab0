"""Documents made by hand for the tests of the report: one that fits, one tight, one that does not.

Their numbers are plausible and rounded; no prediction was asked.
"""

from dataclasses import replace

from grpo_lite.cards.card import Budget
from grpo_lite.plan import Category, Phase, Plan, Workload
from grpo_lite.predict.memory import MemoryEstimate, PhaseEstimate, TensorGroup
from grpo_lite.predict.speed import PhaseSpeed, SpeedEstimate
from grpo_lite.report.document import Alternative, Choice, Document, Rehearsal
from grpo_lite.search import Candidate, Verdict
from grpo_lite.units import GIB


def phase(name, where, *largest, **gib):
    by_category = {Category[category]: round(size * GIB) for category, size in gib.items()}
    return PhaseEstimate(
        phase=name,
        allocated_bytes=sum(by_category.values()),
        by_category=by_category,
        where=where,
        largest=largest,
    )


def tensors(category, operation, arithmetic, gib):
    return TensorGroup(
        category=category, operation=operation, arithmetic=arithmetic, num_bytes=round(gib * GIB)
    )


LORA = Workload(method="lora", max_completion_length=512)
LORA_PLAN = Plan(
    micro_batch=8,
    gradient_accumulation_steps=8,
    gradient_checkpointing=False,
    logprob_chunk_tokens=1024,
    rollout_batch=64,
)
LORA_MEMORY = MemoryEstimate(
    phases=(
        phase(Phase.LOAD, "weights on the card", PARAMETER=2.94),
        phase(
            Phase.ROLLOUT,
            "decode, layer 28",
            tensors(Category.KV_CACHE, "cat", "56 tensors x 64 rows x 767 x 256 x 2 bytes", 1.31),
            PARAMETER=2.94,
            OPTIMIZER_STATE=0.14,
            KV_CACHE=1.34,
            TEMPORARY=0.31,
        ),
        phase(
            Phase.FORWARD,
            "forward, head",
            PARAMETER=2.94,
            GRADIENT=0.07,
            OPTIMIZER_STATE=0.14,
            ACTIVATION=8.65,
            LOGITS=0.29,
        ),
        phase(
            Phase.BACKWARD,
            "backward, head",
            tensors(
                Category.ACTIVATION,
                "mul",
                "84 tensors x 8 rows x 768 tokens x 8960 x 2 bytes",
                8.61,
            ),
            tensors(
                Category.LOGITS,
                "_log_softmax",
                "2 tensors x 1,024 tokens of a chunk x 151936 x 4 bytes",
                1.16,
            ),
            tensors(Category.TEMPORARY, "mm", "151936 x 1536 x 2 bytes", 0.43),
            PARAMETER=2.94,
            GRADIENT=0.07,
            OPTIMIZER_STATE=0.14,
            ACTIVATION=8.65,
            LOGITS=1.16,
            TEMPORARY=0.43,
        ),
        phase(
            Phase.STEP, "gradients and states", PARAMETER=2.94, GRADIENT=0.07, OPTIMIZER_STATE=0.14
        ),
    )
)
LORA_SPEED = SpeedEstimate(
    phases=(
        PhaseSpeed(phase=Phase.ROLLOUT, seconds=23.4, bound_by="launch"),
        PhaseSpeed(phase=Phase.FORWARD, seconds=5.71, bound_by="compute"),
        PhaseSpeed(phase=Phase.BACKWARD, seconds=11.9, bound_by="compute"),
        PhaseSpeed(phase=Phase.STEP, seconds=0.0042, bound_by="launch"),
    ),
    num_completion_tokens=64 * 512,
)
FITS = Document(
    model="Qwen/Qwen2.5-1.5B-Instruct",
    model_note="shape of Qwen/Qwen2.5-1.5B, shipped with grpo-lite",
    num_parameters=1_562_179_072,
    num_trainable=18_464_768,
    card="rtx-3080-laptop-16gb",
    card_title="NVIDIA GeForce RTX 3080 Laptop GPU",
    card_note="datasheet figures, nothing measured on this machine",
    budget=Budget(
        card_bytes=round(14.72 * GIB),
        total_bytes=16 * GIB,
        runtime_bytes=round(0.5 * GIB),
        held_by_others_bytes=round(0.78 * GIB),
    ),
    chosen=Candidate(
        workload=LORA,
        plan=LORA_PLAN,
        memory=LORA_MEMORY,
        speed=LORA_SPEED,
        verdict=Verdict.FITS,
    ),
    choices=(
        Choice(
            setting="micro_batch",
            value="8",
            reason="16 would need 22.4 GiB in backward; 4 is 3 % slower",
        ),
        Choice(setting="gradient_accumulation_steps", value="8", reason="64 rows in parts of 8"),
        Choice(setting="gradient_checkpointing", value="no", reason="it fits without, 21 % faster"),
        Choice(
            setting="logprob_chunk_tokens",
            value="1024",
            reason="more saves no time; all 4096 tokens at once would need 3.48 GiB more",
        ),
        Choice(setting="rollout_batch", value="64", reason="all rows share each pass of weights"),
    ),
    alternatives=(
        Alternative(
            description="micro-batch 4 x 16",
            flags="",
            peak_bytes=round(8.6 * GIB),
            seconds=42.3,
            verdict=Verdict.FITS,
        ),
        Alternative(
            description="micro-batch 16 x 4 with checkpointing",
            flags="",
            peak_bytes=round(7.1 * GIB),
            seconds=49.8,
            verdict=Verdict.FITS,
        ),
        Alternative(
            description="completions up to 1024 tokens",
            flags="--max-completion-length 1024",
            peak_bytes=round(14.5 * GIB),
            seconds=91.0,
            verdict=Verdict.TIGHT,
            changes_experiment=True,
        ),
    ),
    rehearsal=Rehearsal(
        peak_bytes={
            Phase.LOAD: round(2.94 * GIB),
            Phase.ROLLOUT: round(4.72 * GIB),
            Phase.FORWARD: round(12.1 * GIB),
            Phase.BACKWARD: round(13.4 * GIB),
            Phase.STEP: round(3.15 * GIB),
        },
        seconds=3.4,
    ),
    trl_arguments={
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 8,
        "num_generations": 8,
        "max_prompt_length": 256,
        "max_completion_length": 512,
        "gradient_checkpointing": False,
        "bf16": True,
        "optim": "adamw_torch_fused",
        "loss_type": "dapo",
        "beta": 0.0,
    },
    recipe_path="qwen 1.5b.toml",
    assumptions=(
        "every completion as long as the cap: shorter ones need less",
        "speed: 50% of the card's FLOP/s and 70% of its bandwidth are reached, 8 us for each "
        "launched operation (assumed, not measured)",
        "speed: the time of the reward functions is unknown and left out",
    ),
    seconds=6.81,
    num_candidates=686,
)

FULL = Workload(max_completion_length=512)
FULL_PLAN = Plan(
    micro_batch=1,
    gradient_accumulation_steps=64,
    gradient_checkpointing=True,
    logprob_chunk_tokens=64,
    rollout_batch=1,
)
FULL_MEMORY = MemoryEstimate(
    phases=(
        phase(Phase.LOAD, "weights on the card", PARAMETER=28.4),
        phase(
            Phase.ROLLOUT,
            "decode, layer 28",
            PARAMETER=28.4,
            OPTIMIZER_STATE=56.7,
            TEMPORARY=1.1,
            KV_CACHE=0.04,
        ),
        phase(
            Phase.FORWARD,
            "forward, layer 1",
            PARAMETER=28.4,
            GRADIENT=28.4,
            OPTIMIZER_STATE=56.7,
            ACTIVATION=0.6,
        ),
        phase(
            Phase.BACKWARD,
            "backward, head",
            tensors(Category.TEMPORARY, "mm", "152064 x 3584 x 4 bytes", 2.03),
            PARAMETER=28.4,
            GRADIENT=28.4,
            OPTIMIZER_STATE=56.7,
            ACTIVATION=0.6,
            LOGITS=0.07,
            TEMPORARY=2.03,
        ),
        phase(
            Phase.STEP,
            "gradients and states",
            PARAMETER=28.4,
            GRADIENT=28.4,
            OPTIMIZER_STATE=56.7,
        ),
    )
)
DOES_NOT_FIT = replace(
    FITS,
    model="Qwen/Qwen2.5-7B",
    model_note="shipped with grpo-lite",
    num_parameters=7_615_616_512,
    num_trainable=7_615_616_512,
    chosen=Candidate(
        workload=FULL,
        plan=FULL_PLAN,
        memory=FULL_MEMORY,
        speed=replace(
            LORA_SPEED,
            phases=(
                PhaseSpeed(phase=Phase.ROLLOUT, seconds=2611.0, bound_by="bandwidth"),
                PhaseSpeed(phase=Phase.FORWARD, seconds=31.2, bound_by="compute"),
                PhaseSpeed(phase=Phase.BACKWARD, seconds=94.0, bound_by="compute"),
                PhaseSpeed(phase=Phase.STEP, seconds=1.7, bound_by="bandwidth"),
            ),
        ),
        verdict=Verdict.DOES_NOT_FIT,
    ),
    choices=(
        Choice(setting="micro_batch", value="1", reason="the smallest"),
        Choice(setting="gradient_accumulation_steps", value="64", reason="64 rows in parts of 1"),
        Choice(setting="gradient_checkpointing", value="yes", reason="needs less"),
        Choice(setting="logprob_chunk_tokens", value="64", reason="the smallest"),
        Choice(setting="rollout_batch", value="1", reason="the smallest"),
    ),
    alternatives=(
        Alternative(
            description="LoRA, completions up to 128 tokens",
            flags="--method lora --max-completion-length 128",
            peak_bytes=round(14.6 * GIB),
            seconds=131.0,
            verdict=Verdict.TIGHT,
            changes_experiment=True,
        ),
        Alternative(
            description="LoRA on a card with 24 GiB",
            flags="--method lora --card rtx-3090",
            peak_bytes=round(19.2 * GIB),
            seconds=55.0,
            verdict=Verdict.FITS,
            changes_experiment=True,
        ),
        Alternative(
            description="the model Qwen/Qwen2.5-0.5B, whole",
            flags="",
            peak_bytes=round(9.4 * GIB),
            seconds=38.0,
            verdict=Verdict.FITS,
            changes_experiment=True,
        ),
    ),
    rehearsal=None,
    recipe_path=None,
)
TIGHT = replace(
    FITS,
    chosen=replace(FITS.chosen, verdict=Verdict.TIGHT),
    budget=replace(FITS.budget, card_bytes=round(13.5 * GIB)),
    recipe_path=None,
)
DOCUMENTS = {"fits": FITS, "tight": TIGHT, "does-not-fit": DOES_NOT_FIT}
