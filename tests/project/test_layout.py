"""The boundaries of the code: who may import whom, how long a function may be, what never happens.

The rules are those of ARCHITECTURE.md. They are checked on the source, so that an import inside a function counts too.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker_service.config import ATTENTION_BACKENDS

ROOT = Path(__file__).parents[2]
# These are links to folders of the top level, whose names are not ours to install.
LINKED = ("pagewire.kernels", "pagewire.protos")
PACKAGES = ("scheduler_service", "worker_service", "pagewire/kernels", "pagewire")
OURS = ("scheduler_service", "worker_service", "pagewire", "bench", "models", "tests")
MAX_FUNCTION_LINES = 60
MAX_MODULES = 20  # of a folder
MAX_PARAMETERS = 12  # of a function of the worker, and of a kernel

# What serves clients may import of ours, whatever the protocol.
PUBLIC_IMPORTS = (
    "scheduler_service.core",
    "scheduler_service.serving",
    "scheduler_service.rpc.public",
    "scheduler_service.rpc.tenants",
    "scheduler_service.rpc.status",
    "pagewire.protos.gen.pagewire.scheduler",
)
# What the modules under a prefix may import of ours. The longest prefix that fits a module decides; a module that fits
# none may import anything. A service's `server` composes it: it may import all of its own service.
ALLOWED_IMPORTS = {
    "pagewire.kernels": ("pagewire.kernels",),
    "pagewire.transport": ("pagewire.transport",),
    "scheduler_service": ("scheduler_service", "pagewire.transport", "pagewire.__version__"),
    "scheduler_service.core": ("scheduler_service.core",),
    "scheduler_service.serving": ("scheduler_service.core", "scheduler_service.serving"),
    # What several of the packages beside it need, and no more.
    "scheduler_service.rpc": ("scheduler_service.rpc.status", "pagewire.protos.gen.pagewire.scheduler"),
    "scheduler_service.rpc.worker": (
        "scheduler_service.core",
        "scheduler_service.serving",
        "scheduler_service.rpc.worker",
        "scheduler_service.rpc.waiting",
        "pagewire.transport",
        "pagewire.protos.gen.pagewire.worker",
    ),
    "scheduler_service.rpc.tenants": (
        "scheduler_service.core",
        "scheduler_service.serving",
        "scheduler_service.rpc.tenants",
        "scheduler_service.rpc.status",
    ),
    "scheduler_service.rpc.public": (*PUBLIC_IMPORTS, "scheduler_service.rpc.trace_context"),
    "scheduler_service.rpc.vllm": (*PUBLIC_IMPORTS, "scheduler_service.rpc.vllm"),
    "scheduler_service.rpc.front_end": (
        *PUBLIC_IMPORTS,
        "scheduler_service.rpc.front_end",
        "scheduler_service.rpc.trace_context",
        "scheduler_service.rpc.waiting",
    ),
    "worker_service": ("worker_service", "pagewire.transport", "pagewire.__version__"),
    "worker_service.rpc": (
        "worker_service.step",
        "worker_service.session",
        "worker_service.engine",
        "worker_service.rpc",
        "pagewire.protos.gen.pagewire.worker",
        "pagewire.transport",
    ),
    "worker_service.startup": ("worker_service", "pagewire.kernels.cpu"),
    "worker_service.step": (),
    "worker_service.session": ("worker_service.step",),
    "worker_service.models": ("worker_service.models", "pagewire.kernels.arguments"),
    "worker_service.models.checkpoint": ("worker_service.models.checkpoint_files",),
    "worker_service.models.checkpoint_files": (),
    "worker_service.attention": (
        "worker_service.attention",
        "worker_service.config.ATTENTION_BACKENDS",
        "worker_service.models.model",
        "pagewire.kernels",
    ),
    "worker_service.rows": ("worker_service.rows", "worker_service.session", "worker_service.step", "pagewire.kernels"),
    "worker_service.host": (
        "worker_service.host",
        "worker_service.rows",
        "worker_service.attention",
        "worker_service.models",
        "worker_service.engine",
        "worker_service.step",
        "pagewire.kernels",
    ),
    "worker_service.device": (
        "worker_service.device",
        "worker_service.rows",
        "worker_service.attention",
        "worker_service.models",
        "worker_service.engine",
        "worker_service.step",
        "pagewire.kernels",
    ),
    "worker_service.cache": (
        "worker_service.cache",
        "worker_service.device",
        "worker_service.attention",
        "worker_service.session",
        "worker_service.step",
        "pagewire.kernels",
    ),
    "worker_service.runner": (
        "worker_service.cache",
        "worker_service.device",
        "worker_service.rows",
        "worker_service.models.communicator",
        "worker_service.engine",
        "worker_service.session",
        "worker_service.step",
    ),
    "pagewire": ("pagewire", "scheduler_service", "worker_service", "pagewire.protos.gen.pagewire.scheduler"),
}
# Packages whose `__init__` names all that others may use, and modules beside it that load what is not always there.
DOORS = tuple(f"worker_service.{name}" for name in ("attention", "cache", "device", "host", "rows"))
SIDE_DOORS = ("worker_service.attention.cached_attend",)
# The only modules of a service that may import its rpc package from outside it.
COMPOSERS = ("scheduler_service.server", "scheduler_service.front_end", "worker_service.server")
# The standard library of the core: nothing that does I/O, tells the time, draws at random or runs beside it.
CORE_DENIED = {"asyncio", "datetime", "os", "pathlib", "random", "secrets", "socket", "subprocess", "threading", "time"}
# What only `rpc` speaks, wherever it is installed from.
TRANSPORT = {"grpc", "google", "grpc_health", "grpc_reflection", "smg_grpc_proto"}
DENIED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
DENIED_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    return sorted(path.relative_to(ROOT) for path in found)


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what is imported: `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def is_allowed(name: str, allowed: tuple[str, ...]) -> bool:
    """Whether a name is under one of the prefixes. What is linked into `pagewire` has to be allowed by its own name."""
    linked = next((link for link in LINKED if is_under(name, link)), "")
    return any(is_under(name, prefix) and is_under(prefix, linked or prefix) for prefix in allowed)


def forbidden_imports(module: str, imported: list[str]) -> list[str]:
    rules = [prefix for prefix in ALLOWED_IMPORTS if is_under(module, prefix)]
    if not rules:
        return []
    allowed = ALLOWED_IMPORTS[max(rules, key=len)]
    ours = [name for name in imported if name.split(".")[0] in OURS]
    forbidden = [name for name in ours if not is_allowed(name, allowed)]
    service = module.split(".")[0]
    if module not in COMPOSERS and not is_under(module, f"{service}.rpc"):
        forbidden += [name for name in ours if is_under(name, f"{service}.rpc")]
    return forbidden


every_source = pytest.mark.parametrize("path", sources(*PACKAGES, "bench", "models"), ids=str)


@every_source
def test_imports_keep_to_the_boundaries(path: Path) -> None:
    assert forbidden_imports(module_name(path), list(imports(parse(path)))) == []


def test_boundaries_are_noticed_when_they_break() -> None:
    assert forbidden_imports("pagewire.kernels.cpu.attention", ["worker_service.step"])
    assert forbidden_imports("scheduler_service.core.scheduler", ["scheduler_service.rpc.worker.wire"])
    assert forbidden_imports("scheduler_service.core.scheduler", ["pagewire.protos.gen.pagewire.worker.v1.worker_pb2"])
    assert forbidden_imports("scheduler_service.serving.step_loop", ["scheduler_service.rpc.worker.worker_link"])
    assert forbidden_imports("scheduler_service.rpc.worker.wire", ["scheduler_service.rpc.public.intake"])
    assert forbidden_imports("scheduler_service.rpc.public.intake", ["scheduler_service.rpc.front_end.scheduler_link"])
    assert forbidden_imports("scheduler_service.rpc.status", ["scheduler_service.rpc.public.intake"])
    assert forbidden_imports("scheduler_service.core.scheduler", ["pagewire.transport.addresses"])
    assert forbidden_imports("scheduler_service.metrics", ["worker_service.step"])
    assert forbidden_imports("scheduler_service.server", ["pagewire.supervisor"])
    assert forbidden_imports("worker_service.server", ["pagewire.logs"])
    assert forbidden_imports("pagewire.transport.health", ["pagewire.supervisor"])
    assert forbidden_imports("pagewire.transport.health", ["worker_service.step"])
    assert forbidden_imports("pagewire.transport.health", ["pagewire.protos.gen.pagewire.worker.v1.worker_pb2"])
    assert forbidden_imports("worker_service.profile", ["worker_service.rpc.wire"])
    assert forbidden_imports("worker_service.runner", ["worker_service.host.HostComputation"])
    assert forbidden_imports("pagewire.client", ["pagewire.protos.gen.pagewire.worker.v1.worker_pb2"])
    assert forbidden_imports("pagewire.client", ["pagewire.kernels.sampling"])
    assert not forbidden_imports("pagewire.client", ["pagewire.protos.gen.pagewire.scheduler.v1.scheduler_pb2"])
    assert not forbidden_imports(
        "scheduler_service.server", ["scheduler_service.rpc.worker.wire", "scheduler_service.core.plan"]
    )


def around_doors(module: str, imported: list[str]) -> list[str]:
    """What is imported from inside a package, though the package has a door."""
    allowed = tuple(door for door in DOORS if is_under(module, door)) + SIDE_DOORS
    return [
        name
        for name in imported
        if any(is_under(name, door) and name.count(".") > door.count(".") + 1 for door in DOORS)
        and not any(is_under(name, prefix) for prefix in allowed)
    ]


def test_packages_are_entered_by_their_doors() -> None:
    found = {path: around_doors(module_name(path), list(imports(parse(path)))) for path in sources(*PACKAGES, "bench")}
    assert not {path: names for path, names in found.items() if names}
    assert around_doors("worker_service.runner", ["worker_service.rows.table.SequenceTable"])
    assert not around_doors("worker_service.runner", ["worker_service.rows.SequenceTable"])


def test_every_attention_backend_has_a_name_and_a_module() -> None:
    folder = ROOT / "worker_service" / "attention" / "backends"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(ATTENTION_BACKENDS)


def rooms(service: str) -> dict[str, set[str]]:
    """Packages and modules right under a service, and which of the others each imports."""
    found: dict[str, set[str]] = {}
    for path in sources(service):
        module = module_name(path)
        if module != service:
            room = module.split(".")[1]
            inside = (name.split(".")[1] for name in imports(parse(path)) if is_under(name, service) and "." in name)
            found.setdefault(room, set()).update(name for name in inside if name != room)
    return found


def test_the_workers_rooms_stand_on_one_another() -> None:
    """No two of its packages need each other, and the whole can be read from below."""
    left = rooms("worker_service")
    assert len(left) <= 20
    levels = 0
    while left:
        ground = {room for room, needed in left.items() if not needed & left.keys()}
        assert ground, f"these import one another: {left}"
        left = {room: needed for room, needed in left.items() if room not in ground}
        levels += 1
    assert levels <= 8


@pytest.mark.parametrize("path", sources(*PACKAGES, "protos/gen", "bench", "models", "tests"), ids=str)
def test_folders_linked_into_the_package_are_imported_from_there(path: Path) -> None:
    """PyPI has a package `kernels`, which transformers uses."""
    assert not [name for name in imports(parse(path)) if name.split(".")[0] in {"kernels", "protos"}]


@pytest.mark.parametrize("path", sources("scheduler_service/core"), ids=str)
def test_core_is_pure(path: Path) -> None:
    outside = {name.split(".")[0] for name in imports(parse(path))} - {"scheduler_service", "xxhash"}
    assert outside <= sys.stdlib_module_names
    assert not outside & CORE_DENIED


@pytest.mark.parametrize("path", sources("scheduler_service/serving"), ids=str)
def test_serving_knows_nothing_of_the_wire(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(parse(path))} & TRANSPORT


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@every_source
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first_line = node.body[0].lineno if is_kernel(node) else node.lineno  # of a kernel, the body counts
            num_lines = node.end_lineno - first_line + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno}: {node.name} has {num_lines} lines"


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[str]:
    """All of them, defaults and constexprs included, but for the object that a method is called on."""
    found = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in found if name not in {"self", "cls"}]


@pytest.mark.parametrize("path", sources("pagewire/kernels", "worker_service"), ids=str)
def test_functions_take_few_parameters(path: Path) -> None:
    """What belongs together goes together, down to the kernels: a tuple counts once, whatever it holds."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names = parameters(node)
            assert len(names) <= MAX_PARAMETERS, f"{path}:{node.lineno} has {len(names)}: {', '.join(names)}"


def test_parameters_of_every_kind_are_counted() -> None:
    (node,) = ast.parse("def f(self, a, /, b, c=1, *, D: tl.constexpr, e=2): ...").body
    assert isinstance(node, ast.FunctionDef)
    assert parameters(node) == ["a", "b", "c", "D", "e"]


@pytest.mark.parametrize("path", sources("pagewire/kernels"), ids=str)
def test_kernels_do_not_read_the_environment(path: Path) -> None:
    """Whoever calls them says what they need to know."""
    tree = parse(path)
    assert not {"os.environ", "os.getenv"} & {
        ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    assert not {"os.environ", "os.getenv"} & set(imports(tree))


@pytest.mark.parametrize("path", sources("pagewire/kernels/triton"), ids=str)
def test_functions_around_kernels_are_typed(path: Path) -> None:
    """mypy cannot ask for it here, since kernels have no types."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef) and not is_kernel(node):
            assert node.returns is not None, f"{path}:{node.lineno}: {node.name}"
            arguments = [argument for argument in (*node.args.args, *node.args.kwonlyargs) if argument.arg != "self"]
            assert all(argument.annotation is not None for argument in arguments), f"{path}:{node.lineno}: {node.name}"


@pytest.mark.parametrize("path", sources("pagewire/kernels/triton"), ids=str)
def test_nothing_is_tuned_while_the_engine_runs(path: Path) -> None:
    decorators = [
        ast.unparse(decorator)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    ]
    assert not [decorator for decorator in decorators if "autotune" in decorator or "heuristics" in decorator]


def test_folders_are_small() -> None:
    """Nobody finds their way among many files of one level."""
    modules = [path for path in sources("scheduler_service", "pagewire/kernels") if path.stem != "__init__"]
    sizes = Counter(path.parent for path in modules)
    assert not {folder: size for folder, size in sizes.items() if size > MAX_MODULES}


@every_source
def test_modules_are_nouns(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}


@every_source
def test_nothing_runs_what_it_reads(path: Path) -> None:
    tree = parse(path)
    assert not {name.split(".")[0] for name in imports(tree)} & DENIED_MODULES
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & DENIED_CALLS


def loaded_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after running `code`."""
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


def test_the_client_loads_no_service() -> None:
    assert not loaded_after("import pagewire") & {*HEAVY, "scheduler_service", "worker_service", "pagewire.kernels"}


def test_the_gateways_process_loads_no_service() -> None:
    assert not loaded_after("import pagewire.gateway_process") & {*HEAVY, "scheduler_service", "worker_service"}


def test_no_module_is_there_twice() -> None:
    places: dict[str, list[Path]] = {}
    for path in sources(*PACKAGES):
        places.setdefault((ROOT / path).read_text(encoding="utf-8"), []).append(path)
    assert not [paths for text, paths in places.items() if text and len(paths) > 1]


@pytest.mark.parametrize("verb", ["complete", "chat", "status", "scheduler", "frontend"])
def test_help_is_quick_to_load(verb: str) -> None:
    code = f"import pagewire.command\nassert pagewire.command.main(['{verb}', '--help']) == 0"
    assert not loaded_after(code) & HEAVY
