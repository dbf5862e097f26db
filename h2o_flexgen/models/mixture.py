"""Mixtures: mlps of which a router chooses a few for each token, its experts. The layer of a block is cut into slices of some
experts each, so that buffers hold a few and not all of them, and the next ones are read while these are computed with.

Between the slices the hidden states are as wide as what all of them need: the states, their norm, the sum so far, and which
experts each token was given to. Sums are made in fp32, expert by expert in their order: neither the slices nor the other rows
change a token's outcome.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import DTYPE_BYTES, MLP_VISIT, ExpertTurns, LayerSpec
from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES
from h2o_flexgen.kernels.factor import CountedRows
from h2o_flexgen.kernels.native import RECORDER
from h2o_flexgen.kernels.operations import Counts, add_weighted, gather_chosen, gather_counted, route
from h2o_flexgen.kernels.routing import SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN, Chosen, RouterRule, RouterScores
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.layout import MLP_STATES, Origin
from h2o_flexgen.models.llama import Decoder, MlpNames

SLICES = 8  # of a layer, at least, where it has so many experts: two of them in buffers are far less than the layer
MOST_VALUES = 1 << 27  # of the experts of a slice
MOST_TOGETHER = 1.5  # so many times as many rows as there are tokens are computed at once by the experts of a slice
# States of an expert's inner width that are held at once, as measured: those of an mlp, and one more for the rows as a kernel
# arranges them, or for a product of gate and up before it is parted.
EXPERT_STATES = MLP_STATES + 1
FEW_ROWS = 128  # are always computed at once
SHARED = "mlp.shared_experts"
EXPERTS = "mlp.experts."  # so begin their names
INTO_LATENT, OUT_OF_LATENT = "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"
VISITS_OF_A_SLICE = 2  # so many times what an mlp costs beside its work: rows are sorted and gathered, and sums made


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts, equally many side by side, of which some are chosen before their experts are."""

    count: int = 1
    chosen: int = 1
    best: int = 1  # so many experts say what a group ranks by

    @classmethod
    def of(cls, config: Config, experts: int, best: int) -> ExpertGroups:
        count, chosen = int(config.n_group or 1), int(config.topk_group or 1)
        wanted = config.num_experts_per_tok
        if count == 1:
            return NO_GROUPS
        if experts % count or chosen > count or experts // count < best or wanted > experts // count * chosen:
            raise ValueError(
                f"n_group is {count} and topk_group {chosen}, from which {wanted} of {experts} experts cannot be chosen; "
                "download the model again"
            )
        return cls(count, chosen, best)


NO_GROUPS = ExpertGroups()


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, and how they are chosen."""

    experts: int
    chosen: int  # of them, for each token
    inner: int  # width of an expert
    sums_to_one: bool  # the weights of the chosen ones
    shared: int = 0  # width of an mlp that all tokens pass through beside theirs; 0: there is none
    shared_name: str = SHARED
    behind: int = 0  # width of an mlp that stands behind them; 0: there is none
    latent: int = 0  # width of what they get and make, between two matrices of all; 0: that of the hidden states
    of_chosen: bool = False  # the weights are a softmax of the scores of the chosen ones alone
    router: str = "mlp.gate"
    router_bias: bool = False
    expert_bias: bool = False
    groups: ExpertGroups = NO_GROUPS
    factor: float = 1.0  # of the weights of the chosen ones

    @property
    def share(self) -> float:
        """The part of all tokens that an expert gets on average."""
        return self.chosen / self.experts

    def rows_of_each(self, choices: int) -> int:
        """How many rows an expert gets on average where the tokens have so many choices."""
        return ceil(choices / self.experts)

    def slices(self, width: int) -> Iterator[range]:
        """The experts of each slice."""
        step = max(1, min(-(-self.experts // SLICES), MOST_VALUES // (3 * width * self.inner)))
        return (range(first, min(first + step, self.experts)) for first in range(0, self.experts, step))


class Routed(NamedTuple):
    """The hidden states between the slices of a layer, which lie side by side in values of their type."""

    hidden: Tensor  # (rows, tokens, width)
    normed: Tensor  # as experts get it
    total: Tensor  # of the experts so far, fp32
    weights: Tensor  # (rows, tokens, chosen), fp32
    experts: Tensor  # alike, int32

    @property
    def chosen(self) -> Chosen:
        return Chosen(self.weights, self.experts)

    @classmethod
    def of(cls, joined: Tensor, width: int, chosen: int, latent: int = 0) -> Routed:
        """Views into it. `latent`: the width of what experts get, if that is another one."""
        own = latent or width
        hidden, normed, rest = joined.split((width, own, joined.shape[-1] - width - own), dim=-1)
        total, weights, experts = rest.view(torch.float32).split((own, chosen, chosen), dim=-1)
        return cls(hidden, normed, total, weights, experts.view(torch.int32))

    @staticmethod
    def width(width: int, chosen: int, dtype: str, latent: int = 0) -> int:
        own = latent or width
        return width + own + (own + 2 * chosen) * FLOAT_BYTES // DTYPE_BYTES[dtype]


class MixtureOfExperts(Decoder):
    """LLaMA's relatives with experts. `mixture_of` says which keys of a config a relative reads for them."""

    routes_wide = False  # the matrix of its router and what it makes are in fp32: in 16 bits it would choose others

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        self._mixture = self.mixture_of(config)
        super().__init__(config, dtype, sep_layer, name)
        self._slices = self._of_layers(config.hidden_size, sep_layer)
        gated = self._traits.gated
        self._names = [MlpNames.of(f"mlp.experts.{number}", gated) for number in range(self._mixture.experts)]

    @staticmethod
    @abstractmethod
    def mixture_of(config: Config) -> Mixture: ...

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        """Whether a block has experts; otherwise it has a single mlp."""
        return True

    # -- its layers --------------------------------------------------------------------------------------------------------

    def behind_attention(self, config: Config, sep_layer: bool, origin: Origin) -> Sequence[LayerSpec]:
        width, mixture = config.hidden_size, self._mixture
        if not self.has_experts(config, origin.block or 0):
            return [self.mlp_layer(width, self.inner_of(config), origin)]
        slices = self._of_layers(width, sep_layer)
        return [self._slice(width, own, own.stop == mixture.experts, origin) for own in slices]

    def _of_layers(self, width: int, sep_layer: bool) -> Sequence[range]:
        """The experts of each layer."""
        return [*self._mixture.slices(width)] if sep_layer else [range(self._mixture.experts)]

    def _slice(self, width: int, own: range, is_last: bool, origin: Origin) -> LayerSpec:
        """The layer of some experts. The first also routes, and the last adds the sum to the hidden states."""
        mixture, is_first = self._mixture, own.start == 0
        experts = {number: self.expert(number, mixture.latent or width) for number in own}
        last = [self.behind_experts(width)] if is_last else []
        parameters = layout.joined(*([self.routing(width)] if is_first else []), *experts.values(), *last)
        handed_on = Routed.width(width, mixture.chosen, origin.dtype, mixture.latent)
        functions = [MixtureOfExperts.routed] * is_first + [MixtureOfExperts.given_to_experts]
        functions += [MixtureOfExperts.with_total] * is_last
        made = layout.layer(functions[0], parameters, width if is_last else handed_on, origin)
        floats = FLOAT_BYTES // DTYPE_BYTES[origin.dtype]
        passing = ceil(MOST_TOGETHER * EXPERT_STATES * max(mixture.inner, mixture.shared, mixture.behind))
        passing += handed_on + 3 * width * floats
        names = tuple(function.__name__ for function in functions)
        part = f"experts {own.start}-{own.stop - 1}" if len(own) > 1 else f"expert {own.start}"
        visits = (MLP_VISIT,) * VISITS_OF_A_SLICE
        belongs = tuple((name, number) for number, its in experts.items() for name in its)
        made = replace(made, functions=names, experts=belongs, part=part, visits=visits, passing_width=passing)
        waits = MixtureOfExperts.waits_for_choice.__name__
        made = replace(made, reads_back=waits, least_passing=FEW_ROWS, overwrites=not (is_first or is_last))
        return replace(made, turns=_turns(len(own), mixture.chosen))

    def expert(self, number: int, width: int) -> layout.Parameters:
        mixture = self._mixture
        names = MlpNames.of(f"mlp.experts.{number}", self._traits.gated)
        return names.parameters(width, mixture.inner, mixture.expert_bias, mixture.share)

    def routing(self, width: int) -> layout.Parameters:
        """What stands before the experts."""
        mixture = self._mixture
        norm = self.norm_parameters(width, self.norm_of_experts)
        router = layout.router(mixture.router, mixture.experts, width, mixture.router_bias, self.routes_wide)
        bias = self._traits.mlp_bias
        shared = self.names_of_shared.parameters(width, mixture.shared, bias) if mixture.shared else {}
        latent = layout.linear(INTO_LATENT, mixture.latent, width, bias) if mixture.latent else {}
        return layout.joined(norm, router, shared, latent)

    @property
    def norm_of_experts(self) -> str | None:
        """The name of the norm before them."""
        return self._traits.norms.before_mlp

    def behind_experts(self, width: int) -> layout.Parameters:
        """What stands behind the experts."""
        latent = self._mixture.latent
        return layout.linear(OUT_OF_LATENT, width, latent, self._traits.mlp_bias) if latent else {}

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def routed(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        x, mixture = self.normed(hidden, weights, self.norm_of_experts), self._mixture
        handed_on = Routed.width(self.spec.width, mixture.chosen, self.spec.dtype, mixture.latent)
        out = hidden.new_empty(*hidden.shape[:-1], handed_on)
        state = self._state(out.view(-1, handed_on))
        kept, given_on = hidden, x
        if mixture.latent:  # the sum of experts is of another width than what all tokens pass through beside them
            kept = self.added(self.gated(x, weights, self.names_of_shared), hidden) if mixture.shared else hidden
            given_on = tensor_ops.linear(x, weights, INTO_LATENT)
        state.hidden.copy_(kept.flatten(0, -2))
        state.normed.copy_(given_on.flatten(0, -2))
        scored = self.scored(hidden, x, weights)
        rows = scored._replace(scores=scored.scores.flatten(0, -2))
        route(rows, self.router_rule, state.chosen, state.total)
        given.chosen(state.experts)
        if mixture.shared and not mixture.latent:
            self.add_shared(x, weights, state.total)
        return out

    def _state(self, joined: Tensor) -> Routed:
        return Routed.of(joined, self.spec.width, self._mixture.chosen, self._mixture.latent)

    def scored(self, hidden: Tensor, x: Tensor, weights: Weights) -> RouterScores:
        """What the router says (rows, tokens, experts) of hidden states, and of x, their norm."""
        return RouterScores(tensor_ops.linear(x.float() if self.routes_wide else x, weights, self._mixture.router))

    @property
    def router_rule(self) -> RouterRule:
        """How experts are chosen by their scores."""
        if self._mixture.of_chosen:
            return RouterRule(SOFTMAX_OF_CHOSEN)
        return self.chosen_by(SOFTMAX_OF_ALL)

    def chosen_by(self, way: int, least_sum: float = 0.0) -> RouterRule:
        mixture, groups = self._mixture, self._mixture.groups
        return RouterRule(way, mixture.sums_to_one, least_sum, mixture.factor, groups.count, groups.chosen, groups.best)

    def add_shared(self, x: Tensor, weights: Weights, total: Tensor) -> None:
        """Begins the sum of the experts (tokens, width), fp32, with the mlp that all tokens pass through."""
        total.copy_(self.gated(x, weights, self.names_of_shared).flatten(0, -2))

    @property
    def names_of_shared(self) -> MlpNames:
        return MlpNames.of(self._mixture.shared_name, self._traits.gated)

    def given_to_experts(self, joined: Tensor, weights: Weights, given: Given) -> Tensor:
        """Adds what these experts make of the tokens that they were given."""
        overwrites = given.may_overwrite and joined.is_contiguous()
        out = joined if overwrites else joined.clone(memory_format=torch.contiguous_format)
        state = self._state(out.flatten(0, -2))
        own = next(own for own in self._slices if f"{self._names[own.start].down}.weight" in weights)
        asked: ExpertGroup | None = None
        for asked in self._asked(state, own, weights):
            self._add(state, asked, weights)
        recorder, tokens = RECORDER.get(), len(state.experts)
        turns = _turns(len(own), self._mixture.chosen)
        if recorder is not None and asked is not None and turns.most(tokens) > turns.recorded(tokens):
            assert isinstance(asked.counts, CountedRows)
            recorder.by_torch(partial(self._do_later_turns, own, weights), (asked.counts.begins,), out.flatten(0, -2))
        return out

    def _add(self, state: Routed, asked: ExpertGroup, weights: Weights) -> None:
        given = self.as_given(asked)
        add_weighted(state.total, self.made_by(given, weights), given.weights, given.tokens, given.counts)

    def _do_later_turns(self, own: range, weights: Weights, out: Tensor, begins: Tensor) -> None:
        """Computes what the turns of a recorded step have left, which is seldom anything."""
        if begins[-1].item():
            state = self._state(out)
            first = _turns(len(own), self._mixture.chosen).recorded(len(state.experts))
            for asked in _asked(state, own, first):
                self._add(state, asked, weights)

    def _asked(self, state: Routed, own: range, weights: Weights) -> Iterator[ExpertGroup]:
        """What these experts are asked."""
        if RECORDER.get() is None and not self.waits_for_choice(state.normed, weights):
            rows, to, shares, begins = gather_counted(state.chosen, state.normed, own)
            yield ExpertGroup(own, CountedRows(begins, len(own), len(state.experts)), rows, shares, to)
        else:
            yield from _asked(state, own)

    def waits_for_choice(self, x: Tensor, weights: Weights) -> bool:
        """Whether the processor has to know what the router has chosen for tokens x (..., width) before it launches products.
        Of few tokens it does not, where kernels count the rows of each expert in memory."""
        choices = x[..., 0].numel() * self._mixture.chosen
        each, how = self._mixture.rows_of_each(choices), (self._gating, self._traits.gated)
        return choices > FEW_ROWS or not tensor_ops.counts_stay(x, each, weights, EXPERTS, *how)

    def as_given(self, asked: ExpertGroup) -> ExpertGroup:
        """The rows as experts get them, and how much their outcomes count."""
        return asked

    def made_by(self, asked: ExpertGroup, weights: Weights) -> Tensor:
        """What some experts make of their rows, which follow each other."""
        if self._traits.gated:
            gate, up = self.gate_and_up(asked, weights)
            inner = self.gated_by_expert(gate, up, asked.counts)
        else:
            (up,) = tensor_ops.linears_of_each(asked.x, asked.counts, weights, [self._names[one].up for one in asked.experts])
            inner = tensor_ops.activated_each(self._gating, up, asked.counts)
        (down,) = tensor_ops.linears_of_each(
            inner, asked.counts, weights, [self._names[number].down for number in asked.experts]
        )
        return down

    def gate_and_up(self, asked: ExpertGroup, weights: Weights) -> Iterable[Tensor]:
        """Both ways into these experts, of their rows."""
        names = [self._names[number] for number in asked.experts]
        gates, ups = [own.gate for own in names], [own.up for own in names]
        return tensor_ops.linears_of_each(asked.x, asked.counts, weights, gates, ups)

    def gated_by_expert(self, gate: Tensor, up: Tensor, counts: Counts) -> Tensor:
        """The input of the down projection, from `gate` and `up`, which are not used elsewhere."""
        return tensor_ops.gated_each(self._gating, gate, up, counts)

    def with_total(self, joined: Tensor, weights: Weights, given: Given) -> Tensor:
        state = self._state(joined)
        made = state.total.to(joined.dtype, copy=True)
        return self.added(tensor_ops.linear(made, weights, OUT_OF_LATENT) if self._mixture.latent else made, state.hidden)


class ExpertGroup(NamedTuple):
    """Experts that are computed at once."""

    experts: Sequence[int]  # those that a token was given to; where memory alone knows which, all that may be
    counts: Counts  # of the tokens of each
    x: Tensor  # what these experts get, expert by expert: (rows, width)
    weights: Tensor  # (rows,): how much it counts
    tokens: Tensor  # (rows,): of which token it is


def _asked(state: Routed, own: range, first: int = 0) -> Iterator[ExpertGroup]:
    """Some of these experts after the other, from a turn on. A recorded step has the first turns."""
    tokens, turns = len(state.experts), _turns(len(own), state.experts.shape[1])
    is_recorded = RECORDER.get() is not None
    for turn in range(first, turns.recorded(tokens) if is_recorded else turns.most(tokens)):
        gathered = gather_chosen(state.chosen, state.normed, own, turns.rows(tokens), turn)
        if is_recorded:  # nothing is computed yet, and counts are those of any step
            yield ExpertGroup(own, CountedRows(gathered.begins, len(own), tokens), gathered.rows, gathered.weights, gathered.to)
            continue
        *begins, there, left = gathered.begins.tolist()
        counts = {number: behind - begin for number, begin, behind in zip(own, begins, (*begins[1:], there)) if behind > begin}
        if counts:
            rows, to, weights = gathered.rows[:there], gathered.to[:there], gathered.weights[:there]
            yield ExpertGroup([*counts], [*counts.values()], rows, weights, to)
        if not left:
            break


def _turns(experts: int, chosen: int) -> ExpertTurns:
    return ExpertTurns(experts, chosen, MOST_TOGETHER, FEW_ROWS)
