"""Hypothesis strategies for the house's words: workloads, plans, footprints.

A drawn footprint is a model by hand with the shape of real ones: activations and a cache that grow
with rows x tokens, logits that grow with the head's chunk, gradients that exist from the second
micro-batch on, and several instants in each stage.
"""

from hypothesis import strategies as st

from grpo_lite.plan import Category, Workload
from grpo_lite.predict.footprint import (
    Footprint,
    Gradients,
    Instant,
    Stage,
    Term,
    Weights,
    Work,
    stage_name,
)
from grpo_lite.search import enumerate_plans

ONE, ROW_TOKENS, CHUNK, LAST = (
    (0, 0, 0, 0, 0),
    (1, 1, 0, 0, 0),
    (0, 0, 0, 1, 0),
    (0, 0, 0, 0, 1),
)

workloads = st.builds(
    Workload,
    method=st.sampled_from(["full", "lora"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    prompts_per_step=st.integers(1, 6),
    num_generations=st.integers(2, 8),
    max_prompt_length=st.integers(1, 64),
    max_completion_length=st.integers(1, 256),
    num_iterations=st.integers(1, 2),
    beta=st.sampled_from([0.0, 0.04]),
)


def plans(workload):
    """Return a strategy for the plans that the search looks at."""
    return st.sampled_from(list(enumerate_plans(workload)))


def _stage(terms, *instants):
    """Return a stage whose instants are given as {index of a term: how many}."""

    def instant(counts):
        total = {}
        for index, count in counts.items():
            for exponents, factor in terms[index].bytes.items():
                total[exponents] = total.get(exponents, 0.0) + count * factor
        return Instant(where="by hand", counts=counts, bytes=total)

    work = Work(flops={ROW_TOKENS: 1e6}, moved_bytes={ROW_TOKENS: 10.0}, num_operations=50)
    return Stage(instants=tuple(instant(counts) for counts in instants), work=work)


def _term(category, exponents, num_bytes):
    return Term(
        category=category,
        operation="made up",
        dimensions=("rows", "tokens") if exponents == ROW_TOKENS else ("chunk",),
        item_bytes=4,
        bytes={exponents: float(num_bytes)},
    )


@st.composite
def footprints(draw):
    """Return a footprint whose stages grow as those of real models do."""
    gradient_bytes = draw(st.integers(1, 10**6))
    terms = (
        _term(Category.ACTIVATION, ROW_TOKENS, draw(st.integers(1, 500))),
        _term(Category.LOGITS, CHUNK, draw(st.integers(1, 5000))),
        _term(Category.KV_CACHE, ROW_TOKENS, draw(st.integers(1, 500))),
        _term(Category.GRADIENT, ONE, gradient_bytes),
        _term(Category.TEMPORARY, LAST, draw(st.integers(1, 50))),
    )
    activation, logits, cache, gradients, last = range(5)
    layers = draw(st.integers(2, 12))
    in_forward, in_backward = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    stages = {
        "prefill": _stage(terms, {cache: layers, activation: 2}),
        "decode": _stage(terms, {cache: layers}),
        "logprob": _stage(terms, {activation: 2, logits: in_forward}),
    }
    for checkpointing in (False, True):
        kept = draw(st.integers(1, 2)) * layers if checkpointing else 8 * layers
        for how in Gradients:

            def name(stage, checkpointing=checkpointing, how=how):
                return stage_name(stage, checkpointing=checkpointing, gradients=how)

            stages[name("forward")] = _stage(terms, {activation: kept, logits: in_forward})
            end = {activation: 8, last: 1} | ({gradients: 1} if how is Gradients.KEPT else {})
            stages[name("backward")] = _stage(
                terms, {activation: kept + 8, logits: in_backward}, end
            )
    num_trainable = max(1, gradient_bytes // 4)
    return Footprint(
        model="by hand",
        weights=Weights(
            num_parameters=num_trainable,
            num_trainable=num_trainable,
            num_trainable_tensors=10,
            parameter_bytes=4 * num_trainable,
            gradient_bytes=gradient_bytes,
            largest_gradient_bytes=max(1, gradient_bytes // 10),
        ),
        terms=terms,
        stages=stages,
        num_layers=layers,
        traced_layers=4,
        versions={"torch": "0"},
        trainable_numels=(num_trainable,),
    )
