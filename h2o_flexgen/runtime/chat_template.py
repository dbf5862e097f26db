"""Chat templates: programs in Jinja that come with a model, so nobody knows what they do. Jinja's sandbox keeps them from
everything but the messages; here the work is bounded as well that one of them can do, without a look at a clock.

All that takes time is counted: passes of loops and calls, and characters and items that are made. What could make very much at
once (a text times a number, a padded text, a text in which others are replaced) is estimated before it is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

WORK = 1 << 24  # in characters; a template that exists makes some thousands
WORK_PER_CHARACTER = 64  # of messages
STEP = 64  # what a pass of a loop, or a call, counts as
ITEM = 16  # the same of an item of a list
DIGITS, MOST_DIGITS = 4, 20  # of a width in a format: so many are nothing, and with these all is said
BITS = 1 << 12  # of a whole number
COUNTED, JOINED, WEIGHED = "_counted", "_joined", "_weighed"  # filters that no template can name


class TooMuchWork(Exception):
    """A template that does far more than write down a talk."""


class _Work:
    """What may still be done."""

    def __init__(self, most: int) -> None:
        self.left = most

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise TooMuchWork("it does far more than write down a talk")

    def afford(self, amount: int) -> None:
        """Before as much is done as may be needed."""
        if amount > self.left:
            self.spend(amount)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(STEP)
            yield item

    def weighed(self, value: Any) -> Any:
        """A value that was made; iterators are counted when they are followed."""
        if isinstance(value, Iterator):
            return self.counted(value)
        self._weigh(value)
        return value

    def _weigh(self, value: Any) -> None:
        if isinstance(value, (str, range)):
            self.spend(1 + len(value))
        elif isinstance(value, int) and value.bit_length() > BITS:
            raise TooMuchWork("it makes numbers of thousands of digits")
        elif isinstance(value, (list, tuple, set)):
            self.spend(ITEM * (1 + len(value)))
            for item in value:
                self._weigh(item)
        elif isinstance(value, dict):
            self._weigh(list(value))
            self._weigh(list(value.values()))

    def prepare(self, value: Any, args: Sequence[Any]) -> None:
        """Before a text or a list is worked on: with texts of the arguments between its parts, or padded to their numbers."""
        self.spend(STEP)
        numbers = [abs(one) for one in args if type(one) is int]
        between = 1 + sum(len(one) for one in args if isinstance(one, str)) + max(numbers, default=0)
        if isinstance(value, str):
            self.afford((1 + len(value)) * between)
        elif isinstance(value, (list, tuple, dict, range)):
            before = self.left
            self._weigh(value)
            self.afford(len(value) * between + before - self.left)

    def prepare_format(self, text: str, values: Sequence[Any]) -> None:
        """Before values are written into a text with signs of per cent: padded as it says, or as a value in place of a star."""
        self.prepare(text, values if "*" in text else [])
        self.padded(text)

    def padded(self, form: str) -> None:
        for digits in re.findall(r"\d+", form):
            self.afford(10 ** min(len(digits), MOST_DIGITS) if len(digits) > DIGITS else 0)


class _Counting(NodeTransformer):
    """Puts a filter that counts around all that makes something without a call."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, WEIGHED)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, WEIGHED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, WEIGHED) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, WEIGHED) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, WEIGHED)

    visit_Dict = visit_List


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The names that templates of models use, each with its work counted."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, work: _Work) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension], optimized=False)
        self.work = work
        prepare = {"format": work.prepare_format}
        named: dict[str, Any] = {**self.filters, "tojson": _to_json}
        self.filters = {name: self._bounded(one, prepare.get(name, work.prepare)) for name, one in named.items()}
        tests: dict[str, Any] = self.tests
        self.tests = {name: self._bounded(one, work.prepare) for name, one in tests.items()}
        self.filters.update({COUNTED: work.counted, JOINED: self._join, WEIGHED: work.weighed})
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise, strftime_now=_now, dict=_dict, namespace=_Namespace)

    def compiled(self, text: str) -> jinja2.Template:
        self.work.spend(len(text))
        tree = _Counting().visit(self.parse(text))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        self.work.prepare(owner if isinstance(owner, (str, list, dict)) else None, [*args, *kwargs.values()])
        for one in args:  # of a join
            self.work.prepare(one, [owner])
        return self.work.weighed(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.work.prepare(left, [right] if operator == "*" else [])
        self.work.prepare(right, [left] if operator == "*" else [])
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > BITS:
                raise TooMuchWork("it makes numbers of thousands of digits")
        if operator == "%" and isinstance(left, str):
            self.work.prepare_format(left, right if isinstance(right, tuple) else [right])
        return self.work.weighed(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, takes_mapping = str(value.__self__), value.__name__ == "format_map"

        def written(*args: Any, **kwargs: Any) -> str:
            return _Formatter(self).vformat(text, () if takes_mapping else args, args[0] if takes_mapping else kwargs)

        return written

    def _bounded(self, function: Callable[..., Any], prepare: Callable[[Any, Sequence[Any]], None]) -> Callable[..., Any]:
        """A filter or test; some are handed the environment or the context first, which the marks on a function say."""
        before = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            handed, rest = args[:before], list(args[before:])
            if rest and isinstance(rest[0], Iterator):
                rest[0] = list(self.work.counted(rest[0]))
            if rest:
                prepare(rest[0], [*rest[1:], *kwargs.values()])
            return self.work.weighed(function(*handed, *rest, **kwargs))

        return bounded

    def _join(self, parts: Sequence[Any]) -> str:
        self.work.prepare(parts, [])
        return str(self.work.weighed("".join(map(str, parts))))

    def concat(self, pieces: Iterable[str]) -> str:
        """What a block, a macro or the whole template writes."""
        return "".join(map(self.work.weighed, pieces))


class _Formatter(SandboxedFormatter):
    """Of `str.format`. What a field is padded to may itself be a field: only here it is known."""

    _env: _Sandbox

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._env.work.padded(format_spec)
        return super().format_field(value, format_spec)


class _Generation(Extension):
    """Marks what the model has written, which is for training; here it is written as it is."""

    tags = {"generation"}  # noqa: RUF012 -- jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Takes no name with an underscore before it: those are Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"the name {name} of a namespace begins with an underscore")
        super().__setitem__(name, value)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own writes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, object]) -> str:
    """What the template makes of the messages, up to where the model answers."""
    said = sum(len(text) for message in messages for text in message.values())
    sandbox = _Sandbox(_Work(WORK + WORK_PER_CHARACTER * said))
    named = {
        name: str(token) for name, token in special_tokens.items() if isinstance(name, str) and not isinstance(token, list)
    }
    given = {**named, "messages": [dict(message) for message in messages], "tools": None, "documents": None}
    compiled = sandbox.compiled(template)
    return sandbox.concat(compiled.generate(**given, add_generation_prompt=True))
