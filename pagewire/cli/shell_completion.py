"""`pagewire completion SHELL`: prints a script that completes verbs, flags and values in bash, zsh or fish."""

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence

from pagewire.cli.command import BENCHES, VERBS, Verb, load
from pagewire.options import DESCRIBE, DescribedError, Parser

_BASH = """\
_pagewire() {
  local IFS=$' \\t\\n' word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" flag="" verb="" found=""
  if [[ "$word" == "=" ]]; then word=""; elif [[ "$before" == "=" ]]; then before="${COMP_WORDS[COMP_CWORD-2]}"; fi
  if [[ "$word" == --*=* ]]; then before="${word%%%%=*}" flag="${word%%%%=*}=" word="${word#*=}"; fi  # zsh: one word
  if (( COMP_CWORD > 1 )); then verb="${COMP_WORDS[1]}"; fi
  if [[ "$verb" == bench ]] && (( COMP_CWORD > 2 )); then verb="bench ${COMP_WORDS[2]}"; fi
  case "$verb" in
%s
  esac
  if [[ "$found" == -* && "$flag$word" != -* ]]; then found=""; fi
  case "$verb $before" in
%s
  esac
  COMPREPLY=( $(compgen -P "$flag" -W "$found" -- "$word") )
}
complete -o default -F _pagewire pagewire
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
autoload -Uz bashcompinit && bashcompinit
"""
_FISH_VERB = "commandline -opc | string join ' ' | string match -qr -- '^\\\\S+%s%s'"
SHELLS = ["bash", "zsh", "fish"]


def completion(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="pagewire completion",
        usage="pagewire completion SHELL",
        description="Print a script that completes verbs, flags and their values: "
        'eval "$(pagewire completion bash)" in ~/.bashrc, or pagewire completion fish | source.',
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    shell = parser.parse_args(arguments).shell
    lists = {"": [*VERBS, "help"], "help": list(VERBS), "bench": list(BENCHES), "completion": SHELLS}
    with_flags = {name: verb for name, verb in VERBS.items() if name not in lists}
    parsers = {**dict(_parsers("", with_flags)), **dict(_parsers("bench ", BENCHES))}
    if shell == "fish":
        print("\n".join(_fish(lists, parsers)))
    else:
        print((_ZSH if shell == "zsh" else "") + _bash(lists, parsers), end="")
    return 0


def _parsers(before: str, verbs: Mapping[str, Verb]) -> Iterator[tuple[str, Parser]]:
    """Yield the argument parsers of all subcommands with their full names. A subcommand whose packages are not
    installed is skipped."""
    for name, verb in verbs.items():
        try:
            load(verb)([DESCRIBE])
        except DescribedError as described:
            yield before + name, described.parser
        except ImportError:
            continue


def _flags(parser: Parser) -> Iterator[tuple[argparse.Action, list[str]]]:
    """Yield each visible flag of a parser, with the list of values that the user can choose from. The list is empty for
    a flag that accepts any value."""
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            values = action.choices or (action.metavar.split("|") if isinstance(action.metavar, str) else [])
            yield action, [str(value) for value in values] if len(list(values)) > 1 else []


def _bash(lists: Mapping[str, Sequence[str]], parsers: Mapping[str, Parser]) -> str:
    words, values = dict(lists), dict[str, Sequence[str]]()
    for verb, parser in parsers.items():
        words[verb] = [flag for action, _ in _flags(parser) for flag in action.option_strings]
        for action, choices in _flags(parser):
            values |= {f"{verb} {flag}": choices for flag in action.option_strings if choices}
    return _BASH % (_cases(words), _cases(values))


def _cases(found: Mapping[str, Sequence[str]]) -> str:
    quoted = {shlex.quote(case): shlex.quote(" ".join(words)) for case, words in found.items()}
    return "\n".join(f"    {case}) found={words} ;;" for case, words in quoted.items())


def _fish(lists: Mapping[str, Sequence[str]], parsers: Mapping[str, Parser]) -> Iterator[str]:
    for verb, names in lists.items():
        yield f"complete -c pagewire -f {_fish_if(verb, '$')} -a {shlex.quote(' '.join(names))}"
    for verb, parser in parsers.items():
        for action, choices in _flags(parser):
            takes = f"-xa {shlex.quote(' '.join(choices))}" if choices else "" if action.nargs == 0 else "-r"
            flags = [f"-{'l' if each.startswith('--') else 's'} {each.lstrip('-')}" for each in action.option_strings]
            yield " ".join(filter(None, ("complete -c pagewire", _fish_if(verb, "( |$)"), *flags, takes)))


def _fish_if(verb: str, end: str) -> str:
    return f"-n {shlex.quote(_FISH_VERB % (verb and f' {verb}', end))}"
