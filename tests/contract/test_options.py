"""Options of a service: one dataclass, four sources with a fixed precedence, and clear errors."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from pagewire import options
from pagewire.cli.command import main
from pagewire.cli.services import GROUPS, LINK_OPTIONS, MOST_USED
from pagewire.hosting.logs import LogConfig
from pagewire.hosting.model_source import ModelSourceConfig
from pagewire.options import OptionError, Parser, Resolved
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.config import FrontEndConfig, HttpOptions, SchedulerConfig
from scheduler_service.core.scheduler_options import SchedulerOptions
from worker_service.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Config:
    model: str = field(metadata={"help": "what to serve"})
    num_things: int = field(default=16, metadata={"help": "how many; at 100 % all"})
    ratio: float = field(default=0.5, metadata={"help": "how much"})
    device: str = field(default="auto", metadata={"help": "where", "choices": ("auto", "cpu")})
    enable_magic: bool = field(default=True, metadata={"help": "whether"})
    max_len: int | None = field(default=None, metadata={"help": "how long"})


@dataclass(frozen=True, slots=True)
class Other:
    num_things: int = field(default=16, metadata={"help": "the same"})
    name: str | None = field(default=None, metadata={"help": "who"})


KNOWN = options.options_of(Config)


def parser() -> Parser:
    made = Parser(prog="pagewire test")
    options.add_flags(made, KNOWN)
    return made


def resolve(flags: str = "", environ: Mapping[str, str] | None = None) -> Resolved:
    return options.resolve(KNOWN, parser().parse_args(flags.split()), environ or {})


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults() -> None:
    assert resolve("--model m").build(Config) == Config("m")


def test_precedence(tmp_path: Path) -> None:
    file = write(tmp_path / "o.yaml", "model: y\nnum-things: 1\nratio: 1\nmax_len: 1\nenable_magic: false\n")
    environ = {"PAGEWIRE_NUM_THINGS": "2", "PAGEWIRE_RATIO": "2", "PAGEWIRE_DEVICE": ""}
    resolved = resolve(f"--config {file} --ratio 3", environ)
    assert resolved.build(Config) == Config("y", num_things=2, ratio=3.0, max_len=1, enable_magic=False)
    assert resolved.origins == {
        "model": str(file),
        "num_things": "environment",
        "ratio": "flags",
        "device": "defaults",
        "enable_magic": str(file),
        "max_len": str(file),
    }
    assert resolved.describe() == [
        "options from flags: ratio=3.0",
        "options from environment: num_things=2",
        f"options from {file}: model=y, enable_magic=False, max_len=1",
    ]
    assert resolved.describe_defaults() == "options that have their defaults: device=auto"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "o.yaml", "model: y\n")
    assert resolve("", {"PAGEWIRE_CONFIG": str(file)}).values["model"] == "y"


def test_what_flags_alone_give(tmp_path: Path) -> None:
    file = write(tmp_path / "o.yaml", "model: y\nratio: 1\nnum-things: 1\n")
    environ = {"PAGEWIRE_CONFIG": str(file), "PAGEWIRE_DEVICE": "cpu", "PAGEWIRE_MAX_LEN": "2"}
    resolved = resolve("--no-enable-magic", environ | {options.FLAGS_ONLY_VARIABLE: "ratio,device,enable_magic"})
    assert resolved.build(Config) == Config("y", num_things=1, max_len=2, enable_magic=False)


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ("--no-enable-magic", {}, False),
        ("--no_enable_magic", {}, False),
        ("--enable-magic=off", {}, False),
        ("--enable-magic", {"PAGEWIRE_ENABLE_MAGIC": "no"}, True),
        ("", {"PAGEWIRE_ENABLE_MAGIC": "No"}, False),
        ("", {"PAGEWIRE_ENABLE_MAGIC": "1"}, True),
    ],
)
def test_bools(flags: str, environ: dict[str, str], expected: bool) -> None:
    assert resolve(f"--model m {flags}", environ).values["enable_magic"] is expected


def test_null_in_yaml_is_none(tmp_path: Path) -> None:
    file = write(tmp_path / "o.yaml", "model: y\nmax_len: null\n")
    assert resolve(f"--config {file}").values["max_len"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_thing: 1", "unknown key 'num_thing'; did you mean num_things?"),
        ("zzz: 1", "unknown key 'zzz'"),
        ("num_things: 1\nnum-things: 2", "num_things is given twice"),
        ("num_things: 1\nnum_things: 2", "cannot read the --config file .* found 'num_things' twice"),
        ("num_things: 2026-02-30", "cannot read the --config file .*: not YAML: day "),
        ("num_things: !!bool maybe", "cannot read the --config file .*: not YAML: an invalid value"),
        ("[" * 10_000, "cannot read the --config file .* nested too deeply"),
        ("num_things: 1.5", "num_things: 1.5 is not an integer"),
        ("num_things: true", "num_things: True is not an integer"),
        ("num_things: null", "num_things: None is not an integer"),
        ("enable_magic: 7", "enable_magic: 7 is not true or false"),
        ("model: [a]", r"model: \['a'\] is not a text"),
        ("device: cpus", "device: 'cpus' is none of auto, cpu; did you mean cpu?"),
        ("- 1", "expected a mapping"),
        ("a: b: c", "cannot read"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "o.yaml", text)
    with pytest.raises(OptionError, match=message):
        resolve(f"--model m --config {file}" if "model" not in text else f"--config {file}")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(OptionError, match="cannot read the --config file /nowhere"):
        resolve("--model m --config /nowhere")


def test_another_word_for_a_value() -> None:
    known = options.options_of(WorkerConfig)
    parsed = argparse.Namespace(config=None, model="m", device="gpu")
    assert options.resolve(known, parsed, {}).values["device"] == "cuda"


def test_wrong_values() -> None:
    with pytest.raises(OptionError, match="--num-things: 'many' is not an integer"):
        resolve("--model m --num-things many")
    with pytest.raises(OptionError, match="PAGEWIRE_RATIO: 'half' is not a number"):
        resolve("--model m", {"PAGEWIRE_RATIO": "half"})
    with pytest.raises(OptionError, match="--device: 'gpu' is none of auto, cpu"):
        resolve("--model m --device gpu")
    with pytest.raises(OptionError, match="model is missing"):
        resolve()


def test_unknown_flags_get_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in [
        ("--num-thing 4", "unknown flag --num-thing; did you mean --num-things?"),
        ("--num_thing=4", "unknown flag --num-thing; did you mean --num-things?"),
        ("--max 4", "unknown flag --max"),
    ]:
        with pytest.raises(SystemExit) as ended:
            resolve(f"--model m {flags}")
        captured = capsys.readouterr()
        assert ended.value.code == 2
        assert captured.out == ""
        assert captured.err.startswith(f"pagewire test: error: {message}")
        assert captured.err.count("\n") == 1


def test_misspelt_variables_are_named() -> None:
    environ = {"PAGEWIRE_NUM_THING": "1", "PAGEWIRE_SERVICE_HOST": "10.0.0.1", "PAGEWIRE_RATIO": "1", "HOME": "/"}
    assert options.unknown_variables(KNOWN, environ) == [
        "the environment variable PAGEWIRE_NUM_THING is not an option; did you mean PAGEWIRE_NUM_THINGS?"
    ]


def test_help_shows_defaults() -> None:
    text = " ".join(parser().format_help().split())
    assert "how many; at 100 % all (default: 16)" in text
    assert "what to serve (required)" in text
    assert "--enable-magic, --no-enable-magic whether (default: on)" in text
    assert "--device auto|cpu" in text
    assert "how long" in text
    assert "None" not in text


def test_help_stands_in_groups() -> None:
    made = Parser(prog="pagewire test")
    groups = {"first things": ("device", "ratio"), "unused": ("nothing",), "later things": ("max_len",)}
    options.add_flags(made, KNOWN, positional="model", groups=groups)
    text = made.format_help()
    parts = ["MODEL ", "--config", "--num-things", "first things:", "--device", "--ratio", "later things:", "--max-len"]
    places = [text.index(part, text.index("positional")) for part in parts]
    assert places == sorted(places)
    assert "unused" not in text


def test_an_argument_may_be_given_as_a_flag_but_not_as_both(capsys: pytest.CaptureFixture[str]) -> None:
    made = Parser(prog="pagewire test")
    options.add_flags(made, KNOWN, positional="model")
    for given in (["m", "--ratio", "1"], ["--ratio", "1", "m"], ["--model", "m", "--ratio", "1"]):
        assert options.resolve(KNOWN, made.parse_args(given), {}).build(Config) == Config("m", ratio=1.0)
    with pytest.raises(SystemExit):
        made.parse_args(["a", "--model", "b"])
    assert "MODEL is given twice: 'a' and 'b'" in capsys.readouterr().err


def test_every_option_of_the_services_stands_in_one_group() -> None:
    configs = (SchedulerConfig, WorkerConfig, FrontEndConfig, ModelSourceConfig, LogConfig)
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(options.options_of(*configs))


def test_nine_flags_stand_first_in_the_help_of_serve() -> None:
    known = options.options_of(SchedulerConfig, WorkerConfig, HttpOptions, without=LINK_OPTIONS)
    assert next(iter(GROUPS)) == MOST_USED
    assert len([name for name in GROUPS[MOST_USED] if name in known]) == 9


@pytest.mark.parametrize("flag", ["--gateway", "--gateway-port=8080", "--gateway_host"])
def test_flags_of_the_gateway_name_what_to_use_instead(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", flag]) == 2
    name = flag.partition("=")[0].replace("_", "-")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"pagewire serve: error: unknown flag {name}: use the OpenAI API of `serve` (--http-port), or a"
    )


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_two_ports_of_serve_are_different(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "models/storyteller", f"{flag}=9000", "--http-port=9000"]) == 2
    assert f"{flag} and --http-port are both 9000; choose another for one" in capsys.readouterr().err


def test_option_limits_fit_into_the_protocol_fields() -> None:
    told = scheduler_pb2.GetServerInfoResponse.DESCRIPTOR.fields_by_name
    names = [name for name, option in options.options_of(SchedulerConfig).items() if option.value_type is int]
    shared = [name for name in names if name in told]
    assert len(shared) == 4
    for name in shared:
        with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} is 4294967296, but must be [12] to "):
            Resolved({"model": "m", name: 2**32}, {}).build(SchedulerConfig).validate()
    known = options.options_of(Other)
    with pytest.raises(OptionError, match=r"^--name: 'a\\udcff' is not valid UTF-8"):
        options.resolve(known, argparse.Namespace(config=None, name="a\udcff"), {})


def test_a_union_of_configs_sets_shared_fields_once() -> None:
    known = options.options_of(Config, Other, without=("ratio",))
    assert list(known) == ["model", "num_things", "device", "enable_magic", "max_len", "name"]
    made = Parser(prog="pagewire test")
    options.add_flags(made, known, positional="model")
    resolved = options.resolve(known, made.parse_args(["--num-things", "4", "m"]), {})
    assert resolved.build(Config, device="cpu") == Config("m", num_things=4, device="cpu")
    assert resolved.build(Other) == Other(4)


@pytest.mark.parametrize(
    "config", [Config("m"), Config("-m n", num_things=-3, ratio=1e-9, device="cpu", enable_magic=False, max_len=4)]
)
def test_flags_of_a_config_give_the_config(config: Config) -> None:
    assert options.resolve(KNOWN, parser().parse_args(options.to_flags(config)), {}).build(Config) == config


def test_flags_of_a_config_give_the_configs_among_its_fields() -> None:
    config = FrontEndConfig(model="m", http=HttpOptions(http_port=80, lenient=True))
    known = options.options_of(FrontEndConfig)
    made = Parser(prog="pagewire test")
    options.add_flags(made, known)
    assert options.resolve(known, made.parse_args(options.to_flags(config)), {}).build(FrontEndConfig) == config


def test_only_scalar_fields_are_options() -> None:
    @dataclass(frozen=True)
    class Odd:
        things: list[str] = field(default_factory=list, metadata={"help": "no"})

    with pytest.raises(TypeError, match="things"):
        options.options_of(Odd)


def test_nothing_given_leaves_no_trace_in_the_arguments() -> None:
    assert parser().parse_args([]) == argparse.Namespace(config=None)


@pytest.mark.parametrize("config_type", [SchedulerConfig, WorkerConfig, FrontEndConfig])
def test_every_numeric_option_has_enforced_limits(config_type: type) -> None:
    parts = {SchedulerConfig: fields(SchedulerOptions), FrontEndConfig: fields(HttpOptions)}
    found = fields(config_type) + parts.get(config_type, ())
    for option in options.options_of(config_type).values():
        if option.value_type in (int, float) and option.name != "tensor_parallel_rank":
            [limits] = [field.metadata["limits"] for field in found if field.name == option.name]
            assert limits, option.name
            assert all(limit.holds(option.default) for limit in limits if option.default is not None), option.name
            must_be = rf"(, but|; it) must be {re.escape(limits[0].text)}"
            with pytest.raises(ValueError, match=f"^{option.flag} is -1{must_be}$"):
                Resolved({"model": "m", option.name: -1}, {}).build(config_type).validate()
