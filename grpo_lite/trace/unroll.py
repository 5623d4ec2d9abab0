"""Recordings of a shallow model at a few shapes -> stages of the full model as counted terms.

Aligns the recordings event by event (the same step must run the same operations at every shape),
names each storage by its formula, repeats the layers that repeat, and keeps the moments at which
memory may peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from grpo_lite.plan import Category
from grpo_lite.predict.footprint import (
    Gradients,
    Instant,
    Monomial,
    Polynomial,
    Shape,
    Stage,
    Term,
    Work,
)
from grpo_lite.trace.formulas import NoFormula, Solver
from grpo_lite.trace.recorder import Recording, Segment, change_of


class CannotTrace(Exception):
    """The step does not run alike at every shape or layer, so no footprint can be made of it."""


class NotSteady(CannotTrace):
    """The layers that were to be repeated do not run like their neighbours of the same kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Which layers of the shallow model stand for how many of the full one."""

    traced_layers: int
    """Layers of the shallow model."""
    period: int
    """Layers after which kinds repeat, and so the number of layers that are repeated."""
    first_repeated: int
    """Index of the first of them."""
    extra_periods: int
    """Copies of those layers that the full model has beyond the shallow one."""


@dataclass(slots=True)
class TermTable:
    """Terms by their content, indexed in order of appearance."""

    terms: list[Term] = field(default_factory=list)
    _index: dict[tuple[object, ...], int] = field(default_factory=dict)

    def index(self, term: Term) -> int:
        """Return the index of `term`, added if new."""
        key = (
            term.category,
            term.operation,
            term.dimensions,
            term.item_bytes,
            tuple(sorted(term.bytes.items())),
        )
        if key not in self._index:
            self._index[key] = len(self.terms)
            self.terms.append(term)
        return self._index[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One segment of the unrolled run: term events, and whether its peaks are looked at."""

    stage: str
    where: str
    events: tuple[tuple[int, int], ...]
    looked_at: bool


def make_stages(
    shapes: Sequence[Shape],
    recordings: Sequence[Recording],
    depth: Depth,
    table: TermTable,
    vocabulary: int,
) -> dict[str, Stage]:
    """Return the stages of one kind of run, by stage name, with terms added to `table`.

    `recordings[i]` was made at `shapes[i]`. Stages whose gradients were noted also come as
    "NAME/accumulating" and "NAME/leaving" (see `Gradients`).

    Raises:
        CannotTrace: the recordings or the repeated layers differ, or a size has no formula.
    """
    _require_alike(recordings)
    solver = Solver(shapes)
    try:
        terms = _terms_of_births(solver, recordings, vocabulary)
        works = _works(solver, recordings)
    except NoFormula as error:
        raise CannotTrace(str(error)) from error
    indices = [table.index(term) for term in terms]
    first = recordings[0]
    stages: dict[str, Stage] = {}
    work = _stage_work(first.segments, works, depth)
    for gradients in Gradients if first.gradients else (Gradients.KEPT,):
        lines = _term_events(first, indices, depth, gradients)
        steps = _unroll(first.segments, lines, depth)
        for stage, instants in _peaks(steps, table).items():
            name = stage if gradients is Gradients.KEPT else f"{stage}/{gradients}"
            stages[name] = Stage(instants=tuple(instants), work=work[stage])
    return stages


def _require_alike(recordings: Sequence[Recording]) -> None:
    def outline(recording: Recording) -> list[tuple[object, ...]]:
        return [
            (segment.stage, segment.part, segment.layer, _sorted_deaths(segment.events))
            for segment in recording.segments
        ]

    first = outline(recordings[0])
    for other in recordings[1:]:
        for here, there in zip(first, outline(other), strict=False):
            if here != there:
                raise CannotTrace(f"operations differ between shapes in {here[0]}, {here[1]}")
        if len(first) != len(other.segments):
            raise CannotTrace("the number of layer passes differs between shapes")


def _sorted_deaths(events: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return `events` with neighbouring deaths in order of birth: their order has no meaning."""
    out: list[tuple[int, int]] = []
    deaths: list[tuple[int, int]] = []
    for event in events:
        if event[1] < 0:
            deaths.append(event)
            continue
        out.extend(sorted(deaths))
        deaths.clear()
        out.append(event)
    return [*out, *sorted(deaths)]


def _terms_of_births(
    solver: Solver, recordings: Sequence[Recording], vocabulary: int
) -> list[Term]:
    first = recordings[0]
    terms = []
    for index, birth in enumerate(first.births):
        others = [recording.births[index] for recording in recordings]
        dimensions: list[str] = []
        for place in range(len(birth.shape)):
            dimensions.extend(solver.words([other.shape[place] for other in others]))
        terms.append(
            Term(
                category=_category(first, index, birth.shape, vocabulary),
                operation=birth.operation,
                dimensions=tuple(word for word in dimensions if word != "1"),
                item_bytes=birth.item_bytes,
                bytes=solver.solve([other.num_bytes for other in others]),
            )
        )
    return terms


def _category(
    recording: Recording, index: int, shape: tuple[int, ...], vocabulary: int
) -> Category:
    if index in recording.gradients:
        return Category.GRADIENT
    if index in recording.kv_cache:
        return Category.KV_CACHE
    if shape and shape[-1] == vocabulary:
        return Category.LOGITS
    if recording.births[index].operation == "_to_copy" and tuple(shape) in recording.weight_shapes:
        return Category.PARAMETER  # autocast's copy of a weight in the compute dtype
    if index in recording.alive_after_forward:
        return Category.ACTIVATION
    return Category.TEMPORARY


def _works(solver: Solver, recordings: Sequence[Recording]) -> list[Work]:
    """Return the work of each segment."""
    works = []
    for place, segment in enumerate(recordings[0].segments):
        rows = [recording.segments[place].work for recording in recordings]
        if len({len(row) for row in rows}) != 1:
            raise CannotTrace(f"operations differ between shapes in {segment.stage}")
        flops: Counter[Monomial] = Counter()
        moved: Counter[Monomial] = Counter()
        for operation in zip(*rows, strict=True):
            flops.update(solver.solve([seen[0] for seen in operation]))
            for tensor in zip(*(seen[1] for seen in operation), strict=True):
                moved.update(solver.solve(tensor))
        works.append(
            Work(flops=dict(flops), moved_bytes=dict(moved), num_operations=len(segment.work))
        )
    return works


def _stage_work(
    segments: Sequence[Segment], works: Sequence[Work], depth: Depth
) -> dict[str, Work]:
    """Return the work of each stage of the full model."""
    flops: dict[str, Counter[Monomial]] = {}
    moved: dict[str, Counter[Monomial]] = {}
    operations: Counter[str] = Counter()
    for segment, work in zip(segments, works, strict=True):
        times = 1 + depth.extra_periods if _is_repeated(segment, depth) else 1
        for total, part in ((flops, work.flops), (moved, work.moved_bytes)):
            counter = total.setdefault(segment.stage, Counter())
            for exponents, factor in part.items():
                counter[exponents] += times * factor  # type: ignore[assignment]  # floats count too
        operations[segment.stage] += times * work.num_operations
    return {
        stage: Work(
            flops=dict(flops[stage]),
            moved_bytes=dict(moved[stage]),
            num_operations=operations[stage],
        )
        for stage in flops
    }


def _term_events(
    recording: Recording, indices: Sequence[int], depth: Depth, gradients: Gradients
) -> list[tuple[tuple[int, int], ...]]:
    """Return each segment's events as (term index, change of the number alive).

    What the repeated layers made and a part outside all layers frees (autocast's weight copies at
    the end of forward) is freed as often as it was made in the full model.
    """
    born_in_repeated: set[int] = set()
    gone: set[int] = set()
    lines = []
    for segment in recording.segments:
        line = []
        for birth, event in _sorted_deaths(segment.events):
            change = change_of(event, gradients)
            if change == 0 or (change < 0 and birth in gone):
                continue
            if change > 0 and _is_repeated(segment, depth):
                born_in_repeated.add(birth)
            if change < 0:
                gone.add(birth)
                if segment.layer is None and birth in born_in_repeated:
                    change *= 1 + depth.extra_periods
            line.append((indices[birth], change))
        lines.append(tuple(line))
    return lines


def _is_repeated(segment: Segment, depth: Depth) -> bool:
    layer = segment.layer
    return layer is not None and 0 <= layer - depth.first_repeated < depth.period


def _unroll(
    segments: Sequence[Segment], lines: Sequence[tuple[tuple[int, int], ...]], depth: Depth
) -> list[_Step]:
    """Return the run of the full model, with the repeated layers repeated.

    Within the repetitions memory moves by the same amount each time, so its peak lies in the first
    or the last of them: only those are looked at.
    """
    steps: list[_Step] = []
    place = 0
    while place < len(segments):
        end = place
        while end < len(segments) and _is_repeated(segments[end], depth):
            end += 1
        if end == place or depth.extra_periods == 0:
            end = max(end, place + 1)
            steps.extend(_steps(segments, lines, place, end, looked_at=True))
        else:
            _require_steady(segments, lines, (place, end), depth)
            for copy in range(depth.extra_periods + 1):
                ends = copy in (0, depth.extra_periods)
                steps.extend(_steps(segments, lines, place, end, looked_at=ends))
        place = end
    return steps


def _steps(
    segments: Sequence[Segment],
    lines: Sequence[tuple[tuple[int, int], ...]],
    start: int,
    end: int,
    *,
    looked_at: bool,
) -> list[_Step]:
    return [
        _Step(
            stage=segments[place].stage,
            where=_where(segments[place]),
            events=lines[place],
            looked_at=looked_at,
        )
        for place in range(start, end)
    ]


def _where(segment: Segment) -> str:
    if segment.layer is None:
        return f"{segment.stage.split('/')[0]}, {segment.part}"
    again = ", recomputed" if segment.part == "recompute" else ""
    return f"{segment.stage.split('/')[0]}, decoder layer{again}"


def _require_steady(
    segments: Sequence[Segment],
    lines: Sequence[tuple[tuple[int, int], ...]],
    block: tuple[int, int],
    depth: Depth,
) -> None:
    """Check that the block next to the repeated one ran alike, so that repeating is right."""
    start, end = block
    length = end - start
    backward = segments[start].stage.startswith("backward")
    other = start - length if backward else end
    here = [_balance(line) for line in lines[start:end]]
    there = [_balance(line) for line in lines[other : other + length]]
    if here != there:
        raise NotSteady(
            f"{segments[start].stage}: the {depth.period} layers from {depth.first_repeated} on "
            "do not keep what the next ones keep"
        )


def _balance(line: Iterable[tuple[int, int]]) -> dict[int, int]:
    balance: Counter[int] = Counter()
    for term, sign in line:
        balance[term] += sign
    return {term: count for term, count in balance.items() if count}


def _peaks(steps: Sequence[_Step], table: TermTable) -> dict[str, list[Instant]]:
    """Return, by stage, the moments of `steps` that no other moment of the stage dominates."""
    alive: Counter[int] = Counter()
    found: dict[str, list[tuple[str, dict[int, int]]]] = {}
    for step in steps:
        moments = found.setdefault(step.stage, [])
        if step.looked_at:
            moments.append((step.where, _positive(alive)))
        rising = False
        for term, sign in step.events:
            if sign < 0 and rising and step.looked_at:
                moments.append((step.where, _positive(alive)))
            alive[term] += sign
            rising = sign > 0
        if rising and step.looked_at:
            moments.append((step.where, _positive(alive)))
    if _positive(alive):
        left = {table.terms[term].operation: count for term, count in _positive(alive).items()}
        raise CannotTrace(f"tensors are left over when the layers are repeated: {left}")
    return {
        stage: _undominated(
            Instant(where=where, counts=counts, bytes=_total(counts, table.terms))
            for where, counts in moments
        )
        for stage, moments in found.items()
    }


def _positive(alive: Counter[int]) -> dict[int, int]:
    return {term: count for term, count in sorted(alive.items()) if count}


def _undominated(moments: Iterable[Instant]) -> list[Instant]:
    """Return `moments` without those that another exceeds at every shape.

    Variables are counts and never negative: a formula whose every coefficient is at least as
    large is at least as large.
    """
    kept: list[Instant] = []
    unique = {tuple(sorted(moment.bytes.items())): moment for moment in moments}
    for moment in sorted(unique.values(), key=lambda moment: -sum(moment.bytes.values())):
        if not any(_covers(other.bytes, moment.bytes) for other in kept):
            kept.append(moment)
    return kept


def _covers(larger: Polynomial, smaller: Polynomial) -> bool:
    return all(larger.get(e, 0.0) >= factor for e, factor in smaller.items()) and all(
        factor >= smaller.get(e, 0.0) for e, factor in larger.items()
    )


def _total(counts: dict[int, int], terms: Sequence[Term]) -> Polynomial:
    total: dict[Monomial, float] = {}
    for index, count in counts.items():
        for exponents, factor in terms[index].bytes.items():
            total[exponents] = total.get(exponents, 0.0) + count * factor
    return {exponents: factor for exponents, factor in total.items() if factor}
