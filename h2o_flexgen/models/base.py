"""What the engine asks of an architecture, and what an architecture may ask of the engine.

A model is a list of layers (its ModelSpec) and the pure functions over a dict of weights that these name. It knows neither
where weights come from nor how many keys are kept: attention is done by the `attend` that it is handed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import GgufArchitecture, OfHeads
from h2o_flexgen.core.model_spec import LayerSpec, ModelSpec
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.matrix import AdaptedMatrix
from h2o_flexgen.models.config_values import Bounds, Config
from h2o_flexgen.models.new_tokens import Attend, NewTokens, RowStates
from h2o_flexgen.models.whole_configs import Usual


class Matrix(Protocol):
    """A matrix that knows how rows are multiplied with it: one that is packed, say."""

    def linear(self, x: Factor, bias: Tensor | None) -> Tensor:
        """x (..., inputs) -> (..., outputs)."""


# What is no plain tensor is for `tensor_ops.linears` alone; what rows have adapters for is, too.
Weights = Mapping[str, Tensor | Matrix | AdaptedMatrix]


class BegunWeights(dict[str, "Tensor | Matrix | AdaptedMatrix"]):
    """The weights of a layer that is computed up to its attention, and computed later once more: the products that it began
    with are made once, and the later computation finds them."""

    def __init__(self, weights: Weights, made: MadeProducts, is_again: bool) -> None:
        super().__init__(weights)
        self._made, self._is_again = made, is_again

    def products(self, names: tuple[str, ...], made: Callable[[], Iterable[Tensor]]) -> Sequence[Tensor]:
        if self._is_again:
            return self._made.pop(names) or list(made())
        return self._made.add(names, list(made()))


class MadeProducts:
    """What products have made, by their names, in the order in which they were made."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], deque[Sequence[Tensor]]] = defaultdict(deque)

    def add(self, names: tuple[str, ...], products: Sequence[Tensor]) -> Sequence[Tensor]:
        self._made[names].append([each.clone() for each in products])  # what comes behind them may write into them
        return products

    def pop(self, names: tuple[str, ...]) -> Sequence[Tensor] | None:
        return self._made[names].popleft() if self._made[names] else None


def nothing_to_attend(tokens: NewTokens) -> Tensor:
    raise AssertionError("a layer that has no KV attends to nothing")


NO_STATES = RowStates()


def _nothing_listens(experts: Tensor) -> None: ...


@dataclass(frozen=True)
class Given:
    """What a layer may use beside its weights and what the layer before hands on."""

    positions: Tensor  # (rows, tokens), from 0
    attend: Attend = nothing_to_attend
    chosen: Callable[[Tensor], None] = _nothing_listens  # told of the experts (..., chosen) that tokens are given to
    in_heads: bool = False  # `attend` may be handed queries of heads (`NewTokens.in_heads`), and then hands on what is as wide
    may_overwrite: bool = False  # the hidden states are not used elsewhere: a function may change them and hand them on
    states: RowStates = NO_STATES  # of the rows, where they have some in the layer


class Model(Protocol):
    """Its layers name methods of it. These are LayerFunctions, and a HeadFunction for the layer that makes logits."""

    bounds: ClassVar[Bounds]  # of the keys of a config that it reads, beside those that all do
    called: ClassVar[Mapping[str, str]]  # keys that most configs have -> what its configs call them
    patterns: ClassVar[Mapping[str, str]]  # of what its checkpoints call tensors -> the usual names
    turned: ClassVar[tuple[str, ...]]  # ends of the usual names of matrices that its checkpoints have transposed
    gguf: ClassVar[GgufArchitecture | None]  # None: GGUF files of it are not read
    classifies: ClassVar[bool]  # its checkpoints may have a head for labels
    usual: ClassVar[Mapping[str, Usual]]  # what its configs mean where they do not say it; nothing: transformers is asked
    spec: ModelSpec

    @staticmethod
    def parts_of_heads(config: Config) -> Mapping[str, Mapping[str, OfHeads]]:
        """Matrices of all heads, of which its layers have some rows of each head apart: by the ends of their names."""

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None: ...

    def last_states(self, hidden: Tensor, weights: Weights) -> Tensor:
        """The hidden states that the head multiplies with its matrix of logits; embeddings are made of them."""


class InHalves(ABC):
    """A model that says what is before the attention of a layer and what is behind it. A layer is both, one behind the other.
    Where the host attends (`ModelSpec.cut_at_attention`), each half belongs to a layer of its own. So a pass over all other
    batches fits between them, and no weights are held any longer for it. The first one then hands on hidden states with the
    outcome of attention behind them."""

    bounds: ClassVar[Bounds] = {}
    called: ClassVar[Mapping[str, str]] = {}
    patterns: ClassVar[Mapping[str, str]] = {}
    turned: ClassVar[tuple[str, ...]] = ()
    gguf: ClassVar[GgufArchitecture | None] = None
    classifies: ClassVar[bool] = False
    usual: ClassVar[Mapping[str, Usual]] = {}
    spec: ModelSpec

    @staticmethod
    def parts_of_heads(config: Config) -> Mapping[str, Mapping[str, OfHeads]]:
        return {}

    @abstractmethod
    def attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        """What `given.attend` makes of the hidden states' queries, keys and values."""

    @abstractmethod
    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        """The hidden states behind the layer, from those before it and what was attended."""

    def attention(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.with_attended(hidden, self.attended(hidden, weights, given), weights)

    def before_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return torch.cat((hidden, self.attended(hidden, weights, given)), dim=-1)

    def behind_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        width = self.spec.width
        return self.with_attended(hidden[..., :width], hidden[..., width:].contiguous(), weights)


# (model, hidden (rows, tokens, width), weights, given) -> hidden. A layer that takes tokens has (rows, tokens) of them instead:
# they are rows of the table among its weights, which need not have all tokens of the vocabulary.
LayerFunction = Callable[[Any, Tensor, Weights, Given], Tensor]

# (model, hidden (rows, width) of last positions, weights) -> logits (rows, vocab), in the dtype of the model. Of a part of the
# vocabulary, where the matrix among the weights is a part.
HeadFunction = Callable[[Any, Tensor, Weights], Tensor]


def computed(model: Model, layer: LayerSpec, x: Tensor, weights: Weights, given: Given) -> Tensor:
    for name in layer.functions:
        function: Callable[[Tensor, Weights, Given], Tensor] = getattr(model, name)
        x = function(x, weights, given)
    return x


def reads_back(model: Model, layer: LayerSpec, x: Tensor, weights: Weights) -> bool:
    """Whether what is launched for a layer on these hidden states depends on values that it computes."""
    return bool(layer.reads_back) and bool(getattr(model, layer.reads_back)(x, weights))


def logits(model: Model, layer: LayerSpec, hidden: Tensor, parts: Iterable[Weights]) -> Tensor:
    """The weights come once for each part of the vocabulary."""
    (name,) = layer.functions
    made: list[Tensor] = [getattr(model, name)(hidden, weights) for weights in parts]
    return made[0] if len(made) == 1 else torch.cat(made, dim=-1)
