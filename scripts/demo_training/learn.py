"""Training: from random weights to a model, for a number of minutes or of steps. Texts grow longer as it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from demo_training.looks import Looks
from demo_training.rows import AGAIN, ANSWER, PROSE, Row, RowMaker


@dataclass(frozen=True)
class Stage:
    """A stage of the training, from a share of the time on: the length of texts, tokens per step, and the share of rows that
    are rounds."""

    since: float
    length: int
    tokens: int
    rounds: float


STAGES = (Stage(0.0, 256, 4096, 0.15), Stage(0.25, 512, 4096, 0.05), Stage(0.5, 1024, 8192, 0.05))
WARM_UP = 0.02  # share of the time
PRICE_RISES = 0.1  # share of the time: the model first learns to look back, then to do so where it helps
COOL_DOWN = 0.4
CLIP = 1.0
STEPS_OF_A_POINT = 10


@dataclass(frozen=True)
class Point:
    """A point of the loss curve."""

    step: int
    seconds: float
    tokens: int
    length: int
    prose_loss: float  # per token
    answer_loss: float
    answers_right: float  # share of answers' tokens
    again_right: float  # share of tokens that came before in the same order
    near: float  # shares of attention; the rest is at the first token
    far: float


@dataclass(frozen=True)
class Settings:
    minutes: float
    steps: int | None  # instead of minutes: the same work on any machine
    matrix_rate: float  # learning rate of Muon
    table_rate: float  # learning rate of AdamW: embeddings, norms, biases
    near_price: float  # added to the loss, times the share of attention that is near
    far_price: float
    since: float = 0.0  # share of the training that an earlier run has done
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16  # type of the values in products


class Progress:
    """The share of the training that is done, by the clock, or by steps if their number is given."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def after(self, steps: int) -> float:
        settings = self._settings
        done = self.seconds / (60 * settings.minutes) if settings.steps is None else steps / settings.steps
        return settings.since + done


def stage_at(progress: float) -> Stage:
    return [stage for stage in STAGES if progress >= stage.since][-1]


def rate_at(progress: float) -> float:
    """The share of the full rate: it rises at once, stays, and falls to nothing in a straight line."""
    return min(1.0, (progress + 0.001) / WARM_UP, max(0.0, 1 - progress) / COOL_DOWN)


def price_share_at(progress: float) -> float:
    """The share of the price of looking."""
    return min(1.0, (progress + 0.001) / PRICE_RISES)


def learn(model: PreTrainedModel, maker: RowMaker, settings: Settings, on_point: Callable[[Point], None]) -> None:
    """Trains the model; rates and lengths follow the share of the training that is done."""
    model.to(settings.device).train()
    optimizers, looks = _optimizers(model, settings), Looks(model)
    progress, step, tokens = Progress(settings), 0, 0
    with ThreadPoolExecutor(1) as pool:
        for batch in _rows(pool, maker, progress):
            done = progress.after(step)
            for optimizer, rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * rate_at(done)
                optimizer.zero_grad(set_to_none=True)
            losses = _losses(model, looks, batch, settings)
            price = settings.near_price * losses.near + settings.far_price * losses.far
            (losses.total + price_share_at(done) * price).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for optimizer, _ in optimizers:
                optimizer.step()
            step, tokens = step + 1, tokens + sum(len(row.tokens) for row in batch)
            is_last = progress.after(step) >= 1
            if step % STEPS_OF_A_POINT == 0 or is_last:
                on_point(losses.point(step, progress.seconds, tokens, len(batch[0].tokens)))
            if is_last:
                break
    looks.close()
    model.eval()


def _rows(pool: ThreadPoolExecutor, maker: RowMaker, progress: Progress) -> Iterator[list[Row]]:
    """Endless batches, each made while the one before is learned from."""
    made = batches = 0

    def batch(first: int, stage: Stage) -> list[Row]:
        return [maker.row(first + place, stage.length, stage.rounds) for place in range(stage.tokens // stage.length)]

    def ask() -> Future[list[Row]]:
        nonlocal made, batches
        stage = stage_at(progress.after(batches))
        first, made, batches = made, made + stage.tokens // stage.length, batches + 1
        return pool.submit(batch, first, stage)

    waiting = ask()
    try:
        while True:
            ready, waiting = waiting.result(), ask()
            yield ready
    finally:
        waiting.cancel()


@dataclass(frozen=True)
class _Losses:
    total: Tensor
    near: Tensor
    far: Tensor
    each: Tensor
    weights: Tensor
    right: Tensor

    def point(self, step: int, seconds: float, tokens: int, length: int) -> Point:
        prose, again, answers = (self.weights == kind for kind in (PROSE, AGAIN, ANSWER))
        return Point(
            step,
            round(seconds, 1),
            tokens,
            length,
            round(float(self.each[prose].mean()), 4),
            round(float(self.each[answers].mean()), 4),
            round(float(self.right[answers].float().mean()), 4),
            round(float(self.right[again].float().mean()), 4),
            round(float(self.near.detach()), 4),
            round(float(self.far.detach()), 4),
        )


def _losses(model: PreTrainedModel, looks: Looks, batch: list[Row], settings: Settings) -> _Losses:
    tokens = torch.tensor([row.tokens for row in batch], device=settings.device)
    weights = torch.tensor([row.weights for row in batch], device=settings.device)[:, 1:].flatten()
    kind = settings.device.partition(":")[0]
    with torch.autocast(kind, settings.dtype, enabled=settings.dtype != torch.float32):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    flat, wanted = logits.float().flatten(0, 1), tokens[:, 1:].flatten()
    each = nn.functional.cross_entropy(flat, wanted, reduction="none")
    with torch.no_grad():
        right = flat.argmax(-1) == wanted
    return _Losses((each * weights).sum() / weights.sum(), *looks.take(), each.detach(), weights, right)


def _optimizers(model: PreTrainedModel, settings: Settings) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices of the layers; AdamW for tables, norms and biases, as Muon's authors advise."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = list({id(parameter): parameter for parameter in model.parameters()}.values())
    matrices = [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in tables]
    taken = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in parameters if id(parameter) not in taken]
    return [
        (torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"), settings.matrix_rate),
        (torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0), settings.table_rate),
    ]


def as_json(point: Point) -> dict[str, object]:
    return asdict(point)
