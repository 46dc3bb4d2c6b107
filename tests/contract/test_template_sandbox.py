"""The limits of a chat template. Every rendering ends, because the sandbox counts steps instead of seconds."""

import contextlib
import string
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.filters import FILTERS
from transformers.utils.chat_template_utils import render_jinja_template

from pagewire.common.chat.template_sandbox import MAX_STEPS, BudgetExceeded, Template, TemplateFailure, _Budget
from testing.seeds import seeded
from tests.thorough import thorough

MESSAGES = [
    {"role": "system", "content": "Be kind & <short>."},
    {"role": "user", "content": " Hello\n"},
    {
        "role": "assistant",
        "content": "<think>hm</think>Hi",
        "tool_calls": [{"name": "f", "arguments": {"a": [1, "é"]}}],
    },
    {"role": "user", "content": "Bye"},
]
VARIABLES = {"messages": MESSAGES, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
# Templates as on the hub, with the message formats of ChatML, Llama, Mistral and Qwen.
TEMPLATES = [
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n{%- set system = messages[0]['content'] | trim %}\n"
    "{%- set messages = messages[1:] %}\n{%- else %}{%- set system = '' %}{%- endif %}\n{{- system ~ '|' }}\n"
    "{%- for m in messages %}\n{%- if not (m.role == 'ipython' or 'tool_calls' in m) %}{{- m.content | trim }}\n"
    "{%- elif m.tool_calls is defined and m.tool_calls is iterable %}{{- m.tool_calls[0].arguments | tojson }}\n"
    "{{- m.tool_calls | tojson(indent=2) }}{%- endif %}\n{%- endfor %}",
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ users | length }}"
    "{%- set ns = namespace(index=0, last=none) %}{% for m in messages[::-1] %}"
    "{% set i = (messages|length - 1) - loop.index0 %}"
    "{% if ns.last is none and m.role == 'user' %}{% set ns.last = i %}{% endif %}"
    "{% set ns.index = ns.index + 1 %}"
    "{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
    "{% else %}none{% endfor %}{{ ns.last }}{{ ns.index % 2 }}",
    "{% macro show(m) %}[{{ m.role.upper() }}]{{ caller() if caller }}{% endmacro %}"
    "{% for m in messages if m.role != 'system' %}{{ show(m) }}{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% continue %}{% endif %}{% generation %}"
    "{{ m.content | length }}"
    "{% endgeneration %}{% endfor %}{{ '%05.1f' % 2 }}{{ {'a': 1}.items() | list }}{{ ['b', 'a'] | sort | join('-') }}",
]


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
def test_templates_of_the_hub_render_as_in_transformers(number: int) -> None:
    template = TEMPLATES[number]
    others = {name: value for name, value in VARIABLES.items() if name != "messages"}
    [expected], _ = render_jinja_template([MESSAGES], chat_template=template, **others)
    assert Template(template).render(VARIABLES) == expected


def growing(step: str, start: str = "'ab'", rest: str = "{{ ns.s|length }}") -> str:
    """Return a template that runs `step` a hundred times on a value, for steps that double its size or more."""
    return f"{{% set ns = namespace(s={start}) %}}{{% for i in range(100) %}}{step}{{% endfor %}}{rest}"


NESTED = "{% set ns.s = [ns.s, ns.s] %}"
TUPLES = "{% set ns.s = (ns.s, ns.s) %}"
# An expression is metered wherever it is nested in another expression.
HUGE = "('a' * 10**15)"
INSIDE = [
    f"{{{{ {{'k': {HUGE}}} | length }}}}",
    f"{{{{ {{{HUGE}: 1}} | length }}}}",
    f"{{{{ [{HUGE}] | length }}}}",
    f"{{{{ ({HUGE}, 1) | length }}}}",
    f"{{{{ {HUGE}[0] }}}}",
    f"{{{{ 'abc'[{HUGE} | length] }}}}",
    f"{{{{ 'abc'[{HUGE} | length :] }}}}",
    f"{{{{ {{}}[{HUGE}] }}}}",
    f"{{{{ {HUGE}.upper() }}}}",
    f"{{{{ range(1, stop={HUGE}) }}}}",
    f"{{{{ {HUGE} | upper }}}}",
    f"{{{{ 'a' | replace('a', {HUGE}) }}}}",
    f"{{{{ {HUGE} is string }}}}",
    f"{{{{ 1 if {HUGE} else 2 }}}}",
    f"{{{{ not {HUGE} }}}}",
    f"{{{{ -({HUGE} | length) }}}}",
    f"{{{{ {HUGE} ~ 'b' }}}}",
    f"{{{{ 'b' in {HUGE} }}}}",
    f"{{{{ 1 < 2 < {HUGE} | length }}}}",
    f"{{{{ false or {HUGE} }}}}",
]
BIG = "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}"
ENDLESS = [
    *INSIDE,
    # A multiplication is metered at run time. A concatenation is metered only because the compiled template was
    # changed.
    *[BIG + inside.replace(HUGE, "(s ~ 'b')") + "{% endfor %}" for inside in INSIDE if "range" not in inside],
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in range(99999) recursive %}{% if loop.depth < 9 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{% for i in range(99999) %}{% if 99998 in range(99999) | map('string') | map('length') %}{% endif %}{% endfor %}",
    "{{ 'a' * 10**15 }}",
    "{{ [1] * 10**12 }}",
    *map(
        growing,
        [
            "{% set ns.s = ns.s ~ ns.s %}",
            "{% set ns.s = ns.s + ns.s %}",
            "{% set ns.s = ns.s * 2 %}",
            "{% set ns.s = ns.s.replace('', ns.s) %}",
            "{% set ns.s = ns.s | replace('a', ns.s) %}",
            "{% set ns.s = ns.s.join(ns.s) %}",
            "{% set ns.s = [ns.s, ns.s] | join %}",
            "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
            "{% set ns.s = '%s%s' % (ns.s, ns.s) %}",
            "{% set ns.s = '%s%s' | format(ns.s, ns.s) %}",
            "{% set ns.s = '{0}{0}'.format(ns.s) %}",
        ],
    ),
    *[
        growing(NESTED, "[1]", rest)
        for rest in ("{{ ns.s }}", "{{ ns.s | tojson }}", "{{ ns.s | string }}", "{{ '%s' % ns.s }}", "{{ '' ~ ns.s }}")
    ],
    growing(NESTED + "{% set ns.t = [ns.t, ns.t] %}", "[1], t=[1]", "{{ ns.s == ns.t }}"),
    *[growing(TUPLES, "(1,)", rest) for rest in ("{{ {ns.s: 1} }}", "{{ {}[ns.s] }}", "{{ {}.get(ns.s) }}")],
    growing("{% set ns.s = {'a': ns.s, 'b': ns.s} %}", "1", "{{ ns.s.items() }}"),
    *[
        BIG + step + "{% endfor %}"
        for step in (
            "{% set t = s[:] %}",
            "{% set t = s.upper() %}",
            "{% set t = s % () %}",
            "{% if 'y' in s %}{% endif %}",
        )
    ],
]


# Templates that are short to write, but expensive: the cost is more than proportional to the input, or not visible in
# the arguments.
LONG = "{% set s = 'x' * 20000000 %}"
COSTLY = [
    LONG + "{{ s | wordwrap(1) | length }}",
    LONG + "{{ (s | safe) | wordwrap(1) | length }}",
    "{{ ('<>' * 10000000) | striptags | length }}",
    "{{ ('x' * 2000000) | trim('y' * 2000000 ~ 'x') }}",
    *[
        "{% set s = 'x' * 2000000 %}" + f"{{{{ s.{name}(s[:600000] ~ 'y' ~ s[:600000]) }}}}"
        for name in ("rfind", "rindex", "rsplit", "rpartition")
    ],
    *[f"{{{{ ('x' * 2000000).{name}('y' * 2000000 ~ 'x') }}}}" for name in ("lstrip", "rstrip", "strip")],
    "{{ ('x\\r' * 10000000) | indent(1000) | length }}",
    "{{ ('x\\n' * 100000) | indent('y' * 1000000) | length }}",
    "{{ range(99999) | list | tojson(indent='y' * 1000000) | length }}",
    "{{ [range(99999) | list] | tojson(separators=('y' * 1000000, ':')) | length }}",
    "{{ (''|safe).ljust(4000000000) | length }}",
    "{{ (''|safe).join(('y' * 10000000).split('')) }}",
    "{{ 'x'.encode() * 10**10 }}",
    "{{ ('x' * 1000000).encode('punycode') | length }}",
    "{{ (1).to_bytes(4000000000, 'big') | length }}",
    "{{ ('a' * 10000000).translate({97: 'y' * 1000}) | length }}",
    "{{ {}.fromkeys(range(99999), 1) | length }}",
    "{% set n = ('f' * 20000000) | int(base=16) %}{{ n // (n // 7) }}",
    "{{ (('f' * 20000000) | int(base=16)) % 7 }}",
    "{% set s = 'x' * 10000000 %}{{ ([s] * 100000).count(s ~ 'y') }}",
    "{% set s = 'x' * 10000000 %}{{ ([s] * 100000).index(s ~ 'y') }}",
    "{% set s = 'a.' * 200000 ~ 'a' %}{{ range(9999) | map(attribute=s, default='x') | list | length }}",
    "{{ strftime_now('%1000000000d') | length }}",
    "{{ strftime_now('%c' * 10000000) | length }}",
    "{{ ('a ' * 20000000).split() | length }}",
    "{{ ('a ' * 20000000).split(' ') | length }}",
    "{{ ('\\n' * 20000000).splitlines() | length }}",
    "{{ ('\u00e4' * 20000000) | list | length }}",
    "{{ ('x' * 20000000) | batch(1000) | list | length }}",
    "{{ ('a ' * 20000000) | wordcount }}",
    "{{ ('x' * 20000000) | sort | length }}",
]
# Renders templates from standard input with limits on CPU time and memory, and prints the result of each.
CHILD = """
import resource, sys
from pagewire.common.chat.template_sandbox import Template, TemplateFailure, _Budget
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for template in sys.stdin.read().split(chr(0)):
    try:
        print("made", len(Template(template).render({})), flush=True)
    except TemplateFailure as failure:
        print("refused", failure, flush=True)
"""


def test_each_filter_and_method_is_paid_for_before_it_runs() -> None:
    """A single process renders all templates. Its time and memory limits would not suffice to execute
    even one of them.
    """
    command = [sys.executable, "-c", CHILD]
    ended = subprocess.run(command, input="\0".join(COSTLY), capture_output=True, text=True, check=False)
    answers = ended.stdout.splitlines()
    done = dict(zip(COSTLY, answers, strict=False))
    assert len(answers) == len(COSTLY), (ended.returncode, COSTLY[len(answers)], ended.stderr)
    assert [template for template, answer in done.items() if not answer.startswith("refused")] == []
    assert not [answer for answer in answers if "MemoryError" in answer], "it was refused by the limit, not by its cost"


# How often an expression is charged for a text: once for each time that it reads, produces, or compares the whole text.
# The unit is a hundredth of the additional steps for 6400 characters compared with an empty text.
PRICES = {
    "s | length": 0, "s | first": 0, "s[0]": 0, "[s] | list": 0, "[s] | map('upper')": 0, "{'a': s}.items()": 0,
    "s.find('a')": 1, "s.find('b', 3)": 1, "s.partition('aa')": 1, "s == 'b'": 1, "'b' in s": 1, "s ~ 'b'": 1,
    "s + 'b'": 1, "'b' + s": 1, "s[:10]": 1, "{s: 1}": 1, "s % ()": 1, "[s].copy()": 1, "[s].count('b')": 1,
    "(s,).count('b')": 1, "{'a': s}.get('a')": 1, "s is string": 1, "s | truncate(9)": 1, "s | default('b')": 1,
    "s.split('b')": 1, "s.split('a', 0)": 1, "s.rsplit('a', maxsplit=0)": 2, "s.split()": 1.01, "s.splitlines()": 1.01,
    "s.upper()": 2, "s.format(1)": 2, "'%s' % s": 2, "s.expandtabs(64)": 2, "s | upper": 2, "s | string": 2,
    "s | indent(4)": 2, "s | center(640)": 2, "s | striptags": 2, "[s, s] | sort": 2, "[s] | map('upper') | list": 2,
    "s.rfind('b')": 2, "s.rfind('bb')": 3, "s.strip()": 3, "s.strip('bc')": 4, "s.rpartition('aa')": 3,
    "s.replace('b', 'bc')": 3, "s.replace('a', 'bc')": 6, "s | replace('a', 'bc')": 6, "s.join('bbb')": 6,
    "[s, s] | join('bc')": 6, "s * 2": 3, "2 * s": 2, "s | tojson": 3, "s | trim": 3, "s | trim('bcd')": 5,
    "{{ s }}": 2, "{{ [s] }}": 2, "s | wordcount": 65, "s | batch(3)": 65, "s | list": 129, "s.split('a')": 129,
}  # fmt: skip


@pytest.mark.parametrize("expression", PRICES)
def test_a_text_costs_what_is_done_with_it(expression: str) -> None:
    template = Template(expression if "{{" in expression else f"{{% set made = {expression} %}}")

    def steps(text: str) -> int:
        template.render({"s": text})
        return MAX_STEPS - template._environment.budget._num_left

    assert steps("a" * 6400) - steps("") == pytest.approx(100 * PRICES[expression], abs=10)


def test_all_filters_and_methods_are_known() -> None:
    """A new filter or method of Jinja2 or Python must get a cost before templates may use it."""
    assert " ".join(sorted(FILTERS)) == (
        "abs attr batch capitalize center count d default dictsort e escape filesizeformat first float forceescape "
        "format groupby indent int items join last length list lower map max min pprint random reject rejectattr "
        "replace reverse round safe select selectattr slice sort string striptags sum title tojson trim truncate "
        "unique upper urlencode urlize wordcount wordwrap xmlattr"
    )
    assert " ".join(name for name in dir(str) if not name.startswith("_")) == (
        "capitalize casefold center count encode endswith expandtabs find format format_map index isalnum isalpha "
        "isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower "
        "lstrip maketrans partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip "
        "split splitlines startswith strip swapcase title translate upper zfill"
    )


def test_what_templates_do_with_long_messages_is_affordable() -> None:
    """Published templates can process long messages: their operations on 100,000 characters leave most
    of the budget.
    """
    content = "<think>some thoughts</think> Words of\nall kinds, " * 2_000
    template = (
        "{{ content.split('</think>')[-1].lstrip('\\n').rstrip() | trim }}"
        "{{ content.rsplit('</think>', 1)[0] | length }}"
        "{{ content.strip('\\n') | length }}{{ content | tojson | length }}{{ content.splitlines() | length }}"
        "{{ content.replace('\\n', ' ') | upper | length }}{{ content | indent(4) | length }}"
    )
    assert Template(template * 3).render({"content": content})


@pytest.mark.parametrize("template", ENDLESS)
def test_what_would_not_end_or_grow_without_bounds_is_cut_off(template: str) -> None:
    with pytest.raises(BudgetExceeded, match=f"line 1: it does not end within {MAX_STEPS} steps"):
        Template(template).render(VARIABLES)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("\n\n{{ 1 / 0 }}", "line 3: division by zero"),
        ("{% if x %}\n{% for %}", "line 2: "),
        ("\n{{ messages[9].content }}", "line 2: list object has no element 9"),
        ("{{ raise_exception('roles must alternate') }}", "line 1: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "nested too deeply"),
        ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "too many statically nested blocks"),
        ("{{ 'x' | center(999999999) }}", "at most 1000 is allowed"),
        ("{{ 'x'.rjust(width) }}", "at most 1000 is allowed"),
        ("{{ [1, 2] | tojson(indent=99999999) }}", "at most 1000 is allowed"),
        ("{{ '%999999999d' % 1 }}", "a width that is variable or has over 3 digits"),
        ("{{ '%*d' % (999999999, 1) }}", "a width that is variable or has over 3 digits"),
        ("{{ '{:999999999}'.format(1) }}", "a width that is variable or has over 3 digits"),
        ("{{ '{:{w}}'.format(1, w=999999999) }}", "a width that is variable or has over 3 digits"),
        ("{{ 9 ** 9999 }}", "at most 4096 are allowed"),
        ("{{ lipsum(n=10**6) }}", "'lipsum' is undefined"),
        ("{{ [[1]] | sum(start=[]) }}", "adds only numbers"),
        ("{% include 'x' %}", "no loader"),
        ("x" * ((1 << 20) + 1), "at most 1048576 are allowed"),
    ],
)
def test_what_fails_says_why_and_where(template: str, reason: str) -> None:
    with pytest.raises(TemplateFailure) as failed:
        Template(template).render(VARIABLES | {"width": 10**9})
    assert reason in str(failed.value)
    assert "\n" not in str(failed.value)


def test_iterators_are_joined_by_short_separators_only() -> None:
    template = Template("{{ separator.join(['a', 'b'] | map('upper')) }}")
    assert template.render({"separator": "-" * 64}) == f"A{'-' * 64}B"
    with pytest.raises(TemplateFailure, match="a separator of 65 characters, but its items have no known length"):
        template.render({"separator": "-" * 65})


def test_a_budget_is_spent_to_its_last_step() -> None:
    budget = _Budget()
    budget.charge(MAX_STEPS)
    with pytest.raises(BudgetExceeded):
        budget.charge()


def test_a_failure_leaves_nothing_behind() -> None:
    template = Template("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}")
    for _ in range(2):
        assert template.render({"n": 100}) == "100"
        with pytest.raises(BudgetExceeded):
            template.render({"n": 9999})


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # Jinja2's lexer, of odd texts
@pytest.mark.parametrize("seed", [0, *thorough(1, 2, 3)])
def test_any_text_is_a_template_or_a_clear_error(seed: int) -> None:
    rng = seeded(seed)
    pieces = [
        "{{",
        "}}",
        "{%",
        "%}",
        " for ",
        " in ",
        " if ",
        "endfor",
        "endif",
        " else ",
        "messages",
        "|",
        "tojson",
        "~",
    ]
    pieces += [
        "(",
        ")",
        "[",
        "]",
        "'",
        " set ",
        "=",
        "range(9)",
        ".x",
        "loop",
        "macro f()",
        "**",
        "9",
        "{#",
        "#}",
        "-",
        "*",
    ]
    for _ in range(500):
        source = list(rng.choice(TEMPLATES)) if rng.random() < 0.7 else []
        for _ in range(rng.randrange(1, 12)):
            place = rng.randrange(len(source) + 1)
            source[place : place + rng.randrange(4)] = rng.choice([*pieces, rng.choice(string.printable)])
        with contextlib.suppress(TemplateFailure):
            Template("".join(source)).render(VARIABLES)


def test_a_template_is_rendered_on_several_threads_at_once() -> None:
    """Several threads can render a template in parallel. Each rendering has its own budget."""
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Slow:
        def __str__(self) -> str:
            has_begun.set()
            return str(may_go_on.wait(20))

    loops = "{% for i in range(number) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    template = Template(loops + "{{ value }}")
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(template.render, {"number": 1, "value": Slow()})
        assert has_begun.wait(20)
        other = threads.submit(template.render, {"number": MAX_STEPS // 4000, "value": "x"})
        assert other.result(20) == "x"
        may_go_on.set()
        assert slow.result(20) == "True"
    with pytest.raises(BudgetExceeded):
        template.render({"number": MAX_STEPS // 1000, "value": "x"})
