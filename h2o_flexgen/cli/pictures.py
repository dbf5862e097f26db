"""Pictures of plans and runs: the work of each lane over time, for one trace or two on the same scale; and the plans a search
has found, the latency of a block against tokens per second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from h2o_flexgen.core.model_spec import LayerName
from h2o_flexgen.planning.search import Candidate, SearchResult
from h2o_flexgen.schedule.ops import Data, Op
from h2o_flexgen.schedule.trace import Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = 2
MOST_VISITS = 120  # with more, single tasks are too narrow to be seen
WIDTH, LANE_HEIGHT, OTHER_HEIGHT = 12.0, 0.42, 0.9  # inches of the picture
NARROW = 1 / 1200  # share of the width: no bar is narrower, and bars this narrow that touch are drawn as one
EDGED = 1 / 200  # share of the width from which bars have an edge
PALE = 0.55  # share of white in the colour of what is of experts
BLOCK_ROOM = 0.06  # share of the width that the number of a block takes
GREY, BLUE, RED = "#7f7f7f", "#0072b2", "#d55e00"  # distinct to colour-blind eyes, too
LABEL = (0.08, 0.06)  # a label's share of the picture's width and height
SPREAD = 8  # ratio of the longest to the shortest latency from which the axis is logarithmic
UNITS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))


def draw_timelines(traces: Mapping[str, Trace], file: Path, title: str = "", names: Sequence[LayerName] = ()) -> None:
    """Draws each trace under its name ("predicted", "measured"). `names` say what each layer is: experts are paler than all
    else, and blocks are numbered where they begin."""
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for

    heights = [max(1, len(trace.lanes)) * LANE_HEIGHT + OTHER_HEIGHT for trace in traces.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.6), layout="constrained")
    seconds = max((trace.makespan for trace in traces.values()), default=0.0) or 1.0
    unit, factor = next((unit, factor) for least, unit, factor in UNITS if seconds >= least)
    panels = figure.subplots(len(traces), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, trace) in zip(panels, traces.items()):
        _draw(axes, trace, factor, seconds * factor, names)
        _number_blocks(axes, trace, factor, seconds * factor, names)
        axes.set_title(f"{name}, {trace.makespan * factor:.3g} {unit} of it", loc="left", fontsize="medium")
    panels[-1].set_xlabel(unit)
    panels[-1].set_xlim(0, seconds * factor)
    _legend(figure, sorted({_Kind.of(span, names) for trace in traces.values() for span in trace.spans}, key=_Kind.place))
    if title:
        figure.suptitle(title)
    figure.savefig(file, dpi=130)


def two_steps(trace: Trace) -> Trace:
    """Two decode steps from the middle of the work, because the last has nothing more to store and is unlike all others. Of
    large models and blocks, as many visits as can be told apart."""
    visits = sorted((span for span in trace.spans if span.key.op is Op.COMPUTE), key=lambda span: span.end)
    steps = len({span.key.step for span in visits})
    if not visits:
        return trace
    a_step = len(visits) // steps
    first = max(0, len(visits) - (STEPS + 1) * a_step)
    last = min(first + MOST_VISITS, max(first + a_step, len(visits) - a_step)) - 1
    start = visits[first - 1].end if first else 0.0
    return trace.between(start, visits[last].end)


class _Kind(NamedTuple):
    """What is drawn in one colour."""

    data: Data
    is_of_experts: bool

    @classmethod
    def of(cls, span: Span, names: Sequence[LayerName]) -> _Kind:
        is_divided = span.key.op.data in (Data.WEIGHTS, Data.NOTHING)  # other data belong to rows, whichever layer computes
        return cls(span.key.op.data, bool(names) and is_divided and names[span.key.layer].is_of_experts)

    @property
    def colour(self) -> tuple[float, float, float]:
        from matplotlib.colors import to_rgb

        white = PALE if self.is_of_experts else 0.0
        red, green, blue = (white + (1 - white) * value for value in to_rgb(self.data.colour))
        return red, green, blue

    def words(self, beside: Sequence[_Kind]) -> str:
        """What it is, in a picture of these kinds: what is no expert is said to be none where there are experts."""
        if self.is_of_experts:
            return f"{self.data.words}: experts"
        return f"{self.data.words}: attention and others" if _Kind(self.data, True) in beside else self.data.words

    def place(self) -> tuple[int, bool]:
        return [*Data].index(self.data), self.is_of_experts


def _draw(axes: Axes, trace: Trace, factor: float, width: float, names: Sequence[LayerName]) -> None:
    lanes = trace.lanes
    kinds = sorted({_Kind.of(span, names) for span in trace.spans}, key=_Kind.place)
    for place, lane in enumerate(lanes):
        for kind in kinds:
            spans = [span for span in trace.spans if span.lane == lane and _Kind.of(span, names) == kind]
            wide, narrow = _bars(spans, factor, width)
            axes.broken_barh(wide, (place - 0.36, 0.72), facecolors=kind.colour, edgecolors="white", linewidth=0.6)
            axes.broken_barh(narrow, (place - 0.36, 0.72), facecolors=kind.colour, linewidth=0)
    shares = trace.busy_shares()
    axes.set_yticks(range(len(lanes)), [f"{lane}  {shares[lane]:.0%}" for lane in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.grid(visible=True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _number_blocks(axes: Axes, trace: Trace, factor: float, width: float, names: Sequence[LayerName]) -> None:
    """Numbers the blocks above the lanes, each where its computation begins, as many as there is room for, and names what
    belongs to none. Several devices compute several at once, and nothing is numbered."""
    visits = sorted((span for span in trace.spans if span.key.op is Op.COMPUTE), key=lambda span: span.start)
    if not names or len({span.lane for span in visits}) > 1:
        return
    starts = [(-width, "")]
    before: int | None = None
    for span in visits:
        title, block, _ = names[span.key.layer]
        is_seen = block is not None or (span.end - span.start) * factor > EDGED * width
        if block != before and is_seen and span.start * factor >= starts[-1][0] + BLOCK_ROOM * width:
            starts.append((span.start * factor, title if block is None else f"block {block}"))
        before = block
    if starts[1:]:
        above = axes.secondary_xaxis("top")
        above.set_xticks(*zip(*starts[1:]), fontsize="x-small", ha="left", color=GREY)
        above.tick_params(length=3, color=GREY)
        above.spines["top"].set_visible(False)


def _bars(spans: Sequence[Span], factor: float, width: float) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(start, length) of the bars that are wide enough for an edge, and of the others, joined where they touch."""
    wide: list[tuple[float, float]] = []
    narrow: list[tuple[float, float]] = []
    for span in spans:
        start, length = span.start * factor, (span.end - span.start) * factor
        if length > EDGED * width:
            wide.append((start, length))
        else:
            narrow.append((start, max(length, NARROW * width)))  # otherwise it would be invisible
    return wide, list(_joined(sorted(narrow), NARROW * width))


def _joined(bars: Iterable[tuple[float, float]], gap: float) -> Iterable[tuple[float, float]]:
    start = end = None
    for begin, length in bars:
        if end is not None and start is not None and begin <= end + gap:
            end = max(end, begin + length)
            continue
        if end is not None and start is not None:
            yield start, end - start
        start, end = begin, begin + length
    if end is not None and start is not None:
        yield start, end - start


def _legend(figure: Figure, kinds: Sequence[_Kind]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=kind.colour, label=kind.words(kinds)) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), frameon=False, fontsize="small")


# -- the front of a search ---------------------------------------------------------------------------------------------


def draw_front(found: SearchResult, file: Path, title: str) -> None:
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    everything = list({one.plan: one for one in (*found.all, *found.front)}.values())
    _points(axes, everything, marker="o", s=28, color=GREY, label="simulated", zorder=2)
    seconds, rates = _coordinates(found.front)
    axes.plot(seconds, rates, "-o", color=BLUE, markersize=6, label="nothing is both sooner and faster", zorder=3)
    _points(axes, [found.best], marker="*", s=260, color=RED, edgecolors="white", label="chosen", zorder=4)
    axes.set(xlabel="latency: seconds until a block is over", ylabel="tokens per second")
    axes.set_title(title, fontsize="small", loc="left", wrap=True)
    for scale, values in ((axes.set_xscale, [one.block_seconds for one in everything]), (axes.set_yscale, rates)):
        if max(values) > SPREAD * min(values):
            scale("log")
    axes.margins(0.12)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.autoscale_view()
    _label(axes, [found.best, *found.front, *everything])
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(file, dpi=130)


def _coordinates(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [one.block_seconds for one in candidates], [one.tokens_per_second for one in candidates]


def _points(axes: Axes, candidates: list[Candidate], **style: Any) -> None:
    axes.scatter(*_coordinates(candidates), **style)


def _label(axes: Axes, candidates: list[Candidate]) -> None:
    """Labels a point with rows x batches, if there is room to the upper left, where the rising front does not pass."""
    taken: list[tuple[float, float]] = []
    for one in candidates:
        at = (one.block_seconds, one.tokens_per_second)
        across, up = axes.transAxes.inverted().transform(axes.transData.transform(at))
        if any(abs(across - other) < LABEL[0] and abs(up - height) < LABEL[1] for other, height in taken):
            continue
        taken.append((across, up))
        text = f"{one.plan.gpu_batch_size} x {one.plan.num_gpu_batches}"
        axes.annotate(text, at, xytext=(-7, 6), textcoords="offset points", ha="right", fontsize="small")
