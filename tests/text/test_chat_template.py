"""Chat templates: what they write is what the library writes, and none can work without end."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import jinja2
import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from h2o_flexgen.text.chat_template import STEP, WORK, TooMuchWork, render, render_unfinished
from tests.helpers.real_tokenizers import save_byte_level

TALK = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " Where does the ferry <land>?\n"},
    {"role": "assistant", "content": "<think>hm</think>At the pier, 'twice' a day."},
    {"role": "user", "content": "When? ä€"},
]
TEMPLATES = {
    "headers": (
        "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}{{ system ~ '\n' }}"
        "{%- if tools is not none and strftime_now is defined %}{{ strftime_now('%d') }}{%- endif %}"
        "{%- for m in messages %}{{ '<|' + m.role + '|>\n\n' + m['content'] | trim + '<|end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"
    ),
    "alternating": (
        "{% set ns = namespace(turn=0, last=none) %}{% for m in messages %}{% if m.role == 'user' and ns.last == 'user' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.last = m.role %}{% set ns.turn = ns.turn + 1 %}"
        "{% if loop.first %}[{% elif loop.last %}]{% endif %}{{ loop.index0 }}/{{ loop.length }} {{ ns.turn % 2 }}"
        "{{ m['content'] | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}"
    ),
    "thoughts": (
        "{% macro said(m) %}{% generation %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages[::-1] %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ said(m) }}\n"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{{ '%s and %d' % ('a', 3) }}{{ 'x' * 3 }}{{ 2 ** 5 }}"
    ),
    "filters": (
        "{{ messages | map(attribute='role') | join(', ') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ messages[0].content.replace('\n', ' ').upper() }}{{ (messages | last).content | replace('W', 'w') | indent(2) }}"
        "{{ {'a': [1, 2], 'b': (3,)} | tojson(indent=2) }}{{ range(3) | list }}{{ '{:>4}{a}'.format(7, a=1700000000) }}"
        "{{ 'at %d' | format(1700000000) }}"
        "{{ dict(a=1).items() | list }}{{ 'a/b'.rsplit('/', 1)[-1] }}{{ [1, 2] | sum }}{{ '<' | e }}{{ namespace(a=1).a }}"
        "{{ messages | map('length') | list }}{{ messages | tojson(separators=(',', ':')) }}{{ (3 - 5) // 2 }}{{ 7 / 2 }}"
        "{{ messages | map(attribute='content') | map('trim') | select | reject('equalto', 'x') | sort | first }}"
        "{{ 'yes' if messages[-1].content is string and messages is iterable and not messages is mapping }}"
        "{% set text %}block {{ messages[0].role }}{% endset %}{{ text }}{% filter upper %}loud{% endfilter %}"
        "{{ 'b' in ['a', 'b'] and 'z' not in 'abc' }}{{ messages[0].get('name', 'nobody') }}{{ undefined_name }}"
    ),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("template")
    save_byte_level(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_the_text_is_that_of_the_library(name: str, turns: int, library: PreTrainedTokenizerBase) -> None:
    expected = library.apply_chat_template(
        TALK[:turns], chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert render(TEMPLATES[name], TALK[:turns], library.special_tokens_map) == expected


@pytest.mark.parametrize("name", ["headers", "alternating", "thoughts"])
@pytest.mark.parametrize("end", ["", " "])
def test_an_unfinished_message_ends_as_in_the_library(name: str, end: str, library: PreTrainedTokenizerBase) -> None:
    talk = [*TALK[1:3], {"role": "user", "content": f"Tell  me{end}"}]
    expected = library.apply_chat_template(talk, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True)
    assert render_unfinished(TEMPLATES[name], talk, library.special_tokens_map) == expected


def test_a_message_that_is_left_out_cannot_go_on() -> None:
    with pytest.raises(ValueError, match=r"leaves out the last message \('?When"):
        render_unfinished("{{ messages[0].content }}", TALK, {})


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% BODY %}{% endfor %}{% endfor %}"
ENDLESS = {
    "nested loops": LOOPS.replace("{% BODY %}", ""),
    "nested loops that write": LOOPS.replace("{% BODY %}", "x"),
    "loops in a macro": "{% macro m(n) %}{% for a in range(999) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}",
    "doubled by ~": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by +": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled lists": "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "doubled blocks": (
        "{% set ns = namespace(x='ab') %}{% for a in range(99) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}"
    ),
    "a text times a number": "{{ 'x' * 10000000000 }}",
    "a number times a list": "{{ 10000000000 * [1] }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "numbers that double": "{% set ns = namespace(x=9) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "padding by a format": "{{ '{:>10000000000}'.format(1) }}",
    "padding by a format of a number": "{{ '{:>{w}}'.format(1, w=10000000000) }}",
    "padding by a format of a text": "{{ '{:>{w}}'.format(1, w='10000000000') }}",
    "padding by a format of a mapping": "{{ '{a:>{w}}'.format_map({'a': 1, 'w': 10000000000}) }}",
    "padding by a sign of per cent": "{{ '%10000000000d' % 1 }}",
    "padding by a star": "{{ '%*d' % (10000000000, 1) }}",
    "padding by the format filter": "{{ '%10000000000d' | format(1) }}",
    "replaced by longer": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "replaced by longer, by a filter": "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
    "joined with much": "{% set x = 'a' * 100000 %}{{ x.join('b' * 100000) }}",
    "joined with much, by a filter": "{% set x = 'a' * 100000 %}{{ range(99999) | join(x) }}",
    "the same text many times": "{% set x = 'a' * 1000000 %}{{ [x] * 100000 }}",
    "indented": "{{ ('\n' * 100000) | indent(100000) }}",
    "filtered by loops": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "compared": "{% set x = 'a' * 1000000 %}{% set y = 'a' * 1000000 %}{% for a in range(99999) %}{{ x == y }}{% endfor %}",
    "sliced": "{% set x = 'a' * 1000000 %}{% for a in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "an indent of nothing": "{{ [] | tojson(indent=1500000000) }}",
    "an indent of much": "{{ " + "[" * 20 + "]" * 20 + " | tojson(indent=10000000) }}",
    "separators of much": "{% set x = 'a' * 1000000 %}{{ range(99999) | list | tojson(separators=(x, x)) }}",
    "a long body": LOOPS.replace("{% BODY %}", "{% set x = 1 %}{% if x %}{{ messages.a }}{% endif %}" * 100),
    "a long body in a loop with a condition": "{% for a in range(99999) if " + "1 and " * 9999 + "0 %}{% endfor %}",
    "a long macro": "{% macro m(n) %}{% set x = n %}{% if x %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    + "{% set x = 1 %}" * 999
    + "{% endmacro %}{{ m(30) }}",
    "a long way": "{% set ns = namespace() %}{% set ns.a = ns %}"
    "{% for a in range(9999) %}{{ [ns] | map(attribute='a" + ".a" * 9999 + "') | list }}{% endfor %}",
    "hashed": "{% set ns = namespace(x=(1,)) %}{% for a in range(18) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
    "{% for a in range(99999) %}{{ messages[0][ns.x] }}{% endfor %}",
    "keys taken away": "{% set d = dict(messages[0], **{'x': 'y'}) %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% set e = d.keys() - d.keys() %}{% endfor %}{% endfor %}",
    "one text in many places, by sign of per cent": "{% set x = 'a' * 1000000 %}{{ '%(a)s' * 100000 % {'a': x} }}",
    "one text in many places, by a format": "{% set x = 'a' * 1000000 %}{{ ('{0}' * 100000).format(x) }}",
    "many short paddings": "{{ '%9999d' * 100000 % ((1,) * 100000) }}",
    "a text in each item of lists": "{% set x = 'a' * 1000000 %}{{ [x] | replace('a', x) }}",
    "searched from behind": "{% set x = 'a' * 8000 %}{% set y = 'b' + 'a' * 3999 %}"
    "{% for a in range(99999) %}{{ x.rfind(y) }}{% endfor %}",
    "numbers of a program": "{% for a in range(99999) %}{{ 0x" + "f" * 99_000 + " // 0x" + "e" * 50_000 + " }}{% endfor %}",
    "a long program": "{{ 1 }}" * 3_000_000,
    "a deep program": "{{ " + "(" * 100_000 + ")" * 100_000 + " }}",
    "a rounded number": "{{ 5 | round(1500000000) }}",
    "lists put together": "{{ [[1]] * 100000 | sum(start=[]) }}",
}


# what no template of a model needs has no name
NAMELESS = {
    "loops that call themselves": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "padding by a method": "{{ 'x'.ljust(10000000000) }}",
    "padding by a filter": "{{ 'x' | center(10000000000) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10000000) }}",
    "in lots": "{{ range(99999) | batch(1) | map('batch', 99999, 'x') | map('list') | list }}",
    "words": "{{ lipsum(n=10000000) }}",
    "bytes": "{% set b = 'a'.encode() * 1000000000 %}",
    "bytes of a number": "{{ (1).to_bytes(1000000000, 'big') }}",
    "a padded number": "{{ 5 | center(1500000000) }}",
    "translated": "{{ ('a' * 40000).translate({97: 'b' * 50000}) }}",
    "a rise of what may be done": "{{ -1000000000 | _counted }}",
    "a rise of what may be done, by map": "{{ [-1000000000] | map('spend') | list }}",
    "blocks that call themselves": "{% block x %}{{ self.x() }}{{ self.x() }}{% endblock %}",
}
BEFORE_IT_IS_MADE = [
    "bytes",
    "bytes of a number",
    "translated",
    "a padded number",
    "an indent of nothing",
    "an indent of much",
    "separators of much",
    "many short paddings",
    "one text in many places, by sign of per cent",
    "a text in each item of lists",
]


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_not_end_is_refused(name: str) -> None:
    with pytest.raises((TooMuchWork, RecursionError)):
        render(ENDLESS[name], TALK, {})


@pytest.mark.parametrize("name", NAMELESS)
def test_what_is_not_for_templates_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(Exception, match=r"is unsafe|No filter named|is undefined|not for chat templates"):
        render(NAMELESS[name], TALK, {})


@pytest.mark.parametrize("name", BEFORE_IT_IS_MADE)
def test_what_is_refused_is_not_made_before(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((TooMuchWork, TemplateError)):
            render({**ENDLESS, **NAMELESS}[name], TALK, {})
        assert tracemalloc.get_traced_memory()[1] < 1 << 27
    finally:
        tracemalloc.stop()


def test_a_namespace_is_not_written_out() -> None:
    doubling = "{% set ns.x = namespace(a=ns.x, b=ns.x) %}"
    template = "{% set ns = namespace(x=1) %}{% for a in range(99) %}" + doubling + "{% endfor %}{{ ns.x }}"
    assert render(template, TALK, {}) == "<Namespace>"


def test_a_long_talk_is_written_down() -> None:
    """A template may look at all messages' number, and at parts of the talk, at each message."""
    long = [{"role": ("user", "assistant")[turn % 2], "content": "x" * 300} for turn in range(1500)]
    template = (
        "{% for m in messages %}{% if loop.index0 == messages | length - 1 or m.content.split('</think>') | length > 9 %}"
        "{{ m.content | trim }}{% elif m.get('role') == 'user' and messages is defined and (messages | last).role %}"
        "{{ m['content'].replace('\\n', ' ') }}{% endif %}{% endfor %}"
    )
    assert render(template, long, {}) == "x" * (300 * 751)


def test_variables_that_are_set_in_a_loop_are_no_arguments_of_what_is_called_there() -> None:
    template = "{% for m in messages %}{% set content = m['content'] %}{{ content.strip() }}{% endfor %}"
    content = "word " * 20_000
    assert render(template, [{"role": "user", "content": content}], {}) == content.strip()


def test_sums_and_rounded_numbers_are_those_of_the_library() -> None:
    template = "{{ [{'n': 1}, {'n': 2}]|sum(attribute='n') }} {{ [1, 2]|sum(start=3) }} {{ 1.25|round(1) }} {{ 2.5|round }}"
    assert render(template, [], {}) == jinja2.Environment().from_string(template).render()


def test_a_template_may_do_in_proportion_to_what_is_said() -> None:
    each = "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    text = "x" * (WORK // STEP)
    with pytest.raises(TooMuchWork):
        render(each.replace("m.content", f"range({99_999}) | list * 3"), TALK, {})
    assert render(each, [{"role": "user", "content": text}], {}) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ render.__globals__ }}{{ raise_exception.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% include 'config.json' %}",
    ],
)
def test_a_template_sees_nothing_but_the_messages(template: str) -> None:
    with pytest.raises(Exception, match=r"unsafe|undefined|underscore|no loader"):
        render(template, TALK, {})
