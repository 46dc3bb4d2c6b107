"""Flags and config files of the servers of vLLM and llama.cpp: each is supported, ignored, or explained."""

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pagewire import compatibility, options
from pagewire.cli import services
from pagewire.compatibility import FOREIGN, LISTS, MAPPED, SWITCHES, SYNONYMS, suggestion
from pagewire.llm.llm import serve_flags

MODEL = "/models/some"
# The flags of `vllm serve` in all releases since 0.6.
VLLM = (Path(__file__).parent / "vllm_flags.txt").read_text(encoding="utf-8").split()
# The flags of llama-server as of November 2026, except those that download one model, and the short names -e, -l, -j,
# -jf, -s and -r, of which vLLM's or Pagewire's commands use some.
LLAMA = (Path(__file__).parent / "llama_flags.txt").read_text(encoding="utf-8").split()
KNOWN = services.serve_options()


def parser() -> options.Parser:
    made = options.Parser(prog="pagewire serve")
    options.add_flags(made, KNOWN, positional="model")
    options.add_foreign_flags(made, KNOWN)
    return made


PARSER = parser()


def resolve(*flags: str, environ: Mapping[str, str] | None = None) -> options.Resolved:
    return options.resolve(KNOWN, PARSER.parse_args(list(flags)), environ or {})


def chosen(resolved: options.Resolved) -> dict[str, Any]:
    return {name: resolved.values[name] for name, origin in resolved.origins.items() if origin != "defaults"}


@pytest.mark.parametrize("flag", [*VLLM, *LLAMA])
def test_every_flag_of_theirs_is_known(flag: str) -> None:
    assert flag in PARSER._option_string_actions


def test_help_shows_none_of_them() -> None:
    text = PARSER.format_help()
    shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text.partition("options:")[2]))
    assert not shown & {"--enable-lora", "--ctx-size", *SYNONYMS}


@pytest.mark.parametrize(
    ("flags", "values", "ignored"),
    [
        ("-tp 2", {"tensor_parallel_size": 2}, []),
        ("-tp=2 -q int8", {"tensor_parallel_size": 2, "quantization": "int8"}, []),
        ("--dtype half", {"dtype": "half"}, []),
        ("--dtype float", {"dtype": "float32"}, []),
        ("--enforce-eager", {"max_graph_batch_size": 0}, []),
        ("--no-enforce-eager", {}, []),
        ("--trust-remote-code", {}, ["--trust-remote-code is ignored: Pagewire never runs code from"]),
        ("--max-model-len 32k", {"max_model_len": 32_000}, []),
        ("--max_model_len=32K", {"max_model_len": 32_768}, []),
        ("--max-model-len auto", {"max_model_len": None}, []),
        ("--max-num-batched-tokens 25.6k", {"max_num_batched_tokens": 25_600}, []),
        ("--served-model-name a b", {"served_model_name": "a,b"}, []),
        ("--chat-template a.jinja", {"chat_template": "a.jinja"}, []),
        ("--chat-template-file a.jinja", {"chat_template": "a.jinja"}, []),
        ('--allowed-origins ["*"]', {"allowed_origins": "*"}, []),
        ('--allowed-origins=["https://a","https://b"]', {"allowed_origins": "https://a,https://b"}, []),
        ("--allowed-origins https://a,https://b", {"allowed_origins": "https://a,https://b"}, []),
        ("--api-key sesame other", {"api_key": "sesame,other"}, []),
        ("--enable-chunked-prefill", {}, []),
        ("--enable-chunked-prefill=False", {}, ["--no-enable-chunked-prefill is ignored: chunked prefill is always"]),
        ("--enable-chunked-prefill False", {}, ["--no-enable-chunked-prefill is ignored: chunked prefill is always"]),
        ("-O3", {}, ["--optimization-level 3 is ignored: Pagewire does not use"]),
        ("--compilation-config.mode 3", {}, ["--compilation-config 3 is ignored: Pagewire does not use"]),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}, []),
        ("--enable-prefix-caching=false", {"enable_prefix_caching": False}, []),
        ("--pipeline-parallel-size 1 --data-parallel-size=1 --hf-overrides {}", {}, []),
        (f"--tokenizer {MODEL}", {}, []),
        ("--load-format safetensors", {"load_format": "auto"}, []),
        ("--attention-backend FLASH_ATTN", {"attention_backend": "flash_attn"}, []),
        ("--scheduling-policy priority", {"policy": "priority"}, []),
        ("--kv-offloading-size 4", {"swap_space": "4GiB"}, []),
        ("--kv-cache-memory-bytes 4G", {"kv_cache_memory": str(4 << 30)}, []),
        ("--cuda-graph-sizes 1 2 4", {}, ["--cuda-graph-sizes 1 2 4 is ignored: see --max-graph-batch-size"]),
        ("-c 4096 -np 8 -t 4 -ngl 99 -fa on -a pet", {"max_model_len": 4096, "max_num_seqs": 8, "num_threads": 4,
         "served_model_name": "pet"}, ["--n-gpu-layers 99 is ignored: all layers are on one device; see --device"]),
        ("--cors-origins * --no-cache-prompt -kvo -fit on --no-webui --reasoning auto", {"allowed_origins": "*",
         "enable_prefix_caching": False}, []),
        ("--cors-origins localhost -cram 0 --no-mmproj --seed -1 --spec-type none", {}, []),
        ("-cram 512 -tb 8", {}, ["--cache-ram 512 is ignored: all requests share the KV cache; see --kv-cache-memory",
         "--threads-batch 8 is ignored: see --num-threads"]),
        ("--ctx-size 0 --threads -1 --no-mmap", {}, ["--no-mmap is ignored: each rank maps the weight files"]),
    ],
)  # fmt: skip
def test_foreign_flags_are_mapped_or_ignored(flags: str, values: dict[str, Any], ignored: list[str]) -> None:
    """Foreign flags are mapped to Pagewire's options or ignored. MODEL may precede the flags or be a flag itself."""
    for given in ([MODEL, *flags.split()], [*flags.split(), "--model", MODEL], [*flags.split(), "-m", MODEL]):
        resolved = resolve(*given)
        assert chosen(resolved) == {"model": MODEL} | values
        assert len(resolved.ignored) == len(ignored)
        assert all(line.startswith(begin) for line, begin in zip(resolved.ignored, ignored, strict=True))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--enable-lora", "--enable-lora is not supported: Pagewire serves one model"),
        ("--lora-modules a=b c=d", "--lora-modules a=b c=d is not supported: Pagewire serves one model"),
        (
            "--api-key-file keys",
            "--api-key-file keys is not supported: set the variable PAGEWIRE_API_KEY, or --api-key, to",
        ),
        ("-hft sesame", "--hf-token is not supported: set the variable HF_TOKEN"),
        ("--mirostat 2", "--mirostat 2 is not supported: sampling has temperature"),
        ("--json-schema {}", r"--json-schema \{\} is not supported: set structured_outputs in requests"),
        ("--context-shift", "--context-shift is not supported: .*: see --max-model-len"),
        ("-hf a -hfd b", "--hf-repo a is not supported: give the id on the hub"),
        ("--spec-draft-n-max 3", "--spec-draft-n-max 3 is not supported: Pagewire has no speculative decoding"),
        ("--tools all", "--tools all is not supported: clients run the tools"),
        ("--hf-token sesame", "--hf-token is not supported: set the variable HF_TOKEN"),
        (
            '--default-chat-template-kwargs {"a":1}',
            r"--default-chat-template-kwargs \{'a': 1\} is not supported: requests set chat_template_kwargs; .* see --",
        ),
        ("--quantization awq", "--quantization awq is not supported: the checkpoint specifies the"),
        ("-dp 2", "--data-parallel-size 2 is not supported: create several LLMs"),
        ('--hf-overrides {"a":1}', r"--hf-overrides \{'a': 1\} is not supported: edit config.json in a copy"),
        ("--cpu-offload-gb 4", "--cpu-offload-gb 4 is not supported: .* --swap-space is for the KV cache"),
        ("--speculative-config.method ngram", "--speculative-config ngram is not supported: Pagewire has no spec"),
        ("--ctx-size abc", "--ctx-size: 'abc' is not an integer"),
        ("-c 1 --max-model-len 2", "--ctx-size 1 and --max-model-len 2 set --max-model-len to different values"),
    ],
)
def test_unsupported_foreign_flags_are_explained(flags: str, message: str) -> None:
    with pytest.raises(options.OptionError, match=f"^{message}") as caught:
        resolve(MODEL, *flags.split())
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
def test_no_flag_of_theirs_takes_the_model(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """No foreign flag consumes MODEL as its value. MODEL stands before or after random flags of each kind."""
    draw = random.Random(seed)
    names = [*(name for name in FOREIGN if not FOREIGN[name].is_refused), *MAPPED]
    values = {"preemption_mode": "swap", "scheduling_policy": "fcfs"}
    for _ in range(100):
        given = []
        for name in draw.sample(names, 4):
            flag = draw.choice(["--" + name.replace("_", "-"), "--" + name])
            if name in SWITCHES:
                given += [[flag], [f"{flag}=true"], [flag.replace("--", "--no-", 1)]][draw.randrange(3)]
            elif draw.random() < 0.5:
                given.append(f"{flag}={values.get(name, '2')}")
            else:
                given += [flag, values.get(name, "2")]
        place = draw.choice([0, len(given)])
        given.insert(place, MODEL)
        parsed = PARSER.parse_args(given)
        assert parsed.model == MODEL, given
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"--metricsport 0 {MODEL}", "unknown flag --metricsport; did you mean --metrics-port?"),
        (f"{MODEL} --nonsense 0", "unknown flag --nonsense ("),
        (f"{MODEL} -z", "unknown flag -z ("),
        (f"{MODEL} other", "MODEL is given twice: "),
    ],
)
def test_an_unknown_flag_is_named_and_its_value_is_no_model(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        PARSER.parse_args(flags.split())
    error = capsys.readouterr().err
    assert message in error or ("other" in flags and "unknown argument other" in error)


def test_files_of_theirs_are_read(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: /m\nmax-model-len: 32k\nenforce-eager: true\nserved-model-name: [a, b]\ntrust_remote_code: true\n"
        "tensor-parallel-size: 2\npipeline-parallel-size: 1\n"
    )
    resolved = resolve("--config", str(file))
    wanted = {"max_model_len": 32_000, "max_graph_batch_size": 0, "served_model_name": "a,b", "tensor_parallel_size": 2}
    assert chosen(resolved) == {"model": "/m"} | wanted
    assert [line.partition(" is ignored")[0] for line in resolved.ignored] == [f"{file}: trust_remote_code: True"]
    file.write_text("model: /m\nenable-lora: true\n")
    with pytest.raises(options.OptionError, match=f"^{file}: enable_lora: True is not supported: "):
        resolve("--config", str(file))
    file.write_text("model: /m\nctx-size: many\n")
    with pytest.raises(options.OptionError, match=f"^{file}: ctx_size: 'many' is not an integer"):
        resolve("--config", str(file))


def test_variables_take_their_values_too() -> None:
    assert resolve(MODEL, environ={"PAGEWIRE_MAX_MODEL_LEN": "32k"}).values["max_model_len"] == 32_000
    with pytest.raises(options.OptionError, match=r"^PAGEWIRE_QUANTIZATION is not supported: the checkpoint"):
        resolve(MODEL, environ={"PAGEWIRE_QUANTIZATION": "awq"})


def test_serve_and_llm_say_the_same() -> None:
    """`serve` and `LLM` accept the same foreign options, and map them to the same options of Pagewire."""
    for name in {*FOREIGN, *MAPPED} - SWITCHES:
        harmless = [value for value in FOREIGN[name].harmless if isinstance(value, str)] if name in FOREIGN else ["2"]
        for value in {"preemption_mode": ["swap"], "scheduling_policy": ["fcfs"]}.get(name, harmless):
            values = chosen(resolve(MODEL, f"--{name}={value}"))
            flags = serve_flags(MODEL, {name: options._typed(name, value)})
            assert values == chosen(resolve(MODEL, *flags)), name


@pytest.mark.parametrize("word", ["--enable-lora", "-tp", "colour", "--enable-thinking", "num"])
def test_a_word_that_is_no_slip_of_any_gets_no_suggestion(word: str) -> None:
    assert suggestion(word, [option.flag for option in KNOWN.values()]) == ""


@pytest.mark.parametrize("seed", range(3))
def test_slips_of_every_flag_are_told(seed: int) -> None:
    """Each flag is suggested for typing errors: a missing letter, an extra letter, or two swapped letters."""
    draw = random.Random(seed)
    flags = [option.flag for option in KNOWN.values() if len(option.flag) > 9]
    for flag in flags:
        place = draw.randrange(3, len(flag) - 1)
        slips = [flag[:place] + flag[place + 1 :], flag[:place] + "x" + flag[place:]]
        slips.append(flag[:place] + flag[place + 1] + flag[place] + flag[place + 2 :])
        for slip in slips:
            assert slip in flags or suggestion(slip, flags).startswith("; did you mean --"), slip


def told_flags() -> list[tuple[str, str]]:
    """Return the flags in the first column of docs/migrating.md, each with the text of the second column."""
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| `-")]
    return [(flag, answer) for flags, answer in rows for flag in re.findall(r"`(-[^`]+)`", flags)]


@pytest.mark.parametrize(("flag", "answer"), told_flags())
def test_the_migration_page_equals_the_behavior_of_serve(flag: str, answer: str) -> None:
    assert len(told_flags()) > 30
    given = flag.split()
    if PARSER._option_string_actions[given[0]].nargs != 0 and len(given) == 1:
        given.append({"--load-format": "auto", "--otlp-traces-endpoint": "http://a:1"}.get(flag, "1"))
    if given[0] in ("-m", "--port", "--swap-space"):
        return  # tested with other flags beside them
    try:
        resolved = resolve(MODEL, *given)
    except options.OptionError:
        assert not answer.startswith(("the same", "ignored"))
        return
    if not chosen(resolved).keys() - {"model"}:
        assert answer.startswith("ignored")
        return
    [ours] = chosen(resolved).keys() - {"model"}
    assert answer.startswith("the same") or KNOWN[ours].flag in answer


def test_names_stand_in_one_table() -> None:
    names = [name.rstrip("!*") for names, _ in compatibility._FOREIGN for name in names.split()]
    assert len(names) == len(set(names))
    assert not set(KNOWN) & {*FOREIGN, *MAPPED}
    assert set(SYNONYMS.values()) <= {*KNOWN, *FOREIGN, *MAPPED}
    assert {*SWITCHES, *LISTS} <= {*KNOWN, *FOREIGN, *MAPPED}
    for name, foreign in FOREIGN.items():
        named = re.findall(r"`(\w+)`", foreign.text)
        assert set(named) <= KNOWN.keys(), f"{name}: {named}"
