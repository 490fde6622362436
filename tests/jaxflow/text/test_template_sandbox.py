"""Hostile chat templates end with a refusal, within bounded memory and time."""

import subprocess
import sys

import pytest

from jaxflow.text.chat import render_chat
from jaxflow.text.template_sandbox import ChatTemplateError

HELLO = [{"role": "user", "content": "Hello"}]

HOSTILE = {
    "percent": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent precision": "{{ '%.999999999f' % 1.5 }}",
    "percent long": "{{ ('%999d' * 100000) % 1 }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format method": "{{ '{:999999999d}'.format(1) }}",
    "format nested": "{{ '{:{w}d}'.format(1, w=999999999) }}",
    "format map": "{{ '{a:999999999d}'.format_map({'a': 1}) }}",
    "center": "{{ 'x' | center(999999999) }}",
    "center method": "{{ 'x'.center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999) }}",
    "replace": "{{ ('x' * 4000).replace('', 'x' * 4000) }}",
    "replace filter": "{{ ('x' * 4000) | replace('x', 'x' * 4000) }}",
    "join": "{{ ('x' * 400000).join(['a'] * 400) }}",
    "join filter": "{{ (['a'] * 400) | join('x' * 400000) }}",
    "encode": "{{ ('x'.encode()).center(999999999) }}",
    "to_bytes": "{{ (1).to_bytes(999999999, 'big') }}",
    "tojson": "{{ [[1]] | tojson(indent=1000000000) }}",
    "tojson text": "{{ [[1]] | tojson(indent='x' * 4000000) }}",
    "indent": "{{ 'a\nb' | indent(999999999) }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "squares": "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}"
    "{% endfor %}",
    "tilde": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}",
    "plus": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "times": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s * 2 %}{% endfor %}",
    "lists": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}",
    "tower": "{% set ns = namespace(s=1) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% endfor %}{{ ns.s }}",
    "tower of arguments": (
        "{% set ns = namespace(s=1) %}{% macro f() %}{% set ns.s = varargs %}{% endmacro %}"
        "{% for i in range(60) %}{{ f(ns.s, ns.s) }}{% endfor %}{{ ns.s }}"
    ),
    "namespaces": (
        "{% set ns = namespace(s=1) %}{% for i in range(60) %}{% set ns.s = namespace(a=ns.s, b=ns.s) %}"
        "{% endfor %}{{ ns.s }}"
    ),
    "capture": (
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = t %}{% endfor %}"
    ),
    "macro": (
        "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='x') %}"
        "{% for i in range(60) %}{% set ns.s = f(ns.s) %}{% endfor %}"
    ),
    "kept slices": (
        "{% set ns = namespace(l=[]) %}{% set s = 'x' * 2000000 %}"
        "{% for i in range(90000) %}{% set ns.l = ns.l + [s[i:]] %}{% endfor %}"
    ),
    "split": "{{ ('x ' * 2000000).split() | length }}",
    "letters": "{{ ('é' * 4000000) | list | length }}",
    "batch": "{{ [1] | batch(999999999, 1) | list }}",
    "slice": "{{ [1] | slice(999999999) | list }}",
    "wide loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "lazy loops": "{% for a in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "strftime": "{{ strftime_now('%999999999d') }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(name):
    with pytest.raises(ChatTemplateError) as refused:
        render_chat(HOSTILE[name], HELLO)
    assert 0 < len(str(refused.value)) < 1100


def test_hostile_templates_need_little_memory_and_processor_time():
    """All of them in one process: the peak memory above that of the imports,
    and the longest processor time.
    """
    program = (
        "import resource, sys, time\n"
        "from test_template_sandbox import HOSTILE, HELLO, render_chat, ChatTemplateError\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before, longest = peak(), (0.0, '')\n"
        "for name, template in HOSTILE.items():\n"
        "    start = time.thread_time()\n"
        "    try: render_chat(template, HELLO)\n"
        "    except ChatTemplateError: pass\n"
        "    longest = max(longest, (time.thread_time() - start, name))\n"
        "print(peak() - before, longest[0])\n"
        "print(longest, file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=__file__.rpartition("/")[0],
        check=True,
    )
    kib, seconds = map(float, run.stdout.split())
    assert kib < 200 * 1024
    assert seconds < 3.0, run.stderr  # a bound of processor time, with room for a slow machine


@pytest.mark.parametrize(
    "around", ["%s", "{%% for once in [1] %%}%s{%% endfor %%}", "{%% block b %%}%s{%% endblock %%}"]
)
@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '%5d|%-3s' % (7, 'a') }}", "    7|a  "),
        ("{{ '{:>4}{}'.format('a', 2) }}", "   a2"),
        ("{{ 'a'.center(5) }}|{{ 'a\nb' | indent(2, true) }}", "  a  |  a\n  b"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ [3, 1, 2] | sort | reverse | list }}{{ [1, 2][1:] }}{{ 'abc'[::-1] }}", "[3, 2, 1][2]cba"),
        ("{{ messages[0].content.split('l')[-1].strip().replace('o', '0') }}", "0"),
        ("{{ {'a': 1}.items() | list }}{{ dict(a=1).get('b', 2) }}", "[('a', 1)]2"),
        ("{{ [1, 2] | sum }}{{ 'a' ~ 1 ~ none }}{{ '<' | e }}{{ '<' | safe }}", "3a1None&lt;<"),
        ("{{ [{'x': 'a'}, {'x': 'b'}] | selectattr('x', 'in', ['b']) | map(attribute='x') | first }}", "b"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{{ ', '.join(['a', 'b']) }}{{ 'x' in 'xy' }}{{ 5 // 2 }}{{ 5 % 2 }}{{ -5 }}", "a, bTrue21-5"),
    ],
)
def test_what_real_templates_use_is_served(template, text, around):
    assert render_chat(around % template, HELLO) == text


def test_a_long_conversation_is_served():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 80}] * 9_000
    assert render_chat(template, messages).count("<|im_end|>") == 9_000
