"""How fast answers came: rows and tokens per second, and FlexGen's figure for this application, which counts input and output.

FlexGen pads every prompt to the longest one and continues every answer to its limit, and all these tokens count in its table.
Here a prompt counts as long as it is, whether others share its beginning or not, and an answer as long as it came to be;
FlexGen's figure stands beside that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Speed:
    rows: int
    prompt_tokens: int
    longest_prompt: int
    gen_len: int
    generated_tokens: int
    computed_tokens: int  # what layers were run for: less than there is, where beginnings are shared
    seconds: float  # since weights were loaded

    @property
    def rows_per_second(self) -> float:
        return self.rows / max(self.seconds, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        return (self.prompt_tokens + self.generated_tokens) / max(self.seconds, 1e-9)

    @property
    def flexgen_tokens_per_second(self) -> float:
        return self.rows * (self.longest_prompt + self.gen_len) / max(self.seconds, 1e-9)

    @property
    def generated_tokens_per_second(self) -> float:
        return self.generated_tokens / max(self.seconds, 1e-9)

    def lines(self) -> Iterator[str]:
        whole = self.prompt_tokens + self.generated_tokens
        yield f"speed     {self.rows_per_second:.2f} rows/s: {self.rows} in {self.seconds:.1f} s"
        computed = f"{self.computed_tokens} of {whole} computed"
        generated = f"{self.generated_tokens_per_second:.1f} of them generated"
        yield f"          {self.tokens_per_second:.1f} tokens/s of input and output ({computed}), {generated}"
        padded = f"every row counts as {self.longest_prompt} + {self.gen_len} tokens"
        yield f"          {self.flexgen_tokens_per_second:.1f} tokens/s as FlexGen's table has it: {padded}"

    def as_json(self) -> dict[str, object]:
        names = ("rows_per_second", "tokens_per_second", "generated_tokens_per_second", "flexgen_tokens_per_second")
        return {**asdict(self), **{name: round(getattr(self, name), 3) for name in names}}
