"""Tests of the images' content: the files of the build, the packages of the base install, and no torch for
schedulers."""

import contextlib
import http.client
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pagewire
from deploy.lock import LOCKS
from pagewire.hosting.supervisor import free_port
from tests.environments import closure_of, constraints, files_of_the_build, link, project, requirements_of
from tests.project.manifests import DEPLOY, ROOT, container_of, containers_of, pod_templates, rendered

pytestmark = pytest.mark.thorough

MODEL = ROOT / "models" / "storyteller"
IMAGES = ("scheduler", "worker")
PROBED = ("/version", "/health")  # liveness and readiness of a front end; test_schemas.py checks that probes use them


def instructions_of(image: str) -> list[tuple[str, str]]:
    text = (DEPLOY / f"Dockerfile.{image}").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, argument) for name, _, argument in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("image", IMAGES)
def test_image_runs_the_command_as_an_unprivileged_user(image: str) -> None:
    instructions = instructions_of(image)
    assert [argument for name, argument in instructions if name == "USER"] == ["10001:10001"]
    final = max(index for index, (name, _) in enumerate(instructions) if name == "FROM")
    assert all(name != "RUN" for name, _ in instructions[final:]), "what is built is built in an earlier stage"
    (entry,) = [
        shlex.split(argument.strip("[]").replace(",", " ")) for name, argument in instructions if name == "ENTRYPOINT"
    ]
    for component, template in pod_templates(rendered(DEPLOY / "overlays" / "gpu")):
        if component == image:
            container = container_of(template["spec"])
            assert container["command"][: len(entry)] == entry
            assert container["image"].partition(":")[0] == f"pagewire-{image}"
    assert f"-t pagewire-{image}:{pagewire.__version__}" in (DEPLOY / f"Dockerfile.{image}").read_text()


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_finds_nothing(image: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    command = [hadolint, "--no-color", DEPLOY / f"Dockerfile.{image}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_an_edit_of_a_source_installs_no_package_again(image: str) -> None:
    """The build repeats all steps from the first changed file on, so the sources are copied last, in a separate
    layer."""
    instructions = instructions_of(image)
    (installs,) = [
        index for index, (name, argument) in enumerate(instructions) if name == "RUN" and "--require-hashes" in argument
    ]
    copies = [(index, argument) for index, (name, argument) in enumerate(instructions) if name == "COPY"]
    before = [argument for index, argument in copies if index < installs]
    assert all(source.endswith(".lock") for argument in before for source in argument.split()[:-1])
    sources = [index for index, argument in copies if argument == ". /src"]
    assert sources == [index for index in sources if index > installs]
    layers = [argument for index, argument in copies if argument.startswith("--from=")]
    expected = ["--from=dependencies /opt/pagewire /opt/pagewire", "--from=package /opt/package /opt/pagewire"]
    assert layers == expected


@pytest.mark.parametrize("image", IMAGES)
def test_the_base_image_is_an_argument_and_no_processor_is_named(image: str) -> None:
    instructions = instructions_of(image)
    assert instructions[0] == ("ARG", "PYTHON_IMAGE=python:3.11-slim")
    bases = [argument.split()[0] for name, argument in instructions if name == "FROM"]
    stages = {argument.split()[-1] for name, argument in instructions if name == "FROM" and " AS " in argument}
    assert set(bases) - stages == {"${PYTHON_IMAGE}"}, "a tag or a digest"
    text = (DEPLOY / f"Dockerfile.{image}").read_text()
    assert not re.search(r"amd64|x86|arm64|aarch64|--platform", text)


def locked(name: str) -> dict[str, str]:
    """Return the packages of a lock file with their versions. Asserts that every package has a hash."""
    text = (DEPLOY / "requirements" / f"{name}.lock").read_text()
    versions = {}
    for entry in re.split(r"\n(?=[a-z])", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)):
        requirement = Requirement(entry.partition("\\")[0].strip())
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), requirement.name
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        # Some packages have different versions for each Python; the images' Python counts.
        if requirement.marker is None or requirement.marker.evaluate(PYTHON_OF_IMAGES):
            versions[canonicalize_name(requirement.name)] = specifier.version
    return versions


PYTHON_OF_IMAGES = {"python_version": "3.11", "python_full_version": "3.11.14"}
LOCKED = (*LOCKS, "worker-cpu")


@pytest.mark.parametrize("lock", LOCKED)
def test_lock_pins_what_the_project_names(lock: str) -> None:
    """If this test fails after a change of pyproject.toml, run `make lock`."""
    versions = locked(lock)
    for requirement in requirements_of(*LOCKS[lock.removesuffix("-cpu")]):
        name = canonicalize_name(requirement.name)
        if (lock, name) != ("worker-cpu", "torch"):
            assert requirement.specifier.contains(versions[name]), name


@pytest.mark.parametrize("lock", [*LOCKED, "build"])
def test_images_have_the_versions_that_are_tested(lock: str) -> None:
    # torch determines the version of triton, so it is no constraint.
    assert locked(lock).items() - {("triton", locked("worker")["triton"])} <= constraints().items()


def test_constraints_are_of_what_the_project_names() -> None:
    tested = constraints()
    named = [*requirements_of("dev"), Requirement(project()["build-system"]["requires"][0])]
    for requirement in named:
        if requirement.name != "triton":
            assert requirement.specifier.contains(tested[canonicalize_name(requirement.name)]), requirement


def test_lock_of_the_cpu_image_is_the_workers_without_cuda() -> None:
    worker, cpu = locked("worker"), locked("worker-cpu")
    assert cpu.items() <= worker.items()
    left_out = set(worker) - set(cpu)
    assert "torch" in left_out
    assert not [name for name in left_out if not re.match("nvidia-|cuda-|triton$|torch$", name)]
    assert not [name for name in cpu if re.match("nvidia|cuda|triton", name)]
    (pinned,) = re.findall(r" torch==(\S+)", (DEPLOY / "Dockerfile.worker").read_text())
    assert pinned == worker["torch"]


# Bytes on disk of python:3.11-slim, and of gcc with libc6-dev on Debian 12, rounded up.
PYTHON_IMAGE_BYTES, COMPILER_BYTES = 150e6, 200e6


def test_cpu_image_is_below_1500_megabytes() -> None:
    """The size is estimated from the packages installed here, which have a CPU build of torch."""
    if "+cpu" not in metadata.version("torch"):
        pytest.skip("torch is here with CUDA, the CPU image has it without")
    installed = closure_of(requirements_of(*LOCKS["worker"]))
    files = [file.locate() for distribution in installed for file in distribution.files or [] if ".." not in file.parts]
    own = sum((ROOT / path).stat().st_size for path in files_of_the_build())
    size = sum(file.stat().st_size for file in files if file.exists()) + own + PYTHON_IMAGE_BYTES + COMPILER_BYTES
    print(f"{size / 1e9:.2f} GB")
    assert size < 1.5e9


def test_triton_needs_the_compiler_when_it_runs() -> None:
    """This is the reason in Dockerfile.worker for a compiler in the CUDA image."""
    driver = Path(str(metadata.distribution("triton").locate_file("triton/backends/nvidia"))) / "driver.py"
    source = driver.read_text()
    assert "driver.c" in source
    assert "compile_module_from" in source
    assert "libcuda.so.1" in source, "which only the node has"


def test_worker_image_has_a_compiler() -> None:
    (command,) = [argument for name, argument in instructions_of("worker") if name == "RUN" and "apt-get" in argument]
    assert {"gcc", "libc6-dev"} <= set(shlex.split(command))
    stages = [argument.split() for name, argument in instructions_of("worker") if name == "FROM"]
    assert stages[-1] == [stages[-2][-1]], "the last stage builds on the one that has the compiler"


def test_images_see_everything_that_the_package_needs() -> None:
    packages = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    seen = {path.parts[0] for path in files_of_the_build()}
    linked = {path.name for path in (ROOT / "pagewire").iterdir() if path.is_symlink()}
    assert linked == {"kernels", "storyteller"}
    assert seen == {"pyproject.toml", "README.md", "LICENSE"} | {name.strip("*") for name in packages} | {
        "kernels",
        "protos",
        "models",
    }
    assert {path.parent for path in files_of_the_build() if path.parts[0] == "models"} == {Path("models/storyteller")}


@pytest.fixture(scope="module")
def image_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with exactly the packages of the scheduler's image.

    Pagewire is built and installed from the files of the image's build. Its dependencies are this environment's
    packages, so that no package index is needed.
    """
    folder = tmp_path_factory.mktemp("image")
    for path in files_of_the_build():
        target = folder / "src" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target, follow_symlinks=False)
    venv.create(folder / "venv", with_pip=False)
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    for distribution in closure_of(requirements_of(*LOCKS["scheduler"])):
        link(distribution, site_packages)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--disable-pip-version-check", "-q"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(site_packages), str(folder / "src")]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "venv" / "bin" / "python"


def test_files_of_the_image_install(image_python: Path) -> None:
    (site_packages,) = image_python.parents[1].glob("lib/python*/site-packages")
    code = {path for path in files_of_the_build() if path.suffix in (".py", ".c", ".h", ".proto", ".typed")}
    linked = ("kernels", "protos")
    installed = {Path("pagewire", path) if path.parts[0] in linked else path for path in code}
    missing = {path for path in installed if not (site_packages / path).exists()}
    assert not missing
    bundled = {path.name: (site_packages / "pagewire" / "storyteller" / path.name) for path in MODEL.iterdir()}
    assert all(path.read_bytes() == (MODEL / name).read_bytes() for name, path in bundled.items())


def status_of(port: int, path: str) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


@pytest.mark.parametrize(("verb", "peer"), [("scheduler", "--worker"), ("frontend", "--scheduler")])
def test_a_service_starts_in_the_image_without_torch(image_python: Path, tmp_path: Path, verb: str, peer: str) -> None:
    """Without the service to which it connects, it is alive but not ready."""
    port, http_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    program = (
        "import sys, importlib.util; from pagewire.cli.command import main\n"
        "assert not any(map(importlib.util.find_spec, ('torch', 'numpy', 'transformers')))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    flags = ["--model", str(MODEL), "--port", str(port), "--metrics-port", "0", peer, "127.0.0.1:1"]
    flags += [f"--http-port={http_port}"] if verb == "frontend" else []
    command = [str(image_python), "-I", "-c", program, verb, *flags]
    process = subprocess.Popen(command, cwd=tmp_path, env={"HOME": str(tmp_path)}, stderr=subprocess.PIPE)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="liveness")
            answer = stub.Check(request, timeout=20, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        if verb == "frontend":
            assert [status_of(http_port, path) for path in PROBED] == [200, 503]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_images_of_the_manifests_have_dockerfiles() -> None:
    named = set()
    for overlay in DEPLOY.glob("overlays/*"):
        for _, template in pod_templates(rendered(overlay)):
            named |= {container["image"].rpartition(":")[0] for container in containers_of(template["spec"])}
    # The image that copies from buckets and the router's image are other projects'.
    assert named == {f"pagewire-{image}" for image in IMAGES} | {"rclone/rclone", "lightseekorg/smg"}
