"""The conversion of frozen config dataclasses into flags, environment variables and YAML keys.

A field `max_num_seqs: int = 256` with `metadata={"help": ...}` becomes the flag `--max-num-seqs`, the variable
`PAGEWIRE_MAX_NUM_SEQS` and the YAML key `max_num_seqs` or `max-num-seqs`. Metadata "choices" lists fixed values. A bool
becomes `--NAME/--no-NAME`. Flags override the environment, which overrides the YAML file, which overrides the defaults.
An empty variable counts as unset.
"""

import argparse
import contextlib
import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pagewire.common.option_limits import HIDDEN
from pagewire.common.option_limits import flag as flag_of
from pagewire.compatibility import (
    FOREIGN,
    LISTS,
    MAPPED,
    SWITCHES,
    SYNONYMS,
    VALUE_SYNONYMS,
    Spelling,
    suggestion,
    translate,
)

ENV_PREFIX = "PAGEWIRE_"
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
# Lists the options that are read only from flags. A parent process sets this variable for its server, for which the
# environment and the file are not intended.
FLAGS_ONLY_VARIABLE = f"{ENV_PREFIX}FLAGS_ONLY"
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")
_SWITCH_WORDS = (*TRUE_WORDS, *FALSE_WORDS, "auto")
_FLAG = re.compile(r"--?[A-Za-z][^\s=]*(=.*)?", re.DOTALL)
_NO_UTF8 = re.compile("[\ud800-\udfff]")
_DEFAULTS = "defaults"  # the origin of values that were not set


# A parser that receives this as its only argument raises `DescribedError` with itself, for shell completion. A real
# process argument cannot contain a null byte.
DESCRIBE = "\0describe"


class DescribedError(Exception):
    """Raised to pass the argument parser of a command to the caller. This happens if the command was called with the
    hidden argument DESCRIBE, for example to generate shell completion."""

    def __init__(self, parser: "Parser") -> None:
        super().__init__(f"{parser.prog} was asked for its flags")
        self.parser = parser


class OptionError(ValueError):
    """Raised for an invalid option: an unknown key or flag, or an invalid value. The message names the option and the
    remedy."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command or service, which is defined by one field of a config dataclass."""

    name: str
    value_type: type
    default: Any  # dataclasses.MISSING: required
    optional: bool  # None is a value
    help: str
    choices: tuple[Any, ...] | None
    is_secret: bool = False  # its value never appears in messages, or in the arguments of child processes

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        return _variable_of(self.name)

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


@dataclass(frozen=True, slots=True)
class Resolved:
    """The values of all options of a command or service, and for each option the origin of the value, such as a flag or
    a file."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    ignored: Sequence[str] = ()  # a warning for each ignored option of another engine
    secrets: Collection[str] = ()  # the options whose values are not logged

    def build(self, config_type: type, **overrides: Any) -> Any:
        """Create an instance of a config dataclass from the resolved option values.

        Fields that are config dataclasses are created in the same way. `overrides` replace values.
        """
        hints = typing.get_type_hints(config_type)
        parts = {
            name: self.build(hint)
            for name, hint in hints.items()
            if isinstance(hint, type) and dataclasses.is_dataclass(hint)
        }
        names = hints.keys() & self.values.keys()
        return config_type(**parts, **{name: self.values[name] for name in names} | overrides)

    def describe(self) -> list[str]:
        """Return log lines that show the options that are not at their defaults, one line for each origin. An origin is
        the command line, the environment or a file. The origin with the highest precedence comes first."""
        by_origin: dict[str, list[str]] = {}
        for name, origin in self.origins.items():
            by_origin.setdefault(origin, []).append(self._shown(name))
        by_origin.pop(_DEFAULTS, None)
        rank = {"flags": 0, "environment": 1}
        origins = sorted(by_origin, key=lambda origin: rank.get(origin, 2))
        return [f"options from {origin}: {', '.join(by_origin[origin])}" for origin in origins]

    def describe_defaults(self) -> str:
        """Return a log line that shows the values of all options that have their defaults."""
        names = [name for name, origin in self.origins.items() if origin == _DEFAULTS]
        return f"options that have their defaults: {', '.join(map(self._shown, names))}"

    def _shown(self, name: str) -> str:
        value = self.values[name]
        return f"{name}={HIDDEN if name in self.secrets and value is not None else value}"


def options_of(*config_types: type, without: Collection[str] = ()) -> dict[str, Option]:
    """Return the options that the fields of config dataclasses define, including nested dataclasses, by name.

    If several dataclasses have the same field, the field of the first dataclass is used.
    """
    options: dict[str, Option] = {}
    for config_type in config_types:
        hints = typing.get_type_hints(config_type)
        for field in dataclasses.fields(config_type):
            if dataclasses.is_dataclass(hints[field.name]):
                options = options_of(hints[field.name], without=without) | options
            elif field.metadata and field.name not in without and field.name not in options:
                options[field.name] = _option(field, hints[field.name])
    return options


def _option(field: "dataclasses.Field[Any]", hint: Any) -> Option:
    alternatives = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    value_types = [alternative for alternative in alternatives if alternative is not types.NoneType]
    if len(value_types) != 1 or value_types[0] not in (str, int, float, bool):
        raise TypeError(
            f"field {field.name}: an option is a str, int, float or bool, or one of them or None, not {hint}"
        )
    choices = field.metadata.get("choices")
    return Option(
        name=field.name,
        value_type=value_types[0],
        default=field.default,
        optional=types.NoneType in alternatives,
        help=field.metadata["help"],
        choices=None if choices is None else tuple(choices),
        is_secret=field.metadata.get("is_secret", False),
    )


class Parser(argparse.ArgumentParser):
    """An argument parser that does not accept abbreviated flags. For an unknown flag, the error message suggests the
    most similar known flag.

    `explained` maps flags of other commands to the reason why this command does not have them. A flag may also be
    spelled with underscores, and a flag without a value may be followed by a word that means yes or no.
    """

    def __init__(self, *, explained: Mapping[str, str] = types.MappingProxyType({}), **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._explained = dict(explained)

    def explain(self, flag: str, text: str) -> None:
        """Add a flag that this command does not have, and the reason, which the error message then shows."""
        self._explained[flag] = text

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        if given == [DESCRIBE]:
            raise DescribedError(self)
        end = given.index("--") if "--" in given else len(given)
        # Only intermixed parsing accepts several positional arguments on both sides of flags.
        are_mixed = len(self._get_positional_actions()) > 1
        parse = self.parse_known_intermixed_args if are_mixed else self.parse_known_args
        parsed, unknown = parse([*self._spelled(given[:end]), *given[end:]], namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]}; quote arguments that contain spaces")
        return parsed

    def _spelled(self, given: Sequence[str]) -> list[str]:
        """Rewrite the command line arguments in the spelling that argparse accepts, for example with dashes instead of
        underscores in flags.

        End the command at the first unknown flag, because it is unclear whether the next argument is the flag's value.
        """
        # A flag with several values consumes all arguments up to the next flag, if the model is given elsewhere.
        is_model_named = bool(given) and (not given[0].startswith("-") or not {"--model", "-m"}.isdisjoint(given))
        spelled: list[str] = []
        flag, has_value = None, False
        for argument in given:
            if _FLAG.fullmatch(argument):
                name, joint, value = argument.partition("=")
                name, flag = self._known(name)
                has_value = bool(joint)
                if flag.nargs == 0 and value.lower() in _SWITCH_WORDS:
                    spelled.append(_switch(flag, name, value))
                else:
                    spelled.append(name + joint + value)
            elif flag is not None and flag.nargs == 0 and _is_foreign(flag) and argument.lower() in _SWITCH_WORDS:
                spelled[-1] = _switch(flag, spelled[-1], argument)
            elif isinstance(flag, _StoreOrAppend) and flag.dest in LISTS and has_value and is_model_named:
                spelled += [flag.option_strings[0], argument]
            else:
                spelled.append(argument)
                has_value = True
        return spelled

    def _known(self, name: str) -> tuple[str, argparse.Action]:
        """Return the known spelling of a command line flag, and the argparse action of the flag. For `--a.b`, which
        sets a part of another engine's option `--a`, the result is the flag `--a`. End the command with an error if the
        flag is unknown."""
        known = self._option_string_actions
        name = name.replace("_", "-") if name.startswith("--") else name
        whole = name.partition(".")[0]
        if name in known:
            return name, known[name]
        if whole in known and _is_foreign(known[whole]):
            return whole, known[whole]
        if not name.startswith("--") and name[:2] in known:
            return name, known[name[:2]]  # the value follows without a space
        if name in self._explained:
            self.error(f"unknown flag {name}: {self._explained[name]}")
        self.error(f"unknown flag {name}{suggestion(name, known)}")

    def print_help(self, file: Any = None) -> None:
        """Write the command's help text. Raise OSError if the text cannot be written. argparse would ignore this
        error."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """End the command with a one-line error message and exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _switch(flag: argparse.Action, name: str, word: str) -> str:
    """Return the spelling of a boolean flag that corresponds to `word`, a word that means yes or no: `--NAME` or
    `--no-NAME`."""
    off = [each for each in flag.option_strings if each.startswith("--no-")]
    return off[0] if off and word.lower() in FALSE_WORDS else name


def _is_foreign(flag: argparse.Action) -> bool:
    return flag.help == argparse.SUPPRESS


class _StoreOrAppend(argparse.Action):
    """The argparse action that stores the value of a flag. If the flag is repeated, its values form a list if several
    values are allowed. Otherwise, the repetition is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if before is None:
            setattr(namespace, self.dest, values)
        elif self.dest in LISTS:
            setattr(namespace, self.dest, [*(before if isinstance(before, list) else [before]), values])
        else:
            parser.error(f"{self.dest.upper()} is given twice: {before!r} and {values!r}")


def add_flags(
    parser: argparse.ArgumentParser,
    options: Mapping[str, Option],
    *,
    positional: str | None = None,
    groups: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
) -> None:
    """Add a command line flag for each option to a parser, and the flag `--config`. Flags that are not given are absent
    from the parsed arguments.

    The option named `positional` may also be given as a positional argument. `groups` maps the titles of the help to
    the names of their options, in order. Options outside the groups precede all groups.
    """
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file of options, keys as the flags (default: ${CONFIG_VARIABLE})"
    )
    if positional is not None:
        text = f"{options[positional].help} (or --{positional})"
        metavar = positional.upper()
        parser.add_argument(
            positional, metavar=metavar, nargs="?", action=_StoreOrAppend, default=argparse.SUPPRESS, help=_escape(text)
        )
    grouped = {name for names in groups.values() for name in names}
    for option in options.values():
        if option.name not in grouped:
            _add_flag(parser, option, is_positional=option.name == positional)
    for title, names in groups.items():
        group = parser.add_argument_group(title)  # the help omits a group without flags
        for name in names:
            if name in options:
                _add_flag(group, options[name], is_positional=name == positional)


def add_foreign_flags(parser: argparse.ArgumentParser, options: Mapping[str, Option]) -> None:
    """Add the command line flags of other engines, such as vLLM, to a parser. They are hidden from the help. Flags that
    the parser already has are kept."""
    flags: dict[str, list[str]] = {name: [flag_of(name)] for name in (*MAPPED, *FOREIGN)}
    for flag, name in SYNONYMS.items():
        flags.setdefault(name, []).append(flag)
    for name, all_names in flags.items():
        names = [each for each in all_names if each not in parser._option_string_actions]
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if not names:
            continue
        if name in SWITCHES:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **settings)
        elif name in FOREIGN or name in MAPPED or name in options:
            action: Any = _StoreOrAppend if name in LISTS or name == "model" else "store"
            parser.add_argument(*names, action=action, **settings)


def _variable_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _add_flag(parser: argparse._ActionsContainer, option: Option, *, is_positional: bool) -> None:
    settings: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
    if is_positional:
        parser.add_argument(option.flag, action=_StoreOrAppend, help=argparse.SUPPRESS, **settings)
    elif option.value_type is bool:
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=_help(option), **settings)
    else:
        metavar = "|".join(map(str, option.choices or ())) or option.value_type.__name__.upper()
        action: Any = _StoreOrAppend if option.name in LISTS else "store"
        parser.add_argument(option.flag, action=action, metavar=metavar, help=_help(option), **settings)


def _help(option: Option) -> str:
    """Return the help text of an option, including its default value. If the default is None or "", the help text
    itself describes the default, and is returned unchanged."""
    default = "required" if option.required else f"default: {_text(option.default)}"
    is_told = option.required or option.default not in (None, "")
    return _escape(f"{option.help} ({default})" if is_told else option.help)


def _escape(text: str) -> str:
    """Escape a help text for argparse, which applies % formatting to help texts."""
    return text.replace("%", "%%")


def _text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def resolve(options: Mapping[str, Option], arguments: argparse.Namespace, environ: Mapping[str, str]) -> Resolved:
    """Return the value and the origin of every option. Values come from the command line, the environment and a YAML
    file. Raise OptionError for an invalid key or value."""
    path: str = arguments.config or environ.get(CONFIG_VARIABLE) or ""
    flags = {name: _typed(name, value) for name, value in vars(arguments).items() if name != "config"}
    variables = {
        name: environ[option.variable]
        for name, option in options.items()
        if name not in flags and environ.get(option.variable)
    }
    flags_only = environ.get(FLAGS_ONLY_VARIABLE, "").split(",")
    ignored: list[str] = []
    # The layers, lowest precedence first. Each given value has the name that errors show, and its origin.
    given: dict[str, tuple[Any, str, str]] = {}
    for layer, origin, spelling in (
        (_read_yaml(path, options) if path else {}, path, Spelling(str, partial(_in_file, path))),
        (variables, "environment", Spelling(_variable_of, lambda name, _: _variable_of(name))),
        (flags, "flags", Spelling(flag_of, _in_flags)),
    ):
        try:
            translation = translate(layer, spelling)
        except ValueError as error:
            raise OptionError(str(error)) from None
        ignored += translation.ignored
        for name, value in translation.values.items():
            if name not in options:
                raise OptionError(f"{spelling.name(name)} is not an option of this service; leave it out")
            if layer is flags or name not in flags_only:
                given[name] = value, spelling.given(translation.sources[name], None), origin
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, option in options.items():
        if name in given:
            value, source, origins[name] = given[name]
            values[name] = _convert(option, value, source)
        elif option.required:
            raise OptionError(
                f"{name} is missing: give it as an argument, as {option.variable} or in the --config file"
            )
        else:
            values[name], origins[name] = option.default, _DEFAULTS
    return Resolved(values, origins, ignored, [name for name, option in options.items() if option.is_secret])


def _in_flags(name: str, value: Any) -> str:
    """Return an option as the user would write it on a command line. If the value is None, return only the flag."""
    if value is False:
        return f"--no{flag_of(name)[1:]}"
    if value is None or value is True:
        return flag_of(name)
    return f"{flag_of(name)} {' '.join(map(str, value)) if isinstance(value, list) else value!s:.80}"


def _in_file(path: str, name: str, value: Any) -> str:
    return f"{path}: {name}" if value is None else f"{path}: {name}: {value!s:.80}"


def _typed(name: str, text: Any) -> Any:
    """Convert the value of a command line flag. The value of another engine's flag is parsed as YAML, which includes
    JSON. The value is returned unchanged if it is not valid YAML, or if the flag is Pagewire's own."""
    if name in FOREIGN or name in MAPPED:
        from pagewire.common.strict_yaml import parse_yaml

        with contextlib.suppress(ValueError):
            return parse_yaml(text)
    return text


def unknown_variables(options: Mapping[str, Option], environ: Mapping[str, str]) -> list[str]:
    """Return a log line for each environment variable that may be a misspelt option. Such a variable has the prefix of
    Pagewire, and its name resembles the name of an option.

    A misspelt name is not an error, because platforms set variables with the same prefix. Kubernetes does so for a
    Service named `pagewire`.
    """
    known = [name.upper() for name in options]
    lines = []
    for variable in environ:
        name = variable.removeprefix(ENV_PREFIX)
        if name != variable and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            lines += [
                f"the environment variable {variable} is not an option; did you mean {ENV_PREFIX}{n}?" for n in near
            ]
    return lines


def _read_yaml(path: str, options: Mapping[str, Option]) -> dict[str, Any]:
    from pagewire.common.strict_yaml import parse_yaml  # lazy: clients do not need YAML

    try:
        document = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read the --config file {path}: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise OptionError(f"{path}: expected a mapping of option names to values, got a {type(document).__name__}")
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if not (name in options or name in FOREIGN or name in MAPPED):
            raise OptionError(f"{path}: unknown key {key!r}{suggestion(name, options)}")
        if name in values:
            raise OptionError(f"{path}: the key {name} is given twice, with - and with _")
        values[name] = value
    return values


def _convert(option: Option, given: Any, source: str) -> Any:
    """Convert the value of an option, from a text or YAML, to the option's type. Raise OptionError if the value is
    invalid."""
    if given is None and option.optional:
        return None
    try:
        value = _parse(option.value_type, given)
    except ValueError:
        article = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}[option.value_type]
        raise OptionError(f"{source}: {HIDDEN if option.is_secret else repr(given)} is not {article}") from None
    if option.choices is not None and VALUE_SYNONYMS.get(value) in option.choices:
        value = VALUE_SYNONYMS[value]
    if isinstance(value, str) and not value.isascii() and _NO_UTF8.search(value):
        raise OptionError(f"{source}: {HIDDEN if option.is_secret else repr(value)} is not valid UTF-8")
    if option.choices is not None and value not in option.choices:
        choices = ", ".join(map(str, option.choices))
        raise OptionError(f"{source}: {given!r} is none of {choices}{suggestion(str(value), map(str, option.choices))}")
    return value


def _parse(value_type: type, given: Any) -> Any:
    if value_type is bool:
        word = str(given).lower()
        if word not in TRUE_WORDS + FALSE_WORDS:
            raise ValueError
        return word in TRUE_WORDS
    is_rounded = value_type is int and isinstance(given, float)
    if isinstance(given, bool) or not isinstance(given, str | int | float) or is_rounded:
        raise ValueError
    return value_type(given)


def spelled(given: Mapping[str, Any]) -> list[str]:
    """Return the command line flags that set the given option names to the given values."""
    flags = []
    for name, value in given.items():
        if isinstance(value, bool):
            flags.append(flag_of(name if value else f"no_{name}"))
        else:
            flags += [f"{flag_of(name)}={each}" for each in (value if isinstance(value, list) else [value])]
    return flags


def to_flags(config: Any) -> list[str]:
    """Return the command line flags for all values of a service's config that differ from their defaults, including
    nested configs. Omit secrets, because other users of the machine can read the arguments of a process.

    Raise ValueError for a value of None, because no flag can set it.
    """
    known, flags = options_of(type(config)), list[str]()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flags += to_flags(value)
        option = known.get(field.name)
        if option is None or option.is_secret or value == option.default:
            continue
        if value is None:
            raise ValueError(f"no flag sets {option.name} to None")
        flags += spelled({option.name: value})
    return flags


def to_secret_variables(config: Any) -> dict[str, str]:
    """Return the environment variables that pass the secret values of a service's config to a child process."""
    secrets = {
        option.variable: getattr(config, name) for name, option in options_of(type(config)).items() if option.is_secret
    }
    return {variable: value for variable, value in secrets.items() if value is not None}
