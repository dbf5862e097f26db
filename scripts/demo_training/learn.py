"""Training: from random weights to a model, for so many minutes. Texts grow longer as it goes on."""

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
    """From a share of the time on: how long texts are, how many tokens a step takes, how many rows are rounds."""

    since: float
    length: int
    tokens: int
    rounds: float


STAGES = (Stage(0.0, 256, 4096, 0.15), Stage(0.25, 512, 4096, 0.05), Stage(0.5, 1024, 8192, 0.05))
WARM_UP = 0.02  # of the time
PRICE_RISES = 0.1  # first it learns to look back, then to do so where it helps
COOL_DOWN = 0.4
CLIP = 1.0
STEPS_OF_A_POINT = 10


@dataclass(frozen=True)
class Point:
    """Of the loss curve."""

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
    matrix_rate: float  # for Muon
    table_rate: float  # for AdamW: embeddings, norms, biases
    near_price: float  # added to the loss, times the share of attention that is near
    far_price: float
    since: float = 0.0  # share of the time that an earlier run has had
    device: str = "cpu"


def stage_at(progress: float) -> Stage:
    return [stage for stage in STAGES if progress >= stage.since][-1]


def rate_at(progress: float) -> float:
    """Of the full rate: up at once, flat, and down to nothing in a straight line."""
    return min(1.0, (progress + 0.001) / WARM_UP, max(0.0, 1 - progress) / COOL_DOWN)


def price_share_at(progress: float) -> float:
    """Of the price of looking."""
    return min(1.0, (progress + 0.001) / PRICE_RISES)


def learn(model: PreTrainedModel, maker: RowMaker, settings: Settings, on_point: Callable[[Point], None]) -> None:
    """The clock decides: rates and lengths follow the share of the minutes that is over."""
    model.to(settings.device).train()
    optimizers, looks = _optimizers(model, settings), Looks(model)
    started, step, tokens = time.monotonic(), 0, 0
    with ThreadPoolExecutor(1) as pool:
        rows = _rows(pool, maker, lambda: _progress(started, settings))
        for batch in rows:
            progress = _progress(started, settings)
            for optimizer, rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * rate_at(progress)
                optimizer.zero_grad(set_to_none=True)
            losses = _losses(model, looks, batch, settings.device)
            price = settings.near_price * losses.near + settings.far_price * losses.far
            (losses.total + price_share_at(progress) * price).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for optimizer, _ in optimizers:
                optimizer.step()
            step, tokens = step + 1, tokens + sum(len(row.tokens) for row in batch)
            is_last = _progress(started, settings) >= 1
            if step % STEPS_OF_A_POINT == 0 or is_last:
                on_point(losses.point(step, time.monotonic() - started, tokens, len(batch[0].tokens)))
            if is_last:
                break
    looks.close()
    model.eval()


def _progress(started: float, settings: Settings) -> float:
    return settings.since + (time.monotonic() - started) / (60 * settings.minutes)


def _rows(pool: ThreadPoolExecutor, maker: RowMaker, progress: Callable[[], float]) -> Iterator[list[Row]]:
    """Batches without end, each made while the one before is learned from."""
    made = 0

    def batch(first: int, stage: Stage) -> list[Row]:
        return [maker.row(first + place, stage.length, stage.rounds) for place in range(stage.tokens // stage.length)]

    def ask() -> Future[list[Row]]:
        nonlocal made
        stage = stage_at(progress())
        first, made = made, made + stage.tokens // stage.length
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


def _losses(model: PreTrainedModel, looks: Looks, batch: list[Row], device: str) -> _Losses:
    tokens = torch.tensor([row.tokens for row in batch], device=device)
    weights = torch.tensor([row.weights for row in batch], device=device)[:, 1:].flatten()
    with torch.autocast(device.partition(":")[0], torch.bfloat16):
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
