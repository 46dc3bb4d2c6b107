"""Tests of the boundaries in ARCHITECTURE.md, for example forbidden imports and calls.

The rules are checked on the source, so an import inside a function counts too. pyproject.toml has the contracts about
imports between packages, for import-linter.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from pagewire.network.families import BY_ARCHITECTURE
from testing.sources import PACKAGES, ROOT, imports, module_name, parse, sources, walk
from tests.project.counts import is_kernel
from worker_service.config import ATTENTION_BACKENDS
from worker_service.models import layouts
from worker_service.models.layouts.gguf import BLOCKS

EVERY_SOURCE = (*PACKAGES, "bench", "models")
MAX_PARAMETERS = 12  # of a function in the worker or the kernels

# Packages of pagewire that the client library does not import.
BESIDE_THE_CLIENT = ("bench", "cli", "common.gguf", "hosting", "kernels", "llm", "network")
# Packages whose public names are all in `__init__`, and further public modules with optional dependencies.
PACKAGE_INTERFACES = (
    *(f"worker_service.{name}" for name in ("attention", "cache", "device", "engine", "host", "rows", "runner")),
    *(f"scheduler_service.core.{name}" for name in ("cache", "plans")),
    "pagewire.cli",
)
OPTIONAL_INTERFACES = (
    "worker_service.attention.backends.triton",
    "worker_service.engine.tracing",
    "worker_service.runner.profile",
    "pagewire.cli.chat",
    "pagewire.cli.figures",
    "pagewire.cli.services",
)
DENIED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
DENIED_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


IMPORT_IN_TEXT = re.compile(r"^ *from (tests[.\w]*) import (\w+)", re.MULTILINE)


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def offenders(folders: Sequence[str], rule: Callable[[Path], Iterable[str]]) -> list[str]:
    """Return a line for each breach of a rule in the modules of some folders."""
    return [f"{path}: {breach}" for path in sources(*folders) for breach in rule(path)]


def test_no_files_of_the_scheduler_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count too."""
    modules = {module_name(path): path for path in sources("scheduler_service")}
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imports(parse(path))} & set(modules)
        for module, path in modules.items()
    }
    assert "scheduler_service.core.sequence" in graph["scheduler_service.core.scheduler"]
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_imports_keep_to_the_contracts() -> None:
    """The contracts are in pyproject.toml: layers, forbidden imports, and the independence of the services."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--config", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_only_tests_import_tests() -> None:
    def of_tests(path: Path) -> list[str]:
        return [name for name in imports(parse(path)) if is_under(name, "tests")]

    assert offenders((*EVERY_SOURCE, "deploy", "docs", "examples", "testing"), of_tests) == []


def is_of_a_test_module(name: str) -> bool:
    parts = name.split(".")
    return any(
        part.startswith("test_") and (ROOT.joinpath(*parts[:index]) / f"{part}.py").exists()
        for index, part in enumerate(parts)
    )


def test_random_inputs_come_from_seeds() -> None:
    """A test may draw its seed if it prints it. Torch is seeded before each test."""
    unseeded = re.compile(r"((np|numpy)\.)?random\.(?!(Random|default_rng)\([^)])\w+\(")

    def draws(path: Path) -> list[str]:
        calls = [ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
        return [call for call in calls if unseeded.match(call) and call != "random.randrange(1 << 32)"]

    assert offenders(["bench", "testing", "tests"], draws) == []
    assert all(unseeded.match(call) for call in ("random.random()", "random.Random()", "np.random.default_rng()"))


def imports_also_in_texts(path: Path) -> list[str]:
    """Return the names that a module imports, including imports in programs in its strings."""
    tree = parse(path)
    texts = [node.value for node in walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [*imports(tree), *(".".join(names) for text in texts for names in IMPORT_IN_TEXT.findall(text))]


def test_nothing_imports_a_test_module() -> None:
    """Helpers of several tests are in separate modules. Programs in strings count too."""

    def of_a_test_module(path: Path) -> list[str]:
        return [name for name in imports_also_in_texts(path) if is_of_a_test_module(name)]

    assert is_of_a_test_module("tests.project.test_layout.offenders")
    assert offenders((*EVERY_SOURCE, "deploy", "docs", "examples", "testing", "tests"), of_a_test_module) == []


def test_folders_of_tests_import_each_other_in_no_circle() -> None:
    """Helpers of several folders are in `testing/`. `tests.gpu` has commands that other tests run."""
    graph: dict[str, set[str]] = {module_name(path.parent): set() for path in sources("tests")}
    for path in sources("tests"):
        names = [name for name in imports_also_in_texts(path) if is_under(name, "tests")]
        graph[module_name(path.parent)] |= {max(filter(partial(is_under, name), graph), key=len) for name in names}
    graph = {folder: imported - {folder} for folder, imported in graph.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError
    pairs = [(folder.split(".")[1:2], name) for folder, imported in graph.items() for name in imported - {"tests"}]
    assert {name for room, name in pairs if room != name.split(".")[1:2]} == {"tests.gpu"}


def bypassing_imports(module: str, imported: list[str]) -> list[str]:
    """Return the names imported from the inside of a package whose public names are in its `__init__`."""
    allowed = tuple(door for door in PACKAGE_INTERFACES if is_under(module, door)) + OPTIONAL_INTERFACES
    return [
        name
        for name in imported
        if any(is_under(name, door) and name.count(".") > door.count(".") + 1 for door in PACKAGE_INTERFACES)
        and not any(is_under(name, prefix) for prefix in allowed)
    ]


def test_packages_are_entered_by_their_doors() -> None:
    def around(path: Path) -> list[str]:
        return bypassing_imports(module_name(path), list(imports(parse(path))))

    assert offenders((*PACKAGES, "bench"), around) == []
    assert bypassing_imports("worker_service.runner.model_runner", ["worker_service.rows.table.SequenceTable"])
    assert not bypassing_imports("worker_service.runner.model_runner", ["worker_service.rows.SequenceTable"])


def test_every_attention_backend_has_a_name_and_a_module() -> None:
    folder = ROOT / "worker_service" / "attention" / "backends"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(ATTENTION_BACKENDS)


def test_a_layout_of_weights_is_named_where_it_is_read_and_told() -> None:
    """Other modules use the fields of `Layout` instead of comparing the names of layouts."""
    read, told = Path("pagewire/network/quantization.py"), Path("worker_service/models/layouts")
    methods = Path("pagewire/network/quantization_methods")

    def named(path: Path) -> set[str]:
        texts = {node.value for node in walk(parse(path)) if isinstance(node, ast.Constant)}
        is_place = path == read or not {told, methods}.isdisjoint(path.parents)
        return set() if is_place else texts & (layouts.BY_NAME.keys() | BLOCKS.keys())

    assert {"awq", "gptq_v2", "fp8", "pack-quantized"} <= layouts.BY_NAME.keys()
    assert offenders(["pagewire/network", "worker_service/models"], named) == []


def rooms(service: str) -> dict[str, set[str]]:
    """Return the modules and subpackages of a package, and for each the siblings that it imports."""
    found: dict[str, set[str]] = {}
    for path in sources(service):
        module = module_name(path)
        if module != service:
            room = module.split(".")[1]
            inside = (name.split(".")[1] for name in imports(parse(path)) if is_under(name, service) and "." in name)
            found.setdefault(room, set()).update(name for name in inside if name != room)
    return found


@pytest.mark.parametrize(("package", "most_rooms", "most_levels"), [("worker_service", 15, 6), ("pagewire", 13, 5)])
def test_rooms_stand_on_one_another(package: str, most_rooms: int, most_levels: int) -> None:
    """No two subpackages import each other, so the package can be read from the lowest layer upwards."""
    left = rooms(package)
    assert len(left) <= most_rooms
    levels = 0
    while left:
        ground = {room for room, needed in left.items() if not needed & left.keys()}
        assert ground, f"these import one another: {left}"
        left = {room: needed for room, needed in left.items() if room not in ground}
        levels += 1
    assert levels <= most_levels


def test_the_packages_are_imported_by_the_names_that_are_installed() -> None:
    """PyPI has another package `kernels`, which transformers uses."""

    def by_their_own_names(path: Path) -> list[str]:
        return [name for name in imports(parse(path)) if name.split(".")[0] in {"kernels", "protos"}]

    assert offenders((*EVERY_SOURCE, "pagewire/protos/gen", "tests"), by_their_own_names) == []


def test_the_scheduler_names_no_family() -> None:
    """Each model family defines its own missing files and names."""
    words = {re.split(r"\d|For|LM", architecture)[0] for architecture in BY_ARCHITECTURE}
    keys = {family.length_key for family in BY_ARCHITECTURE.values()}
    names = re.compile(rf"({'|'.join(sorted(words))})(?!ions)\w*|{'|'.join(sorted(keys))}|text_config", re.IGNORECASE)

    def named(path: Path) -> list[str]:
        texts = [node.value for node in walk(parse(path)) if isinstance(node, ast.Constant)]
        return [text for text in texts if isinstance(text, str) and names.fullmatch(text)]

    assert offenders(["scheduler_service"], named) == []
    assert all(map(names.fullmatch, ("bloom", "gemma3_text", "GPT2LMHeadModel", "n_positions")))


def test_core_needs_one_package() -> None:
    """Of the common modules, it needs only the messages and the option limits, which have no dependencies."""
    floor = ("pagewire.common.wire.messages", "pagewire.common.option_limits")

    def outside(path: Path) -> set[str]:
        others = [name for name in imports(parse(path)) if not any(is_under(name, part) for part in floor)]
        return {name.split(".")[0] for name in others} - sys.stdlib_module_names - {"scheduler_service", "xxhash"}

    assert offenders(["scheduler_service/core"], outside) == []
    assert not [found for part in floor if (found := outside(Path(f"{part.replace('.', '/')}.py")))]


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in walk(parse(path)) if isinstance(node, ast.FunctionDef)]


def test_every_port_is_bounded() -> None:
    """Only one module creates gRPC servers, and it bounds their connections and calls."""

    def made(path: Path) -> list[str]:
        calls = [ast.unparse(node.func) for node in walk(parse(path)) if isinstance(node, ast.Call)]
        return [call for call in calls if call in {"grpc.server", "grpc.aio.server"}]

    [found] = offenders(PACKAGES, made)
    assert found.endswith("pagewire/common/wire/transport/listening.py: grpc.aio.server")


def test_every_channel_is_made_in_one_place() -> None:
    """That module decides for each channel whether to use an HTTP proxy."""

    def makes_channels(path: Path) -> list[str]:
        names = [node.attr for node in walk(parse(path)) if isinstance(node, ast.Attribute)]
        return [name for name in names if name in {"insecure_channel", "secure_channel"}]

    found = {line.rpartition("/")[2] for line in offenders(PACKAGES, makes_channels)}
    assert found == {"dialling.py: insecure_channel", "dialling.py: secure_channel"}


def test_threads_call_event_loops_in_one_place() -> None:
    """A thread may outlive its event loop, and asyncio raises an error for calls to a closed loop."""

    def calls_loops(path: Path) -> list[str]:
        names = [node.attr for node in walk(parse(path)) if isinstance(node, ast.Attribute)]
        return [name for name in names if name in {"call_soon_threadsafe", "run_coroutine_threadsafe"}]

    [found] = offenders(PACKAGES, calls_loops)
    assert found.endswith("event_loop.py: call_soon_threadsafe")


def test_what_users_give_enters_a_message_in_one_place() -> None:
    """Errors of `wire.put` name the field, the value and the limit; protobuf's errors do not."""

    def set_directly(path: Path) -> set[str]:
        calls = [node for node in walk(parse(path)) if isinstance(node, ast.Call)]
        made = [call for call in calls if ast.unparse(call.func).startswith("pb.")]
        # These are nested messages, and the client's own stream ids.
        return {word.arg or "**" for call in made for word in call.keywords} - {
            "request",
            "submit",
            "abort",
            "stream_id",
        }

    clients = sources("pagewire/client")
    assert {Path("pagewire/client/client.py"), Path("pagewire/client/wire.py")} <= set(clients)
    assert {path: words for path in clients if (words := set_directly(path))} == {}


def test_questions_go_from_the_servicer_to_the_core_at_once() -> None:
    """No class in between repeats the methods, so that a new query is defined in few places."""
    questions = {node.name for node in functions(ROOT / "scheduler_service/core/explain.py") if node.name[0] != "_"}
    assert {"report", "block_map", "stats"} <= questions
    for name in ("core/scheduler", "serving/step_loop", "serving/availability"):
        assert not questions & {node.name for node in functions(ROOT / f"scheduler_service/{name}.py")}, name


def test_the_step_loop_has_one_kind_of_hook() -> None:
    """Observers receive the step loop's events; it accepts no callbacks."""
    exchange, loop = [
        [*node.args.args, *node.args.kwonlyargs]
        for node in functions(ROOT / "scheduler_service/serving/step_loop.py")
        if node.name == "__init__"
    ]
    annotations = [ast.unparse(each.annotation) for each in (*exchange, *loop) if each.annotation]
    assert not [annotation for annotation in annotations if "Callable" in annotation]
    assert len(loop) <= 7  # including `self`, and the clock for simulations


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[str]:
    """Return the names of all parameters except `self` and `cls`, including defaults and constexprs."""
    found = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in found if name not in {"self", "cls"}]


def test_functions_take_few_parameters() -> None:
    """Related values are passed together, even to kernels. A tuple counts as one parameter."""

    def with_too_many(path: Path) -> list[int]:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        found = [node for node in walk(parse(path)) if isinstance(node, kinds)]
        return [node.lineno for node in found if len(parameters(node)) > MAX_PARAMETERS]

    assert offenders(["pagewire/kernels", "worker_service"], with_too_many) == []


def test_parameters_of_every_kind_are_counted() -> None:
    (node,) = ast.parse("def f(self, a, /, b, c=1, *, D: tl.constexpr, e=2): ...").body
    assert isinstance(node, ast.FunctionDef)
    assert parameters(node) == ["a", "b", "c", "D", "e"]


def test_kernels_do_not_read_the_environment() -> None:
    """Their callers pass the settings as arguments."""

    def read(path: Path) -> set[str]:
        tree = parse(path)
        attributes = {ast.unparse(node) for node in walk(tree) if isinstance(node, ast.Attribute)}
        return {"os.environ", "os.getenv"} & (attributes | set(imports(tree)))

    assert offenders(["pagewire/kernels"], read) == []


def test_functions_around_kernels_are_typed() -> None:
    """mypy cannot check this, because kernels have no types."""

    def untyped(path: Path) -> list[str]:
        return [
            node.name
            for node in functions(path)
            if not is_kernel(node)
            and any(
                annotation is None
                for annotation in (
                    node.returns,
                    *(each.annotation for each in (*node.args.args, *node.args.kwonlyargs) if each.arg != "self"),
                )
            )
        ]

    assert offenders(["pagewire/kernels/triton"], untyped) == []


def test_nothing_is_tuned_while_the_engine_runs() -> None:
    def tuned(path: Path) -> list[str]:
        decorators = [ast.unparse(decorator) for node in functions(path) for decorator in node.decorator_list]
        return [decorator for decorator in decorators if "autotune" in decorator or "heuristics" in decorator]

    assert offenders(["pagewire/kernels/triton"], tuned) == []


def test_modules_are_nouns() -> None:
    nowhere = {"utils", "util", "helpers", "common", "misc"}
    assert not [path for path in sources(*EVERY_SOURCE) if path.stem in nowhere]


def test_nothing_runs_what_it_reads() -> None:
    def dangerous(path: Path) -> set[str]:
        tree = parse(path)
        calls = {ast.unparse(node.func) for node in walk(tree) if isinstance(node, ast.Call)}
        return {name.split(".")[0] for name in imports(tree)} & DENIED_MODULES | calls & DENIED_CALLS

    assert offenders(EVERY_SOURCE, dangerous) == []


def test_one_place_makes_the_command_of_a_child() -> None:
    """A child process must not import modules from the working directory; see
    `process.child_process.python_command`."""

    def commands(path: Path) -> list[str]:
        sequences = [node for node in walk(parse(path)) if isinstance(node, ast.List | ast.Tuple)]
        texts = [ast.unparse(node) for node in sequences]
        return [text for text in texts if "sys.executable" in text]

    (line,) = offenders(PACKAGES, commands)
    assert "pagewire/common/process/child_process.py" in line


def loaded_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after it ran `code`."""
    program = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.splitlines()[-1].split())


HEAVY = {"torch", "triton", "numpy", "transformers", "safetensors"}


def test_the_scheduler_and_the_client_load_neither_torch_nor_numpy() -> None:
    assert not loaded_after("import scheduler_service.server, scheduler_service.front_end, pagewire") & {
        *HEAVY,
        "worker_service",
        "pagewire.kernels",
    }


def test_importing_the_package_loads_the_client_alone() -> None:
    others = {"scheduler_service", "worker_service", *(f"pagewire.{name}" for name in BESIDE_THE_CLIENT)}
    assert not loaded_after("import pagewire") & {*HEAVY, *others, "pagewire.client.client"}
    loaded = loaded_after("import pagewire; pagewire.Client, pagewire.SamplingParams, pagewire.ServerInfo")
    assert "pagewire.client.client" in loaded
    assert not loaded & {*HEAVY, *others}


def test_no_module_is_there_twice() -> None:
    places = defaultdict(list)
    for path in sources(*PACKAGES):
        places[(ROOT / path).read_text(encoding="utf-8")].append(path)
    assert not [paths for text, paths in places.items() if text and len(paths) > 1]


@pytest.mark.parametrize("verb", ["complete", "chat", "status", "scheduler", "frontend", "simulate"])
def test_help_is_quick_to_load(verb: str) -> None:
    code = f"import pagewire.cli.command\nassert pagewire.cli.command.main(['{verb}', '--help']) == 0"
    assert not loaded_after(code) & HEAVY
