"""Positions: a text must not be longer than the model's positions."""

from __future__ import annotations

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.policy import KVPolicy


def of_windows(spec: ModelSpec) -> str:
    """The words for positions within a window, where the layers that see everything see fewer positions than the model has."""
    return "" if spec.seen_positions == spec.max_positions else " within its window"


def check_rolling(spec: ModelSpec, plan: Plan) -> None:
    if plan.policy.rolls and not spec.rotary:
        raise ValueError(f"positions 'rolling' needs rotary positions, but {spec.name} has learned ones; leave it out")


def longest_text(spec: ModelSpec, policy: KVPolicy) -> int:
    """The most tokens of a text that is read. After a text that is echoed there must be a position for the echo."""
    return spec.max_positions - 1 if policy.echoes else spec.max_positions


def check_positions(spec: ModelSpec, plan: Plan, row: int, length: int, max_tokens: int) -> None:
    """Refuses texts that are too long. No layer sees the last token. Rolling positions end where the budget does, unless
    some heads keep all."""
    if length > longest_text(spec, plan.policy) and plan.policy.echoes:
        raise ValueError(
            f"prompt {row} has {length} tokens, which kv_policy {plan.kv_policy!r} repeats after them, but {spec.name} has "
            f"{spec.max_positions} positions; give {longest_text(spec, plan.policy)} tokens at most"
        )
    policies = [level.policy for level in plan.levels(spec)]
    if all(policy.rolls for policy in policies):
        slots = max(policy.occupancy(Batch((row,), (length,)), max_tokens).capacity for policy in policies)
        if max(length, slots) > spec.max_positions:
            raise ValueError(
                f"prompt {row} has {length} tokens and {slots} slots, but {spec.name} has {spec.max_positions} "
                "positions; shorten the prompt or keep fewer"
            )
    elif length + max_tokens > spec.max_positions + 1:
        raise ValueError(
            f"prompt {row} has {length} tokens and {max_tokens} are to be generated, but {spec.name} has "
            f"{spec.max_positions} positions; shorten the prompt or generate fewer"
        )


def most_tokens(spec: ModelSpec, plan: Plan, row: int, length: int) -> int:
    """The default number of tokens to generate after a prompt; at least one, which `check_positions` judges."""
    if all(level.policy.rolls for level in plan.levels(spec)):
        raise ValueError(f"max_tokens of prompt {row} is None, but with rolling positions a text has no end; give a number")
    return max(1, spec.max_positions + 1 - length)
