"""Chat templates: what they write is what the library writes, and none can work without end."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2.exceptions import UndefinedError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from h2o_flexgen.runtime.chat_template import STEP, WORK, TooMuchWork, render
from tests.real_tokenizers import save_byte_level

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
        "{{ dict(a=1).items() | list }}"
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


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% BODY %}{% endfor %}{% endfor %}"
ENDLESS = {
    "nested loops": LOOPS.replace("{% BODY %}", ""),
    "nested loops that write": LOOPS.replace("{% BODY %}", "x"),
    "loops in a macro": "{% macro m(n) %}{% for a in range(999) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}",
    "loops that call themselves": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
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
    "padding by a method": "{{ 'x'.ljust(10000000000) }}",
    "padding by a filter": "{{ 'x' | center(10000000000) }}",
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
    "tabs": "{{ ('\t' * 1000).expandtabs(10000000) }}",
    "indented": "{{ ('\n' * 100000) | indent(100000) }}",
    "in lots": "{{ range(99999) | batch(1) | map('batch', 99999, 'x') | map('list') | list }}",
    "filtered by loops": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "compared": "{% set x = 'a' * 1000000 %}{% set y = 'a' * 1000000 %}{% for a in range(99999) %}{{ x == y }}{% endfor %}",
    "sliced": "{% set x = 'a' * 1000000 %}{% for a in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "words": "{{ lipsum(n=10000000) }}",
    "a long program": "{{ 1 }}" * 3_000_000,
    "a deep program": "{{ " + "(" * 100_000 + ")" * 100_000 + " }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_not_end_is_refused(name: str) -> None:
    with pytest.raises(Exception) as refused:
        render(ENDLESS[name], TALK, {})
    assert isinstance(refused.value, {"words": UndefinedError}.get(name, (TooMuchWork, RecursionError)))


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
