"""Chat templates: Jinja programs that come with a model and may do anything. Jinja's sandbox shows them the messages alone;
this module also bounds the work that one can do, without looking at a clock.

Templates get only the statements, filters and methods that templates of models use. Everything that takes time is counted: the
program's nodes that run, its calls, and the characters and items that are read or made. The cost of operations that could make
very much at once (a text times a number, replacements in a text, a padded text) is estimated before they are done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from h2o_flexgen.core.hints import shown

SOURCE = 1 << 17  # characters of a template; the longest in use have some tens of thousands
WORK = 1 << 24  # in characters; a template in use costs some thousands
WORK_PER_CHARACTER = 64  # of messages
WORK_PER_MESSAGE = 1 << 15  # a program looks at each message with some hundred nodes
STEP = 64  # the cost of a pass of a loop, of a call, or of a look-up of a name in a value
NODE = 8  # the cost of a node of the program in a body that runs
ITEM = 16  # the cost of an item of a list
PRODUCT_BITS = 6  # a search for one text in another is charged the product of their lengths over 2 to this
MOST_DIGITS = 20  # of a width in a format: enough for every possible width
BITS = 1 << 12  # of a whole number
SHORT = 128  # characters of a date format
SHORT_JSON = 16  # characters between two items of JSON
GOES_ON = "THE_MESSAGE_GOES_ON_HERE"  # added to an unfinished message to find where its text ends
SCOPES = ("_loop_vars", "_block_vars")  # arguments that Jinja adds to a call: variables set around it


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


METHODS: Mapping[type, frozenset[str]] = {
    str: _names(
        "strip lstrip rstrip split rsplit splitlines partition rpartition startswith endswith removeprefix removesuffix "
        "replace join find rfind index rindex count upper lower title capitalize casefold swapcase "
        "isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle isupper"
    ),
    dict: _names("get items keys values"),
    list: _names("index count"),
    tuple: _names("index count"),
}
FILTERS = _names(
    "abs capitalize count d default dictsort e escape first float format indent int items join last length list lower map max "
    "min reject rejectattr replace reverse round safe select selectattr sort string sum title tojson trim unique upper"
)
AT_ONCE = _names(  # filters and tests that take constant time; the filters float and string do not
    "count d default first last length boolean callable defined false integer iterable mapping none number sameas sequence "
    "true undefined"
)
Node = TypeVar("Node", bound=nodes.Node)


class TooMuchWork(Exception):
    """Raised when a template does far more work than writing down a conversation needs."""


class _Work:
    """The work that a template may still do."""

    def __init__(self, most: int) -> None:
        self.left = most

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise TooMuchWork("it does far more than write down a talk")

    def afford(self, amount: int) -> None:
        """Refuses something that may cost this much, before it is done."""
        if amount > self.left:
            self.spend(amount)

    def counted(self, items: Iterable[Any], nodes_each: int = 0) -> Iterator[Any]:
        for item in items:
            self.spend(STEP + NODE * nodes_each)
            yield item

    def weighed(self, value: Any) -> Any:
        """Charges for a value that was made; iterators are counted as they are read."""
        if isinstance(value, Iterator):
            return self.counted(value)
        self.weigh(value)
        return value

    def weigh(self, value: Any) -> int:
        """Charges for everything in a value, and returns the charge."""
        before = self.left
        if isinstance(value, (str, range)):
            self.spend(1 + len(value))
        elif isinstance(value, int) and value.bit_length() > BITS:
            raise TooMuchWork("it makes numbers of thousands of digits")
        elif isinstance(value, Collection):
            self.spend(ITEM * (1 + len(value)))
            for item in value:
                self.weigh(item)
            if isinstance(value, dict):
                self.weigh(value.values())
        else:
            self.spend(1)
        return before - self.left

    def prepare(self, value: Any, args: Iterable[Any]) -> None:
        """Charges before a value is worked on. The work may put all arguments between all parts of the value, pad it to widths
        given as numbers, or search for each argument at every place."""
        self.spend(STEP)
        between = 1
        for one in args:
            between += self.weigh(one) + (abs(one) if isinstance(one, int) else 0)
        size = 1 + self.weigh(value)
        self.afford(size * max(between, ITEM))
        self.spend(size * between >> PRODUCT_BITS)

    def prepare_format(self, text: Any, values: Collection[Any]) -> None:
        """Charges before values are written into a text with per cent signs. Each value may be written at each sign, padded to
        a width that stands in the text or replaces a star."""
        self.prepare(text, values if "*" in str(text) else [])
        self.afford(str(text).count("%") * self.weigh(values))
        self.padded(str(text))

    def padded(self, form: str) -> None:
        self.afford(sum(int(digits[:MOST_DIGITS]) for digits in re.findall(r"\d+", form)))


class _Counting(NodeTransformer):
    """Wraps everything that makes a value without a call, and all bodies that can run repeatedly, in calls that count."""

    def __init__(self) -> None:
        self.visited = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.visited += 1
        return super().visit(node, *args, **kwargs)

    def _visited_in(self, node: Node) -> int:
        before = self.visited
        self.generic_visit(node)
        return self.visited - before

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError("loops that call themselves are not for chat templates")
        count = self._visited_in(node)
        node.iter = _call("counted", node.iter, nodes.Const(count))
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        count = self._visited_in(node)
        node.body.insert(0, nodes.ExprStmt(_call("spend", nodes.Const(NODE * count)), lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        raise SecurityError("blocks with names are not for chat templates")

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _weighed(node)
        node.arg = _weighed(node.arg)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _weighed(node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _weighed(node)

    visit_Dict = visit_List


def _call(name: str, *args: Any) -> nodes.Call:
    """A call of a sandbox function that templates cannot name."""
    line = args[0].lineno
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), list(args), [], None, None, lineno=line)


def _weighed(node: Any) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call("weighed", node)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Offers the names that models' templates use, each with its work counted."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, work: _Work) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension], optimized=False)
        self.work, self.counted, self.spend, self.weighed = work, work.counted, work.spend, work.weighed
        self.own = (self.counted, self.spend, self.weighed, self.joined)
        named: dict[str, Any] = {**self.filters, "tojson": _to_json, "sum": _sum, "round": _round}
        self.filters = {name: self._bounded(name, named[name]) for name in FILTERS}
        tests: dict[str, Any] = self.tests
        self.tests = {name: self._bounded(name, one) for name, one in tests.items()}
        given = {"dict": _dict, "namespace": _Namespace, "raise_exception": _raise, "strftime_now": _now}
        self.globals = {"range": self.globals["range"], **given}

    def compiled(self, text: str) -> jinja2.Template:
        if len(text) > SOURCE:
            raise TooMuchWork(f"it has {len(text)} characters, and only templates of up to {SOURCE} are run")
        self.work.spend(len(text))
        tree = _Counting().visit(self.parse(text))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (LoopContext, Namespace)):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in METHODS.items())

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.work.spend(STEP)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.work.spend(STEP)
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if obj in self.own:
            return obj(*args)
        given = [*args, *(value for name, value in kwargs.items() if name not in SCOPES)]
        if isinstance(obj, Macro):  # its body is charged for what it does with its arguments
            self.work.spend(STEP + len(given))
            return self.work.weighed(super().call(context, obj, *args, **kwargs))
        owner = obj.__self__ if isinstance(obj, BuiltinMethodType) else None
        if isinstance(owner, (str, list)):
            self.work.prepare(owner, given)
            self.work.prepare(given, [owner])  # owner is put between the items of a join
        else:
            self.work.prepare(given, [])
        made = super().call(context, obj, *args, **kwargs)
        return made if isinstance(owner, dict) else self.work.weighed(made)  # what a dict returns exists already

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

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a filter or test. Some take the environment or the context first, as the marks on the function say."""
        before = 1 if hasattr(function, "jinja_pass_arg") else 0
        prepare = self.work.prepare_format if name == "format" else self.work.prepare

        @wraps(function)
        def at_once(*args: Any, **kwargs: Any) -> Any:
            self.work.spend(STEP)
            return function(*args, **kwargs)

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            handed, rest = args[:before], list(args[before:])
            if rest and isinstance(rest[0], Iterator):
                rest[0] = list(self.work.counted(rest[0]))
            if rest:
                prepare(rest[0], [*rest[1:], *kwargs.values()])
            return self.work.weighed(function(*handed, *rest, **kwargs))

        return at_once if name in AT_ONCE else bounded

    def joined(self, parts: Sequence[Any]) -> str:
        self.work.prepare(parts, [])
        return str(self.work.weighed("".join(map(str, parts))))

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a macro, a part or the whole template writes."""
        return "".join(map(self.work.weighed, pieces))


class _Formatter(SandboxedFormatter):
    """Counts the work of `str.format`. A field's width may itself be a field, and is only known here."""

    _env: _Sandbox

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._env.work.prepare(value, [])
        self._env.work.padded(format_spec)
        return self._env.work.weighed(super().format_field(value, format_spec))


class _Generation(Extension):
    """Ignores the marks around the model's own messages, which serve training."""

    tags = {"generation"}  # noqa: RUF012 -- jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Refuses Python's own names, those with an underscore first, and is never written out, as it may contain itself."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"the name {name} of a namespace begins with an underscore")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    if len(form) > SHORT:
        raise TooMuchWork(f"its form of a date has {len(form)} characters")
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _sum(items: Iterable[Any], attribute: str | None = None, start: float = 0) -> Any:
    """Replaces Jinja's sum, which also concatenates lists, copying from the beginning each time."""
    if not isinstance(start, (int, float)):
        raise TooMuchWork("it sums up what is no number")
    return sum((item[attribute] if attribute is not None else item for item in items), start)


def _round(value: float, precision: int = 0) -> float:
    """Replaces Jinja's round, which computes powers of ten of any size."""
    if abs(precision) > MOST_DIGITS:
        raise TooMuchWork(f"it rounds to {precision} digits")
    return float(round(value, precision))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Replaces Jinja's filter, which escapes for HTML. The indent stands before every item, once per level."""
    widths = [indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ())]
    if max(widths) > SHORT_JSON:
        raise TooMuchWork(f"it puts {max(widths)} characters between items of JSON")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _characters(value: object) -> int:
    """The size of a value: the characters of its texts, and one for each number."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(name) + _characters(each) for name, each in value.items())
    return sum(map(_characters, value)) if isinstance(value, Sequence) else 1


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, object],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, object] | None = None,
) -> str:
    """The text that the template makes of the messages, up to where the model answers, or else to their end. `settings` are
    other names that it may look at."""
    said = _characters(messages) + _characters(tools)
    sandbox = _Sandbox(_Work(WORK + WORK_PER_CHARACTER * said + WORK_PER_MESSAGE * len(messages)))
    named = {
        name: str(token) for name, token in special_tokens.items() if isinstance(name, str) and not isinstance(token, list)
    }
    given = {
        **named,
        **(settings or {}),
        "messages": [dict(message) for message in messages],
        "tools": [*tools] or None,
        "documents": None,
    }
    compiled = sandbox.compiled(template)
    return sandbox.concat(compiled.generate(**given, add_generation_prompt=add_generation_prompt))


def render_unfinished(template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, object]) -> str:
    """The text of the messages up to the end of the last one, to go on there. The template decides about its last spaces."""
    if not messages:
        raise ValueError("there is no message that could go on")
    last = messages[-1]["content"]
    marked = [*messages[:-1], {**messages[-1], "content": f"{last}{GOES_ON} "}]
    before, found, behind = render(template, marked, special_tokens, add_generation_prompt=False).rpartition(GOES_ON)
    if not found or last.strip() not in before:
        raise ValueError(f"the chat template leaves out the last message ({shown(last)}), so it cannot go on")
    return before if behind.startswith(" ") else before.rstrip()
