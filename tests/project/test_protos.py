"""Tests that the committed stubs and descriptor image match the protos, and that a breaking change would be
detected."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
SOURCES = sorted(path.relative_to(ROOT) for path in PROTOS.glob("pagewire/**/*.proto"))
BUF = Path(sys.executable).parent / "buf"

sources = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with newly generated stubs and descriptors, laid out like the repository."""
    folder = tmp_path_factory.mktemp("fresh")
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    outputs.append(f"--descriptor_set_out={folder / 'descriptors'}")
    sources = [str(source) for source in SOURCES]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ipagewire/protos/gen=protos", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def stub(source: Path, suffix: str) -> Path:
    """Return the path of the stub of `protos/pagewire/...`, relative to the root, and its module name."""
    return Path("pagewire/protos/gen", *source.parts[1:]).with_name(source.stem + suffix)


def without_json_names(file: FileDescriptorProto) -> FileDescriptorProto:
    """Return a descriptor without `json_name`. The names follow from the field names, and generators differ in them."""

    def clear(message: DescriptorProto) -> None:
        for field in message.field:
            field.ClearField("json_name")
        for nested in message.nested_type:
            clear(nested)

    for message in file.message_type:
        clear(message)
    return file


@sources
def test_committed_messages_are_fresh(source: Path, fresh: Path) -> None:
    files = FileDescriptorSet.FromString((fresh / "descriptors").read_bytes()).file
    (expected,) = [file for file in files if file.name == str(stub(source, ".proto"))]
    module = importlib.import_module(".".join(stub(source, "_pb2").parts))
    committed = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    assert without_json_names(committed) == without_json_names(expected)


@sources
def test_committed_services_are_fresh(source: Path, fresh: Path) -> None:
    def methods(path: Path) -> str:
        # The text without the generator's version and its style of class declarations.
        text = re.sub(r"^GRPC_GENERATED_VERSION = .*$", "", path.read_text(), flags=re.MULTILINE)
        return text.replace("(object):", ":")

    path = stub(source, "_pb2_grpc.py")
    assert methods(ROOT / path) == methods(fresh / path)


@sources
def test_committed_types_are_fresh(source: Path, fresh: Path) -> None:
    def names(path: Path) -> list[tuple[str, str]]:
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        return [
            (node.name, statement.target.id)
            for node in classes
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        ]

    path = stub(source, "_pb2.pyi")
    assert names(ROOT / path)
    assert names(ROOT / path) == names(fresh / path)


def test_nothing_else_lies_among_the_stubs() -> None:
    expected = {stub(source, suffix) for source in SOURCES for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")}
    stubs = ROOT / "pagewire/protos/gen"
    found = {path.relative_to(ROOT) for path in stubs.rglob("*.py*") if "__pycache__" not in path.parts}
    assert found == expected


def test_protos_do_not_import_each_other() -> None:
    for source in SOURCES:
        assert "import " not in re.sub(r"//.*", "", (ROOT / source).read_text())


def buf(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BUF), *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_buf_lint() -> None:
    result = buf(PROTOS, "lint")
    assert result.returncode == 0, result.stdout + result.stderr


def test_descriptor_image_is_kept() -> None:
    result = buf(PROTOS, "breaking", "--against", "descriptors.binpb")
    assert result.returncode == 0, result.stdout + result.stderr


def test_descriptor_image_covers_every_field() -> None:
    """With an outdated image, the removal of a newer field would not be detected."""
    image = FileDescriptorSet.FromString((PROTOS / "descriptors.binpb").read_bytes())
    committed = {file.name: without_json_names(file) for file in image.file}
    for source in SOURCES:
        module = importlib.import_module(".".join(stub(source, "_pb2").parts))
        current = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        kept = committed[str(source.relative_to("protos"))]
        assert list(kept.message_type) == list(without_json_names(current).message_type)
        assert list(kept.enum_type) == list(current.enum_type)
        assert list(kept.service) == list(current.service)


@sources
def test_buf_breaking_notices_a_removed_field(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "protos"
    shutil.copytree(PROTOS, copy, ignore=shutil.ignore_patterns("gen"))
    path = copy / source.relative_to("protos")
    text = path.read_text()
    field = {"scheduler": "  repeated uint32 token_ids = 4;\n", "worker": "  bytes model_digest = 2;\n"}[source.stem]
    assert text.count(field) == 1
    path.write_text(text.replace(field, ""))
    result = buf(copy, "breaking", "--against", "descriptors.binpb")
    assert result.returncode == 100
    assert "was deleted" in result.stdout
