"""Shared prefixes: which requests begin with the same tokens, and which of these beginnings are worth computing once for all.

Requests pass by once, in their order, and are not kept: a tree of what they have in common is. Of a job (`PrefixFinder`) what
is found depends on the requests alone, and where the tree outgrows its room, what few rows have is forgotten first, so among
very many requests some small groups may be missed. Of requests that arrive (`Beginnings`) what was not asked for for longest is
forgotten first. The last token of a prompt is never shared: it makes the row's first logits.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

LEAST_TOKENS = 32  # of a prefix: to attend a shorter one apart costs about what its prompt would
ROOM = 32 << 20  # bytes of the tree
ROOM_OF_ARRIVALS = 8 << 20
ROOM_TOKENS = 16
NODE_BYTES = 500  # of a node beside its tokens
MOST_CANDIDATES = 4096  # beginnings that are weighed against each other
TOKEN = array("i").itemsize
NO_GROUP = -1
OWN_TOKENS = 1 << 20  # numbers of tokens that rows with an adapter have for themselves
MOST_ADAPTERS = 1000


class SharedPrefix(NamedTuple):
    """The first tokens of what is kept under the number of a group."""

    group: int
    tokens: int
    beside: int = 0  # tokens that would have room where the states at its end lie

    @property
    def room(self) -> int:
        return room_of(self.tokens) + self.beside


def room_of(tokens: int) -> int:
    """Tokens that a prefix takes room for: as many as begin and end at a cache line, whatever a token takes."""
    return -(-tokens // ROOM_TOKENS) * ROOM_TOKENS


@dataclass(frozen=True)
class PrefixGroups:
    """The groups of requests that share a prefix: each request belongs to one at most."""

    lengths: tuple[int, ...]  # tokens of each group's prefix
    rows: tuple[int, ...]  # rows of each group
    groups: array[int]  # of each request, NO_GROUP where it shares nothing

    def of(self, request: int, beside: int = 0) -> SharedPrefix | None:
        """What a request shares. `beside`: the room that the states of a prefix take."""
        group = self.groups[request]
        return None if group == NO_GROUP else SharedPrefix(group, self.lengths[group], beside)

    @property
    def saved_tokens(self) -> int:
        """Tokens of prompts that are not computed because others had them computed."""
        return sum((rows - 1) * length for rows, length in zip(self.rows, self.lengths))

    def only(self, requests: Sequence[int], rows: Sequence[int]) -> PrefixGroups:
        """The groups as they are, of some of the requests: these, and how many rows each of them is."""
        left: Counter[int] = Counter()
        for request, own in zip(requests, rows, strict=True):
            left[self.groups[request]] += own
        numbers = {group: number for number, group in enumerate(sorted(left.keys() - {NO_GROUP}))}
        groups = array("i", (numbers.get(self.groups[request], NO_GROUP) for request in requests))
        return PrefixGroups(tuple(self.lengths[group] for group in numbers), tuple(left[group] for group in numbers), groups)


def under(adapter: int, ids: Sequence[int]) -> Sequence[int]:
    """Tokens under the adapter with this number, as they are compared: they never agree with those under another, or none."""
    return [token + adapter * OWN_TOKENS for token in ids] if adapter else ids


def tokens_of(ids: Sequence[int]) -> Sequence[int]:
    """The model's tokens, of those as they are compared, whatever adapter they are under."""
    return [token % OWN_TOKENS for token in ids]


def adapter_of(text: bytes) -> int:
    """The number of the adapter under which a text's tokens are compared."""
    return memoryview(text[:TOKEN]).cast("i")[0] // OWN_TOKENS if text else 0


def text_under(adapter: int, text: bytes) -> bytes:
    """A text of tokens, whatever adapter they were under, under the adapter with this number."""
    by = (adapter - adapter_of(text)) * OWN_TOKENS
    return bytes_of([token + by for token in memoryview(text).cast("i")]) if by else text


def bytes_of(ids: Sequence[int]) -> bytes:
    """Tokens as they are compared."""
    return array("i", ids).tobytes()


def common_tokens(one: bytes, other: bytes) -> int:
    """Tokens that two texts begin with."""
    low, high = 0, min(len(one), len(other)) // TOKEN
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN] == other[: middle * TOKEN]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class _Node:
    """A beginning: that of its parent, and the tokens of its label after it."""

    number: int
    label: bytes
    rows: int  # that begin so
    children: dict[bytes, _Node] = field(default_factory=dict)  # by their first token
    last: int = 0  # the number of the last text that begins so


class _Tree:
    def __init__(self) -> None:
        self.nbytes = 0
        self.numbers = 0  # that nodes were given
        self._texts = count(1)
        self.root = self._node(b"")

    def add(self, text: bytes, rows: int) -> _Node:
        """Adds a text, and returns the node where it ends."""
        at, node, number = 0, self.root, next(self._texts)
        node.rows += rows
        while at < len(text):
            node, at = self._child(node, text, at)
            node.rows += rows
            node.last = number
        return node

    def path(self, text: bytes) -> Iterator[tuple[_Node, int]]:
        """The nodes that a text passes, each with the tokens up to its end. The last one may be left in its middle."""
        at, node = 0, self.root
        while at < len(text) and (child := node.children.get(text[at : at + TOKEN])) is not None:
            inside = common_tokens(child.label, text[at : at + len(child.label)])
            yield child, at // TOKEN + inside
            if inside * TOKEN < len(child.label):
                return
            node, at = child, at + len(child.label)

    def remove(self, leaf: _Node, parent: _Node) -> None:
        del parent.children[leaf.label[:TOKEN]]
        self.nbytes -= NODE_BYTES + len(leaf.label)

    def _node(self, label: bytes, rows: int = 0, last: int = 0) -> _Node:
        self.numbers += 1
        return _Node(self.numbers - 1, label, rows, last=last)

    def _child(self, node: _Node, text: bytes, at: int) -> tuple[_Node, int]:
        """The node that a text leads to, and its place there. A node is cut in two where the text leaves its label."""
        key = text[at : at + TOKEN]
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = self._node(text[at:])
            self.nbytes += NODE_BYTES + len(child.label)
            return child, len(text)
        if text.startswith(child.label, at):
            return child, at + len(child.label)
        common = TOKEN * common_tokens(child.label, text[at : at + len(child.label)])
        upper = node.children[key] = self._node(child.label[:common], child.rows, child.last)
        child.label = child.label[common:]
        upper.children[child.label[:TOKEN]] = child
        self.nbytes += NODE_BYTES
        return upper, at + common


def _down_from(root: _Node) -> Iterator[tuple[_Node, _Node | None, int]]:
    """Every node with its parent and the tokens up to its end, parents first."""
    waiting: list[tuple[_Node, _Node | None, int]] = [(root, None, 0)]
    while waiting:
        node, parent, depth = waiting.pop()
        depth += len(node.label) // TOKEN
        yield node, parent, depth
        waiting.extend((child, node, depth) for child in node.children.values())


class Beginnings:
    """What requests began with that have come so far, the last of them at least."""

    def __init__(self, room: int = ROOM_OF_ARRIVALS) -> None:
        self._room = room
        self._tree = _Tree()

    def add(self, ids: Sequence[int], rows: int = 1) -> None:
        """Takes note of a request that has come, and of how many rows it is."""
        self._tree.add(bytes_of(ids), rows)
        if self._tree.nbytes > self._room:
            self._forget()

    def common(self, ids: Sequence[int]) -> int:
        """The tokens that a request, which was taken note of, begins with like any other row."""
        return max((tokens for node, tokens in self._tree.path(bytes_of(ids)) if node.rows > 1), default=0)

    def _forget(self) -> None:
        """Makes room: discards the ends that were not reached for longest, until half of it is free."""
        while self._tree.nbytes > self._room // 2:
            leaves = [(node.last, node, parent) for node, parent, _ in _down_from(self._tree.root) if not node.children]
            leaves.sort(key=lambda leaf: leaf[0])
            for _, leaf, parent in leaves[: max(1, len(leaves) // 2)]:
                if parent is not None:
                    self._tree.remove(leaf, parent)


# -- a job -----------------------------------------------------------------------------------------------------------------


class PrefixFinder:
    def __init__(self, least: int = LEAST_TOKENS, own: int = 1, room: int = ROOM) -> None:
        """`least`: the tokens from which on a prefix is worth sharing; `own`: the last tokens of a prompt, which are not."""
        self._least = least
        self._own = own
        self._room = room
        self._tree = _Tree()
        self._taken_in_by = array("i")  # for each number of a node: itself, or the node that it became a part of
        self._ends = array("i")  # for each request, the number of the node where it ended

    def add(self, ids: Sequence[int], rows: int = 1) -> None:
        """Takes the next request: its tokens, and how many rows it is."""
        self._ends.append(self._tree.add(bytes_of(ids[: -self._own]), rows).number)
        if self._tree.nbytes > self._room:
            self._forget()

    def groups(self) -> PrefixGroups:
        """The groups with the prefixes that save most, of the requests so far."""
        chosen, group_of_node = _Choice(self._tree.root, self._least).made()
        of_request = array("i", (group_of_node.get(self._alive(number), NO_GROUP) for number in self._ends))
        return PrefixGroups(tuple(depth for depth, _ in chosen), tuple(rows for _, rows in chosen), of_request)

    def _forget(self) -> None:
        """Makes room: the ends of single rows go first, then what two share, and so on."""
        self._taken_in_by.extend(range(len(self._taken_in_by), self._tree.numbers))
        most = 1
        while self._tree.nbytes > self._room // 2:
            for node, parent, _ in reversed(list(_down_from(self._tree.root))):
                if parent is not None and not node.children and node.rows <= most:
                    self._tree.remove(node, parent)
                    self._taken_in_by[node.number] = parent.number
            most *= 2

    def _alive(self, number: int) -> int:
        """The number of the node that a node has become a part of."""
        if number >= len(self._taken_in_by):
            return number  # it came after all that was forgotten
        last = number
        while self._taken_in_by[last] != last:
            last = self._taken_in_by[last]
        while number != last:  # the next search finds it at once
            self._taken_in_by[number], number = last, self._taken_in_by[number]
        return last


# -- which prefixes are worth it -----------------------------------------------------------------------------------------


class _Choice:
    """Chooses beginnings such that most tokens are saved: each row is spared the deepest chosen beginning of its own, and each
    chosen one is computed once, as a whole."""

    def __init__(self, root: _Node, least: int) -> None:
        self._nodes = list(_down_from(root))
        able = [(node, depth) for node, _, depth in self._nodes if node.rows > 1 and depth >= least]
        able.sort(key=lambda one: (-one[0].rows * one[1], one[0].number))
        self._depths = {node.number: depth for node, depth in able[:MOST_CANDIDATES]}

    def made(self) -> tuple[list[tuple[int, int]], dict[int, int]]:
        """The tokens and the rows of each chosen prefix, and the number of the one that each node has."""
        limits, chains = self._limits()
        chosen: list[list[int]] = []
        group_of: dict[int, int] = {}
        kept_level: dict[int, int] = {}  # for each node, the place in its chain of the deepest chosen one
        for node, parent, depth in self._nodes:
            group = NO_GROUP if parent is None else group_of[parent.number]
            level = 0 if parent is None else kept_level[parent.number]
            if node.number in limits and level < limits[node.number]:
                group, level = len(chosen), len(chains[node.number]) - 1
                chosen.append([depth, 0])
            group_of[node.number], kept_level[node.number] = group, level
            if group != NO_GROUP:
                chosen[group][1] += node.rows - sum(child.rows for child in node.children.values())
        return [(depth, rows) for depth, rows in chosen], group_of

    def _limits(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """The level of each candidate's chain above which the deepest chosen prefix must lie if the candidate is to be chosen,
        too; and the chain: 0 for none, then the tokens of the candidates above it and of itself."""
        chains, above = self._chains()
        saved = {number: [0] * len(chain) for number, chain in chains.items()}  # below it, by the deepest chosen one
        own = dict.fromkeys(chains, 0)  # rows that have no candidate further down
        limits: dict[int, int] = {}
        for node, parent, _ in reversed(self._nodes):
            number = node.number
            ends = node.rows - sum(child.rows for child in node.children.values())
            if number in chains:
                own[number] += ends
                spared = [below + own[number] * tokens for below, tokens in zip(saved.pop(number), chains[number])]
                if_chosen = spared[-1] - chains[number][-1]
                limits[number] = sum(tokens < if_chosen for tokens in spared[:-1])  # they do not fall from level to level
                if (over := above[number]) is not None:
                    best = [max(tokens, if_chosen) for tokens in spared[:-1]]
                    saved[over] = [sum(both) for both in zip(saved[over], best)]
            elif parent is not None and (over := above[number]) is not None:
                own[over] += ends
        return limits, chains

    def _chains(self) -> tuple[dict[int, list[int]], dict[int, int | None]]:
        """The chain of each candidate, and for every node the nearest candidate above it."""
        chains: dict[int, list[int]] = {}
        above: dict[int, int | None] = {}
        for node, parent, _ in self._nodes:
            over = None if parent is None else parent.number if parent.number in chains else above[parent.number]
            above[node.number] = over
            if node.number in self._depths:
                chains[node.number] = [*(chains[over] if over is not None else [0]), self._depths[node.number]]
        return chains, above
